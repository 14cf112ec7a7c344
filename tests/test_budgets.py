"""The rules of how much to verify against plain Python in fractions; numbers are such that float32 is exact too."""

import functools
from fractions import Fraction

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec_jax.loop import budgets

# Sixty-fourths and small whole costs: no product or sum of these is rounded.
PART = st.integers(0, 64).map(lambda n: Fraction(n, 64))
COST = st.integers(1, 60)
floats = lambda values: jnp.array([float(x) for x in values], jnp.float32)
chain_lengths, tree_size = jax.jit(budgets.chain_lengths), jax.jit(budgets.tree_size)
grid_size = functools.partial(jax.jit, static_argnums=2)(budgets.grid_size)


@given(st.data())
def test_chains_are_those_of_the_scheduler_written_out(data):
    rows, depth = 3, 4
    chains = [sorted(data.draw(st.lists(PART, min_size=depth, max_size=depth)), reverse=True) for _ in range(rows)]
    costs = data.draw(st.lists(COST, min_size=rows * depth + 1, max_size=rows * depth + 1))
    if data.draw(st.booleans()):
        costs = sorted(costs)
    running = data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows))
    lengths, total, count = [0] * rows, Fraction(sum(running)), 0
    alive = [row if on else [Fraction(0)] * depth for row, on in zip(chains, running, strict=True)]
    while count < rows * depth:
        best = max((r for r in range(rows) if lengths[r] < depth), key=lambda r: (alive[r][lengths[r]], -r))
        more = total + alive[best][lengths[best]]
        if not more / costs[count + 1] > total / costs[count]:
            break
        total, count = more, count + 1
        lengths[best] += 1
    found = chain_lengths(jnp.stack([floats(row) for row in chains]), floats(costs), jnp.array(running))
    assert found.tolist() == lengths


def test_a_chain_alone():
    """Flat costs buy the whole block, and a tile's edge ends it where the rest is not worth the next tile."""
    sure = floats([0.9, 0.8, 0.7, 0.1])[None]
    assert chain_lengths(sure, jnp.ones(5)).tolist() == [4]
    assert chain_lengths(sure, floats([1, 1, 1, 2, 2])).tolist() == [2]
    assert chain_lengths(sure, floats([1, 2, 1, 1, 1])).tolist() == [0]  # nothing is looked at after the first drop
    with pytest.raises(ValueError, match=r"4 costs for 0\.\.4"):
        budgets.chain_lengths(sure, jnp.ones(4))


@given(st.lists(PART, min_size=9, max_size=9), COST, st.lists(COST, min_size=10, max_size=10))
def test_tree_sizes_are_those_of_caddtree_written_out(paths, draft, verify):
    paths = sorted(paths, reverse=True)
    n, kept = 0, Fraction(0)
    while n < 9 and (1 + kept + paths[n]) / (draft + verify[n + 1]) > (1 + kept) / (draft + verify[n]):
        n, kept = n + 1, kept + paths[n]
    assert int(tree_size(floats(paths), jnp.float32(draft), floats(verify))) == n


@given(st.lists(PART, min_size=6, max_size=6), st.lists(COST, min_size=7, max_size=7))
def test_of_one_row_the_scheduler_of_chains_is_the_rule_of_trees(chain, costs):
    """So that `--budget_rule caddtree` is DSpark's for a chain alone."""
    survival = floats(sorted(chain, reverse=True))
    assert chain_lengths(survival[None], floats(costs)).tolist() == [tree_size(survival, jnp.float32(0), floats(costs))]


GRID = (0, 1, 3, 7, 12)


@given(st.lists(PART, min_size=12, max_size=12), st.integers(1, 8), st.lists(COST, min_size=5, max_size=5))
def test_grid_sizes_are_those_of_cast_written_out(paths, rows, costs):
    paths = sorted(paths, reverse=True)
    expected = [rows + sum(paths[:n]) for n in GRID]
    i = 0
    while i + 1 < len(GRID):
        marginal = expected[i + 1] - expected[i]
        if marginal < Fraction(expected[i]) / costs[i] * (costs[i + 1] - costs[i]):
            break
        i += 1
    assert int(grid_size(floats(paths), jnp.int32(rows), GRID, floats(costs))) == GRID[i]


def test_wrong_grids_are_refused():
    for sizes, said in (((3, 1), "ascending"), ((0, 13), r"0\.\.12"), ((0, 1), "3 costs for 2 sizes")):
        with pytest.raises(ValueError, match=said):
            budgets.grid_size(jnp.zeros(12), jnp.int32(1), sizes, jnp.ones(3))
