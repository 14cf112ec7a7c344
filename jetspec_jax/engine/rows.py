"""One request on the host: what it asks, its text while it runs, and what came of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

from jetspec_jax.engine.stops import StopText
from jetspec_jax.loop.state import NONFINITE, STOP, State
from jetspec_jax.options import SamplingConfig


@dataclasses.dataclass
class Result:
    """One finished request. Field names are the keys of `decode.py --json`."""

    text: str
    token_ids: list[int]  # the end token included where one ended the row
    finish_reason: str  # "stop", "length" or "error"
    stopped_by: str | int | None  # the stop string, end token or stop token; None at the limit
    prompt_tokens: int
    new_tokens: int
    rounds: int
    accept_lengths: list[int]  # per round, bonus included, as verified
    emitted: list[int]  # per round, tokens that reached the output
    acceptance_length: float  # mean of `emitted`, what a round gave out; 0 without rounds
    tree_sizes: list[int]
    seconds: dict[str, float]  # load, compile, prefill, decode; of the whole batch
    tokens_per_second: float  # of this row over the batch's decode time, the first token excluded
    settings: dict[str, Any]
    logprobs: list[float] | None  # of `token_ids` under the target's own distribution; None unless asked for
    error: str | None = None  # why the row ended where it did, one line; None where it ended well

    def to_json(self) -> dict[str, Any]:
        """Returns a dict of plain values."""
        return dataclasses.asdict(self)


class Log(NamedTuple):
    """What a row has done, on the host."""

    ids: list[int]  # new tokens
    reason: int  # of `State.reason`
    accept_lengths: list[int]  # per round
    tree_sizes: list[int]
    emitted: list[int]
    logprobs: list[float] | None = None  # of `ids`

    def cut(self, kept: int, reason: int) -> Log:
        """Returns the log of a row that ended after so many new tokens, for a reason."""
        emitted = cut_rounds(self.emitted, kept)
        lengths, sizes = (x[: len(emitted)] for x in (self.accept_lengths, self.tree_sizes))
        logprobs = None if self.logprobs is None else self.logprobs[:kept]
        return Log(self.ids[:kept], reason, lengths, sizes, emitted, logprobs)


def cut_rounds(emitted: Sequence[int], kept: int) -> list[int]:
    """Returns the tokens of the rounds that gave out something of the first `kept`; the last may have given more."""
    left, rounds = kept - 1, []  # the first token is that of prefill
    for count in emitted:
        if left <= 0:
            break
        rounds.append(min(count, left))
        left -= count
    return rounds


class Row:
    """A request in flight: its prompt, its resolved options, and its text where somebody must read it on the way."""

    def __init__(self, ids: list[int], option: SamplingConfig, budget: int | str, tokenizer=None, watch: bool = False):
        """Makes a row that has not been admitted.

        Args:
          ids: tokens of the prompt.
          option: resolved options.
          budget: tree nodes of its rounds, or "auto".
          tokenizer: of the target, or None.
          watch: whether the text is kept up to date, as streaming needs it; stop strings need it anyhow.
        """
        self.ids, self.option, self.budget = ids, option, budget
        self._tokenizer = tokenizer
        self.text: StopText | None = None
        if tokenizer and (watch or option.stop):
            self.text = StopText(tokenizer, option.stop, option.include_stop_text, option.min_new_tokens)

    def read(self, new: list[int], reason: int) -> int | None:
        """Brings the text up to date with all new tokens so far.

        Returns how many tokens stay, where a stop string has just ended the row.
        """
        text = self.text
        if text is None or text.over:
            return None
        text.push(self._shown(new, reason)[text.count :])
        ended = text.count if text.found is not None else None
        if reason:  # RUNNING is 0
            text.finish()
        return ended

    def result(
        self, state: State, slot: int, seconds: dict[str, float], settings: dict[str, Any], dtype: str
    ) -> Result:
        """Returns what came of the row.

        Args:
          state: on the host, caches left out.
          slot: of the row in it.
          seconds: of the batch.
          settings: of the batch; the row's own are added.
          dtype: of the target, for the advice on broken logits.
        """
        first, last, count = state.prompt_length[slot], state.length[slot], int(state.rounds[slot])
        log = Log(
            state.tokens[slot, first:last].tolist(),
            int(state.reason[slot]),
            state.accept_lengths[slot, :count].tolist(),
            state.tree_sizes[slot, :count].tolist(),
            state.emitted[slot, :count].tolist(),
            None if state.logprobs is None else state.logprobs[slot, first:last].tolist(),
        )
        return self.conclude(log, seconds, settings, dtype)

    def conclude(self, log: Log, seconds: dict[str, float], settings: dict[str, Any], dtype: str) -> Result:
        """Returns what came of the row by its log; the other arguments are those of `result`."""
        ids, reason, count = log.ids, log.reason, len(log.emitted)
        text = ""
        if self.text:
            text = self.text.settled
        elif self._tokenizer:
            text = self._tokenizer.decode(self._shown(ids, reason))
        found = self.text.found if self.text else None
        stopped = ids[-1] if reason == STOP else found
        error = _broken(dtype, len(self.ids) + len(ids)) if reason == NONFINITE else None
        return Result(
            text=text,
            token_ids=ids,
            finish_reason="error" if error else "length" if stopped is None else "stop",
            stopped_by=stopped,
            prompt_tokens=len(self.ids),
            new_tokens=len(ids),
            rounds=count,
            accept_lengths=log.accept_lengths,
            emitted=log.emitted,
            acceptance_length=sum(log.emitted) / count if count else 0.0,
            tree_sizes=log.tree_sizes,
            seconds=dict(seconds),
            tokens_per_second=max(len(ids) - 1, 0) / seconds["decode"] if seconds["decode"] else 0.0,
            settings=settings | {"budget": self.budget} | _settings(self.option),
            logprobs=log.logprobs if self.option.logprobs else None,
            error=error,
        )

    def _shown(self, ids: list[int], reason: int) -> list[int]:
        """Returns the ids that make the text: without the end token, unless it is asked for."""
        return ids[:-1] if reason == STOP and not self.option.include_stop_text else ids


def _broken(dtype: str, position: int) -> str:
    advice = "try float32 or bfloat16" if dtype == "float16" else "the weights, or what is computed of them, are broken"
    advice = "try float32" if dtype == "bfloat16" else advice
    advice += "" if dtype == "float32" else "; where that fails too, the weights are broken"
    return f"the target's logits are not finite in {dtype} at position {position}; {advice}"


def _settings(option: SamplingConfig) -> dict[str, Any]:
    """Returns what a result says of its options: temperature and seed, and whatever was set."""
    given = dataclasses.asdict(option)
    usual = {"temperature", "seed"}
    hidden = {"max_new_tokens", "eos", "budget"}
    return {k: v for k, v in given.items() if k in usual or (k not in hidden and v != getattr(SamplingConfig, k))}
