"""Tokens that the head drafts itself, as parents that its scorer learns from.

The text alone shows a scorer the right parents. Half of a drafted tree hangs below others, so with
`scorer_parents="drafted"` a part of the slots gets as its parent a token drawn from the head's own row of the slot
above, in the place of the text's, and is taught the target's row after that token. This is what verifying the tree
would tell of the nodes beside the accepted path; the target runs once more, over the text and all drawn tokens at once.
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Key

from jetspec_jax.training import teacher
from jetspec_jax.training.data.batches import Batch
from jetspec_jax.training.losses import Logits
from jetspec_jax.training.objective import Questions
from jetspec_jax.training.teacher import Features

if TYPE_CHECKING:
    from jetspec_jax.training.recipe import Recipe


def drafted(  # noqa: PLR0913  # arrays of one step
    recipe: Recipe,
    target_params: dict,
    scale: Float[Array, " F"],
    params: dict,
    part: Batch,
    features: Features,
    asked: Questions,
    keys: Key[Array, " B"],
) -> tuple[Features, Questions]:
    """Returns what is asked with drafted parents among the text's, and features that hold the target's states there.

    Each position has one drawn token at most, from one of the slots that draft it, chosen at random; only the slot
    below that one has it as its parent. Where it is the text's own token nothing changes.

    Args:
      recipe: of a block head with a scorer.
      target_params: of the target.
      scale: of the tapped channels.
      params: of the head, f32.
      part: the sequences.
      features: of the sequences.
      asked: blocks with the text's tokens as parents.
      keys: one a sequence.
    """
    learns = recipe.learns
    folded = learns.fold(params, scale, recipe.dtype)
    hidden = learns.hidden(recipe, folded, part, features, asked)
    whole = learns.logits(recipe, target_params, folded, hidden, asked)
    size = part.tokens.shape[1]
    parents = asked.label[..., :-1]
    chosen = _chosen(parents, asked.weight[..., 1:] > 0, size, keys)
    token = jnp.where(chosen >= 0, _drawn(whole, jnp.maximum(chosen, 0), asked.label.shape[-1], keys, recipe), -1)
    astray = (token >= 0) & (token != part.tokens)
    final = teacher.after(
        recipe.target, target_params, part.tokens, jnp.where(astray, token, part.tokens), part.document, part.position,
        recipe.attention,
    )  # fmt: skip

    flat = parents.reshape(len(parents), -1)
    own = jnp.take_along_axis(chosen, flat, 1) == jnp.arange(flat.shape[1])
    here = (own & jnp.take_along_axis(astray, flat, 1)).reshape(parents.shape)
    at = jnp.take_along_axis(token, flat, 1).reshape(parents.shape)
    below = lambda old, new: jnp.concatenate([old[..., :1], jnp.where(here, new, old[..., 1:])], axis=-1)
    before = below(asked.inputs.before, at)
    taught = below(asked.label - 1, size + parents)
    both = Features(features.taps, jnp.concatenate([features.final, final], axis=1))
    return both, asked._replace(inputs=asked.inputs._replace(before=before), taught=taught)


def _chosen(parents: Int[Array, "B A P"], counts, size: int, keys: Key[Array, " B"]) -> Int[Array, "B S"]:
    """Returns for each position the number a * P + p of one slot that drafts it, at random among those that count, -1
    where there is none."""

    def one(place, counts, key):
        number = jax.random.permutation(key, place.size)  # no two alike, so the largest is one slot's
        best = jnp.full(size, -1).at[place].max(jnp.where(counts, number, -1))
        slot = jnp.zeros_like(number).at[number].set(jnp.arange(place.size))
        return jnp.where(best >= 0, slot[best], -1)

    flat = lambda x: x.reshape(len(x), -1)
    return jax.vmap(one)(flat(parents), flat(counts), keys)


def _drawn(whole: Logits, slot: Int[Array, "B S"], depth: int, keys, recipe: Recipe) -> Int[Array, "B S"]:
    """Returns a token for each position, drawn from the row of its slot a * (depth - 1) + p; few rows exist at once."""
    count = depth - 1
    row = slot // count * depth + slot % count
    take = lambda x: jnp.take_along_axis(x.reshape(len(x), -1, x.shape[-1]), row[..., None], 1).swapaxes(0, 1)
    rows = [take(term.rows) for term in whole.terms]
    noise = jax.vmap(lambda key: jax.random.split(jax.random.fold_in(key, 1), slot.shape[1]))(keys).swapaxes(0, 1)

    def draw(given):
        made, keys = given
        terms = tuple(dataclasses.replace(t, rows=x) for t, x in zip(whole.terms, made, strict=True))
        return jax.vmap(jax.random.categorical)(keys, whole._replace(terms=terms).whole(recipe.head.vocab_size))

    batch = max(1, min(recipe.loss_chunk // len(slot), slot.shape[1]))
    return jax.lax.map(draw, (rows, noise), batch_size=batch).swapaxes(0, 1)
