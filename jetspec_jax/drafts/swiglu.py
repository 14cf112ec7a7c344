"""Parents of a scorer as a SwiGLU of slot and token, as TreeFlash (arXiv 2606.03819) has it, with small products.

    parent(h, e) = (silu(h A + e B) * (h C + e D)) O

The products of the slot are made once for all its parents. O leads to the rank of the children, so that candidates
meet in a small product, and no parent meets the vocabulary.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jetspec_jax.config import HeadConfig
from jetspec_jax.layers.numerics import einsum

NAMES = {"slot", "parent", "down", "child"}


def shapes(c: HeadConfig, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters as shapes."""
    width, inner, rank = c.hidden_size, c.scorer_width, c.scorer_rank
    both = (width, 2 * inner)  # the two factors side by side
    sizes = {"slot": both, "parent": both, "down": (inner, rank), "child": (width, rank)}
    return {name: jax.ShapeDtypeStruct(size, dtype) for name, size in sizes.items()}


def rows(
    params: dict, hidden: Float[Array, "*slots E"], token: Int[Array, "*rows"], embedded: Float[Array, "*rows E"]
) -> Float[Array, "*rows R"]:
    """Returns the rows of parents, each for its slot; the rows of slots are broadcast."""
    slot = einsum("...e,ei->...i", hidden, params["slot"], jnp.float32)
    above = einsum("...e,ei->...i", embedded, params["parent"], jnp.float32)
    gate, up = jnp.split(slot + above, 2, axis=-1)
    inner = (jax.nn.silu(gate) * up).astype(hidden.dtype)
    return einsum("...i,ir->...r", inner, params["down"])
