"""The host's side of `budget="auto"`: the programs of a batch, one a size, and which of them runs next."""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jetspec_jax.engine import costs
from jetspec_jax.engine.geometry import Geometry
from jetspec_jax.engine.programs import program
from jetspec_jax.engine.spread import fetch
from jetspec_jax.loop import pacing
from jetspec_jax.loop.decoder import Decoder
from jetspec_jax.loop.paced import Pace, aged, paced, paced_recorded
from jetspec_jax.loop.pacing import Belief, Ladder, Price
from jetspec_jax.loop.state import RUNNING, Round, State
from jetspec_jax.options import MAX_BUDGET

# Powers of two that can win, by measurement on a CPU (docs/measurements.md); each is a program.
SIZES = {"cpu": (1, 4, 8, 16, 32), "gpu": (1, 8, 16, 32, 64, 128, 256), "tpu": (1, 8, 16, 32, 64, 128, 256)}
FIRST_ROUNDS = 2  # of the first block with trees; each after it has twice as many as the one before
BLOCK_ROUNDS = 16  # between two choices then
BLOCK_SECONDS = 0.05, 1.0  # of a block at least, where launching counts, and at most, so that Python answers signals
WATCHED_SECONDS = 0.05  # of rounds in one measured launch
WATCHED_ROUNDS = 4, 64
HEED = 0.1, 0.4  # of a block's time beside what was expected: for each round, and at most
SHARED = 0.8  # of it that the other kind of round takes over: most of what slows a machine slows both
FAR = 2.0  # times what was expected, that a block counts for at most
UNBOUND = MAX_BUDGET  # budget of a row that takes whatever size is in force
KEPT = 16  # beliefs of a process

_BELIEFS: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()


class Drift:
    """How much longer rounds take now than the table says: the machine does other work too.

    Trees share what is seen of any of them. A plain step is bound by memory where they are bound by arithmetic, so it
    has a factor of its own; but a burst of other work that falls on one kind must not make the other look fast.

    factor: of either kind, 1 as measured.
    """

    def __init__(self) -> None:
        self.factor = {"plain": 1.0, "trees": 1.0}

    def of(self, sizes: Sequence[int]) -> list[float]:
        """Returns the factor of each size."""
        return [self.factor["plain" if size == 1 else "trees"] for size in sizes]

    def heed(self, size: int, ran: int, spent: float, expected: float) -> None:
        """Takes in how long a block took.

        Args:
          size: of the block.
          ran: rounds of it.
          spent: seconds.
          expected: of a round.
        """
        seen = spent / ran / expected
        each, most = HEED
        kind, other = ("plain", "trees") if size == 1 else ("trees", "plain")
        weight = min(each * ran, most) * min(spent / BLOCK_SECONDS[0], 1.0)  # a launch is much of a short block
        heeded = min(max(seen, 1 / FAR), FAR) ** weight
        self.factor = {kind: self.factor[kind] * heeded, other: self.factor[other] * heeded**SHARED}


class Pacer:
    """Chooses how many nodes the rounds of a batch verify, and runs them.

    ladder: the sizes that can win; all are compiled once `prepare` has returned.
    seconds: that compiling and measuring took.
    """

    def __init__(
        self, decoders: Mapping[int, Decoder], about: Mapping[str, Any], geometry: Geometry, rule: str, least: int = 1
    ):
        """Makes a pacer that has prepared nothing.

        Args:
          decoders: by nodes; the draft of 1 is `Paused`.
          about: what a table of costs is for.
          geometry: of the batch.
          rule: of `options.BUDGET_RULES`.
          least: nodes that a row with a budget of its own needs.
        """
        sizes = tuple(sorted(decoders))
        self._largest = decoders[sizes[-1]]
        self._paces = {n: Pace(decoders[n], sizes[-1], self._largest.depth) for n in sizes}
        self._about, self._rule, self._least = dict(about), rule, least
        options = ", ".join(sorted(geometry.options))
        self._key = f"batch {geometry.batch}, capacity {geometry.capacity}, {sizes[-1]} nodes, options {options}"
        self._memory = repr(self._about), rule, sizes
        self.ladder = Ladder(sizes, self._largest.depth, rule)
        self.seconds = 0.0
        self._runs: dict[int, Any] = {}
        self._next, self._block = (sizes[-1], 1), FIRST_ROUNDS
        self._resting, self._worked = False, 0.0
        self._expected: dict[int, float] = {}
        self._drift = Drift()

    @property
    def bucket(self) -> int:
        """Nodes of the next block's rounds."""
        return self._next[0]

    def prepare(self, params: dict, state: State) -> None:
        """Compiles the sizes that can win, and measures all where no table is kept. `state` is left as it is."""
        start, self._drift = _BELIEFS.get(self._memory, (None, self._drift))
        belief = pacing.start(self._largest.nodes) if start is None else jax.tree.map(jnp.asarray, start)
        sizes = tuple(self._paces)
        table = costs.read(self._about, self._key, sizes)
        if table is None:
            for size in sizes:
                self._compile(size, params, state, belief)
            begin = time.perf_counter()
            table = self._measured(params, state, belief)
            self.seconds += time.perf_counter() - begin
            costs.keep(self._about, self._key, table)
        able = table.winning(self._largest.depth, self._least)
        self.ladder = dataclasses.replace(self.ladder, sizes=able)
        for size in able:
            self._compile(size, params, state, belief)
        self._runs = {size: self._runs[size] for size in able}
        table = table.of(able)
        floats = lambda values: jnp.array(values, jnp.float32)
        self._price = Price(floats(table.contexts), floats(table.seconds), floats([1.0] * len(able)))
        args = belief, self._price, state.length, state.reason, jnp.bool_(False), jnp.float32(0.0)
        self._choose = self._made(pacing.choose, self.ladder, *args)
        self._renew = self._made(pacing.renewed, self.ladder, belief, jnp.float32(1.0))
        self._belief: Belief = self._renew(belief, jnp.float32(1.0))
        self._look(state)

    def following(self, state: State) -> int:
        """Returns the nodes of the next block's rounds, for the rows that run in this state now."""
        self._look(state)
        return self.bucket

    def admitted(self, state: State, share: float) -> None:
        """Says that a share of the running rows is new: what was seen before says less of what comes."""
        self._belief = self._renew(self._belief, jnp.float32(share))
        self.following(state)

    def rounds(self) -> int:
        """Returns how many rounds the next block should have."""
        size, most = self._next
        seconds, (least, longest) = self._expected[size], BLOCK_SECONDS
        usual = max(BLOCK_ROUNDS, int(least / seconds))
        if size == 1:
            return max(1, min(most, int(longest / seconds)))
        return max(1, min(most, self._block, usual, int(longest / seconds)))

    def advance(self, params: dict, state: State, most: int) -> State:
        """Runs one block of at most so many rounds, chooses the next, and returns the state. `state` is used up."""
        size = self.bucket
        n = jnp.int32(min(most, self.rounds()))
        begin = time.perf_counter()
        state, self._belief, ran = self._runs[size](params, state, self._belief, n)
        expected = self._expected[size]
        ran = self._look(state, ran)  # one wait for both: on a busy machine a wait may cost as much as a round
        self._timed(size, ran, time.perf_counter() - begin, expected)
        return state

    def record(self, params: dict, state: State) -> tuple[State, Round]:
        """Runs one round of the size in force, and returns what it did too. `state` is used up."""
        size = self.bucket
        args = params, state, self._belief
        run = self._made(paced_recorded, self._paces[size], *args, donate=(1,))
        state, (self._belief, done) = run(*args)
        self._look(state)
        return jax.block_until_ready(state), done

    def remember(self) -> None:
        """Keeps what rounds have said for the next batch of this process."""
        _BELIEFS[self._memory] = fetch(self._belief), self._drift
        _BELIEFS.move_to_end(self._memory)
        while len(_BELIEFS) > KEPT:
            _BELIEFS.popitem(last=False)

    def _look(self, state: State, ran: Any = 0) -> int:
        """Chooses the next block, on the device; returns the rounds that the last one ran, as a number."""
        sizes = self.ladder.sizes
        price = self._price._replace(factor=jnp.array(self._drift.of(sizes), jnp.float32))
        doing = jnp.bool_(self._resting), jnp.float32(self._worked)
        chosen = self._choose(self._belief, price, state.length, state.reason, *doing)
        found, ran = fetch((chosen, ran))
        self._next, self._resting = (sizes[int(found.place)], int(found.rounds)), bool(found.resting)
        self._expected = dict(zip(sizes, found.seconds.tolist(), strict=True))
        return int(ran)

    def _timed(self, size: int, ran: int, spent: float, expected: float) -> None:
        """Takes in how long a block took; the arguments are those of `Drift.heed`."""
        if size == 1:
            self._block, self._worked = FIRST_ROUNDS, 0.0
        else:
            self._block, self._worked = min(2 * self._block, pacing.MANY), self._worked + spent
        if ran:
            self._drift.heed(size, ran, spent, expected)

    def _compile(self, size: int, params: dict, state: State, belief: Belief) -> None:
        if size not in self._runs:
            args = params, state, belief, jnp.int32(1)
            self._runs[size] = self._made(paced, self._paces[size], *args, donate=(1,))

    def _made(self, function, static: Hashable, *args, donate: tuple[int, ...] = ()) -> Any:
        compiled = program(function, static, *args, donate=donate)
        self.seconds += compiled.seconds
        return compiled.run

    def _measured(self, params: dict, state: State, belief: Belief) -> costs.Table:
        """Times rounds of every size on a batch of zeros; they take as long as any other's."""
        (few, many), depth = WATCHED_ROUNDS, self._largest.depth
        batch, capacity = state.tokens.shape
        spare = (few + 1) * (depth + 1)
        count = dict.fromkeys(self._paces, 1)
        blank = jax.tree.map(jnp.zeros_like, state)
        row = lambda n: jnp.full(batch, n, jnp.int32)
        blank = blank._replace(
            sampling=jax.tree.map(jnp.copy, state.sampling), eos=jnp.full_like(state.eos, -1), prompt_length=row(1),
            limit=row(capacity - depth - 1), budget=row(UNBOUND), reason=row(RUNNING),
        )  # fmt: skip
        held = [blank]

        age = program(aged, self._largest, params, blank, row(1), donate=(1,))

        def run(size: int, context: int) -> float:
            start = held[0]._replace(reason=row(RUNNING))
            start = age.run(params, start, row(context))
            jax.block_until_ready(start)
            begin = time.perf_counter()
            after, _, ran = jax.block_until_ready(self._runs[size](params, start, belief, jnp.int32(count[size])))
            spent = time.perf_counter() - begin
            held[0] = after._replace(limit=row(capacity - depth - 1))
            return spent / max(1, int(ran))

        at = costs.contexts(capacity, spare)
        for size in self._paces:  # warm, and how many rounds a launch should have
            run(size, at[0])
            seconds = run(size, at[0])
            usual = min(many, max(few, int(WATCHED_SECONDS / seconds)))
            count[size] = max(1, min(usual, int(BLOCK_SECONDS[1] / seconds)))
        return costs.measure(run, tuple(self._paces), at)
