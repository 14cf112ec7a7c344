"""The scorer of a head on disk: a folder in the head's, which engines that know the published format pass over.

HEAD/scorer/config.json         {"version": 1, "kind": "product", "rank": R, "head_fingerprint": ...}
HEAD/scorer/model.safetensors   parent, gate, child, each [E, R]

or kind "swiglu" with "width": I, and slot, parent [E, 2 I], down [I, R], child [E, R].
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jetspec_jax.config import MOST_SIZE
from jetspec_jax.fields import ConfigError, Fields, shown
from jetspec_jax.files import checkpoint, text
from jetspec_jax.models.names import Fusion

FOLDER, VERSION, KINDS = "scorer", 1, ("product", "swiglu")


def sizes(head: pathlib.Path) -> tuple[int, int]:
    """Returns rank and width of the scorer in a head's folder, as `config.HeadConfig` has them; 0, 0: there is none.

    Raises:
      ConfigError: it is of another version or kind, belongs to another head, or was not written to its end.
    """
    if not os.path.lexists(head / FOLDER):
        return 0, 0
    path = head / FOLDER / "config.json"
    fields = Fields(text.read_json(path), str(path))
    kind = fields.text("kind")
    if fields.whole("version", 0) != VERSION or kind not in KINDS:
        found = f"version {shown(fields.raw.get('version'))}, kind {shown(fields.raw.get('kind'))}"
        raise ConfigError(f"{path}: {found}; known is version {VERSION}, {' or '.join(KINDS)}; move {path.parent} away")
    found, own = fields.text("head_fingerprint"), checkpoint.fingerprint(checkpoint.Folder(head).files)
    if found != own:
        raise ConfigError(f"{path}: the scorer of another head ({found}, this one is {own}); move {path.parent} away")
    width = fields.whole("width", 1, MOST_SIZE) if kind == "swiglu" else 0
    return fields.whole("rank", 1, MOST_SIZE), width


def read(
    head: pathlib.Path, shapes: dict[str, Any], warn: Callable[[str], None], lies: dict[str, Any] | None = None
) -> dict[str, jax.Array]:
    """Returns the parameters of a scorer.

    Args:
      head: folder of the head.
      shapes: of the parameters, as `drafts.scorer.shapes` has them.
      warn: says which tensors are of no use.
      lies: how each parameter lies on several devices; None is one device.

    Raises:
      ConfigError: a tensor is missing, has another shape, or does not fit the dtype.
    """
    as_it_is = {name: Fusion(((name,),), (shape.shape[:1],), matrix=False) for name, shape in shapes.items()}
    return checkpoint.assemble(checkpoint.Folder(head / FOLDER), as_it_is, shapes, str(head / FOLDER), warn, lies)


def save(head: str | os.PathLike, params: dict[str, jax.Array]) -> None:
    """Writes a scorer beside the head that a folder holds; dtype is that of the parameters."""
    folder = pathlib.Path(head) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: np.asarray(x) for name, x in params.items()}, folder / "model.safetensors", {"format": "pt"})
    made_for = checkpoint.fingerprint(checkpoint.Folder(pathlib.Path(head)).files)
    inner = {"kind": "swiglu", "width": params["down"].shape[0]} if "down" in params else {"kind": "product"}
    said = {"version": VERSION} | inner | {"rank": params["child"].shape[1], "head_fingerprint": made_for}
    (folder / "config.json").write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
