"""Bias, penalties, bans and filters against transformers' definitions, and the threshold search behind the filters."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from hypothesis import example, given
from hypothesis import strategies as st

from jetspec_jax.config import SamplingConfig
from jetspec_jax.engine import requests
from jetspec_jax.layers import vocabulary
from jetspec_jax.loop import processors
from jetspec_jax.loop.processors import Past

VOCAB = 40
numbers = st.floats(-50, 50, width=32)
threshold = jax.jit(vocabulary.threshold)


def put(rows, dtype=jnp.float32):
    return jnp.asarray(rows, dtype)


@given(st.lists(st.sampled_from([-np.inf, -3.5, -1e-30, -0.0, 0.0, 1e-40, 1.0, 1.5, 3e38]) | numbers, min_size=9,
                max_size=9), st.integers(1, 9))  # fmt: skip
@example([-0.0, 0.0] * 4 + [0.0], 5)
def test_the_kth_largest_to_the_bit(values, k):
    row = np.array(values, np.float32)
    row = np.where(np.abs(row) < np.finfo(np.float32).tiny, np.copysign(0, row), row)  # XLA may flush what is below
    found = threshold(put([row]), jnp.ones((1, 9)), put([k]))[0]
    assert found == np.sort(row)[-k]


@given(st.lists(numbers, min_size=12, max_size=12, unique=True), st.floats(0.01, 0.99))
def test_the_smallest_set_that_weighs_enough(values, share):
    row = np.array(values, np.float32)
    weight = np.exp(row - row.max())
    order = np.argsort(-row, kind="stable")
    total = weight[order].astype(np.float64).cumsum()
    if np.abs(total - share * total[-1]).min() < 1e-5 * total[-1]:
        return  # the border is a matter of rounding
    found = threshold(put([row]), put([weight]), put([share * weight.sum()]))[0]
    assert found == row[order[np.argmax(total >= share * total[-1])]]


@pytest.mark.parametrize("size", [1, 5, 257, 50_000])
def test_more_ways_find_the_same(size, monkeypatch):
    """The split of an accelerator and that of a CPU; and rows do not see each other."""
    row = np.random.default_rng(size).standard_normal((3, size)).astype(np.float32)
    weight, need = np.ones_like(row), np.array([1, (size + 1) // 2, size], np.float32)
    two = threshold(row, weight, need)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    assert (vocabulary.threshold(put(row), put(weight), put(need)) == two).all()
    assert all(threshold(row[i : i + 1], weight[i : i + 1], need[i : i + 1])[0] == two[i] for i in range(3))
    assert two.tolist() == [np.sort(x)[-int(k)] for x, k in zip(row, need, strict=True)]


scores = jax.jit(processors.scores)


def processed(logits, contexts, prompt_length, options, ends=()):
    """What the program makes of one row for each context, all of one length."""
    contexts = np.array(contexts, np.int32)
    arrays = requests.sampling([prompt_length] * len(contexts), options, tiny.geometry(options))
    past = Past(
        put(np.pad(contexts, ((0, 0), (0, 3))), jnp.int32),  # what lies after the length is never read
        jnp.full(len(contexts), prompt_length),
        jnp.full(len(contexts), contexts.shape[1]),
        put([[*ends, -1]] * len(contexts), jnp.int32),
    )
    counts = processors.committed(past, arrays, VOCAB)
    rows, silence = put(logits)[:, None], jnp.zeros((len(contexts), 1, VOCAB))
    return scores(rows, put(contexts[:, -1:], jnp.int32), past, arrays, silence, counts)[:, 0]


OPTIONS = [
    {"logit_bias": {3: 5.0, 9: -100.0}},
    {"repetition_penalty": 1.7},
    {"repetition_penalty": 0.6, "presence_penalty": -1.0},
    {"presence_penalty": 0.9, "frequency_penalty": 0.4},
    {"bad_words": ((5,), (1, 2), (9, 1, 3), (1, 1, 1, 7))},
    {"min_new_tokens": 5},
    {"min_new_tokens": 4},
    {"top_k": 1, "temperature": 1.0},
    {"top_k": 7, "temperature": 0.3},
    {"top_k": 1000, "temperature": 1.0},
    {"top_p": 0.9, "temperature": 1.0},
    {"top_p": 0.01, "temperature": 2.0},
    {"min_p": 0.2, "temperature": 1.5},
    {"min_p": 1.0, "temperature": 1.5},
    {"top_k": 20, "top_p": 0.7, "min_p": 0.1, "temperature": 1.3},
    {"top_k": 9, "top_p": 0.8, "temperature": 0.8, "repetition_penalty": 1.2, "presence_penalty": 0.3,
     "logit_bias": {1: 2.0}, "bad_words": ((9, 1, 3), (4,)), "min_new_tokens": 9, "max_new_tokens": 9},
]  # fmt: skip
CONTEXTS = [[1, 9, 1, 1, 9, 1, 9, 9, 1], [7, 7, 7, 7, 7, 1, 1, 1, 1], [0, 30, 31, 39, 5, 6, 6, 6, 1]]


@pytest.mark.parametrize("given", OPTIONS, ids=lambda o: "-".join(o))
def test_the_chain_is_the_oracles(given):
    option, ends = SamplingConfig(**given), (0, 39)
    logits = 3 * np.random.default_rng(0).standard_normal((3, VOCAB)).astype(np.float32)
    got = np.asarray(processed(logits, CONTEXTS, 5, [option] * 3, ends))
    for row, context, mine in zip(logits, CONTEXTS, got, strict=True):
        wanted = oracles.processed(row, context, 5, option, ends)
        if option.temperature == 0:  # the filters change no argmax
            assert mine.argmax() == wanted.argmax()
        np.testing.assert_allclose(mine, wanted, rtol=1e-5, atol=1e-5)


THEIRS = [o for o in OPTIONS if not {"presence_penalty", "frequency_penalty"} & set(o)]


@pytest.mark.parametrize("given", THEIRS, ids=lambda o: "-".join(o))
def test_the_chain_is_that_of_transformers(given):
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as theirs

    option, ends = SamplingConfig(**given), (0, 39)
    logits = 3 * np.random.default_rng(1).standard_normal((3, VOCAB)).astype(np.float32)
    got = np.asarray(processed(logits, CONTEXTS, 5, [option] * 3, ends))
    chain = []
    if option.logit_bias:
        chain.append(theirs.SequenceBiasLogitsProcessor([[[t], v] for t, v in option.logit_bias]))
    if option.repetition_penalty != 1:
        chain.append(theirs.RepetitionPenaltyLogitsProcessor(option.repetition_penalty))
    if option.bad_words:
        chain.append(theirs.NoBadWordsLogitsProcessor([list(w) for w in option.bad_words]))
    if option.min_new_tokens:
        chain.append(theirs.MinNewTokensLengthLogitsProcessor(5, option.min_new_tokens, list(ends)))
    if option.temperature:
        chain.append(theirs.TemperatureLogitsWarper(option.temperature))
        if option.top_k:
            chain.append(theirs.TopKLogitsWarper(option.top_k))
        chain.append(theirs.TopPLogitsWarper(option.top_p))
        chain.append(theirs.MinPLogitsWarper(option.min_p))
    values = torch.tensor(logits)
    for processor in chain:
        values = processor(torch.tensor(CONTEXTS), values)
    np.testing.assert_allclose(got, values.numpy(), rtol=1e-5, atol=1e-5)


def test_rows_with_options_of_their_own():
    """A batch in which no two rows want the same: each as it would be alone."""
    options = [SamplingConfig(**given) for given in OPTIONS]
    rows = 3 * np.random.default_rng(2).standard_normal((len(options), VOCAB)).astype(np.float32)
    contexts = [CONTEXTS[i % 3] for i in range(len(options))]
    together = np.asarray(processed(rows, contexts, 5, options, (0, 39)))
    for i, option in enumerate(options):
        alone = np.asarray(processed(rows[i : i + 1], contexts[i : i + 1], 5, [option], (0, 39)))[0]
        if option.temperature:
            np.testing.assert_array_equal(together[i], alone)
        assert together[i].argmax() == alone.argmax()


def test_ties_stay_together():
    """Top-k and top-p keep or drop equal logits alike, whatever their order in the vocabulary."""
    logits = np.log([[0.1, 0.3, 0.1, 0.3, 0.1, 0.1] + [1e-9] * (VOCAB - 6)])
    count = lambda **o: np.isfinite(processed(logits, [[1]], 1, [SamplingConfig(temperature=1.0, **o)])).sum()
    assert [count(top_k=k) for k in (1, 2, 3, 6)] == [2, 2, 6, 6]
    assert [count(top_p=p) for p in (0.2, 0.5, 0.65, 0.95)] == [2, 2, 6, 6]
    assert [count(min_p=p) for p in (1.0, 0.5, 0.3)] == [2, 2, 6]


def test_plain_and_tree_keep_the_same_set():
    """The same logits in a stack of rows and alone: the kept set is equal to the bit."""
    rows = np.random.default_rng(3).standard_normal((200, 5, 3000)).astype(np.float32) * 2
    option = SamplingConfig(temperature=1.0, top_k=900, top_p=0.83, min_p=0.001)
    keep = jax.jit(processors.keep)
    arrays = lambda n: requests.sampling([1] * n, [option] * n, tiny.geometry([option] * n))
    tree = np.isfinite(keep(put(rows), arrays(200)))
    plain = np.stack([np.isfinite(keep(put(rows[:, i : i + 1]), arrays(200)))[:, 0] for i in range(5)], 1)
    alone = np.isfinite(keep(put(rows[7:8, 2:3]), arrays(1)))[0, 0]
    assert (tree == plain).all() and (alone == tree[7, 2]).all()
    assert 10 < tree.sum(-1).mean() < 900


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_broken_logits_are_kept(value):
    """So that the row ends with a word about it, and no filter hides it."""
    logits = np.zeros((1, VOCAB), np.float32)
    logits[0, 17] = value
    for options in ({"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.5}, {"top_k": 3, "top_p": 0.5, "min_p": 0.5}):
        assert processed(logits, [[1]], 1, [SamplingConfig(temperature=1.0, **options)])[0].argmax() == 17
