"""Conversations that the target holds with itself, and long prompts about documents."""

import ast
import json
import types

import numpy as np
import pytest
import small
from small import target

from jetspec_jax.config import ConfigError
from jetspec_jax.loop.state import LENGTH, STOP
from jetspec_jax.training.data import code_prompts, documents, examples, talks
from jetspec_jax.training.data.rows import Row
from jetspec_jax.training.regenerate import Answerer

PLAN = talks.Plan(
    longest=400, max_new=20, samples=1, temperature=0.7, own_temperature=1.0, seed=3, batch=2, trim_loops=True
)
FIRSTS = [target().tokenizer.encode(f"@{text}$>") for text in ("hello", "why", "go on")]


class Scripted:
    """An `Answerer` that says what a script tells of the conversation so far; asked: what it was asked."""

    asked: list

    def __init__(self, target, batch, capacity):
        self.batch = batch

    def __call__(self, prompts, seeds, max_new, temperature):
        assert 1 <= len(prompts) <= self.batch and len(set(seeds.tolist())) == len(prompts)
        self.asked.append((max_new, temperature, seeds.tolist()))
        decode, encode = target().tokenizer.decode, target().tokenizer.encode
        texts = [self.says(decode(ids)) for ids in prompts]
        rows = [np.array([*p, *encode(text)], np.int32) for p, text in zip(prompts, texts, strict=True)]
        return rows, np.array([STOP if text.endswith("$") else LENGTH for text in texts])

    @staticmethod
    def says(so_far: str) -> str:
        turns = so_far.count("$")
        if so_far.endswith(">"):
            return "abcdefg" + "xy" * 20 if "loop" in so_far else f"reply{turns}$"
        return "loop$" if "go on" in so_far and turns > 3 else f"ask{turns}$" if turns < 12 else "never ends"


@pytest.fixture
def scripted(monkeypatch):
    Scripted.asked = []
    monkeypatch.setattr(talks, "Answerer", Scripted)


def test_rows_are_what_the_template_shows_of_the_conversation(scripted, tmp_path):
    """Tokens, and which of them are learnt, are those of the same conversation read from a file."""
    assert talks.write(target(), FIRSTS, tmp_path, PLAN)
    found = talks.read(tmp_path, PLAN)
    assert [e.identity for e in found] == ["talk/0", "talk/1#sample1", "talk/2"]
    decode = target().tokenizer.decode
    for example in found:
        text = decode(example.tokens.tolist())
        said = [turn for turn in text.replace(">", "@").split("@") if turn]
        roles = ("user", "assistant")
        messages = [{"role": roles[i % 2], "content": turn.rstrip("$")} for i, turn in enumerate(said)]
        given = [Row("f:1", "1", {"messages": messages})]
        (row,), _ = examples.build(given, target().tokenizer, (1,), 500, None, "all")
        size = example.tokens.size  # an answer that was cut has no end
        assert row.tokens[:size].tolist() == example.tokens.tolist()
        assert row.learnt[:size].tolist() == example.learnt.tolist()
    texts = [decode(e.tokens.tolist()) for e in found]
    assert texts[0].startswith("@hello$>reply1$@ask2$>reply3$@ask4$>reply5$") and texts[0].endswith("$")
    assert texts[0].count(">") == 6  # the user's seventh turn never ends, so the row ends before it
    assert texts[2].endswith(">abcdefgxyxy")  # a cut answer, without its repetition
    heats = {(most, heat) for most, heat, _ in Scripted.asked}
    assert heats == {(20, 0.0), (20, 0.7), (talks.LONGEST_TURN, 1.0)}


def test_no_row_is_longer_than_asked_and_short_talks_are_left_out(scripted, tmp_path):
    plan = PLAN._replace(longest=talks.LONGEST_TURN + 75, samples=0)
    talks.write(target(), FIRSTS, tmp_path, plan)
    found = talks.read(tmp_path, plan)
    assert found and all(e.tokens.size <= plan.longest for e in found)
    assert max(e.tokens.size for e in found) > 40
    long = [[5] * (plan.longest - plan.max_new)]  # room for one answer
    talks.write(target(), long, tmp_path / "b", plan)
    assert talks.read(tmp_path / "b", plan) == []


def test_a_benchmarks_question_ends_the_talk(scripted, tmp_path):
    talks.write(target(), FIRSTS[:1], tmp_path, PLAN, lambda text: text == "ask4")
    (found,) = talks.read(tmp_path, PLAN)
    assert target().tokenizer.decode(found.tokens.tolist()) == "@hello$>reply1$@ask2$>reply3$"


def test_a_folder_goes_on_and_takes_nothing_else(scripted, tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    talks.write(target(), FIRSTS, whole, PLAN)
    left = iter([True])
    assert not talks.write(target(), FIRSTS, parts, PLAN, None, lambda: next(left, False))
    assert talks.write(target(), FIRSTS, parts, PLAN)
    for a, b in zip(talks.read(whole, PLAN), talks.read(parts, PLAN), strict=True):
        assert a.identity == b.identity and (a.tokens == b.tokens).all() and (a.learnt == b.learnt).all()
    with pytest.raises(ConfigError, match=r"max_new=9: .* was made with 20; remove"):
        talks.write(target(), FIRSTS, parts, PLAN._replace(max_new=9))
    (parts / "part-00001.npz").write_bytes(b"PK")
    with pytest.raises(ConfigError, match=r"part-00001.npz: not a whole file"):
        talks.read(parts, PLAN)


def test_templates_that_hide_turns_are_refused():
    class Quiet(small.Letters):
        def render_chat(self, messages, thinking=None, answer_follows=True):
            return super().render_chat(messages[-1:], thinking, answer_follows)

    odd = types.SimpleNamespace(tokenizer=Quiet(), eos=(1,))
    with pytest.raises(ConfigError, match="dialogues: the chat template does not show a conversation"):
        talks.glue(odd)
    with pytest.raises(ConfigError, match="ends a turn without an end token"):
        talks.glue(types.SimpleNamespace(tokenizer=small.Letters(), eos=(2,)))
    assert talks.glue(target()) == (target().tokenizer.encode("@"), target().tokenizer.encode(">"))


def test_short_batches_have_short_caches_and_the_same_answers():
    """One answerer, two lengths of prompts: what it says is what one with a cache of that size alone says."""
    wide, narrow = Answerer(target(), 2, 1536), Answerer(target(), 2, 512)
    seeds = np.array([1, 2])
    short = [[5, 6, 7], [9] * 20]
    for heat in (0.0, 0.8):
        a, b = (answer(short, seeds, 9, heat) for answer in (wide, narrow))
        assert [x.tolist() for x in a[0]] == [x.tolist() for x in b[0]]
    long, _ = wide([[7] * 600], seeds[:1], 9, 0.0)
    assert 600 < long[0].size <= 609


SOURCE = '''"""A module."""
import functools


@functools.cache
def first(x):
    """{long}"""
    return x


class Thing:
    """{long}"""

    def method(self):
        """{long}"""
{body}


def last():
    return 1
'''


def test_documents_are_whole_definitions_and_long_docstrings(tmp_path, monkeypatch):
    package = tmp_path / "p"
    package.mkdir()
    for i in range(12):
        body = "\n".join(f"        value{i} = {j} + {i}" for j in range(60))
        (package / f"m{i}.py").write_text(SOURCE.format(long=f"Text number {i}. " * 40, body=body))
    (package / "broken.py").write_text("def (")
    (package / "other.py").write_text("# \u00e9\n" + SOURCE.format(long="x " * 400, body="        pass"))
    monkeypatch.setattr(code_prompts, "LICENCES", {"p": "MIT"})
    monkeypatch.setattr(code_prompts, "source_files", lambda name: sorted(package.glob("*.py")))
    found = documents.collect(100)
    assert found == documents.collect(100) and documents.collect(3) == found[:3]
    middle = sorted(len(d.text) for d in found)[len(found) // 2]
    assert documents.collect(100, middle) == [d for d in found if len(d.text) >= middle]
    assert documents.collect(100, longest=middle) == [d for d in found if len(d.text) <= middle]
    kinds = {d.kind for d in found}
    assert kinds == {"code", "text"} and all(documents.SHORTEST <= len(d.text) <= documents.LONGEST for d in found)
    for d in found:
        if d.kind == "code":
            tree = ast.parse(d.text)
            assert {node.name for node in tree.body} <= {"first", "Thing", "last"}
            assert not d.text.startswith("def first")  # with its decorator
        assert d.text in documents.prompt(d) and documents.prompt(d) == documents.prompt(d)
        assert any(request in documents.prompt(d) for request in documents.ABOUT_CODE + documents.ABOUT_TEXT)


def test_the_command_writes_prompts(tmp_path, monkeypatch, capsys):
    made = [documents.Document("p", "text", f"word {i} " * 300) for i in range(3)]
    monkeypatch.setattr(documents, "collect", lambda count, *characters: made[:count])
    path = tmp_path / "d.jsonl"
    assert documents.main(["--out", str(path), "--count=2"]) == 0
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert [row["id"] for row in rows] == ["document_p/0", "document_p/1"]
    assert rows[0]["messages"] == [{"role": "user", "content": documents.prompt(made[0])}]
    pool = tmp_path / "pool.jsonl"
    pool.write_text(json.dumps(rows[0]) + "\n")
    assert documents.main(["--out", str(path), "--count=2", "--without", str(pool)]) == 0
    left = [json.loads(line)["messages"][0]["content"] for line in path.read_text().splitlines()]
    assert left == [documents.prompt(document) for document in made[1:]]
    pool.write_text("{}\n")
    assert documents.main(["--out", str(path), "--without", str(pool)]) == 1
    assert "--without=" in capsys.readouterr().err
    assert documents.main(["--out", str(tmp_path)]) == 1 and "--out=" in capsys.readouterr().err
