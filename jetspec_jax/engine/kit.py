"""Every program that slots can need, made before the first request; what blocks of each size cost is measured here too.

A block is compiled for a few sets of options, the cheapest that will do is run, and what of the state a set has no use
for is laid aside meanwhile. With several sizes of trees it is compiled for each that can win, by what rounds cost on
this machine.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.engine import costs, geometry, pacing, requests, tempo
from jetspec_jax.engine.geometry import Geometry, Words
from jetspec_jax.engine.programs import program
from jetspec_jax.engine.requests import on_device
from jetspec_jax.engine.tempo import Tempo
from jetspec_jax.files.pair import LoadedHead, LoadedTarget
from jetspec_jax.loop import slots as loop
from jetspec_jax.loop.contracts import Draft
from jetspec_jax.loop.decoder import Decoder, insert
from jetspec_jax.loop.paced import Pace, aged
from jetspec_jax.loop.pacing import Ladder, Price
from jetspec_jax.loop.slots import Mind, Order, Report, Rung
from jetspec_jax.loop.state import RUNNING, State
from jetspec_jax.options import SamplingConfig

SAMPLED = frozenset({"temperature"})
ALL = SAMPLED | {"top_k", "top_p", "min_p", "penalties", "bias", "bad_words", "min_length", "logprobs"}
Set = frozenset[str]
SETS: tuple[Set, ...] = (Set(), SAMPLED, ALL)  # of options, each a program of a block: the cheapest that will do is run
WORDS = Words(bias=304, bad=16, tokens=8)  # of a row at most; OpenAI's interface has 300 biased tokens
ENDS = 16
TOP = 20  # most probable tokens beside a committed one
COMPILERS = min(8, os.cpu_count() or 1)  # programs that are made at the same time: most of it runs on one core
MEASURED_SECONDS, MEASURED_ROUNDS, PASSES = 0.1, 16, 3  # of rounds in one measured launch; launches of each size


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


@dataclasses.dataclass(frozen=True)
class Trees:
    """What rows are drafted for.

    drafts: by nodes, the largest last; where there are several, that of 1 is `Paused`, and what pays best is run.
    rule: of `options.BUDGET_RULES`.
    prune: probability of a path under which nodes are not verified.
    """

    drafts: Mapping[int, Draft]
    rule: str = "best"
    prune: float = 0.0

    @property
    def largest(self) -> Draft:
        """The draft of the largest trees."""
        return self.drafts[max(self.drafts)]


class Made(NamedTuple):
    """A program that is to be made: what finds it, what it is for, and what `programs.program` is asked."""

    key: tuple
    name: str
    function: Callable
    static: Any
    args: tuple
    donate: tuple[int, ...] = ()


class Kit:
    """The programs of slots, by what they do: ("read", rows), ("block", batch, nodes, set) and so on.

    decoder: of the largest trees. params: of target and draft. sets: of options, the cheapest first. compiled: programs
    so far. tempo: which size is next; None where there is one. mind: what the first block begins with.
    """

    def __init__(self, target: LoadedTarget, head: LoadedHead | None, trees: Trees, plan: Plan, sets: Sequence[Set]):
        """Makes none yet; the arguments are those of `Slots`."""
        self.plan, self.compiled, self.sets, self._prune = plan, 0, tuple(sets), trees.prune
        self.params = {"target": target.params, "draft": head.params if head else None}
        self.decoder = Decoder(target.model, trees.largest, plan.capacity, True, plan.chunks[-1], TOP)
        self._decoders = {n: dataclasses.replace(self.decoder, draft=one) for n, one in sorted(trees.drafts.items())}
        self._runs: dict[tuple, Any] = {}
        self._sizes: dict[tuple[int, Set], tuple[int, ...]] = {}
        self._reports: dict[tuple, Report] = {}
        self.tempo: Tempo | None = None
        if len(self._decoders) > 1:
            ladder = Ladder(tuple(self._decoders), self.decoder.depth, trees.rule)
            usual = max(n for n in ladder.sizes if n <= max(geometry.default_budget(), ladder.trees[0]))
            self.tempo, self.mind = Tempo(ladder, usual), Mind(*tempo.start(plan.nodes))
            self._about = costs.described(target, head, trees.largest)

    def __getitem__(self, key: tuple) -> Any:
        """Returns a program."""
        return self._runs[key]

    def kind(self, options: Collection[str]) -> Set:
        """Returns the cheapest set that has these options."""
        return next(known for known in self.sets if known >= set(options))

    def sizes(self, batch: int, kind: Set) -> tuple[int, ...]:
        """Returns the nodes that blocks of a batch may have, for rows of a set of options."""
        return self._sizes[batch, kind]

    def shapes(self, batch: int, nodes: int, kind: Set) -> Report:
        """Returns the shapes of the report of a block."""
        key = batch, nodes, kind
        if key not in self._reports:
            sizes = len(self._decoders) if self.tempo else 0
            state = narrowed(self._shapes(batch), kind)
            self._reports[key] = loop.report_shapes(self._decoders[nodes], state, sizes)
        return self._reports[key]

    def blank(self, batch: int = 1) -> Any:
        """Returns a request for rows of one token each."""
        return self.request([[0]], [SamplingConfig(0, eos=())], [1], batch)

    def request(self, prompts: Sequence, options: Sequence, budgets: Sequence[int], batch: int = 1) -> Any:
        """Returns `requests.arrays` of rows that slots can hold."""
        made = requests.arrays(prompts, options, budgets, self.plan.geometry(batch))
        return made._replace(least=on_device([self._prune] * batch, np.float32)) if self._prune else made

    def make(self, say: Callable[[str], None]) -> None:
        """Compiles every program that can be needed, and measures what no table is kept of.

        say: is told what is being compiled.
        """
        begin = time.perf_counter()
        told = lambda line: say(f"{line} (program {self.compiled + 1}, {time.perf_counter() - begin:.0f} s)")
        self._compile(self._moves(), told)
        for batch in self.plan.batches if self.tempo else ():
            self._survey(batch, told)
        for batch in self.plan.batches:
            for options in self.sets:
                self._sizes[batch, options] = self._usable(batch, options)
        blocks = [self._block(batch, n, kind) for (batch, kind), sizes in self._sizes.items() for n in sizes]
        self._compile(blocks, told)
        for one in blocks:
            self.shapes(*one.key[1:])
        kept = {one.key for one in blocks}  # a size that cannot win is let go
        self._runs = {key: run for key, run in self._runs.items() if key[0] != "block" or key in kept}

    def _usable(self, batch: int, options: Set) -> tuple[int, ...]:
        """Returns the sizes that blocks are compiled for.

        The set of every option is for few requests, and each size of it is one program more: it has one tree.
        """
        if not self.tempo:
            return tuple(self._decoders)
        found = self.tempo.sizes(batch)
        if options != ALL:
            return found
        trees = found[1:]
        return 1, max((n for n in trees if n <= geometry.default_budget()), default=trees[0])

    def _shapes(self, batch: int) -> State:
        """Returns the shapes of a state, on the device that the parameters are on."""
        place = next(iter(jax.tree.leaves(self.params))).sharding
        shapes = jax.eval_shape(functools.partial(loop.vacant, self.decoder), self.params, self.blank(batch))
        return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)

    def _moves(self) -> Iterator[Made]:
        """Yields the programs beside blocks."""
        blank, one, number = self.blank(), self._shapes(1), on_device(0, np.int32)
        yield Made(("vacant",), "an empty slot", loop.vacant, self.decoder, (self.params, blank))
        for size in self.plan.chunks:
            reader, args = dataclasses.replace(self.decoder, prefill_chunk=size), (self.params, one, blank, number)
            yield Made(("read", size), f"pieces of {size} prompt tokens", loop.read, reader, args, (1,))
        for batch in self.plan.batches:
            state = self._shapes(batch)
            yield Made(("insert", batch), f"a row into {batch}", insert, self.decoder, (state, number, one), (0,))
            for other in sorted({1, batch // 2, batch * 2} & set(self.plan.batches)):
                rows = on_device([0] * other, np.int32), on_device([False] * other, bool)
                name = f"{other} of {batch} rows"
                yield Made(("pick", batch, other), name, loop.pick, self.decoder, (state, *rows))

    def _block(self, batch: int, nodes: int, kind: Set) -> Made:
        state, stop, number = self._shapes(batch), on_device([False] * batch, bool), on_device(0, np.int32)
        key, name = ("block", batch, nodes, kind), f"rounds of {batch} x {nodes} nodes, {_said(kind)}"
        decoder, args = self._decoders[nodes], (self.params, narrowed(state, kind))
        if self.tempo is None:
            return Made(key, name, loop.packed_block, decoder, (*args, number, stop), (1,))
        rung = Rung(Pace(decoder, self.plan.nodes, self.decoder.depth), self.tempo.ladder)
        none, count, at = on_device(0.0, np.float32), len(self._decoders), len(self._contexts)
        price = Price(*(on_device(np.zeros(shape), np.float32) for shape in ((at,), (at, count), (count,))))
        order = Order(number, stop, none, none)
        return Made(key, name, loop.packed_paced_block, rung, (*args, self.mind, price, order), (1,))

    @property
    def _contexts(self) -> tuple[int, ...]:
        """Committed tokens at which rounds are measured."""
        return costs.contexts(self.plan.capacity, (MEASURED_ROUNDS + 1) * (self.decoder.depth + 1))

    def _compile(self, programs: Iterable[Made], say: Callable[[str], None]) -> None:
        """Compiles those that are not there yet, some at the same time."""

        def compiled(one: Made) -> tuple[tuple, Any]:
            say(f"compiling {one.name}")
            return one.key, program(one.function, one.static, *one.args, donate=one.donate).run

        missing = [one for one in programs if one.key not in self._runs]
        with concurrent.futures.ThreadPoolExecutor(COMPILERS, "compiler") as pool:
            for key, run in pool.map(compiled, missing):
                self._runs[key] = run
                self.compiled += 1

    def _survey(self, batch: int, say: Callable[[str], None]) -> None:
        """Finds out what rounds of a batch cost, from the cache folder or by running them, and which sizes can win."""
        assert self.tempo is not None
        ladder, most = self.tempo.ladder.sizes, tempo.ROWS[jax.default_backend()]
        sizes = tuple(n for n in ladder if n in ladder[:2] or n * batch <= most)
        key = f"slots, batch {batch}, capacity {self.plan.capacity}, {self.plan.nodes} nodes"
        table = costs.read(self._about, key, sizes)
        if table is None:
            blocks = {n: self._block(batch, n, self.sets[0]) for n in sizes}
            self._compile(blocks.values(), say)
            say(f"measuring rounds of {batch}")
            table = costs.measure(self._timer(batch, blocks), sizes, self._contexts, PASSES)
            costs.keep(self._about, key, table)
        self.tempo.learn(batch, table.of(table.winning(self.decoder.depth)))

    def _timer(self, batch: int, blocks: Mapping[int, Made]) -> Callable[[int, int], float]:
        """Returns what times a round of a size after so many tokens, on rows of zeros; others take as long."""
        row = lambda n, dtype=np.int32: on_device([n] * batch, dtype)
        blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blocks[1].args[1])
        blank = blank._replace(
            eos=jnp.full_like(blank.eos, -1), prompt_length=row(1), budget=row(pacing.UNBOUND),
            limit=row(self.plan.capacity - self.decoder.depth - 1),
        )  # fmt: skip
        held, count, at = [blank], dict.fromkeys(blocks, 1), self._contexts
        age = program(aged, self.decoder, self.params, blank, row(1), donate=(1,)).run

        def run(size: int, context: int) -> float:
            start = held[0]._replace(reason=row(RUNNING), rounds=row(0))
            start = jax.block_until_ready(age(self.params, start, row(context)))
            *_, price, order = blocks[size].args
            args = self.params, start, self.mind, price, order._replace(rounds=on_device(count[size], np.int32))
            begin = time.perf_counter()
            held[0], _, _ = jax.block_until_ready(self._runs[blocks[size].key](*args))
            return (time.perf_counter() - begin) / max(1, int(held[0].rounds.max()))

        for size in blocks:  # warm, and how many rounds a launch should have
            run(size, at[0])
            count[size] = max(1, min(MEASURED_ROUNDS, int(MEASURED_SECONDS / run(size, at[0]))))
        return run


def narrowed(state: State, options: frozenset[str]) -> State:
    """Returns the state without what rows of these options have no use for."""
    kept = {"seed", *options}
    laid: dict[str, Any] = {field: None for field in state.sampling._fields if field not in kept}
    sampling = state.sampling._replace(**laid)
    state = state._replace(sampling=sampling)
    return state if "logprobs" in options else state._replace(logprobs=None, top=None)


def widened(new: State, old: State) -> State:
    """Returns the new state with what was laid aside of the old one."""
    laid = {f: getattr(old.sampling, f) for f in old.sampling._fields if getattr(new.sampling, f) is None}
    new = new._replace(sampling=new.sampling._replace(**laid))
    return new if new.logprobs is not None else new._replace(logprobs=old.logprobs, top=old.top)


def _said(options: frozenset[str]) -> str:
    return "every option" if options == ALL else "sampled" if options else "greedy"
