"""Candidate trees from per-depth draft logits, as tensor operations of fixed shape.

The draft gives candidates for each depth, and how probable each is: in one row that all nodes of the depth above share,
or in a row for each candidate of the depth above. A path is scored by the sum of its log-probabilities. Two rules build
the tree:

* `best_first`: exactly the T - 1 most probable paths under that score (the DDTree objective);
* `accum_logp`: the most probable open node receives its whole sibling group, the rule of the published JetSpec engine.

A tree of width 1 is a chain; where each parent has a row of its own, that of the best child of each node (`followed`).

A draft whose candidates depend on more of the path than a node's parent asks `levels` instead.

Either way the order of nodes does not depend on the budget: a row's tree is its first `budget` nodes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jetspec_jax.layers import masks, vocabulary
from jetspec_jax.options import SHARPNESS

# Tokens (the root's has no meaning), parents, depths [B, T], and the number of nodes [B].
Grown = tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B T"], Int[Array, " B"]]


# (level, frontier, carry) -> (tokens [B, F, W], log-probabilities [B, F, W] after their parents, carry)
Children = Callable[[int, "Frontier", Any], tuple[jax.Array, jax.Array, Any]]


WIDTH = {"best_first": 64, "accum_logp": 7}  # of a builder, where nothing else is asked


class Candidates(NamedTuple):
    """Tokens that a tree may hold at each depth, best first, and how probable each is after its parent."""

    token: jax.Array  # [B, D, W] int32
    # [B, D, P, W] f32. P = 1: one row shared by all parents, descending. P = W: row p is after candidate p of the depth
    # above, in any order; after the root the first row counts.
    logp: jax.Array


class Pairs(NamedTuple):
    """What candidates of a depth add to the logits of those of the next, as a draft gave it."""

    token: jax.Array  # [B, D, W] int32, the candidates
    bias: jax.Array  # [B, D, W, W] f32, of each one (last axis) after each one of the depth above


@dataclasses.dataclass(frozen=True)
class Rule:
    """How a draft's scores become a tree; static.

    nodes: T, the root included; a row's budget may be smaller.
    builder: `best_first` or `accum_logp`.
    width: candidates of a depth, or children of a node; 0 is what is usual for the builder, or for the draft's family.
    sharpness: of the scores under the noise of sampled rows; 0 leaves the noise out.
    grown: nodes that are scored, the root included; 0 is `nodes`. Those after `nodes` are not verified: they tell
      what a larger tree would bring.
    """

    nodes: int
    builder: str = "best_first"
    width: int = 0
    sharpness: float = SHARPNESS
    grown: int = 0

    @property
    def candidates(self) -> int:
        """`width`, or its builder's usual one."""
        return self.width or WIDTH[self.builder]

    @property
    def scored(self) -> int:
        """G, nodes that are scored."""
        return max(self.grown, self.nodes)

    @property
    def chain(self) -> bool:
        """Whether its trees have one node a depth."""
        return self.width == 1


class Scores(NamedTuple):
    """How probable a draft takes paths to be, as logarithms (f32); -inf where there is no such path."""

    node: jax.Array  # [B, G] of the path to each node that has grown, in the tree's order; 0 for the root
    spine: jax.Array  # [B, D] of the most probable path of each depth


class Tree(NamedTuple):
    """T nodes a row, node 0 the root; parents come before children. Nodes from `size` on are padding."""

    tokens: jax.Array  # [B, T] int32
    parents: jax.Array  # [B, T] int32, -1 for the root and for padding
    depths: jax.Array  # [B, T] int32
    size: jax.Array  # [B] int32, nodes in use
    logits: jax.Array | None = None  # [B, D, V] f32, of the draft, where it has any: for traces
    scores: Scores | None = None  # None for drafts without probabilities
    pairs: Pairs | None = None  # beside `logits`; None where all nodes of a depth share its row

    def valid(self) -> jax.Array:
        """Returns [B, T], False for padding."""
        return jnp.arange(self.tokens.shape[1]) < self.size[:, None]


def root(anchor: Int[Array, " B"]) -> Tree:
    """Returns the tree of plain decoding, the anchor alone."""
    zero = jnp.zeros_like(anchor)[:, None]
    return Tree(anchor[:, None], zero - 1, zero, jnp.ones_like(anchor))


def build(
    rule: Rule,
    logits: Float[Array, "B D V"],
    anchor: Int[Array, " B"],
    budget: Int[Array, " B"],
    grower: Callable | None = None,
) -> Tree:
    """Builds a tree of at most `rule.nodes` nodes out of one row of logits a depth.

    Args:
      rule: how candidates become a tree.
      logits: what candidates are ranked by.
      anchor: tokens of the roots.
      budget: nodes of each row's tree; it counts the root, as `rule.nodes` does.
      grower: what computes `grow`; None is the function below.
    """
    if rule.nodes == 1:
        return root(anchor)
    return drawn(rule, candidates(rule, logits), anchor, budget, grower)


def drawn(
    rule: Rule, found: Candidates, anchor: Int[Array, " B"], budget: Int[Array, " B"], grower: Callable | None = None
) -> Tree:
    """Builds the tree of candidates, as `build` does; `rule.nodes` is at least 2."""
    if rule.chain and found.logp.shape[2] > 1:
        found = followed(found)
    grown = (grower or grow)(rule.builder, found, rule.scored)
    return cut(first(grown, rule.nodes), anchor, budget)._replace(scores=scores(found, grown))


def first(grown: Grown, nodes: int) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Returns the first `nodes` nodes of what has grown."""
    *arrays, built = grown
    tokens, parents, depths = (x[:, :nodes] for x in arrays)
    return tokens, parents, depths, jnp.minimum(built, nodes)


def cut(grown: Grown, anchor: Int[Array, " B"], budget: Int[Array, " B"]) -> Tree:
    """Returns the first `budget` nodes of what has grown, with the anchor as root and the rest as padding."""
    tokens, parents, depths, built = grown
    tree = Tree(tokens.at[:, 0].set(anchor), parents, depths, built)
    return _shortened(tree, jnp.clip(budget, 1, built))


def prune(tree: Tree, least: Float[Array, " B"]) -> Tree:
    """Returns the tree up to the first node whose path is less probable than `least` of its row; the root stays.

    Where nodes come in the order of their probabilities, as in `best_first` trees, these are all nodes that are not.
    """
    assert tree.scores is not None  # callers refuse drafts without
    probable = tree.scores.node[:, : tree.tokens.shape[1]] >= jnp.log(least)[:, None]
    count = jnp.cumprod(probable.at[:, 0].set(True).astype(jnp.int32), axis=1).sum(1)
    return _shortened(tree, jnp.minimum(tree.size, count))


def _shortened(tree: Tree, size: Int[Array, " B"]) -> Tree:
    """Returns the tree's first `size` nodes, the rest as padding."""
    inside = jnp.arange(tree.tokens.shape[1]) < size[:, None]
    tokens, parents, depths = (
        jnp.where(inside, x, fill) for x, fill in ((tree.tokens, 0), (tree.parents, -1), (tree.depths, 0))
    )
    return tree._replace(tokens=tokens, parents=parents, depths=depths, size=size)


def scores(candidates: Candidates, grown: Grown) -> Scores:
    """Returns how probable the paths of a tree are that has grown from candidates."""
    tokens, parents, depths, built = grown
    own = _own(candidates, tokens, parents, depths)
    path = jnp.where(masks.ancestors(parents, candidates.logp.shape[1]), own[:, None, :], 0.0).sum(-1)
    there = jnp.arange(tokens.shape[1]) < built[:, None]
    return Scores(jnp.where(there, path, -jnp.inf), _spine(candidates.logp))


def _own(
    candidates: Candidates, tokens: Int[Array, "B T"], parents: Int[Array, "B T"], depths: Int[Array, "B T"]
) -> Float[Array, "B T"]:
    """Returns how probable each node is after its parent, 0 for the root.

    Whoever grew the tree, a node's own part is found by its token, which a depth's row holds once.
    """
    batch, _, rows, width = candidates.logp.shape
    level = jnp.maximum(depths - 1, 0)
    is_token = jnp.take_along_axis(candidates.token, level[..., None], 1) == tokens[..., None]
    place = jnp.argmax(is_token, -1)
    above = jnp.take_along_axis(place, jnp.maximum(parents, 0), 1) if rows > 1 else jnp.zeros_like(place)
    row = jnp.where(depths > 1, above, 0)
    flat = (level * rows + row) * width + place
    own = jnp.take_along_axis(candidates.logp.reshape(batch, -1), flat, 1)
    return jnp.where(depths == 0, 0.0, jnp.where(is_token.any(-1), own, -jnp.inf))


def foretold(tree: Tree, temperature: Float[Array, ""] | float = 1.0) -> Float[Array, "B T"]:
    """Returns how probable a draft makes each node after its parent, as a logarithm; 0 for the root, -inf for padding.

    These are its logits as they are, before noise, penalties and bias of a request bend them; `Scores` has those.

    Args:
      tree: of a draft that has logits.
      temperature: divides them, and what pairs add.
    """
    assert tree.logits is not None  # callers ask no others
    logits, level = tree.logits / temperature, jnp.maximum(tree.depths - 1, 0)
    whole = vocabulary.log_total(logits)
    if tree.pairs is None:
        own = vocabulary.chosen(logits, level, tree.tokens) - jnp.take_along_axis(whole[..., 0], level, 1)
    else:
        token, bias = tree.pairs
        rows = jnp.broadcast_to(jnp.arange(token.shape[1])[:, None], token.shape)
        flat = lambda x: x.reshape(len(token), -1)
        shared = vocabulary.chosen(logits, flat(rows), flat(token)).reshape(token.shape) - whole
        table = conditioned(Candidates(token, shared[:, :, None]), bias / temperature)
        own = _own(table, tree.tokens, tree.parents, tree.depths)
    return jnp.where(tree.valid(), jnp.where(tree.depths == 0, 0.0, own), -jnp.inf)


def _spine(logp: Float[Array, "B D P W"]) -> Float[Array, "B D"]:
    """Returns how probable the most probable path of each depth is."""
    if logp.shape[2] == 1:
        return jnp.cumsum(logp[:, :, 0, 0], axis=1)

    def deeper(best, rows):
        best = (best[:, :, None] + rows).max(1)
        return best, best.max(-1)

    first = logp[:, 0, 0]
    _, rest = jax.lax.scan(deeper, first, logp[:, 1:].swapaxes(0, 1))
    return jnp.concatenate([first.max(-1)[:, None], rest.T], 1)


def candidates(rule: Rule, logits: Float[Array, "B D V"], paired: bool = False) -> Candidates:
    """Returns the best tokens of each depth, descending, with log-probabilities (f32) over the whole vocabulary.

    A NaN row scores -inf and drops out of the tree: a broken draft may cost speed, never an output.

    Args:
      rule: how many there are.
      logits: what they are ranked by.
      paired: whether each parent will have a row of its own. A chain then chooses among as many as the usual best-first
        tree of as many nodes, whatever its builder: it costs no more, and both know the same tokens.
    """
    most = WIDTH["best_first"] if paired and rule.chain else rule.candidates
    # A node can use no more children than the tree has nodes.
    width = min(most, rule.scored - 1, vocabulary.size(logits))
    top, token = vocabulary.top_k(logits, width)
    logp = top - vocabulary.log_total(logits)
    return Candidates(token, jnp.where(jnp.isnan(logp), -jnp.inf, logp)[:, :, None])


def conditioned(candidates: Candidates, bias: Float[Array, "B D W W"]) -> Candidates:
    """Returns candidates with a row for each parent, out of a shared row and what each parent adds to it.

    What is no candidate of a depth gets no bias and keeps its share of the shared row, so that each parent's row is a
    distribution over the whole vocabulary again. Rows that add nothing are the shared row, bit for bit.

    Args:
      candidates: with a shared row (P = 1).
      bias: in logits, of each candidate (last axis) after each one of the depth above.
    """
    row = candidates.logp[:, :, 0]
    mass = jnp.exp(row).sum(-1)
    rest = jnp.where(mass < 1, jnp.log1p(-jnp.minimum(mass, 1.0)), -jnp.inf)  # of all that is no candidate
    raised = row[:, :, None] + bias
    total = jnp.logaddexp(jax.nn.logsumexp(raised, axis=-1), rest[..., None])
    adds = (bias != 0).any(-1, keepdims=True)
    logp = jnp.where(adds, raised - total[..., None], row[:, :, None])
    return Candidates(candidates.token, jnp.where(jnp.isnan(logp), -jnp.inf, logp))


def followed(candidates: Candidates) -> Candidates:
    """Returns the chain of the best child of each node, from the root on, as the one candidate of each depth.

    Its row is the log-probability of the chosen child after the chosen parent. Of equals the first wins, which the
    shared row has for more probable.

    Args:
      candidates: with a row for each parent (P = W).
    """
    token, logp = candidates
    # Of every parent at once, so that two look-ups a depth are all that has to be done in order.
    best, score = jnp.argmax(logp, -1), logp.max(-1)
    at = jnp.zeros((len(token), 1), jnp.int32)
    places, own = [], []
    for depth in range(token.shape[1]):
        own.append(jnp.take_along_axis(score[:, depth], at, 1))
        at = jnp.take_along_axis(best[:, depth], at, 1)
        places.append(at)
    chosen = jnp.take_along_axis(token, jnp.stack(places, 1), 2)
    return Candidates(chosen, jnp.stack(own, 1)[..., None])


def grow(builder: str, candidates: Candidates, nodes: int) -> Grown:
    """Returns tokens (the root's has no meaning), parents, depths and number of the first `nodes` nodes."""
    parents, width = candidates.logp.shape[2:]
    if parents not in (1, width):
        raise ValueError(f"P={parents}: one row for all parents, or one for each of the W={width} candidates above")
    if builder == "best_first" and parents > 1:
        return _best_first_of_table(candidates, nodes)
    if builder == "best_first":
        return jax.vmap(lambda logp, token: _best_first(logp[:, 0], token, nodes))(*reversed(candidates))
    return jax.vmap(lambda logp, token: _accum_logp(logp, token, nodes))(*reversed(candidates))


class Frontier(NamedTuple):
    """The nodes whose children are asked for next, F a row, best first."""

    token: jax.Array  # [B, F] int32
    parent: jax.Array  # [B, F] int32, place of its parent among the nodes that were expanded before


def levels(
    children: Children, carry: Any, anchor: Int[Array, " B"], nodes: int, depth: int, frontier: int
) -> tuple[Grown, Scores]:
    """Grows trees level by level for drafts whose candidates depend on the path (EAGLE-2's dynamic tree).

    At each level the best `frontier` nodes are expanded, by the sum of log-probabilities along their paths; of all
    children that were ever made, the best `nodes` - 1 are the tree, in the order of their scores. With a frontier of
    `nodes` - 1 and all children given, these are exactly the most probable paths.

    Args:
      children: of (level, frontier, carry); returns tokens [B, F, W], log-probabilities [B, F, W] after their parents,
        and the next carry. Level 0 has the root alone.
      carry: whatever `children` hands on.
      anchor: tokens of the roots.
      nodes: T, the root included.
      depth: longest path.
      frontier: nodes F that are expanded at a level.

    Returns:
      What has grown, for `cut`, and how probable its paths are.
    """
    at = Frontier(anchor[:, None], jnp.zeros_like(anchor)[:, None])
    score, above = jnp.zeros(at.token.shape), jnp.full(at.token.shape, -1)
    pool: list[tuple[jax.Array, ...]] = []
    size = 0
    take = lambda x, i: jnp.take_along_axis(x, i, 1)
    for level in range(min(depth, nodes - 1)):
        token, logp, carry = children(level, at, carry)
        total = score[..., None] + jnp.where(jnp.isnan(logp), -jnp.inf, logp)
        flat = lambda x: x.reshape(x.shape[0], -1)
        best, place = jax.lax.top_k(flat(total), min(nodes - 1, flat(total).shape[1]))
        parent, token = place // token.shape[-1], take(flat(token), place)
        pool.append((token, best, take(above, parent), jnp.full(best.shape, level + 1)))
        few = slice(0, frontier)
        at, score = Frontier(token[:, few], parent[:, few]), best[:, few]
        above = jnp.broadcast_to(size + jnp.arange(score.shape[1]), score.shape)
        size += best.shape[1]

    tokens, scores, origins, depths = (jnp.concatenate(x, 1) for x in zip(*pool, strict=True))
    # A child scores at most what its parent does and comes after it, so the first of equals is the parent.
    best, order = jax.lax.top_k(scores, min(nodes - 1, size))
    count = best.shape[1]
    rank = jax.vmap(lambda o: jnp.zeros(size, jnp.int32).at[o].set(jnp.arange(1, count + 1)))(order)
    origin = take(origins, order)
    parents = jnp.where(origin < 0, 0, take(rank, jnp.maximum(origin, 0)))
    pad = ((0, 0), (1, nodes - 1 - count))
    grown = (
        jnp.pad(take(tokens, order), pad),
        jnp.pad(parents, pad, constant_values=-1),
        jnp.pad(take(depths, order), pad),
        1 + jnp.isfinite(best).sum(1),
    )
    node = jnp.pad(best, pad, constant_values=-jnp.inf).at[:, 0].set(0.0)
    return grown, Scores(node, jnp.stack([score[:, 0] for _, score, *_ in pool], 1))


def _best_first(logp: Float[Array, "D W"], token: Int[Array, "D W"], nodes: int):
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
    for d in range(min(depth, nodes - 1)):
        keep = nodes - 1 - d
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
    count = min(nodes - 1, flat.size)
    score, order = jax.lax.top_k(flat, count)
    place = jnp.zeros(flat.size, jnp.int32).at[order].set(jnp.arange(1, count + 1))
    origin = jnp.concatenate(origins)[order]
    tokens = token[level[order], jnp.concatenate(ranks)[order]]
    parents = jnp.where(origin < 0, 0, place[origin])
    pad = (1, nodes - 1 - count)
    return (
        jnp.pad(tokens, pad),
        jnp.pad(parents, pad, constant_values=-1),
        jnp.pad(level[order] + 1, pad),
        1 + jnp.isfinite(score).sum(),
    )


def _best_first_of_table(candidates: Candidates, nodes: int) -> Grown:
    """The same where each parent has a row of its own: which child comes next is then no matter of ranks alone."""
    token, logp = candidates
    batch, depth, _, width = logp.shape
    place = jnp.broadcast_to(jnp.arange(width), (batch, nodes, width))

    def children(level: int, at: Frontier, carry: Any):
        row = at.token if level else jnp.zeros_like(at.token)
        return place[:, : row.shape[1]], jnp.take_along_axis(logp[:, level], row[..., None], 1), carry

    grown, _ = levels(children, None, jnp.zeros(batch, jnp.int32), nodes, depth, nodes - 1)
    flat = (jnp.maximum(grown[2] - 1, 0) * width + grown[0]).astype(jnp.int32)
    tokens = jnp.take_along_axis(token.reshape(batch, -1), flat, 1)
    return (jnp.where(grown[2] > 0, tokens, 0), *grown[1:])


def _accum_logp(logp: Float[Array, "D P W"], token: Int[Array, "D W"], nodes: int):
    """Expands the most probable open node until all nodes are built; the first of equals wins, and nodes of the last
    depth never open, so the order of nodes is that of a heap with insertion numbers. Children of zero probability are
    no nodes: the next sibling group is written over them."""
    depth, parents, width = logp.shape
    slots = nodes + width

    def grows(tree):
        open_score, *_, built = tree
        return (built < nodes) & (open_score.max() > -jnp.inf)

    def expand(tree):
        open_score, tokens, places, depths, built = tree
        node = jnp.argmax(open_score)
        best, d = open_score[node], depths[node]
        rank, row, found = jnp.arange(width), logp[d, 0], token[d]
        if parents > 1:  # candidates come in another order after each parent
            row = logp[d, places[node] % width]
            rank = jnp.argsort(-row, stable=True)
            row, found = row[rank], found[rank]
        child = jnp.where(d + 1 < depth, best + row, -jnp.inf)
        at = lambda x, new: jax.lax.dynamic_update_slice(x, new.astype(x.dtype), (built,))
        return (
            at(open_score.at[node].set(-jnp.inf), child),
            at(tokens, found),
            at(places, node * width + rank),
            at(depths, jnp.full(width, d + 1)),
            built + jnp.isfinite(row).sum(),
        )

    start = (
        jnp.full(slots, -jnp.inf).at[0].set(0.0),
        jnp.zeros(slots, jnp.int32),
        jnp.full(slots, -width, jnp.int32),  # parent and place among its candidates, in one number
        jnp.zeros(slots, jnp.int32),
        jnp.int32(1),
    )
    _, tokens, places, depths, built = jax.lax.while_loop(grows, expand, start)
    return tokens[:nodes], places[:nodes] // width, depths[:nodes], jnp.minimum(built, nodes)
