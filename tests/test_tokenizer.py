"""Text in and out: ids, templates, and text that comes in pieces without a broken character."""

import json
import os
import sys
import threading

import bpe
import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from jetspec_jax.config import ConfigError
from jetspec_jax.files import tokenizer

SAMPLE = "Hello 👩‍👩‍👧‍👦 世界 e\u0301 नमस्ते \U0001f3f4\U000e0067\u0000\n\ttabs   spaces \ufeff é"
BROKEN = "\ufffd"


@pytest.fixture(scope="module")
def tok(tmp_path_factory) -> tokenizer.Tokenizer:
    return tokenizer.from_folder(bpe.make(tmp_path_factory.mktemp("tokenizer")))


@pytest.fixture(scope="module")
def fallback() -> tokenizer.Tokenizer:
    """The other kind, with byte tokens for what has none of its own: a half character decodes to several U+FFFD."""
    import transformers

    vocab = {"<unk>": 0} | {f"<0x{i:02X}>": i + 1 for i in range(256)} | {"▁": 257, "a": 258, "e": 259, "▁a": 260}
    inner = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[("▁", "a")], unk_token="<unk>", byte_fallback=True))
    inner.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    inner.decoder = decoders.Sequence(steps)
    return tokenizer.Tokenizer(transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="<unk>"))


def pieces_of(tok, ids, sizes) -> list[str]:
    """Pushes ids in pieces of the given sizes (then one by one), and finishes."""
    stream, pieces, at = tok.stream_decoder(), [], 0
    while at < len(ids):
        size = sizes.pop(0) if sizes else 1
        pieces.append(stream.push(ids[at : at + size]))
        at += size
    return [*pieces, stream.finish()]


class TestEncode:
    # A text that spells a special token is that token, and special tokens are no text.
    @given(st.text().filter(lambda text: "<|" not in text))
    @example(SAMPLE)
    @example("")
    @example(" ")
    @example(" don 't , or . ")  # what a clean-up of spaces would change
    def test_text_survives(self, tok, text):
        assert tok.decode(tok.encode(text)) == text

    def test_nothing_is_added(self, tok):
        assert tok.encode("") == []
        assert not {0, 1, 2} & set(tok.encode("a b"))

    def test_special_tokens_are_one_id_and_left_out_of_text(self, tok):
        ids = tok.encode("<|im_start|>a<|im_end|><|endoftext|>b")
        assert [i for i in ids if i < 3] == [1, 2, 0]
        assert tok.decode(ids) == "ab"
        assert tok.decode([2]) == ""
        assert tok.eos == (2,)

    def test_chat_template(self, tok):
        messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "é?"}]
        text = "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\né?<|im_end|>\n<|im_start|>assistant\n"
        assert tok.has_chat_template
        assert tok.encode_chat(messages) == tok.encode(text)
        assert tok.encode_chat(messages, thinking=True) == tok.encode(text)
        assert tok.encode_chat(messages, thinking=False) == tok.encode(text + "<think>\n\n</think>\n\n")

    def test_the_switch_for_thinking_is_known_from_the_template(self, tok, tmp_path):
        assert tok.knows_thinking
        assert not tokenizer.from_folder(
            bpe.make(tmp_path / "a", bpe.TEMPLATE.replace("enable_thinking", "deep"))
        ).knows_thinking
        assert not tokenizer.from_folder(bpe.make(tmp_path / "b", None)).knows_thinking

    def test_a_begin_token_that_the_tokenizer_adds(self, tmp_path):
        """As Llama's: added to raw text, not to rendered text, and not twice."""
        from tokenizers import processors

        folder = bpe.make(tmp_path / "t")
        inner = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        inner.post_processor = processors.TemplateProcessing(
            single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", 0)]
        )
        inner.save(str(folder / "tokenizer.json"))
        config = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps(config | {"bos_token": "<|endoftext|>"}))
        tok = tokenizer.from_folder(folder)
        assert tok.encode("a", begin=True) == [0, *tok.encode("a")]
        assert tok.encode("<|endoftext|>a", begin=True) == [0, *tok.encode("a")]
        assert tok.encode_chat([{"role": "user", "content": "a"}])[0] == 1

    @pytest.mark.parametrize(
        "messages, words",
        [
            ([{"role": "wizard", "content": "x"}], "messages: the chat template refuses them"),
            ([{"content": "x"}], r"messages\[0\]: role is None"),
        ],
    )
    def test_messages_that_are_refused(self, tok, messages, words):
        with pytest.raises(ConfigError, match=words) as error:
            tok.encode_chat(messages)
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize(
        "template, words",
        [
            ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "more than 0.2 seconds"),
            ("{% macro f(n) %}{% if n %}{{ f(n-1) }}{{ f(n-1) }}{% endif %}{% endmacro %}{{ f(99) }}", "more than 0.2"),
            ("{% for a in range(99999) %}{{ range(99999) | list | length }}{% endfor %}", "more than 0.2 seconds"),
            ("{{ ('a ' * 2000000) | wordwrap(1) }}", "more than 0.2 seconds"),
            ("{{ 'a' * 1001 }}", "makes 1,001 characters"),
            ("{% for m in messages %}x{% endfor %}" * 1_400_000, "the chat template has 50,400,000 characters"),
        ],
        ids=["loops", "macros", "lists", "a loop of a filter", "much text", "50 MB"],
    )
    def test_a_template_that_never_ends_is_one_line(self, tmp_path, monkeypatch, template, words):
        """In any thread, and tracing is as it was before."""
        monkeypatch.setattr(tokenizer, "RENDER_SECONDS", 0.2)
        monkeypatch.setattr(tokenizer, "MOST_WRITTEN", 1000)
        tok, said = tokenizer.from_folder(bpe.make(tmp_path / "t", template)), []

        def render():
            with pytest.raises(ConfigError) as error:
                tok.encode_chat([{"role": "user", "content": "x"}])
            said.append(str(error.value))

        thread = threading.Thread(target=render, daemon=True)
        thread.start()
        thread.join(30)
        assert said and words in said[0] and "\n" not in said[0] and len(said[0]) < 200
        before = sys.gettrace()
        render()
        assert sys.gettrace() is before

    def test_a_byte_order_mark_is_no_part_of_a_template(self, tmp_path, tok):
        folder = bpe.make(tmp_path / "t", None)
        (folder / "chat_template.jinja").write_bytes(b"\xef\xbb\xbf" + bpe.TEMPLATE.encode())
        messages = [{"role": "user", "content": "x"}]
        assert tokenizer.from_folder(folder).encode_chat(messages) == tok.encode_chat(messages)

    def test_no_template(self, tmp_path):
        assert not tokenizer.from_folder(bpe.make(tmp_path / "t", None)).has_chat_template

    def test_no_tokenizer(self, tmp_path):
        (tmp_path / "config.json").write_text("{}")
        assert tokenizer.from_folder(tmp_path) is None

    @pytest.mark.parametrize("content", ["{", "", "[]", '{"model": {"type": "Martian"}}'])
    def test_a_broken_tokenizer_is_one_line(self, tmp_path, content):
        bpe.make(tmp_path / "t")
        (tmp_path / "t" / "tokenizer.json").write_text(content)
        with pytest.raises(ConfigError, match=r"tokenizer cannot be read|tokenizer.json: (not JSON|a JSON)") as error:
            tokenizer.from_folder(tmp_path / "t")
        assert str(tmp_path / "t") in str(error.value) and "\n" not in str(error.value)

    @pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"])
    @pytest.mark.parametrize("content", ["{", "", "[]", "NaN", '{"a":' * 10**5])
    def test_the_file_that_is_broken_is_named(self, tmp_path, name, content):
        bpe.make(tmp_path / "t")
        (tmp_path / "t" / name).write_text(content)
        with pytest.raises(ConfigError, match=f"{name}: ") as error:
            tokenizer.from_folder(tmp_path / "t")
        assert "\n" not in str(error.value)

    @pytest.mark.parametrize("name", ["chat_template.jinja", "vocab.txt", "additional_chat_templates/x.jinja"])
    @pytest.mark.parametrize("kind", ["device", "pipe", "long"])
    def test_files_that_never_end_are_not_handed_on(self, tmp_path, name, kind, monkeypatch):
        path = bpe.make(tmp_path / "t") / name
        path.parent.mkdir(exist_ok=True)
        path.unlink(missing_ok=True)
        monkeypatch.setattr(tokenizer.text, "MOST", 10**6)
        if kind == "device":
            path.symlink_to("/dev/zero")
        elif kind == "pipe":
            os.mkfifo(path)
        else:
            path.write_bytes(bytes(10**6 + 1))
        monkeypatch.setattr(tokenizer, "_transformers", None)  # it is not reached
        with pytest.raises(ConfigError, match=rf"{path.name}: (a device|a pipe|more than)"):
            tokenizer.from_folder(tmp_path / "t")

    @pytest.mark.parametrize("end", ["E", {"content": "E", "special": True}])
    @pytest.mark.parametrize("named_in", ["tokenizer_config.json", "special_tokens_map.json"])
    def test_the_end_token_without_transformers(self, tmp_path, end, named_in):
        (tmp_path / named_in).write_text(json.dumps({"eos_token": end}))
        assert tokenizer.end_tokens_of_folder(tmp_path) == ()
        (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 4, "content": "E"}]}))
        assert tokenizer.end_tokens_of_folder(tmp_path) == (4,)

    @pytest.mark.parametrize(
        "content",
        ["{", "[1]", '{"eos_token": 3}', '{"eos_token": "E", "added_tokens_decoder": [1]}', '{"eos_token": null}'],
    )
    def test_an_end_token_that_cannot_be_found(self, tmp_path, content):
        (tmp_path / "tokenizer_config.json").write_text(content)
        (tmp_path / "tokenizer.json").write_text('{"added_tokens": [7, {"id": "4", "content": "E"}]}')
        assert tokenizer.end_tokens_of_folder(tmp_path) == ()

    def test_code_in_the_folder_is_not_run(self, tmp_path):
        folder = bpe.make(tmp_path / "t")
        marker = tmp_path / "ran"
        (folder / "evil.py").write_text(f"open({str(marker)!r}, 'w')\nclass T: pass\n")
        config = json.loads((folder / "tokenizer_config.json").read_text())
        config["auto_map"] = {"AutoTokenizer": ["evil.T", "evil.T"]}
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        try:
            tokenizer.from_folder(folder)
        except ConfigError as error:
            assert "\n" not in str(error)
        assert not marker.exists()


def check(tok, ids, sizes) -> None:
    whole = tok.decode(ids)
    pieces = pieces_of(tok, ids, list(sizes))
    assert "".join(pieces) == whole
    assert sum(p.count(BROKEN) for p in pieces) == whole.count(BROKEN)
    assert not any(p.endswith(BROKEN) for p in pieces[:-1])


class TestStream:
    @given(st.text(max_size=60), st.lists(st.integers(0, 6), max_size=40))
    @example(SAMPLE, [])
    @example("", [0, 0])
    def test_pieces_of_text_join_to_it(self, tok, text, sizes):
        ids = tok.encode(text)
        check(tok, ids, sizes)
        assert "".join(pieces_of(tok, ids, list(sizes))) == text

    @given(st.lists(st.integers(0, 299), max_size=300), st.lists(st.integers(0, 20), max_size=30))
    def test_pieces_of_any_ids_join_to_their_text(self, tok, ids, sizes):
        """Half characters, special tokens between halves, in runs long enough for settled ids to be dropped."""
        check(tok, ids, sizes)

    @given(st.lists(st.sampled_from("👩é世 aж\u0301\U0001f3f4"), min_size=60, max_size=250), st.integers(1, 9))
    def test_long_text(self, tok, letters, size):
        ids = tok.encode("".join(letters))
        check(tok, ids, [size] * len(ids))

    @given(st.data())
    def test_half_characters_around_the_border_of_settled_ids(self, tok, data):
        byte = {b: tok.encode(chr(b) if b < 128 else "")[:1] for b in range(128)}
        emoji, special = tok.encode("\U0001f600"), [0]
        assert len(emoji) == 4
        fill = data.draw(st.integers(50, 75))
        tail = data.draw(st.lists(st.sampled_from([*emoji, *special, byte[97][0]]), max_size=40))
        check(tok, byte[97] * fill + tail, [1] * 200)

    def test_an_emoji_over_several_pieces(self, tok):
        ids = tok.encode("a😀b")
        stream = tok.stream_decoder()
        assert [stream.push([i]) for i in ids] == ["a", "", "", "", "😀", "b"]
        assert stream.finish() == ""

    def test_whole_characters_before_a_half_one_are_shown_at_once(self, tok):
        ids = tok.encode("ab😀")
        assert tok.stream_decoder().push(ids[:-1]) == "ab"

    def test_a_character_that_never_comes_is_shown_at_the_end(self, tok):
        stream = tok.stream_decoder()
        ids = tok.encode("a😀")[:-1]
        assert stream.push(ids) == "a"
        assert stream.finish() == BROKEN
        assert tok.decode(ids) == "a" + BROKEN

    def test_a_replacement_character_that_the_model_wrote(self, tok):
        check(tok, tok.encode(f"a{BROKEN}b{BROKEN}{BROKEN}"), [1] * 40)

    def test_special_tokens_are_left_out(self, tok):
        stream = tok.stream_decoder()
        assert stream.push(tok.encode("a<|im_end|>")) == "a"
        assert stream.push([0]) == ""
        assert stream.finish() == ""

    def test_the_work_of_a_push_is_bounded(self, tok):
        longest = 0

        class Spy(tokenizer.Tokenizer):
            def decode(self, ids):
                nonlocal longest
                longest = max(longest, len(ids))
                return super().decode(ids)

        stream = Spy(tok._inner).stream_decoder()
        text = "".join(stream.push([i]) for i in tok.encode("the fox 世界 " * 200))
        assert text + stream.finish() == "the fox 世界 " * 200
        assert longest < 100

    @given(st.text(st.sampled_from("ae 世é😀x\n"), max_size=150), st.lists(st.integers(0, 6), max_size=40))
    def test_byte_fallback(self, fallback, text, sizes):
        ids = fallback.encode(text)
        check(fallback, ids, sizes)
