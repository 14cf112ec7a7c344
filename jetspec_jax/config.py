"""Frozen, validated descriptions of targets and heads; those of trees and sampling come from `options.py`.

Every class checks itself when it is made, so that a wrong value is refused with one line that names the option, the
value and the valid range, before any array is touched. `ModelConfig` reads the `config.json` of a Hugging Face folder
in its old and new spellings; `stack` reads what a draft head says in the same words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from jetspec_jax.fields import ConfigError, Fields, shown
from jetspec_jax.layers.rope_scaling import RopeScaling
from jetspec_jax.options import MIN_TEMPERATURE, SamplingConfig, TreeConfig

__all__ = [
    "MIN_TEMPERATURE",
    "ConfigError",
    "HeadConfig",
    "MoEConfig",
    "ModelConfig",
    "SamplingConfig",
    "TreeConfig",
    "default_taps",
    "named",
    "refuse_unsupported",
    "stack",
]  # fmt: skip

MODEL_TYPES = ("qwen3", "qwen3_moe", "llama")
# No model comes near these; a file that does would be looped over and allocated before anything else is noticed.
MOST_LAYERS, MOST_SIZE, MOST_EXPERTS, MOST_TOKENS, MOST_POSITIONS = 1024, 1 << 20, 4096, 1 << 24, 1 << 30
MOST_BLOCK = 1024


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
        check_heads(self)

    @property
    def context_length(self) -> int:
        """Positions that a request may use, RoPE scaling included."""
        return self.rope_scaling.context_length(self.max_positions) if self.rope_scaling else self.max_positions

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], where: str = "config.json") -> ModelConfig:
        """Reads a Hugging Face `config.json`; refuses what this package would compute wrongly, by name."""
        fields = Fields(raw, where)
        if fields.text("model_type", "") not in MODEL_TYPES:
            raise fields.wrong("model_type", f"not supported; use {', '.join(MODEL_TYPES)}")
        refuse_unsupported(fields)
        sizes = stack(fields)
        return named(
            where,
            cls,
            model_type=fields.text("model_type"),
            **sizes,
            tie_embeddings=fields.flag("tie_word_embeddings"),
            qk_norm=fields.text("model_type") != "llama",
            moe=_moe(fields) if fields.text("model_type") == "qwen3_moe" else None,
            eos_token_ids=fields.ids("eos_token_id", sizes["vocab_size"]),
        )


@runtime_checkable
class Sizes(Protocol):
    """What `models.layer.Layer` reads of the configuration of a target or a head."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def num_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def intermediate_size(self) -> int: ...

    @property
    def norm_eps(self) -> float: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def qk_norm(self) -> bool: ...

    @property
    def moe(self) -> MoEConfig | None: ...

    @property
    def rope_scaling(self) -> RopeScaling | None: ...


@dataclasses.dataclass(frozen=True)
class HeadConfig:
    """A JetSpec or DFlash draft head: a small stack without embedding and lm_head (both borrowed from the target).

    scorer_rank: of the scorer beside it (`drafts/scorer.py`), which no published file has; 0: there is none.
    scorer_width: of the SwiGLU of its parents; 0: they are of another kind.
    scorer_kind: a key of `drafts.scorer.KINDS`; "": the width tells.
    """

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
    scorer_rank: int = 0
    scorer_width: int = 0
    scorer_kind: str = ""

    moe = None  # a head is dense; `models.layer.Layer` reads these two of any configuration
    qk_norm = True

    def __post_init__(self):
        check_heads(self)
        if not 2 <= self.block_size <= MOST_BLOCK:
            raise ConfigError(
                f"block_size={self.block_size}: a block is one anchor and at least one drafted slot, 2..{MOST_BLOCK}"
            )
        check_taps(self.tap_layers, self.num_target_layers)
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ConfigError(f"mask_token_id={self.mask_token_id}: give an embedding row in 0..{self.vocab_size - 1}")

    @property
    def depth(self) -> int:
        """Positions drafted a round: the block without its anchor."""
        return self.block_size - 1

    @property
    def scorer(self) -> str:
        """Kind of the scorer, where there is one."""
        return self.scorer_kind or ("swiglu" if self.scorer_width else "product")

    @property
    def usual_taps(self) -> tuple[int, ...]:
        """Tapped layers of published heads with this target."""
        return default_taps(self.num_target_layers, len(self.tap_layers))

    def differing(self, target: ModelConfig) -> list[tuple[str, int, int]]:
        """Returns the sizes that differ from this target's and must not: name, the head's, the target's."""
        return differing(self, target)

    def to_hf(self) -> dict[str, Any]:
        """Returns the published `config.json` of this head, in the spelling of the official release."""
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
    """Returns evenly spaced tapped layers, by the formula of the published heads (36, 5: 1, 9, 17, 25, 33)."""
    if num_taps == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + i * (num_target_layers - 4) / (num_taps - 1)) for i in range(num_taps))


def stack(fields: Fields) -> dict[str, Any]:
    """Returns what target and head have in common, dtype included, with the defaults of transformers' Qwen3."""
    size = lambda key, default=None, most=MOST_SIZE: fields.whole(key, 1, most, default)
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    split = 128 if fields.text("model_type", "qwen3") == "qwen3" else max(hidden // heads, 1)
    positions = size("max_position_embeddings", 32768, MOST_POSITIONS)
    dtype = next((key for key in ("dtype", "torch_dtype") if fields.has(key)), None)  # new files, and old ones
    return {
        "vocab_size": size("vocab_size", most=MOST_TOKENS),
        "hidden_size": hidden,
        "num_layers": size("num_hidden_layers", most=MOST_LAYERS),
        "num_heads": heads,
        "num_kv_heads": size("num_key_value_heads", heads),
        "head_dim": size("head_dim", split),
        "intermediate_size": size("intermediate_size"),
        "norm_eps": fields.real("rms_norm_eps", 1e-12, 1, 1e-6),
        **_rope(fields, positions),
        "max_positions": positions,
        "dtype": fields.text(dtype) if dtype else None,
    }


def named(where: str, cls, **values):
    """Returns `cls(**values)`; what it refuses is said with the file's name."""
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from None


def refuse_unsupported(fields: Fields) -> None:
    """Raises ConfigError for what target or head would compute otherwise than their file says."""
    for key in ("attention_bias", "mlp_bias"):
        if fields.flag(key):
            raise fields.wrong(key, "not supported; Qwen3 and its heads have no biases")
    fields.text("hidden_act", "silu", ("silu",))
    window = fields.whole("sliding_window", 0, default=0)
    if window and fields.flag("use_sliding_window", True):
        raise fields.wrong("sliding_window", "only full attention is supported, in every layer")
    fields.flag("use_sliding_window")
    others = sorted(set(fields.texts("layer_types")) - {"full_attention"})
    if others:
        raise ConfigError(f"{fields.where}: layer_types has {shown(others)}; only full_attention is supported")
    if fields.table("quantization_config").raw:
        raise fields.wrong("quantization_config", "not supported; give an unquantised checkpoint")
    _whole_heads(fields)


def _whole_heads(fields: Fields) -> None:
    if fields.real("partial_rotary_factor", 0, 1, 1.0) != 1:
        raise fields.wrong("partial_rotary_factor", "not supported; RoPE turns whole heads")


def differing(head: Any, target: ModelConfig) -> list[tuple[str, int, int]]:
    """Returns the sizes of a head's configuration that differ from its target's: name, the head's, the target's."""
    pairs = [
        ("hidden_size", head.hidden_size, target.hidden_size),
        ("vocab_size", head.vocab_size, target.vocab_size),
        ("num_target_layers", head.num_target_layers, target.num_layers),
    ]
    return [pair for pair in pairs if pair[1] != pair[2]]


def check_taps(taps: tuple[int, ...], layers: int) -> None:
    """Raises ConfigError where a head reads no layer, one twice, or one that a target of so many layers lacks."""
    if not taps:
        raise ConfigError("target_layer_ids=[]: a head needs at least one tapped layer of the target")
    if len(set(taps)) != len(taps):
        raise ConfigError(f"target_layer_ids={shown(list(taps))}: a layer is listed twice")
    for tap in taps:
        if not 0 <= tap < layers:
            raise ConfigError(
                f"target_layer_ids={shown(list(taps))}: {tap} is not a layer of the target; "
                f"ids are 0-based, 0..{layers - 1}, and name the output of that layer"
            )


def check_heads(c: Any) -> None:
    """Raises ConfigError where a configuration's attention heads cannot be."""
    if c.num_heads % c.num_kv_heads:
        raise ConfigError(
            f"num_attention_heads={c.num_heads} must be a multiple of num_key_value_heads={c.num_kv_heads}"
        )
    if c.head_dim % 2:
        raise ConfigError(f"head_dim={c.head_dim} must be even: RoPE rotates pairs of channels")


def _rope(fields: Fields, max_positions: int) -> dict[str, Any]:
    """Old files say `rope_theta` and `rope_scaling`, new ones `rope_parameters`; the new spelling wins."""
    theta, scaling = fields.real("rope_theta", 1e-9, 1e30, 10000.0), None
    for key in ("rope_scaling", "rope_parameters"):
        rope = fields.table(key)
        if any(isinstance(value, Mapping) for value in rope.raw.values()):
            raise fields.wrong(key, "one set of parameters for all layers is needed")
        _whole_heads(rope)
        try:
            scaling = RopeScaling.from_hf(rope, max_positions) or scaling
        except ConfigError:
            raise
        except ValueError as error:  # values that do not go together
            raise ConfigError(f"{fields.where}: {key}: {error}") from None
        theta = rope.real("rope_theta", 1e-9, 1e30, theta)
    return {"rope_theta": theta, "rope_scaling": scaling}


def _moe(fields: Fields) -> MoEConfig:
    layers = fields.whole("num_hidden_layers", 1, MOST_LAYERS)
    step = fields.whole("decoder_sparse_step", 1, MOST_LAYERS, 1)
    dense = fields.wholes("mlp_only_layers", 0, layers - 1)
    experts = "num_experts" if fields.has("num_experts") or not fields.has("num_local_experts") else "num_local_experts"
    return named(
        fields.where,
        MoEConfig,
        num_experts=fields.whole(experts, 1, MOST_EXPERTS),
        experts_per_token=fields.whole("num_experts_per_tok", 1, MOST_EXPERTS),
        intermediate_size=fields.whole("moe_intermediate_size", 1, MOST_SIZE),
        normalize_top_k=fields.flag("norm_topk_prob"),
        sparse_layers=tuple(i for i in range(layers) if i not in dense and (i + 1) % step == 0),
    )
