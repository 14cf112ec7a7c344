"""Rows as token ids with the positions that are learnt from, and why a row gives none.

Three kinds of rows: {"messages": [{"role", "content"}, ...]}, {"prompt", "response"} and {"text"}. Conversations go
through the target's chat template, and only what the assistant says is learnt from: its text and the end token behind
it. An assistant's text is tokenised apart from what stands before it, because that is how it is generated.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import json
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from jetspec_jax.config import ConfigError
from jetspec_jax.files.tokenizer import Tokenizer
from jetspec_jax.training.data.rows import Row

Messages = list[dict[str, str]]


class Unusable(Exception):
    """A row gives nothing to learn from; the text is the reason under which it is counted."""


@dataclasses.dataclass(frozen=True)
class Example:
    """One row: ids, and which of them the assistant wrote."""

    identity: str
    tokens: np.ndarray  # [n] int32
    learnt: np.ndarray  # [n] bool


@dataclasses.dataclass
class Report:
    """What became of the rows; used + dropped = read."""

    read: int = 0
    used: int = 0
    truncated: int = 0  # of the used ones
    dropped: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    example: dict[str, str] = dataclasses.field(default_factory=dict)  # of every reason, the first row

    def drop(self, reason: str, row: Row) -> None:
        """Counts a row that gives nothing."""
        self.dropped[reason] += 1
        self.example.setdefault(reason, f"{row.where}: {json.dumps(row.value, ensure_ascii=False, default=str)[:300]}")

    def lines(self) -> list[str]:
        """For the log, before the first step."""
        head = f"data: {self.read:,} rows read, {self.used:,} used"
        head += f" ({self.truncated:,} of them cut to the sequence length)" if self.truncated else ""
        reasons = [f"data: {n:,} dropped: {why} (first: {self.example[why]})" for why, n in self.dropped.most_common()]
        return [head + f", {self.dropped.total():,} dropped", *reasons]


def learnable(learnt: np.ndarray) -> bool:
    """Whether there is an anchor with a label: two learnt positions side by side."""
    return bool((learnt[:-1] & learnt[1:]).any())


def build(
    rows: Iterable[Row],
    tokenizer: Tokenizer | None,
    eos: tuple[int, ...],
    longest: int,
    thinking: bool | None,
    text: str,
) -> tuple[list[Example], Report]:
    """Examples of at most `longest` tokens; a longer row is cut, and dropped where nothing learnt is left.

    text: "all" learns all of a {"text"} row; "assistant" only what lies between the template's marks.

    Raises:
      ConfigError: no row gives anything to learn from; the line shows one.
    """
    report, kept, known = Report(), [], set()
    encode = _Encoder(tokenizer, eos, thinking, text)
    for row in rows:
        report.read += 1
        try:
            if row.identity in known:
                raise Unusable("the id of an earlier row")
            tokens, learnt = encode(row.value)
            if not learnable(learnt):
                few = learnt.any()
                raise Unusable("an answer of one token" if few else "no supervised token")
            if not learnable(learnt[:longest]):
                raise Unusable("the answer begins behind the sequence length")
        except Unusable as reason:
            report.drop(str(reason), row)
            continue
        known.add(row.identity)
        report.used += 1
        report.truncated += len(tokens) > longest
        kept.append(Example(row.identity, tokens[:longest], learnt[:longest]))
    if not kept:
        why, example = next(iter(report.example.items()), ("", "the data set is empty"))
        raise ConfigError(
            f"data: {report.dropped.total()} of {report.read} samples have no supervised token"
            f"{f' ({_counts(report)})' if why else ''}; example: {example}"
        )
    return kept, report


def _counts(report: Report) -> str:
    return ", ".join(f"{n} {why}" for why, n in report.dropped.most_common())


def conversation(value: Any) -> Messages:
    """The messages of a {"messages"} or {"prompt", "response"} row, checked.

    Raises:
      Unusable: they are no conversation that a template could show.
    """
    if not isinstance(value, dict):
        raise Unusable("not a JSON object")
    messages = value.get("messages")
    if messages is None and value.get("prompt") is not None:
        pair = (("user", value["prompt"]), ("assistant", value.get("response")))
        messages = [{"role": role, "content": text} for role, text in pair if role == "user" or text is not None]
    if messages is None:
        raise Unusable("neither messages, prompt and response, nor text")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise Unusable("messages is no list")
    if not messages:
        raise Unusable("no messages")
    turns: Messages = []
    for message in messages:
        if not isinstance(message, dict) or message.get("role") not in ("system", "user", "assistant"):
            raise Unusable("a role other than system, user and assistant")
        if not isinstance(message.get("content"), str) or not message["content"].strip():
            raise Unusable("a message without content")
        turns.append({"role": message["role"], "content": message["content"]})
    spoken = [m["role"] for m in turns if m["role"] != "system"]
    if any(m["role"] == "system" for m in turns[1:]):
        raise Unusable("a system message behind the first")
    if not spoken:
        raise Unusable("a system message alone")
    if spoken[0] == "assistant":
        raise Unusable("the assistant speaks first")
    if any(a == b for a, b in itertools.pairwise(spoken)):
        raise Unusable("two turns of one speaker in a row")
    return turns


def question(value: Any) -> Messages:
    """The conversation up to its last user turn: what the target is asked. Raises Unusable."""
    if _plain(value):
        raise Unusable("plain text, which asks for no answer")
    turns = conversation(value)
    return turns[:-1] if turns[-1]["role"] == "assistant" else turns


def _plain(value: Any) -> bool:
    """Whether a row is text alone. A column that another row of the table needs may be there, and empty."""
    given = {name for name, content in value.items() if content is not None} if isinstance(value, dict) else set()
    return "text" in given and not {"messages", "prompt"} & given


class _Encoder:
    """Token ids of a row and which of them are learnt."""

    def __init__(self, tokenizer: Tokenizer | None, eos: tuple[int, ...], thinking: bool | None, text: str):
        if tokenizer is None:
            raise ConfigError("data: the target has no tokenizer, so rows of text cannot be read")
        self._tokenizer, self._eos, self._thinking, self._text = tokenizer, eos, thinking, text

    def __call__(self, value: Any) -> tuple[np.ndarray, np.ndarray]:
        try:
            return self._join(self._plain(value["text"]) if _plain(value) else self._chat(conversation(value)))
        except ConfigError as error:  # the template or the tokenizer refuses
            raise Unusable(str(error)) from None

    def _join(self, pieces: Iterable[tuple[str, bool]]) -> tuple[np.ndarray, np.ndarray]:
        ids: list[int] = []
        learnt: list[bool] = []
        for text, said in pieces:
            fresh = self._tokenizer.encode(text) if text else []
            marks = [said] * len(fresh)
            if fresh and not said and learnt and learnt[-1] and fresh[0] in self._eos:
                marks[0] = True  # the target ends its own turn
            ids += fresh
            learnt += marks
        return np.array(ids, np.int32), np.array(learnt, bool)

    def _chat(self, turns: Messages) -> Iterator[tuple[str, bool]]:
        if turns[-1]["role"] != "assistant":
            if not any(m["role"] == "assistant" for m in turns):
                raise Unusable("no assistant turn")
            turns = turns[:-1]
        if not self._tokenizer.has_chat_template:
            raise ConfigError("the target has no chat template for conversations")
        whole = self._tokenizer.render_chat(turns, self._thinking, answer_follows=False)
        at = 0
        for i, message in enumerate(turns):
            if message["role"] != "assistant":
                continue
            opened = self._tokenizer.render_chat(turns[:i], self._thinking)
            closed = self._tokenizer.render_chat(turns[:i], self._thinking, answer_follows=False)
            shown = message["content"].split("</think>")[-1].strip()  # templates cut what was thought in earlier turns
            start = len(opened)
            if not whole.startswith(opened) or start < at:
                # A template that writes earlier turns otherwise than the last: the text itself says where it stands.
                start = whole.find(shown, max(at, len(closed) if whole.startswith(closed) else at))
            search = whole.rfind if i == len(turns) - 1 else whole.find  # what is thought may quote the answer
            found = search(shown, start) if start >= 0 else -1
            if found < 0:
                raise Unusable("an answer that the chat template does not show")
            yield whole[at:start], False
            at = found + len(shown)
            yield whole[start:at], True
        yield whole[at:], False

    def _plain(self, text: Any) -> Iterator[tuple[str, bool]]:
        if not isinstance(text, str) or not text.strip():
            raise Unusable("a text without content")
        if self._text == "all":
            yield text, True
            return
        begin, end = self.marks()
        at = 0
        while (start := text.find(begin, at)) >= 0:
            start += len(begin)
            stop = text.find(end, start)
            stop = len(text) if stop < 0 else stop
            yield text[at:start], False
            yield text[start:stop], True
            at = stop
        yield text[at:], False

    def marks(self) -> tuple[str, str]:
        """What the template writes before and behind an assistant's text."""
        if not self._tokenizer.has_chat_template:
            raise ConfigError("the target has no chat template, so text_loss=assistant finds nothing")
        ask = [{"role": "user", "content": "U"}]
        render = self._tokenizer.render_chat
        begin = render(ask)[len(render(ask, answer_follows=False)) :]
        said = render([*ask, {"role": "assistant", "content": "\u2042"}], answer_follows=False)
        end = said[said.rindex("\u2042") + 1 :].strip()
        return begin, end or "\n"
