"""The installed commands, out of a wheel and in an environment of its own, outside the checkout."""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest

ROOT = pathlib.Path(__file__).parent.parent
PAIR = ROOT / "tests" / "fixtures" / "peer_parity" / "dense_causal"

pytestmark = pytest.mark.slow


def run(*argv, **options):
    return subprocess.run(list(map(str, argv)), capture_output=True, text=True, check=False, timeout=600, **options)


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """The folder of the commands; building needs setuptools, which pip may download."""
    folder = tmp_path_factory.mktemp("installed")
    built = run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", folder, ROOT)
    assert built.returncode == 0, built.stderr
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", "--without-pip", folder / "env")
    python = folder / "env" / "bin" / "python"
    assert run(sys.executable, "-m", "pip", "--python", python, "install", "-q", "--no-deps", wheel).returncode == 0
    (packages,) = (folder / "env" / "lib").glob("python*/site-packages")
    (packages / "others.pth").write_text(f"{pathlib.Path(jax.__file__).parent.parent}\n")  # what it depends on
    return python.parent


def test_every_command(scripts, tmp_path):
    environment = os.environ | {"JETSPEC_CACHE": str(tmp_path / "cache"), "PYTHONPATH": ""}
    call = lambda name, *argv: run(scripts / f"jetspec-{name}", *argv, cwd=tmp_path, env=environment)
    where = run(
        scripts / "python", "-c", "import jetspec_jax; print(jetspec_jax.__file__)", cwd=tmp_path, env=environment
    )
    assert str(scripts.parent) in where.stdout
    for name in ("decode", "train", "audit", "doctor", "serve"):
        got = call(name, "--help")
        assert got.returncode == 0 and "options:" in got.stdout and got.stderr == ""
        got = call(name, "--nonsens=3")
        assert got.returncode == 2 and got.stderr.startswith(f"jetspec-{name}: --nonsens: no such option")
    pair = "--target", PAIR / "target", "--head", PAIR / "head"
    got = call("decode", *pair, "--prompt_ids=11,12", "--max_new_tokens=4", "--json")
    assert got.returncode == 0 and json.loads(got.stdout)["new_tokens"] == 4
    got = call("train", "--config=tiny_cpu", "--workdir=w", "--config.data=nowhere")
    assert got.returncode == 2 and got.stderr == "jetspec-train: --config.data=nowhere: no such file or folder\n"
