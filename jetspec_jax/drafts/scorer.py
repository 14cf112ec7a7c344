"""What a node's token makes of its children: a bias of low rank between tokens, beside a frozen block head.

A block gives one row of logits a depth, the same for all nodes of the depth above. The scorer adds to each pair of a
parent and a child what the two say of each other, gated by the hidden state of the child's slot:

    bias(a, b) = sum over r of (norm(E[a]) P)[r] (1 + h G)[r] (norm(E[b]) C)[r]

E are embeddings of the target. It is for the candidates of a depth alone, and `tree.conditioned` makes distributions of
the rows again. The root adds nothing: the block knows the anchor. C begins at zero, so that a new scorer changes no
tree.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jetspec_jax.layers.numerics import einsum

EPS = 1e-6


def shapes(width: int, rank: int, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters of a scorer as shapes.

    Args:
      width: hidden size E.
      rank: R.
      dtype: of the parameters.
    """
    return {name: jax.ShapeDtypeStruct((width, rank), dtype) for name in ("parent", "gate", "child")}


def parents(
    params: dict, hidden: Float[Array, "*slots E"], embedded: Float[Array, "*rows E"]
) -> Float[Array, "*rows R"]:
    """Returns the rows of parents out of `normed` embeddings, each for its slot; the rows of slots are broadcast."""
    gate = 1 + einsum("...e,er->...r", hidden, params["gate"], jnp.float32)
    row = einsum("...e,er->...r", embedded, params["parent"], jnp.float32)
    return (gate * row).astype(hidden.dtype)


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
    above = parents(params, hidden[:, 1:, None], embedded[:, :-1])  # a slot's gate once for all candidates
    added = einsum("bdpr,bdwr->bdpw", above, children(params, embedded[:, 1:]), jnp.float32)
    return jnp.pad(added, ((0, 0), (1, 0), (0, 0), (0, 0)))


def normed(embedded: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
    """Returns embeddings of one length; theirs tells how frequent a token is, which is none of a pair's business."""
    wide = embedded.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS)).astype(embedded.dtype)
