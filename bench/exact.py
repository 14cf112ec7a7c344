"""How far a result is from its reference, and how far rounding may take it."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

# Of the largest number. A step of bfloat16 is up to 2^-7 = 8e-3 of a number, and sides that round in other places end
# one step apart, seldom two; a wrong tile or mask shows as 1e-1 and more. float32 sums in another order differ by 1e-7
# times the root of their length, an exponential by a few 1e-6.
BOUNDS = {"bfloat16": 2e-2, "float32": 1e-4}


def error(got, reference) -> float:
    """Largest difference over the largest number of the reference, the worst of the arrays; NaN counts as infinite."""
    wide = lambda x: x.astype(jnp.float32)
    far = [
        float(jnp.abs(wide(g) - wide(r)).max() / jnp.abs(wide(r)).max())
        for g, r in zip(jax.tree.leaves(got), jax.tree.leaves(reference), strict=True)
    ]
    return max(math.inf if math.isnan(x) else x for x in far)
