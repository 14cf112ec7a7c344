"""The scorer of a head on disk: a folder in the head's, which engines that know the published format pass over.

HEAD/scorer/config.json         {"version": 1, "kind": "product", "rank": R, "head_fingerprint": ...}
HEAD/scorer/model.safetensors   parent, gate, child, each [E, R]

or another kind, with the tensors that its file in `drafts` names:

swiglu, with "width": I         slot, parent [E, 2 I], down [I, R], child [E, R]
pairs                           parent, child, each [E, R]
markov                          w1, w2, each [V, R]
counts                          next [V, R] int32, lift [V, R] int16, strength [D] f32
"""

from __future__ import annotations

import json
import os
import pathlib
import stat
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from safetensors.numpy import save_file

from jetspec_jax.config import MOST_SIZE, HeadConfig
from jetspec_jax.drafts import scorer
from jetspec_jax.fields import ConfigError, Fields, shown
from jetspec_jax.files import checkpoint, text
from jetspec_jax.models.names import Fusion

FOLDER, VERSION = "scorer", 1


def sizes(head: pathlib.Path) -> dict[str, Any]:
    """Returns kind, rank and width of the scorer in a head's folder, as `config.HeadConfig` names them; {}: none.

    Raises:
      ConfigError: it is of another version or kind, belongs to another head, or was not written to its end.
    """
    if not os.path.lexists(head / FOLDER):
        return {}
    path = head / FOLDER / "config.json"
    fields = Fields(text.read_json(path), str(path))
    kind = fields.text("kind")
    if fields.whole("version", 0) != VERSION or kind not in scorer.KINDS:
        found = f"version {shown(fields.raw.get('version'))}, kind {shown(fields.raw.get('kind'))}"
        known = f"known is version {VERSION}, one of {', '.join(scorer.KINDS)}"
        raise ConfigError(f"{path}: {found}; {known}; move {path.parent} away")
    found, own = fields.text("head_fingerprint"), checkpoint.fingerprint(checkpoint.Folder(head).files)
    if found != own:
        raise ConfigError(f"{path}: the scorer of another head ({found}, this one is {own}); move {path.parent} away")
    width = fields.whole("width", 1, MOST_SIZE) if kind == "swiglu" else 0
    return {"scorer_kind": kind, "scorer_rank": fields.whole("rank", 1, MOST_SIZE), "scorer_width": width}


def read(
    head: pathlib.Path,
    config: HeadConfig,
    shapes: dict[str, Any],
    warn: Callable[[str], None],
    lies: dict[str, Any] | None = None,
) -> dict[str, jax.Array]:
    """Returns the parameters of a scorer.

    Args:
      head: folder of the head.
      config: of the head.
      shapes: of the parameters, as `drafts.scorer.shapes` has them.
      warn: says which tensors are of no use.
      lies: how each parameter lies on several devices; None is one device.

    Raises:
      ConfigError: a tensor is missing, has another shape, belongs to another kind, or does not fit the dtype.
    """
    path, tensors = str(head / FOLDER), checkpoint.Folder(head / FOLDER)
    as_it_is = {name: Fusion(((name,),), (shape.shape[:1],), matrix=False) for name, shape in shapes.items()}
    checkpoint.need(tensors, as_it_is, path)
    others = set().union(*(module.NAMES for module in scorer.KINDS.values())) - shapes.keys()
    if foreign := sorted(others & tensors.shapes.keys()):  # a gate that is passed over would leave another scorer
        raise ConfigError(f"{path}: {', '.join(foreign)} is of another kind than {config.scorer}; move {path} away")
    return checkpoint.assemble(tensors, as_it_is, shapes, path, warn, lies)


def save(head: str | os.PathLike, params: Mapping[str, jax.Array | np.ndarray]) -> None:
    """Writes a scorer beside the head that a folder holds; dtype is that of the parameters."""
    folder = pathlib.Path(head) / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    weights, about = folder / "model.safetensors", folder / "config.json"
    save_file({name: np.asarray(x) for name, x in params.items()}, weights, {"format": "pt"})
    made_for = checkpoint.fingerprint(checkpoint.Folder(pathlib.Path(head)).files)
    kind = scorer.kind(params)
    inner = {"width": params["down"].shape[0]} if kind == "swiglu" else {}
    rank = params[{"markov": "w2", "counts": "next"}.get(kind, "child")].shape[1]
    said = {"version": VERSION, "kind": kind} | inner | {"rank": rank, "head_fingerprint": made_for}
    about.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    weights.chmod(stat.S_IMODE(about.stat().st_mode))  # safetensors lets nobody but the owner read
