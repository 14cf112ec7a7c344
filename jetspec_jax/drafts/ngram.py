"""Prompt lookup: drafts without a model, by what followed the last tokens where they stood before.

The committed tokens are searched for earlier places that end like the text does now. The longer the agreement, and of
equal ones the later the place, the better the match; what followed the best few is laid over each other as one tree.
Text that repeats itself (code, quotations, summaries of the prompt) is drafted well, other text not at all, and a round
costs little more than its verification. The method is that of prompt lookup decoding
(https://github.com/apoorvumang/prompt-lookup-decoding), with several matches a round.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jetspec_jax.loop.choice import Choice
from jetspec_jax.loop.contracts import Ends, Seen
from jetspec_jax.loop.tree import Rule, Tree, cut, root

DEPTH, NODES = 15, 64


@dataclasses.dataclass(frozen=True)
class NGram:
    """Prompt lookup; implements `contracts.Draft`. It has no parameters and no state.

    depth: tokens that follow a match, at most.
    nodes: of a tree.
    longest: tokens that are compared.
    matches: places whose continuations are looked at.
    """

    depth: int = DEPTH
    nodes: int = NODES
    longest: int = 8
    matches: int = 8
    taps = ()

    def shaped(self, rule: Rule, depth: int) -> NGram:
        return dataclasses.replace(self, nodes=rule.nodes, depth=depth)

    def init(self, params, batch: int, capacity: int) -> None:
        return None

    def extend(self, params, state, seen: Seen, ends: Ends) -> None:
        return None

    def propose(self, params, state, choice: Choice, budget: Int[Array, " B"], ends: Ends) -> tuple[Tree, None]:
        if self.nodes == 1:
            return root(choice.anchor), None
        lines = jax.vmap(self._lines)(choice.past.tokens, choice.past.length)
        return cut(jax.vmap(self._merged)(*lines), choice.anchor, budget), None

    def _lines(self, tokens: Int[Array, " S"], length: Int[Array, ""]) -> tuple[Int[Array, "M D"], Bool[Array, "M D"]]:
        """Returns what followed each of the M best matches, and which of it exists."""
        at = jnp.arange(tokens.size)
        back = jnp.arange(self.longest)
        tail = tokens[jnp.maximum(length - 1 - back, 0)]
        there = tokens[jnp.maximum(at[:, None] - back, 0)]  # [S, longest], what ends at each place
        same = (there == tail) & (at[:, None] >= back)  # so for the anchor too: a match lies before it
        agreed = jnp.cumprod(same, axis=1).sum(1)
        # Longer agreement first, then the later place; a place is a match when it lies before the anchor.
        score = jnp.where((at < length - 1) & (agreed > 0), agreed * tokens.size + at, -1)
        best, place = jax.lax.top_k(score, min(self.matches, tokens.size))
        follow = place[:, None] + 1 + jnp.arange(self.depth)
        known = (best >= 0)[:, None] & (follow < length)
        return tokens[jnp.minimum(follow, tokens.size - 1)], known

    def _merged(self, lines: Int[Array, "M D"], known: Bool[Array, "M D"]):
        """Lays the lines over each other, one after the other: tokens, parents, depths and number of the nodes.

        Lines that begin alike share their nodes; a node's parent lies on an earlier line or before it on its own, so
        parents come before children.
        """
        count, depth = lines.shape
        # begins[i, j, d]: lines i and j agree on their first d + 1 tokens.
        begins = jnp.cumprod((lines[:, None] == lines[None]) & known[:, None] & known[None], axis=2).astype(bool)
        first = jnp.argmax(begins, axis=1)  # [M, D] the first line that holds this beginning
        own = known & (first == jnp.arange(count)[:, None])
        index = jnp.cumsum(own.reshape(-1)).reshape(count, depth)  # of own nodes, the root being 0
        node = jnp.take_along_axis(index, first, 0)  # of every beginning
        above = jnp.pad(node, ((0, 0), (1, 0)))[:, :-1]
        slot = jnp.where(own, index, self.nodes).reshape(-1)  # what the tree has no room for is dropped

        def put(values, fill):
            return jnp.full(self.nodes, fill, jnp.int32).at[slot].set(values.reshape(-1).astype(jnp.int32), mode="drop")

        level = jnp.broadcast_to(jnp.arange(1, depth + 1), lines.shape)
        built = jnp.minimum(1 + own.sum(), self.nodes)
        return put(lines, 0), put(above, -1), put(level, 0), built


def build(config: None = None, dtype=None, backend=None) -> tuple[NGram, dict]:
    """Returns the draft and its parameters, of which there are none; the arguments are those of every family."""
    return NGram(), {}
