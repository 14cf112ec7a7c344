"""The device's side of continuous batching: a running batch whose rows come and go, with every program made before.

slots = Slots(target, head, draft, plan)
slots.prepare()                       # compiles all that can be needed; nothing is compiled afterwards
reading = slots.open(row)
while not slots.read(reading):        # a piece of the prompt; blocks may run between two of them
    ...
slots.insert(reading, 0)
report = slots.get(slots.launch(slots.plan.nodes, 4, used, ended=[]))

Every call but `get` returns while the device still works. A batch is as wide as a bucket of the plan, and only rows are
copied when it becomes another. Options that no row of a batch uses cost nothing: a block is compiled for a few sets of
them. With several sizes of trees a block is compiled for each that can win, by what it costs here; `tempo` says which
is next.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jetspec_jax.engine import geometry, pacing
from jetspec_jax.engine.kit import ENDS, SETS, WORDS, Kit, Plan, Set, Trees, narrowed, widened
from jetspec_jax.engine.requests import on_device
from jetspec_jax.engine.rows import Row
from jetspec_jax.engine.tempo import Tempo
from jetspec_jax.fields import ConfigError
from jetspec_jax.files.pair import LoadedHead, LoadedTarget
from jetspec_jax.loop.contracts import Draft
from jetspec_jax.loop.slots import Order, Report
from jetspec_jax.loop.state import State
from jetspec_jax.options import AUTO, SamplingConfig


@dataclasses.dataclass
class Reading:
    """A prompt that is being read. done: its rows that have been; the first token is committed with the last."""

    row: Row
    request: Any
    state: State
    done: int


class Sent(NamedTuple):
    """A report that is still on the device: its shapes, and its bits."""

    shapes: Report
    bits: jax.Array


class Slots:
    """A running batch on the device, of rows that the host names by their slots.

    batch: slots now.
    """

    def __init__(
        self,
        target: LoadedTarget,
        head: LoadedHead | None,
        draft: Draft | Trees,
        plan: Plan,
        sets: Sequence[Set] = SETS,
    ):
        """Makes a batch without rows, and compiles nothing yet.

        Args:
          target: what `load_target` returns.
          head: what `load_head` returns; None where `draft` is plain.
          draft: in the shape of the plan; `Trees` where there are several.
          plan: sizes.
          sets: of options that rows may use together, the cheapest first.
        """
        if getattr(target, "mesh", None):
            raise ConfigError("mesh: the server and conversations decode on one device; leave the mesh out")
        trees = draft if isinstance(draft, Trees) else Trees({draft.nodes: draft})
        self.target, self.head, self.plan, self.batch = target, head, plan, 1
        self._kit = Kit(target, head, trees, plan, sets)
        self._mind = self._kit.mind if self._kit.tempo else None
        self._state: Any = None
        self._spare: list[State] = []  # of one row each, for prompts to be read into

    @property
    def compiled(self) -> int:
        """Programs that were made by `prepare`."""
        return self._kit.compiled

    @property
    def tempo(self) -> Tempo | None:
        """Which size of trees is next; None where there is one."""
        return self._kit.tempo

    @property
    def depth(self) -> int:
        """Drafted positions of a round."""
        return self._kit.decoder.depth

    @property
    def room(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return min(self.plan.capacity - self.depth - 1, self.target.config.context_length)

    @property
    def usual(self) -> int | str:
        """The budget of a row that asks for none."""
        return AUTO if self.tempo else self.plan.nodes

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Compiles every program that can be needed, and runs each kind once; measures what no table is kept of.

        say: is told what is being compiled.
        """
        self._kit.make(say)
        self._state, spare = (self._kit["vacant",](self._kit.params, self._kit.blank()) for _ in range(2))
        self._spare = [spare]
        tokens = [0] * min(2, self.room - 1)  # a short answer, so that what the host itself needs is there too
        reading = self.open(Row(tokens, SamplingConfig(1, eos=()), 1))
        while not self.read(reading):
            pass
        self.insert(reading, 0)
        for options in self._kit.sets:
            for nodes in self.sizes(options):
                self.get(self.launch(nodes, 1, options, [0]))

    def sizes(self, options: Collection[str]) -> tuple[int, ...]:
        """Returns the nodes that a block of the batch as it is now may have, for rows of such options."""
        return self._kit.sizes(self.batch, self._kit.kind(options))

    def open(self, row: Row, prefix: State | None = None, held: int = 0) -> Reading:
        """Begins to read a prompt.

        Args:
          row: that has been checked by `check`.
          prefix: a state of one row, which `take` or `copy` returned; it is used up.
          held: rows of it that the prompt begins with, as `usable` says.
        """
        state = prefix
        if state is None:
            state = self._spare.pop() if self._spare else self._blank()
        budget = pacing.UNBOUND if row.budget == AUTO else int(row.budget)
        return Reading(row, self._kit.request([row.ids], [row.option], [budget]), state, held)

    def usable(self, common: int, known: int, prompt: int) -> int:
        """Returns how many rows of a kept state a prompt can take over.

        Args:
          common: tokens that both begin with.
          known: tokens that the kept row is known to have committed.
          prompt: tokens of the prompt, the last of which must be read again for the first token of the answer.
        """
        # The rows of its last commits may still wait in the draft, which may have looked at the token after a row too.
        return max(min(common - 1, known - 1 - (self.depth + 1), prompt - 1), 0)

    def read(self, reading: Reading) -> bool:
        """Reads the next piece of a prompt; returns whether it was the last."""
        left = len(reading.row.ids) - reading.done
        size = self.plan.chunk(left)
        args = self._kit.params, reading.state, reading.request, on_device(reading.done, np.int32)
        reading.state = self._kit["read", size](*args)
        # Near the end of the cache a piece begins earlier, and reads that many fewer new rows.
        reading.done = min(reading.done, self.plan.capacity - size) + size
        return reading.done >= len(reading.row.ids)

    def wait(self, reading: Reading) -> None:
        """Waits until all pieces so far have been read."""
        jax.block_until_ready(reading.state.reason)

    def discard(self, reading: Reading) -> None:
        """Ends the reading of a prompt that nobody wants any more."""
        self._spare.append(reading.state)

    def insert(self, reading: Reading, slot: int) -> None:
        """Puts a prompt that has been read into a slot, whatever it held; its row runs from the next block on."""
        self._state = self._kit["insert", self.batch](self._state, on_device(slot, np.int32), reading.state)
        if not self._spare:
            self._spare.append(reading.state)

    def resize(self, batch: int, rows: Sequence[int | None]) -> None:
        """Makes the batch one of another bucket.

        rows: the old slots of the rows that go on, in the order of their new ones; None is free.
        """
        padded = [*rows, *[None] * (batch - len(rows))]
        index = on_device([row or 0 for row in padded], np.int32)
        live = on_device([row is not None for row in padded], bool)
        self._state = self._kit["pick", self.batch, batch](self._state, index, live)
        self.batch = batch

    def take(self, slot: int) -> State:
        """Returns a row by itself, as a state that another prompt can begin with."""
        return self._alone(self.batch, self._state, slot)

    def copy(self, state: State) -> State:
        """Returns a copy of what `take` returned: the reading of a prompt uses it up."""
        return self._alone(1, state, 0)

    def launch(self, nodes: int, rounds: int, options: Collection[str], ended: Collection[int]) -> Sent:
        """Starts a block of rounds, and returns its report on the device.

        Args:
          nodes: of its trees; a bucket of the plan.
          rounds: at most.
          options: that its rows use, as `geometry.used` names them.
          ended: slots that the host ends before the first round.
        """
        kit, kind = self._kit, self._kit.kind(options)
        # Numbers go as numpy has them: an array of jax's own costs the host several times as long.
        stop = np.array([slot in ended for slot in range(self.batch)])
        state, count = self._state, np.int32(rounds)
        run, args = kit["block", self.batch, nodes, kind], (kit.params, narrowed(state, kind))
        if self.tempo:
            fresh, worked = map(np.float32, self.tempo.taken())
            price = self.tempo.price(self.batch, kit.sizes(self.batch, kind))
            new, self._mind, bits = run(*args, self._mind, price, Order(*cast(Any, (count, stop, fresh, worked))))
        else:
            new, bits = run(*args, count, stop)
        self._state = widened(new, state)
        return Sent(kit.shapes(self.batch, nodes, kind), bits)

    def get(self, sent: Sent) -> Report:
        """Returns a report on the host; waits for its block."""
        return _unpacked(sent.shapes, np.asarray(sent.bits))

    def check(self, row: Row) -> None:
        """Raises ConfigError where a row does not fit into a slot; it fits the target."""
        most, option = len(row.ids) + row.option.max_new_tokens, row.option
        if most > self.room:
            raise ConfigError(
                f"max_new_tokens={option.max_new_tokens}: with a prompt of {len(row.ids)} tokens that is {most}, and a "
                f"slot has {self.room}; give at most {max(self.room - len(row.ids), 0)}"
            )
        lists = {
            "logit_bias": (len(option.logit_bias), WORDS.bias, "tokens"),
            "bad_words": (len(option.bad_words), WORDS.bad, "of them, a text twice"),
            "bad_words: one": (max(map(len, option.bad_words), default=0), WORDS.tokens, "tokens"),
            "stop_token_ids": (len(geometry.ends(option)), ENDS, "with the target's own"),
        }
        for name, (count, room, what) in lists.items():
            if count > room:
                raise ConfigError(f"{name} has {count}, and a row has room for {room} ({what})")
        if row.budget == AUTO and self.tempo:
            return
        if not isinstance(row.budget, int):
            raise ConfigError(f"budget={row.budget}: trees have {self.plan.nodes} nodes here; give a number")
        if row.budget > self.plan.nodes:
            raise ConfigError(f"budget={row.budget}: trees have {self.plan.nodes} nodes; give at most that")

    def _alone(self, batch: int, state: State, slot: int) -> State:
        return self._kit["pick", batch, 1](state, on_device([slot], np.int32), on_device([False], bool))

    def _blank(self) -> State:
        return self._alone(self.batch, self._state, 0)


def _unpacked(shapes: Report, bits: np.ndarray) -> Report:
    """Returns the report that a packed block gave as one array of int32."""
    leaves, structure = jax.tree.flatten(shapes)
    parts = np.split(bits, np.cumsum([x.size for x in leaves])[:-1])

    def part(bits, x):
        found = bits.view(np.float32) if x.dtype == np.float32 else bits.astype(x.dtype, copy=False)
        return found.reshape(x.shape)

    return jax.tree.unflatten(structure, map(part, parts, leaves))
