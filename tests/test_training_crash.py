"""kill -9: the last complete checkpoint is never lost, and a run that goes on from it ends with the same bits."""

import os
import pathlib
import random
import subprocess
import sys
import time

import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = """
import pathlib, sys
sys.path.insert(0, "tests")
import jax, jax.numpy as jnp, numpy as np
from jetspec_jax.training.checkpoints import Checkpoints

folder = pathlib.Path(sys.argv[1])
state = lambda n: {"params": {f"w{i}": jnp.full((400, 400), n, jnp.float32) for i in range(12)}, "step": jnp.int32(n)}
with Checkpoints(folder) as checkpoints:
    found = checkpoints.restore(state(0), log=print)
    n = int(found[0]["step"]) if found else 0
    if found:
        assert found[1]["n"] == n and all((np.asarray(w) == n).all() for w in found[0]["params"].values())
    print("start", n, flush=True)
    while True:
        n += 1
        checkpoints.save(n, state(n), {"n": n})
        print("saving", n, flush=True)
        checkpoints.wait()
        print("saved", n, flush=True)
"""


@pytest.mark.slow
def test_kill_9_twenty_times(tmp_path):
    draw = random.Random(0)
    last = 0
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for _ in range(20):
        run = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(tmp_path)], cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True
        )
        assert run.stdout is not None
        first = run.stdout.readline().split()
        assert first[0] == "start" and int(first[1]) >= last, (first, last)
        for line in run.stdout:
            kind, number = line.split()
            if kind == "saved":
                last = int(number)
            elif int(number) >= last + draw.choice([1, 2, 3]):
                time.sleep(draw.uniform(0, 0.3))  # somewhere inside the save
                run.kill()
                break
        rest = run.stdout.read().split("\n")
        last = max([last, *(int(x.split()[1]) for x in rest if x.startswith("saved"))])
        assert run.wait() == -9
    assert last > 10


TRAIN = """
import pathlib, sys, time
sys.path.insert(0, "tests")
import jax, numpy as np
from small import WIDTH, random_examples, recipe, target
from jetspec_jax.models import sharding
from jetspec_jax.training import loop
from jetspec_jax.training.data import packing
from jetspec_jax.training.data.batches import Batches

class Hanging(Batches):
    def __getitem__(self, number):
        if number == int(sys.argv[2]):
            print("hangs", flush=True)
            time.sleep(600)
        return super().__getitem__(number)

folder = pathlib.Path(sys.argv[1])
data = Hanging(packing.pack(random_examples(30), WIDTH), 4, 1, 0)
mesh, plan = sharding.make_mesh(1, jax.devices()[:1]), loop.Plan(5, 1000, 10)
log = lambda line: print(line, flush=True)
given = loop.Given(target(), jax.numpy.ones(32), data)
outcome = loop.train(recipe(20), given, folder, plan, mesh, log=log)
paths, _ = jax.tree_util.tree_flatten_with_path(outcome.state)
np.savez(folder / "end.npz", **{jax.tree_util.keystr(path): x for path, x in paths})
"""


@pytest.mark.slow
def test_twenty_steps_are_ten_a_kill_and_ten_to_the_bit(tmp_path):
    """Killed in step 14, after the checkpoint of step 10: the steps in between are made again."""
    env = os.environ | {"PYTHONPATH": str(ROOT)}

    def start(name, hang=-1):
        command = [sys.executable, "-c", TRAIN, str(tmp_path / name), str(hang)]
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, text=True)

    with start("whole") as whole:
        assert "going on" not in whole.communicate()[0] and whole.returncode == 0
    with start("halves", hang=13) as killed:
        assert killed.stdout is not None
        try:
            assert any(line == "hangs\n" for line in killed.stdout)
            end = time.monotonic() + 60
            while not (tmp_path / "halves" / "states" / "10").is_dir():  # written in the background
                assert time.monotonic() < end
                time.sleep(0.05)
        finally:
            killed.kill()
        assert killed.wait() == -9 and not (tmp_path / "halves" / "end.npz").exists()
    with start("halves") as resumed:
        said = resumed.communicate()[0]
        assert resumed.returncode == 0 and "going on at step 10\n" in said and "step 20/20" in said

    with np.load(tmp_path / "whole" / "end.npz") as wanted, np.load(tmp_path / "halves" / "end.npz") as got:
        assert got.files == wanted.files and wanted[".step"] == 20
        assert {name.partition("[")[0] for name in got.files} >= {".params", ".optimizer", ".key"}
        for name in got.files:
            assert got[name].dtype == wanted[name].dtype and got[name].tobytes() == wanted[name].tobytes(), name
