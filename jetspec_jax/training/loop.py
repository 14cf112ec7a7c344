"""The training loop: batches in, checkpoints and records out, an evaluation every few hundred steps.

What a step sees depends on the checkpoint alone (parameters, optimiser, position in the data, key), so a run that was
cut off and started again ends with the same bits.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jetspec_jax.models import sharding
from jetspec_jax.training import evaluation, features, flops, step
from jetspec_jax.training.checkpoints import Checkpoints
from jetspec_jax.training.data.batches import Batch, Batches
from jetspec_jax.training.data.packing import Packed
from jetspec_jax.training.journal import Journal
from jetspec_jax.training.recipe import Recipe
from jetspec_jax.training.step import Metrics, TrainState
from jetspec_jax.training.teacher import Features

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
class Outcome:
    """Where a command left the run."""

    state: TrainState
    best: dict | None  # parameters with the best acceptance length, None where nothing was evaluated
    notes: dict[str, Any]  # skipped, best, best_step


def train(
    recipe: Recipe,
    target,
    scale: jax.Array,
    data: Batches,
    kept: Features | None,
    folder: Path,
    plan: Plan,
    mesh: jax.sharding.Mesh,
    start: dict | None = None,
    on_time: Callable[[], bool] = lambda: True,
    log: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """Trains up to `recipe.steps` from the newest whole checkpoint, until time runs out or SIGTERM comes; saves then.

    target: what `load_target` returns, its parameters placed on the mesh. kept: features of all sequences on the
    device, None where batches bring them or steps make them. start: parameters to begin with instead of random ones.

    Raises:
      TrainingError: a loss or gradient is not finite; the state before it stays on the disk.
      ConfigError: no checkpoint in `folder` can be read.
    """
    make = lambda norm: step.init(recipe, norm, start)
    fresh = jax.eval_shape(make, target.params["norm"])
    layout = sharding.trained(fresh, mesh)
    update = jax.jit(step.update, static_argnums=0, donate_argnums=3, out_shardings=(layout, sharding.repeated(mesh)))
    gather = jax.jit(features.gather, out_shardings=sharding.split(mesh, axis=1))
    scale = jax.device_put(scale, sharding.repeated(mesh))
    length = data[0].tokens.shape[-1]
    sequences = jax.process_count() * data[0].rows.size
    work = sum(
        flops.parts(recipe, target.config, sequences, length, kept is None and data[0].features is None).values()
    )
    rate = flops.matrix_rate(recipe.dtype) * mesh.size

    with Checkpoints(folder) as checkpoints, _stop_signal() as stopped:
        notes: dict[str, Any] = {"skipped": 0, "best": 0.0, "best_step": 0}
        # A state is large: none is made where one is read.
        if found := checkpoints.restore(_placed(fresh, layout), plan.resume_step, log):
            state, notes = found
            log(f"train: going on at step {int(state.step)}")
        else:
            state = jax.jit(make, out_shardings=layout)(target.params["norm"])
        # The state's own may be older, where the run went back; a best head that cannot be read is none to beat.
        best = checkpoints.restore_best(_placed(fresh, layout).params, log)
        notes |= _noted(best[1] if best else {})
        del best
        at, position = int(state.step), int(state.position)
        saved, first = (at if found else None), at
        lead = jax.process_index() == 0
        with Journal(folder, recipe.steps, at) if lead else contextlib.nullcontext() as journal:
            window: list[Metrics] = []
            timed, tokens, begin = 0, 0, time.perf_counter()
            while at < recipe.steps and on_time() and not stopped():
                if not data.anchored(position):
                    position, notes["skipped"] = position + 1, notes["skipped"] + 1
                    state = state._replace(position=state.position + 1)
                    continue
                batch = data[position]
                placed = _put(batch, mesh)
                if kept is not None:
                    placed = placed._replace(features=gather(kept, placed.rows))
                state, metrics = update(recipe, target.params, scale, state, placed)
                window.append(metrics)
                at, position, timed = at + 1, position + 1, timed + 1
                tokens += batch.size * jax.process_count()
                if len(window) > AHEAD:
                    window[-AHEAD].loss.block_until_ready()
                evaluates = plan.heldout is not None and (at % plan.eval_every == 0 or at == recipe.steps)
                if at % plan.log_every == 0 or at == recipe.steps or evaluates:
                    record: dict[str, Any] = {"step": at, **_mean(window)}  # waits for the device
                    _check(state, data, folder)
                    seconds = time.perf_counter() - begin
                    record |= {
                        "lr": float(recipe.schedule(at - 1)),
                        "ms_step": 1e3 * seconds / timed,
                        "tokens_per_second": tokens / seconds,
                        "mfu": work * timed / (seconds * rate),
                        "skipped": notes["skipped"],
                    }
                    if evaluates:
                        record["heldout"] = _evaluate(recipe, target, scale, state, plan)
                        tau = record["heldout"]["acceptance"][plan.judge]
                        if tau > notes["best"]:
                            notes |= {"best": tau, "best_step": at}
                            checkpoints.save_best(at, state.params, tau)
                    if journal:
                        journal.record(record)
                    window, timed, tokens, begin = [], 0, 0, time.perf_counter()
                elif at == first + 1:
                    metrics.loss.block_until_ready()  # the first step compiles, which is no part of the rate
                    timed, tokens, begin = 0, 0, time.perf_counter()
                if journal:
                    journal.tick(at)
                if at % plan.save_every == 0:
                    _check(state, data, folder)
                    checkpoints.save(at, state, notes)
                    saved = at
            _check(state, data, folder)
            if saved != at and at:
                checkpoints.save(at, state, notes)
            if at < recipe.steps:
                why = "SIGTERM" if stopped() else "time is up"
                log(f"train: {why} at step {at} of {recipe.steps}; the same command goes on")
        checkpoints.wait()
        best = checkpoints.restore_best(state.params, log)
        notes |= _noted(best[1] if best else {})
    return Outcome(state, best[0] if best else None, notes)


def _placed(shapes, layout):
    return jax.tree.map(lambda x, where: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes, layout)


def _noted(best: dict[str, Any]) -> dict[str, Any]:
    """The notes of a state about the best head, from that head's own."""
    return {"best": best.get("acceptance", 0.0), "best_step": best.get("step", 0)}


def _put(batch: Batch, mesh) -> Batch:
    """This process's share on its devices, as a part of the whole batch."""
    over = sharding.split(mesh, axis=1)
    return jax.tree.map(lambda x: jax.make_array_from_process_local_data(over, x), batch)


def _evaluate(recipe: Recipe, target, scale, state: TrainState, plan: Plan) -> dict[str, Any]:
    assert plan.heldout is not None  # asked by the caller
    batch = min(4, len(plan.heldout.tokens))
    return evaluation.measure(recipe, target.params, scale, state.params, plan.heldout, plan.budgets, plan.width, batch)


def _check(state: TrainState, data: Batches, folder: Path) -> None:
    """Stops at a value that is not finite; nothing of it has reached the parameters."""
    position = int(state.broken)
    if position < 0:
        return
    names = data.identities(position)
    (folder / "broken.json").write_text(json.dumps({"position": position, "documents": names}, indent=1) + "\n")
    shown = ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")
    raise TrainingError(
        f"step {int(state.step)}: the loss or gradient of batch {position} is not finite (documents {shown}; all in "
        f"{folder / 'broken.json'}); try a lower --config.peak_lr or --config.clip, --config.dtype=float32, or look at "
        "these rows"
    )


def _mean(metrics: list[Metrics]) -> dict[str, float]:
    fetched = jax.device_get(metrics)
    return {name: float(np.mean([getattr(m, name) for m in fetched])) for name in Metrics._fields}


@contextlib.contextmanager
def _stop_signal() -> Iterator[Callable[[], bool]]:
    """Turns SIGTERM into a question that the loop asks after every step."""
    came = []
    try:
        old = signal.signal(signal.SIGTERM, lambda *_: came.append(True))
    except ValueError:  # not the main thread: whoever runs us handles signals
        yield lambda: False
        return
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGTERM, old)
