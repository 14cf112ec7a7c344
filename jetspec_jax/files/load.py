"""Targets and heads from a folder, a GGUF file or a hub id, checked and on the device."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import sys
import time
from collections.abc import Collection, Mapping
from typing import Any

import jax

from jetspec_jax.backends.choose import resolve
from jetspec_jax.config import HeadConfig, ModelConfig
from jetspec_jax.drafts import families
from jetspec_jax.drafts.block import BlockDraft
from jetspec_jax.fields import ConfigError, Fields, shown
from jetspec_jax.files import cache_folder, checkpoint, pair, scorer_file, text, tokenizer, xla
from jetspec_jax.files import mesh as on_mesh
from jetspec_jax.files.gguf_file import GGUF
from jetspec_jax.files.pair import LoadedHead, LoadedTarget
from jetspec_jax.models import names, qwen3, sharding
from jetspec_jax.options import DTYPES

__all__ = ["DTYPES", "LoadedHead", "LoadedTarget", "find", "load_drafter", "load_head", "load_target"]

HUB_FILES = ["*.safetensors", "*.json", "merges.txt", "vocab.txt", "tokenizer.model", "*.jinja"]


def load_target(
    source: str | os.PathLike,
    dtype: str | None = None,
    backend: str = "auto",
    *,
    attention: str | None = None,
    mesh: str | Mapping[str, int] | jax.sharding.Mesh | None = None,
) -> LoadedTarget:
    """Loads a target, and from then on keeps compiled programs between processes (`cache_folder.keep_programs`).

    Args:
      source: a Hugging Face folder, a .gguf file, or a hub id.
      dtype: float32, bfloat16 or float16; None keeps the file's. A GGUF file is read as f32 on a CPU, else bfloat16.
      backend: auto, xla, cudnn or pallas, for this target and its heads; auto is the fastest that was measured.
      attention: the same under its old name.
      mesh: devices that share the work, as "data=2,model=4", the same as a dict, or a mesh of jax with these axes
        (docs/devices.md); of more devices than it has, it takes the first. Each reads its part of the weights alone.

    Raises:
      ConfigError: something is wrong with the files, by name, or this device cannot run that backend, or the mesh
        cannot be had or cannot split this target.
    """
    begin = time.perf_counter()
    if dtype is not None:
        _dtype(dtype)
    xla.check_device()
    devices = None if mesh is None else sharding.mesh_of(mesh)
    cache_folder.keep_programs()
    path = find(source)
    if path.is_file():
        if path.suffix in (".safetensors", ".json", *checkpoint.PICKLES):
            raise ConfigError(f"{path}: a target is a .gguf file or a folder with config.json and safetensors")
        file = GGUF(path)
        config, files = ModelConfig.from_hf(file.config(), str(path)), [path]
        tensors: checkpoint.Source = file
        eos = tokenizer.end_tokens(file, config.vocab_size)
        read_tokenizer = lambda: tokenizer.from_gguf(file)
        native = "float32" if jax.default_backend() == "cpu" else "bfloat16"
        where = str(path)
    else:
        where = str(path / "config.json")
        config = ModelConfig.from_hf(text.read_json(path / "config.json"), where)
        folder = checkpoint.Folder(path)
        tensors, files = folder, folder.files
        eos = _end_tokens(path, config)
        read_tokenizer = lambda: tokenizer.from_folder(path)
        native = config.dtype or folder.dtype
    dtype = dtype or _dtype(native, f"{where}: ")
    computed = resolve(attention or backend, dtype, config.head_dim)
    computed = computed if devices is None else on_mesh.backend(computed, devices, config)
    checkpoint.need_layers(tensors, "model.layers.", config.num_layers, where)
    fusions = names.of_target(config)
    checkpoint.need(tensors, fusions, str(path))
    model, shapes = qwen3.build(config, checkpoint.numpy_dtype(dtype), computed)
    lies = None if devices is None else sharding.decoding(shapes, devices, config)
    params = checkpoint.assemble(tensors, fusions, shapes, str(path), _warn, lies)
    jax.block_until_ready(params)
    return LoadedTarget(
        model, params, config, dtype, eos, str(source), checkpoint.fingerprint(files), time.perf_counter() - begin,
        read_tokenizer,
    )  # fmt: skip


def load_head(source: str | os.PathLike, target: LoadedTarget) -> LoadedHead:
    """Loads a draft head in the format of its family and checks that it fits `target`; computed in the target's dtype,
    on the target's devices.

    Raises:
      ConfigError: something is wrong with the files, the family is none of ours, or a size differs from the target's;
        the line names it.
    """
    begin = time.perf_counter()
    path = find(source)
    if path.is_file():
        raise ConfigError(f"{path}: a head is a folder with config.json and safetensors")
    where = str(path / "config.json")
    raw = text.read_json(path / "config.json")
    family = families.of_config(raw, where)
    assert family.config is not None and family.names is not None  # it has files
    config = family.config(raw, where, _warn, target.config)
    for name, ours, theirs in config.differing(target.config):
        raise ConfigError(
            f"{where}: {name} is {ours}, the target's ({target.source}) is {theirs}; "
            "this head belongs to another target"
        )
    sizes = target.config.vocab_size, target.config.hidden_size
    tensors = _WithoutBorrowed(checkpoint.Folder(path), family.keeps, family.spare, sizes)
    families.refuse_foreign_tensors(family, tensors.shapes, str(path))
    if tensors.borrowed:
        _warn(f"{path}: {', '.join(tensors.borrowed)} ignored; a head borrows the target's")
    fusions = family.names(config)
    checkpoint.need(tensors, fusions, str(path))
    if beside_it := scorer_file.sizes(path):
        if type(config) is not HeadConfig:
            raise ConfigError(
                f"{path / scorer_file.FOLDER}: a head of {family.name} has no use for a scorer; move it away"
            )
        config = dataclasses.replace(config, **beside_it)
    draft, shapes = family.build(config, checkpoint.numpy_dtype(target.dtype), target.model.backend)
    lies = sharding.drafting(shapes, target.mesh, config) if target.mesh else {}
    beside, lie_beside = shapes.pop("scorer", None), lies.pop("scorer", None)
    params = checkpoint.assemble(tensors, fusions, shapes, str(path), _warn, lies or None)
    if beside:
        params["scorer"] = scorer_file.read(path, config, beside, _warn, lie_beside)
    wrong = family.check(config, params) if family.check else None
    if wrong:
        raise ConfigError(f"{path}: {wrong}")
    jax.block_until_ready(params)
    metadata = _metadata(path / checkpoint.HEAD_META, config, target)
    temperature = pair.temperatures(config, Fields(metadata, checkpoint.HEAD_META))
    if isinstance(draft, BlockDraft):
        draft = draft.calibrated(temperature)
    if hasattr(draft, "windowed"):
        draft = draft.windowed(metadata.get("context_window") or 0)  # null is as good as absent
    return LoadedHead(
        draft, params, config, str(source), metadata, time.perf_counter() - begin, target.fingerprint, family.name
    )


def load_drafter(name: str, target: LoadedTarget, config: Any = None) -> LoadedHead:
    """Returns a drafter of a family that has no files, ready to be used where a head is.

    Args:
      name: of the family.
      target: what it will draft for.
      config: of its family; None where the family needs none.

    Raises:
      ConfigError: there is no such family, or it has files and `load_head` loads it.
    """
    family = families.named(name)
    if family is None or family.reads is not None:
        known = ", ".join(row.name for row in families.FAMILIES if row.reads is None)
        raise ConfigError(f"drafter={shown(name)}: no drafter without a head; there are: {known}")
    draft, params = family.build(config, checkpoint.numpy_dtype(target.dtype), target.model.backend)
    return on_mesh.head_on(LoadedHead(draft, params, None, name, {}, 0.0, target.fingerprint, name), target)


def _end_tokens(folder: pathlib.Path, config: ModelConfig) -> tuple[int, ...]:
    """Returns every end token that the files of a folder name."""
    generation, named = folder / "generation_config.json", set(config.eos_token_ids)
    if generation.is_file():
        named |= set(Fields(text.read_json(generation), str(generation)).ids("eos_token_id", config.vocab_size))
    for token in tokenizer.end_tokens_of_folder(folder):
        if token < config.vocab_size:
            named.add(token)
        else:  # it can neither be read nor written, so nothing is lost
            _warn(f"{folder}: the tokenizer's end token {token} is none of the model's {config.vocab_size}; left out")
    return tuple(sorted(named))


def _metadata(path: pathlib.Path, config, target: LoadedTarget) -> dict[str, Any]:
    """Returns a head's jetspec.json without what cannot be meant; says what is odd about it."""
    found: Mapping[str, Any] = text.read_json(path) if path.is_file() else {}
    odd = pair.oddities(config, dict(found))
    for line in odd.values():
        _warn(f"{path}: {line}")
    kept = {key: value for key, value in found.items() if key not in odd}
    trained_for = kept.get("target_fingerprint")
    if trained_for not in (None, target.fingerprint):
        _warn(
            f"{path.parent}: trained for another target (fingerprint {shown(trained_for)}, {target.source} has "
            f"{target.fingerprint})"
        )
    return kept


class _WithoutBorrowed:
    """Hides an embedding or lm_head that some trainers leave in a head's file, unless the family keeps its own.

    spare: what the family's files hold anyway; of the target's sizes it is a copy of the target's.
    """

    def __init__(
        self, inner: checkpoint.Folder, keeps: Collection[str], spare: Collection[str], sizes: tuple[int, int]
    ):
        copies = {n for n in spare if inner.shapes.get(n) == sizes}
        self.borrowed = sorted(n for n in inner.shapes if n in checkpoint.BORROWED and n not in {*keeps, *copies})
        self.shapes = {n: s for n, s in inner.shapes.items() if n not in self.borrowed and n not in spare}
        self.read, self.part = inner.read, inner.part


def find(source: str | os.PathLike) -> pathlib.Path:
    """Returns a local path as it is; else that of a hub id's files, without anything executable."""
    name = str(source)
    try:
        path = pathlib.Path(source).expanduser()
        if name and path.exists():
            if not (path.is_dir() or path.is_file()):
                raise ConfigError(f"{path}: neither a folder nor a regular file")
            return path
    except (OSError, RuntimeError):  # a name too long, a home that is not known
        pass
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ConfigError(
            f"{name or repr(name)}: no such file or folder (and no hub id, which has the form owner/name)"
        )
    import huggingface_hub
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return pathlib.Path(huggingface_hub.snapshot_download(name, allow_patterns=HUB_FILES))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ConfigError(f"{name}: no such folder, and the hub does not give it ({reason})") from None


def _dtype(name: str, where: str = "") -> str:
    if name not in DTYPES:
        raise ConfigError(f"{where}dtype={shown(name)}: choose one of {', '.join(DTYPES)}")
    return name


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)
