"""Checkpoints in the published layout, in and out: the only place that knows published tensor names.

Files hold Hugging Face names in torch's [out, in] order; parameters hold one fused QKV and one fused gate-up array a
layer, [in, ...out], experts stacked. Every parameter has a `Fusion` that says which published tensors it is made of.
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
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import jax
import ml_dtypes
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jetspec_jax.config import ConfigError, HeadConfig, ModelConfig

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")  # never opened
HEAD_META = "jetspec.json"  # our own file beside a head: what a loader should check
BORROWED = ("embed_tokens.weight", "lm_head.weight", "model.embed_tokens.weight")  # a head uses the target's


@runtime_checkable
class Source(Protocol):
    """Named tensors of a checkpoint, read one at a time."""

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """Of every tensor, as stored."""

    def read(self, name: str) -> np.ndarray:
        """One tensor on the host."""


@dataclasses.dataclass(frozen=True)
class Fusion:
    """How one parameter is made of published tensors.

    groups: one tuple of names (several groups are stacked on a new first axis: experts). shapes: how [out] of each
    name of a group is cut, (rows,) for a single name; several names are joined along the last axis but one of it.
    matrix: stored transposed.
    """

    groups: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    matrix: bool
    stacked: bool = False

    def names(self) -> list[str]:
        return [name for group in self.groups for name in group]

    @property
    def sizes(self) -> list[int]:
        """Rows [out] that each name of a group contributes."""
        return [math.prod(shape) for shape in self.shapes]

    def join(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """The parameter, from published tensors."""
        parts = [self._join([read(name) for name in group]) for group in self.groups]
        whole = np.stack(parts) if self.stacked else parts[0]
        return np.moveaxis(whole, -1, int(self.stacked)) if self.matrix else whole

    def split(self, parameter: np.ndarray) -> dict[str, np.ndarray]:
        """The published tensors, from the parameter; the inverse of `join`, bit for bit."""
        whole = np.moveaxis(parameter, int(self.stacked), -1) if self.matrix else parameter
        return {
            name: np.ascontiguousarray(piece)
            for group, part in zip(self.groups, whole if self.stacked else [whole], strict=True)
            for name, piece in zip(group, self._split(part), strict=True)
        }

    def _join(self, tensors: list[np.ndarray]) -> np.ndarray:
        if len(tensors) == 1:
            return tensors[0]
        cut = [t.reshape(*shape, -1) for t, shape in zip(tensors, self.shapes, strict=True)]
        return np.concatenate(cut, axis=-3)

    def _split(self, whole: np.ndarray) -> list[np.ndarray]:
        if len(self.shapes) == 1:
            return [whole]
        cuts = np.cumsum([shape[-2] for shape in self.shapes])[:-1]
        return [piece.reshape(-1, whole.shape[-1]) for piece in np.split(whole, cuts, axis=-3)]


def target_fusions(c: ModelConfig) -> dict[str, Any]:
    """A tree like the target's parameters, of `Fusion`s."""
    tree: dict[str, Any] = {
        "embedding": _plain("model.embed_tokens.weight", c.vocab_size),
        "layers": {i: _layer(c, f"model.layers.{i}.", i) for i in range(c.num_layers)},
        "norm": _plain("model.norm.weight", c.hidden_size),
    }
    if not c.tie_embeddings:
        tree["lm_head"] = _plain("lm_head.weight", c.vocab_size)
    return tree


def head_fusions(c: HeadConfig) -> dict[str, Any]:
    """A tree like the head's parameters, of `Fusion`s."""
    return {
        "fc": _matrix("fc.weight", c.hidden_size),
        "hidden_norm": _plain("hidden_norm.weight", c.hidden_size),
        "layers": {i: _layer(c, f"layers.{i}.") for i in range(c.num_layers)},
        "norm": _plain("norm.weight", c.hidden_size),
    }


def _layer(c: ModelConfig | HeadConfig, prefix: str, index: int = 0) -> dict[str, Fusion]:
    attention, kv_heads, dim = prefix + "self_attn.", c.num_kv_heads, c.head_dim
    kv = (kv_heads, 1, dim)
    tree = {
        "input_norm": _plain(prefix + "input_layernorm.weight", c.hidden_size),
        "qkv": Fusion(
            (tuple(f"{attention}{x}_proj.weight" for x in "qkv"),),
            ((kv_heads, c.num_heads // kv_heads, dim), kv, kv),
            True,
        ),
        "out": _matrix(attention + "o_proj.weight", c.hidden_size),
        "post_norm": _plain(prefix + "post_attention_layernorm.weight", c.hidden_size),
    }
    if c.qk_norm:
        tree["q_norm"] = _plain(attention + "q_norm.weight", c.head_dim)
        tree["k_norm"] = _plain(attention + "k_norm.weight", c.head_dim)
    if c.moe is not None and index in c.moe.sparse_layers:
        width = c.moe.intermediate_size
        experts = [f"{prefix}mlp.experts.{x}." for x in range(c.moe.num_experts)]
        tree["router"] = _matrix(prefix + "mlp.gate.weight", c.moe.num_experts)
        gate_up = tuple((e + "gate_proj.weight", e + "up_proj.weight") for e in experts)
        tree["gate_up"] = Fusion(gate_up, ((1, width), (1, width)), True, stacked=True)
        tree["down"] = Fusion(
            tuple((e + "down_proj.weight",) for e in experts), ((c.hidden_size,),), True, stacked=True
        )
    else:
        width = c.intermediate_size
        names = (prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight")
        tree["gate_up"] = Fusion((names,), ((1, width), (1, width)), True)
        tree["down"] = _matrix(prefix + "mlp.down_proj.weight", c.hidden_size)
    return tree


def _plain(name: str, rows: int) -> Fusion:
    return Fusion(((name,),), ((rows,),), matrix=False)


def _matrix(name: str, rows: int) -> Fusion:
    return Fusion(((name,),), ((rows,),), matrix=True)


def assemble(
    source: Source,
    fusions: dict[str, Any],
    shapes: dict[str, Any],
    where: str,
    warn: Callable[[str], None] = lambda line: None,
    place: Callable[[np.ndarray], jax.Array] = jax.device_put,
) -> dict[str, Any]:
    """Fills `shapes` (parameters as ShapeDtypeStruct) from `source`, one parameter on the host at a time.

    Args:
      place: puts one finished array on the device or devices.

    Raises:
      ConfigError: tensors are missing or have another shape; nothing has been read then.
    """
    leaf = lambda x: isinstance(x, Fusion)
    pairs = jax.tree.map(lambda f, s: (f, s), fusions, shapes, is_leaf=leaf)
    flat = jax.tree.leaves(pairs, is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], Fusion))
    needed = [name for fusion, _ in flat for name in fusion.names()]
    missing = [name for name in needed if name not in source.shapes]
    if missing:
        hint = " (tie_word_embeddings is false, so lm_head.weight is needed)" if "lm_head.weight" in missing else ""
        raise ConfigError(f"{where}: {_count(missing)} missing: {_list(missing)}{hint}")
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

    def fill(fusion: Fusion, shape) -> jax.Array:
        whole = fusion.join(source.read)
        with np.errstate(over="ignore"):  # said below
            cast = whole.astype(shape.dtype)
        if shape.dtype == np.float16 and not np.isfinite(cast).all():
            raise ConfigError(f"{where}: {fusion.names()[0]} does not fit float16; use dtype bfloat16 or float32")
        return place(cast)

    return jax.tree.map(fill, fusions, shapes, is_leaf=leaf)


def disassemble(fusions: dict[str, Any], params: dict[str, Any]) -> dict[str, np.ndarray]:
    """Published tensors of a parameter tree, on the host."""
    tensors: dict[str, np.ndarray] = {}
    leaf = lambda x: isinstance(x, Fusion)
    jax.tree.map(lambda f, p: tensors.update(f.split(np.asarray(p))), fusions, params, is_leaf=leaf)
    return tensors


class Folder:
    """The safetensors of a Hugging Face folder, one file or sharded with an index; implements `Source`.

    Raises:
      ConfigError: there are none, or a shard that the index names is missing or does not hold what the index says.
    """

    def __init__(self, folder: pathlib.Path):
        self.folder = folder
        if (folder / INDEX).is_file():
            weights: dict[str, Any] | None = read_json(folder / INDEX).get("weight_map")
            if not isinstance(weights, dict) or not weights:
                raise ConfigError(f"{folder / INDEX}: no weight_map in it")
        elif (folder / SINGLE).is_file():
            weights = None
        else:
            pickles = sorted(p.name for p in folder.iterdir() if p.suffix in PICKLES)
            why = f"; {pickles[0]} is a pickle, which is never opened: convert it to safetensors" if pickles else ""
            raise ConfigError(f"{folder}: neither {SINGLE} nor {INDEX} is there{why}")
        names = sorted(set(weights.values()), key=str) if weights else [SINGLE]
        for name in names:  # before anything is opened
            if not isinstance(name, str) or pathlib.PurePath(name).name != name or not name.endswith(".safetensors"):
                raise ConfigError(f"{folder / INDEX}: {name!r} is no safetensors file of this folder")
            if not (folder / name).is_file():
                raise ConfigError(f"{folder / name}: the index names this shard, but there is no such file")
        self.files = [folder / name for name in names]
        self._opened: dict[pathlib.Path, Any] = {}
        self._home: dict[str, pathlib.Path] = {}
        for path in self.files:
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

    @property
    def dtype(self) -> str:
        """What the largest tensor is stored as: matrices decide, a few norms may differ."""
        if not self.shapes:
            return "bfloat16"
        largest = max(self.shapes, key=lambda name: math.prod(self.shapes[name]))
        stored = self._opened[self._home[largest]].get_slice(largest).get_dtype()
        return {"F64": "float64", "F32": "float32", "F16": "float16"}.get(stored, "bfloat16")

    def read(self, name: str) -> np.ndarray:
        path = self._home[name]
        stored = self._opened[path].get_slice(name).get_dtype()
        if stored not in ("F64", "F32", "F16", "BF16"):
            raise ConfigError(f"{path}: {name} is stored as {stored}; only unquantised floats are supported")
        return self._opened[path].get_tensor(name)


def read_json(path: pathlib.Path) -> dict[str, Any]:
    """A JSON object; ConfigError names the file when it is none."""
    try:
        raw = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (ValueError, RecursionError) as error:  # ValueError: neither JSON nor UTF-8
        raise ConfigError(f"{path}: not JSON ({error})") from None
    if not isinstance(raw, dict):
        raise ConfigError(f"{path}: a JSON object is needed")
    return raw


def fingerprint(files: list[pathlib.Path]) -> str:
    """A cheap hash that tells checkpoints apart: size, head, middle and end of every file."""
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
    config: HeadConfig,
    params: dict[str, Any],
    metadata: dict[str, Any] | None = None,
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Writes a head in the published format, with `jetspec.json` beside it; dtype is that of the parameters.

    metadata: what a loader should check or know: target_fingerprint, target, thinking, training_length, family ...
    """
    dtype = str(params["fc"].dtype)
    files = {"config.json": dataclasses.replace(config, dtype=dtype).to_hf(), HEAD_META: metadata or {}}
    _save(pathlib.Path(folder), disassemble(head_fusions(config), params), files, max_shard_bytes)


def save_target(
    folder: str | os.PathLike,
    config: ModelConfig,
    raw_config: dict[str, Any],
    params: dict[str, Any],
    max_shard_bytes: int = 5 << 30,
) -> None:
    """Writes a target in the published format under its own `config.json`."""
    files = {"config.json": raw_config}
    _save(pathlib.Path(folder), disassemble(target_fusions(config), params), files, max_shard_bytes)


def _save(folder: pathlib.Path, tensors: dict[str, np.ndarray], files: dict[str, Any], max_shard_bytes: int) -> None:
    """Everything goes to a folder beside `folder` first: an error leaves the old checkpoint or the new one.

    A crash between the two renames leaves the old one beside it, as `.NAME-xxx.old`. Other files in it are kept.
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
        fresh.chmod(0o755)
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
    """float32, float16 or bfloat16 by name."""
    return np.dtype({"bfloat16": ml_dtypes.bfloat16}.get(name, name))


def _count(names: list[str]) -> str:
    return "1 tensor is" if len(names) == 1 else f"{len(names)} tensors are"


def _list(names: list[str]) -> str:
    shown = ", ".join(sorted(names)[:8])
    return shown + (f" and {len(names) - 8} more" if len(names) > 8 else "")
