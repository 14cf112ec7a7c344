"""A scorer that is counted and not trained: which tokens follow a token more often than they come at all.

    bias(a, b) = strength * lift(a, b)        lift(a, b) = log((n(a, b) + 1) / (n(a) n(b) / N + 1))

n are counts among N pairs of tokens that follow each other, so that the fraction is P(b | a) / P(b), with one pair more
above and below: what was seen once says little. For each token the most lifted ones are kept, if the lift is above 0;
every other pair adds nothing. Lifts are whole numbers in steps of 1 / 256, which no training touches.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jetspec_jax.config import HeadConfig

NAMES = {"next", "lift", "strength"}
STEPS = 256  # of a lift of 1


def shapes(c: HeadConfig, dtype) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the parameters as shapes, whatever the head's dtype; the rank is how many tokens are kept for each."""
    pairs = (c.vocab_size, c.scorer_rank)
    return {
        "next": jax.ShapeDtypeStruct(pairs, jnp.int32),
        "lift": jax.ShapeDtypeStruct(pairs, jnp.int16),
        "strength": jax.ShapeDtypeStruct((c.depth,), jnp.float32),
    }


def bias(params: dict, token: Int[Array, "B D W"]) -> Float[Array, "B D-1 W W"]:
    """Returns what each candidate of the depth above adds to the logits of each candidate, from the second depth on."""
    above, below = token[:, :-1], token[:, 1:]
    same = params["next"][above][:, :, :, None] == below[:, :, None, :, None]  # [B, D - 1, W, W, kept]
    lift = params["lift"][above].astype(jnp.float32)[:, :, :, None] / STEPS
    strength = params["strength"][1 : token.shape[1]]
    return strength[:, None, None] * jnp.where(same, lift, 0).sum(-1)


def count(above: np.ndarray, below: np.ndarray, c: HeadConfig, strength: float) -> dict[str, np.ndarray]:
    """Returns the parameters of a scorer.

    Args:
      above: [N] the first tokens of pairs.
      below: [N] the tokens after them.
      c: of the head that it is for.
      strength: the same for every depth.
    """
    keys, together = np.unique(above.astype(np.int64) * c.vocab_size + below, return_counts=True)
    first, second = np.divmod(keys, c.vocab_size)
    alone = [np.bincount(x, minlength=c.vocab_size).astype(np.float64) for x in (above, below)]
    expected = alone[0][first] * alone[1][second] / max(above.size, 1)
    lift = np.rint(STEPS * np.log((together + 1) / (expected + 1))).astype(np.int64)
    order = np.lexsort((second, -lift, first))  # the lower token before its equals
    first, second, lift = first[order], second[order], lift[order]
    place = np.arange(first.size) - np.searchsorted(first, first)
    kept = (place < c.scorer_rank) & (lift > 0)
    found = {name: np.zeros(x.shape, x.dtype) for name, x in shapes(c, None).items()}
    found["next"][first[kept], place[kept]] = second[kept]  # what is left points at token 0 and lifts it by nothing
    found["lift"][first[kept], place[kept]] = lift[kept]
    found["strength"][:] = strength
    return found
