"""A request on its way through the scheduler, and what its owner is told of it."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from jetspec_jax.engine.rows import Log, Result, Row
from jetspec_jax.loop.state import RUNNING


class Draft(NamedTuple):
    """The tree of a row's last round: tokens and parents of its nodes, the root first, and those that were accepted."""

    tokens: list[int]
    parents: list[int]
    path: list[int]


class Piece(NamedTuple):
    """What is new of a request that goes on or has just ended. top: pairs of token and log-probability, a list each."""

    text: str
    ids: list[int]
    logprobs: list[float] | None
    top: list[list[tuple[int, float]]] | None
    draft: Draft | None


def joined(first: Piece, then: Piece) -> Piece:
    """Returns two pieces of a request as one, with the tree of the later one."""
    both = lambda a, b: None if a is None or b is None else a + b
    logprobs, top = both(first.logprobs, then.logprobs), both(first.top, then.top)
    return Piece(first.text + then.text, first.ids + then.ids, logprobs, top, then.draft or first.draft)


class Update(NamedTuple):
    """What a job's owner is told. result: with the last one of a request that ended by itself.

    error: one line where the server could not go on with it; nothing comes afterwards.
    """

    piece: Piece | None = None
    result: Result | None = None
    error: str | None = None


@dataclasses.dataclass(eq=False)
class Job:
    """A request in the scheduler's hands.

    row: prompt and options. tell: is called in the scheduler's thread and must not block. stream: whether pieces are
    told on the way, or all of it at the end. draw: whether they hold the tree of the last round.
    """

    row: Row
    tell: Callable[[Update], None]
    stream: bool = False
    draw: bool = False
    cancelled: bool = False  # set by anybody; looked at between blocks
    over: bool = False
    slot: int = -1
    reused: int = 0  # prompt tokens that were not read again
    log: Log = dataclasses.field(default_factory=lambda: Log([], RUNNING, [], [], [], []))
    top: list[list[tuple[int, float]]] = dataclasses.field(default_factory=list)
    draft: Draft | None = None
    told: int = 0  # tokens
    shown: int = 0  # characters
    plain: float = 0.0  # seconds that plain steps would have taken for what its rounds gave; 0 where nobody knows
    asked: float = dataclasses.field(default_factory=time.perf_counter)  # times
    begun: float = 0.0
    first: float = 0.0
    ended: float = 0.0

    @property
    def known(self) -> list[int]:
        """Tokens that the row is known to have committed, its prompt's first."""
        return self.row.ids + self.log.ids

    def seconds(self) -> dict[str, float]:
        """Returns what was spent waiting, on the prompt, and on the answer."""
        begun, first = self.begun or self.ended, self.first or self.ended
        return {"queue": begun - self.asked, "prefill": first - begun, "decode": self.ended - first}

    def piece(self) -> Piece:
        """Returns what has not been told yet."""
        ids, whole = self.log.ids[self.told :], self.row.text.settled if self.row.text else ""
        asked = self.row.option.logprobs
        logprobs = self.log.logprobs[self.told :] if asked and self.log.logprobs is not None else None
        top = self.top[self.told :] if asked else None
        fresh = Piece(whole[self.shown :], ids, logprobs, top, self.draft if self.draw else None)
        self.told, self.shown = len(self.log.ids), len(whole)
        return fresh


def settings(job: Job, known: dict[str, Any]) -> dict[str, Any]:
    """Returns what a result says of its run."""
    return known | {"reused": job.reused}
