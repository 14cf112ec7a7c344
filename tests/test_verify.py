"""Acceptance against a walk from the root."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec_jax.layers import masks
from jetspec_jax.loop import tree, verify

DEPTH, ROWS = 4, 10
R, A, B, C, D, E, F, Z = 77, 1, 2, 3, 4, 5, 6, 9
WORKED = [(R, -1, 0), (A, 0, 1), (B, 0, 1), (C, 1, 2), (D, 1, 2), (E, 3, 3), (F, 3, 3), (C, 2, 2)]  # method 5.2


def as_tree(rows: list[list[oracles.Node]], width: int = ROWS) -> tree.Tree:
    padded = np.array([[*r, *[(0, -1, 0)] * (width - len(r))] for r in rows], np.int32)
    return tree.Tree(*(jnp.asarray(padded[:, :, i]) for i in range(3)), jnp.array([len(r) for r in rows], jnp.int32))


@jax.jit
def accept(built, choice):
    return verify.accept(built, masks.ancestors(built.parents, DEPTH), choice, DEPTH)


def check(rows, choices) -> None:
    got = accept(as_tree(rows), jnp.asarray(choices, jnp.int32))
    for i, row in enumerate(rows):
        path, tokens = oracles.walk(row, choices[i])
        count = int(got.count[i])
        assert (got.path[i, :count].tolist(), got.tokens[i, :count].tolist()) == (path, tokens)
    assert ((got.path >= 0) & (got.path < ROWS)).all()  # entries after the count are gathered too


def test_worked_example():
    """Method 6.2: a at the root, d at node 1, z at node 4 gives path 0 1 4 and commits a d z."""
    choice = [A, D, 0, 0, Z, 0, 0, 0, 0, 0]
    got = accept(as_tree([WORKED]), jnp.array([choice]))
    assert got.count.tolist() == [3]
    assert got.path[0, :3].tolist() == [0, 1, 4] and got.tokens[0, :3].tolist() == [A, D, Z]


def test_a_likely_draft_is_rejected_for_a_likelier_token():
    """FC-03: target A .30 and B .50, the draft proposes A; greedy emits B."""
    logits = jnp.log(jnp.array([[0.2, 0.3, 0.5], [0.3, 0.3, 0.4]]))
    got = accept(as_tree([[(0, -1, 0), (A, 0, 1)]], 2), jnp.argmax(logits, -1)[None].astype(jnp.int32))
    assert got.count.tolist() == [1] and got.tokens[0, 0] == B


@pytest.mark.parametrize("leaf", range(8))
def test_every_node_can_be_the_end(leaf):
    """The target walks to each node in turn and leaves the tree there."""
    choice, node = [Z] * ROWS, leaf
    while node:
        token, parent, _ = WORKED[node]
        choice[parent], node = token, parent
    check([WORKED], [choice])
    assert int(accept(as_tree([WORKED]), jnp.array([choice])).count[0]) == WORKED[leaf][2] + 1


def test_agreement_below_a_disagreement_counts_nothing():
    """The target wants b, and everything under a would agree."""
    choice = [B, C, Z, E, Z, Z, Z, Z, Z, Z]
    got = accept(as_tree([WORKED]), jnp.array([choice]))
    assert got.count.tolist() == [2] and got.tokens[0, :2].tolist() == [B, Z]


def test_padding_is_never_accepted():
    """Padding carries token 0 and the root's depth; the target choosing 0 must not enter it."""
    got = accept(as_tree([[(5, -1, 0)]]), jnp.zeros((1, ROWS), jnp.int32))
    assert got.count.tolist() == [1] and got.path[0, 0] == 0 and got.tokens[0, 0] == 0


@st.composite
def trees(draw):
    """Any tree without equal siblings, of at most DEPTH levels, over three tokens."""
    rows = [(draw(st.integers(0, 2)), -1, 0)]
    for _ in range(draw(st.integers(0, ROWS - 1))):
        parent = draw(st.integers(0, len(rows) - 1))
        free = {0, 1, 2} - {t for t, p, _ in rows if p == parent}
        if free and rows[parent][2] < DEPTH:
            rows.append((draw(st.sampled_from(sorted(free))), parent, rows[parent][2] + 1))
    return rows


@given(rows=st.lists(trees(), min_size=3, max_size=3), data=st.data())
def test_equals_the_walk(rows, data):
    choices = [data.draw(st.lists(st.integers(0, 2), min_size=ROWS, max_size=ROWS)) for _ in rows]
    check(rows, choices)
