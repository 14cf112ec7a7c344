"""Parents of a scorer as a product: the projected token, gated by the slot.

parent(h, e) = (1 + h G) (e P)
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Float

from jetspec_jax.layers.numerics import einsum


def sizes(width: int, rank: int, inner: int) -> dict[str, tuple[int, int]]:
    """Returns the parameters' sizes; inner: of no use here."""
    return {"parent": (width, rank), "gate": (width, rank)}


def rows(params: dict, hidden: Float[Array, "*slots E"], embedded: Float[Array, "*rows E"]) -> Float[Array, "*rows R"]:
    """Returns the rows of parents, each for its slot; the rows of slots are broadcast."""
    gate = 1 + einsum("...e,er->...r", hidden, params["gate"], jnp.float32)
    row = einsum("...e,er->...r", embedded, params["parent"], jnp.float32)
    return (gate * row).astype(hidden.dtype)
