"""The head's forward over many blocks of a sequence at once, with the layers that decode.

At inference a block reads a cached context of one length; here every anchor of a sequence is a block with a context of
its own. Context keys and values are projected once a sequence. Two ways to attend give the same numbers: "xla" joins
two partial attentions, over the context before the anchor and over the block itself, so that no mask of all blocks
against all blocks is made; "cudnn" makes that mask and lets a fused kernel keep no score.
"""

from __future__ import annotations

import math
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.drafts.block import Head
from jetspec_jax.layers import masks
from jetspec_jax.layers.attention import MASKED
from jetspec_jax.layers.cache import KV
from jetspec_jax.layers.numerics import einsum
from jetspec_jax.training import anchors as anchor_rules
from jetspec_jax.training import teacher
from jetspec_jax.training.anchors import Anchors


def hidden(
    head: Head,
    block: Float[Array, "B A T E"],
    anchors: Anchors,
    features: Float[Array, "B S F"],
    document: Int[Array, "B S"],
    position: Int[Array, "B S"],
    attention: str = "xla",
    remat: bool = False,
) -> Float[Array, "B A T E"]:
    """Hidden states of every slot of every block, for the target's lm_head.

    block: embeddings of [anchor, MASK, ...], T = block size. features: tapped target features of the sequence; what
    lies at or behind an anchor, or in another document, is not read by its block. remat: keep only what enters a layer.
    """
    c = head.config
    batch, count, slots, embed = block.shape
    seen = anchor_rules.seen(anchors, document)
    # What no block sees (padding) may be NaN, which a weight of zero would keep out of no sum and of no gradient.
    features = jnp.where(seen.any(1)[..., None], features, 0)
    context = head.context_kv(head.context(features), position)
    own = (masks.causal(slots) if c.causal else jnp.ones((1, slots, slots), bool))[0]
    start = jnp.take_along_axis(position, anchors.position, 1)
    angles = head.angles((start[..., None] + jnp.arange(slots)).reshape(batch, -1))

    # The f32 scores of a layer are larger than everything else that a step keeps, so they are always made again.
    attend = _fused if attention == "cudnn" else _attend if remat else jax.checkpoint(_attend)

    def over_context(i, q, fresh):
        return attend(q, fresh, context[i], seen, own), None

    x = block.reshape(batch, count * slots, embed)
    return head.run(x, angles, over_context, remat=remat).hidden.reshape(block.shape)


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


def _fused(
    q: Float[Array, "B R N H"],
    block: KV,
    context: KV,
    seen: Bool[Array, "B A S"],
    own: Bool[Array, "T T"],
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B R N H"]:
    """The same over one list of keys: the context, then all blocks."""
    slots, count = own.shape[0], seen.shape[1]
    block_of = jnp.arange(count * slots) // slots
    blocks = (block_of[:, None] == block_of) & jnp.tile(own, (count, count))
    mask = jnp.concatenate([seen.repeat(slots, 1), jnp.broadcast_to(blocks, (seen.shape[0], *blocks.shape))], axis=-1)
    k, v = (jnp.concatenate([c, b], axis=2) for c, b in zip(context, block, strict=True))
    return teacher.fused(q, k, v, mask, implementation=implementation)
