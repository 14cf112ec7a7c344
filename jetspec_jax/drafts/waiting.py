"""Rows of features that wait in a draft's state until a pass over them is worth it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jetspec_jax.loop.contracts import Seen


def added(pending: Float[Array, "B Q F"], count: Int[Array, " B"], seen: Seen) -> Float[Array, "B Q F"]:
    """Returns the rows that wait, with those that were seen after the first `count` of each; there must be room."""
    put = jax.vmap(lambda rows, new, at: jax.lax.dynamic_update_slice(rows, new, (at, 0)))
    return put(pending, seen.features.astype(pending.dtype), count)


def resized(pending: Float[Array, "B Q F"], rows: int) -> Float[Array, "B R F"]:
    """Returns room for so many rows, with the first of those that wait."""
    return jnp.pad(pending[:, :rows], ((0, 0), (0, max(rows - pending.shape[1], 0)), (0, 0)))
