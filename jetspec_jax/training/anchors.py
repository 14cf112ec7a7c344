"""Anchors: the positions from which a training block drafts, and what each block slot is worth.

A block at anchor a is [token a, MASK, ...]; slot k predicts token a + k. It sees the target's features strictly before
a, because at inference the anchor's own features do not exist yet.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Key


class Anchors(NamedTuple):
    """A anchors a sequence; those that a short answer cannot fill are at position 0 and not valid."""

    position: jax.Array  # [B, A] int32, ascending among the valid ones
    valid: jax.Array  # [B, A] bool


def sample(
    key: Key[Array, ""], prompt_length: Int[Array, " B"], length: Int[Array, " B"], count: int, slots: int
) -> Anchors:
    """Draws `count` anchors a row without replacement, uniformly over the answer.

    A valid anchor is an answer token with a successor: prompt_length <= a <= length - 2. Blocks may run past the end;
    `weights` masks what lies there. slots: S, positions of a row.
    """
    at = jnp.arange(slots)
    inside = (at >= prompt_length[:, None]) & (at <= length[:, None] - 2)
    noise = jax.random.uniform(key, inside.shape)
    score, chosen = jax.lax.top_k(jnp.where(inside, noise, -1.0), min(count, slots))
    order = jnp.sort(jnp.where(score >= 0, chosen, slots), axis=1)
    valid = order < slots
    return Anchors(jnp.where(valid, order, 0).astype(jnp.int32), valid)


def seen(anchors: Anchors, slots: int) -> Bool[Array, "B A S"]:
    """Context rows that a block may look at: strictly before its anchor; none for an anchor that is not valid."""
    return (jnp.arange(slots) < anchors.position[..., None]) & anchors.valid[..., None]


def weights(anchors: Anchors, length: Int[Array, " B"], depth: int, gamma: float) -> Float[Array, "B A D"]:
    """Loss weight of slots 1..D: exp(-(k - 1) / gamma) where the label exists, else 0.

    gamma 0 is uniform by definition; the formula's limit is not.
    """
    ahead = jnp.arange(depth)
    decay = jnp.exp(-ahead / gamma) if gamma else jnp.ones(depth)
    exists = anchors.position[..., None] + ahead + 1 < length[:, None, None]
    return decay * (exists & anchors.valid[..., None])
