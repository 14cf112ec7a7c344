"""Targets and heads from a folder, a GGUF file or a hub id, checked and on the device."""

from __future__ import annotations

import dataclasses
import functools
import os
import pathlib
import sys
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jetspec_jax.backends import ops
from jetspec_jax.config import ConfigError, HeadConfig, ModelConfig, as_ids
from jetspec_jax.drafts import block
from jetspec_jax.files import checkpoint, pair, programs, tokenizer
from jetspec_jax.files.gguf_file import GGUF
from jetspec_jax.models import qwen3

DTYPES = ("float32", "bfloat16", "float16")
HUB_FILES = ["*.safetensors", "*.json", "merges.txt", "vocab.txt", "tokenizer.model", "*.jinja"]


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A frozen target: pure functions, parameters, and what belongs to its files."""

    model: qwen3.Qwen3Target
    params: dict[str, Any]
    config: ModelConfig
    dtype: str
    eos: tuple[int, ...]  # every end token that the files name
    source: str
    fingerprint: str
    seconds: float  # that loading took
    _tokenizer: Any = dataclasses.field(repr=False, compare=False)

    @functools.cached_property
    def tokenizer(self) -> tokenizer.Tokenizer | None:
        """Read when it is first needed; None for a checkpoint without one."""
        return self._tokenizer()

    def encode_messages(
        self, messages: Sequence[dict[str, str]], chat: bool | None = None, thinking: bool | None = None
    ) -> list[int]:
        """Token ids of a conversation; a chat template is needed. thinking: None is off where the template knows it."""
        if self.tokenizer is None:
            raise ConfigError(f"messages: {self.source} has no tokenizer; give token ids (--prompt_ids 1,2,3)")
        if chat is False or not self.tokenizer.has_chat_template:
            why = "--nochat leaves it out" if chat is False else f"{self.source} has none"
            raise ConfigError(f"messages: they need a chat template, and {why}; give a prompt instead")
        return self.tokenizer.encode_chat(messages, pair.thinking(self, None, thinking))


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """A draft head for one target."""

    draft: block.BlockDraft
    params: dict[str, Any]
    config: HeadConfig
    source: str
    metadata: dict[str, Any]  # jetspec.json, {} for heads of others
    seconds: float
    target_fingerprint: str  # of the target that it was loaded for


def load_target(source: str | os.PathLike, dtype: str | None = None, attention: str = "auto") -> LoadedTarget:
    """Loads a target, and from then on keeps compiled programs between processes (`programs.keep`).

    Args:
      source: a Hugging Face folder, a .gguf file, or a hub id.
      dtype: float32, bfloat16 or float16; None keeps the file's. A GGUF file is read as f32 on a CPU, else bfloat16.
      attention: auto, xla, cudnn or pallas, for this target and its heads; auto is the fastest that was measured.

    Raises:
      ConfigError: something is wrong with the files, by name, or this device cannot run that attention.
    """
    begin = time.perf_counter()
    if dtype is not None:
        _dtype(dtype)
    programs.check_device()
    programs.keep()
    path = find(source)
    if path.is_file():
        if path.suffix in (".safetensors", ".json", *checkpoint.PICKLES):
            raise ConfigError(f"{path}: a target is a .gguf file or a folder with config.json and safetensors")
        file = GGUF(path)
        raw, files = file.config(), [path]
        tensors: checkpoint.Source = file
        eos = tokenizer.end_tokens(file)
        read_tokenizer = lambda: tokenizer.from_gguf(file)
        native = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    else:
        raw = checkpoint.read_json(path / "config.json")
        folder = checkpoint.Folder(path)
        tensors, files = folder, folder.files
        generation = path / "generation_config.json"
        named = checkpoint.read_json(generation).get("eos_token_id") if generation.is_file() else None
        own = as_ids(raw.get("eos_token_id"), str(path))
        eos = tuple(sorted({*own, *as_ids(named, str(generation)), *tokenizer.end_tokens_of_folder(path)}))
        read_tokenizer = lambda: tokenizer.from_folder(path)
        native = str(raw.get("dtype") or raw.get("torch_dtype") or folder.dtype)
    where = str(path if path.is_file() else path / "config.json")
    config = _read_config(ModelConfig.from_hf, raw, where)
    dtype = dtype or _dtype(native, f"{where}: ")
    how = ops.resolve(attention, dtype, config.head_dim)
    model, shapes = qwen3.build(config, checkpoint.numpy_dtype(dtype), how)
    params = checkpoint.assemble(tensors, checkpoint.target_fusions(config), shapes, str(path), _warn)
    jax.block_until_ready(params)
    return LoadedTarget(
        model, params, config, dtype, eos, str(source), checkpoint.fingerprint(files), time.perf_counter() - begin,
        read_tokenizer,
    )  # fmt: skip


def load_head(source: str | os.PathLike, target: LoadedTarget) -> LoadedHead:
    """Loads a draft head in the published format and checks that it belongs to `target`; computed in its dtype.

    Raises:
      ConfigError: something is wrong with the files, or a size differs from the target's; both are named.
    """
    begin = time.perf_counter()
    path = find(source)
    if path.is_file():
        raise ConfigError(f"{path}: a head is a folder with config.json and safetensors")
    where = str(path / "config.json")
    config = _read_config(HeadConfig.from_hf, checkpoint.read_json(path / "config.json"), where, _warn)
    for name, ours, theirs in config.differing(target.config):
        raise ConfigError(
            f"{where}: {name} is {ours}, the target's ({target.source}) is {theirs}; "
            "this head belongs to another target"
        )
    draft, shapes = block.build(config, checkpoint.numpy_dtype(target.dtype), ops=target.model.ops)
    tensors = _WithoutBorrowed(checkpoint.Folder(path))
    if tensors.borrowed:
        _warn(f"{path}: {', '.join(tensors.borrowed)} ignored; a head borrows the target's")
    params = checkpoint.assemble(tensors, checkpoint.head_fusions(config), shapes, str(path), _warn)
    jax.block_until_ready(params)
    meta_file = path / checkpoint.HEAD_META
    metadata = checkpoint.read_json(meta_file) if meta_file.is_file() else {}
    trained_for = metadata.get("target_fingerprint")
    if trained_for not in (None, target.fingerprint):
        _warn(
            f"{path}: trained for another target (fingerprint {trained_for}, {target.source} has {target.fingerprint})"
        )
    for line in pair.oddities(config, metadata):
        _warn(f"{meta_file}: {line}")
    return LoadedHead(
        draft, params, config, str(source), metadata, time.perf_counter() - begin, target.fingerprint
    )  # fmt: skip


def random_params(shapes: dict[str, Any], seed: int = 0, scale: float = 0.02) -> dict[str, Any]:
    """Normal parameters for tests and benchmarks: matrices N(0, scale), norms 1 + N(0, scale)."""
    rng = np.random.default_rng(seed)
    draw = lambda x: jax.device_put((rng.normal(size=x.shape) * scale + (len(x.shape) == 1)).astype(x.dtype))
    return jax.tree.map(draw, shapes)


class _WithoutBorrowed:
    """A head's tensors without an embedding or lm_head that some trainers leave in the file."""

    def __init__(self, inner: checkpoint.Folder):
        self.borrowed = sorted(n for n in inner.shapes if n in checkpoint.BORROWED)
        self.shapes = {n: s for n, s in inner.shapes.items() if n not in checkpoint.BORROWED}
        self.read = inner.read


def find(source: str | os.PathLike) -> pathlib.Path:
    """A local path as it is; else the files of a hub id, without anything executable."""
    name = str(source)
    try:
        path = pathlib.Path(source).expanduser()
        if name and path.exists():
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


def _read_config(read, raw: dict[str, Any], where: str, *rest):
    """A configuration; whatever a malformed file provokes becomes one line."""
    try:
        return read(raw, where, *rest)
    except (TypeError, OverflowError, AttributeError) as error:
        raise ConfigError(f"{where}: a value has the wrong type or size ({error})") from None


def _dtype(name: str, where: str = "") -> str:
    if name not in DTYPES:
        raise ConfigError(f"{where}dtype={name!r}: choose one of {', '.join(DTYPES)}")
    return name


def _warn(line: str) -> None:
    print(f"warning: {line}", file=sys.stderr, flush=True)
