"""How an output ends: end tokens, stop tokens, stop strings across tokens and rounds, exact counts, streams."""

import copy
import dataclasses
import re

import numpy as np
import pytest
import tiny
from hypothesis import example, given
from hypothesis import strategies as st

from jetspec_jax import baseline, speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.engine.stops import StopText
from jetspec_jax.files.tokenizer import Tokenizer

PIECES = [chr(97 + i).encode() for i in range(26)]
PIECES += [b" ", b"\n", b"\n\n", b"ab", *[b"\xf0", b"\x9f", b"\x98", b"\x80"], b"EN", b"D", b""]  # the last is special
END = 36
DEPTH = 4


class Letters(Tokenizer):
    """37 tokens: letters, pieces of one emoji, texts of several characters, and a special token without text."""

    def decode(self, ids):
        return b"".join(PIECES[i] for i in ids).decode("utf-8", "replace")

    def encode(self, text):
        return [PIECES.index(c.encode()) for c in text if c.encode() in PIECES]

    has_chat_template = False


LETTERS = Letters(None)
LOADED = dataclasses.replace(tiny.hash_target(seed=5), _tokenizer=lambda: LETTERS)
PROMPT = [3, 1, 4]
FREE = baseline.generate(LOADED, PROMPT, SamplingConfig(60))
TEXT = FREE.text


def drafted(rank=0, answers=FREE, prompt=PROMPT):
    """A head that knows the output."""
    plain = [([*prompt, *answers.token_ids] + [0] * 80)[:80]]  # of one size, for each is a program
    return tiny.LoadedHead(tiny.CoachedDraft(DEPTH, tiny.VOCAB), tiny.coached(plain, [rank] * DEPTH))


def by_hand(ids, stops, include: bool, after: int) -> tuple[int, str]:
    """Tokens kept and text: the first token at which a stop string ends in what is whole of the text."""
    old = 0
    for n in range(1, len(ids) + 1):
        text = LETTERS.decode(ids[:n]).rstrip("\ufffd")
        hits = [(at, len(s)) for s in stops for at in range(len(text)) if text.startswith(s, at) and at + len(s) > old]
        if n > after and hits:
            at, size = min(hits)
            return n, text[: at + size * include]
        old = len(text)
    return len(ids), LETTERS.decode(ids)


ids = st.lists(st.integers(0, 36), max_size=40)
texts = st.text("abEND \n😀", min_size=1, max_size=3)


@given(ids, st.lists(texts, max_size=3), st.booleans(), st.integers(0, 5), st.lists(st.integers(1, 7), min_size=1))
@example([0, 34, 35, 0], ["END"], True, 0, [1])
@example([30, 31, 32, 33, 0], ["😀"], False, 0, [2])
@example([0, 1, 0, 1], ["ab"], False, 2, [4])
@example([29, 29], ["ab", "a", "b"], True, 0, [1])
@example([0, 1, 2, 3], ["z", "abcd"], False, 0, [1])  # the longer, second one is held back
def test_stop_text(ids, stops, include, after, sizes):
    """Any chunks: the same end, and nothing is shown that is taken back."""
    text, shown, at = StopText(LETTERS, stops, include, after), "", 0
    for i in range(len(ids)):
        text.push(ids[at : at + sizes[i % len(sizes)]])
        at += sizes[i % len(sizes)]
        assert text.settled.startswith(shown)
        shown = text.settled
    text.finish()
    assert text.settled.startswith(shown)
    assert (text.count, text.settled) == by_hand(ids, stops, include, after)
    assert (text.found is None) or text.found in stops


class Held:
    """A decoder that still holds half a character: a token may be a space and the first bytes of an emoji."""

    def stream_decoder(self):
        return self

    def push(self, ids):
        return " " * len(ids)

    def finish(self):
        return "\ufffd"


def test_nothing_comes_after_a_stop_string():
    text = StopText(Held(), [" "], include=True)
    text.push([0])
    text.finish()
    assert text.settled == " "


def same(got, plain, **more):
    """All that both results say of tokens, text and ends; and the counts agree (FC-10, FC-11)."""
    for name in ("token_ids", "text", "finish_reason", "stopped_by", "new_tokens", "prompt_tokens", "logprobs"):
        assert getattr(got, name) == getattr(plain, name), name
    for result in (got, plain):
        assert result.new_tokens == len(result.token_ids) == min(result.new_tokens, 1) + sum(result.emitted)
        assert result.rounds == len(result.emitted) == len(result.accept_lengths) == len(result.tree_sizes)
        assert all(1 <= e <= a for e, a in zip(result.emitted, result.accept_lengths, strict=True))
    assert {name: getattr(got, name) for name in more} == more


@pytest.mark.parametrize("start", range(0, 24, 3))
@pytest.mark.parametrize("size", [1, 3])
def test_stop_strings_anywhere(start, size):
    """At every place of a round and over its border: cut as in plain decoding, with and without the stop text."""
    stop = TEXT[start : start + size]
    at = TEXT.index(stop)
    for include in (False, True):
        option = SamplingConfig(60, stop=stop, include_stop_text=include, logprobs=True)
        plain = baseline.generate(LOADED, PROMPT, option)
        got = speculate.generate(LOADED, drafted(), PROMPT, TreeConfig(8), option)
        same(got, plain, text=TEXT[: at + size * include], finish_reason="stop", stopped_by=stop)
        assert got.token_ids == FREE.token_ids[: by_hand(FREE.token_ids, [stop], include, 0)[0]]
        assert len(got.logprobs) == len(got.token_ids)


def test_a_row_that_has_been_cut_is_consistent():
    """Length, reason and rounds of the state itself; the mate without a stop string goes on to its limit."""
    options = [SamplingConfig(40, stop=TEXT[9:12]), SamplingConfig(40), SamplingConfig(40, stop="never so")]
    engine = speculate.start(LOADED, drafted(), [PROMPT] * 3, TreeConfig(8), options)
    while not engine.over():
        engine.advance(3)
    kept = by_hand(FREE.token_ids, [TEXT[9:12]], False, 0)[0]
    assert engine.state.length.tolist()[:3] == [3 + kept, 43, 43]
    first, second, third = engine.results()
    assert first.finish_reason == "stop" and second.finish_reason == third.finish_reason == "length"
    assert second.token_ids == third.token_ids == FREE.token_ids[:40] and third.stopped_by is None
    alone = speculate.generate(LOADED, drafted(), PROMPT, TreeConfig(8), options[0])
    same(alone, first, accept_lengths=first.accept_lengths)


def test_stop_tokens_and_ends():
    """FC-06, FC-07: ids keep the token that ended them, text does not unless asked; ignore_eos leaves stop tokens."""
    spots = [next(i for i, t in enumerate(FREE.token_ids) if FREE.token_ids.index(t) == i >= k) for k in (4, 9, 15)]
    a, b, c = (FREE.token_ids[i] for i in spots)
    model = dataclasses.replace(LOADED, eos=(a, c))
    cases = [
        ({}, spots[0]),
        ({"eos": (b, c)}, spots[1]),
        ({"stop_token_ids": (b,)}, spots[0]),
        ({"ignore_eos": True}, None),
        ({"ignore_eos": True, "stop_token_ids": (b, c)}, spots[1]),
        ({"eos": (), "stop_token_ids": [c]}, spots[2]),
    ]
    for ends, spot in cases:
        for include in (False, True):
            option = SamplingConfig(30, include_stop_text=include, **ends)
            plain = baseline.generate(model, PROMPT, option)
            got = speculate.generate(model, drafted(), PROMPT, TreeConfig(8), option)
            wanted = FREE.token_ids[: 30 if spot is None else spot + 1]
            shown = wanted if spot is None or include else wanted[:-1]
            reason, by = ("length", None) if spot is None else ("stop", wanted[-1])
            same(got, plain, token_ids=wanted, text=LETTERS.decode(shown), finish_reason=reason, stopped_by=by)


def test_the_end_token_has_no_stop_text():
    """A stop token whose own text is a stop string ends the row as a token: that text is not part of the output."""
    spot = next(i for i, t in enumerate(FREE.token_ids) if FREE.token_ids.index(t) == i >= 5 and PIECES[t].isalpha())
    last = FREE.token_ids[spot]
    option = SamplingConfig(30, stop=LETTERS.decode([last]), stop_token_ids=(last,))
    plain = baseline.generate(LOADED, PROMPT, option)
    same(speculate.generate(LOADED, drafted(), PROMPT, TreeConfig(8), option), plain, stopped_by=last)


@pytest.mark.parametrize("least", [0, 1, 5, 12])
def test_min_new_tokens(least):
    """No end before: neither by a token nor by a stop string; max_new_tokens is exact all the same."""
    ends = tuple(sorted(set(FREE.token_ids[:4])))
    for ways in ({"eos": ends}, {"stop_token_ids": ends}, {"stop": [LETTERS.decode([e]) for e in ends]}):
        option = SamplingConfig(20, min_new_tokens=least, **ways)
        plain = baseline.generate(LOADED, PROMPT, option)
        head = drafted(answers=plain)
        same(speculate.generate(LOADED, head, PROMPT, TreeConfig(8), option), plain)
        assert plain.new_tokens > least and plain.new_tokens <= 20
    exact = SamplingConfig(7, min_new_tokens=7, eos=ends)
    same(speculate.generate(LOADED, drafted(), PROMPT, TreeConfig(8), exact), baseline.generate(LOADED, PROMPT, exact),
         new_tokens=7, finish_reason="length")  # fmt: skip


@pytest.mark.parametrize("given", [{}, {"stop": TEXT[20:23]}, {"stop": [TEXT[7:9], "zz"], "include_stop_text": True},
                                   {"eos": (FREE.token_ids[13],)}], ids=str)  # fmt: skip
@pytest.mark.parametrize("rank", [0, -1])
def test_streams_join_to_the_text(given, rank):
    """Also held back: no piece shows what a stop string takes away."""
    option = SamplingConfig(40, **given)
    whole = speculate.generate(LOADED, drafted(), PROMPT, TreeConfig(8), option)
    pieces = list(speculate.stream(LOADED, drafted(rank), PROMPT, TreeConfig(8), option))
    assert "".join(p.text for p in pieces) == whole.text == pieces[-1].result.text
    assert [i for p in pieces for i in p.token_ids] == whole.token_ids
    assert len(pieces) > 2 or rank == 0


def test_a_stop_string_in_the_first_token_needs_no_round():
    option = SamplingConfig(40, stop=TEXT[0])
    got = speculate.generate(LOADED, drafted(), PROMPT, TreeConfig(8), option)
    same(got, baseline.generate(LOADED, PROMPT, option), text="", new_tokens=1, rounds=0, accept_lengths=[])


def test_budgets_and_options_of_each_row():
    """A batch in which every row wants something else; each equals plain decoding (by hand in `test_options`)."""
    prompts = [PROMPT, [7], [1, 2, 3, 4, 5], [9, 9]]
    options = [
        SamplingConfig(20, budget=2, stop=TEXT[5:7], top_p=0.8, bad_words=["q"], logprobs=True),
        SamplingConfig(25, 1.0, 7, top_p=0.9, budget=16, bad_words=[(3,)], logprobs=True),
        SamplingConfig(9, top_p=0.5, budget=9, bad_words=["zz"], logprobs=True),
        SamplingConfig(30, 0.7, 8, bad_words=["a", (4, 5)], top_p=0.95, logprobs=True),
    ]
    head = tiny.LoadedHead(tiny.TableDraft(3), {"logits": tiny.random_like(np.zeros((3, 37), np.float32), 0)})
    together = speculate.generate(LOADED, head, prompts, TreeConfig(8), options)
    plain = baseline.generate(LOADED, prompts, options)
    for row, option in enumerate(options):
        np.testing.assert_allclose(together[row].logprobs, plain[row].logprobs, atol=1e-5)
        same(together[row], dataclasses.replace(plain[row], logprobs=together[row].logprobs))
        assert together[row].settings["budget"] == (option.budget or 8)
        assert max(together[row].tree_sizes, default=0) <= (option.budget or 8)
    assert 0 not in together[3].token_ids and 0 in FREE.token_ids


REFUSED = [
    ({"top_k": -1}, "top_k=-1"), ({"top_k": 2.5}, "top_k=2.5"), ({"top_p": 0}, "top_p=0"),
    ({"top_p": 1.1}, "top_p=1.1"),
    ({"min_p": -0.1}, "min_p"), ({"min_p": float("nan")}, "min_p=nan"),
    ({"repetition_penalty": 0}, "repetition_penalty"),
    ({"presence_penalty": float("inf")}, "presence_penalty=inf"), ({"frequency_penalty": "x"}, "frequency_penalty='x'"),
    ({"logit_bias": {"x": 1.0}}, "logit_bias"), ({"logit_bias": {3: float("nan")}}, "logit_bias"),
    ({"bad_words": [""]}, "bad_words"), ({"bad_words": [[]]}, "bad_words"), ({"bad_words": "no"}, "bad_words"),
    ({"min_new_tokens": 9, "max_new_tokens": 8}, "min_new_tokens=9 contradicts max_new_tokens=8"),
    ({"min_new_tokens": -1}, "min_new_tokens=-1"), ({"stop": [""]}, "stop"), ({"stop": 3}, "stop=3"),
    ({"stop_token_ids": [1.5]}, "stop_token_ids"), ({"ignore_eos": 1}, "ignore_eos=1"), ({"budget": 0}, "budget=0"),
    ({"ignore_eos": True, "eos": (3,)}, "ignore_eos contradicts eos"), ({"logprobs": "yes"}, "logprobs"),
]  # fmt: skip


def test_a_stop_text_without_text_is_refused_with_the_id():
    class Special(Letters):
        def encode(self, text):
            return [END] if text == "<end>" else super().encode(text)

    loaded = dataclasses.replace(LOADED, _tokenizer=lambda: Special(None))
    with pytest.raises(ConfigError, match=r"stop='<end>': special tokens .* stop_token_ids=36"):
        speculate.start(loaded, None, PROMPT, None, SamplingConfig(4, stop="<end>"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"sampling": {"temperature": 1}}, "sampling={'temperature': 1}: give a SamplingConfig"),
        ({"sampling": [None]}, "sampling=[None]"), ({"sampling": []}, "0 configurations for 1 prompts"),
        ({"tree": {"budget": 4}}, "tree={'budget': 4}: give a TreeConfig"),
        ({"head": LOADED}, "head=LoadedTarget: give what"),
        ({"target": "t"}, "target=str: give what load_target returns"),
        ({"tree": {"budget": "x" * 1000}}, "xxx...: give a TreeConfig"),
        ({"prompts": 5}, "prompts=5"), ({"chat": True}, "chat=True: token ids"),
    ],
)  # fmt: skip
def test_arguments_of_another_kind_are_refused_by_name(given, message):
    arguments = {"target": LOADED, "head": None, "prompts": PROMPT} | given
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        speculate.start(**arguments)
    assert len(str(error.value)) < 250
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("ids", [{"input_ids": [1]}, ["a"], [1.0], [True]])
def test_ids_of_another_kind_are_refused_by_the_check(ids):
    with pytest.raises(ConfigError, match="is no token of the target"):
        speculate.check(LOADED, ids, SamplingConfig(2))


@pytest.mark.parametrize("given", [{"stop": "\udcff"}, {"bad_words": ["\udcff"]}, {"logit_bias": {3: 10**400}}])
def test_text_that_is_none_and_numbers_too_large(given):
    with pytest.raises(ConfigError, match=next(iter(given))):
        SamplingConfig(**given)


@pytest.mark.parametrize(("given", "message"), REFUSED, ids=str)
def test_impossible_options_are_refused_by_name(given, message):
    option = copy.copy(SamplingConfig())  # past the type checks that the tests put before every call
    for name, value in given.items():
        object.__setattr__(option, name, value)
    with pytest.raises(ConfigError, match=re.escape(message)) as error:
        option.__post_init__()
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("given", [{"stop_token_ids": [37]}, {"eos": (99,)}, {"logit_bias": {40: 1.0}},
                                   {"bad_words": [[1, 37]]}], ids=str)  # fmt: skip
def test_ids_beyond_the_vocabulary_are_refused(given):
    with pytest.raises(ConfigError, match=rf"{next(iter(given))}: \d+ is not a token; ids are 0..36"):
        speculate.start(LOADED, None, PROMPT, None, SamplingConfig(5, **given))


@pytest.mark.parametrize("given", [{"stop": "x"}, {"bad_words": ["x"]}], ids=str)
def test_texts_need_a_tokenizer(given):
    with pytest.raises(ConfigError, match=f"{next(iter(given))}='x'.*no tokenizer"):
        mute = dataclasses.replace(LOADED, _tokenizer=lambda: None)
        speculate.start(mute, None, PROMPT, None, SamplingConfig(5, **given))
