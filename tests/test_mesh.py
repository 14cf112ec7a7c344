"""Decoding on a mesh of devices: the tokens of one, and what devices exchange. `eight.py` has what runs on them."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent


def on_eight(*names: str, **settings: str) -> None:
    """Runs functions of `eight.py` in a process with eight devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)} | settings
    command = [sys.executable, "tests/eight.py", *names]
    got = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert got.returncode == 0 and got.stdout.endswith("same\n"), got.stderr[-3000:]


def test_eight_devices_decode_the_tokens_of_one_and_exchange_no_weight_and_no_row_of_logits():
    on_eight("refusals", "weights", "vocabularies", "tokens")


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_every_drafter_on_every_mesh(kind):
    on_eight(kind)


@pytest.mark.slow
def test_rows_that_come_later_pieces_of_prompts_paced_rounds_and_kernels(tmp_path):
    on_eight("host", "kernels", JETSPEC_CACHE=str(tmp_path))
