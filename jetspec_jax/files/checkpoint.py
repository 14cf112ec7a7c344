"""Checkpoints in the published layout, in and out; `models.names` and a draft's family know the names of tensors.

Nothing in a checkpoint is ever executed: only safetensors, GGUF and JSON are read.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import pathlib
import shutil
import stat
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jetspec_jax.drafts import families
from jetspec_jax.fields import ConfigError, Fields, shown
from jetspec_jax.files import text
from jetspec_jax.models import sharding
from jetspec_jax.models.names import Fusion

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")  # never opened
HEAD_META = "jetspec.json"  # our own file beside a head: what a loader should check
FLOATS, WHOLES = ("F64", "F32", "F16", "BF16"), ("I64", "I32", "I16")
ONLY_FLOATS = "only unquantised floats are supported"
BORROWED = ("embed_tokens.weight", "lm_head.weight", "model.embed_tokens.weight")  # a head uses the target's


@runtime_checkable
class Source(Protocol):
    """Gives the named tensors of a checkpoint, one at a time."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, as stored."""

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor on the host."""


def assemble(
    source: Source,
    fusions: dict[str, Any],
    shapes: dict[str, Any],
    where: str,
    warn: Callable[[str], None] = lambda line: None,
    lies: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Fills `shapes` (parameters as ShapeDtypeStruct) from `source`, one parameter on the host at a time.

    Args:
      lies: how each parameter lies on several devices, a tree of NamedSharding; then one device's part of a parameter
        is on the host at a time, where the source can read parts. None is one device.

    Raises:
      ConfigError: tensors are missing or have another shape; nothing has been read then.
    """
    leaf = lambda x: isinstance(x, Fusion)
    need(source, fusions, where)
    pairs = jax.tree.map(lambda f, s: (f, s), fusions, shapes, is_leaf=leaf)
    flat = jax.tree.leaves(pairs, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], Fusion))
    needed = [name for fusion, _ in flat for name in fusion.names()]
    for fusion, shape in flat:
        columns = (shape.shape[int(fusion.stacked)],) if fusion.matrix else shape.shape[1:]
        for group in fusion.groups:
            for name, rows in zip(group, fusion.sizes, strict=True):
                if tuple(source.shapes[name]) != (rows, *columns):
                    raise ConfigError(
                        f"{where}: {name} has shape {list(source.shapes[name])}, but config.json asks for "
                        f"{[rows, *columns]}"
                    )
    unknown = sorted(set(source.shapes) - set(needed) - {n for n in source.shapes if n.endswith("rotary_emb.inv_freq")})
    if unknown:
        tied = " (tie_word_embeddings is true: the embedding is the lm_head)" if "lm_head.weight" in unknown else ""
        warn(f"{where}: {_count(unknown)} not used: {_list(unknown)}{tied}")

    def fill(fusion: Fusion, shape, to=None) -> jax.Array:
        if to is None:
            return jax.device_put(_cast(fusion.join(source.read), fusion, shape.dtype, where))
        cut = getattr(source, "part", None)
        if cut is None:
            whole = _cast(fusion.join(source.read), fusion, shape.dtype, where)
            return sharding.placed(shape.shape, to, lambda part: whole[part])
        return sharding.placed(shape.shape, to, lambda part: _cast(fusion.part(cut, part), fusion, shape.dtype, where))

    return jax.tree.map(fill, fusions, shapes, *([] if lies is None else [lies]), is_leaf=leaf)


def _cast(whole: np.ndarray, fusion: Fusion, dtype: np.dtype, where: str) -> np.ndarray:
    """Returns what was read in the dtype of its parameter; raises ConfigError where it does not fit."""
    if np.issubdtype(whole.dtype, np.integer) != np.issubdtype(dtype, np.integer):
        need = "whole numbers are needed" if np.issubdtype(dtype, np.integer) else ONLY_FLOATS
        raise ConfigError(f"{where}: {fusion.names()[0]} is stored as {whole.dtype}; {need}")
    with np.errstate(over="ignore"):  # said below
        cast = whole.astype(dtype)
    if np.issubdtype(dtype, np.integer) and not (cast == whole).all():
        odd = whole[cast != whole].flat[0]
        raise ConfigError(f"{where}: {fusion.names()[0]} holds {odd}, which is out of {dtype}'s range")
    if dtype == np.float16 and not (np.isfinite(cast) == np.isfinite(whole)).all():  # else it was broken before
        raise ConfigError(f"{where}: {fusion.names()[0]} does not fit float16; use dtype bfloat16 or float32")
    return cast


def need(source: Source, fusions: dict[str, Any], where: str) -> None:
    """Raises ConfigError where tensors are missing; the line says which, and what is there in their place.

    Asked before anything is built for them: a configuration may claim any number of layers.
    """
    names = [n for f in jax.tree.leaves(fusions, is_leaf=lambda x: isinstance(x, Fusion)) for n in f.names()]
    missing = [name for name in names if name not in source.shapes]
    if not missing:
        return
    instead = sorted(set(source.shapes) - set(names))
    packed = [name for name in instead if ".mlp.experts." in name]
    hint = ""
    if "lm_head.weight" in missing:
        hint = " (tie_word_embeddings is false, so lm_head.weight is needed)"
    elif packed and any(".mlp.experts." in name for name in missing):
        hint = f"; the experts are packed into {packed[0]}: give a checkpoint with the tensors of each expert apart"
    elif instead:
        hint = f"; there are others instead: {_list(instead, 3)}"
    raise ConfigError(f"{where}: {_count(missing)} missing: {_list(missing)}{hint}")


def need_layers(source: Source, prefix: str, layers: int, where: str) -> None:
    """Raises ConfigError where a configuration names far more layers than there are tensors for.

    One layer too many is left to `need`, which lists its tensors.
    """
    found = [name.removeprefix(prefix).split(".")[0] for name in source.shapes if name.startswith(prefix)]
    held = 1 + max((int(part) for part in found if part.isdecimal() and len(part) < 9), default=-1)
    if not held:
        raise ConfigError(f"{where}: no tensor's name begins with {prefix}; there are: {_list([*source.shapes], 3)}")
    if layers > held + 1:
        raise ConfigError(f"{where}: num_hidden_layers is {layers}, but there are tensors of {held} layers")


def disassemble(fusions: dict[str, Any], params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Returns the published tensors of a parameter tree, on the host."""
    tensors: dict[str, np.ndarray] = {}
    leaf = lambda x: isinstance(x, Fusion)
    jax.tree.map(lambda f, p: tensors.update(f.split(np.asarray(p))), fusions, params, is_leaf=leaf)
    return tensors


class Folder:
    """Reads the safetensors of a Hugging Face folder, one file or sharded with an index; implements `Source`.

    Raises:
      ConfigError: there are none, or a shard that the index names is missing or does not hold what the index says.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        weights = self._index()
        names = sorted(set(weights.values())) if weights else [SINGLE]
        for name in names:  # before anything is opened
            if not (folder / name).is_file():
                more = (
                    f"; {SINGLE} is there: delete the index if it is a stale one" if (folder / SINGLE).is_file() else ""
                )
                raise ConfigError(f"{folder / name}: the index names this shard, but there is no such file{more}")
        self.files = [folder / name for name in names]
        self._opened: dict[pathlib.Path, Any] = {}
        self._home: dict[str, pathlib.Path] = {}
        for path in self.files:
            text.open_regular(path).close()  # says in its own words what may not be read
            try:
                self._opened[path] = safe_open(path, framework="numpy")
            except (SafetensorError, OSError) as error:
                raise ConfigError(f"{path}: not a complete safetensors file ({error})") from None
            held = set(self._opened[path].keys())
            promised = {name for name, file in weights.items() if file == path.name} if weights else held
            if promised - held:
                raise ConfigError(f"{path}: the index says that {_list([*(promised - held)])} is in it, but it is not")
            self._home |= dict.fromkeys(held - {n for n in weights or {} if n not in promised}, path)
        self.shapes: dict[str, tuple[int, ...]] = {
            n: tuple(self._opened[p].get_slice(n).get_shape()) for n, p in self._home.items()
        }

    def _index(self) -> dict[str, str]:
        """Returns the file of every tensor, as an index says it; {} where one file holds all."""
        path = self.folder / INDEX
        if not path.is_file():
            if (self.folder / SINGLE).is_file():
                return {}
            raise ConfigError(f"{self.folder}: neither {SINGLE} nor {INDEX} is there{_instead(self.folder)}")
        weights = Fields(text.read_json(path), str(path)).table("weight_map").raw
        if not weights:
            raise ConfigError(f"{path}: no weight_map in it")
        for name in weights.values():
            if not isinstance(name, str) or pathlib.PurePath(name).name != name or not name.endswith(".safetensors"):
                raise ConfigError(f"{path}: {shown(name)} is no safetensors file of this folder")
        return dict(weights)

    @property
    def dtype(self) -> str:
        """The dtype of the largest tensor: matrices decide, a few norms may differ."""
        if not self.shapes:
            return "bfloat16"
        largest = max(self.shapes, key=lambda name: math.prod(self.shapes[name]))
        stored = self._opened[self._home[largest]].get_slice(largest).get_dtype()
        return {"F64": "float64", "F32": "float32", "F16": "float16"}.get(stored, "bfloat16")

    def read(self, name: str) -> np.ndarray:
        self._check(name)
        return self._opened[self._home[name]].get_tensor(name)

    def part(self, name: str, index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of one tensor; the rest of it is not read."""
        self._check(name)
        return self._opened[self._home[name]].get_slice(name)[index]

    def _check(self, name: str) -> None:
        path = self._home[name]
        stored = self._opened[path].get_slice(name).get_dtype()
        if stored not in (*FLOATS, *WHOLES):
            raise ConfigError(f"{path}: {name} is stored as {stored}; {ONLY_FLOATS}")


def _instead(folder: pathlib.Path) -> str:
    """Returns what a folder without safetensors of the usual names holds, for a message."""
    held = sorted(os.listdir(folder))
    for ending, what in (
        (PICKLES, "is a pickle, which is never opened: convert it to safetensors"),
        ((".gguf",), "is there: name the file itself"),
        ((".safetensors",), "is there, but no index that says what it holds"),
    ):
        found = [name for name in held if name.endswith(ending)]
        if found:
            return f"; {found[0]} {what}"
    return ""


def fingerprint(files: list[pathlib.Path]) -> str:
    """Returns a cheap hash that tells checkpoints apart: of size, head, middle and end of every file."""
    digest, piece = hashlib.sha256(), 1 << 16
    for path in files:
        size = path.stat().st_size
        with open(path, "rb") as file:
            digest.update(str(size).encode())
            for start in (0, max(size // 2 - piece, 0), max(size - piece, 0)):
                file.seek(start)
                digest.update(file.read(piece))
    return digest.hexdigest()[:16]


def save_head(
    folder: str | os.PathLike,
    config: Any,
    params: dict[str, Any],
    metadata: dict[str, Any] | None = None,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Writes a head in the format of its family, with `jetspec.json` beside it; dtype is that of the parameters.

    metadata: what a loader should check or know: target_fingerprint, target, thinking, training_length, family ...
    """
    dtype = str(max(jax.tree.leaves(params), key=lambda x: x.size).dtype)
    raw = dataclasses.replace(config, dtype=dtype).to_hf()
    family = families.of_config(raw, str(folder))
    assert family.names is not None  # it has a file
    files = {"config.json": raw, HEAD_META: metadata or {}}
    save(pathlib.Path(folder), disassemble(family.names(config), params), files, max_shard_bytes)


def save(
    folder: pathlib.Path, tensors: dict[str, np.ndarray], files: dict[str, Any], max_shard_bytes: int = 5 << 30
) -> None:
    """Writes published tensors in shards, and JSON files beside them.

    Everything goes to a folder beside `folder` first: an error leaves the old checkpoint or the new one. A crash
    between the two renames leaves the old one beside it, as `.NAME-xxx.old`. Other files in it are kept.
    """
    shards: list[dict[str, np.ndarray]] = [{}]
    for name in sorted(tensors):
        if shards[-1] and sum(x.nbytes for x in shards[-1].values()) + tensors[name].nbytes > max_shard_bytes:
            shards.append({})
        shards[-1][name] = tensors[name]
    total = len(shards)
    names = [SINGLE] if total == 1 else [f"model-{i + 1:05}-of-{total:05}.safetensors" for i in range(total)]
    if total > 1:
        size = sum(x.nbytes for x in tensors.values())
        where = {tensor: name for name, shard in zip(names, shards, strict=True) for tensor in sorted(shard)}
        files = files | {INDEX: {"metadata": {"total_size": size}, "weight_map": where}}
    folder = folder.resolve()  # a link stays a link
    if folder.exists() and not (folder.is_dir() and ((folder / "config.json").is_file() or not any(folder.iterdir()))):
        raise ConfigError(f"{folder}: there is something else than a checkpoint; name a new folder")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = pathlib.Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        for name, shard in zip(names, shards, strict=True):
            save_file(shard, fresh / name, metadata={"format": "pt"})
        for name, content in files.items():
            (fresh / name).write_text(json.dumps(content, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        mode = stat.S_IMODE((fresh / "config.json").stat().st_mode)  # what the user's umask leaves
        for name in names:  # written for their owner alone
            (fresh / name).chmod(mode)
        fresh.chmod(mode | (mode & 0o444) >> 2)
        if folder.exists():
            _keep_others(folder, fresh)
            old = fresh.with_name(fresh.name + ".old")
            folder.rename(old)
            try:
                fresh.rename(folder)
            except BaseException:
                old.rename(folder)
                raise
            shutil.rmtree(old, ignore_errors=True)
        else:
            fresh.rename(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


def _keep_others(old: pathlib.Path, fresh: pathlib.Path) -> None:
    """Copies what a checkpoint's folder holds beside what is being replaced: a tokenizer, notes."""
    for path in old.iterdir():
        if path.suffix == ".safetensors" or path.name in ("config.json", INDEX, HEAD_META):
            continue
        if path.is_dir():
            shutil.copytree(path, fresh / path.name, symlinks=True)
        else:
            shutil.copy2(path, fresh / path.name, follow_symlinks=False)


def numpy_dtype(name: str) -> np.dtype:
    """Returns float32, float16 or bfloat16 by name."""
    return np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(name, name))


def _count(names: list[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def _list(names: list[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + more
