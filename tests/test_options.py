"""Every option under speculation gives the tokens of plain decoding; and those are what an oracle makes of the options.

Which options are in use is static, so each subset is a program. A row that uses all of them keeps the examples to one.
"""

import dataclasses
import functools
import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import laws
import numpy as np
import oracles
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax.config import SamplingConfig
from jetspec_jax.engine import requests
from jetspec_jax.loop.decoder import Decoder
from jetspec_jax.loop.plain import PLAIN
from jetspec_jax.loop.state import Request

CAPACITY, DEPTH, BATCH = 48, 4, 4
STUB = tiny.hash_target()
NEW = 24
ALL = {
    "temperature": 0.9, "top_k": 12, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 1.2, "presence_penalty": 0.2,
    "frequency_penalty": 0.1, "logit_bias": {3: 1.0}, "bad_words": ((5,), (1, 2), (7, 8, 9)), "min_new_tokens": 6,
    "eos": (4, 11), "max_new_tokens": NEW,
}  # fmt: skip
token = st.integers(0, tiny.VOCAB - 1)


@st.composite
def options(draw) -> dict:
    """Any subset of all options, at any value."""
    some = lambda values, usual: draw(st.one_of(st.just(usual), values))
    return {
        "max_new_tokens": draw(st.integers(4, NEW)),
        "temperature": some(st.sampled_from([0.3, 0.7, 1.0, 3.0]), 0.0),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "eos": tuple(some(st.lists(token, max_size=3), ())),
        "top_k": some(st.integers(1, 40), 0),
        "top_p": some(st.floats(0.05, 0.99), 1.0),
        "min_p": some(st.floats(0.001, 0.5), 0.0),
        "repetition_penalty": some(st.floats(0.6, 3.0), 1.0),
        "presence_penalty": some(st.floats(-1, 2), 0.0),
        "frequency_penalty": some(st.floats(-0.5, 2), 0.0),
        "logit_bias": some(st.dictionaries(token, st.floats(-20, 20), max_size=4), ()),
        "bad_words": tuple(some(st.lists(st.lists(token, min_size=1, max_size=4).map(tuple), max_size=4), ())),
        "min_new_tokens": draw(st.integers(0, 4)),
        "stop_token_ids": tuple(some(st.lists(token, max_size=2), ())),
        "budget": draw(st.integers(1, 64)),
    }


def asked_of(prompts, chosen) -> Request:
    return requests.arrays(prompts, chosen, [o.budget or 64 for o in chosen], tiny.geometry(chosen))


def everything(prompts, chosen):
    """With the row that uses all options."""
    return [*prompts, [1, 2, 1]], [SamplingConfig(**given) for given in (*chosen, ALL)]


def equal(state, wanted) -> None:
    assert tiny.outputs(state) == tiny.outputs(wanted)
    assert state.reason.tolist() == wanted.reason.tolist()


def by_hand(loaded, prompt, option) -> list[int]:
    """Token by token: one plain forward, the oracle's processors, the keyed noise."""
    ids, ends = list(prompt), {*option.eos, *option.stop_token_ids}
    while len(ids) - len(prompt) < option.max_new_tokens:
        logits = np.asarray(tiny.path_logits(loaded, [ids + [0] * (CAPACITY - len(ids))]))[0, len(ids) - 1]
        scores = oracles.processed(logits, ids, len(prompt), option, ends)
        if option.temperature >= 1e-4:
            scores = scores + np.asarray(laws.noise_of(jnp.uint32(option.seed), jnp.int32(len(ids)), tiny.VOCAB))
        ids.append(int(scores.argmax()))
        if ids[-1] in ends:
            break
    return ids[len(prompt) :]


# T, W, builder, sharpness: a tree, a narrow one, a chain; with and without the noise in the draft's ranking.
TREES = [
    (24, 6, "best_first", 0.85),
    pytest.param(16, 2, "accum_logp", 0.0, marks=pytest.mark.slow),
    pytest.param(5, 1, "best_first", 0.85, marks=pytest.mark.slow),
]
prompt = st.lists(token, min_size=1, max_size=8)


@pytest.mark.parametrize("rows, width, builder, sharpness", TREES)
@settings(max_examples=10)
@given(st.lists(prompt, min_size=3, max_size=3), st.lists(options(), min_size=3, max_size=3), st.booleans())
def test_any_options_on_the_stub(rows, width, builder, sharpness, prompts, chosen, wrong):
    """Against plain decoding, with a drafter that knows the answer and one that never does."""
    asked = asked_of(*everything(prompts, chosen))
    wanted = tiny.plain(STUB, asked)
    static = tiny.loop(STUB.model, tiny.CoachedDraft(DEPTH, tiny.VOCAB), rows, CAPACITY, builder, width, sharpness)
    draft = tiny.coached(wanted.tokens, [-1] * DEPTH if wrong else [[0, 0, 0, 0], [1, 0, 1, 0], [0, 1, 1, 1]])
    equal(tiny.decode(static, {"target": STUB.params, "draft": draft}, asked), wanted)


@settings(max_examples=10)
@given(st.lists(prompt, min_size=3, max_size=3), st.lists(options(), min_size=3, max_size=3))
def test_plain_decoding_is_the_oracles(prompts, chosen):
    prompts, chosen = everything(prompts, chosen)
    got = tiny.outputs(tiny.plain(STUB, asked_of(prompts, chosen)))
    assert got == [by_hand(STUB, p, o) for p, o in zip(prompts, chosen, strict=True)]


@pytest.mark.parametrize("kind, causal", [("dense", True), pytest.param("moe", False, marks=pytest.mark.slow)])
@settings(derandomize=True, max_examples=8)  # rounding at a near-tie may part the two, so the examples are fixed
@given(st.lists(prompt, min_size=3, max_size=3), st.lists(options(), min_size=3, max_size=3), st.booleans())
def test_any_options_on_real_models(kind, causal, prompts, chosen, coach):
    loaded, head = tiny.target(kind), tiny.head(causal)
    asked = asked_of(*everything(prompts, chosen))
    wanted = tiny.plain(loaded, asked)
    static = tiny.loop(loaded.model, tiny.CoachedDraft(DEPTH, tiny.VOCAB, head.draft), 16, CAPACITY, "best_first", 8)
    draft = tiny.coached(wanted.tokens, [0, 0, 1, 0], head.params, coach)
    equal(tiny.decode(static, {"target": loaded.params, "draft": draft}, asked), wanted)


ALONE = [
    {"top_k": 3}, {"top_p": 0.6}, {"min_p": 0.2}, {"repetition_penalty": 1.8}, {"frequency_penalty": 0.7},
    {"logit_bias": {3: 2.0, 5: -9.0}}, {"bad_words": ((3,), (1, 2))}, {"min_new_tokens": 9, "eos": tuple(range(12))},
]  # fmt: skip


OFTEN = {"top_p", "frequency_penalty"}  # the others are within the examples above; alone they are slow to compile


SINGLES = [pytest.param(o, marks=() if OFTEN & set(o) else pytest.mark.slow, id=next(iter(o))) for o in ALONE]


@pytest.mark.parametrize("alone", SINGLES)
def test_each_option_alone(alone):
    """As a program of its own; it acts (FC-16), and equals plain decoding and the oracle."""
    warm = {"temperature": 1.0, "seed": 3, "max_new_tokens": NEW}
    option = SamplingConfig(**{"eos": ()} | warm | alone)
    prompts = [[1, 2, 1], [3], [3, 3, 3, 3], [5, 4]]
    asked = asked_of(prompts, [option] * 4)
    used = [name for name, x in asked.sampling._asdict().items() if x is not None]
    assert len(used) == 3  # temperature, seed and the one option
    wanted = tiny.plain(STUB, asked)
    static = tiny.loop(STUB.model, tiny.CoachedDraft(DEPTH, tiny.VOCAB), 8, CAPACITY, "best_first", 4)
    draft = tiny.coached(wanted.tokens, [0, 0, 1, 0])
    state = tiny.decode(static, {"target": STUB.params, "draft": draft}, asked)
    equal(state, wanted)
    assert tiny.outputs(wanted) == [by_hand(STUB, p, option) for p in prompts]
    bare = SamplingConfig(**warm, eos=option.eos)
    assert tiny.outputs(tiny.plain(STUB, asked_of(prompts, [bare] * 4))) != tiny.outputs(wanted)
    assert state.accept_lengths.max() > 2  # the options were met inside paths


def test_log_probabilities_are_the_targets_own():
    """Exact, of every kept token, in plain and tree decoding alike: before temperature, filters and penalties."""
    chosen = [SamplingConfig(**ALL), SamplingConfig(NEW, eos=()), SamplingConfig(NEW, 1.0, 5, eos=())]
    prompts = [[1, 2, 1], [3, 4], [9]]
    asked = asked_of(prompts, chosen)
    plain = Decoder(STUB.model, PLAIN, CAPACITY, logprobs=True)
    tree = tiny.loop(STUB.model, tiny.CoachedDraft(DEPTH, tiny.VOCAB), 8, CAPACITY, width=2, logprobs=True)
    draft = tiny.coached(tiny.plain(STUB, asked).tokens, [0, 1, 0, 0])
    for static in (plain, tree):
        state = tiny.decode(static, {"target": STUB.params, "draft": draft if static.depth else None}, asked)
        for row, new in enumerate(tiny.outputs(state)[:3]):
            ids, first = [*prompts[row], *new], len(prompts[row])
            logits = np.asarray(tiny.path_logits(STUB, [ids]), np.float64)[0, first - 1 : -1]
            wanted = logits[np.arange(len(new)), new] - np.log(np.exp(logits).sum(-1))
            np.testing.assert_allclose(state.logprobs[row, first : first + len(new)], wanted, rtol=0, atol=2e-5)


def test_unused_options_are_no_part_of_the_program():
    """Greedy without options and with neutral options is the very same program."""
    neutral = SamplingConfig(NEW, top_k=0, top_p=1.0, min_p=0, repetition_penalty=1, logit_bias={}, bad_words=[])
    asked = asked_of([[1]], [neutral])
    assert [name for name, x in asked.sampling._asdict().items() if x is not None] == ["seed"]
    assert asked_of([[1], [2]], [neutral, dataclasses.replace(neutral, top_k=5)]).sampling.top_k.tolist() == [0, 5]


LAW = SamplingConfig(
    temperature=0.9, top_k=6, top_p=0.93, min_p=0.01, repetition_penalty=1.3, presence_penalty=0.4,
    frequency_penalty=0.2, logit_bias={2: 0.7}, bad_words=((1, 6), (3, 4, 5)),
)  # fmt: skip


@functools.lru_cache(None)
def law_of_options() -> np.ndarray:
    """Exact law of the first three tokens, by the oracle over all contexts."""
    joint = np.zeros((laws.VOCAB,) * 3)
    pairs = [[laws.PROMPT, a, b] for a in range(laws.VOCAB) for b in range(laws.VOCAB)]
    logits = np.asarray(tiny.path_logits(laws.LOADED, pairs)).reshape(laws.VOCAB, laws.VOCAB, 3, laws.VOCAB)
    of = lambda row, context: oracles.softmax(oracles.processed(row, context, 1, LAW))
    first = of(logits[0, 0, 0], [laws.PROMPT])
    for a in range(laws.VOCAB):
        second = of(logits[a, 0, 1], [laws.PROMPT, a])
        for b in range(laws.VOCAB):
            joint[a, b] = first[a] * second[b] * of(logits[a, b, 2], [laws.PROMPT, a, b])
    return joint


@functools.lru_cache(None)
def draws(static: Decoder, kind: str | None):
    params = {"target": laws.LOADED.params, "draft": None if kind is None else {"logits": laws.draft_logits(kind)}}
    out = []
    for start in range(0, laws.DRAWS, laws.BATCH):
        asked = tiny.request([[laws.PROMPT]] * laws.BATCH, 3, seed=np.arange(start, start + laws.BATCH), slots=1)
        one = requests.sampling([1], [LAW], tiny.geometry([LAW]))
        wide = lambda x: jnp.broadcast_to(x, (laws.BATCH, *x.shape[1:]))
        every = tiny.jax.tree.map(wide, one)._replace(seed=asked.sampling.seed)
        state = tiny.decode(static, params, asked._replace(sampling=every))
        out.append(np.asarray(state.tokens[:, 1:4]))
    return np.concatenate(out)


@pytest.mark.parametrize(
    "kind", [None, *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("good", "adversarial"))]
)
def test_the_law_under_all_options(kind):
    """FC-13: 200k draws of three tokens follow the exact law, and none is outside the kept set."""
    static = laws.ALONE if kind is None else laws.TREE
    tokens, joint = draws(static, kind), law_of_options()
    assert (joint == 0).sum() > 100 and (joint[tuple(tokens.T)] > 0).all()
    assert laws.p_value(tokens, joint) > 0.001
    assert (tokens == draws(laws.ALONE, None)).all(1).mean() > 0.9999


LOOSE = """
import dataclasses, fractions, json
import numpy as np, tiny
from jetspec_jax import speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.engine import requests

def line(call, *args, **given):
    try:
        call(*args, **given)
    except ConfigError as error:
        assert "\\n" not in str(error)
        return str(error)
    return ""

# Results hold the options, and are written as JSON.
for name, value in (("temperature", np.float32(0.5)), ("temperature", np.int8(1)), ("seed", np.uint32(7)),
                    ("top_p", fractions.Fraction(1, 2)), ("stop_token_ids", [np.int64(3)]), ("eos", (np.int8(2),)),
                    ("bad_words", [[np.int32(3)]]), ("logit_bias", {np.int32(3): np.float32(0.5)})):
    json.dumps(dataclasses.asdict(SamplingConfig(**{name: value})))
json.dumps(dataclasses.asdict(TreeConfig(np.int64(8), sharpness=np.float32(0.5))))
for value in (np.array(3), np.array([[1, 2, 3]]), {1: 10**400}, object(), [[1]], {(1,): 2}):
    assert line(SamplingConfig, logit_bias=value).startswith("logit_bias=")
# A text such as "no" would count as true.
stub = tiny.hash_target()
for value in ("no", "false", 0, 1, np.array([1, 2]), "\\ud800"):
    for call in (speculate.generate, speculate.start):
        assert "give True, False or None" in line(call, stub, None, [1], chat=value)
        assert "thinking=" in line(call, stub, None, "text", thinking=value)
    assert "give True, False or None" in line(speculate.prompt_ids, stub, [1], value)
"""


def test_values_of_other_types():
    """In a process of its own: the suite checks types before the code does."""
    folder = pathlib.Path(__file__).parent
    path = os.pathsep.join([str(folder), str(folder.parent)])
    got = subprocess.run([sys.executable, "-c", LOOSE], env=os.environ | {"PYTHONPATH": path}, capture_output=True)
    assert got.returncode == 0, got.stderr.decode()
