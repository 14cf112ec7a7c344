"""How an EAGLE-3 head lies in files: the `config.json` of its published checkpoints, and the names of its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jetspec_jax.config import (
    MOST_LAYERS,
    MOST_SIZE,
    MOST_TOKENS,
    ModelConfig,
    check_heads,
    check_taps,
    differing,
    named,
    refuse_unsupported,
    stack,
)
from jetspec_jax.drafts.block_files import refuse_unknown
from jetspec_jax.fields import ConfigError, Fields
from jetspec_jax.layers.rope_scaling import RopeScaling
from jetspec_jax.models import names as published

# EAGLE-2's tree has a depth of 7, which counts the passes after the first.
DEPTH = 8
KEYS = ("eagle_config", "eagle_aux_hidden_state_layer_ids")
READ = {
    *KEYS, "draft_vocab_size", "target_hidden_size", "num_target_layers", "model_type", "vocab_size", "hidden_size",
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps",
    "rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings", "dtype",
    "torch_dtype", "attention_bias", "mlp_bias", "hidden_act", "sliding_window", "use_sliding_window", "layer_types",
    "quantization_config",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Eagle3Config:
    """One decoder layer over three tapped layers of the target, and an lm_head of its own.

    draft_vocab_size: tokens that it can draft; where they are fewer than the target's, a table says which.
    depth: longest drafted path; no file tells, and any works.
    """

    vocab_size: int
    draft_vocab_size: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    norm_eps: float
    rope_theta: float
    max_positions: int
    num_target_layers: int
    tap_layers: tuple[int, ...]
    qk_norm: bool = False
    depth: int = DEPTH
    dtype: str | None = None
    rope_scaling: RopeScaling | None = None

    moe = None  # `models.layer.Layer` reads it of any configuration
    num_layers = 1

    def __post_init__(self):
        check_heads(self)
        check_taps(self.tap_layers, self.num_target_layers)
        if not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ConfigError(f"draft_vocab_size={self.draft_vocab_size}: give 1..{self.vocab_size} tokens")

    @property
    def reduced(self) -> bool:
        """Whether the head drafts a part of the target's vocabulary."""
        return self.draft_vocab_size < self.vocab_size

    @property
    def usual_taps(self) -> tuple[int, ...]:
        """Tapped layers of published heads with this target."""
        return usual_taps(self.num_target_layers)

    def differing(self, target: ModelConfig) -> list[tuple[str, int, int]]:
        """Returns the sizes that differ from this target's and must not: name, the head's, the target's."""
        return differing(self, target)

    def to_hf(self) -> dict[str, Any]:
        """Returns the `config.json` of this head as EAGLE's trainers write it."""
        return {
            "architectures": ["LlamaForCausalLMEagle3"],
            "model_type": "qwen3" if self.qk_norm else "llama",
            "attention_bias": False,
            "draft_vocab_size": self.draft_vocab_size,
            "dtype": self.dtype or "bfloat16",
            "eagle_config": {
                "eagle_aux_hidden_state_layer_ids": list(self.tap_layers), "use_aux_hidden_state": True
            },
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "hidden_size": self.hidden_size,
            "intermediate_size": self.intermediate_size,
            "max_position_embeddings": self.max_positions,
            "num_attention_heads": self.num_heads,
            "num_hidden_layers": 1,
            "num_key_value_heads": self.num_kv_heads,
            "num_target_layers": self.num_target_layers,
            "rms_norm_eps": self.norm_eps,
            "rope_scaling": self.rope_scaling.to_hf() if self.rope_scaling else None,
            "rope_theta": self.rope_theta,
            "tie_word_embeddings": False,
            "vocab_size": self.vocab_size,
        }  # fmt: skip


def usual_taps(layers: int) -> tuple[int, ...]:
    """Returns the tapped layers of EAGLE-3: inputs of layers 2, L/2 and L - 3, as outputs of those before."""
    return 1, layers // 2 - 1, layers - 4


def reads(raw: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` is of this format."""
    said = " ".join(raw["architectures"]) if _texts(raw.get("architectures")) else ""
    return "eagle3" in said.casefold()


def config(
    raw: Mapping[str, Any],
    where: str = "config.json",
    warn: Callable[[str], None] = lambda line: None,
    target: ModelConfig | None = None,
) -> Eagle3Config:
    """Returns what a published `config.json` says; its tapped layers and their number may be the target's to tell.

    Raises:
      ConfigError: a value is wrong, or a key may change what the head computes and is not understood.
    """
    fields = Fields(raw, where)
    kind = fields.text("model_type", "llama", ("llama", "qwen3"))
    refuse_unsupported(fields)
    nested = fields.table("eagle_config")
    refuse_unknown(fields, READ)
    refuse_unknown(nested, {"eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"})
    if not nested.flag("use_aux_hidden_state", True):
        raise nested.wrong("use_aux_hidden_state", "without tapped layers it is EAGLE-1 or 2; give an EAGLE-3 head")
    sizes = stack(fields)
    if sizes.pop("num_layers") != 1:
        raise fields.wrong("num_hidden_layers", "an EAGLE-3 head has 1 layer")
    width = fields.whole("target_hidden_size", 1, MOST_SIZE, sizes["hidden_size"])
    if width != sizes["hidden_size"]:
        raise fields.wrong("target_hidden_size", f"only hidden_size={sizes['hidden_size']} is supported, no adapter")
    layers = fields.whole("num_target_layers", 1, MOST_LAYERS, target.num_layers if target else None)
    return named(
        where,
        Eagle3Config,
        **sizes,
        draft_vocab_size=fields.whole("draft_vocab_size", 1, MOST_TOKENS, sizes["vocab_size"]),
        num_target_layers=layers,
        tap_layers=_taps(fields, nested) or usual_taps(layers),
        qk_norm=kind == "qwen3",
    )


def names(c: Eagle3Config) -> dict[str, Any]:
    """Returns a tree like the head's parameters, of `Fusion`s."""
    prefix = "midlayer."
    layer = published.layer(c, prefix) | {"hidden_norm": published.plain(prefix + "hidden_norm.weight", c.hidden_size)}
    tree = {
        "fc": published.matrix("fc.weight", c.hidden_size),
        "layer": layer,
        "norm": published.plain("norm.weight", c.hidden_size),
        "lm_head": published.plain("lm_head.weight", c.draft_vocab_size),
    }
    if c.reduced:
        tree["d2t"] = published.plain("d2t", c.draft_vocab_size)
    return tree


def check(c: Eagle3Config, params: dict[str, Any]) -> str | None:
    """Returns what is wrong with the table of the draft's vocabulary, None where nothing is."""
    if not c.reduced:
        return None
    ids = np.arange(c.draft_vocab_size) + np.asarray(params["d2t"])
    odd = ids[(ids < 0) | (ids >= c.vocab_size)]
    if odd.size:
        return f"d2t leads to token {odd[0]}, and the target's are 0..{c.vocab_size - 1}"
    known, count = np.unique(ids, return_counts=True)
    return f"d2t leads to token {known[count > 1][0]} twice" if (count > 1).any() else None


def _taps(fields: Fields, nested: Fields) -> tuple[int, ...]:
    """Returns the tapped layers as outputs. Files that name them at the top say whose input they are."""
    key = "eagle_aux_hidden_state_layer_ids"
    if nested.has(key):
        return nested.wholes(key, 0, MOST_LAYERS)
    return tuple(i - 1 for i in fields.wholes(key, 1, MOST_LAYERS))


def _texts(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(x, str) for x in value)
