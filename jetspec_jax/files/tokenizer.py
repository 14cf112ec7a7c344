"""Text to tokens and back, the only file that imports transformers and tokenizers."""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jetspec_jax.fields import ConfigError
from jetspec_jax.files import bounded, conversation

MOST_TEMPLATE = 1 << 20  # characters; the longest in use have 50,000
RENDER_SECONDS = 3.0  # of processor time; a conversation takes milliseconds
FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")
CONTROL, USER_DEFINED = 3, 4  # token types of GGUF files: left out of text, and matched whole
END_NAMES = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>")  # end a turn whatever a GGUF file lists


class Tokenizer:
    """A Hugging Face tokenizer behind the few calls that decoding needs."""

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
        """Ids of text as it stands; special tokens that are written out in it are one id each.

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
        """Ids of a conversation through the chat template, ready for the assistant's turn.

        messages: {"role", "content"}, oldest first, as `conversation.checked` reads them. thinking: passed to templates
        that know it, None leaves it out.
        """
        return self.encode(self.render_chat(messages, thinking))

    def render_chat(
        self, messages: Sequence[dict[str, Any]], thinking: bool | None = None, answer_follows: bool = True
    ) -> str:
        """The conversation as the chat template writes it; `answer_follows` opens the assistant's turn at its end."""
        turns, template = conversation.checked(messages), str(self._inner.chat_template or "")
        if len(template) > MOST_TEMPLATE:
            raise ConfigError(f"messages: the chat template has {len(template):,} characters, which none needs")
        if "tool_calls" not in template and any(turn.get("tool_calls") for turn in turns):
            raise ConfigError("messages: the chat template has no place for tool_calls; take them out")
        extra = {} if thinking is None else {"enable_thinking": thinking}
        render = lambda: self._inner.apply_chat_template(
            turns, tokenize=False, add_generation_prompt=answer_follows, **extra
        )
        try:
            return bounded.run(render, RENDER_SECONDS, "<template>")  # jinja's name for what it compiles
        except Exception as error:  # templates raise what they like
            raise ConfigError(f"messages: the chat template refuses them ({_line(error)})") from None

    def decode(self, ids: Sequence[int]) -> str:
        """Text of ids; special tokens are left out, spaces are kept as they are."""
        return self._inner.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def stream_decoder(self) -> StreamDecoder:
        """For text that comes in pieces."""
        return StreamDecoder(self)


class StreamDecoder:
    """Turns ids into text piece by piece: the pieces join to `decode` of all ids, and none ends inside a character.

    Replacement characters at the end are held back, for a token may hold a part of a character.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._anchor = 0  # ids before it are settled: their text never changes
        self._shown = 0  # characters of the text from the anchor on

    def push(self, ids: Sequence[int]) -> str:
        """The text that these ids complete."""
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
        """What was held back, as `decode` shows it."""
        text = self._tokenizer.decode(self._ids[self._anchor :])
        fresh, self._shown = text[self._shown :], len(text)
        return fresh


def from_folder(folder: pathlib.Path) -> Tokenizer | None:
    """The tokenizer of a Hugging Face folder, None where there is none. Code in the folder is never run."""
    if not any((folder / name).is_file() for name in FILES):
        return None
    transformers = _transformers()
    try:
        inner = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever the files provoke
        raise ConfigError(f"{folder}: its tokenizer cannot be read ({_line(error)})") from None
    return Tokenizer(inner)


def end_tokens_of_folder(folder: pathlib.Path) -> tuple[int, ...]:
    """The end token of a folder's tokenizer, without the seconds that importing transformers takes.

    Files that cannot be understood give none: whoever needs the tokenizer is told then.
    """

    def read(name: str) -> dict[str, Any]:
        try:
            raw = json.loads((folder / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return {}
        return raw if isinstance(raw, dict) else {}

    config = read("tokenizer_config.json")
    end = config.get("eos_token") or read("special_tokens_map.json").get("eos_token")
    end = end.get("content") if isinstance(end, dict) else end  # written as text or as an object
    if not isinstance(end, str):
        return ()
    listed = config.get("added_tokens_decoder")
    for number, token in listed.items() if isinstance(listed, dict) else ():
        if isinstance(token, dict) and token.get("content") == end and number.isdecimal():
            return (int(number),)
    added = read("tokenizer.json").get("added_tokens")
    for token in added if isinstance(added, list) else ():
        if isinstance(token, dict) and token.get("content") == end and isinstance(token.get("id"), int):
            return (token["id"],)
    return ()


def from_gguf(file) -> Tokenizer | None:
    """The byte-level BPE tokenizer in the metadata of a `gguf_file.GGUF`; None where there is none."""
    tokens = file.get("tokenizer.ggml.tokens")
    if tokens is None:
        return None
    if file.get("tokenizer.ggml.model") != "gpt2":
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.model={file.get('tokenizer.ggml.model')!r} is not supported; only gpt2 is"
        )
    import tokenizers
    from tokenizers import decoders, models, normalizers, pre_tokenizers

    transformers = _transformers()
    splits: dict[str, list[Any]] = {
        "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
        "qwen2": [
            pre_tokenizers.Split(tokenizers.Regex(QWEN2_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ],
    }
    split = splits.get(file.get("tokenizer.ggml.pre", "gpt-2"))
    if split is None:
        raise ConfigError(f"{file.path}: tokenizer.ggml.pre={file.get('tokenizer.ggml.pre')!r} is not supported")
    merges = [tuple(line.split(" ", 1)) for line in file.get("tokenizer.ggml.merges", [])]
    try:
        model = models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges)
    except Exception as error:  # a merge of something that is no token
        raise ConfigError(
            f"{file.path}: tokenizer.ggml.merges do not fit tokenizer.ggml.tokens ({_line(error)})"
        ) from None
    inner = tokenizers.Tokenizer(model)
    if file.get("tokenizer.ggml.pre") == "qwen2":
        inner.normalizer = normalizers.NFC()
    inner.pre_tokenizer = pre_tokenizers.Sequence(split)
    inner.decoder = decoders.ByteLevel()
    of_kind = lambda kind: [t for t, k in zip(tokens, _kinds(file, tokens), strict=True) if k == kind]
    token = lambda t, special: tokenizers.AddedToken(t, special=special, normalized=False)
    inner.add_special_tokens([token(t, True) for t in of_kind(CONTROL)])
    inner.add_tokens([token(t, False) for t in of_kind(USER_DEFINED)])

    def name(key: str) -> str | None:
        i = file.get(f"tokenizer.ggml.{key}_token_id")
        return tokens[i] if i is not None and i < len(tokens) else None

    return Tokenizer(
        transformers.PreTrainedTokenizerFast(
            tokenizer_object=inner,
            eos_token=name("eos"),
            bos_token=name("bos"),
            chat_template=file.get("tokenizer.chat_template"),
        )
    )


QWEN2_PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def end_tokens(file) -> tuple[int, ...]:
    """End tokens of a GGUF file: the one it names, and the usual control tokens that end a turn."""
    tokens = file.get("tokenizer.ggml.tokens", [])
    pairs = zip(tokens, _kinds(file, tokens), strict=True)
    usual = [i for i, (t, kind) in enumerate(pairs) if kind == CONTROL and t in END_NAMES]
    named = file.get("tokenizer.ggml.eos_token_id")
    return tuple(sorted({*usual, *([] if named is None else [named])}))


def _kinds(file, tokens: list[str]) -> list[int]:
    """The type of every token; all are plain where a file lists none."""
    kinds = file.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise ConfigError(f"{file.path}: tokenizer.ggml.token_type: {len(kinds)} entries for {len(tokens)} tokens")
    return kinds


def _line(error: Exception) -> str:
    """The first line of an error's text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def _transformers():
    """Imported late (it takes seconds) and without its word about a missing torch."""
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    import transformers

    transformers.logging.set_verbosity_error()
    return transformers
