"""Attention in two halves joined by log-sum-exp.

All queries of a round see the whole committed prefix, so the prefix half needs a length and no mask; the fresh half
(tree, block or prompt) sees itself under a mask. Softmax statistics and the join are f32. One function serves prefill,
plain steps, tree verification and the draft head.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.layers.cache import KV
from jetspec_jax.layers.numerics import einsum

CHUNK = 1024  # prefix slots read at a time, so that the work follows the committed length and not the buffer
MASKED = -1e30  # finite, so that a row without visible keys gives zero weight and not NaN


class Partial(NamedTuple):
    """Unnormalised attention to a part of the keys: exp(score - peak) summed, with and without the values."""

    peak: jax.Array  # [B, K, G, T] f32, largest score
    total: jax.Array  # [B, K, G, T] f32
    value: jax.Array  # [B, K, G, T, H] f32


# Queries [B, K, G, T, H] and a chunk's keys and values [B, K, S, H] to what slots low..high-1 give; `high` is [B] and
# may lie outside of the chunk.
Part = Callable[[jax.Array, jax.Array, jax.Array, jax.typing.ArrayLike, jax.Array], Partial]


def attend(
    q: Float[Array, "B T N H"],
    fresh: KV,
    mask: Bool[Array, "_ T R"],
    prefix: KV | None = None,
    length: Int[Array, " B"] | None = None,
    part: Part | None = None,
    chunk: int = CHUNK,
) -> Float[Array, "B T N H"]:
    """Returns the attention of T queries to the committed prefix and to the masked fresh rows.

    A value that a query does not see never enters its row, be it NaN or infinite.

    Args:
      q: queries.
      fresh: keys and values [B, K, R, H].
      mask: which of the R fresh rows each query sees; [1, T, R] where all batch rows share it.
      prefix: one layer of the cache.
      length: slots of the prefix that are committed, [B].
      part: what computes a chunk of the prefix; None is plain XLA.
      chunk: slots of the prefix that `part` takes at a time, where there are more than `CHUNK`.
    """
    batch, rows, heads, dim = q.shape
    groups = heads // fresh[0].shape[1]
    q = q.reshape(batch, rows, -1, groups, dim).transpose(0, 2, 3, 1, 4)
    # A weight of zero would not keep the NaN or inf of a rejected branch out of the sum. Nothing is hidden by this: a
    # row that is broken itself scores NaN against its own key, and its logits tell.
    values = jnp.where(jnp.isfinite(fresh[1]), fresh[1], 0)
    whole = _part(q, fresh[0], values, mask[:, None, None])
    if prefix is not None:
        whole = _join(whole, _prefix(q, prefix, length, part or _slots, chunk))
    out = (whole.value / whole.total[..., None]).astype(q.dtype)
    return out.transpose(0, 3, 1, 2, 4).reshape(batch, rows, heads, dim)


def _part(q, k, v, visible) -> Partial:
    score = einsum("bkgth,bksh->bkgts", q, k, jnp.float32) / math.sqrt(q.shape[-1])
    score = jnp.where(visible, score, MASKED)
    peak = score.max(-1)
    weight = jnp.exp(score - peak[..., None])
    return Partial(peak, weight.sum(-1), einsum("bkgts,bksh->bkgth", weight.astype(v.dtype), v, jnp.float32))


def _join(a: Partial, b: Partial) -> Partial:
    peak = jnp.maximum(a.peak, b.peak)
    wa, wb = jnp.exp(a.peak - peak), jnp.exp(b.peak - peak)
    return Partial(peak, a.total * wa + b.total * wb, a.value * wa[..., None] + b.value * wb[..., None])


def _prefix(q, prefix: KV, length, part: Part, chunk: int) -> Partial:
    """The prefix half: whole when it is short, else chunk by chunk up to the longest row."""
    slots = prefix[0].shape[2]
    if slots <= CHUNK:
        return part(q, *prefix, 0, length)

    def body(i, carry):
        # The last chunk of an uneven buffer starts early; slots that were read before are masked.
        first = jnp.minimum(i * chunk, slots - chunk)
        k, v = (jax.lax.dynamic_slice_in_dim(x, first, chunk, 2) for x in prefix)
        return _join(carry, part(q, k, v, i * chunk - first, length - first))

    shape = q.shape[:-1]
    empty = Partial(jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(q.shape, jnp.float32))
    return jax.lax.fori_loop(0, (length.max() + chunk - 1) // chunk, body, empty)


def _slots(q, k, v, low, high) -> Partial:
    """The part of plain XLA."""
    slot = jnp.arange(k.shape[2])
    visible = (slot >= low) & (slot < high[:, None])
    v = jnp.where(visible[:, None, :, None], v, 0)  # what a prompt's padding has left there may be NaN too
    return _part(q, k, v, visible[:, None, None, None])
