"""Parents of a scorer as a product: the projected token, gated by the slot.

parent(h, e) = (1 + h G) (e P)
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jetspec_jax.config import HeadConfig
from jetspec_jax.layers.numerics import einsum

NAMES = {"parent", "gate", "child"}


def shapes(c: HeadConfig, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters as shapes."""
    return {name: jax.ShapeDtypeStruct((c.hidden_size, c.scorer_rank), dtype) for name in sorted(NAMES)}


def rows(
    params: dict, hidden: Float[Array, "*slots E"], token: Int[Array, "*rows"], embedded: Float[Array, "*rows E"]
) -> Float[Array, "*rows R"]:
    """Returns the rows of parents, each for its slot; the rows of slots are broadcast."""
    gate = 1 + einsum("...e,er->...r", hidden, params["gate"], jnp.float32)
    row = einsum("...e,er->...r", embedded, params["parent"], jnp.float32)
    return (gate * row).astype(hidden.dtype)
