"""Visibility masks, True where a query may look at a key."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Int


def causal(length: int) -> Bool[Array, "1 T T"]:
    """[1, T, T]: row i sees rows 0..i."""
    return jnp.tril(jnp.ones((1, length, length), bool))


def ancestors(parents: Int[Array, "B T"], depth: int) -> Bool[Array, "B T T"]:
    """[B, T, T]: node i sees itself and its ancestors, up to `depth` of them.

    Parents come before children and the root's parent is -1. Every row has its own column, also padding rows, so that
    no softmax row is empty.
    """
    nodes = jnp.arange(parents.shape[1])
    mask = jnp.broadcast_to(nodes[:, None] == nodes, (parents.shape[0], nodes.size, nodes.size))
    up = jnp.broadcast_to(nodes, parents.shape)
    for _ in range(depth):
        up = jnp.where(up < 0, -1, jnp.take_along_axis(parents, jnp.maximum(up, 0), 1))
        mask = mask | (up[:, :, None] == nodes)
    return mask
