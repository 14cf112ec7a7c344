"""The scorer beside a block head: its rows against a recomputation, a new one that changes nothing, and decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny

from jetspec_jax import speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.drafts import scorer
from jetspec_jax.loop.choice import NOISE_SHARE, choose, noise_rows
from jetspec_jax.loop.contracts import Ends
from jetspec_jax.loop.processors import Past, Sampling
from jetspec_jax.loop.tree import Rule

RANK, INNER = 6, 5
EMBED = jnp.asarray(np.random.default_rng(9).standard_normal((tiny.VOCAB, 16)), jnp.float32)
FEATURES = jnp.asarray(np.random.default_rng(8).standard_normal((2, 9, 32)), jnp.float32)
TOKENS = jnp.asarray(np.random.default_rng(7).integers(0, tiny.VOCAB - 1, (2, 24)), jnp.int32)
ENDS = Ends(lambda tokens: EMBED[tokens], lambda hidden: 0.3 * hidden @ EMBED.T)


@functools.lru_cache(None)
def scored(causal: bool = True, child: float = 1.0, inner: int = 0):
    """A tiny head with a scorer; child: how much its children's matrix says, 0 of a new one."""
    head = tiny.head(causal)
    params = tiny.random_like(scorer.shapes(16, RANK, inner, jnp.float32), 3)
    params["child"] = child * params["child"]
    draft = dataclasses.replace(
        head.draft, config=dataclasses.replace(head.config, scorer_rank=RANK, scorer_width=inner)
    )
    return dataclasses.replace(head, draft=draft, params=head.params | {"scorer": params})


@functools.partial(jax.jit, static_argnums=0)
def propose(draft, params, temperature=None):
    """Trees after contexts of 9 and 4 rows, with the hidden states that they are made of."""
    count = jnp.array([9, 4])
    length = count + 1
    state = draft.extend(params, draft.init(params, 2, 24), tiny.seen(FEATURES, count), tiny.NO_ENDS)
    past = Past(TOKENS, length, length, jnp.full((2, 1), -1))
    choice = choose(Sampling(temperature, jnp.arange(2, dtype=jnp.uint32)), past, length < 0, draft.depth, tiny.VOCAB)
    tree, _ = draft.propose(params, state, choice, jnp.array([12, 12]), ENDS)
    return tree, draft.hidden(params, state, choice.anchor, length, ENDS)[0]


def table(params, hidden, logits, width: int, scale: float = 1.0, noise=0.0):
    """Log-probabilities [D, W, W] of a row's candidates after each candidate above, in f64, and their tokens."""
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}
    hidden = np.asarray(hidden, np.float64)
    logits = scale * (np.asarray(logits, np.float64) + noise)
    token = np.argsort(-logits, axis=1, kind="stable")[:, :width]
    normed = lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + scorer.EPS)
    rows, slots = normed(np.asarray(EMBED, np.float64)), normed(hidden)

    def parent(row, slot):
        if "down" not in p:
            return (row @ p["parent"]) * (1 + slot @ p["gate"])
        gate, up = np.split(slot @ p["slot"] + row @ p["parent"], 2)
        return (gate / (1 + np.exp(-gate)) * up) @ p["down"]

    found = np.zeros((len(logits), width, width))
    for d in range(len(logits)):
        for a in range(width):
            raised = logits[d].copy()
            if d:
                left = parent(rows[token[d - 1, a]], slots[d])
                raised[token[d]] += scale * (rows[token[d]] @ p["child"]) @ left
            found[d, a] = (raised - np.log(np.exp(raised - raised.max()).sum()) - raised.max())[token[d]]
    return found, token


@pytest.mark.parametrize(
    "builder, reference", [("best_first", oracles.best_first), ("accum_logp", oracles.accum_logp_table)]
)
@pytest.mark.parametrize("causal", [True, pytest.param(False, marks=pytest.mark.slow)])
@pytest.mark.parametrize("inner", [0, INNER])
def test_trees_are_those_of_recomputed_rows(builder, reference, causal, inner):
    head = scored(causal, inner=inner)
    tree, hidden = propose(head.draft.shaped(Rule(12, builder, 4), 4), head.params)
    for row in range(2):
        logp, token = table(head.params["scorer"], hidden[row], tree.logits[row], 4)
        wanted = reference(logp.astype(np.float32), token, int(tree.tokens[row, 0]), 12)
        got = list(zip(*(x[row].tolist() for x in (tree.tokens, tree.parents, tree.depths)), strict=True))
        assert got == wanted
        place, paths = [0], [0.0]
        for t, parent, d in wanted[1:]:
            w = list(token[d - 1]).index(t)
            paths.append(paths[parent] + logp[d - 1, place[parent] if d > 1 else 0, w])
            place.append(w)
        np.testing.assert_allclose(tree.scores.node[row], paths, atol=1e-5)
        best = logp[0, 0]
        for d in range(4):
            best = (best[:, None] + logp[d]).max(0) if d else best
            np.testing.assert_allclose(tree.scores.spine[row, d], best.max(), atol=1e-5)


@pytest.mark.parametrize("inner", [0, INNER])
def test_rows_of_parents_have_the_dtype_of_the_head(inner):
    """So that the product with the children is one of 16 bits too."""
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    found = jax.eval_shape(scorer.parents, scorer.shapes(16, RANK, inner, jnp.bfloat16), of(4, 1, 16), of(4, 3, 16))
    assert found.shape == (4, 3, RANK) and found.dtype == jnp.bfloat16


def test_sampled_rows_rank_pairs_as_they_rank_tokens():
    head, temperature = scored(), jnp.array([0.7, 1.3])
    tree, hidden = propose(head.draft.shaped(Rule(12, width=4, sharpness=0.8), 4), head.params, temperature)
    length = jnp.array([10, 5])
    noise = np.asarray(noise_rows(Sampling(temperature, jnp.arange(2, dtype=jnp.uint32)), length, 4, tiny.VOCAB))
    for row, heat in enumerate((0.7, 1.3)):
        known = heat * NOISE_SHARE * noise[row].astype(np.float64)
        logp, token = table(head.params["scorer"], hidden[row], tree.logits[row], 4, 0.8 / heat, known)
        wanted = oracles.best_first(logp.astype(np.float32), token, int(tree.tokens[row, 0]), 12)
        got = list(zip(*(x[row].tolist() for x in (tree.tokens, tree.parents, tree.depths)), strict=True))
        assert got == wanted


@pytest.mark.parametrize("builder, inner", [("best_first", 0), ("accum_logp", INNER)])
def test_a_new_scorer_changes_no_tree(builder, inner):
    new, bare = scored(child=0.0, inner=inner), tiny.head(True)
    rule = Rule(12, builder, 4)
    one, _ = propose(new.draft.shaped(rule, 4), new.params)
    other, _ = propose(bare.draft.shaped(rule, 4), bare.params)
    for a, b in zip(one[:4], other[:4], strict=True):
        np.testing.assert_array_equal(a, b)
    alone, _ = propose(scored().draft.unscored().shaped(rule, 4), scored().params)
    np.testing.assert_array_equal(alone.tokens, other.tokens)
    moved, _ = propose(scored().draft.shaped(rule, 4), scored().params)
    assert (moved.tokens != other.tokens).any()


def test_decoding_with_it_is_plain_decoding():
    target, prompts = tiny.target("dense"), [[5, 6, 7], [9, 3]]
    greedy, warm = SamplingConfig(20), SamplingConfig(20, temperature=1.0, seed=4, top_k=9)
    for options, trees in ((greedy, [TreeConfig(8, width=3, builder="accum_logp")]), (warm, [TreeConfig(8)])):
        plain = speculate.generate(target, None, prompts, None, options)
        for tree in trees:
            found = speculate.generate(target, scored(), prompts, tree, options)
            assert [r.token_ids for r in found] == [r.token_ids for r in plain]
            assert all(r.rounds for r in found)
