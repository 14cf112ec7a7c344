"""Files and folders of a run: written whole, and by one command at a time."""

from __future__ import annotations

import contextlib
import fcntl
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetspec_jax.config import ConfigError
from jetspec_jax.files.output import whole as whole
from jetspec_jax.files.output import write as write


@contextlib.contextmanager
def alone(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Holds the folder, for what `name` stands for, until the block or the process ends.

    Raises:
      ConfigError: another command holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another command is at work in it; wait for it, or use another folder"
            ) from None
        yield


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, one key a line."""
    write(path, json.dumps(value, indent=1) + "\n")
