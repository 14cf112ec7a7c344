"""Attention of a round on TPUs: committed prefix and tree in one kernel, in one pass.

A program takes one kv head of one batch row and up to `ROWS` of its queries (T nodes x G heads). It asks for the first
prefix chunks, works off the tree under its mask while they travel, then streams the prefix from HBM through a ring of
`BUFFERS` chunks with an online softmax in f32 scratch. Copies and work follow the committed length and not the buffer.
A TPU core runs its programs one after another, so the prefix is not split among programs and there is no second kernel
to join parts. The oracle is `attention.attend`.

Several blocks of rows each read the prefix. That is hidden: a chunk is used for 256 products a byte in bf16, and a v5e
computes about 240 in the time it reads one, before the softmax is counted.

VMEM at Qwen3-8B shapes (H = 128, G = 4), the pipeline's second copies of all blocks included: 1.2 MiB at T = 1, 2.2 MiB
at 64, 2.4 MiB at 256 in bf16; 2.5, 3.8 and 4.4 MiB in f32. 1 MiB of it (f32: 2 MiB) is the ring. The default limit is
16 MiB. The tree is held whole, which suits the few hundred nodes of a round and not a long prompt.

A cache of head dim 64 fills half of each tile, and XLA may store it with the slots last to avoid that. The kernel then
gets a copy; in a decoding loop, look for it in the compiled program.

No TPU has run this. The interpreter proves the numbers, its race detection the order of copies and reads; and the TPU
compiler takes it (libtpu 0.0.48, v4 to v7x, from which the VMEM figures are). Sizes below are reasoned, not measured.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.layers.attention import MASKED
from jetspec_jax.layers.cache import KV
from jetspec_jax.layers.numerics import precision

LANES = 128
ROWS = 256  # queries a program
CHUNK = 512  # prefix slots a copy, at most
BUFFERS = 4  # chunks on their way or in use; with two, a plain step would wait for the latency of each copy


def supported(head_dim: int, slots: int) -> bool:
    """Whether a prefix of `slots` divides into chunks of whole tiles, and a head's row into half or one tile."""
    return head_dim in (64, 128) and slots > 0 and slots % LANES == 0


def attend(
    q: Float[Array, "B K M H"],
    fresh: KV,
    mask: Bool[Array, "_ T R"],
    prefix: KV | None = None,
    length: Int[Array, " B"] | None = None,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B T N H"]:
    """Returns the attention [B, T, N, H] of all queries to the committed prefix and to the masked fresh rows.

    Args:
      q: M = T * G queries of each kv head, the G heads of a node side by side.
      fresh: keys and values [B, K, R, H].
      mask: which of the R fresh rows each node sees.
      prefix: one layer of the cache, of as many slots as `supported` takes, or None.
      length: slots of the prefix that are committed; nothing after them is used.
      interpret: runs without a TPU.
    """
    batch, kv_heads, rows, dim = q.shape
    nodes, count = mask.shape[1:]
    groups = rows // nodes
    if prefix is None:  # one chunk, of which nothing is read
        empty = jnp.zeros((batch, kv_heads, LANES, dim), q.dtype)
        prefix, length = (empty, empty), jnp.zeros((batch,), jnp.int32)
    chunk = math.gcd(prefix[0].shape[2], CHUNK)  # divides the buffer: no copy reaches past its end
    # Blocks are whole tiles (of int8 32 rows) and may reach past the arrays. The kernel masks what it finds there,
    # which is cheaper than padded arrays.
    block, keys = min(ROWS, _round_up(rows, 32)), _round_up(count, LANES)
    shared = mask.shape[0] == 1
    visible = jnp.repeat(mask, groups, axis=1).astype(jnp.int8)
    of_rows = pl.BlockSpec((None, None, block, dim), lambda b, k, i, _: (b, k, i, 0))
    of_keys = pl.BlockSpec((None, None, keys, dim), lambda b, k, i, _: (b, k, 0, 0))
    of_mask = pl.BlockSpec((None, block, keys), lambda b, k, i, _: (0 if shared else b, i, 0))
    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    ring = pltpu.VMEM((BUFFERS, chunk, dim), q.dtype)
    column = pltpu.VMEM((block, LANES), jnp.float32)
    value = pltpu.VMEM((block, dim), jnp.float32)
    out = pl.pallas_call(
        functools.partial(_kernel, count=count),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(batch, kv_heads, pl.cdiv(rows, block)),
            in_specs=[of_rows, of_keys, of_keys, of_mask, in_hbm, in_hbm],
            out_specs=of_rows,
            scratch_shapes=[ring, ring, pltpu.SemaphoreType.DMA((2, BUFFERS)), column, column, value],
        ),
        out_shape=jax.ShapeDtypeStruct(q.shape, q.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel",) * 3),
        interpret=interpret,
        name="tree_attention",
    )(length, q, *fresh, visible, *prefix)
    out = out.reshape(batch, kv_heads, nodes, groups, dim).swapaxes(1, 2)
    return out.reshape(batch, nodes, kv_heads * groups, dim)


def _kernel(  # noqa: PLR0913  # the references of a kernel
    length_ref, q_ref, fk_ref, fv_ref, mask_ref, pk_ref, pv_ref, out_ref,
    k_ring, v_ring, arrived, peak, total, value, *, count,
):  # fmt: skip
    row, head = pl.program_id(0), pl.program_id(1)
    chunk, dim = k_ring.shape[1:]
    length = jnp.minimum(length_ref[row], pk_ref.shape[2])
    steps = jax.lax.div(length + chunk - 1, chunk)
    scale = math.log2(math.e) / math.sqrt(dim)
    exact = precision(out_ref.dtype)

    def copies(i):
        place, slots = jax.lax.rem(i, BUFFERS), pl.ds(pl.multiple_of(i * chunk, chunk), chunk)
        return [
            pltpu.make_async_copy(pk_ref.at[row, head, slots], k_ring.at[place], arrived.at[0, place]),
            pltpu.make_async_copy(pv_ref.at[row, head, slots], v_ring.at[place], arrived.at[1, place]),
        ]

    def start(i, carry):
        for copy in copies(i):
            copy.start()
        return carry

    def update(k, v, visible):
        by_dim = (((1,), (1,)), ((), ()))  # the matrix unit takes k transposed
        score = jax.lax.dot_general(q_ref[...], k, by_dim, precision=exact, preferred_element_type=jnp.float32)
        score = jnp.where(visible, score * scale, MASKED)
        before = peak[:, :1]
        after = jnp.maximum(before, score.max(1, keepdims=True))
        weight, fade = jnp.exp2(score - after), jnp.exp2(before - after)
        add = jnp.dot(weight.astype(v.dtype), v, precision=exact, preferred_element_type=jnp.float32)
        peak[...] = jnp.broadcast_to(after, peak.shape)
        total[...] = total[...] * fade + weight.sum(1, keepdims=True)
        value[...] = value[...] * fade + add

    def only(good, v):
        """Sets other values to zero, since a weight of zero keeps no NaN out. In f32: old vector units lack bf16."""
        return jnp.where(good, v.astype(jnp.float32), 0).astype(v.dtype)

    def prefix(i, carry):
        for copy in copies(i):
            copy.wait()
        place, left = jax.lax.rem(i, BUFFERS), length - i * chunk

        @pl.when(left < chunk)
        def _():
            v_ring[place] = only(_iota(chunk, 0) < left, v_ring[place])

        update(k_ring[place], v_ring[place], _iota(chunk, 1) < left)

        @pl.when(i + BUFFERS < steps)
        def _():
            start(i + BUFFERS, None)

        return carry

    jax.lax.fori_loop(0, jnp.minimum(steps, BUFFERS), start, None)
    peak[...] = jnp.full_like(peak, MASKED)
    total[...] = jnp.zeros_like(total)
    value[...] = jnp.zeros_like(value)
    finite = jnp.abs(fv_ref[...].astype(jnp.float32)) < jnp.inf  # as in `attention.attend`
    seen = (mask_ref[...].astype(jnp.int32) != 0) & (_iota(fk_ref.shape[0], 1) < count)
    update(fk_ref[...], only(finite, fv_ref[...]), seen)
    jax.lax.fori_loop(0, steps, prefix, None)
    out_ref[...] = (value[...] / total[:, :1]).astype(out_ref.dtype)


def _iota(size: int, axis: int):
    """0..size-1 as a column (axis 0) or a row (axis 1)."""
    return jax.lax.broadcasted_iota(jnp.int32, (size, 1) if axis == 0 else (1, size), axis)


def _round_up(size: int, unit: int) -> int:
    return (size + unit - 1) // unit * unit
