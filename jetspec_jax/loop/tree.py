"""Candidate trees from per-depth draft logits, as tensor operations of fixed shape.

The draft gives one distribution a depth, shared by all nodes of the depth above; a path is scored by the sum of its
log-probabilities. Two rules build the tree:

* `best_first`: exactly the T - 1 most probable paths under that score (the DDTree objective);
* `accum_logp`: the most probable open node receives its whole sibling group, the rule of the published JetSpec engine.

Either way the order of nodes does not depend on the budget: a row's tree is its first `budget` nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

PIECES = (128, 16)  # of the vocabulary, then of the pieces that are left


class Tree(NamedTuple):
    """T nodes a row, node 0 the root; parents come before children. Nodes at `size` and behind are padding."""

    tokens: jax.Array  # [B, T] int32
    parents: jax.Array  # [B, T] int32, -1 for the root and for padding
    depths: jax.Array  # [B, T] int32
    size: jax.Array  # [B] int32, nodes in use

    def valid(self) -> jax.Array:
        """[B, T], False for padding."""
        return jnp.arange(self.tokens.shape[1]) < self.size[:, None]


def root(anchor: Int[Array, " B"]) -> Tree:
    """The tree of plain decoding: the anchor alone."""
    zero = jnp.zeros_like(anchor)[:, None]
    return Tree(anchor[:, None], zero - 1, zero, jnp.ones_like(anchor))


def build(
    builder: str,
    width: int,
    rows: int,
    logits: Float[Array, "B D V"],
    anchor: Int[Array, " B"],
    budget: Int[Array, " B"],
    grower: Callable | None = None,
) -> Tree:
    """A tree of at most `rows` nodes, cut to each row's `budget`; both count the root.

    grower: what builds it in place of `grow`.
    """
    if rows == 1:
        return root(anchor)
    width = min(width, rows - 1, logits.shape[-1])  # a node can use no more children than the tree has rows
    score, token = candidates(logits, width)
    tokens, parents, depths, built = (grower or grow)(builder, score, token, rows)
    size = jnp.clip(budget, 1, built)
    inside = jnp.arange(rows) < size[:, None]
    tokens = tokens.at[:, 0].set(anchor)
    cut = lambda x, padding: jnp.where(inside, x, padding)
    return Tree(cut(tokens, 0), cut(parents, -1), cut(depths, 0), size)


def candidates(logits: Float[Array, "B D V"], width: int) -> tuple[Float[Array, "B D W"], Int[Array, "B D W"]]:
    """Log-probabilities (f32, over the whole vocabulary) and tokens of each depth's best `width`, descending.

    A NaN row scores -inf and drops out of the tree: a broken draft may cost speed, never an output.
    """
    top, token = top_k(logits, width)
    score = top - jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jnp.where(jnp.isnan(score), -jnp.inf, score), token


def grow(
    builder: str, logp: Float[Array, "B D W"], token: Int[Array, "B D W"], rows: int
) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B T"], Int[Array, " B"]]:
    """Tokens (the root's has no meaning), parents, depths and number of the first `rows` nodes, out of candidates."""
    rule = {"best_first": _best_first, "accum_logp": _accum_logp}[builder]
    return jax.vmap(lambda s, t: rule(s, t, rows))(logp, token)


def top_k(x: Float[Array, "*rows V"], k: int) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """`jax.lax.top_k`, exactly, without a sort of the whole vocabulary: a long axis is cut into pieces, and only the k
    pieces with the largest maxima can hold one of the k largest numbers. Of equals the first wins, as there."""
    index = jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape)
    for piece in PIECES:
        size = x.shape[-1]
        if size <= 2 * k * piece:
            continue
        pad = [(0, 0)] * (x.ndim - 1) + [(0, -size % piece)]
        filled = jnp.pad(x, pad, constant_values=-jnp.inf), jnp.pad(index, pad)
        x, index = (y.reshape(*y.shape[:-1], -1, piece) for y in filled)
        best = jnp.sort(jax.lax.top_k(x.max(-1), k)[1])[..., None]  # in their old order, for equals
        x, index = (jnp.take_along_axis(y, best, -2).reshape(*y.shape[:-2], -1) for y in (x, index))
    x, place = jax.lax.top_k(x, k)
    return x, jnp.take_along_axis(index, place, -1)


def _best_first(logp: Float[Array, "D W"], token: Int[Array, "D W"], rows: int):
    """Level by level, the best nodes of each depth; then the best of all depths.

    Scores fall along a path, and on ties the smaller depth wins, so the selection is closed under ancestors. A node of
    depth d has d nodes above it, which bounds what a level can contribute; the i-th best parent's r-th child is
    preceded by (i+1)(r+1)-1 nodes of its level, which bounds the pairs that need to be looked at.
    """
    depth, width = logp.shape
    score = jnp.zeros(1)
    scores: list[jax.Array] = []
    origins: list[jax.Array] = []
    ranks: list[jax.Array] = []
    offsets: list[int] = []
    for d in range(min(depth, rows - 1)):
        keep = rows - 1 - d
        pairs = [(i, r) for i in range(score.size) for r in range(min(width, keep // (i + 1)))]
        parent, rank = jnp.array(pairs, jnp.int32).T
        score, best = jax.lax.top_k(score[parent] + logp[d, rank], min(keep, len(pairs)))
        before = offsets[-1] if d else 0  # flat index of the first node of the level above
        origins.append(before + parent[best] if d else jnp.full(best.shape, -1))
        offsets.append(sum(s.size for s in scores))
        scores.append(score)
        ranks.append(rank[best])

    flat = jnp.concatenate(scores)
    level = jnp.concatenate([jnp.full(s.shape, d, jnp.int32) for d, s in enumerate(scores)])
    count = min(rows - 1, flat.size)
    score, order = jax.lax.top_k(flat, count)
    place = jnp.zeros(flat.size, jnp.int32).at[order].set(jnp.arange(1, count + 1))
    origin = jnp.concatenate(origins)[order]
    tokens = token[level[order], jnp.concatenate(ranks)[order]]
    parents = jnp.where(origin < 0, 0, place[origin])
    pad = (1, rows - 1 - count)
    return (
        jnp.pad(tokens, pad),
        jnp.pad(parents, pad, constant_values=-1),
        jnp.pad(level[order] + 1, pad),
        1 + jnp.isfinite(score).sum(),
    )


def _accum_logp(logp: Float[Array, "D W"], token: Int[Array, "D W"], rows: int):
    """Expands the most probable open node until `rows` nodes are built; the first of equals wins, and nodes of the last
    depth never open, so the order of nodes is that of a heap with insertion numbers. Children of zero probability are
    no nodes: the next sibling group is written over them."""
    depth, width = logp.shape
    slots = rows + width

    def grows(tree):
        open_score, *_, built = tree
        return (built < rows) & (open_score.max() > -jnp.inf)

    def expand(tree):
        open_score, tokens, parents, depths, built = tree
        node = jnp.argmax(open_score)
        best, d = open_score[node], depths[node]
        child = jnp.where(d + 1 < depth, best + logp[d], -jnp.inf)
        at = lambda x, new: jax.lax.dynamic_update_slice(x, new.astype(x.dtype), (built,))
        return (
            at(open_score.at[node].set(-jnp.inf), child),
            at(tokens, token[d]),
            at(parents, jnp.full(width, node)),
            at(depths, jnp.full(width, d + 1)),
            built + jnp.isfinite(logp[d]).sum(),
        )

    start = (
        jnp.full(slots, -jnp.inf).at[0].set(0.0),
        jnp.zeros(slots, jnp.int32),
        jnp.full(slots, -1, jnp.int32),
        jnp.zeros(slots, jnp.int32),
        jnp.int32(1),
    )
    _, tokens, parents, depths, built = jax.lax.while_loop(grows, expand, start)
    return tokens[:rows], parents[:rows], depths[:rows], jnp.minimum(built, rows)
