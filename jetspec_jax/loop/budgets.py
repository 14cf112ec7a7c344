"""How many drafted tokens are worth their verification: rules over how probable they are and what a round costs.

A round of n drafted tokens commits E(n) tokens in expectation, one for each row (the target's own) and each drafted one
with the probability that all of its path is accepted. It takes c(n) seconds, which are measured: they are flat where
weights bound a round, and steps where a kernel's tile is full. All rules add the most probable token that is left while
the tokens per second rise, and stop at the first that does not pay, though a later one might. That costs little, and
what is verified then never depends on what was drafted after it; our outputs would be the same either way.

These are functions for whoever schedules rounds. The loop's own shapes are static: a shorter chain or a smaller tree
inside the same program saves nothing, so a caller has a program for each size that it wants to pay for. `pacing` has
them, and uses the rules of trees. `chain_lengths` is for rounds that pack all rows' tokens together; ours cost what the
longest chain costs. For one row it equals `tree_size`.
"""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def chain_lengths(
    survival: Float[Array, "B D"], seconds: Float[Array, " n"], running: Bool[Array, " B"] | None = None
) -> Int[Array, " B"]:
    """Returns how many tokens of each row's chain to verify: DSpark's scheduler (arXiv 2607.05147).

    The tokens of all rows are admitted together, most probable first, so that one that trusts its chain gets what
    another has no use for. Of one row it is that row's own length. Of equals, the first row's come first.

    Args:
      survival: the probability that a chain is accepted up to each token, falling along a row.
      seconds: of a round with 0, 1, ..., B * D drafted tokens in all rows together.
      running: rows that have not ended; None is all. The others get nothing.
    """
    rows, depth = survival.shape
    if seconds.shape[0] != rows * depth + 1:
        raise ValueError(f"seconds: {seconds.shape[0]} costs for 0..{rows * depth} drafted tokens; give one each")
    running = jnp.ones(rows, bool) if running is None else running
    flat = jnp.where(running[:, None], survival, 0.0).reshape(-1)
    order = jnp.argsort(-flat, stable=True)
    admitted = jnp.arange(flat.size) < _rising(flat[order], running.sum(), seconds)
    return jnp.zeros(flat.size, jnp.int32).at[order].set(admitted.astype(jnp.int32)).reshape(rows, depth).sum(1)


def tree_size(probability: Float[Array, " n"], draft: Float[Array, ""], verify: Float[Array, " m"]) -> Int[Array, ""]:
    """Returns how many drafted nodes of a row's tree to verify: CaDDTree's rule (arXiv 2606.01813).

    The best node is added while (1 + sum of p) / (draft + verify) rises.

    Args:
      probability: of the paths to the nodes, best first, as `best_first` trees have them.
      draft: seconds of drafting, whatever the size.
      verify: seconds of verifying the root with 0, 1, ..., n drafted nodes.
    """
    return _rising(probability, jnp.int32(1), draft + verify)


def grid_size(
    probability: Float[Array, " n"], rows: Int[Array, ""], sizes: tuple[int, ...], seconds: Float[Array, " m"]
) -> Int[Array, ""]:
    """Returns one of `sizes`, drafted nodes of all rows together: CAST's rule (arXiv 2610.00321).

    The next size is taken while what its nodes add is at least E / c of this one times what its round costs more.

    Args:
      probability: of the paths to the nodes of all rows, best first.
      rows: that have not ended; each commits a token anyway.
      sizes: ascending, at most `n`; a size is a program.
      seconds: of a round of each size.
    """
    if list(sizes) != sorted(set(sizes)) or not 0 <= sizes[0] <= sizes[-1] <= probability.shape[0]:
        raise ValueError(f"sizes={sizes}: give ascending numbers of nodes in 0..{probability.shape[0]}")
    if seconds.shape[0] != len(sizes):
        raise ValueError(f"seconds: {seconds.shape[0]} costs for {len(sizes)} sizes; give one each")
    expected = _expected(probability, rows)[jnp.array(sizes)]
    gain, price = jnp.diff(expected), jnp.diff(seconds)
    pays = gain * seconds[:-1] >= expected[:-1] * price
    return jnp.array(sizes)[jnp.cumprod(pays.astype(jnp.int32)).sum()]


def _expected(probability: Float[Array, " n"], rows: Int[Array, ""]) -> Float[Array, " m"]:
    """Returns the tokens that a round with 0, 1, ..., n drafted ones commits in expectation."""
    return rows + jnp.concatenate([jnp.zeros(1), jnp.cumsum(probability)])


def _rising(probability: Float[Array, " n"], rows: Int[Array, ""], seconds: Float[Array, " m"]) -> Int[Array, ""]:
    """Returns how many tokens are added before the tokens per second no longer rise."""
    expected = _expected(probability, rows)
    rises = expected[1:] * seconds[:-1] > expected[:-1] * seconds[1:]
    return jnp.cumprod(rises.astype(jnp.int32)).sum()
