"""Text to tokens and back, the only file that imports transformers and tokenizers."""

from __future__ import annotations

import os
import pathlib
import textwrap
from collections.abc import Sequence
from typing import Any

from jetspec_jax.fields import ConfigError, Fields
from jetspec_jax.files import bounded, conversation, text

MOST_TEMPLATE = 1 << 20  # characters; the longest in use have 50,000
MOST_WRITTEN = 1 << 25  # characters
RENDER_SECONDS = 3.0  # of processor time; a conversation takes milliseconds
FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")
READ = (".json", ".jinja", ".txt", ".model")  # endings of what transformers may read
NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4  # token types of GGUF files that matter here
# What ends a turn whatever a GGUF file names: marks, which some converters give another type, and a word that is only
# an end where its type says so.
END_MARKS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")
END_WORDS = ("</s>",)
ENDS = tuple(f"tokenizer.ggml.{x}_token_id" for x in ("eos", "eot", "eom"))  # of a text, a turn, a tool's question


class Tokenizer:
    """Wraps a Hugging Face tokenizer in the few calls that decoding needs."""

    def __init__(self, inner):
        self._inner = inner

    @property
    def has_chat_template(self) -> bool:
        return bool(self._inner.chat_template)

    @property
    def size(self) -> int:
        """Tokens that it knows, added ones included; a model may have more rows."""
        return len(self._inner)

    @property
    def knows_thinking(self) -> bool:
        """Whether the chat template has a switch for thinking (`enable_thinking`, as Qwen3's)."""
        return "enable_thinking" in str(self._inner.chat_template or "")

    @property
    def eos(self) -> tuple[int, ...]:
        """The tokenizer's own end token, if it has one."""
        return () if self._inner.eos_token_id is None else (self._inner.eos_token_id,)

    def encode(self, text: str, begin: bool = False) -> list[int]:
        """Returns the ids of text as it stands; special tokens that are written out in it are one id each.

        begin: add what the tokenizer puts before a text of its own (a Llama's begin token; nothing for Qwen3), unless
        the text brings it.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise ConfigError("prompt: not Unicode text (half a surrogate pair, or bytes that are not UTF-8)") from None
        bos = self._inner.bos_token
        return self._inner.encode(text, add_special_tokens=begin and not (bos and text.startswith(bos)))

    def encode_chat(self, messages: Sequence[dict[str, Any]], thinking: bool | None = None) -> list[int]:
        """Returns the ids of a conversation through the chat template, ready for the assistant's turn.

        messages: {"role", "content"}, oldest first, as `conversation.checked` reads them. thinking: passed to templates
        that know it, None leaves it out.
        """
        return self.encode(self.render_chat(messages, thinking))

    def render_chat(
        self, messages: Sequence[dict[str, Any]], thinking: bool | None = None, answer_follows: bool = True
    ) -> str:
        """Returns the conversation as the chat template writes it.

        answer_follows: open the assistant's turn at the end.

        Raises:
          ConfigError: the template refuses the messages, computes for too long, or has no place for what is in them.
        """
        turns, template = conversation.checked(messages), str(self._inner.chat_template or "")
        if len(template) > MOST_TEMPLATE:
            raise ConfigError(f"messages: the chat template has {len(template):,} characters, which none needs")
        for key in conversation.CALLS:
            if key not in template and any(turn.get(key) for turn in turns):
                raise ConfigError(f"messages: the chat template has no place for {key}; take them out")
        extra = {} if thinking is None else {"enable_thinking": thinking}
        render = lambda: self._inner.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=answer_follows, **extra
        )
        try:
            written = bounded.run(render, RENDER_SECONDS, _looped())
        except Exception as error:  # templates raise what they like
            raise ConfigError(f"messages: the chat template refuses them ({_line(error)})") from None
        if len(written) > MOST_WRITTEN:
            raise ConfigError(f"messages: the chat template makes {len(written):,} characters of them; shorten them")
        return written

    def decode(self, ids: Sequence[int]) -> str:
        """Returns the text of ids; special tokens are left out, spaces are kept as they are."""
        return self._inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def stream_decoder(self) -> StreamDecoder:
        """Returns a decoder for ids that come in pieces."""
        return StreamDecoder(self)


class StreamDecoder:
    """Turns ids into text piece by piece: the pieces join to `decode` of all ids, and none ends inside a character.

    Replacement characters at the end are held back, for a token may hold a part of a character. (tokenizers'
    DecodeStream has no end: what it holds back then is lost, so its pieces do not join to the text of ids that stop
    inside a character.)
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._anchor = 0  # ids before it are settled: their text never changes
        self._shown = 0  # characters of the text from the anchor on

    def push(self, ids: Sequence[int]) -> str:
        """Returns the text that these ids complete."""
        self._ids += ids
        text = self._tokenizer.decode(self._ids[self._anchor :])
        whole = text.rstrip("\ufffd")
        fresh, self._shown = whole[self._shown :], max(self._shown, len(whole))
        if whole == text and len(self._ids) - self._anchor > 64:  # keep the work of a push bounded
            keep = self._ids[-8:]
            head = self._tokenizer.decode(self._ids[self._anchor : -8])
            if text == head + self._tokenizer.decode(keep):
                self._anchor, self._shown = len(self._ids) - 8, len(text) - len(head)
        return fresh

    def finish(self) -> str:
        """Returns what was held back, as `decode` shows it."""
        text = self._tokenizer.decode(self._ids[self._anchor :])
        fresh, self._shown = text[self._shown :], len(text)
        return fresh


def from_folder(folder: pathlib.Path) -> Tokenizer | None:
    """Returns the tokenizer of a Hugging Face folder, None where there is none. Code in the folder is never run."""
    if not any((folder / name).is_file() for name in FILES):
        return None
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.suffix in READ and path.exists() and not path.is_dir():
            text.bounded(path)
    transformers = _transformers()
    try:
        inner = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the files provoke
        for path in sorted(folder.glob("*token*.json")):
            text.read_json(path)  # says which file it is, where one is no JSON
        raise ConfigError(f"{folder}: its tokenizer cannot be read ({_line(error)})") from None
    if isinstance(inner.chat_template, str):
        inner.chat_template = inner.chat_template.removeprefix("\ufeff")  # of the file, else a token of every prompt
    return Tokenizer(inner)


def end_tokens_of_folder(folder: pathlib.Path) -> tuple[int, ...]:
    """Returns the end token of a folder's tokenizer, without the seconds that importing transformers takes.

    Files that cannot be understood give none: whoever needs the tokenizer is told then.
    """

    def read(name: str) -> Fields:
        try:
            return Fields(text.read_json(folder / name), name)
        except ConfigError:
            return Fields({}, name)

    config = read("tokenizer_config.json")
    end = config.raw.get("eos_token") or read("special_tokens_map.json").raw.get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end  # written as text or as an object
    if not isinstance(end, str):
        return ()
    try:
        for number, token in config.table("added_tokens_decoder").raw.items():
            if Fields(token, "").text("content") == end and number.isdecimal() and len(number) < 10:
                return (int(number),)
        for token in read("tokenizer.json").tables("added_tokens"):
            fields = Fields(token, "")
            if fields.text("content") == end:
                return (fields.whole("id", 0),)
    except ConfigError:
        pass
    return ()


def from_gguf(file) -> Tokenizer | None:
    """Returns the byte-level BPE tokenizer in the metadata of a `gguf_file.GGUF`; None where there is none."""
    fields: Fields = file.fields
    if not fields.has("tokenizer.ggml.tokens"):
        return None
    tokens = fields.texts("tokenizer.ggml.tokens")
    if fields.text("tokenizer.ggml.model", "") != "gpt2":
        raise fields.wrong("tokenizer.ggml.model", "not supported; only gpt2 is")
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers, processors

    transformers = _transformers()
    splits: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "qwen2": [
            pre_tokenizers.Split(tokenizers.Regex(QWEN2_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    pre = fields.text("tokenizer.ggml.pre", "gpt-2")
    if pre not in splits:
        raise fields.wrong("tokenizer.ggml.pre", f"not supported; only {', '.join(splits)} are")
    kinds, special = _kinds(fields, tokens), _special(fields, tokens)
    merges: list[Any] = [tuple(line.split(" ", 1)) for line in fields.texts("tokenizer.ggml.merges")]
    named = lambda key: fields.whole(key, 0, len(tokens) - 1) if fields.has(key) else None
    begin, end = named("tokenizer.ggml.bos_token_id"), named("tokenizer.ggml.eos_token_id")
    try:
        inner = tokenizers.Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
        inner.pre_tokenizer = pre_tokenizers.Sequence(splits[pre])
        if pre == "qwen2":
            inner.normalizer = normalizers.NFC()
        inner.decoder = decoders.ByteLevel()
        token = lambda t, special: tokenizers.AddedToken(t, special=special, normalized=False)
        inner.add_special_tokens([token(tokens[i], True) for i in sorted(special)])
        whole = [i for i, kind in enumerate(kinds) if kind == USER_DEFINED and i not in special]
        inner.add_tokens([token(tokens[i], False) for i in whole])
        if begin is not None and fields.flag("tokenizer.ggml.add_bos_token"):
            first = [(tokens[begin], begin)]
            inner.post_processor = processors.TemplateProcessing(single=[tokens[begin], "$A"], special_tokens=first)
    except ConfigError:
        raise
    except Exception as error:  # a merge of something that is no token
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({_line(error)})"
        ) from None
    return Tokenizer(
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=inner,
            eos_token=None if end is None else tokens[end],
            bos_token=None if begin is None else tokens[begin],
            chat_template=fields.text("tokenizer.chat_template", "") or None,
        )
    )


QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def end_tokens(file, vocabulary: int) -> tuple[int, ...]:
    """Returns the end tokens of a GGUF file for a model of `vocabulary` tokens: those it names, and the usual ones."""
    fields: Fields = file.fields
    tokens = fields.texts("tokenizer.ggml.tokens")
    usual = {i for i in _usual_ends(fields, tokens) if i < vocabulary}
    return tuple(sorted(usual | _named_ends(fields, vocabulary)))


def _named_ends(fields: Fields, vocabulary: int) -> set[int]:
    """Returns the end tokens that a GGUF file names."""
    return {fields.whole(key, 0, vocabulary - 1) for key in ENDS if fields.has(key)}


def _usual_ends(fields: Fields, tokens: Sequence[str]) -> set[int]:
    """Returns tokens that end a turn by what they are; none of a file without types, for all of them are plain text."""
    if not fields.has("tokenizer.ggml.token_type"):
        return set()
    marks = (NORMAL, CONTROL, USER_DEFINED)
    return {
        i
        for i, (token, kind) in enumerate(zip(tokens, _kinds(fields, tokens), strict=True))
        if (token in END_MARKS and kind in marks) or (token in END_WORDS and kind == CONTROL)
    }


def _special(fields: Fields, tokens: Sequence[str]) -> set[int]:
    """Returns tokens of a GGUF file that are left out of text: by their type, and whatever ends a turn."""
    typed = {i for i, kind in enumerate(_kinds(fields, tokens)) if kind in (CONTROL, UNKNOWN)}
    return typed | _usual_ends(fields, tokens) | _named_ends(fields, len(tokens))


def _kinds(fields: Fields, tokens: Sequence[str]) -> Sequence[int]:
    """Returns the type of every token; all are plain where a file lists none."""
    kinds = fields.wholes("tokenizer.ggml.token_type") or [NORMAL] * len(tokens)
    if len(kinds) != len(tokens):
        raise ConfigError(f"{fields.where}: tokenizer.ggml.token_type: {len(kinds)} entries for {len(tokens)} tokens")
    return kinds


def _looped() -> set[str]:
    """Returns the files whose loops a template can make long; `<template>` is jinja's name for a template.

    All of jinja that rendering needs is imported here, where no time is counted.
    """
    import jinja2.ext
    import jinja2.filters
    import jinja2.sandbox
    import jinja2.utils

    return {"<template>", *(str(module.__file__) for module in (jinja2.filters, jinja2.utils, textwrap))}


def _line(error: Exception) -> str:
    """Returns the first line of an error's text, shortened."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:200]


def _transformers():
    """Imports transformers, late (it takes seconds) and without its word about a missing torch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers
