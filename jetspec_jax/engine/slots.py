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
them, and what of the state a set has no use for is laid aside meanwhile.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from jetspec_jax.engine import geometry, requests
from jetspec_jax.engine.geometry import Geometry, Words
from jetspec_jax.engine.programs import program
from jetspec_jax.engine.requests import on_device
from jetspec_jax.engine.rows import Row
from jetspec_jax.fields import ConfigError
from jetspec_jax.files.pair import LoadedHead, LoadedTarget
from jetspec_jax.loop import slots as loop
from jetspec_jax.loop.contracts import Draft
from jetspec_jax.loop.decoder import Decoder, insert
from jetspec_jax.loop.slots import Report
from jetspec_jax.loop.state import State
from jetspec_jax.options import SamplingConfig

SAMPLED = frozenset({"temperature"})
ALL = SAMPLED | {"top_k", "top_p", "min_p", "penalties", "bias", "bad_words", "min_length", "logprobs"}
Set = frozenset[str]
SETS: tuple[Set, ...] = (Set(), SAMPLED, ALL)  # of options, each a program of a block: the cheapest that will do is run
WORDS = Words(bias=304, bad=16, tokens=8)  # of a row at most; OpenAI's interface has 300 biased tokens
ENDS = 16
TOP = 20  # most probable tokens beside a committed one


@dataclasses.dataclass(frozen=True)
class Plan:
    """The sizes that a server can have.

    capacity: cache slots of a row, as `geometry.slots` rounds them. batches: rows of a batch, ascending powers of two
    from 1 on. nodes: tree nodes of a round. chunks: prompt rows read at a time, ascending.
    """

    capacity: int
    batches: tuple[int, ...]
    nodes: int
    chunks: tuple[int, ...]

    def __post_init__(self):
        if list(self.batches) != [1 << i for i in range(len(self.batches))] or not self.batches:
            raise ValueError(f"batches={self.batches}: give powers of two from 1 on, none left out")
        sizes = list(self.chunks)
        if sizes != sorted(set(sizes)) or not sizes or not 1 <= sizes[0] <= sizes[-1] <= self.capacity:
            raise ValueError(f"chunks={self.chunks}: give ascending numbers in 1..{self.capacity}")

    @property
    def rows(self) -> int:
        """Rows of the largest batch."""
        return self.batches[-1]

    def geometry(self, batch: int) -> Geometry:
        """Returns the sizes of a batch that can hold any row."""
        return Geometry(batch, self.capacity, self.nodes, self.capacity, ENDS, WORDS, ALL)

    def chunk(self, left: int) -> int:
        """Returns how many rows the next piece reads of so many that are left."""
        return next((size for size in self.chunks if size >= left), self.chunks[-1])


@dataclasses.dataclass
class Reading:
    """A prompt that is being read. done: its rows that have been; the first token is committed with the last."""

    row: Row
    request: Any
    state: State
    done: int


class Slots:
    """A running batch on the device, of rows that the host names by their slots.

    batch: slots now. compiled: programs that were made by `prepare`.
    """

    def __init__(
        self, target: LoadedTarget, head: LoadedHead | None, draft: Draft, plan: Plan, sets: Sequence[Set] = SETS
    ):
        """Makes a batch without rows, and compiles nothing yet.

        Args:
          target: what `load_target` returns.
          head: what `load_head` returns; None where `draft` is plain.
          draft: in the shape of the plan.
          plan: sizes.
          sets: of options that rows may use together, the cheapest first.
        """
        if getattr(target, "mesh", None):
            raise ConfigError("mesh: the server and conversations decode on one device; leave the mesh out")
        self._sets = tuple(sets)
        self.target, self.head, self.plan = target, head, plan
        self.batch, self.compiled = 1, 0
        whole = Decoder(target.model, draft, plan.capacity, True, plan.chunks[-1], TOP)
        self.decoder = whole
        self._decoders = {plan.nodes: whole}  # of blocks, by their nodes
        self._readers = {size: dataclasses.replace(whole, prefill_chunk=size) for size in plan.chunks}
        self._params = {"target": target.params, "draft": head.params if head else None}
        self._state: Any = None
        self._spare: list[State] = []  # of one row each, for prompts to be read into

    @property
    def depth(self) -> int:
        """Drafted positions of a round."""
        return self.decoder.depth

    @property
    def room(self) -> int:
        """Tokens that a prompt and its answer may have together."""
        return min(self.plan.capacity - self.depth - 1, self.target.config.context_length)

    def prepare(self, say: Callable[[str], None] = lambda line: None) -> None:
        """Compiles every program that can be needed, and runs each kind once.

        say: is told what is being compiled.
        """
        begin = time.perf_counter()
        for number, (name, function, decoder, args, donate) in enumerate(self._programs(), 1):
            say(f"compiling {name} (program {number}, {time.perf_counter() - begin:.0f} s)")
            program(function, decoder, *args, donate=donate)
            self.compiled = number
        blank = requests.arrays([[0]], [SamplingConfig(0, eos=())], [1], self.plan.geometry(1))
        self._state, spare = (self._run(loop.vacant, self.decoder, self._params, blank) for _ in range(2))
        self._spare = [spare]
        tokens = [0] * min(2, self.room - 1)  # a short answer, so that what the host itself needs is there too
        reading = self.open(Row(tokens, SamplingConfig(1, eos=()), 1))
        while not self.read(reading):
            pass
        self.insert(reading, 0)
        for options in self._sets:
            self.get(self.launch(self.plan.nodes, 1, options, [0]))

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
        request = requests.arrays([row.ids], [row.option], [int(row.budget)], self.plan.geometry(1))
        return Reading(row, request, state, held)

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
        start = on_device(reading.done, np.int32)
        args = self._params, reading.state, reading.request, start
        reading.state = self._run(loop.read, self._readers[size], *args, donate=(1,))
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
        args = self._state, on_device(slot, np.int32), reading.state
        self._state = self._run(insert, self.decoder, *args, donate=(0,))
        if not self._spare:
            self._spare.append(reading.state)

    def resize(self, batch: int, rows: Sequence[int | None]) -> None:
        """Makes the batch one of another bucket.

        rows: the old slots of the rows that go on, in the order of their new ones; None is free.
        """
        padded = [*rows, *[None] * (batch - len(rows))]
        index = on_device([row or 0 for row in padded], np.int32)
        live = on_device([row is not None for row in padded], bool)
        self._state = self._run(loop.pick, self.decoder, self._state, index, live)
        self.batch = batch

    def take(self, slot: int) -> State:
        """Returns a row by itself, as a state that another prompt can begin with."""
        return self._alone(self._state, slot)

    def copy(self, state: State) -> State:
        """Returns a copy of what `take` returned: the reading of a prompt uses it up."""
        return self._alone(state, 0)

    def launch(self, nodes: int, rounds: int, options: Collection[str], ended: Collection[int]) -> Report:
        """Starts a block of rounds, and returns its report on the device.

        Args:
          nodes: of its trees; a bucket of the plan.
          rounds: at most.
          options: that its rows use, as `geometry.used` names them.
          ended: slots that the host ends before the first round.
        """
        kind = next(known for known in self._sets if known >= set(options))
        stop = on_device([slot in ended for slot in range(self.batch)], bool)
        state = self._state
        args = self._params, _narrowed(state, kind), on_device(rounds, np.int32), stop
        new, report = self._run(loop.block, self._decoders[nodes], *args, donate=(1,))
        self._state = _widened(new, state)
        return report

    def get(self, report: Report) -> Report:
        """Returns a report on the host; waits for its block."""
        return jax.device_get(report)

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
        if not isinstance(row.budget, int):
            raise ConfigError(f"budget={row.budget}: trees have {self.plan.nodes} nodes here; give a number")
        if row.budget > self.plan.nodes:
            raise ConfigError(f"budget={row.budget}: trees have {self.plan.nodes} nodes; give at most that")

    def _alone(self, state: State, slot: int) -> State:
        args = state, on_device([slot], np.int32), on_device([False], bool)
        return self._run(loop.pick, self.decoder, *args)

    def _blank(self) -> State:
        return self._alone(self._state, 0)

    def _run(self, function, decoder: Decoder, *args, donate: tuple[int, ...] = ()) -> Any:
        return program(function, decoder, *args, donate=donate).run(*args)

    def _shapes(self, batch: int) -> State:
        """Returns the shapes of a state, on the device that the parameters are on."""
        place = next(iter(jax.tree.leaves(self._params))).sharding
        blank = requests.arrays([[0]], [SamplingConfig(0, eos=())], [1], self.plan.geometry(batch))
        shapes = jax.eval_shape(functools.partial(loop.vacant, self.decoder), self._params, blank)
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)

    def _programs(self) -> Iterator[tuple[str, Any, Decoder, tuple, tuple[int, ...]]]:
        """Yields what each program is for, its function, decoder and arguments, and which of these it may overwrite."""
        request = requests.arrays([[0]], [SamplingConfig(0, eos=())], [1], self.plan.geometry(1))
        one, number = self._shapes(1), on_device(0, np.int32)
        yield "an empty slot", loop.vacant, self.decoder, (self._params, request), ()
        for size, reader in self._readers.items():
            yield f"pieces of {size} prompt tokens", loop.read, reader, (self._params, one, request, number), (1,)
        for batch in self.plan.batches:
            state, stop = self._shapes(batch), on_device([False] * batch, bool)
            for nodes, decoder in self._decoders.items():
                for options in self._sets:
                    name = f"rounds of {batch} x {nodes} nodes, {_said(options)}"
                    yield name, loop.block, decoder, (self._params, _narrowed(state, options), number, stop), (1,)
            yield f"a row into {batch}", insert, self.decoder, (state, number, one), (0,)
            for other in sorted({1, batch // 2, batch * 2} & set(self.plan.batches)):
                rows = on_device([0] * other, np.int32), on_device([False] * other, bool)
                yield f"{other} of {batch} rows", loop.pick, self.decoder, (state, *rows), ()


def _narrowed(state: State, options: frozenset[str]) -> State:
    """Returns the state without what rows of these options have no use for."""
    kept = {"seed", *options}
    laid: dict[str, Any] = {field: None for field in state.sampling._fields if field not in kept}
    sampling = state.sampling._replace(**laid)
    state = state._replace(sampling=sampling)
    return state if "logprobs" in options else state._replace(logprobs=None, top=None)


def _widened(new: State, old: State) -> State:
    """Returns the new state with what was laid aside of the old one."""
    laid = {f: getattr(old.sampling, f) for f in old.sampling._fields if getattr(new.sampling, f) is None}
    new = new._replace(sampling=new.sampling._replace(**laid))
    return new if new.logprobs is not None else new._replace(logprobs=old.logprobs, top=old.top)


def _said(options: frozenset[str]) -> str:
    return "every option" if options == ALL else "sampled" if options else "greedy"
