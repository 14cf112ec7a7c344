"""The head's forward over many blocks of a sequence at once, with the layers that decode.

At inference a block reads a cached context of one length; here every anchor of a sequence is a block with a context of
its own length. Context keys and values are projected once a sequence, and each block joins two partial attentions: over
the context before its anchor and over itself. No mask of all blocks against all blocks is ever made.
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jetspec_jax import masks, rope
from jetspec_jax.attention import MASKED
from jetspec_jax.cache import KV
from jetspec_jax.drafts.jetspec import Head
from jetspec_jax.numerics import einsum, rms_norm
from jetspec_jax.training import anchors as anchor_rules
from jetspec_jax.training.anchors import Anchors


def hidden(
    head: Head, block: Float[Array, "B A T E"], anchors: Anchors, features: Float[Array, "B S F"]
) -> Float[Array, "B A T E"]:
    """Hidden states of every slot of every block, for the target's lm_head.

    block: embeddings of [anchor, MASK, ...], T = block size. features: tapped target features of positions 0..S-1; what
    lies at or behind an anchor is not read by its block, so padding may hold anything finite.
    """
    c = head.config
    batch, count, slots, embed = block.shape
    length = features.shape[1]
    context = head.context_kv(head.context(features), jnp.broadcast_to(jnp.arange(length), (batch, length)))
    seen = anchor_rules.seen(anchors, length)
    own = (masks.causal(slots) if c.causal else jnp.ones((1, slots, slots), bool))[0]

    positions = (anchors.position[..., None] + jnp.arange(slots)).reshape(batch, -1)
    angles = rope.angles(positions, c.head_dim, c.rope_theta, c.rope_scaling)
    x = block.reshape(batch, count * slots, embed)
    for layer, kv in zip(head.layers, context, strict=True):
        q, k, v = layer.project(layer.normed(x), angles)
        x = layer.finish(x, _attend(q, (k, v), kv, seen, own))
    return rms_norm(x, head.norm[...], c.norm_eps).reshape(block.shape)


@jax.checkpoint  # the f32 scores of one layer are larger than everything else that a step keeps
def _attend(
    q: Float[Array, "B R N H"], block: KV, context: KV, seen: Bool[Array, "B A S"], own: Bool[Array, "T T"]
) -> Float[Array, "B R N H"]:
    """R = A * T block rows over their context and their own block; softmax over both in f32."""
    batch, rows, heads, dim = q.shape
    kv_heads, count, slots = block[0].shape[1], seen.shape[1], own.shape[0]
    q = q.reshape(batch, count, slots, kv_heads, heads // kv_heads, dim).transpose(0, 3, 4, 1, 2, 5)
    k, v = (x.reshape(batch, kv_heads, count, slots, dim) for x in block)
    scale = 1 / math.sqrt(dim)
    before = einsum("bkgath,bksh->bkgats", q, context[0], jnp.float32) * scale
    before = jnp.where(seen[:, None, None, :, None], before, MASKED)
    within = jnp.where(own, einsum("bkgath,bkarh->bkgatr", q, k, jnp.float32) * scale, MASKED)

    # A slot always sees itself, so the peak is a real score and no row is empty.
    peak = jax.lax.stop_gradient(jnp.maximum(before.max(-1), within.max(-1)))[..., None]
    before, within = jnp.exp(before - peak), jnp.exp(within - peak)
    total = before.sum(-1) + within.sum(-1)
    value = einsum("bkgats,bksh->bkgath", before.astype(v.dtype), context[1], jnp.float32)
    value = value + einsum("bkgatr,bkarh->bkgath", within.astype(v.dtype), v, jnp.float32)
    out = (value / total[..., None]).astype(v.dtype)
    return out.transpose(0, 3, 4, 1, 2, 5).reshape(batch, rows, heads, dim)
