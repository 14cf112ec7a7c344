"""What a node's token makes of its children: a bias between tokens, beside a block head.

A block gives one row of logits a depth, the same for all nodes of the depth above. The scorer adds to each pair of a
parent and a child what the two say of each other, given the hidden state h of the child's slot:

    bias(a, b) = sum over r of parent(norm(h), norm(E[a]))[r] (norm(E[b]) C)[r]

E are embeddings of the target. Two kinds of parents: a gated product (`product.py`), and a SwiGLU of slot and parent
(`swiglu.py`). The bias is for the candidates of a depth alone, and `tree.conditioned` makes distributions of the rows
again. The root adds nothing: the block knows the anchor. C begins at zero, so that a new scorer changes no tree.
"""

from __future__ import annotations

import types

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jetspec_jax.drafts import product, swiglu
from jetspec_jax.layers.numerics import einsum

EPS = 1e-6


def kind(inner: int) -> types.ModuleType:
    """Returns the module of the parents' rows; inner: width of their SwiGLU, 0: they are a product."""
    return swiglu if inner else product


def shapes(width: int, rank: int, inner: int, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters of a scorer as shapes.

    Args:
      width: hidden size E.
      rank: R.
      inner: width of the parents' SwiGLU; 0: they are a product.
      dtype: of the parameters.
    """
    sizes = kind(inner).sizes(width, rank, inner) | {"child": (width, rank)}
    return {name: jax.ShapeDtypeStruct(size, dtype) for name, size in sizes.items()}


def parents(
    params: dict, hidden: Float[Array, "*slots E"], embedded: Float[Array, "*rows E"]
) -> Float[Array, "*rows R"]:
    """Returns the rows of parents out of `normed` embeddings, each for its slot; the rows of slots are broadcast."""
    return kind("down" in params).rows(params, normed(hidden), embedded)


def children(params: dict, embedded: Float[Array, "*rows E"]) -> Float[Array, "*rows R"]:
    """Returns the rows of children out of `normed` embeddings."""
    return einsum("...e,er->...r", embedded, params["child"])


def bias(params: dict, hidden: Float[Array, "B D E"], embedded: Float[Array, "B D W E"]) -> Float[Array, "B D W W"]:
    """Returns what each candidate of the depth above adds to the logits of each candidate of a depth (f32).

    Args:
      params: of the scorer.
      hidden: of the slots.
      embedded: embeddings of the candidates of all depths.
    """
    embedded = normed(embedded)
    above = parents(params, hidden[:, 1:, None], embedded[:, :-1])  # a slot's own part once for all candidates
    added = einsum("bdpr,bdwr->bdpw", above, children(params, embedded[:, 1:]), jnp.float32)
    return jnp.pad(added, ((0, 0), (1, 0), (0, 0), (0, 0)))


def normed(embedded: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
    """Returns rows of one length; that of an embedding tells how frequent a token is, which is none of a pair's."""
    wide = embedded.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS)).astype(embedded.dtype)
