"""A scorer of two tables by token, as the Markov head of DSpark (arXiv 2607.05147) has them, blind to the slot.

    bias(a, b) = < W1[a], W2[b] >

It is applied to each parent of a tree, as PCTree (arXiv 2608.02123) does, beside a block that was trained without it.
No embedding is read, so tokens that rows seldom have learn little from their likes.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jetspec_jax.config import HeadConfig

NAMES = {"w1", "w2"}


def shapes(c: HeadConfig, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters as shapes."""
    return {name: jax.ShapeDtypeStruct((c.vocab_size, c.scorer_rank), dtype) for name in sorted(NAMES)}


def rows(
    params: dict, hidden: Float[Array, "*slots E"], token: Int[Array, "*rows"], embedded: Float[Array, "*rows E"]
) -> Float[Array, "*rows R"]:
    """Returns the rows of parents, the same for every slot."""
    return _taken(params["w1"], token)


def children(params: dict, token: Int[Array, "*rows"]) -> Float[Array, "*rows R"]:
    """Returns the rows of children."""
    return _taken(params["w2"], token)


def _taken(table: Float[Array, "V R"], token: Int[Array, "*rows"]) -> Float[Array, "*rows R"]:
    """Takes rows through f32: the gradient of a row is a sum over all places that hold its token."""
    return jnp.take(table.astype(jnp.float32), token, axis=0).astype(table.dtype)
