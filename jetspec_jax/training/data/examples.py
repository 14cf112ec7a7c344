"""Rows as token ids with the positions that are learnt from, and why a row gives none.

Three kinds of rows: {"messages": [{"role", "content"}, ...]}, {"prompt", "response"} and {"text"}. Conversations go
through the target's chat template, and only what the assistant says is learnt from: its text and the end token after
it (`turns`). An assistant's text is tokenised apart from what stands before it, because that is how it is generated.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from jetspec_jax.config import ConfigError
from jetspec_jax.fields import TOKEN
from jetspec_jax.files.tokenizer import Tokenizer
from jetspec_jax.training.data import turns
from jetspec_jax.training.data.rows import Row
from jetspec_jax.training.data.turns import Piece, Unusable

Message = dict[str, Any]


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
        """Returns lines for the log, before the first step."""
        head = f"data: {self.read:,} rows read, {self.used:,} used"
        head += f" ({self.truncated:,} of them cut to the sequence length)" if self.truncated else ""
        reasons = [f"data: {n:,} dropped: {why} (first: {self.example[why]})" for why, n in self.dropped.most_common()]
        return [head + f", {self.dropped.total():,} dropped", *reasons]


def learnable(learnt: np.ndarray) -> bool:
    """Whether there is an anchor with a label: two learnt positions side by side."""
    return bool((learnt[:-1] & learnt[1:]).any())


def build(  # noqa: PLR0913  # keys of the configuration
    rows: Iterable[Row],
    tokenizer: Tokenizer | None,
    eos: tuple[int, ...],
    longest: int,
    thinking: bool | None,
    text: str,
    drop_truncated: bool = False,
    vocabulary: int = TOKEN + 1,
) -> tuple[list[Example], Report]:
    """Returns examples of at most `longest` tokens; a longer row is cut, and dropped where nothing learnt is left.

    Args:
      rows: of a data set.
      tokenizer: of the target, with its end tokens `eos`.
      longest: tokens of an example.
      thinking: switch of the chat template.
      text: "all" learns all of a {"text"} row; "assistant" only what lies between the template's marks.
      drop_truncated: leave out a row that would be cut, and one whose answer a limit has cut (`finish_reason`).
      vocabulary: tokens of the target; a row with another one is dropped.

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
            if tokens.max(initial=0) >= vocabulary:
                raise Unusable(turns.BEYOND)
            if drop_truncated and _unfinished(row.value):
                raise Unusable("cut at the limit")
            if not learnable(learnt):
                few = learnt.any()
                raise Unusable("an answer of one token" if few else "no supervised token")
            if drop_truncated and len(tokens) > longest:
                raise Unusable("longer than the sequence length")
            if not learnable(learnt[:longest]):
                raise Unusable("the answer begins after the sequence length")
        except Unusable as reason:
            report.drop(str(reason), row)
            continue
        known.add(row.identity)
        report.used += 1
        report.truncated += len(tokens) > longest
        kept.append(Example(row.identity, tokens[:longest].astype(np.int32), learnt[:longest]))
    if not kept:
        why, example = next(iter(report.example.items()), ("", "the data set is empty"))
        raise ConfigError(
            f"data: {report.dropped.total()} of {report.read} samples have no supervised token"
            f"{f' ({_counts(report)})' if why else ''}; example: {example}"
        )
    return kept, report


def _counts(report: Report) -> str:
    return ", ".join(f"{n} {why}" for why, n in report.dropped.most_common())


def _unfinished(value: Any) -> bool:
    """Whether a row of `regenerate` says that the limit cut its answer."""
    return isinstance(value, dict) and value.get("finish_reason") == "length"


class _Encoder:
    """Token ids of a row and which of them are learnt."""

    def __init__(self, tokenizer: Tokenizer | None, eos: tuple[int, ...], thinking: bool | None, text: str):
        if tokenizer is None:
            raise ConfigError("data: the target has no tokenizer, so rows of text cannot be read")
        self._tokenizer, self._eos, self._thinking, self._text = tokenizer, eos, thinking, text

    def __call__(self, value: Any) -> tuple[np.ndarray, np.ndarray]:
        try:
            if turns.plain(value):
                return self._join(self._plain(value["text"]))
            pieces = list(self._chat(turns.conversation(value)))
            if _unfinished(value):  # the target did not end its last turn
                pieces[-1] = pieces[-1]._replace(closing="")
            return self._join(pieces)
        except ConfigError as error:  # the template or the tokenizer refuses
            raise Unusable(str(error)) from None

    def _join(self, pieces: Iterable[Piece]) -> tuple[np.ndarray, np.ndarray]:
        ids: list[int] = []
        learnt: list[bool] = []
        for piece in pieces:
            fresh = self._tokenizer.encode(piece.text) if piece.text else []
            marks = [piece.said] * len(fresh)
            closing = self._tokenizer.encode(piece.closing) if piece.closing and learnt and learnt[-1] else []
            # The target ends its own turn: it writes everything up to its end token.
            end = next((i for i, token in enumerate(fresh[: len(closing)]) if token in self._eos), -1)
            marks[: end + 1] = [True] * (end + 1)
            ids += fresh
            learnt += marks
        return np.array(ids, np.int64), np.array(learnt, bool)

    def _chat(self, row: turns.Conversation) -> Iterator[Piece]:
        if not self._tokenizer.has_chat_template:
            raise ConfigError("the target has no chat template for conversations")
        return turns.pieces(row, functools.partial(self._render, self._thinking))

    def _render(self, thinking: bool | None, messages: list[Message], answer_follows: bool) -> str:
        return self._tokenizer.render_chat(messages, thinking, answer_follows)

    def _plain(self, text: Any) -> Iterator[Piece]:
        if not isinstance(text, str) or not text.strip():
            raise Unusable("a text without content")
        if self._text == "all":
            yield Piece(text, True)
            return
        begin, end = self.marks()
        at = 0
        while (start := text.find(begin, at)) >= 0:
            start += len(begin)
            stop = text.find(end, start)
            stop = len(text) if stop < 0 else stop
            yield Piece(text[at:start], False, end)
            yield Piece(text[start:stop], True)
            at = stop
        yield Piece(text[at:], False, end)

    def marks(self) -> tuple[str, str]:
        """Returns what the template writes before and after an assistant's text."""
        if not self._tokenizer.has_chat_template:
            raise ConfigError("the target has no chat template, so text_loss=assistant finds nothing")
        ask = [{"role": "user", "content": "U"}]
        render = self._tokenizer.render_chat
        begin = render(ask)[len(render(ask, answer_follows=False)) :]
        said = render([*ask, {"role": "assistant", "content": "\u2042"}], answer_follows=False)
        end = said[said.rindex("\u2042") + 1 :].strip()
        return begin, end or "\n"
