"""The loop's own parts on NVIDIA GPUs: growing the tree, and writing the accepted path to every cache, one launch each.

Oracles: `tree.grow`, and `cache.write` of `cache.take`.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jetspec_jax.layers.cache import Cache
from jetspec_jax.layers.numerics import power


@functools.partial(jax.jit, static_argnames=("rows", "interpret"))
def grow(
    logp: Float[Array, "B D P W"], token: Int[Array, "B D W"], rows: int, interpret: bool = False
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B T"], Int[Array, " B"]]:
    """Returns tokens (the root's is 0), parents, depths and number of nodes of the `rows` - 1 most probable paths.

    One program a row pops nodes in order of score. An open slot of the search is a node with its next unused child, so
    a pop opens two: the popped node's first child, and its parent's next one. Where each parent has a row of its own
    (P = W), rows are sorted before, and the kernel reads which candidate comes next, and that one's row.
    """
    batch, depth, parents, width = logp.shape
    wide = power(rows)
    ranked: tuple[jax.Array, ...] = ()
    if parents > 1:
        logp, order = jax.lax.top_k(logp, min(width, rows - 1))  # a node has no more children than the tree has room
        ranked, width = (order,), logp.shape[-1]

    def kernel(logp_ref, token_ref, *refs):
        order_ref = refs[0] if ranked else None
        tokens_ref, parents_ref, depths_ref, size_ref = refs[len(ranked) :]
        b, slot = pl.program_id(0), jnp.arange(wide)
        none = jnp.float32(-jnp.inf)

        def pick(x, hit):
            return jnp.where(hit, x, jnp.zeros_like(x)).sum()

        def pop(n, carry):
            open_score, score, depths, rank, tokens, parents, size, *places = carry
            best = open_score.max()
            # Of equals the node of smaller depth wins, then the child of the first parent.
            at = jnp.where(open_score == best, depths * wide + slot, depth * wide).min() % wide
            hit = slot == at
            d, r, base = pick(depths, hit), pick(rank, hit), pick(score, hit)
            alive = best > none
            row, place, below = jnp.int32(0), r, jnp.int32(0)
            if order_ref is not None:
                row = pick(places[0], hit)
                place = below = plgpu.load(order_ref.at[b, d, row, r], mask=alive, other=0)
            found = plgpu.load(token_ref.at[b, d, place], mask=alive, other=0)
            sibling = plgpu.load(logp_ref.at[b, d, row, r + 1], mask=alive & (r + 1 < width), other=none)
            child = plgpu.load(logp_ref.at[b, d + 1, below, jnp.int32(0)], mask=alive & (d + 1 < depth), other=none)
            fresh = alive & (slot == n)
            open_score = jnp.where(hit & alive, base + sibling, open_score)
            return (
                jnp.where(fresh, best + child, open_score),
                jnp.where(fresh, best, score),
                jnp.where(fresh, d + 1, depths),
                jnp.where(hit & alive, r + 1, rank),
                jnp.where(fresh, found, tokens),
                jnp.where(fresh, at, parents),
                size + alive.astype(jnp.int32),
                *(jnp.where(fresh, place, x) for x in places),
            )

        zero = jnp.zeros((wide,), jnp.int32)
        first = logp_ref[b, 0, 0, 0]
        start = (
            jnp.where(slot == 0, first, none), jnp.zeros((wide,), jnp.float32), zero, zero, zero, zero - 1,
            jnp.int32(1), *((zero,) if ranked else ()),
        )  # fmt: skip
        _, _, depths, _, tokens, parents, size, *_ = jax.lax.fori_loop(1, rows, pop, start)
        for ref, x in ((tokens_ref, tokens), (parents_ref, parents), (depths_ref, depths)):
            plgpu.store(ref.at[b, pl.ds(0, wide)], x, mask=slot < rows)
        size_ref[b] = size

    nodes = jax.ShapeDtypeStruct((batch, rows), jnp.int32)
    return pl.pallas_call(
        kernel,
        grid=(batch,),
        out_shape=[nodes, nodes, nodes, jax.ShapeDtypeStruct((batch,), jnp.int32)],
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="grow_tree",
    )(logp, token, *ranked)


@functools.partial(jax.jit, static_argnames=("interpret",))
def commit(
    cache: Cache, fresh: Cache, path: Int[Array, "B R"], start: Int[Array, " B"], interpret: bool = False
) -> Cache:
    """Writes rows `path` of the fresh K/V to slots start..start+R-1 of every layer's cache, in place."""
    old, new = (jax.tree.leaves(x) for x in (cache, fresh))
    count, rows = len(old), path.shape[1]
    batch, kv_heads = old[0].shape[:2]
    nodes, wide = new[0].shape[2], power(rows)
    new = [x.reshape(-1, x.shape[-1]) for x in new]

    def kernel(path_ref, start_ref, *refs):
        new_refs, out_refs = refs[:count], refs[-count:]
        pair, live = pl.program_id(1), jnp.arange(wide) < rows
        b, head = pair // kv_heads, pair % kv_heads
        node = plgpu.load(path_ref.at[b, pl.ds(0, wide)], mask=live, other=0)
        first = start_ref[b]
        for i in range(count):

            @pl.when(pl.program_id(0) == i)
            def _(new=new_refs[i], out=out_refs[i]):
                dim = new.shape[-1]
                whole = lambda x: jnp.broadcast_to(x, (wide, dim))
                source = new.at[whole((pair * nodes + node)[:, None]), whole(jnp.arange(dim)[None])]
                moved = plgpu.load(source, mask=whole(live[:, None]), other=0)
                at = out.at[b, head, pl.ds(first, wide), :]
                plgpu.store(at, moved, mask=whole(live[:, None]))

    out = pl.pallas_call(
        kernel,
        grid=(count, batch * kv_heads),
        out_shape=[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in old],
        input_output_aliases={2 + count + i: i for i in range(count)},
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="commit",
    )(path, start, *new, *old)
    return jax.tree.unflatten(jax.tree.structure(cache), out)
