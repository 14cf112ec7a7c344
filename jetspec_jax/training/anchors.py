"""Anchors: the positions from which a training block drafts, and what each block slot is worth.

A block at anchor a is [token a, MASK, ...]; slot k predicts token a + k. It sees the target's features strictly before
a in its own document, because at inference the anchor's own features do not exist yet.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


class Anchors(NamedTuple):
    """A anchors a sequence; those for which there was no place are at position 0 and not valid."""

    position: jax.Array  # [B, A] int32, index in the sequence, ascending among the valid ones
    valid: jax.Array  # [B, A] bool


def candidates(learnt: Bool[Array, "B S"], document: Int[Array, "B S"]) -> Bool[Array, "B S"]:
    """Positions that can be an anchor: learnt, with a learnt successor in the same document."""
    follows = learnt[:, 1:] & (document[:, 1:] == document[:, :-1])
    return learnt & jnp.pad(follows, ((0, 0), (0, 1)))


def sample(keys: Key[Array, " B"], candidate: Bool[Array, "B S"], count: int) -> Anchors:
    """Draws `count` anchors a sequence without replacement, uniformly over its candidates; one key a sequence."""
    slots = candidate.shape[1]
    noise = jax.vmap(lambda key: jax.random.uniform(key, (slots,)))(keys)
    score, chosen = jax.lax.top_k(jnp.where(candidate, noise, -1.0), min(count, slots))
    order = jnp.sort(jnp.where(score >= 0, chosen, slots), axis=1)
    valid = order < slots
    return Anchors(jnp.where(valid, order, 0).astype(jnp.int32), valid)


def seen(anchors: Anchors, document: Int[Array, "B S"], window: int = 0) -> Bool[Array, "B A S"]:
    """Marks the context rows that a block may look at; none for an anchor that is not valid.

    window: rows before the anchor, the last ones, that are context; 0 is all.
    """
    own = jnp.take_along_axis(document, anchors.position, 1)[..., None] == document[:, None]
    ahead = anchors.position[..., None] - jnp.arange(document.shape[1])
    near = ahead <= window if window else True
    return (ahead > 0) & near & own & anchors.valid[..., None]


def labels(anchors: Anchors, slots: int, depth: int) -> Int[Array, "B A D"]:
    """Returns the index in the sequence of the tokens that slots 1..D predict, cut to the sequence's last."""
    return jnp.minimum(anchors.position[..., None] + jnp.arange(1, depth + 1), slots - 1)


def weights(
    anchors: Anchors, learnt: Bool[Array, "B S"], document: Int[Array, "B S"], depth: int, gamma: float
) -> Float[Array, "B A D"]:
    """Loss weight of slots 1..D: exp(-(k - 1) / gamma) where the label exists, else 0.

    A block may run past its answer's end; from there on it has no labels, also where the next turn's answer lies within
    its reach. gamma 0 is uniform by definition; the formula's limit is not.
    """
    slots = learnt.shape[1]
    ahead = jnp.arange(depth)
    decay = jnp.exp(-ahead / gamma) if gamma else jnp.ones(depth)
    label = labels(anchors, slots, depth).reshape(learnt.shape[0], -1)
    take = lambda x: jnp.take_along_axis(x, label, 1).reshape(*anchors.position.shape, depth)
    own = take(document) == jnp.take_along_axis(document, anchors.position, 1)[..., None]
    exists = take(learnt) & own & (anchors.position[..., None] + ahead + 1 < slots) & anchors.valid[..., None]
    return decay * jnp.cumprod(exists, axis=-1)
