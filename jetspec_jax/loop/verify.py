"""Acceptance: the longest path of the tree on which the target agrees, found without following pointers."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jetspec_jax.loop.tree import Tree


class Accepted(NamedTuple):
    """The agreed path and the tokens it commits; entries from `count` on have no meaning."""

    path: jax.Array  # [B, D + 1] node indices, root first
    tokens: jax.Array  # [B, D + 1] the target's choice at each node of the path: the drafts it confirms, then the bonus
    count: jax.Array  # type: ignore[assignment]  # [B] nodes on the path = tokens committed (accepted drafts + 1)


def accept(tree: Tree, ancestors: Bool[Array, "B T T"], choice: Int[Array, "B T"], depth: int) -> Accepted:
    """Finds the longest match: a node is agreed when it and all above it equal the target's choice at their parents."""
    wanted = jnp.take_along_axis(choice, jnp.maximum(tree.parents, 0), 1)
    match = (tree.depths == 0) | (tree.tokens == wanted)
    agreed = tree.valid() & (match[:, None, :] | ~ancestors).all(-1)
    # Deepest agreed node; of equal siblings (never built by our trees) the first.
    best = jnp.argmax(jnp.where(agreed, tree.depths, -1), axis=1)
    on_path = jnp.take_along_axis(ancestors, best[:, None, None], 1)[:, 0]
    at_depth = on_path[:, None, :] & (tree.depths[:, None, :] == jnp.arange(depth + 1)[:, None])
    path = jnp.argmax(at_depth, axis=-1)
    count = jnp.take_along_axis(tree.depths, best[:, None], 1)[:, 0] + 1
    return Accepted(path, jnp.take_along_axis(choice, path, 1), count)


def accept_lazily(
    tree: Tree,
    ancestors: Bool[Array, "B T T"],
    guess: Int[Array, "B T"],
    skip: Bool[Array, " B"],
    rule: Callable[[jax.Array], jax.Array],
    depth: int,
) -> Accepted:
    """Accepts as `accept` does, where the choice at a node costs too much to make it at every node.

    rule: nodes of a path [B, D + 1], root first, -> the choice at each. A node's choice depends on the tree alone, so
        it is made once: the rule runs over the path that the guessed choices agree on, then again while the path that
        it corrected leads to nodes that it has not seen. With good guesses that is once a round.
    skip: rows whose result does not matter.
    """

    def ahead(choice, known):
        found = accept(tree, ancestors, choice, depth)
        open_ = (jnp.arange(depth + 1) < found.count[:, None]) & ~jnp.take_along_axis(known, found.path, 1)
        return found, open_ & ~skip[:, None]

    def correct(carry):
        choice, known, found, open_ = carry
        node = jnp.where(open_, found.path, choice.shape[1])  # what is no part of the path is dropped
        put = jax.vmap(lambda x, n, value: x.at[n].set(value, mode="drop"))
        choice, known = put(choice, node, rule(found.path)), put(known, node, open_)
        return choice, known, *ahead(choice, known)

    known = jnp.zeros_like(guess, bool)
    start = (guess, known, *ahead(guess, known))
    return jax.lax.while_loop(lambda carry: carry[-1].any(), correct, start)[2]
