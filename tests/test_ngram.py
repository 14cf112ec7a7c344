"""Prompt lookup: its trees against a plain search, and decoding with it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st

from jetspec_jax import speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.drafts import ngram
from jetspec_jax.files.load import load_drafter
from jetspec_jax.loop.choice import choose
from jetspec_jax.loop.processors import Past, Sampling
from jetspec_jax.loop.tree import Rule

SLOTS, DRAFT = 24, ngram.NGram(depth=3, nodes=7, longest=3, matches=3)


@functools.partial(jax.jit, static_argnums=0)
def proposed(draft, tokens, length, budget):
    past = Past(tokens, length, length, jnp.full((length.size, 1), -1))
    choice = choose(Sampling(None, jnp.zeros(length.size, jnp.uint32)), past, length < 0, draft.depth, 9)
    return draft.propose({}, None, choice, budget, tiny.NO_ENDS)[0]


def by_hand(draft, row, budget):
    """Paths of the best matches, merged one after the other: (token, parent, depth) of every node."""
    agreed = lambda at: next(
        (n for n in range(draft.longest) if at - n < 0 or row[at - n] != row[len(row) - 1 - n]), draft.longest
    )
    found = sorted(((agreed(at), at) for at in range(len(row) - 1) if agreed(at)), reverse=True)[: draft.matches]
    nodes, where = [(row[-1], -1, 0)], {(): 0}
    for _, at in found:
        line = row[at + 1 : at + 1 + draft.depth]
        for d in range(len(line)):
            if tuple(line[: d + 1]) not in where:
                where[tuple(line[: d + 1])] = len(nodes)
                nodes.append((line[d], where[tuple(line[:d])], d + 1))
    return nodes[: min(budget, draft.nodes)]


@given(st.lists(st.integers(0, 2), min_size=1, max_size=SLOTS), st.integers(1, 7))
def test_equals_a_plain_search(row, budget):
    tokens = jnp.array([row + [7] * (SLOTS - len(row))])  # what lies after the length is never looked at
    tree = jax.device_get(proposed(DRAFT, tokens, jnp.array([len(row)]), jnp.array([budget])))
    size = int(tree.size[0])
    built = list(zip(*(x[0, :size].tolist() for x in (tree.tokens, tree.parents, tree.depths)), strict=True))
    assert built == by_hand(DRAFT, row, budget)
    assert (tree.parents[0, size:] == -1).all() and (tree.depths[0, size:] == 0).all()


@pytest.mark.parametrize("sampling", [SamplingConfig(40), SamplingConfig(40, temperature=1.0, seed=3, top_k=5)])
def test_decoding_equals_plain_decoding(sampling):
    loaded = tiny.hash_target(8, scale=6.0)
    head = load_drafter("ngram", loaded)
    prompts = [[1, 2, 3, 1, 2, 3, 1, 2], [5], [4, 4, 4]]
    for tree in (TreeConfig(8), TreeConfig(3, depth=2)):
        fast = speculate.generate(loaded, head, prompts, tree, sampling)
        plain = speculate.generate(loaded, None, prompts, None, sampling)
        assert [r.token_ids for r in fast] == [r.token_ids for r in plain]


def test_what_repeats_is_accepted():
    """A target that goes round in a circle of four tokens: once seen, whole paths are right."""
    loaded = tiny.hash_target()
    table = np.zeros_like(np.asarray(loaded.params["table"]))
    circle = tiny.dataclasses.replace(
        loaded, model=Circle(loaded.model.vocab_size), params=loaded.params | {"table": table}
    )
    result = speculate.generate(circle, load_drafter("ngram", circle), [1, 2, 3, 4], TreeConfig(8), SamplingConfig(50))
    assert result.token_ids == [(i % 4) + 1 for i in range(50)]
    assert result.accept_lengths[2:-1] and set(result.accept_lengths[2:-1]) == {8}


@tiny.dataclasses.dataclass(frozen=True)
class Circle(tiny.HashTarget):
    """After token t comes t + 1, after 4 comes 1."""

    def forward(self, params, tokens, positions, mask, cache=None, length=None, taps=()):
        out = super().forward(params, tokens, positions, mask, cache, length, taps)
        return out._replace(hidden=jax.nn.one_hot(tokens % 4 + 1, self.vocab_size))


def test_a_tree_of_the_root_alone_is_plain():
    draft = DRAFT.shaped(Rule(1), 1)
    tree = proposed(draft, jnp.array([[1, 2, 1, 2]]), jnp.array([4]), jnp.array([1]))
    assert tree.tokens.tolist() == [[2]] and tree.size.tolist() == [1]


def test_only_families_without_files_are_had_by_name():
    for name in ("jetspec", "dflash", "nothing", ""):
        with pytest.raises(ConfigError, match="no drafter without a head; there are: ngram"):
            load_drafter(name, tiny.hash_target())
