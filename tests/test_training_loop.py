"""The loop: checkpoints, going on, signals, gaps and broken batches."""

import dataclasses
import json
import logging
import os
import pathlib
import re
import signal
import subprocess
import sys
import time
import types

import chex
import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
from small import (
    WIDTH,
    random_examples,
    recipe,
    target,
)

from jetspec_jax.config import ConfigError
from jetspec_jax.models import sharding
from jetspec_jax.training import evaluation, journal, loop, stop
from jetspec_jax.training.checkpoints import Checkpoints
from jetspec_jax.training.data import packing
from jetspec_jax.training.data.batches import Batches
from jetspec_jax.training.step import TrainState

ROOT = pathlib.Path(__file__).parent.parent


def run(folder, steps, packed, plan=None, data=None, start=None, **change):
    r = recipe(steps=steps)
    plan = plan or loop.Plan(log_every=5, eval_every=1000, save_every=1000)
    data = data or Batches(packed, 4, 1, 0)
    scale = jnp.ones(32)
    given = loop.Given(target(), scale, data, start=start)
    return loop.train(r, given, folder, plan, sharding.make_mesh(1, jax.devices()[:1]), **change)


def test_twenty_steps_are_ten_and_ten_to_the_bit(tmp_path):
    packed = packing.pack(random_examples(30), WIDTH)
    whole = run(tmp_path / "whole", 20, packed)
    clock = iter([True] * 10)
    stopped = run(tmp_path / "halves", 20, packed, on_time=lambda: next(clock, False))
    assert int(stopped.state.step) == 10
    resumed = run(tmp_path / "halves", 20, packed)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    curves = [[(r["step"], r["loss"]) for r in journal.read(tmp_path / name)] for name in ("whole", "halves")]
    assert curves[0] == curves[1] and len(curves[0]) == 4
    for record in journal.read(tmp_path / "whole"):  # the rate that made the step, not that of the next
        assert record["lr"] == pytest.approx(float(recipe(steps=20).schedule(record["step"] - 1)))

    # A damaged checkpoint is passed over with a word; one that is asked for by number must be there.
    newest = tmp_path / "halves" / "states" / "20"
    for path in newest.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    said = []
    again = run(tmp_path / "halves", 20, packed, log=said.append)
    assert not any("bound method" in line or "\n" in line for line in said)
    assert any("checkpoint 20 cannot be read" in line for line in said) and "going on at step 10" in said[-1]
    jax.tree.map(np.testing.assert_array_equal, again.state, whole.state)
    with pytest.raises(ConfigError, match=r"resume_step=7: .* holds \[20, 10\]"):
        run(tmp_path / "halves", 20, packed, loop.Plan(5, 1000, 1000, resume_step=7))


def test_echoes_of_a_damaged_array_are_kept_back_and_nothing_else_is(tmp_path, capsys):
    hook = sys.excepthook
    with loop.Checkpoints(tmp_path):
        sys.excepthook(RuntimeError, RuntimeError("Event loop is closed"), None)
        closed = types.SimpleNamespace(object=None, exc_value=RuntimeError("Event loop is closed"))
        sys.unraisablehook(closed)
        logging.getLogger("asyncio").error("Task exception was never retrieved")
        assert capsys.readouterr().err == ""
        sys.excepthook(RuntimeError, RuntimeError("another"), None)
        assert "another" in capsys.readouterr().err
    assert sys.excepthook is hook and not logging.getLogger("asyncio").filters


def test_a_full_device_is_no_damaged_checkpoint(tmp_path, monkeypatch):
    packed = packing.pack(random_examples(30), WIDTH)
    first = run(tmp_path, 5, packed, loop.Plan(5, 5, 5))

    def full(*given, **named):
        raise ValueError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="RESOURCE_EXHAUSTED"):
        patch.setattr(ocp.CheckpointManager, "restore", full)
        run(tmp_path, 5, packed, loop.Plan(5, 5, 5))
    again = run(tmp_path, 5, packed, loop.Plan(5, 5, 5))
    jax.tree.map(np.testing.assert_array_equal, again.state.params, first.state.params)


def test_the_best_head_keeps_its_own_step_when_the_run_goes_back(tmp_path, monkeypatch):
    packed = packing.pack(random_examples(30), WIDTH)
    figures = iter([1.5, 3.0, 2.0, 2.5])
    monkeypatch.setattr(loop.evaluation, "measure", lambda *given: {"acceptance": {"2": next(figures)}})
    plan = loop.Plan(5, 5, 5, heldout=packed, budgets=(2,))
    best = lambda found: (found.notes["best_step"], found.notes["best"])
    assert best(run(tmp_path, 10, packed, plan)) == (10, 3.0)
    again = run(tmp_path, 10, packed, dataclasses.replace(plan, resume_step=5))
    assert best(again) == (10, 3.0)  # 2.0 is no new best, though the state of step 5 knows of 1.5 alone
    jax.tree.map(np.testing.assert_array_equal, again.best, again.state.params)
    with loop.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_best(5, again.best, 4.0)
        checkpoints.wait()
        assert checkpoints.restore_best(again.best, print)[1] == {"step": 5, "acceptance": 4.0}
    assert (tmp_path / "later-best-10").is_dir()  # a kill before the save loses nothing


def test_a_damaged_best_head_is_said_and_none_to_beat(tmp_path, monkeypatch):
    """FC-52: a figure whose head is lost must not keep worse heads from being the best."""
    packed = packing.pack(random_examples(30), WIDTH)
    figures = iter([3.0, 2.0])
    monkeypatch.setattr(loop.evaluation, "measure", lambda *given: {"acceptance": {"2": next(figures)}})
    plan = loop.Plan(5, 5, 5, heldout=packed, budgets=(2,))
    left = iter(range(5))
    run(tmp_path, 10, packed, plan, on_time=lambda: next(left, None) is not None)
    for path in (tmp_path / "best" / "5" / "params").rglob("*"):
        if path.is_file() and path.stat().st_size > 500:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    said = []
    found = run(tmp_path, 10, packed, plan, log=said.append)
    assert any(line.startswith("train: the best head, of step 5, cannot be read") for line in said)
    assert (found.notes["best_step"], found.notes["best"]) == (10, 2.0)
    jax.tree.map(np.testing.assert_array_equal, found.best, found.state.params)


def test_sigterm_saves_and_ends(tmp_path):
    packed = packing.pack(random_examples(30), WIDTH)

    class Ending(Batches):
        def __getitem__(self, number):
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__getitem__(number)

    said = []
    outcome = run(tmp_path, 20, packed, data=Ending(packed, 4, 1, 0), log=said.append)
    assert int(outcome.state.step) == 4 and "train: SIGTERM at step 4 of" in said[-1]
    assert (tmp_path / "states" / "4").is_dir()


def test_silent_batches_are_skipped_and_a_broken_one_stops_the_run(tmp_path):
    packed = packing.pack(random_examples(30), WIDTH)

    class Gaps(Batches):
        def anchored(self, number):
            return number % 3 > 0

    outcome = run(tmp_path / "skip", 6, packed, data=Gaps(packed, 4, 1, 0))
    assert int(outcome.state.position) == 9 and outcome.notes["skipped"] == 3 and int(outcome.state.step) == 6

    broken = outcome.state.params | {"fc": outcome.state.params["fc"] * np.inf}
    with pytest.raises(loop.TrainingError, match=r"step 0: .* batch 0 is not finite .*documents r/.*peak_lr"):
        run(tmp_path / "nan", 6, packed, start=broken)
    names = json.loads((tmp_path / "nan" / "broken.json").read_text())
    assert names == {"position": 0, "documents": Batches(packed, 4, 1, 0).identities(0)}


@pytest.mark.parametrize("name", ["run[lr=1e-3]", "a*b?", "{x}", "[!a]", "back\\slash", "[]"])
def test_a_folder_may_look_like_a_pattern(name, tmp_path):
    params, folder, zero = {"a": jnp.ones((4, 4))}, tmp_path / name / "train", jnp.int32(0)
    state = TrainState(params, (), zero, zero, zero, zero)
    with Checkpoints(folder) as checkpoints:
        checkpoints.save(1, state, {"n": 1})
        checkpoints.save_best(1, params, 2.0)
    assert (folder / "states" / "1").is_dir()
    with Checkpoints(folder) as checkpoints:
        assert checkpoints.restore(state)[1] == {"n": 1} and checkpoints.restore_best(params, print)[1]["step"] == 1


FULL = """
import pathlib, resource, sys
sys.path.insert(0, "tests")
import jax.numpy as jnp
from jetspec_jax.training.checkpoints import Checkpoints, NotSaved

state = lambda n, size: {"a": jnp.arange(size, dtype=jnp.float32) + n}
folder = pathlib.Path(sys.argv[1])
with Checkpoints(folder) as checkpoints:
    checkpoints.save(1, state(1, 8), {"n": 1})
resource.setrlimit(resource.RLIMIT_FSIZE, (40_000, resource.RLIM_INFINITY))  # a full disk, for one file
for best in (False, True):
    try:
        with Checkpoints(folder) as checkpoints:
            draw = 1 + jnp.sin(jnp.arange(90_000.0) ** 2)
            checkpoints.save_best(2, {"a": draw}, 1.0) if best else checkpoints.save(2, {"a": draw}, {})
            checkpoints.wait()
    except NotSaved as error:
        print(error)
with Checkpoints(folder) as checkpoints:
    print(checkpoints.restore(state(0, 8))[1])
"""


def test_a_full_disk_is_one_line_and_loses_nothing(tmp_path):
    got = subprocess.run(
        [sys.executable, "-c", FULL, str(tmp_path)], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    first, second, last = got.stdout.splitlines()
    end = r" cannot be written \(File too large\); make room, then the same command goes on at step 1"
    assert re.fullmatch(re.escape(f"{tmp_path}: ") + "(a checkpoint|checkpoint 2)" + end, first)
    assert re.fullmatch(re.escape(f"{tmp_path}: ") + "(a checkpoint|the best head)" + end, second)
    assert last == "{'n': 1}" and got.returncode == 0 and got.stderr == ""


TERMINATED = """
import os, select, signal, sys, threading, time
sys.path.insert(0, "tests")
from jetspec_jax.training import stop

with stop.asked(lambda line: print(line, flush=True)) as stopped:
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGTERM)).start()
    begin = time.monotonic()
    if sys.argv[1] == "asks":
        while not stopped():
            time.sleep(0.01)
        time.sleep(stop.GRACE + 0.5)  # saves, however long it takes
        print("saved", flush=True)
    else:
        select.select([], [], [], 20)
"""


@pytest.mark.parametrize("how", ["asks", "hangs"])
def test_sigterm_is_answered_or_ends_the_process(how):
    begin = time.monotonic()
    got = subprocess.run([sys.executable, "-c", TERMINATED, how], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert time.monotonic() - begin < 15
    if how == "asks":
        assert got.returncode == 0 and got.stdout == "saved\n"
    else:
        assert got.returncode == stop.STATUS and "goes on at the last checkpoint" in got.stdout


def test_sigterm_in_an_evaluation_saves_and_the_next_command_makes_it(tmp_path, monkeypatch):
    packed, real = packing.pack(random_examples(30), WIDTH), evaluation.measure

    def terminated(*given):
        os.kill(os.getpid(), signal.SIGTERM)
        assert real(*given) is None
        return None

    plan = loop.Plan(5, 5, 100, heldout=packed, budgets=(2, 4), width=2)
    with monkeypatch.context() as patch:
        patch.setattr(loop.evaluation, "measure", terminated)
        outcome = run(tmp_path, 6, packed, plan)
    assert int(outcome.state.step) == 5 and outcome.best is None
    found = {"acceptance": {"2": 1.0, "4": 2.0}}
    monkeypatch.setattr(loop.evaluation, "measure", lambda *given: found)
    outcome = run(tmp_path, 6, packed, plan)
    assert int(outcome.state.step) == 6 and outcome.notes["best_step"] == 5
    assert [(r["step"], r["heldout"]) for r in journal.read(tmp_path)] == [(5, found), (6, found)]
    assert all("loss" in r for r in journal.read(tmp_path))


def test_the_state_a_command_ends_with_is_evaluated(tmp_path, monkeypatch):
    packed, left = packing.pack(random_examples(30), WIDTH), iter(range(3))
    monkeypatch.setattr(loop.evaluation, "measure", lambda *given: {"acceptance": {"2": 1.5}})
    plan = loop.Plan(5, 5, 100, heldout=packed, budgets=(2,))
    outcome = run(tmp_path, 6, packed, plan, on_time=lambda: next(left, None) is not None)
    assert outcome.notes["best_step"] == 3 and [r["step"] for r in journal.read(tmp_path) if "heldout" in r] == [3]


def test_all_steps_of_a_run_are_one_program(tmp_path, monkeypatch):
    packed = packing.pack(random_examples(30), WIDTH)
    monkeypatch.setattr(loop.step, "update", chex.assert_max_traces(loop.step.update, n=1))
    assert int(run(tmp_path, 4, packed).state.step) == 4
