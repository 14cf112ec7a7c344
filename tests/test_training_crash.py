"""kill -9 in the middle of saving, again and again: the last complete checkpoint is never lost."""

import os
import pathlib
import random
import subprocess
import sys
import time

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
