"""Split-KV attention of a round on NVIDIA GPUs: committed prefix and tree in one launch, for any number of rows.

The queries of one kv head (T rows x G heads) are cut into blocks, the prefix into parts; every (head, block, part) is
one program that streams its slots with an online softmax. Work follows the committed length, not the buffer. One more
part takes the fresh keys under their mask. Parts are joined by log-sum-exp in f32 by a second, small kernel. The oracle
is `attention.attend`.

Written in Pallas-Triton: one source runs in the interpreter on a CPU, tiles down to 16 rows fit a plain step (wgmma,
which the successor Mosaic GPU builds on, takes 64), and every jax release that this package supports compiles it. It
is deprecated since jax 0.11; this folder is what a port would replace.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.cache import KV
from jetspec_jax.numerics import precision

MASKED = -1e30  # finite, as in `attention`
SLOTS = 64  # keys a step of the online softmax
PROGRAMS = 128  # of one launch: about one for each of an H200's 132 multiprocessors
PARTS = 16  # of a prefix at most


def supported(head_dim: int) -> bool:
    """Tiles are powers of two, of at least 16."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


def attend(
    q: Float[Array, "B K M H"],
    fresh: KV,
    mask: Bool[Array, "_ T R"],
    prefix: KV | None = None,
    length: Int[Array, " B"] | None = None,
    interpret: bool = False,
) -> Float[Array, "B T N H"]:
    """Queries of M = T * G rows a kv head (the G heads of a node side by side) over all keys; [B, T, N, H].

    Other arguments as of `attention.attend`.
    """
    batch, kv_heads, rows, dim = q.shape
    nodes, keys = mask.shape[1:]
    groups = rows // nodes
    block = min(64, max(16, power(rows)))
    blocks = pl.cdiv(rows, block)
    parts = 0
    if prefix is not None:
        parts = min(PARTS, max(2, power(PROGRAMS // (batch * kv_heads * blocks) or 1)))
    else:
        prefix, length = fresh, jnp.zeros((batch,), jnp.int32)  # not read
    flat = lambda x: x.reshape(batch * kv_heads, *x.shape[2:])
    kernel = functools.partial(
        _kernel, kv_heads=kv_heads, keys=keys, rows=rows, block=block, parts=parts, shared=mask.shape[0] == 1
    )
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    stats = f32(batch * kv_heads, rows, parts + 1)
    value, peak, total = pl.pallas_call(
        kernel,
        grid=(batch * kv_heads, blocks, parts + 1),
        out_shape=[f32(batch * kv_heads, rows, parts + 1, dim), stats, stats],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        name="tree_attention",
    )(length, flat(q), *map(flat, fresh), jnp.repeat(mask, groups, axis=1).astype(jnp.int8), *map(flat, prefix))
    return _join(value, peak, total, (batch, kv_heads, groups, nodes), q.dtype, interpret)


def _kernel(
    length_ref, q_ref, fk_ref, fv_ref, mask_ref, pk_ref, pv_ref, value_ref, peak_ref, total_ref, *,
    kv_heads, keys, rows, block, parts, shared,
):  # fmt: skip
    pair, part = pl.program_id(0), pl.program_id(2)
    first = pl.program_id(1) * block
    live = first + jnp.arange(block) < rows
    length = length_ref[pair // kv_heads]
    dim = q_ref.shape[-1]
    spread = lambda x, shape: jnp.broadcast_to(x, shape)
    row, whole = pl.ds(first, block), spread(live[:, None], (block, dim))
    q = plgpu.load(q_ref.at[pair, row, :], mask=whole, other=0)
    scale = math.log2(math.e) / math.sqrt(dim)
    exact = precision(q_ref.dtype)

    def tile(ref, i, inside):
        at = ref.at[pair, pl.ds(i * SLOTS, SLOTS), :]
        return plgpu.load(at, mask=spread(inside[:, None], (SLOTS, dim)), other=0)

    def update(carry, k, v, visible):
        peak, total, value = carry
        score = jnp.dot(q, k.T, precision=exact, preferred_element_type=jnp.float32) * scale
        score = jnp.where(visible, score, MASKED)
        higher = jnp.maximum(peak, score.max(1))
        weight = jnp.exp2(score - higher[:, None])
        fade = jnp.exp2(peak - higher)
        add = jnp.dot(weight.astype(v.dtype), v, precision=exact, preferred_element_type=jnp.float32)
        return higher, total * fade + weight.sum(1), value * fade[:, None] + add

    def prefix(i, carry):
        inside = i * SLOTS + jnp.arange(SLOTS) < length
        return update(carry, tile(pk_ref, i, inside), tile(pv_ref, i, inside), spread(inside[None], (block, SLOTS)))

    def tree(i, carry):
        inside = i * SLOTS + jnp.arange(SLOTS) < keys
        v = tile(fv_ref, i, inside)
        v = jnp.where(jnp.abs(v.astype(jnp.float32)) < jnp.inf, v, 0)  # as in `attention.attend`: zero times NaN
        at = mask_ref.at[jnp.int32(0) if shared else pair // kv_heads, row, pl.ds(i * SLOTS, SLOTS)]
        seen = plgpu.load(at, mask=live[:, None] & inside[None], other=0)
        return update(carry, tile(fk_ref, i, inside), v, seen != 0)

    steps = (length + SLOTS - 1) // SLOTS
    each = (steps + parts - 1) // max(parts, 1)
    lowest = jnp.minimum(part * each, steps)  # the part of the fresh keys, the last, finds no slots left
    carry = jnp.full((block,), MASKED), jnp.zeros((block,)), jnp.zeros((block, dim))
    carry = jax.lax.fori_loop(lowest, jnp.minimum(lowest + each, steps), prefix, carry)
    last = jnp.maximum(part + 1 - parts, 0) * pl.cdiv(keys, SLOTS)
    peak, total, value = jax.lax.fori_loop(0, last, tree, carry)
    plgpu.store(value_ref.at[pair, row, part, :], value, mask=whole)
    plgpu.store(peak_ref.at[pair, row, part], peak, mask=live)
    plgpu.store(total_ref.at[pair, row, part], total, mask=live)


def _join(value, peak, total, sizes, dtype, interpret):
    """One program a query: [B*K, M, parts, H] and statistics to [B, T, N, H]."""
    batch, kv_heads, groups, nodes = sizes
    parts, dim = value.shape[2:]
    wide = power(parts)

    def kernel(value_ref, peak_ref, total_ref, out_ref):
        node, head = pl.program_id(0), pl.program_id(1)
        pair = node // nodes * kv_heads + head // groups
        row = node % nodes * groups + head % groups
        live, every = jnp.arange(wide) < parts, pl.ds(0, wide)
        peak = plgpu.load(peak_ref.at[pair, row, every], mask=live, other=MASKED)
        total = plgpu.load(total_ref.at[pair, row, every], mask=live, other=0.0)
        whole = jnp.broadcast_to(live[:, None], (wide, dim))
        value = plgpu.load(value_ref.at[pair, row, every, :], mask=whole, other=0.0)
        weight = jnp.exp2(peak - peak.max())
        out = (value * weight[:, None]).sum(0) / (total * weight).sum()
        out_ref[node, head, :] = out.astype(dtype)

    out = pl.pallas_call(
        kernel,
        grid=(batch * nodes, kv_heads * groups),
        out_shape=jax.ShapeDtypeStruct((batch * nodes, kv_heads * groups, dim), dtype),
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="join_parts",
    )(value, peak, total)
    return out.reshape(batch, nodes, kv_heads * groups, dim)


def power(size: int) -> int:
    """The next power of two."""
    return 1 << (size - 1).bit_length()
