"""Draft families: one row each. Whatever reads, writes, builds or trains a head goes through its row.

A new family is a file of its own and a row here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from jetspec_jax.drafts import block, block_files, dspark, dspark_files, eagle3, eagle3_files, ngram, synthetic
from jetspec_jax.fields import ConfigError, Fields
from jetspec_jax.loop.contracts import Draft


class Family(NamedTuple):
    """What the package knows of a family; None where it has no files, or cannot be trained.

    name: as jetspec.json says it. build: its draft, and the shapes of its parameters, of (config, dtype, backend).
    reads: whether a `config.json` is one of this family. config: its configuration, of (raw, where, warn, and the
    target's, or None). names: a tree like its parameters, of `models.names.Fusion`s. objective: dotted name of the
    module that trains it. marks: what it is told by, of the tables below. keeps: tensors called like the target's that
    are its own; any other is ignored. spare: tensors that say nothing new, copies of the target's among them. check:
    what is wrong with parameters that were read, of (config, params).
    """

    name: str
    build: Callable[..., tuple[Draft, dict]]
    reads: Callable[[Mapping[str, Any]], bool] | None = None
    config: Callable[..., Any] | None = None
    names: Callable[[Any], dict[str, Any]] | None = None
    objective: str | None = None
    marks: frozenset[str] = frozenset()
    keeps: frozenset[str] = frozenset()
    spare: frozenset[str] = frozenset()
    check: Callable[[Any, dict[str, Any]], str | None] | None = None


def _build_block(config, dtype, backend):
    return block.build(config, dtype, backend=backend)


def _block(name: str, causal: bool) -> Family:
    reads = functools.partial(block_files.reads, causal)
    objective = "jetspec_jax.training.objectives.block"
    return Family(name, _build_block, reads, block_files.config, block_files.names, objective)


EAGLE, DFLASH2, DSPARK, DOMINO, MEDUSA = "EAGLE", "DFlash 2", "DSpark", "Domino", "Medusa"
SMALL, CAPPED, LATENT = "a reduced draft vocabulary", "a softcap on logits", "latent attention (MLA)"

FAMILIES = (
    _block("jetspec", causal=True),
    _block("dflash", causal=False),
    Family(
        "eagle3", eagle3.build, eagle3_files.reads, eagle3_files.config, eagle3_files.names,
        "jetspec_jax.training.objectives.eagle3", marks=frozenset({EAGLE, SMALL}),
        keeps=frozenset({"lm_head.weight"}), spare=frozenset({"t2d"}), check=eagle3_files.check,
    ),
    Family(
        "dspark", dspark.build, dspark_files.reads, dspark_files.config, dspark_files.names,
        "jetspec_jax.training.objectives.dspark", marks=frozenset({DSPARK}),
        spare=frozenset({"embed_tokens.weight", "lm_head.weight"}),
    ),
    Family("ngram", ngram.build),
    Family("synthetic", synthetic.build),
)  # fmt: skip

# Heads are told by what they have; `Family.marks` says which of these a family of ours understands.
KEYS = {
    "markov_rank": DSPARK, "markov_head_type": DSPARK, "enable_confidence_head": DSPARK, "dspark_config": DSPARK,
    "confidence_head_with_markov": DSPARK, "emb_dim": DOMINO, "gru_hidden_dim": DOMINO, "domino_config": DOMINO,
    "pure_draft_prefix_len": DOMINO, "shift_label": DOMINO, "selector_rank": DFLASH2, "selector_top_k": DFLASH2,
    "conv_kernel_size": DFLASH2, "conv_group_size": DFLASH2, "eagle_config": EAGLE, "medusa_num_heads": MEDUSA,
    "eagle_aux_hidden_state_layer_ids": EAGLE, "final_logit_softcapping": CAPPED, "logit_softcapping": CAPPED,
    "attn_logit_softcapping": CAPPED, "kv_lora_rank": LATENT, "q_lora_rank": LATENT, "qk_rope_head_dim": LATENT,
}  # fmt: skip
WORDS = {"dspark": DSPARK, "domino": DOMINO, "dflash2": DFLASH2, "eagle": EAGLE, "medusa": MEDUSA, "mla": LATENT}
TENSORS = {
    "d2t": SMALL, "t2d": SMALL, "markov_head": DSPARK, "confidence_head": DSPARK, "prefix_gru": DOMINO, "gru": DOMINO,
    "selector": DFLASH2, "attention_conv": DFLASH2, "mlp_conv": DFLASH2, "midlayer": EAGLE, "medusa_head": MEDUSA,
    "kv_a_proj_with_mqa": LATENT, "hidden_dim_adapter": "an adapter between hidden sizes",
}  # fmt: skip


def named(name: Any) -> Family | None:
    """Returns the family of that name, None where there is none."""
    return next((family for family in FAMILIES if family.name == name), None)


def of_config(raw: Mapping[str, Any], where: str) -> Family:
    """Returns the family that a head's `config.json` belongs to.

    Raises:
      ConfigError: it belongs to none of ours; where it is one that we know of, the line names it.
    """
    fields = Fields(raw, where)
    marks = _marks(fields)
    read = [family for family in FAMILIES if family.reads and family.reads(raw)]
    for family in read:
        if marks.keys() <= family.marks:
            return family
    for mark, (table, key) in marks.items():
        if not any(mark in family.marks for family in read):
            layout = " in this layout" if any(mark in family.marks for family in FAMILIES) else ""
            raise table.wrong(key, f"a head {_with(mark)}{layout} is {_not_supported()}")
    if read:
        raise ConfigError(f"{where}: a head {' and '.join(map(_with, marks))}: one family has no such mixture")
    tables = " or ".join(block_files.TABLES)
    raise ConfigError(f"{where}: no {tables}, so this is no JetSpec or DFlash head; is it the target's folder?")


def refuse_foreign_tensors(family: Family, tensors: Collection[str], where: str) -> None:
    """Raises ConfigError where a head holds tensors of another family."""
    for tensor in sorted(tensors):
        for part in tensor.split("."):
            if part in TENSORS and TENSORS[part] not in family.marks:
                raise ConfigError(f"{where}: {tensor} makes it a head with {TENSORS[part]}, {_not_supported()}")


def _marks(fields: Fields) -> dict[str, tuple[Fields, str]]:
    """Returns what a configuration's keys and their values tell of its family: the table and the key of each mark."""
    found: dict[str, tuple[Fields, str]] = {}
    tables = [fields, *(Fields(v, fields.where, f"{k}.") for k, v in fields.raw.items() if isinstance(v, Mapping))]
    for table in tables:
        for key in ("architectures", "model_type", "projector_type", "attention_mode", "spec_decode_type"):
            said = str(table.raw.get(key) or "").casefold()
            for word, whose in WORDS.items():
                if said == word or (word in said and len(word) > 3):  # three letters are in many a name
                    found.setdefault(whose, (table, key))
        for key, whose in KEYS.items():
            if not table.off(key):
                found.setdefault(whose, (table, key))
        if table.raw.get("draft_vocab_size") not in (None, fields.raw.get("vocab_size")):
            found.setdefault(SMALL, (table, "draft_vocab_size"))
    return found


def _with(mark: str) -> str:
    return f"with {mark}" if mark in (SMALL, CAPPED, LATENT) else f"of {mark}"


def _not_supported() -> str:
    known = ", ".join(family.name for family in FAMILIES if family.reads)
    return f"not supported yet; families that are: {known}"
