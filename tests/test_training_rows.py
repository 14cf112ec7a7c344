"""Rows of files, and what of a row is learnt."""

import json

import pytest
from small import (
    ALPHABET,
    Letters,
)

from jetspec_jax.config import ConfigError
from jetspec_jax.training.data import examples, rows, turns


def user(text):
    return {"role": "user", "content": text}


def answer(text):
    return {"role": "assistant", "content": text}


def write(path, values):
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_text("".join(json.dumps(v) + "\n" for v in values))
    return path


def test_rows_from_jsonl(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"id": 7, "text": "x"}, {"text": "y"}])
    got = list(rows.read(path))
    assert [r.identity for r in got] == ["7", "a.jsonl:2"] and got[1].where == f"{path}:2"
    write(tmp_path / "b.jsonl", [{"text": "z"}])
    assert len(list(rows.read(tmp_path))) == 3
    path.write_text('{"text": "x"}\n{"text":\n')
    with pytest.raises(ConfigError, match=r"a.jsonl:2: not a JSON object"):
        list(rows.read(path))
    for source, message in [
        (tmp_path / "none", "no such file"),
        (write(tmp_path / "c.csv", []), "rows come from .jsonl, .parquet, .arrow files"),
        (write(tmp_path / "d" / "c.csv", []).parent, "no .jsonl, .parquet, .arrow files in it"),
    ]:
        with pytest.raises(ConfigError, match=message):
            list(rows.read(source))


def test_empty_columns_of_a_mixed_table_are_not_there():
    empty = {"messages": None, "prompt": None, "response": None, "text": None}
    talk = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "bc"}]}
    kept, report = build([empty | {"text": "plain"}, empty | talk, empty | {"prompt": "a", "response": "bc"}])
    assert [shown(e) for e in kept] == ["plain", "....bc$", "....bc$"] and not report.dropped


def test_rows_from_parquet_and_a_dataset_on_disk(tmp_path):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")

    values = [{"id": str(i), "messages": [user(f"q{i}"), answer("a")]} for i in range(3)]
    table = pyarrow.Table.from_pylist(values)
    parquet.write_table(table, tmp_path / "a.parquet")
    assert [r.value for r in rows.read(tmp_path / "a.parquet")] == values

    folder = tmp_path / "set" / "train"
    folder.mkdir(parents=True)
    with pyarrow.ipc.new_stream(folder / "data-00000-of-00001.arrow", table.schema) as stream:
        stream.write_table(table)
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}))
    (folder.parent / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert [r.value for r in rows.read(folder.parent)] == values
    (folder.parent / "dataset_dict.json").write_text('{"splits": ["test"]}')
    with pytest.raises(ConfigError, match="it has the splits test"):
        list(rows.read(folder.parent))
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 nothing")
    with pytest.raises(ConfigError, match="not a readable Parquet file"):
        list(rows.read(tmp_path / "bad.parquet"))


def test_parquet_without_pyarrow_names_the_extra(tmp_path, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    (tmp_path / "a.parquet").touch()
    with pytest.raises(ConfigError, match=r"need pyarrow: pip install .jetspec_jax\[data\]"):
        list(rows.read(tmp_path / "a.parquet"))


def build(values, longest=64, text="all", tokenizer=None):
    given = [rows.Row(f"f:{i}", str(i), v) for i, v in enumerate(values)]
    return examples.build(given, tokenizer or Letters(), (1,), longest, None, text)


def shown(example):
    """Learnt characters in capitals' place: themselves, all others as dots."""
    return "".join(ALPHABET[t] if k else "." for t, k in zip(example.tokens, example.learnt, strict=True))


def test_only_what_the_assistant_says_is_learnt():
    kept, report = build(
        [
            {"messages": [user("hi"), answer("yes")]},
            {"prompt": "hi", "response": "no"},
            {"messages": [{"role": "system", "content": "s"}, user("a"), answer("bc"), user("d"), answer("ef")]},
            {"text": "plain"},
            {"messages": [user("a"), answer("bc"), user("and then")]},
        ]
    )
    assert [shown(e) for e in kept] == [".....yes$", ".....no$", ".......bc$....ef$", "plain", "....bc$"]
    assert report.lines() == ["data: 5 rows read, 5 used, 0 dropped"]


BAD = [
    ({"messages": []}, "no messages"),
    ({"messages": [{"role": "system", "content": "s"}]}, "a system message alone"),
    ({"messages": [user("a"), user("b"), answer("cd")]}, "two turns of one speaker in a row"),
    ({"messages": [answer("ab"), user("b")]}, "the assistant speaks first"),
    ({"messages": [user("a"), {"role": "assistant"}]}, "a message without content"),
    ({"messages": [user("a"), answer(None)]}, "a message without content"),
    ({"messages": [user("a"), answer("  ")]}, "a message without content"),
    ({"messages": None}, "neither messages, prompt and response, nor text"),
    ({"messages": "hi"}, "messages is no list"),
    ({"messages": [{"role": "critic", "content": "x"}]}, "a role other than system, user, assistant and tool"),
    ({"messages": [user("a")]}, "no assistant turn"),
    ({"prompt": "a", "response": None}, "no assistant turn"),
    ({"text": ""}, "a text without content"),
    ([1, 2], "not a JSON object"),
    (None, "not a JSON object"),
]


@pytest.mark.parametrize(("value", "reason"), BAD, ids=[r for _, r in BAD])
def test_rows_that_give_nothing_are_counted_by_reason(value, reason):
    good = {"prompt": "hi", "response": "yes"}
    kept, report = build([good, value, good])
    assert len(kept) == 2 and report.dropped == {reason: 1} and report.read == report.used + report.dropped.total()
    assert reason in report.lines()[1] and "f:1" in report.lines()[1]


def test_limits_of_length_are_exact():
    row = {"prompt": "hi", "response": "yes"}  # @hi$>yes$ has 9 tokens, 4 of them learnt
    kept, report = build([row], longest=9)
    assert kept[0].tokens.size == 9 and not report.truncated
    kept, report = build([row], longest=7)
    assert kept[0].tokens.size == 7 and report.truncated == 1
    long = {"prompt": "h" * 20, "response": "yes"}
    _, report = build([row, long], longest=9)
    assert report.dropped == {"the answer begins after the sequence length": 1}
    _, report = build([row, long], longest=24)  # one answer token before the cut: no label
    assert report.dropped == {"the answer begins after the sequence length": 1}
    assert len(build([row, long], longest=25)[0]) == 2
    kept, _ = build([{"prompt": "hi", "response": "y"}])  # one token and the end token
    assert shown(kept[0]) == ".....y$"
    _, report = build([row, {"text": "x"}])
    assert report.dropped == {"an answer of one token": 1}


def test_a_wrong_template_stops_with_an_example():
    with pytest.raises(ConfigError, match=r"2 of 2 samples have no supervised token .*example: f:0: .*assistant. hi"):
        build([{"text": "[assistant] hi"}] * 2, text="assistant")
    kept, _ = build([{"text": "@a$>bc$@d$>ef$"}], text="assistant")
    assert shown(kept[0]) == "....bc$....ef$"
    with pytest.raises(ConfigError, match="the data set is empty"):
        build([])
    with pytest.raises(ConfigError, match="no tokenizer"):
        examples.build([], None, (), 8, None, "all")


class Forgetful(Letters):
    """Writes earlier answers without what was thought, and a mark before the last, as Qwen3's template does."""

    def render_chat(self, messages, thinking=None, answer_follows=True):
        text = ""
        for i, m in enumerate(messages):
            said = m["content"]
            if m["role"] == "assistant":
                thought, _, said = said.rpartition("</think>")
                said = f"0{thought}0" + said if i == len(messages) - 1 else said
            text += {"system": "<", "user": "@", "assistant": ">"}[m["role"]] + said + "$"
        return text + (">00" if answer_follows and thinking is False else ">" * answer_follows)


def test_templates_that_rewrite_earlier_turns():
    value = {"messages": [user("a"), answer("bc"), user("d"), answer("ef")]}
    given = [rows.Row("f:0", "0", value)]
    kept, _ = examples.build(given, Forgetful(), (1,), 64, False, "all")
    assert shown(kept[0]) == "....bc$......ef$"
    value = {"messages": [user("a"), answer("ef is it</think>ef")]}
    kept, _ = examples.build([rows.Row("f:0", "0", value)], Forgetful(), (1,), 64, True, "all")
    assert shown(kept[0]).endswith("0ef$") and shown(kept[0]).startswith("....0ef is it")


def test_a_byte_order_mark_and_the_line_of_a_bad_byte(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"text": "one"}\n\n{"text": "two"}\n')
    assert [(r.value["text"], r.where) for r in rows.read(path)] == [("one", f"{path}:1"), ("two", f"{path}:3")]
    path.write_bytes(b'{"text": "one"}\n' * 39 + '{"text": "café"}\n'.encode("latin-1") + b'{"text": "one"}\n' * 9)
    found = rows.read(path)
    assert len([next(found) for _ in range(39)]) == 39
    with pytest.raises(ConfigError, match=r"a.jsonl:40: not UTF-8 text .invalid continuation byte"):
        next(found)


def test_a_byte_order_mark_in_the_files_of_a_data_set(tmp_path):
    write(tmp_path / "train" / "a.jsonl", [{"text": "x"}])
    (tmp_path / "dataset_dict.json").write_bytes(b'\xef\xbb\xbf{"splits": ["train"]}')
    assert len(list(rows.read(tmp_path))) == 1


def test_an_answer_that_the_limit_cut_is_not_learnt_as_ended():
    """`regenerate` says so of its rows; only what the target wrote is learnt."""
    value = {"messages": [user("ab"), answer("cd"), user("e"), answer("fgh")]}
    ended, _ = build([value | {"finish_reason": "stop"}])
    cut, _ = build([value | {"finish_reason": "length"}])
    assert shown(ended[0]) == ".....cd$....fgh$" and shown(cut[0]) == ".....cd$....fgh."
    given = [rows.Row("f:0", "0", value), rows.Row("f:1", "1", value | {"finish_reason": "length"})]
    kept, report = examples.build(given, Letters(), (1,), 64, None, "all", drop_truncated=True)
    assert [e.identity for e in kept] == ["0"] and dict(report.dropped) == {"cut at the limit": 1}


def test_tokens_that_the_model_has_not_are_not_learnt():
    given = [rows.Row("f:0", "0", {"text": "012"}), rows.Row("f:1", "1", {"text": "az"})]
    kept, report = examples.build(given, Letters(), (1,), 64, None, "all", vocabulary=20)
    assert [e.identity for e in kept] == ["0"] and dict(report.dropped) == {turns.BEYOND: 1}


def test_rows_that_would_be_cut_can_be_left_out():
    given = [rows.Row("f:1", "1", {"prompt": "hi", "response": "yes"}), rows.Row("f:2", "2", {"text": "a" * 40})]
    cut, report = examples.build(given, Letters(), (1,), 20, None, "all")
    assert [e.tokens.size for e in cut] == [9, 20] and report.truncated == 1
    kept, report = examples.build(given, Letters(), (1,), 20, None, "all", drop_truncated=True)
    assert [e.identity for e in kept] == ["1"] and report.dropped == {"longer than the sequence length": 1}
