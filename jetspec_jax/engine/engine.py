"""The host's side of a batch: requests are admitted to rows, and all rows advance together.

engine = Engine(target, head, decoder, geometry)
engine.admit(rows)
while not engine.over():
    engine.advance(engine.pace())
results = engine.results()
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jetspec_jax.engine import geometry as sizes
from jetspec_jax.engine import requests
from jetspec_jax.engine.geometry import Geometry
from jetspec_jax.engine.pacing import UNBOUND, Pacer
from jetspec_jax.engine.programs import program
from jetspec_jax.engine.rows import Result, Row, cut_rounds
from jetspec_jax.engine.spread import agreed, fetch
from jetspec_jax.files import pair
from jetspec_jax.files.pair import LoadedHead, LoadedTarget
from jetspec_jax.loop.decoder import Decoder, insert, prefill, prefill_recorded, rounds, step_recorded
from jetspec_jax.loop.state import LENGTH, TEXT, Round, State
from jetspec_jax.options import AUTO

STOP_ROUNDS = 8  # between two looks for stop strings
FIRST_ROUNDS = 4  # of a batch whose pace is not known yet
BLOCK_SECONDS = 1.0  # of rounds in one launch, between two of which Python may answer a signal


class Engine:
    """A batch on the device, and the only owner of its state.

    rows: the request of each slot; None is free.
    seconds: load, compile, prefill, decode.
    """

    def __init__(
        self,
        target: LoadedTarget,
        head: LoadedHead | None,
        decoder: Decoder,
        geometry: Geometry,
        settings: dict[str, Any] | None = None,
        pacer: Pacer | None = None,
    ):
        """Makes an engine without rows.

        Args:
          target: what `load_target` returns.
          head: what `load_head` returns; None where `decoder` decodes plainly.
          decoder: the static loop.
          geometry: its sizes.
          settings: what results say of the run, beside what the engine knows. A `prune` among them holds for all rows.
          pacer: chooses how many nodes rounds verify; None is always those of `decoder`, its largest.
        """
        self.target, self.head, self.decoder, self.geometry = target, head, decoder, geometry
        self.rows: list[Row | None] = [None] * geometry.batch
        self.seconds = {"load": target.seconds + (head.seconds if head else 0.0), "compile": 0.0}
        self.seconds |= {"prefill": 0.0, "decode": 0.0}
        self._state: State | None = None
        self._params = {"target": target.params, "draft": head.params if head else None}
        self._request: Any = None  # of the first admission, whose logits can be asked for
        self._pace, self.pacer = FIRST_ROUNDS, pacer
        self._settings = {
            "rows": decoder.nodes,
            "depth": decoder.depth,
            "capacity": geometry.capacity,
            "prefill_chunk": decoder.prefill_chunk,
            "dtype": str(target.dtype),
            "attention": target.model.backend.name,
            "device": jax.devices()[0].device_kind,
        } | (settings or {})
        if mesh := getattr(target, "mesh", None):
            self._settings["mesh"] = dict(mesh.shape)

    @property
    def state(self) -> State:
        """The batch on the device."""
        if self._state is None:
            raise ValueError("no row has been admitted yet")
        return self._state

    @state.setter
    def state(self, state: State) -> None:
        self._state = state

    def admit(self, new: Sequence[Row], least: int = 0) -> list[int]:
        """Prefills rows into free slots, and returns the slots.

        The first call prefills all its rows as one batch. A later one puts them into the running batch, one by one;
        their tokens are those that they would have alone.

        Args:
          new: rows that no engine has.
          least: prompt slots that the first call's batch has at least; what a longer prompt needs serves them too.

        Raises:
          ValueError: there are fewer free slots, or a row needs other sizes or options than the engine was made for.
        """
        free = [slot for slot, row in enumerate(self.rows) if row is None][: len(new)]
        if len(free) < len(new):
            raise ValueError(f"{len(new)} rows: only {len(free)} of {len(self.rows)} slots are free")
        fitted = [self._fit(row) for row in new]
        if self._state is None:  # one batch, as wide as its longest prompt
            sizes = dataclasses.replace(self.geometry, prompt=max(least, *(one.prompt for one in fitted)))
            self._request = self._arrays(new, sizes)
            self.state = self._prefilled(self._request)
            if self.pacer:
                self.pacer.prepare(self._params, self.state)
                self.seconds["compile"] += self.pacer.seconds
        else:
            for slot, row, one in zip(free, new, fitted, strict=True):
                # Every group of devices reads the row, and the one that has the slot takes it.
                fresh = self._prefilled(self._arrays([row] * one.batch, one))
                args = self.state, jnp.int32(slot), fresh
                self.state = self._program(insert, *args, donate=(0,))(*args)
            if self.pacer:
                running = sum(row is not None for row in self.rows)
                self.pacer.admitted(self.state, len(free) / max(running + len(free), 1))
        for slot, row in zip(free, new, strict=True):
            self.rows[slot] = row
        self._read()
        return free

    def advance(self, n: int) -> None:
        """Runs at most n rounds in one launch; fewer where the pacer has chosen for fewer."""
        if self.pacer:
            run = functools.partial(self.pacer.advance, self._params, self.state, n)
        else:
            args = self._params, self.state, jnp.int32(n)
            run = functools.partial(self._program(rounds, *args, donate=(1,)), *args)
        begin = time.perf_counter()
        self.state = jax.block_until_ready(run())
        spent = time.perf_counter() - begin
        self.seconds["decode"] += spent
        self._pace = agreed(max(1, min(self.decoder.capacity, int(n * BLOCK_SECONDS / max(spent, 1e-6)))))
        self._read()

    def pace(self) -> int:
        """Returns how many rounds one launch should have: about a second, fewer where stop strings are awaited."""
        awaited = any(row is not None and row.text is not None for row in self.rows)
        usual = self.pacer.rounds() if self.pacer else self._pace
        return min(usual, STOP_ROUNDS) if awaited else usual

    def finish(self) -> list[Result]:
        """Advances to the end of every row, and returns the results."""
        while not self.over():
            self.advance(self.pace())
        return self.results()

    def record(self) -> Round:
        """Runs one round and returns what it did, beside the state."""
        if not self.pacer:
            return self.run(step_recorded)
        begin = time.perf_counter()
        self.state, value = self.pacer.record(self._params, self.state)
        self.seconds["decode"] += time.perf_counter() - begin
        self._read()
        return value

    def run(self, function, *rest) -> Any:
        """Runs a program of (decoder, params, state, *rest) that returns (state, value); gives the value."""
        args = self._params, self.state, *rest
        run = self._program(function, *args, donate=(1,))
        begin = time.perf_counter()
        self.state, value = jax.block_until_ready(run(*args))
        self.seconds["decode"] += time.perf_counter() - begin
        self._read()
        return value

    def first_logits(self) -> jax.Array:
        """Returns f32 logits [B, V] that chose the first token of every row, from a second prefill of the prompts."""
        args = self._params, self._request
        return self._program(prefill_recorded, *args)(*args)[1]

    def budgets(self, nodes: Sequence[int]) -> None:
        """Sets the tree nodes of every slot's rounds from now on; compiles nothing."""
        self.state = self.state._replace(budget=jnp.array(nodes, jnp.int32))

    def release(self, slot: int) -> None:
        """Frees a slot; a row that is still running ends."""
        state = self.state
        reason = fetch(state.reason).copy()
        reason[slot] = reason[slot] or LENGTH
        self.state, self.rows[slot] = state._replace(reason=jnp.asarray(reason)), None

    def new_ids(self) -> list[list[int]]:
        """Returns the tokens committed so far in every slot, in one transfer: slicing on the device would compile."""
        s = self.state
        tokens, first, last = fetch((s.tokens, s.prompt_length, s.length))
        return [tokens[slot, first[slot] : last[slot]].tolist() for slot in range(len(self.rows))]

    def ended(self) -> list[int]:
        """Returns the slots of the rows that have ended."""
        reasons = fetch(self.state.reason)
        return [slot for slot, row in enumerate(self.rows) if row is not None and reasons[slot]]  # RUNNING is 0

    def over(self) -> bool:
        """Returns whether every row has ended."""
        return len(self.ended()) == sum(row is not None for row in self.rows)

    def results(self) -> list[Result]:
        """Returns one result for each row that has ended, in the order of the slots."""
        state = fetch(self.state._replace(cache=(), draft=None))
        dtype = str(self.target.dtype)
        ended = [(slot, row) for slot, row in enumerate(self.rows) if row is not None and state.reason[slot]]
        results = [row.result(state, slot, self.seconds, self._settings, dtype) for slot, row in ended]
        if self.pacer:
            self.pacer.remember()
        if self.decoder.depth:
            drafted = [n for r in results for n, size in zip(r.accept_lengths, r.tree_sizes, strict=True) if size > 1]
            total, verified = len(drafted), sum(drafted)
            pair.note_acceptance(self.target, self.head, total, verified / max(total, 1))
        return results

    def _arrays(self, new: Sequence[Row], geometry: Geometry):
        budgets = [UNBOUND if r.budget == AUTO else int(r.budget) for r in new]
        request = requests.arrays([r.ids for r in new], [r.option for r in new], budgets, geometry)
        least = self._settings.get("prune", 0.0)
        return request._replace(least=jnp.full(geometry.batch, least, jnp.float32)) if least else request

    def _prefilled(self, request) -> State:
        run = self._program(prefill, self._params, request)
        begin = time.perf_counter()
        state = jax.block_until_ready(run(self._params, request))
        self.seconds["prefill"] += time.perf_counter() - begin
        return state

    def _fit(self, row: Row) -> Geometry:
        """Returns the engine's sizes for one row, with a prompt of its own size, so that a short one is read fast."""
        draft, chunk = self.decoder.draft, self.decoder.prefill_chunk
        needed = Geometry.fit([row.ids], [row.option], draft, chunk)
        if not self.geometry.holds(needed):
            raise ValueError(f"a row needs {needed}, and this engine was made for {self.geometry}")
        room = self.geometry.capacity - draft.depth - 1  # what is read in chunks fills it: any number is one program
        prompt = needed.prompt if needed.prompt <= min(chunk, room) else room
        return dataclasses.replace(self.geometry, batch=sizes.groups(self.decoder.target), prompt=prompt)

    def _read(self) -> None:
        """Brings the texts up to date; ends the rows that have met a stop string at the token that completes it.

        What such a row has computed after it is taken back: its length, its rounds, and what the last of them emitted.
        """
        if not any(row is not None and row.text is not None for row in self.rows):
            return
        ids, reasons = self.new_ids(), fetch(self.state.reason)
        found = {slot: row.read(ids[slot], int(reasons[slot])) for slot, row in enumerate(self.rows) if row is not None}
        ended = {slot: kept for slot, kept in found.items() if kept is not None}
        if ended:
            self.state = _cut(self.state, ended)

    def _program(self, function, *args, donate: tuple[int, ...] = ()):
        compiled = program(function, self.decoder, *args, donate=donate)
        self.seconds["compile"] += compiled.seconds
        return compiled.run


def _cut(state: State, ended: dict[int, int]) -> State:
    """Returns the state with some rows ended after that many new tokens, and the records of their rounds cut."""
    names = ("length", "reason", "rounds", "accept_lengths", "tree_sizes", "emitted")
    arrays: dict[str, Any] = {name: fetch(getattr(state, name)).copy() for name in names}
    first = fetch(state.prompt_length)
    for slot, kept in ended.items():
        emitted = cut_rounds(arrays["emitted"][slot].tolist(), kept)
        count = len(emitted)
        arrays["emitted"][slot, :count] = emitted
        for name in ("accept_lengths", "tree_sizes", "emitted"):
            arrays[name][slot, count:] = 0
        arrays["rounds"][slot], arrays["reason"][slot] = count, TEXT
        arrays["length"][slot] = first[slot] + kept
    for name, value in arrays.items():
        arrays[name] = jnp.asarray(value)
    return state._replace(**arrays)
