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
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.layers.attention import MASKED
from jetspec_jax.layers.cache import KV
from jetspec_jax.layers.numerics import power, precision

SLOTS = 64  # keys a step of the online softmax
PROGRAMS = 128  # of one launch: about one for each of an H200's 132 multiprocessors
PARTS = 16  # of a prefix at most


def supported(head_dim: int) -> bool:
    """Whether a head fits the tiles, which are powers of two of at least 16."""
    return head_dim >= 16 and head_dim & (head_dim - 1) == 0


class Plan(NamedTuple):
    """How the work of one launch is cut: queries of a program, keys a step of its softmax, parts of all keys."""

    rows: int
    slots: int
    parts: int
    warps: int = 4
    stages: int = 3


def plan(pairs: int, rows: int) -> Plan:
    """Returns the cut for `rows` queries of each of `pairs` kv heads of the batch."""
    block = min(64, max(16, power(rows)))
    programs = pairs * pl.cdiv(rows, block)
    return Plan(block, SLOTS, min(PARTS, max(1, power(PROGRAMS // programs or 1))))


@functools.partial(jax.jit, static_argnames=("interpret", "cut"))
def attend(
    q: Float[Array, "B K M H"],
    fresh: KV,
    mask: Bool[Array, "_ T R"],
    prefix: KV | None = None,
    length: Int[Array, " B"] | None = None,
    interpret: bool = False,
    cut: Plan | None = None,
) -> Float[Array, "B T N H"]:
    """Returns the attention [B, T, N, H] of all queries to the committed prefix and to the masked fresh rows.

    Args:
      q: M = T * G queries of each kv head, the G heads of a node side by side.
      fresh: keys and values [B, K, R, H].
      mask: which of the R fresh rows each node sees.
      prefix: one layer of the cache, or None.
      length: slots of the prefix that are committed; nothing after them is read.
      interpret: runs without a GPU.
      cut: how the work is cut; None is the rule of `plan`.
    """
    batch, kv_heads, rows, dim = q.shape
    nodes, keys = mask.shape[1:]
    groups = rows // nodes
    cut = cut or plan(batch * kv_heads, rows)
    if prefix is None:
        cut, prefix, length = cut._replace(parts=1), fresh, jnp.zeros((batch,), jnp.int32)  # the prefix is not read
    blocks, parts = pl.cdiv(rows, cut.rows), cut.parts
    flat = lambda x: x.reshape(batch * kv_heads, *x.shape[2:])
    kernel = functools.partial(
        _kernel, kv_heads=kv_heads, keys=keys, nodes=nodes, groups=groups, cut=cut, shared=mask.shape[0] == 1
    )
    f32 = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    stats = f32(batch * kv_heads, rows, parts)
    whole = jax.ShapeDtypeStruct((batch * nodes * kv_heads * groups, dim), q.dtype)
    out = pl.pallas_call(
        kernel,
        grid=(batch * kv_heads, blocks, parts),
        out_shape=[whole] if parts == 1 else [f32(batch * kv_heads, rows, parts, dim), stats, stats],
        compiler_params=plgpu.CompilerParams(num_warps=cut.warps, num_stages=cut.stages),
        interpret=interpret,
        name="tree_attention",
    )(length, flat(q), *map(flat, fresh), jnp.repeat(mask, groups, axis=1).astype(jnp.int8), *map(flat, prefix))
    if parts == 1:
        return out[0].reshape(batch, nodes, kv_heads * groups, dim)
    value, peak, total = out
    return _join(value, peak, total, (batch, kv_heads, groups, nodes), q.dtype, interpret)


def _kernel(  # noqa: PLR0913  # the references of a kernel
    length_ref, q_ref, fk_ref, fv_ref, mask_ref, pk_ref, pv_ref, *outs, kv_heads, keys, nodes, groups, cut, shared
):  # fmt: skip
    block, slots, parts, rows = cut.rows, cut.slots, cut.parts, nodes * groups
    pair, part = pl.program_id(0), pl.program_id(2)
    first = pl.program_id(1) * block
    live = first + jnp.arange(block) < rows
    length = length_ref[pair // kv_heads]
    dim = q_ref.shape[-1]
    spread = jnp.broadcast_to
    row, whole = pl.ds(first, block), spread(live[:, None], (block, dim))
    q = plgpu.load(q_ref.at[pair, row, :], mask=whole, other=0)
    scale = math.log2(math.e) / math.sqrt(dim)
    exact = precision(q_ref.dtype)

    def tile(ref, i, inside):
        at = ref.at[pair, pl.ds(i * slots, slots), :]
        return plgpu.load(at, mask=spread(inside[:, None], (slots, dim)), other=0)

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
        inside = i * slots + jnp.arange(slots) < length
        return update(carry, tile(pk_ref, i, inside), tile(pv_ref, i, inside), spread(inside[None], (block, slots)))

    def tree(i, carry):
        inside = i * slots + jnp.arange(slots) < keys
        v = tile(fv_ref, i, inside)
        v = jnp.where(jnp.abs(v.astype(jnp.float32)) < jnp.inf, v, 0)  # as in `attention.attend`: zero times NaN
        at = mask_ref.at[jnp.int32(0) if shared else pair // kv_heads, row, pl.ds(i * slots, slots)]
        seen = plgpu.load(at, mask=live[:, None] & inside[None], other=0)
        return update(carry, tile(fk_ref, i, inside), v, seen != 0)

    # All keys in steps, those of the prefix first, are dealt out evenly.
    steps = (length + slots - 1) // slots
    every = steps + pl.cdiv(keys, slots)
    low, high = every * part // parts, every * (part + 1) // parts
    carry = jnp.full((block,), MASKED), jnp.zeros((block,)), jnp.zeros((block, dim))
    carry = jax.lax.fori_loop(low, jnp.minimum(high, steps), prefix, carry)
    peak, total, value = jax.lax.fori_loop(jnp.maximum(low, steps) - steps, high - steps, tree, carry)
    if parts == 1:
        at = first + jnp.arange(block)
        place = (pair // kv_heads * nodes + at // groups) * kv_heads * groups + pair % kv_heads * groups + at % groups
        out = outs[0].at[spread(place[:, None], (block, dim)), spread(jnp.arange(dim)[None], (block, dim))]
        plgpu.store(out, (value / total[:, None]).astype(outs[0].dtype), mask=whole)
        return
    value_ref, peak_ref, total_ref = outs
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
