"""What a node's token makes of its children: a bias between tokens, beside a block head.

A block gives one row of logits a depth, the same for all nodes of the depth above. The scorer adds to each pair of a
parent and a child what the two say of each other. Where it is trained, that is a product of a row of each:

    bias(a, b) = sum over r of parent(norm(h), norm(E[a]))[r] (norm(E[b]) C)[r]

h is the hidden state of the child's slot, E are embeddings of the target. Three kinds of parents: a gated product
(`product.py`), a SwiGLU of slot and parent (`swiglu.py`), and the token alone (`pairs.py`). `bigram.py` takes both rows
from tables by token instead, and `counts.py` has a bias that is counted. The bias is for the candidates of a depth
alone, and `tree.conditioned` makes distributions of the rows again. The root adds nothing: the block knows the anchor.
The children of a new scorer that is to be trained are zero, so that it changes no tree.
"""

from __future__ import annotations

import types
from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jetspec_jax.config import HeadConfig
from jetspec_jax.drafts import bigram, counts, pairs, product, swiglu
from jetspec_jax.layers.numerics import einsum

EPS = 1e-6
KINDS: dict[str, types.ModuleType] = {
    "product": product, "swiglu": swiglu, "pairs": pairs, "markov": bigram, "counts": counts,
}  # fmt: skip
ZEROS = {"gate", "child", "w2"}  # parameters that are zero in a new scorer


def kind(params: Mapping) -> str:
    """Returns the kind that has these parameters."""
    return next(name for name, module in KINDS.items() if params.keys() == module.NAMES)


def shapes(config: HeadConfig, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters of the scorer beside a head as shapes."""
    return KINDS[config.scorer].shapes(config, dtype)


def parents(
    params: dict, hidden: Float[Array, "*slots E"], token: Int[Array, "*rows"], embedded: Float[Array, "*rows E"]
) -> Float[Array, "*rows R"]:
    """Returns the rows of parents out of tokens and their `normed` embeddings, each for its slot.

    The rows of slots are broadcast.
    """
    return KINDS[kind(params)].rows(params, normed(hidden), token, embedded)


def children(params: dict, token: Int[Array, "*rows"], embedded: Float[Array, "*rows E"]) -> Float[Array, "*rows R"]:
    """Returns the rows of children out of tokens and their `normed` embeddings."""
    if kind(params) == "markov":
        return bigram.children(params, token)
    return einsum("...e,er->...r", embedded, params["child"])


def bias(
    params: dict, hidden: Float[Array, "B D E"], token: Int[Array, "B D W"], embedded: Float[Array, "B D W E"]
) -> Float[Array, "B D W W"]:
    """Returns what each candidate of the depth above adds to the logits of each candidate of a depth (f32).

    Args:
      params: of the scorer.
      hidden: of the slots.
      token: candidates of all depths.
      embedded: their embeddings.
    """
    if kind(params) == "counts":
        added = counts.bias(params, token)
    else:
        embedded = normed(embedded)
        slots = hidden[:, 1:, None]  # a slot's own part once for all candidates
        above = parents(params, slots, token[:, :-1], embedded[:, :-1])
        below = children(params, token[:, 1:], embedded[:, 1:])
        added = einsum("bdpr,bdwr->bdpw", above, below, jnp.float32)
    return jnp.pad(added, ((0, 0), (1, 0), (0, 0), (0, 0)))


def normed(embedded: Float[Array, "*rows E"]) -> Float[Array, "*rows E"]:
    """Returns rows of one length; that of an embedding tells how frequent a token is, which is none of a pair's."""
    wide = embedded.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPS)).astype(embedded.dtype)
