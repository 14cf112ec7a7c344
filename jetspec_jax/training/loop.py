"""The training loop: batches in, checkpoints and records out, an evaluation every few hundred steps.

What a step sees depends on the checkpoint alone (parameters, optimiser, position in the data, key), so a run that was
cut off and started again ends with the same bits.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jetspec_jax.engine import spread
from jetspec_jax.models import sharding
from jetspec_jax.training import evaluation, features, flops, journal, step, stop
from jetspec_jax.training.checkpoints import Checkpoints
from jetspec_jax.training.data.batches import Batch, Batches
from jetspec_jax.training.data.packing import Packed
from jetspec_jax.training.journal import Journal
from jetspec_jax.training.recipe import Recipe
from jetspec_jax.training.step import Metrics, TrainState
from jetspec_jax.training.teacher import Features

TALK = 16  # steps between two looks of several processes at each other's signals
AHEAD = 3  # batches on the device at a time; more would fill it with what waits


class TrainingError(RuntimeError):
    """Training cannot go on; the message is one line for the user."""


@dataclasses.dataclass(frozen=True)
class Plan:
    """When the loop looks, and at what. Numbers are steps.

    heldout: sequences of the evaluation, None for none; budgets, width: its trees, the middle budget decides what is
    best. resume_step: 0 is the newest checkpoint.
    """

    log_every: int
    eval_every: int
    save_every: int
    heldout: Packed | None = None
    budgets: tuple[int, ...] = (16, 32, 64, 128, 256)
    width: int = 64
    resume_step: int = 0

    @property
    def judge(self) -> str:
        """The budget whose acceptance length decides."""
        return str(self.budgets[len(self.budgets) // 2])


@dataclasses.dataclass(frozen=True)
class Given:
    """What a run learns from.

    target: what `load_target` returns, its parameters placed on the mesh. scale: of the tapped channels. kept: features
    of all sequences on the device, None where batches bring them or steps make them. start: parameters to begin with
    instead of random ones. decided: those that the data decides, beside random ones.
    """

    target: Any
    scale: jax.Array
    data: Batches
    kept: Features | None = None
    start: dict | None = None
    decided: dict = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """Where a command left the run."""

    state: TrainState
    best: dict | None  # parameters with the best acceptance length, None where nothing was evaluated
    notes: dict[str, Any]  # skipped, best, best_step


def train(
    recipe: Recipe,
    given: Given,
    folder: Path,
    plan: Plan,
    mesh: jax.sharding.Mesh,
    on_time: Callable[[], bool] = lambda: True,
    log: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Trains up to `recipe.steps` from the newest whole checkpoint, until time runs out or SIGTERM comes; saves then.

    The state that the command ends with is evaluated too, unless SIGTERM came.

    Raises:
      TrainingError: a loss or gradient is not finite; the state before it stays on the disk.
      ConfigError: no checkpoint in `folder` can be read.
      checkpoints.NotSaved: a checkpoint cannot be written; those before it stay.
    """
    with Checkpoints(folder) as checkpoints, stop.asked(log) as asked:
        stopped = asked
        if jax.process_count() > 1:
            together = _Together(asked, on_time)
            stopped, on_time = together.stopped, together.on_time
        run = _Run(recipe, given, folder, plan, mesh, checkpoints)
        run.begin(log)
        with run.journal:
            if run.owes(run.due):
                run.record(stopped, True)
            batches = given.data.stream(run.position)
            while run.at < recipe.steps and on_time() and not stopped():
                run.take(next(batches), stopped)
            run.check()
            if run.at and not stopped() and run.owes(True):
                run.record(stopped, True)
            run.save()
        if run.at < recipe.steps:
            why = "SIGTERM" if stopped() else "time is up"
            log(f"train: {why} at step {run.at} of {recipe.steps}; the same command goes on")
        return run.outcome(log)


class _Together:
    """The questions whether to stop, with answers that all processes share: each step is a step of all of them.

    SIGTERM to any of them stops all; the first one's clock counts. They speak once every `TALK` questions, so that a
    step seldom waits for the one before.
    """

    def __init__(self, stopped: Callable[[], bool], on_time: Callable[[], bool]):
        self._stopped, self._on_time = stopped, on_time
        self._ended, self._timely, self._asked = False, True, 0

    def on_time(self) -> bool:
        came = self._stopped()  # each time, so that the signal counts as heard
        if self._asked % TALK == 0:
            self._ended, self._timely = spread.any_of(came), bool(spread.agreed(int(self._on_time())))
        self._asked += 1
        return self._timely

    def stopped(self) -> bool:
        return self._ended


class _Run:
    """One command's part of a run."""

    def __init__(self, recipe: Recipe, given: Given, folder: Path, plan: Plan, mesh, checkpoints: Checkpoints):
        self._recipe, self._given, self._folder, self._plan, self._mesh = recipe, given, folder, plan, mesh
        self._checkpoints = checkpoints
        self._shapes = jax.eval_shape(self._made, given.target.params)
        self._layout = sharding.trained(self._shapes, mesh)
        self._scale = jax.device_put(given.scale, sharding.repeated(mesh))
        self._update = jax.jit(
            step.update, static_argnums=0, donate_argnums=3, out_shardings=(self._layout, sharding.repeated(mesh))
        )
        self._gather = jax.jit(features.gather, out_shardings=sharding.split(mesh, axis=1))
        first = given.data[0]
        online = given.kept is None and first.features is None
        sequences = jax.process_count() * first.rows.size
        work = flops.parts(recipe, given.target.config, sequences, first.tokens.shape[-1], online)
        self._work, self._rate = sum(work.values()), flops.matrix_rate(recipe.dtype) * mesh.size
        self.notes: dict[str, Any] = {"skipped": 0, "best": 0.0, "best_step": 0}
        self._window: list[Metrics] = []
        self._timed, self._tokens, self._begun = 0, 0, 0.0

    def _made(self, target_params) -> TrainState:
        return step.init(self._recipe, target_params, self._given.start, self._given.decided)

    def begin(self, log: Callable[[str], None]) -> None:
        """Reads the state to go on from, or makes the first one: a state is large, so there is only one at a time."""
        like = jax.tree.map(
            lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), self._shapes, self._layout
        )
        if found := self._checkpoints.restore(like, self._plan.resume_step, log):
            self.state, self.notes = found
            log(f"train: going on at step {int(self.state.step)}")
        else:
            self.state = jax.jit(self._made, out_shardings=self._layout)(self._given.target.params)
        # The state's own may be older, where the run went back; a best head that cannot be read is none to beat.
        best = self._checkpoints.restore_best(like.params, log)
        self.notes |= _noted(best[1] if best else {})
        self.at, self.position = int(self.state.step), int(self.state.position)
        self._saved, self._first = (self.at if found else None), self.at
        self._known = {r["step"]: r for r in journal.read(self._folder) if r["step"] <= self.at}
        self.journal = Journal(self._folder, self._recipe.steps, self.at, jax.process_index() == 0)
        self._restart()

    @property
    def due(self) -> bool:
        """Whether this step is one that is evaluated."""
        return self.at > 0 and (self.at % self._plan.eval_every == 0 or self.at == self._recipe.steps)

    def owes(self, due: bool) -> bool:
        """Whether the state has no evaluation that it should have: SIGTERM may have come in the middle of it."""
        return due and self._plan.heldout is not None and "heldout" not in self._known.get(self.at, {})

    def take(self, batch: Batch | None, stopped: Callable[[], bool]) -> None:
        """Makes one step, with what belongs to it; None is a batch without an anchor."""
        plan = self._plan
        if batch is None:
            self.position, self.notes["skipped"] = self.position + 1, self.notes["skipped"] + 1
            self.state = self.state._replace(position=self.state.position + 1)
            return
        placed = _put(batch, self._mesh)
        if self._given.kept is not None:
            placed = placed._replace(features=self._gather(self._given.kept, placed.rows))
        self.state, metrics = self._update(self._recipe, self._given.target.params, self._scale, self.state, placed)
        self._window.append(metrics)
        self.at, self.position, self._timed = self.at + 1, self.position + 1, self._timed + 1
        self._tokens += batch.size * jax.process_count()
        if len(self._window) > AHEAD:
            self._window[-AHEAD].loss.block_until_ready()
        evaluates = self.owes(self.due)
        if self.at % plan.log_every == 0 or self.at == self._recipe.steps or evaluates:
            self.record(stopped, evaluates)
        elif self.at == self._first + 1:
            metrics.loss.block_until_ready()  # the first step compiles, which is no part of the rate
            self._restart(keep=True)
        self.journal.tick(self.at)
        if self.at % plan.save_every == 0:
            self.check()
            self.save()

    def record(self, stopped: Callable[[], bool], evaluates: bool) -> None:
        """Writes what the steps since the last record came to, with an evaluation where one is wanted."""
        record: dict[str, Any] = {"step": self.at} | self._known.get(self.at, {})
        if self._window:
            record |= _mean(self._window)  # waits for the device
            self.check()
            seconds = time.perf_counter() - self._begun
            record |= {"lr": float(self._recipe.schedule(self.at - 1)), "skipped": self.notes["skipped"]}
            if self._timed:
                record |= {
                    "ms_step": 1e3 * seconds / self._timed,
                    "tokens_per_second": self._tokens / seconds,
                    "mfu": self._work * self._timed / (seconds * self._rate),
                }
        if evaluates and (found := self._evaluate(stopped)):
            record["heldout"] = found
            tau = found["acceptance"][self._plan.judge]
            if tau > self.notes["best"]:
                self.notes |= {"best": tau, "best_step": self.at}
                self._checkpoints.save_best(self.at, self.state.params, tau)
        self.journal.record(record)
        self._known[self.at] = record
        self._restart()

    def _evaluate(self, stopped: Callable[[], bool]) -> dict[str, Any] | None:
        plan, heldout = self._plan, self._plan.heldout
        assert heldout is not None  # else none is owed
        return evaluation.measure(
            self._recipe, self._given.target.params, self._scale, self.state.params, heldout, plan.budgets, plan.width,
            min(4, len(heldout.tokens)), stopped,
        )  # fmt: skip

    def _restart(self, keep: bool = False) -> None:
        self._window = self._window if keep else []
        self._timed, self._tokens, self._begun = 0, 0, time.perf_counter()

    def save(self) -> None:
        """Writes the state, unless it is written."""
        if self.at and self._saved != self.at:
            self._checkpoints.save(self.at, self.state, self.notes)
            self._saved = self.at

    def check(self) -> None:
        """Stops at a value that is not finite; nothing of it has reached the parameters."""
        position = int(self.state.broken)
        if position < 0:
            return
        names, path = self._given.data.identities(position), self._folder / "broken.json"
        path.write_text(json.dumps({"position": position, "documents": names}, indent=1) + "\n")
        shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
        raise TrainingError(
            f"step {int(self.state.step)}: the loss or gradient of batch {position} is not finite (documents {shown}; "
            f"all in {path}); try a lower --config.peak_lr or --config.clip, --config.dtype=float32, or look at these "
            "rows"
        )

    def outcome(self, log: Callable[[str], None]) -> Outcome:
        """Returns where the run is, when everything is on the disk."""
        self._checkpoints.wait()
        best = self._checkpoints.restore_best(self.state.params, log)
        self.notes |= _noted(best[1] if best else {})
        return Outcome(self.state, best[0] if best else None, self.notes)


def _noted(best: dict[str, Any]) -> dict[str, Any]:
    """The notes of a state about the best head, from that head's own."""
    return {"best": best.get("acceptance", 0.0), "best_step": best.get("step", 0)}


def _put(batch: Batch, mesh) -> Batch:
    """This process's share on its devices, as a part of the whole batch."""
    over = sharding.split(mesh, axis=1)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(over, x), batch)


def _mean(metrics: list[Metrics]) -> dict[str, float]:
    fetched = jax.device_get(metrics)
    return {name: float(np.mean([getattr(m, name) for m in fetched])) for name in Metrics._fields}
