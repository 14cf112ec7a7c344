"""Rows of prompt files: one parser, and one line about whatever is none."""

import dataclasses
import json
import os
import pathlib

import bpe
import pytest
import tiny
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from jetspec_jax.config import ConfigError, SamplingConfig
from jetspec_jax.fields import shown
from jetspec_jax.files import prompts, text, tokenizer

OPTIONS = tuple(name for name in prompts.OPTIONS if name != "eos")
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


def write(tmp_path, *rows) -> str:
    path = tmp_path / "p.jsonl"
    path.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(path)


def refused(path, options=(), encode=None) -> str:
    with pytest.raises(ConfigError) as error:
        rows = prompts.read(path, options)
        for row in rows if encode else ():
            row.encode(encode)
    line = str(error.value)
    assert "\n" not in line and str(path) in line and len(line) < 500 + len(str(path)), line
    return line


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    tok = tokenizer.from_folder(bpe.make(tmp_path_factory.mktemp("tokenizer")))

    return dataclasses.replace(tiny.hash_target(300), _tokenizer=lambda: tok, source="the target")


def test_the_three_kinds(tmp_path, target):
    path = write(
        tmp_path,
        {"prompt": "hi", "id": 7},
        "",
        {"messages": [{"role": "user", "content": "hi"}], "thinking": True},
        {"prompt_ids": [1, 2]},
        {"prompt": "hi", "thinking": None, "id": {"any": "thing"}},
    )
    rows = prompts.read(path)
    assert [row.where for row in rows] == [f"{path}:{n}" for n in (1, 3, 4, 5)]
    assert [row.id for row in rows] == [7, None, None, {"any": "thing"}]
    assert [row.rendered for row in rows] == [True, True, False, True]
    on, off = (target.tokenizer.encode_chat([{"role": "user", "content": "hi"}], mode) for mode in (True, False))
    assert [row.encode(target) for row in rows] == [off, on, [1, 2], off]
    assert [row.encode(target, True) for row in rows] == [on, on, [1, 2], on]
    assert [row.mode(False) for row in rows] == [False, True, None, False]
    assert rows[0].encode(target, chat=False) == target.tokenizer.encode("hi")
    assert prompts.encode(target, path) == [off, on, [1, 2], off]
    with pytest.raises(ConfigError, match=r"p\.jsonl:3: thinking=True: the chat template is left out"):
        rows[1].encode(target, chat=False)


def test_options_of_a_row_go_over_the_commands(tmp_path):
    path = write(tmp_path, {"prompt_ids": [1], "top_p": 0.5, "stop_token_ids": [3]}, {"prompt_ids": [2]})
    first, second = (row.sampling(SamplingConfig(9, top_p=0.9)) for row in prompts.read(path, OPTIONS))
    assert (first.top_p, first.stop_token_ids, first.max_new_tokens) == (0.5, (3,), 9)
    assert second == SamplingConfig(9, top_p=0.9)
    assert ":1: stop_token_ids: options of a line are for decode.py" in refused(path)
    assert "unknown key 'eos'" in refused(write(tmp_path, {"prompt_ids": [1], "eos": [3]}), OPTIONS)
    odd = prompts.read(write(tmp_path, {"prompt_ids": [1], "top_p": 7}), OPTIONS)[0]
    with pytest.raises(ConfigError, match=r"p\.jsonl:1: top_p=7"):
        odd.sampling(SamplingConfig())


@pytest.mark.parametrize(
    "row, words",
    [
        ({"prompt": 3}, "prompt is 3; prompt must be text"), ({"prompt": ""}, "prompt is ''; it is empty"),
        ({"messages": "x"}, "messages is 'x'; prompt must be text, messages a list of {role, content}"),
        ({"messages": []}, "messages is []; it is empty"), ({"messages": [3]}, "messages[0]: a JSON object"),
        ({"messages": [{"content": "x"}]}, "messages[0]: role is None; a text"),
        ({"messages": [{"role": "user"}]}, "messages[0]: content is None; text, or a list of text parts"),
        ({"messages": [{"role": "user", "content": 3}]}, "content is 3"),
        ({"messages": [{"role": "a", "content": None, "tool_calls": [3]}]}, "tool_calls[0] is 3"),
        ({"messages": [{"role": "u", "content": [{"type": "image_url"}]}]}, "content[0] is of type 'image_url'"),
        ({"prompt_ids": []}, "prompt_ids is []"), ({"prompt_ids": [1, "2"]}, "prompt_ids[1] is '2'"),
        ({"prompt_ids": [True]}, "prompt_ids a list of ids"), ({"prompt_ids": [-1]}, "-1"),
        ({"prompt_ids": [2**31]}, "2147483648"), ({"prompt_ids": 5}, "prompt_ids is 5"),
        ({"prompt_ids": [10**3999]}, "prompt_ids[0] is 1000"), ({"prompt_ids": [1], "thinking": True}, "thinking with"),
        ('{"prompt_ids": [' + "9" * 5000 + "]}", "a number too long"), ("{", "not JSON"), ("[1]", "a JSON object"),
        ({"prompt": "x", "thinking": "on"}, "thinking is 'on'; true or false"), ({}, "give one of"),
        ({"prompt": "x", "prompt_ids": [1]}, "give one of"), ({"prompt": "x", "k" * 900: 1}, "unknown key 'kkk"),
        ({"prompt": {"x": "y" * 100_000}}, "yyy"), ("[" * 100_000, "not JSON"), ({"prompt": ["z"] * 100_000}, "..."),
    ],
)  # fmt: skip
def test_rows_that_are_none_are_one_short_line(tmp_path, row, words):
    line = refused(write(tmp_path, {"prompt_ids": [1]}, row))
    assert "p.jsonl:2: " in line and words in line


class TestConversations:
    def ids(self, tmp_path, target, message):
        return prompts.encode(target, write(tmp_path, {"messages": [message, {"role": "user", "content": "b"}]}))[0]

    def test_text_parts_are_joined(self, tmp_path, target):
        parts = [{"type": "text", "text": "he"}, {"text": "ll"}, "o"]
        whole = self.ids(tmp_path, target, {"role": "user", "content": "hello"})
        assert self.ids(tmp_path, target, {"role": "user", "content": parts}) == whole

    def test_tool_calls_are_rendered_or_refused(self, tmp_path, target):
        call = {"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {}}}]}
        path = write(tmp_path, {"messages": [call]})
        assert ":1: messages: the chat template has no place for tool_calls" in refused(path, encode=target)
        template = bpe.TEMPLATE.replace(
            "{{ m.content }}", "{{ m.content }}{% if m.tool_calls %}{{ m.tool_calls | tojson }}{% endif %}"
        )
        old = write(tmp_path, {"messages": [{"role": "assistant", "content": None, "function_call": {"name": "f"}}]})
        assert ":1: messages: the chat template has no place for function_call" in refused(old, encode=target)
        folder = bpe.make(tmp_path / "t", template)
        knowing = dataclasses.replace(target, _tokenizer=lambda: tokenizer.from_folder(folder))
        shown = knowing.tokenizer.decode(self.ids(tmp_path, knowing, call))
        assert '"name": "f"' in shown and "None" not in shown


class TestFiles:
    def test_a_byte_order_mark_is_no_text(self, tmp_path):
        (tmp_path / "p.jsonl").write_bytes(b'\xef\xbb\xbf{"prompt_ids": [1]}\r\n{"prompt_ids": [2]}\n')
        assert [row.prompt for row in prompts.read(tmp_path / "p.jsonl")] == [[1], [2]]
        (tmp_path / "c.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
        assert text.read_json(tmp_path / "c.json") == {"a": 1}

    def test_a_bad_byte_is_found_in_its_line(self, tmp_path):
        path = tmp_path / "p.jsonl"
        path.write_bytes(b'{"prompt": "x"}\n' * 39 + b'{"prompt": "caf\xe9"}\n')
        assert f"{path}:40: not UTF-8" in refused(path)
        with pytest.raises(ConfigError, match=r"p\.jsonl:40: not UTF-8"):
            text.read(path)

    @pytest.mark.parametrize("reader", [prompts.read, text.read, text.read_json])
    def test_only_regular_files_are_read(self, tmp_path, reader):
        os.mkfifo(tmp_path / "pipe")
        (tmp_path / "link").symlink_to(tmp_path / "pipe")
        for path, kind in (
            (tmp_path / "pipe", "a pipe"), (tmp_path / "link", "a pipe"), ("/dev/zero", "a device"),
            (tmp_path, "a folder"), (tmp_path / "none", "no such file"), (tmp_path / ("x" * 300), "cannot be read"),
            ("nul\0byte", "no such file"),
        ):  # fmt: skip
            with pytest.raises(ConfigError, match=kind) as error:
                reader(pathlib.Path(path))
            assert "\n" not in str(error.value)

    def test_sizes_are_bounded(self, tmp_path, monkeypatch):
        path = tmp_path / "p.jsonl"
        with open(path, "wb") as file:
            file.truncate(1 << 40)  # a hole: it takes no room
        with pytest.raises(ConfigError, match="more than 256 MB"):
            text.read(path)
        monkeypatch.setattr(text, "LINE", 1 << 20)
        assert ":1: a line of more than 1 MB" in refused(path)

    def test_denied(self, tmp_path, monkeypatch):
        def deny(*_):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(text.os, "open", deny)
        assert "cannot be read (Permission denied)" in refused(tmp_path / "p.jsonl")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from(["prompt", "messages", "prompt_ids"]), st.sampled_from(["thinking", "id", *OPTIONS]), st.data())
def test_no_value_of_any_type_is_a_traceback(tmp_path, target, kind, key, data):
    right = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "prompt_ids": [1]}
    row = {kind: data.draw(st.just(right[kind]) | ANYTHING), key: data.draw(ANYTHING)}
    if kind == "messages" and data.draw(st.booleans()):
        row["messages"] = [data.draw(st.fixed_dictionaries({}, optional=dict.fromkeys(
            ("role", "content", "tool_calls"), st.just("user") | ANYTHING)))]  # fmt: skip
    try:
        (found,) = prompts.read(write(tmp_path, row), OPTIONS)
        found.sampling(SamplingConfig())
        assert all(isinstance(i, int) for i in found.encode(target))
    except ConfigError as error:
        assert ("\n" not in str(error) and len(str(error)) < 800) or "typechecking" in str(error)  # only under pytest


def test_values_are_shown_short():
    assert shown("x" * 100_000).count("x") < 60 and len(shown("x" * 100_000)) <= 60
    assert len(shown({"a": ["b" * 50] * 100})) <= 60
    assert shown(10**5000) and len(shown(10**5000)) <= 60
    assert shown("two\nlines") == "'two\\nlines'" and shown([1, 2]) == "[1, 2]"


@pytest.mark.parametrize("value", ["NaN", "[1, Infinity]", "1e400", '{"a": -Infinity}'])
def test_an_id_that_json_has_not(tmp_path, value):
    """Python reads it, and would write lines that nobody else can read."""
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt_ids": [1]}\n{"prompt_ids": [1], "id": ' + value + "}\n")
    with pytest.raises(ConfigError, match=r"rows.jsonl:2: id is .*; it could not be written as JSON"):
        prompts.read(path)
