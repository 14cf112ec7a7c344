"""The engine: rows that come later, blocks of rounds, sizes, and one row that fails alone."""

import dataclasses

import chex
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax import speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.engine import programs, requests
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.geometry import Geometry, Words, used
from jetspec_jax.engine.rows import Row
from jetspec_jax.files import inputs
from jetspec_jax.loop.decoder import Decoder, rounds
from jetspec_jax.loop.plain import PLAIN
from jetspec_jax.loop.state import LENGTH, RUNNING
from jetspec_jax.loop.tree import Rule

TARGET = tiny.target("dense")
CHOSEN = [
    SamplingConfig(9, eos=()),
    SamplingConfig(14, temperature=1.0, seed=5, eos=()),
    SamplingConfig(5, repetition_penalty=1.3, eos=()),
    SamplingConfig(12, temperature=0.7, seed=1, top_k=7, eos=()),
    SamplingConfig(0, eos=()),
]
PROMPTS = [[3, 1, 4], [1, 5, 9, 2, 6, 5], [8], [2, 7, 1, 8, 2, 8], [1, 6]]


@pytest.mark.parametrize("head", [
    pytest.param(None, id="plain", marks=pytest.mark.slow), pytest.param(tiny.head(True), id="causal"),
    pytest.param(tiny.head(False), id="bidirectional", marks=pytest.mark.slow),
])  # fmt: skip
def test_rows_that_come_later_are_as_if_alone(head):
    """Five requests through two slots; each slot is filled again while the other one runs."""
    draft = head.draft.shaped(Rule(8), 4) if head else PLAIN
    resolved = [requests.resolve(TARGET, option) for option in CHOSEN]
    sizes = dataclasses.replace(Geometry.fit(PROMPTS, resolved, draft, 512), batch=2)
    engine = Engine(TARGET, head, Decoder(TARGET.model, draft, sizes.capacity), sizes)
    waiting = [
        Row(ids, option, 1 if head is None else 4 + i)
        for i, (ids, option) in enumerate(zip(PROMPTS, resolved, strict=True))
    ]
    names, done = {id(row): i for i, row in enumerate(waiting)}, {}
    engine.admit([waiting.pop(0)])  # the second slot is free from the start
    while waiting or any(engine.rows):
        engine.advance(1)
        for slot, result in zip(engine.ended(), engine.results(), strict=True):
            done[names[id(engine.rows[slot])]] = result.token_ids
            engine.release(slot)
        while waiting and None in engine.rows:
            free = engine.rows.index(None)
            assert engine.admit([waiting.pop(0)]) == [free]
    alone = [speculate.generate(TARGET, None, p, None, o).token_ids for p, o in zip(PROMPTS, CHOSEN, strict=True)]
    assert [done[i] for i in range(5)] == alone


def test_a_row_that_does_not_fit_is_refused_before_anything_runs():
    option = requests.resolve(TARGET, SamplingConfig(8, eos=()))
    sizes = Geometry.fit([[1, 2]], [option], PLAIN, 512)
    engine = Engine(TARGET, None, Decoder(TARGET.model, PLAIN, sizes.capacity), sizes)
    warm = dataclasses.replace(option, temperature=1.0)
    with pytest.raises(ValueError, match="this engine was made for"):
        engine.admit([Row([1, 2], warm, 1)])
    with pytest.raises(ValueError, match="2 rows: only 1 of 1 slots are free"):
        engine.admit([Row([1], option, 1)] * 2)
    with pytest.raises(ValueError, match="no row has been admitted"):
        engine.over()


def test_a_row_of_more_ends_is_refused():
    option = requests.resolve(TARGET, SamplingConfig(8, eos=()))
    sizes = Geometry.fit([[1, 2]], [option], PLAIN, 512)
    many = dataclasses.replace(option, stop_token_ids=tuple(range(9)))
    assert not sizes.holds(Geometry.fit([[1, 2]], [many], PLAIN, 512))


def test_a_released_row_ends():
    """Its slot is free and costs no rounds; its mate goes on."""
    engine = speculate.start(TARGET, None, [[1, 2], [3]], None, [SamplingConfig(30, eos=()), SamplingConfig(9, eos=())])
    engine.advance(2)
    engine.release(0)
    assert engine.rows[0] is None and engine.state.reason.tolist() == [LENGTH, RUNNING]
    (mate,) = engine.finish()
    assert mate.new_tokens == 9 and engine.new_ids()[0] == engine.new_ids()[0][:3]


def test_budgets_change_between_rounds_and_compile_nothing():
    head = tiny.head(True)
    engine = speculate.start(TARGET, head, [[1, 2], [3]], TreeConfig(8), SamplingConfig(30, eos=()))
    engine.advance(1)
    compiled = engine.seconds["compile"]
    engine.budgets([2, 5])
    engine.advance(1)
    assert engine.state.tree_sizes[:, :2].tolist() == [[8, 2], [8, 5]] and engine.seconds["compile"] == compiled
    plain = speculate.generate(TARGET, None, [[1, 2], [3]], None, SamplingConfig(30, eos=()))
    assert [r.token_ids for r in engine.finish()] == [r.token_ids for r in plain]


def test_blocks_of_rounds_are_short(monkeypatch):
    """Between two launches Python may answer a signal, so none is longer than about a second."""
    launched = []
    run = Engine.advance
    monkeypatch.setattr(Engine, "advance", lambda self, n: (launched.append(n), run(self, n))[1])
    monkeypatch.setattr("jetspec_jax.engine.engine.BLOCK_SECONDS", 1e-9)
    whole = speculate.generate(TARGET, tiny.head(True), [1, 2, 3], TreeConfig(4), SamplingConfig(20, eos=()))
    assert launched[1:] == [1] * (len(launched) - 1) and len(launched) > 3
    monkeypatch.undo()
    again = speculate.generate(TARGET, tiny.head(True), [1, 2, 3], TreeConfig(4), SamplingConfig(20, eos=()))
    assert again.token_ids == whole.token_ids and again.accept_lengths == whole.accept_lengths


def test_a_broken_row_fails_alone():
    """The embedding of one token is NaN: the prompt that holds it has an error, its mates have their tokens."""
    params = TARGET.params | {"embedding": TARGET.params["embedding"].at[7].set(jnp.nan)}
    broken = dataclasses.replace(TARGET, params=params)
    option = SamplingConfig(6, eos=(), bad_words=[[7]])
    good, bad, other = speculate.generate(broken, tiny.head(True), [[1, 2], [7, 3], [4]], TreeConfig(4), option)
    alone = [speculate.generate(broken, None, p, None, option).token_ids for p in ([1, 2], [4])]
    assert [good.token_ids, other.token_ids] == alone and good.error is other.error is None
    assert bad.finish_reason == "error" and "not finite in float32 at position 2" in bad.error
    assert "--" not in bad.error and "try float32" not in bad.error  # it is float32, and no flag was given
    with pytest.raises(speculate.DecodeError, match="not finite"):
        speculate.generate(broken, None, [[7], [7, 1]], None, option)


class Ids(dict):
    """What a tokenizer of transformers returns."""

    def __getattr__(self, name):
        return self[name]


ONE, TWO = [1, 2, 3], [[1, 2, 3], [4]]


@pytest.mark.parametrize(
    ("given", "prompts", "single"),
    [
        ("text", ["text"], True),
        (ONE, [ONE], True),
        (tuple(ONE), [ONE], True),
        (np.array(ONE), [ONE], True),
        (jnp.array(ONE), [ONE], True),
        (np.array([ONE, ONE]), [ONE, ONE], False),
        (TWO, TWO, False),
        ([np.array(ONE), "text"], [ONE, "text"], False),
        (Ids(input_ids=ONE, attention_mask=[1, 1, 1]), [ONE], True),
        ({"input_ids": ONE}, [ONE], True),
        (Ids(input_ids=np.array([ONE, [0, 0, 4]]), attention_mask=np.array([[1, 1, 1], [0, 0, 1]])), TWO, False),
        ([{"input_ids": ONE}, [4]], TWO, False),
    ],
    ids=repr,
)
def test_prompts_are_read(given, prompts, single):
    assert inputs.listed(given) == (prompts, single)


@pytest.mark.parametrize(
    "given",
    [
        {"prompt": "x"}, {}, {1, 2}, {"a"}, frozenset({3}), b"bytes", iter([1, 2]), (i for i in [1]), range(3), 5, None,
        1.5, [1.5], [[1.5]], [None], [{"role": "user", "content": "x"}], [b"x"], [[1], {2}], [], {"input_ids": "text"},
        {"input_ids": [1.5]}, [[[1]]], np.array(3), np.array([1.5]), [True, False], [[True]], np.array([True]),
        Ids(input_ids=ONE, attention_mask=[1]), Ids(input_ids=ONE, attention_mask=5), {"x" * 10_000: 1},
        Ids(input_ids=TWO, attention_mask=[1, 1]), Ids(input_ids=[ONE, ONE], attention_mask=[[1, 1, 1]]),
    ],
    ids=lambda given: type(given).__name__,
)  # fmt: skip
def test_what_is_no_prompt_is_refused_by_name(given):
    calls = [
        lambda: speculate.generate(TARGET, None, given),
        lambda: speculate.start(TARGET, None, given),
        lambda: next(speculate.stream(TARGET, None, given)),
    ]
    for call in calls:
        with pytest.raises(ConfigError, match=r"^prompts?[:=]") as caught:
            call()
        assert "\n" not in str(caught.value) and len(str(caught.value)) < 200


def test_programs_are_kept_by_the_function_itself():
    """Two functions of one name and equal shapes are two programs, and the least recent is forgotten first."""
    times, plus = (lambda _, x, y: x * y), (lambda _, x, y: x + y)
    args = jnp.float32(3), jnp.float32(4)
    assert times.__name__ == plus.__name__
    assert [float(programs.program(f, None, *args).run(*args)) for f in (times, plus, times)] == [12, 7, 12]
    assert programs.program(plus, None, *args).seconds == 0


def test_few_programs_are_kept(monkeypatch):
    monkeypatch.setattr(programs, "KEPT", 2)
    monkeypatch.setattr(programs, "_PROGRAMS", type(programs._PROGRAMS)())
    functions = [lambda _, x, n=n: x + n for n in range(3)]
    x = jnp.float32(1)
    for f in (functions[0], functions[1], functions[0], functions[2]):
        programs.program(f, None, x)
    assert programs.program(functions[0], None, x).seconds == 0 and len(programs._PROGRAMS) == 2
    assert programs.program(functions[1], None, x).seconds > 0


def test_donation_is_part_of_the_key():
    add = lambda _, x, y: x + y
    x = jnp.zeros((4,))
    kept, given = (programs.program(add, None, x, x, donate=d) for d in ((), (0,)))
    assert kept.run is not given.run


def test_one_trace_serves_all_numbers_of_rounds():
    counted = chex.assert_max_traces(rounds, n=1)
    engine = speculate.start(TARGET, None, [1, 2], None, SamplingConfig(12, eos=()))
    for n in (1, 2, 3):
        args = engine._params, engine.state, jnp.int32(n)
        engine.state = programs.program(counted, engine.decoder, *args, donate=(1,)).run(*args)


@settings(max_examples=60)
@given(
    st.lists(st.integers(1, 3000), min_size=1, max_size=5), st.integers(0, 5000), st.sampled_from([16, 512]),
    st.sampled_from([PLAIN, tiny.head(True).draft.shaped(Rule(8), 4)]),
)  # fmt: skip
def test_geometry_holds_what_it_was_fitted_to(lengths, new, chunk, draft):
    prompts, options = [[1] * n for n in lengths], [SamplingConfig(new)] * len(lengths)
    sizes = Geometry.fit(prompts, options, draft, chunk)
    assert sizes.batch >= len(lengths) and sizes.batch & (sizes.batch - 1) == 0
    assert max(lengths) <= sizes.prompt <= sizes.capacity - draft.depth - 1
    assert sizes.capacity >= max(lengths) + new + draft.depth + 1 and sizes.capacity % 256 == 0
    assert all(sizes.holds(Geometry.fit([p], options[:1], draft, chunk)) for p in prompts)
    assert hash(sizes) == hash(dataclasses.replace(sizes))


def test_geometry_names_the_options_that_are_used():
    assert used(SamplingConfig()) == frozenset()
    every = SamplingConfig(
        temperature=1.0, top_k=2, top_p=0.5, min_p=0.1, presence_penalty=1.0, logit_bias={1: 2.0}, bad_words=[[1, 2]],
        min_new_tokens=3, logprobs=True,
    )  # fmt: skip
    assert used(every) == {
        "temperature", "top_k", "top_p", "min_p", "penalties", "bias", "bad_words", "min_length", "logprobs",
    }  # fmt: skip
    assert Geometry.fit([[1]], [every], PLAIN, 512).words == Words(4, 4, 2)
