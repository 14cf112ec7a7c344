"""Visibility masks, True where a query may look at a key."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def causal(length: int) -> Bool[Array, "1 T T"]:
    """Returns [1, T, T], in which row i sees rows 0..i."""
    return jnp.tril(jnp.ones((1, length, length), bool))


def ancestors(parents: Int[Array, "B T"], depth: int) -> Bool[Array, "B T T"]:
    """Returns [B, T, T], in which node i sees itself and its ancestors, of which no node has more than `depth`.

    Parents come before children and the root's parent is -1. Every row has its own column, also padding rows, so that
    no softmax row is empty.
    """
    nodes = jnp.arange(parents.shape[1])
    up = jnp.where(parents < 0, nodes, parents)  # the root's parent is itself
    mask = (nodes[:, None] == nodes) | (up[:, :, None] == nodes)
    reach = 1
    while reach < depth:  # a node sees `reach` levels; the node reach + 1 levels up sees as many again
        up = jnp.take_along_axis(up, up, 1)
        mask = mask | jnp.take_along_axis(mask, up[:, :, None], 1)
        reach = 2 * reach + 1
    return mask if depth else jnp.broadcast_to(nodes[:, None] == nodes, mask.shape)
