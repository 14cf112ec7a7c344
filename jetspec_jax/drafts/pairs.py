"""Parents of a scorer as the projected token, blind to the slot: a score of pairs from frozen embeddings.

parent(h, e) = e P

As GRAFT (arXiv 2608.20375) has it. It lacks the gate of the product, and so tells what reading the slot is worth.
"""

from __future__ import annotations

import jax
from jaxtyping import Array, Float, Int

from jetspec_jax.config import HeadConfig
from jetspec_jax.layers.numerics import einsum

NAMES = {"parent", "child"}


def shapes(c: HeadConfig, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters as shapes."""
    return {name: jax.ShapeDtypeStruct((c.hidden_size, c.scorer_rank), dtype) for name in sorted(NAMES)}


def rows(
    params: dict, hidden: Float[Array, "*slots E"], token: Int[Array, "*rows"], embedded: Float[Array, "*rows E"]
) -> Float[Array, "*rows R"]:
    """Returns the rows of parents, the same for every slot."""
    return einsum("...e,er->...r", embedded, params["parent"])
