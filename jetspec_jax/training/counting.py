"""A scorer of counts (`drafts/counts.py`) beside a head that is there, out of the rows that training would take."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from jetspec_jax.config import ConfigError
from jetspec_jax.files import checkpoint, scorer_file
from jetspec_jax.training import files
from jetspec_jax.training.settings import Settings


def write(folder: Path, head: Path, found: dict[str, np.ndarray], settings: Settings, data: dict[str, Any]) -> None:
    """Copies a head as it is, and writes beside it the scorer and the settings that it was counted with.

    Args:
      folder: of the copy; may be that of the head itself.
      head: the folder that is copied.
      found: the scorer that the rows decide, in full strength.
      settings: of the run.
      data: counts of the rows, as the pipeline gathers them.

    Raises:
      ConfigError: the folder holds another head.
    """
    own = checkpoint.fingerprint(checkpoint.Folder(head).files)
    if not folder.exists():
        fresh = folder.with_name(f".{folder.name}")  # so that a copy that was cut off is none
        shutil.rmtree(fresh, ignore_errors=True)
        shutil.copytree(head, fresh, ignore=shutil.ignore_patterns(scorer_file.FOLDER))
        fresh.rename(folder)
    elif checkpoint.fingerprint(checkpoint.Folder(folder).files) != own:
        raise ConfigError(f"--config.init_head={settings.init_head}: {folder} holds another head; use a new --workdir")
    scorer_file.save(folder, found | {"strength": found["strength"] * np.float32(settings.scorer_strength)})
    values = {"config": dataclasses.asdict(settings), "data": data}
    files.write_json(folder / scorer_file.FOLDER / "training.json", values)
