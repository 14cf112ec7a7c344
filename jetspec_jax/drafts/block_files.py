"""How the block head lies in files: its `config.json`, of JetSpec's or DFlash's kind, and the names of its tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jetspec_jax.config import (
    MOST_BLOCK,
    MOST_LAYERS,
    MOST_SIZE,
    MOST_TOKENS,
    HeadConfig,
    ModelConfig,
    default_taps,
    named,
    refuse_unsupported,
    stack,
)
from jetspec_jax.fields import ConfigError, Fields, shown
from jetspec_jax.models import names as published

TABLES = ("dflash_config", "jetspec_config")  # one format under two names
FLAGS = ("causal_head", "causal")  # one flag under two names

# What is read, here and by `config.stack` and `config.refuse_unsupported`.
READ = {
    *TABLES, "model_type", "num_target_layers", "block_size", "vocab_size", "hidden_size", "num_hidden_layers",
    "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "rms_norm_eps", "rope_theta",
    "rope_scaling", "rope_parameters", "partial_rotary_factor", "max_position_embeddings", "dtype", "torch_dtype",
    "attention_bias", "mlp_bias", "hidden_act", "sliding_window", "use_sliding_window", "layer_types",
    "quantization_config",
}  # fmt: skip
READ_INSIDE = {*FLAGS, "mask_token_id", "target_layer_ids", "target_hidden_size", "block_size", "num_target_layers"}

# What changes nothing that a head computes: what tools write of themselves, what only training or sampling reads, what
# a head borrows from its target, and leftovers of a mixture-of-experts target (else its tensors would be there too).
HARMLESS = {
    "architectures", "auto_map", "transformers_version", "_name_or_path", "name_or_path", "_commit_hash", "license",
    "tags", "library_name", "base_model", "target_model", "target_model_name_or_path", "base_model_name_or_path",
    "_attn_implementation", "attn_implementation", "_attn_implementation_autoset", "_experts_implementation",
    "initializer_range", "attention_dropout", "hidden_dropout", "dropout", "use_cache", "gradient_checkpointing",
    "max_window_layers", "tie_word_embeddings", "is_causal", "is_decoder", "is_encoder_decoder", "torchscript",
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "decoder_start_token_id", "unk_token_id",
    "id2label", "label2id", "problem_type", "finetuning_task", "task_specific_params", "tokenizer_class", "prefix",
    "return_dict", "output_attentions", "output_hidden_states", "chunk_size_feed_forward", "pretraining_tp",
    "temperature", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "diversity_penalty",
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "num_return_sequences",
    "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob", "num_experts",
    "num_experts_per_tok", "num_local_experts", "output_router_logits", "router_aux_loss_coef",
    "shared_expert_intermediate_size", "num_anchors", "max_anchors", "loss_type", "loss_decay_gamma",
}  # fmt: skip
# Keys that are harmless with one value.
NEUTRAL = {
    "attention_mode": "gqa", "projector_type": "dflash", "draft_arch": "qwen3", "spec_decode_type": "jetspec",
    "engine_role": "draft", "rope_is_neox_style": True, "rope_interleaved": False,
}  # fmt: skip


def reads(causal: bool, raw: Mapping[str, Any]) -> bool:
    """Returns whether a `config.json` is of this format, with such a block."""
    tables = [raw[name] for name in TABLES if raw.get(name) is not None]
    flags = [table.get(flag) for table in tables if isinstance(table, Mapping) for flag in FLAGS]
    return bool(tables) and (True in flags) == causal


def config(
    raw: Mapping[str, Any],
    where: str = "config.json",
    warn: Callable[[str], None] = lambda line: None,
    target: ModelConfig | None = None,
) -> HeadConfig:
    """Returns what the published head format says; both names of the table and of the causal flag are understood.

    Raises:
      ConfigError: a value is wrong, two contradict each other, or a key may change what the head computes and is not
        understood.
    """
    fields = Fields(raw, where)
    if fields.text("model_type", "qwen3") != "qwen3":
        raise fields.wrong("model_type", "that is no draft head; heads are qwen3")
    given = [name for name in TABLES if fields.has(name)]
    if len(given) != 1:
        raise ConfigError(
            f"{where}: {' and '.join(TABLES)} together; keep one" if given else f"{where}: no {TABLES[0]}"
        )
    block = fields.table(given[0])
    refuse_unsupported(fields)
    twice = {key for key in READ_INSIDE if key in block.raw and fields.raw.get(key) == block.raw[key]}
    refuse_unknown(fields, READ | twice)
    refuse_unknown(block, READ_INSIDE)
    sizes = stack(fields)
    width = block.whole("target_hidden_size", 1, MOST_SIZE, sizes["hidden_size"])
    if width != sizes["hidden_size"]:
        raise block.wrong("target_hidden_size", f"only hidden_size={sizes['hidden_size']} is supported, no adapter")
    layers = _one(fields, block, "num_target_layers", MOST_LAYERS)
    taps = block.wholes("target_layer_ids", -MOST_LAYERS, MOST_LAYERS)
    usual = () if block.has("target_layer_ids") else default_taps(layers, sizes["num_layers"])
    return named(
        where,
        HeadConfig,
        **sizes,
        num_target_layers=layers,
        block_size=_one(block, fields, "block_size", MOST_BLOCK, 16),
        mask_token_id=block.whole("mask_token_id", 0, MOST_TOKENS),
        tap_layers=taps or usual,
        causal=_causal(block, warn),
    )


def names(c: HeadConfig) -> dict[str, Any]:
    """Returns a tree like the head's parameters, of `Fusion`s."""
    return {
        "fc": published.matrix("fc.weight", c.hidden_size),
        "hidden_norm": published.plain("hidden_norm.weight", c.hidden_size),
        "layers": {i: published.layer(c, f"layers.{i}.") for i in range(c.num_layers)},
        "norm": published.plain("norm.weight", c.hidden_size),
    }


def _one(first: Fields, second: Fields, key: str, most: int, default: int | None = None) -> int:
    """Returns a size that may stand in either table; the first wins."""
    return (first if first.has(key) or not second.has(key) else second).whole(key, 1, most, default)


def _causal(block: Fields, warn: Callable[[str], None]) -> bool:
    flags = {key: block.flag(key) for key in FLAGS if block.has(key)}
    if len(set(flags.values())) > 1:
        pair = " contradicts ".join(f"{key}={value}" for key, value in flags.items())
        raise ConfigError(f"{block.where}: {pair}; keep one")
    if not flags:
        warn(f"{block.where}: neither causal_head nor causal is given; taking the head as bidirectional (DFlash)")
    return next(iter(flags.values()), False)


def refuse_unknown(fields: Fields, known: set[str]) -> None:
    """What is off, null or empty cannot change anything, whatever it is called."""
    for key, value in fields.raw.items():
        if fields.off(key) or key in known or key in HARMLESS or (key in NEUTRAL and value == NEUTRAL[key]):
            continue
        if key == "draft_vocab_size" and value == fields.raw.get("vocab_size"):
            continue
        raise ConfigError(
            f"{fields.where}: {fields.inside}{shown(key)[1:-1]} is {shown(value)}; it may change what the head "
            "computes, and is not understood; take it out if it does not"
        )
