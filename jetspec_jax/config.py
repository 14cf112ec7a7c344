"""Frozen, validated descriptions of targets and heads; those of trees and sampling come from `options.py`.

Every class checks itself when it is made, so that a wrong value is refused with one line that names the option, the
value and the valid range, before any array is touched. `ModelConfig` and `HeadConfig` read the `config.json` of a
Hugging Face folder in its old and new spellings.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from jetspec_jax.layers.rope_scaling import RopeScaling
from jetspec_jax.options import MIN_TEMPERATURE, ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.options import whole as _whole

__all__ = [
    "MIN_TEMPERATURE",
    "ConfigError",
    "HeadConfig",
    "MoEConfig",
    "ModelConfig",
    "SamplingConfig",
    "TreeConfig",
    "as_ids",
    "default_taps",
]  # fmt: skip


@dataclasses.dataclass(frozen=True)
class MoEConfig:
    """Mixture-of-experts feed-forward of a Qwen3-MoE target."""

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    normalize_top_k: bool
    sparse_layers: tuple[int, ...]  # indices of the layers that hold experts; the others are dense

    def __post_init__(self):
        if not 1 <= self.experts_per_token <= self.num_experts:
            raise ConfigError(
                f"num_experts_per_tok={self.experts_per_token}: give a value in 1..{self.num_experts} (num_experts)"
            )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """A decoder of the Qwen3 family (`qwen3`, `qwen3_moe`) or of the plain Llama layout (`llama`)."""

    model_type: str
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    tie_embeddings: bool
    qk_norm: bool
    moe: MoEConfig | None = None
    dtype: str | None = None  # dtype named by the file, if any
    eos_token_ids: tuple[int, ...] = ()
    rope_scaling: RopeScaling | None = None

    def __post_init__(self):
        _check_heads(self)

    @property
    def context_length(self) -> int:
        """Positions that a request may use, RoPE scaling included."""
        return self.rope_scaling.context_length(self.max_positions) if self.rope_scaling else self.max_positions

    @classmethod
    def from_hf(cls, raw: dict[str, Any], where: str = "config.json") -> ModelConfig:
        """Reads a Hugging Face `config.json`; refuses what this package would compute wrongly, by name."""
        model_type = raw.get("model_type")
        if model_type not in ("qwen3", "qwen3_moe", "llama"):
            raise ConfigError(f"{where}: model_type={model_type!r} is not supported; use qwen3, qwen3_moe or llama")
        _refuse_unsupported(raw, where)
        return _named(
            where,
            cls,
            model_type=model_type,
            **_sizes(raw, where),
            tie_embeddings=_flag(raw, "tie_word_embeddings", where),
            qk_norm=model_type != "llama",
            moe=_moe(raw, where) if model_type == "qwen3_moe" else None,
            dtype=_dtype(raw, where),
            eos_token_ids=as_ids(raw.get("eos_token_id"), where),
        )


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """A JetSpec or DFlash draft head: a small stack without embedding and lm_head (both borrowed from the target)."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    num_target_layers: int
    block_size: int
    mask_token_id: int
    tap_layers: tuple[int, ...]
    causal: bool
    dtype: str | None = None
    rope_scaling: RopeScaling | None = None

    moe = None  # a head is dense; `models.layer.Layer` reads these two of any configuration
    qk_norm = True

    def __post_init__(self):
        _check_heads(self)
        if self.block_size < 2:
            raise ConfigError(
                f"block_size={self.block_size}: a block is one anchor and at least one drafted slot, so >= 2"
            )
        if not self.tap_layers:
            raise ConfigError("target_layer_ids=[]: a head needs at least one tapped layer of the target")
        if len(set(self.tap_layers)) != len(self.tap_layers):
            raise ConfigError(f"target_layer_ids={list(self.tap_layers)}: a layer is listed twice")
        for tap in self.tap_layers:
            if not 0 <= tap < self.num_target_layers:
                raise ConfigError(
                    f"target_layer_ids={list(self.tap_layers)}: {tap} is not a layer of the target; "
                    f"ids are 0-based, 0..{self.num_target_layers - 1}, and name the output of that layer"
                )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask_token_id={self.mask_token_id}: give an embedding row in 0..{self.vocab_size - 1}")

    @property
    def depth(self) -> int:
        """Positions drafted a round: the block without its anchor."""
        return self.block_size - 1

    def differing(self, target: ModelConfig) -> list[tuple[str, int, int]]:
        """Sizes that a head shares with its target and does not with this one: name, the head's, the target's."""
        pairs = [
            ("hidden_size", self.hidden_size, target.hidden_size),
            ("vocab_size", self.vocab_size, target.vocab_size),
            ("num_target_layers", self.num_target_layers, target.num_layers),
        ]
        return [pair for pair in pairs if pair[1] != pair[2]]

    @classmethod
    def from_hf(cls, raw: dict[str, Any], where: str = "config.json", warn=lambda line: None) -> HeadConfig:
        """Reads the published head format (`dflash_config`); both spellings of the causal flag are understood."""
        if raw.get("model_type", "qwen3") != "qwen3":
            raise ConfigError(f"{where}: model_type={raw['model_type']!r} is no draft head; heads are qwen3")
        block = raw.get("dflash_config")
        if not isinstance(block, dict):
            raise ConfigError(
                f"{where}: no dflash_config, so this is no JetSpec or DFlash head; is it the target's folder?"
            )
        _refuse_unsupported(raw, where)
        target_hidden = block.get("target_hidden_size", raw.get("hidden_size"))
        if target_hidden != raw.get("hidden_size"):
            raise ConfigError(f"{where}: target_hidden_size={target_hidden} with an adapter is not supported")
        flags = {key: block[key] for key in ("causal_head", "causal") if block.get(key) is not None}
        for key, value in flags.items():
            if not isinstance(value, bool):
                raise ConfigError(f"{where}: dflash_config.{key} is {value!r}; give true or false")
        if len(set(flags.values())) > 1:
            raise ConfigError(
                f"{where}: causal_head={flags['causal_head']} contradicts causal={flags['causal']}; keep one"
            )
        if not flags:
            warn(f"{where}: neither causal_head nor causal is given; taking the head as bidirectional (DFlash)")
        target_layers = _need(raw, "num_target_layers", where)
        mask = block.get("mask_token_id")
        if not _whole(mask):
            raise ConfigError(
                f"{where}: dflash_config.mask_token_id is {mask!r}; give the id of an unused embedding row"
            )
        taps = block.get("target_layer_ids")
        if taps is not None and not (isinstance(taps, list) and all(_whole(tap) for tap in taps)):
            raise ConfigError(f"{where}: dflash_config.target_layer_ids is {taps!r}; give a list of layers, 0-based")
        sizes = _sizes(raw, where)
        holder = next((h for h in (block, raw) if h.get("block_size") is not None), {"block_size": 16})
        return _named(
            where,
            cls,
            **sizes,
            num_target_layers=target_layers,
            block_size=_need(holder, "block_size", where),
            mask_token_id=mask,
            tap_layers=tuple(taps) if taps is not None else default_taps(target_layers, sizes["num_layers"]),
            causal=next(iter(flags.values()), False),
            dtype=_dtype(raw, where),
        )

    def to_hf(self) -> dict[str, Any]:
        """The published `config.json` of this head, in the spelling of the official release."""
        return {
            "architectures": ["DFlashDraftModel"],
            "model_type": "qwen3",
            "attention_bias": False,
            "block_size": self.block_size,
            "dflash_config": {
                "causal_head": self.causal,
                "mask_token_id": self.mask_token_id,
                "target_layer_ids": list(self.tap_layers),
            },
            "dtype": self.dtype or "bfloat16",
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "layer_types": ["full_attention"] * self.num_layers,
            "max_position_embeddings": self.max_positions,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": self.num_layers,
            "num_key_value_heads": self.num_kv_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": self.rope_scaling.to_hf() if self.rope_scaling else None,
            "rope_theta": self.rope_theta,
            "sliding_window": None,
            "tie_word_embeddings": False,
            "use_sliding_window": False,
            "vocab_size": self.vocab_size,
        }


def default_taps(num_target_layers: int, num_taps: int) -> tuple[int, ...]:
    """Evenly spaced tapped layers, the formula of the published heads (36 layers, 5 taps: 1, 9, 17, 25, 33)."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))


def as_ids(value: Any, where: str = "config.json") -> tuple[int, ...]:
    """`eos_token_id` is a number, a list or null in the files."""
    ids = value if isinstance(value, list | tuple) else [] if value is None else [value]
    if not all(_whole(i) for i in ids):
        raise ConfigError(f"{where}: eos_token_id is {value!r}; a token id or a list of them is needed")
    return tuple(ids)


def _flag(raw: dict[str, Any], key: str, where: str) -> bool:
    value = raw.get(key)
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{where}: {key} is {value!r}; true or false is needed")
    return bool(value)


def _need(raw: dict[str, Any], key: str, where: str, default: int | None = None) -> int:
    value = raw.get(key) if raw.get(key) is not None else default
    if not _whole(value) or value < 1:
        raise ConfigError(f"{where}: {key} is {value!r}; a whole number >= 1 is needed")
    return value


def _real(value: Any, key: str, where: str) -> float:
    if not (_whole(value) or isinstance(value, float)) or not 0 < value < math.inf:
        raise ConfigError(f"{where}: {key} is {value!r}; a number > 0 is needed")
    return float(value)


def _dtype(raw: dict[str, Any], where: str) -> str | None:
    """New files say `dtype`, old ones `torch_dtype`."""
    value = raw.get("dtype") or raw.get("torch_dtype")
    if value is not None and not isinstance(value, str):
        raise ConfigError(f"{where}: dtype is {value!r}; a name like 'bfloat16' is needed")
    return value


def _named(where: str, cls, **values):
    """`cls(**values)`; what it refuses is said with the file's name."""
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def _sizes(raw: dict[str, Any], where: str) -> dict[str, Any]:
    """What target and head have in common, with the defaults of transformers' Qwen3."""
    hidden, heads = _need(raw, "hidden_size", where), _need(raw, "num_attention_heads", where)
    split = 128 if raw.get("model_type", "qwen3") == "qwen3" else max(hidden // heads, 1)
    positions = _need(raw, "max_position_embeddings", where, 32768)
    return {
        "vocab_size": _need(raw, "vocab_size", where),
        "hidden_size": hidden,
        "num_layers": _need(raw, "num_hidden_layers", where),
        "num_heads": heads,
        "num_kv_heads": _need(raw, "num_key_value_heads", where, heads),
        "head_dim": _need(raw, "head_dim", where, split),
        "intermediate_size": _need(raw, "intermediate_size", where),
        "norm_eps": _real(raw.get("rms_norm_eps", 1e-6), "rms_norm_eps", where),
        **_rope(raw, where, positions),
        "max_positions": positions,
    }


def _check_heads(c: ModelConfig | HeadConfig) -> None:
    if c.num_heads % c.num_kv_heads:
        raise ConfigError(
            f"num_attention_heads={c.num_heads} must be a multiple of num_key_value_heads={c.num_kv_heads}"
        )
    if c.head_dim % 2:
        raise ConfigError(f"head_dim={c.head_dim} must be even: RoPE rotates pairs of channels")


def _rope(raw: dict[str, Any], where: str, max_positions: int) -> dict[str, Any]:
    """Old files say `rope_theta` and `rope_scaling`, new ones `rope_parameters`; the new spelling wins."""
    theta, scaling = raw.get("rope_theta"), None
    for key in ("rope_scaling", "rope_parameters"):
        rope = raw.get(key) or {}
        if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
            raise ConfigError(f"{where}: {key} is {rope!r}; one set of parameters for all layers is needed")
        if rope.get("partial_rotary_factor", 1) != 1:
            raise ConfigError(f"{where}: {key}: partial_rotary_factor={rope['partial_rotary_factor']} is not supported")
        try:
            scaling = RopeScaling.from_hf(rope, max_positions) or scaling
        except ValueError as error:
            raise ConfigError(f"{where}: {key}: {error}") from None
        theta = rope.get("rope_theta", theta)
    return {
        "rope_theta": _real(10000.0 if theta is None else theta, "rope_theta", where),
        "rope_scaling": scaling,
    }


def _moe(raw: dict[str, Any], where: str) -> MoEConfig:
    layers, step = _need(raw, "num_hidden_layers", where), _need(raw, "decoder_sparse_step", where, 1)
    dense = raw.get("mlp_only_layers") or []
    if not (isinstance(dense, list) and all(_whole(i) for i in dense)):
        raise ConfigError(f"{where}: mlp_only_layers is {dense!r}; give a list of layers, 0-based")
    key = next((k for k in ("num_experts", "num_local_experts") if raw.get(k) is not None), None)
    if key is None:
        raise ConfigError(f"{where}: neither num_experts nor num_local_experts is given")
    return _named(
        where,
        MoEConfig,
        num_experts=_need(raw, key, where),
        experts_per_token=_need(raw, "num_experts_per_tok", where),
        intermediate_size=_need(raw, "moe_intermediate_size", where),
        normalize_top_k=bool(raw.get("norm_topk_prob", False)),
        sparse_layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )


def _refuse_unsupported(raw: dict[str, Any], where: str) -> None:
    for key in ("attention_bias", "mlp_bias"):
        if raw.get(key):
            raise ConfigError(f"{where}: {key}=true is not supported; Qwen3 and its heads have no biases")
    if raw.get("hidden_act", "silu") != "silu":
        raise ConfigError(f"{where}: hidden_act={raw['hidden_act']!r} is not supported; only silu is")
    windowed = raw.get("use_sliding_window", raw.get("sliding_window") is not None)
    kinds = any(kind != "full_attention" for kind in raw.get("layer_types") or ())
    if kinds or (windowed and raw.get("sliding_window")):
        named = f"layer_types={sorted(set(raw['layer_types']))}" if kinds else f"sliding_window={raw['sliding_window']}"
        raise ConfigError(f"{where}: {named}: only full attention is supported, in every layer")
    if raw.get("quantization_config"):
        raise ConfigError(f"{where}: quantization_config is not supported; give an unquantised checkpoint")
