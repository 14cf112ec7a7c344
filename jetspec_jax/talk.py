"""A conversation on the terminal: a line is a turn, and a turn begins on the row that the last one left.

What was read and written before is not read again, by the target and by the draft head alike (`engine/slots.py`).
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable
from typing import Any

from jetspec_jax import speculate
from jetspec_jax.engine import geometry, requests
from jetspec_jax.engine.rows import Result, Row
from jetspec_jax.engine.slots import SETS, Plan, Slots
from jetspec_jax.fields import ConfigError
from jetspec_jax.files import pair
from jetspec_jax.options import SamplingConfig, TreeConfig
from jetspec_jax.serve.job import Job, Update
from jetspec_jax.serve.scheduler import Scheduler

SLOTS = 2048  # of a conversation, if the target's context has as many
CHUNKS = (16, 64)  # prompt tokens read at a time


class Talk:
    """A conversation with a target and a head."""

    def __init__(self, target, head, tree: TreeConfig, sampling: SamplingConfig, thinking: bool | None = None):
        """Compiles what a conversation needs.

        Args:
          target: what `load_target` returns; it needs a chat template.
          head: what `load_head` returns, or None.
          tree: the candidate tree.
          sampling: options of every answer.
          thinking: whether answers may begin with thoughts, where the template knows them.
        """
        self._target, self._sampling = target, requests.resolve(target, sampling)
        self._mode = pair.thinking(target, head, thinking)
        target.encode_messages([{"role": "user", "content": "x"}], None, self._mode)  # there is a template
        draft = speculate.draft_of(head, tree, geometry.budget_nodes([int(tree.budget or geometry.default_budget())]))
        capacity = geometry.slots(min(SLOTS, target.config.context_length + draft.depth + 1))
        plan, needed = Plan(capacity, (1,), draft.nodes, CHUNKS), geometry.used(self._sampling)
        sets = [known for known in SETS if known >= needed][:1]  # all answers have the same options
        self._slots = Slots(target, head if draft.nodes > 1 else None, draft, plan, sets)
        self._slots.prepare()
        self._scheduler = Scheduler(self._slots, waiting=1, kept=1)
        self._scheduler.start()
        self._said: list[dict[str, Any]] = []

    def answer(self, text: str, show: Callable[[str], None]) -> tuple[Result, float]:
        """Answers one turn.

        Args:
          text: of the turn.
          show: is given the pieces of the answer.

        Returns:
          The result, whose settings say how many tokens were not read again (`reused`), and the seconds it took.

        Raises:
          ConfigError: the conversation has become too long; the turn is not part of it then.
        """
        begin, talk = time.perf_counter(), [*self._said, {"role": "user", "content": text}]
        row = Row(
            self._target.encode_messages(talk, None, self._mode), self._sampling, self._slots.plan.nodes,
            self._target.tokenizer, watch=True,
        )  # fmt: skip
        requests.check(self._target, row.ids, row.option)
        self._slots.check(row)
        updates: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._scheduler.submit(Job(row, updates.put, stream=True))
        while True:
            update = updates.get()
            if update.piece:
                show(update.piece.text)
            error = update.error or (update.result.error if update.result else None)
            if error:
                raise speculate.DecodeError(error)
            if update.result:
                self._said = [*talk, {"role": "assistant", "content": update.result.text}]
                return update.result, time.perf_counter() - begin

    def close(self) -> None:
        """Ends the conversation."""
        self._scheduler.stop()


def run(talk: Talk) -> int:
    """Talks with whoever is at standard input, until it ends; returns the exit status."""
    show = lambda text: print(text, end="", flush=True)
    _prompt()
    for line in sys.stdin:
        if line.strip():
            try:
                result, seconds = talk.answer(line.strip(), show)
            except ConfigError as error:
                print(error, file=sys.stderr, flush=True)
            else:
                print(flush=True)
                reused, read = result.settings["reused"], result.prompt_tokens
                said = f"{result.new_tokens} tokens in {result.rounds} rounds ({result.acceptance_length:.2f} a round)"
                print(
                    f"[{said}, {seconds:.1f} s; {reused} of {read} prompt tokens were there]",
                    file=sys.stderr,
                    flush=True,
                )
        _prompt()
    talk.close()
    return 0


def _prompt() -> None:
    if sys.stdin.isatty():
        print("> ", end="", file=sys.stderr, flush=True)
