"""The small parts of a decoder layer on NVIDIA GPUs, a few kernels in place of many.

A step of a decoder is bound by launches and by reading weights once. Matrix products of few rows are cut along the sum,
so that every multiprocessor streams weights; their partial sums are added by whatever kernel comes next, which saves
that pass. Oracles are the methods of `XLA`.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float

from jetspec_jax.layers.numerics import power, precision
from jetspec_jax.layers.rope import Rope

PARTS = (1, 2, 3, 4, 6, 8)  # that a sum may be cut into
PROCESSORS = 132  # multiprocessors of an H200


def tileable(rows: int, columns: int) -> bool:
    """Whether weights [rows, columns] split into tiles."""
    return rows % 32 == 0 and columns % 64 == 0


class Tile(NamedTuple):
    """One program's share of a matrix product: rows and columns of the result, depth of a step, parts of the sum."""

    rows: int
    columns: int
    depth: int
    parts: int
    warps: int = 4
    stages: int = 3


def tile(rows: int, inner: int, columns: int) -> Tile:
    """Returns the tile for [rows, inner] x [inner, columns], by bench/products.py; its parts run at once."""
    deep, wide = (next(d for d in sizes if size % d == 0) for sizes, size in (((64, 32), inner), ((128, 64), columns)))
    block, each = min(64, max(16, power(rows))), 2  # programs that share a multiprocessor
    if rows <= 32:
        cut = Tile(block, 64, deep, 1, 4, 5)
    elif rows <= 64 and inner <= columns and inner % 128 == 0:
        cut = Tile(block, 64, 128, 1, 4, 3)
    elif rows <= 128 or wide == 64:
        cut, each = Tile(block, wide, deep, 1, 4, 4), 1 if rows <= 64 else 2
    else:
        cut, each = Tile(128, wide, deep, 1, 8, 5), 1
    programs = columns // cut.columns * pl.cdiv(rows, cut.rows)
    fitting = [s for s in PARTS if inner // cut.depth % s == 0]
    return cut._replace(parts=max((s for s in fitting if programs * s <= each * PROCESSORS), default=1))


def glu_tile(rows: int, inner: int, columns: int) -> Tile:
    """Returns the tile for two products side by side, each with its own columns."""
    deep = next(d for d in (64, 32) if inner % d == 0)
    return Tile(min(64, max(16, power(rows))), 128 if columns % 128 == 0 else 64, deep, 1, 4, 4)


@functools.partial(jax.jit, static_argnames=("interpret", "cut"))
def matmul(
    x: Float[Array, "R A"], w: Float[Array, "A O"], interpret: bool = False, cut: Tile | None = None
) -> Float[Array, "parts R O"]:
    """Returns partial sums in f32 of `x @ w`, as many as suit the sizes."""
    rows, inner = x.shape
    columns = w.shape[1]
    block, wide, depth, parts, warps, stages = cut or tile(rows, inner, columns)
    steps = inner // depth

    def kernel(x_ref, w_ref, out_ref):
        part, column = pl.program_id(2), pl.ds(pl.program_id(1) * wide, wide)
        row = pl.ds(pl.program_id(0) * block, block)
        live = (pl.program_id(0) * block + jnp.arange(block) < rows)[:, None]

        def body(i, total):
            at = pl.ds((part * (steps // parts) + i) * depth, depth)
            left = x_ref[row, at] if rows % block == 0 else _padded(x_ref.at[row, at], live)
            return total + _dot(left, w_ref[at, column])

        total = jax.lax.fori_loop(0, steps // parts, body, jnp.zeros((block, wide)))
        plgpu.store(out_ref.at[part, row, column], total, mask=jnp.broadcast_to(live, total.shape))

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, block), columns // wide, parts),
        out_shape=jax.ShapeDtypeStruct((parts, rows, columns), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="matmul",
    )(x, w)


@functools.partial(jax.jit, static_argnames=("interpret", "cut"))
def swiglu(
    x: Float[Array, "R E"], gate_up: Float[Array, "E 2 F"], interpret: bool = False, cut: Tile | None = None
) -> Float[Array, "R F"]:
    """Returns silu(x @ gate) * (x @ up); the two products never are in memory."""
    rows, inner = x.shape
    columns = gate_up.shape[2]
    block, wide, depth, _, warps, stages = cut or glu_tile(rows, inner, columns)

    def kernel(x_ref, w_ref, out_ref):
        row, first = pl.ds(pl.program_id(0) * block, block), pl.program_id(1) * wide
        live = (pl.program_id(0) * block + jnp.arange(block) < rows)[:, None]

        def body(i, sums):
            at = pl.ds(i * depth, depth)
            left = x_ref[row, at] if rows % block == 0 else _padded(x_ref.at[row, at], live)
            gate, up = (w_ref[at, pl.ds(j * columns + first, wide)] for j in range(2))
            return sums[0] + _dot(left, gate), sums[1] + _dot(left, up)

        zero = jnp.zeros((block, wide))
        gate, up = jax.lax.fori_loop(0, inner // depth, body, (zero, zero))
        # Rounded where the XLA path rounds: after each product.
        gate, up = (y.astype(out_ref.dtype).astype(jnp.float32) for y in (gate, up))
        out = (gate * jax.nn.sigmoid(gate)).astype(out_ref.dtype) * up.astype(out_ref.dtype)
        plgpu.store(out_ref.at[row, pl.ds(first, wide)], out, mask=jnp.broadcast_to(live, out.shape))

    return pl.pallas_call(
        kernel,
        grid=(pl.cdiv(rows, block), columns // wide),
        out_shape=jax.ShapeDtypeStruct((rows, columns), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="swiglu",
    )(x, gate_up.reshape(inner, 2 * columns))


def _padded(ref, live):
    return plgpu.load(ref, mask=jnp.broadcast_to(live, ref.shape), other=0)


def _dot(x, w):
    return jnp.dot(x, w, precision=precision(x.dtype), preferred_element_type=jnp.float32)


@functools.partial(jax.jit, static_argnames=("eps", "interpret"))
def add_norm(
    x: Float[Array, "R E"], parts: Float[Array, "parts R E"] | None, weight: Float[Array, " E"], eps: float,
    interpret: bool = False,
) -> tuple[Float[Array, "R E"], Float[Array, "R E"]]:  # fmt: skip
    """Returns the residual stream with the sum of `parts` added, and its RMSNorm."""
    rows, size = x.shape
    wide = power(size)

    def kernel(*refs):
        x_ref, parts_ref, weight_ref, *outs = refs if parts is not None else (refs[0], None, *refs[1:])
        row, live = pl.program_id(0), jnp.arange(wide) < size
        whole = pl.ds(0, wide)
        y = plgpu.load(x_ref.at[row, whole], mask=live, other=0)
        if parts is not None:
            total = jnp.zeros((wide,), jnp.float32)
            for i in range(parts.shape[0]):
                total += plgpu.load(parts_ref.at[jnp.int32(i), row, whole], mask=live, other=0).astype(jnp.float32)
            y = y + total.astype(x.dtype)
            plgpu.store(outs[0].at[row, whole], y, mask=live)
        f32 = y.astype(jnp.float32)
        normed = f32 * jax.lax.rsqrt((f32 * f32).sum() / size + eps)
        scale = plgpu.load(weight_ref.at[whole], mask=live, other=0)
        plgpu.store(outs[-1].at[row, whole], normed.astype(x.dtype) * scale, mask=live)

    like = jax.ShapeDtypeStruct(x.shape, x.dtype)
    out = pl.pallas_call(
        kernel,
        grid=(rows,),
        out_shape=[like] if parts is None else [like, like],
        compiler_params=plgpu.CompilerParams(num_warps=8 if size >= 2048 else 4, num_stages=1),
        interpret=interpret,
        name="add_norm",
    )(x, *(() if parts is None else (parts,)), weight)
    return (x, out[0]) if parts is None else (out[0], out[1])


@functools.partial(jax.jit, static_argnames=("eps", "dtype", "interpret"))
def heads(
    parts: Float[Array, "parts B T K _"],
    norms: tuple[Float[Array, " H"], Float[Array, " H"]] | None,
    angles: Rope,
    eps: float,
    dtype,
    interpret: bool = False,
) -> tuple[Float[Array, "B K M H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
    """Splits the fused product into queries, keys and values, and norms and rotates queries and keys.

    Args:
      parts: partial sums of the product; the last axis holds G queries, a key and a value of one kv head.
      norms: of queries and keys, or None.
      angles: of the rows' positions.
      eps: of the norms.
      dtype: of the result.
      interpret: runs without a GPU.
    """
    splits, batch, nodes, kv_heads, width = parts.shape
    half = angles[0].shape[-1]
    dim = 2 * half
    groups = width // dim - 2
    wide = power(groups)
    flat = parts.reshape(splits, batch * nodes, kv_heads, groups + 2, dim)
    cos, sin = (x.reshape(batch * nodes, half) for x in angles)

    def kernel(*refs):
        parts_ref, cos_ref, sin_ref = refs[:3]
        q_ref, k_ref, v_ref = refs[-3:]
        at, head = pl.program_id(0), pl.program_id(1)
        row, node = at // nodes, at % nodes
        c, s = cos_ref[at, :], sin_ref[at, :]
        halves = pl.ds(0, half), pl.ds(half, half)
        live = jnp.broadcast_to((jnp.arange(wide) < groups)[:, None], (wide, half))
        f32 = jnp.float32

        def summed(place, mask):
            """Returns both halves of what the product holds at `place`, rounded as a product is."""
            both = []
            for column in halves:
                read = lambda i, column=column: parts_ref.at[jnp.int32(i), at, head, place, column]
                terms = (plgpu.load(read(i), mask=mask, other=None if mask is None else 0) for i in range(splits))
                both.append(sum(t.astype(f32) for t in terms).astype(dtype).astype(f32))
            return both

        def turned(low, high, norm):
            if norm is not None:
                square = (low * low).sum(-1, keepdims=True) + (high * high).sum(-1, keepdims=True)
                scale = jax.lax.rsqrt(square / dim + eps)
                low, high = (
                    ((x * scale).astype(dtype) * norm[column]).astype(f32)
                    for x, column in zip((low, high), halves, strict=True)
                )
            return low * c - high * s, high * c + low * s

        query, key = refs[3:5] if norms is not None else (None, None)
        for x, column in zip(turned(*summed(pl.ds(0, wide), live), query), halves, strict=True):
            plgpu.store(q_ref.at[row, head, pl.ds(node * groups, wide), column], x.astype(dtype), mask=live)
        for x, column in zip(turned(*summed(jnp.int32(groups), None), key), halves, strict=True):
            k_ref[row, head, node, column] = x.astype(dtype)
        for x, column in zip(summed(jnp.int32(groups + 1), None), halves, strict=True):
            v_ref[row, head, node, column] = x.astype(dtype)

    shape = lambda rows: jax.ShapeDtypeStruct((batch, kv_heads, rows, dim), dtype)
    return pl.pallas_call(
        kernel,
        grid=(batch * nodes, kv_heads),
        out_shape=[shape(nodes * groups), shape(nodes), shape(nodes)],
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="heads",
    )(flat, cos, sin, *(norms or ()))
