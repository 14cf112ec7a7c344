"""Decoding on a mesh of devices: the tokens of one, and what devices exchange. `eight.py` has what runs on them."""

import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
import tiny
from jax.sharding import AbstractMesh, AxisType

from jetspec_jax.drafts import block
from jetspec_jax.models import sharding

ROOT = pathlib.Path(__file__).parent.parent


def on_eight(*names: str, **settings: str) -> None:
    """Runs functions of `eight.py` in a process with eight devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | settings
    command = [sys.executable, "tests/eight.py", *names]
    got = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert got.returncode == 0 and got.stdout.endswith("same\n"), got.stderr[-3000:]


def test_eight_devices_decode_the_tokens_of_one_and_exchange_no_weight_and_no_row_of_logits():
    on_eight("refusals", "vocabularies", "tokens")


def test_a_head_is_split_where_a_layer_of_it_spares_each_device_enough(monkeypatch):
    mesh = AbstractMesh((1, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    config = tiny.head_config(True, num_heads=8, num_kv_heads=4, intermediate_size=32, num_layers=2)
    shapes = block.build(config, jnp.float32)[1]
    spared = sum(x.size * 4 for x in jax.tree.leaves(shapes)) / 2 * 3 / 4
    for worth, axis in ((spared, "model"), (spared + 1, None)):
        monkeypatch.setattr(sharding, "WORTH", worth)
        lies = sharding.drafting(shapes, mesh, config)
        assert lies["layers"][0]["qkv"].spec[1] == axis


@pytest.mark.slow
def test_each_device_reads_its_own_weights_and_runs_its_own_rounds():
    on_eight("weights", "groups")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_every_drafter_on_every_mesh(kind):
    on_eight(kind)


@pytest.mark.slow
def test_rows_that_come_later_pieces_of_prompts_paced_rounds_and_kernels(tmp_path):
    on_eight("host", "kernels", JETSPEC_CACHE=str(tmp_path))
