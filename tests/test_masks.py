"""Visibility masks of the decode core."""

import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec_jax.layers import masks


def test_worked_example():
    """Method 3.3: nodes R a b c c', where c stands under a and c' under b."""
    mask = masks.ancestors(jnp.array([[-1, 0, 0, 1, 2]]), 3)[0]
    rows = ["10000", "11000", "10100", "11010", "10101"]
    assert mask.tolist() == [[c == "1" for c in row] for row in rows]


@st.composite
def forests(draw, rows=10):
    """Parents of a tree of any size with padding after it."""
    size = draw(st.integers(1, rows))
    parents = [-1] + [draw(st.integers(0, i - 1)) for i in range(1, size)]
    return parents + [-1] * (rows - size)


def depth_of(parents, node) -> int:
    return 0 if parents[node] < 0 else 1 + depth_of(parents, parents[node])


@given(parents=st.lists(forests(), min_size=2, max_size=2))
def test_ancestors_equal_walking_up(parents):
    mask = masks.ancestors(jnp.array(parents), 9)  # 9 is as deep as ten nodes can be
    for got, row in zip(mask, parents, strict=True):
        assert (got == oracles.ancestors(row)).all()


@pytest.mark.parametrize("depth", [0, 1, 3])
def test_depth_bounds_the_walk(depth):
    """`depth` ancestors are marked, which is all when no path is deeper."""
    parents = [-1, 0, 1, 2, 3]
    mask = np.asarray(masks.ancestors(jnp.array([parents]), depth)[0])
    for i in range(5):
        assert mask[i].nonzero()[0].tolist() == list(range(max(0, i - depth), i + 1))


@pytest.mark.parametrize("depth", range(10))
def test_a_chain_as_deep_as_was_said(depth):
    parents = [*range(-1, depth), *[-1] * (9 - depth)]
    assert (masks.ancestors(jnp.array([parents]), depth)[0] == oracles.ancestors(parents)).all()


def test_no_row_is_empty_and_nobody_sees_padding():
    mask = masks.ancestors(jnp.array([[-1, 0, -1, -1]]), 2)[0]
    assert mask.any(1).all()
    assert not mask[:2, 2:].any()


def test_causal():
    assert (masks.causal(5)[0] == np.tril(np.ones((5, 5), bool))).all()
    assert masks.causal(1).tolist() == [[[True]]]
