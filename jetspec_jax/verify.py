"""Acceptance: the longest path of the tree on which the target agrees, found without following pointers."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jetspec_jax.tree import Tree


class Accepted(NamedTuple):
    """The agreed path and the tokens it commits; entries at `count` and behind have no meaning."""

    path: jax.Array  # [B, D + 1] node indices, root first
    tokens: jax.Array  # [B, D + 1] the target's choice at each node of the path: the drafts it confirms, then the bonus
    count: jax.Array  # type: ignore[assignment]  # [B] nodes on the path = tokens committed (accepted drafts + 1)


def accept(tree: Tree, ancestors: Bool[Array, "B T T"], choice: Int[Array, "B T"], depth: int) -> Accepted:
    """Longest match: a node is agreed when it and all its ancestors equal the target's choice at their parents."""
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
