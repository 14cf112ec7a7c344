"""The scorer of a head on disk: a folder in the head's, which engines that know the published format pass over.

HEAD/scorer/config.json         {"version": 1, "kind": "embeddings", "rank": R, "head_fingerprint": ...}
HEAD/scorer/model.safetensors   parent, gate, child, each [E, R]
"""

from __future__ import annotations

import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from jetspec_jax.config import MOST_SIZE
from jetspec_jax.drafts import scorer
from jetspec_jax.fields import ConfigError, Fields, shown
from jetspec_jax.files import checkpoint, text

FOLDER, VERSION, KIND = "scorer", 1, "embeddings"


def rank(head: pathlib.Path) -> int:
    """Returns the rank of the scorer in a head's folder, 0 where there is none.

    Raises:
      ConfigError: it is of another version or kind, or belongs to another head.
    """
    path = head / FOLDER / "config.json"
    if not path.is_file():
        return 0
    fields = Fields(text.read_json(path), str(path))
    if fields.whole("version", 0) != VERSION or fields.text("kind") != KIND:
        found = f"version {shown(fields.raw.get('version'))}, kind {shown(fields.raw.get('kind'))}"
        raise ConfigError(f"{path}: {found}; known is version {VERSION}, {KIND}; move {path.parent} away")
    found, own = fields.text("head_fingerprint"), checkpoint.fingerprint(checkpoint.Folder(head).files)
    if found != own:
        raise ConfigError(f"{path}: the scorer of another head ({found}, this one is {own}); move {path.parent} away")
    return fields.whole("rank", 1, MOST_SIZE)


def read(head: pathlib.Path, width: int, size: int, dtype: Any) -> dict[str, jax.Array]:
    """Returns the parameters of a scorer.

    Args:
      head: folder of the head.
      width: hidden size E.
      size: rank R, as `rank` says it.
      dtype: of the parameters.

    Raises:
      ConfigError: a tensor is missing or has another shape.
    """
    folder = checkpoint.Folder(head / FOLDER)
    found = {}
    for name, shape in scorer.shapes(width, size, dtype).items():
        stored = folder.shapes.get(name)
        if stored is None or tuple(stored) != shape.shape:
            there = "is missing" if stored is None else f"has shape {list(stored)}"
            raise ConfigError(f"{head / FOLDER}: {name} {there}; {list(shape.shape)} is needed")
        found[name] = jnp.asarray(np.asarray(folder.read(name)).astype(shape.dtype))
    return found


def save(head: str | os.PathLike, params: dict[str, jax.Array]) -> None:
    """Writes a scorer beside the head that a folder holds; dtype is that of the parameters."""
    folder = pathlib.Path(head) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.asarray(x) for name, x in params.items()}, folder / "model.safetensors", {"format": "pt"})
    made_for = checkpoint.fingerprint(checkpoint.Folder(pathlib.Path(head)).files)
    said = {"version": VERSION, "kind": KIND, "rank": params["child"].shape[1], "head_fingerprint": made_for}
    (folder / "config.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
