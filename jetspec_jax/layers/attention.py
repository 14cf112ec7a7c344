"""Attention in two halves joined by log-sum-exp.

All queries of a round see the whole committed prefix, so the prefix half needs a length and no mask; the fresh half
(tree, block or prompt) sees itself under a mask. Softmax statistics and the join are f32. One function serves prefill,
plain steps, tree verification and the draft head.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.layers.cache import KV
from jetspec_jax.layers.numerics import einsum

CHUNK = 1024  # prefix slots read at a time, so that the work follows the committed length and not the buffer
MASKED = -1e30  # finite, so that a row without visible keys gives zero weight and not NaN


class Partial(NamedTuple):
    """Unnormalised attention over a part of the keys: exp(score - peak) summed, with and without the values."""

    peak: jax.Array  # [B, K, G, T] f32, largest score
    total: jax.Array  # [B, K, G, T] f32
    value: jax.Array  # [B, K, G, T, H] f32


def attend(
    q: Float[Array, "B T N H"],
    fresh: KV,
    mask: Bool[Array, "_ T R"],
    prefix: KV | None = None,
    length: Int[Array, " B"] | None = None,
    backend: str = "xla",
) -> Float[Array, "B T N H"]:
    """Queries [B, T, N, H] over the first `length` slots of `prefix` and over the masked `fresh` rows; [B, T, N, H].

    fresh: keys and values [B, K, R, H]; mask broadcasts to [B, T, R]. prefix: one layer of the cache. backend: what
    computes the prefix half, xla or cudnn.
    """
    batch, rows, heads, dim = q.shape
    groups = heads // fresh[0].shape[1]
    q = q.reshape(batch, rows, -1, groups, dim).transpose(0, 2, 3, 1, 4)
    # A weight of zero would not keep the NaN or inf of a rejected branch out of the sum. Nothing is hidden by this: a
    # row that is broken itself scores NaN against its own key, and its logits tell.
    values = jnp.where(jnp.isfinite(fresh[1]), fresh[1], 0)
    whole = _part(q, fresh[0], values, mask[:, None, None])
    if prefix is not None:
        whole = _join(whole, _prefix(q, prefix, length, _cudnn if backend == "cudnn" else _slots))
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


def _prefix(q, prefix: KV, length, part) -> Partial:
    """The prefix half: whole when it is short, else chunk by chunk up to the longest row."""
    slots = prefix[0].shape[2]
    if slots <= CHUNK:
        return part(q, *prefix, 0, length)
    chunk = CHUNK if part is _slots else math.gcd(CHUNK, slots)

    def body(i, carry):
        # The last chunk of an uneven buffer starts early; slots that were read before are masked.
        first = jnp.minimum(i * chunk, slots - chunk)
        k, v = (jax.lax.dynamic_slice_in_dim(x, first, chunk, 2) for x in prefix)
        return _join(carry, part(q, k, v, i * chunk - first, length - first))

    shape = q.shape[:-1]
    empty = Partial(jnp.full(shape, MASKED), jnp.zeros(shape), jnp.zeros(q.shape, jnp.float32))
    return jax.lax.fori_loop(0, (length.max() + chunk - 1) // chunk, body, empty)


def _slots(q, k, v, low, high) -> Partial:
    """All queries over slots low..high-1 of a chunk; `high` [B] may lie outside."""
    slot = jnp.arange(k.shape[2])
    visible = (slot >= low) & (slot < high[:, None])
    return _part(q, k, v, visible[:, None, None, None])


def _cudnn(q, k, v, low, high) -> Partial:
    """By cuDNN's fused attention, which takes 16 bits and a length; chunks that divide the buffer have low 0."""
    batch, kv_heads, groups, rows, dim = q.shape
    flat = q.transpose(0, 3, 1, 2, 4).reshape(batch, rows, -1, dim)
    length = jnp.clip(high, 1, k.shape[2]).astype(jnp.int32)
    out, lse = jax.nn.dot_product_attention(
        flat, k.swapaxes(1, 2), v.swapaxes(1, 2), key_value_seq_lengths=length,
        query_seq_lengths=jnp.full_like(length, rows), implementation="cudnn", return_residual=True,
    )  # fmt: skip
    split = lambda x: x.reshape(batch, rows, kv_heads, groups, -1).transpose(0, 2, 3, 1, 4)
    seen = (high > 0)[:, None, None, None]
    peak = jnp.where(seen, split(lse.astype(jnp.float32))[..., 0], MASKED)
    return Partial(peak, jnp.ones_like(peak), split(out.astype(jnp.float32)))
