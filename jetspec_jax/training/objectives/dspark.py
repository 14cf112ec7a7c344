"""Training of DSpark heads (arXiv 2607.05147): blocks at drawn anchors, a Markov head after them, a confidence.

The block is that of `objectives.block`, bidirectional, and its anchor's slot drafts too. Logits are a sum of two
products: hidden states with the target's lm_head, and the Markov head's rows with a table of its own. The token before
a slot is the text's (teacher forcing), as on a path of decoding that is right so far, so no token waits for another.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jetspec_jax.config import ModelConfig
from jetspec_jax.drafts import dspark as draft
from jetspec_jax.drafts.dspark import DSpark
from jetspec_jax.drafts.dspark_files import DSparkConfig
from jetspec_jax.training import anchors as anchor_rules
from jetspec_jax.training import initial, settings, teacher
from jetspec_jax.training.anchors import Anchors
from jetspec_jax.training.data.batches import Batch
from jetspec_jax.training.losses import Logits, Term
from jetspec_jax.training.objective import Questions
from jetspec_jax.training.objectives import block
from jetspec_jax.training.recipe import Recipe
from jetspec_jax.training.settings import Settings
from jetspec_jax.training.teacher import Features

FOREIGN = (
    "unroll", "unroll_decay", "draft_vocab", "causal", "scorer_rank", *settings.SCORER, "frozen_head",
)  # fmt: skip

check_start, decide, fold, unfold = block.check_start, block.decide, block.fold, block.unfold


class Inputs(NamedTuple):
    """What the forward reads beside the features."""

    blocks: block.Blocks
    before: Int[Array, "B A D"]  # the text's token before each label


def configure(config: Settings, target: ModelConfig) -> DSparkConfig:
    """Returns the head with every size that is no setting from the target.

    Raises:
      ConfigError: a tap or the mask does not fit this target, or a key is one of other families.
    """
    settings.refuse_foreign(config, FOREIGN)
    if not config.markov_rank and config.markov_head != "vanilla":
        raise settings.wrong("markov_head", config.markov_head, "markov_rank=0 is no Markov head; give one of the two")
    confident = config.confidence > 0
    return block.sized(
        DSparkConfig, config, target, causal=False, markov_rank=config.markov_rank, markov=config.markov_head,
        confidence=confident, confidence_markov=confident and config.markov_rank > 0, num_anchors=config.anchors,
    )  # fmt: skip


def init(config: DSparkConfig, key: jax.Array, target_params: dict, decided: dict) -> dict:
    """Returns matrices from N(0, 0.02), norms of one, biases of zero; the last norm is a share of the target's."""
    _, shapes = draft.build(config, jnp.float32)
    start = initial.draw(shapes, key) | initial.norm(target_params)
    for part in {"markov", "confidence"} & start.keys():
        start[part] |= {name: 0 * x for name, x in start[part].items() if x.ndim == 1}
    return start


def draw(recipe: Recipe, target_params: dict, part: Batch, keys: Key[Array, " B"]) -> Questions:
    """Returns blocks at `recipe.anchors` places a sequence, drawn without replacement."""
    candidate = anchor_rules.candidates(part.learnt, part.document)
    return _asked(recipe, target_params, part, anchor_rules.sample(keys, candidate, recipe.anchors), recipe.gamma)


def ask(
    recipe: Recipe, target_params: dict, part: Batch, place: Int[Array, "B A"], valid: Bool[Array, "B A"]
) -> Questions:
    """Returns blocks at these places; every label that exists weighs 1."""
    return _asked(recipe, target_params, part, Anchors(place, valid), 0.0)


def _asked(recipe: Recipe, target_params, part: Batch, anchors: Anchors, gamma: float) -> Questions:
    asked = block.blocks(recipe, target_params, part, anchors, gamma)
    return asked._replace(inputs=Inputs(asked.inputs, block.before(part, asked.label)))


def hidden(recipe: Recipe, folded: dict, part: Batch, features: Features, asked: Questions) -> Float[Array, "B A D E"]:
    """Returns hidden states of all slots, with the parameters of the finished head."""
    anchors, embedded, _ = asked.inputs.blocks
    return block.forward(
        _module(recipe, folded), embedded, anchors, features.taps, part.document, part.position,
        attention=recipe.attention, remat=recipe.remat, window=recipe.window,
    )  # fmt: skip


def logits(
    recipe: Recipe, target_params: dict, folded: dict, hidden: Float[Array, "B A D E"], asked: Questions
) -> Logits:
    """Returns the products with the target's lm_head, and those of the Markov head with its own table."""
    own = Term(hidden, teacher.unembedding(target_params))
    if not recipe.head.markov_rank:
        return Logits((own,))
    markov, (rows, before) = _module(recipe, folded).markov, _flat(hidden, asked)
    added, _ = markov.rows(rows, before, jnp.zeros((*before.shape, 0), rows.dtype))
    return Logits((own, Term(added.reshape(*hidden.shape[:3], -1), folded["markov"]["w2"], trained=True)))


def confidence(
    recipe: Recipe, folded: dict, hidden: Float[Array, "B A D E"], asked: Questions
) -> Float[Array, "B A D"] | None:
    """Returns what the head expects of each slot, if it has a confidence."""
    if not recipe.head.confidence:
        return None
    return _module(recipe, folded).trust(*_flat(hidden, asked)).reshape(hidden.shape[:3])


def by_path(config: DSparkConfig) -> bool:
    """Returns True: a slot's logits are those after the token before."""
    return True


def work(recipe: Recipe, sequences: int, length: int) -> dict[str, float]:
    """Returns operations of the head, counted as `flops` says, and the slots that become logits."""
    found, c = block.work(recipe, sequences, length), recipe.head
    gate = 2 * found["slots"] * (c.hidden_size + c.markov_rank) * c.markov_rank * (c.markov == "gated")
    return found | {
        "head_forward": found["head_forward"] + gate,
        "head_backward": found["head_backward"] + 2 * gate,
        "table": found["table"] + 3 * 2.0 * c.vocab_size * c.markov_rank,
    }


def describe(recipe: Recipe) -> dict[str, str]:
    """Returns the block of a head and what comes after it, for its model card."""
    c: DSparkConfig = recipe.head
    return block.describe(recipe) | {
        "Markov head": f"{c.markov}, rank {c.markov_rank}" if c.markov_rank else "none",
        "confidence": f"learnt with a share of {recipe.confidence:g} beside the loss" if c.confidence else "none",
    }


def _module(recipe: Recipe, folded: dict) -> DSpark:
    graphdef = draft.build(recipe.head, recipe.dtype)[0].graphdef
    return nnx.merge(graphdef, nnx.State(folded))


def _flat(hidden: Float[Array, "B A D E"], asked: Questions) -> tuple[Any, Any]:
    """Returns hidden states [B, A * D, E] and the tokens before [B, A * D], as the heads take slots."""
    batch = len(hidden)
    return hidden.reshape(batch, -1, hidden.shape[-1]), asked.inputs.before.reshape(batch, -1)
