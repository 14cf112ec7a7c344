"""Conversations on the terminal: each turn is the offline answer to all of it, and only what is new is read."""

import io
import sys

import pytest
import served
from served import HEAD, TARGET

from jetspec_jax import decode, speculate, talk
from jetspec_jax.files import load
from jetspec_jax.options import SamplingConfig

PAIR = ["--target", "tiny", "--head", "tiny", "--chat", "--budget", str(served.NODES)]


@pytest.fixture
def loaded(monkeypatch):
    """The tiny pair, whatever is named."""
    monkeypatch.setattr(load, "load_target", lambda *rest, **options: TARGET)
    monkeypatch.setattr(load, "load_head", lambda *rest: HEAD)
    monkeypatch.setattr(decode.methods, "usual", lambda head, wants_tree: "jetspec")
    monkeypatch.setattr(decode.methods, "tree", lambda name, tree, head: tree)


def test_a_conversation(loaded, monkeypatch, capsys):
    turns = ["tell me a story", "", "and another", "x" * 150, "the end"]
    monkeypatch.setattr(talk, "SLOTS", 256)
    monkeypatch.setattr(talk, "CHUNKS", (16,))
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(turns)))
    assert decode.main([*PAIR, "--max_new_tokens", "25", "--temperature", "1", "--seed", "4"]) == 0
    out, err = capsys.readouterr()
    said, wanted = [], []
    for text in (turns[0], turns[2], turns[4]):
        said.append({"role": "user", "content": text})
        option = SamplingConfig(25, temperature=1.0, seed=4)
        wanted.append(speculate.generate(TARGET, None, TARGET.encode_messages(said), None, option))
        said.append({"role": "assistant", "content": wanted[-1].text})
    assert out == "".join(result.text + "\n" for result in wanted)
    lines = [line for line in err.splitlines() if line.startswith("[")]
    reused = [int(line.split("; ")[1].split()[0]) for line in lines]
    assert reused[0] == 0 and all(
        before.prompt_tokens < count < result.prompt_tokens
        for before, count, result in zip(wanted, reused[1:], wanted[1:], strict=False)
    )
    assert "max_new_tokens=25: with a prompt of" in err


@pytest.mark.parametrize("word", ["--json", "--compare", "--batch=2", "--stream", "--trace=x"])
def test_what_is_not_for_a_conversation_is_refused(word, capsys):
    assert decode.main([*PAIR, word]) == 2
    assert f"--{word[2:].split('=')[0]} is not for that" in capsys.readouterr().err
