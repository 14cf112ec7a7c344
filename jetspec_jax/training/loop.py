"""The training loop: batches of row numbers through grain, checkpoints through orbax, one line every few steps.

What a step sees depends on its number alone, so a run that was cut off and started again ends with the same bits.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import grain
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from jetspec_jax.training import step
from jetspec_jax.training.features import Features
from jetspec_jax.training.step import Metrics, Recipe, TrainState


def batches(rows: np.ndarray, batch: int, seed: int) -> grain.MapDataset:
    """Row numbers [batch] for every step, by random access: shuffled anew in every epoch."""
    return grain.MapDataset.source(rows).shuffle(seed=seed).repeat().batch(batch)


def train(
    recipe: Recipe,
    target_params,
    features: Features,
    rows: np.ndarray,
    heldout: np.ndarray,
    folder: Path,
    *,
    batch: int,
    log_every: int,
    eval_every: int,
    save_every: int,
    on_time: Callable[[], bool] = lambda: True,
    log: Callable[[str], None] = lambda line: None,
) -> TrainState:
    """Trains up to `recipe.steps` from the last checkpoint in `folder`, or until time runs out; saves at the end.

    rows, heldout: row numbers of `features` to train on and to measure on. metrics.jsonl beside the checkpoints gets
    the same figures as the log.
    """
    folder = folder.resolve()
    update = jax.jit(step.update, static_argnums=0, donate_argnums=3)
    evaluate = jax.jit(step.evaluate, static_argnums=0)
    data, schedule = batches(rows, batch, recipe.seed), recipe.schedule
    # One shape: the last part repeats its rows.
    parts = [jnp.asarray(np.resize(heldout[i : i + batch], batch)) for i in range(0, heldout.size, batch)]
    state = step.init(recipe, target_params)
    with ocp.CheckpointManager(folder, options=ocp.CheckpointManagerOptions(max_to_keep=2)) as checkpoints:
        saved = checkpoints.latest_step()
        if saved is not None:
            like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
            state = checkpoints.restore(saved, args=ocp.args.StandardRestore(like))
            log(f"train: going on at step {saved}")
        first = at = int(state.step)
        window, begin = [], time.perf_counter()
        with open(folder / "metrics.jsonl", "a", encoding="utf-8") as file:
            while at < recipe.steps and on_time():
                state, metrics = update(recipe, target_params, features, state, jnp.asarray(data[at], jnp.int32))
                window.append(metrics)
                at += 1
                if at % log_every == 0 or at == recipe.steps:
                    record = {"step": at, **_mean(window)}  # waits for the device
                    now = time.perf_counter()
                    record |= {"ms_step": 1e3 * (now - begin) / len(window), "lr": float(schedule(at - 1))}
                    if heldout.size and (at % eval_every == 0 or at == recipe.steps):
                        score = lambda part: evaluate(recipe, target_params, features, state.params, part)  # noqa: B023
                        scores = _mean([score(part) for part in parts])
                        record |= {f"heldout_{key}": value for key, value in scores.items()}
                    log("train: " + "  ".join(f"{key} {_show(value)}" for key, value in record.items()))
                    file.write(json.dumps(record) + "\n")
                    file.flush()
                    window, begin = [], time.perf_counter()
                if at % save_every == 0:
                    checkpoints.save(at, args=ocp.args.StandardSave(state))
        if at > first and checkpoints.latest_step() != at:
            checkpoints.save(at, args=ocp.args.StandardSave(state))
        checkpoints.wait_until_finished()
    return state


def _mean(metrics: list[Metrics]) -> dict[str, float]:
    fetched = jax.device_get(metrics)
    return {name: float(np.mean([getattr(m, name) for m in fetched])) for name in Metrics._fields}


def _show(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.3g}" if value < 0.01 else f"{value:.3f}"
