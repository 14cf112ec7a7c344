"""How a DSpark head lies in files: the `config.json` of its published checkpoints, and the names of its tensors."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jetspec_jax.config import (
    MOST_BLOCK,
    MOST_LAYERS,
    MOST_SIZE,
    MOST_TOKENS,
    HeadConfig,
    ModelConfig,
    named,
    refuse_unsupported,
    stack,
)
from jetspec_jax.drafts import block_files
from jetspec_jax.fields import ConfigError, Fields
from jetspec_jax.models import names as published

KINDS = ("vanilla", "gated", "rnn")
KEYS = {
    "target_layer_ids", "mask_token_id", "enable_confidence_head", "confidence_head_with_markov", "markov_rank",
    "markov_head_type",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class DSparkConfig(HeadConfig):
    """A bidirectional block whose anchor drafts too, a Markov head after it, and a confidence.

    markov_rank: 0 is no Markov head.
    markov: its kind.
    confidence: whether the head says how far it trusts its tokens.
    confidence_markov: whether that reads the token before.
    num_anchors: of its training, without meaning here; its own loader asks for it.
    """

    markov_rank: int = 0
    markov: str = "vanilla"
    confidence: bool = False
    confidence_markov: bool = False
    num_anchors: int = 512

    def __post_init__(self):
        super().__post_init__()
        if self.confidence_markov and not (self.confidence and self.markov_rank):
            raise ConfigError(
                "confidence_head_with_markov=True: it reads the Markov head's rows and feeds a confidence head; give "
                "markov_rank and enable_confidence_head too, or turn it off"
            )

    @property
    def depth(self) -> int:
        """Positions drafted a round: the whole block."""
        return self.block_size

    def to_hf(self) -> dict[str, Any]:
        """Returns the published `config.json` of this head."""
        raw = super().to_hf()
        del raw["dflash_config"]
        return raw | {
            "architectures": ["Qwen3DSparkModel"],
            "confidence_head_with_markov": self.confidence_markov,
            "enable_confidence_head": self.confidence,
            "markov_head_type": self.markov,
            "markov_rank": self.markov_rank,
            "mask_token_id": self.mask_token_id,
            "num_anchors": self.num_anchors,
            "target_layer_ids": list(self.tap_layers),
        }


def reads(raw: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` is of this format."""
    said = raw.get("architectures")
    texts = [x for x in said if isinstance(x, str)] if isinstance(said, list | tuple) else []
    return "dspark" in " ".join(texts).casefold() and not any(raw.get(name) for name in block_files.TABLES)


def config(
    raw: Mapping[str, Any],
    where: str = "config.json",
    warn: Callable[[str], None] = lambda line: None,
    target: ModelConfig | None = None,
) -> DSparkConfig:
    """Returns what a published `config.json` says.

    Raises:
      ConfigError: a value is wrong, or a key may change what the head computes and is not understood.
    """
    fields = Fields(raw, where)
    if fields.text("model_type", "qwen3") != "qwen3":
        raise fields.wrong("model_type", "only DSpark heads of qwen3 are supported")
    refuse_unsupported(fields)
    block_files.refuse_unknown(fields, KEYS | block_files.READ - set(block_files.TABLES))
    taps = fields.wholes("target_layer_ids", -1, MOST_LAYERS)
    if -1 in taps:
        raise fields.wrong(
            "target_layer_ids", "-1 is the embedding's output, which is not supported; outputs of layers are"
        )
    confidence = fields.flag("enable_confidence_head")
    return named(
        where,
        DSparkConfig,
        **stack(fields),
        num_target_layers=fields.whole("num_target_layers", 1, MOST_LAYERS),
        block_size=fields.whole("block_size", 1, MOST_BLOCK),
        mask_token_id=fields.whole("mask_token_id", 0, MOST_TOKENS),
        tap_layers=taps,
        causal=False,
        markov_rank=fields.whole("markov_rank", 0, MOST_SIZE, 0),
        markov=fields.text("markov_head_type", "vanilla", KINDS),
        confidence=confidence,
        confidence_markov=confidence and fields.flag("confidence_head_with_markov"),
        num_anchors=fields.whole("num_anchors", 1, default=DSparkConfig.num_anchors),
    )


def names(c: DSparkConfig) -> dict[str, Any]:
    """Returns a tree like the head's parameters, of `Fusion`s."""
    tree, rank = block_files.names(c), c.markov_rank
    if rank:
        prefix = "markov_head."
        rows = lambda name: published.plain(f"{prefix}{name}.weight", c.vocab_size)
        tree["markov"] = {"w1": rows("markov_w1"), "w2": rows("markov_w2")}
        own = {"gated": ("gate", rank), "rnn": ("joint", 3 * rank)}.get(c.markov)
        if own:
            name, size = own
            tree["markov"] |= {
                name: published.matrix(f"{prefix}{name}_proj.weight", size),
                f"{name}_bias": published.plain(f"{prefix}{name}_proj.bias", size),
            }
    if c.confidence:
        proj = "confidence_head.proj."
        tree["confidence"] = {"proj": published.plain(proj + "weight", 1), "bias": published.plain(proj + "bias", 1)}
    return tree
