"""Several processes that are one run: their options, and two of them on this machine equal to one."""

import json
import os
import pathlib
import socket
import subprocess
import sys

import eight
import jax
import numpy as np
import pytest
import tiny
from safetensors import safe_open

from jetspec_jax import decode
from jetspec_jax.files import checkpoint

ROOT = pathlib.Path(__file__).parent.parent


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--coordinator", "host:1", "--processes", "2", "--process", "0"], "--coordinator without --mesh"),
        (
            ["--mesh", "data=2", "--coordinator", "host", "--processes", "2", "--process", "0"],
            "give HOST:PORT, or auto",
        ),
        (["--mesh", "data=2", "--coordinator", "host:1", "--process", "0"], "without --processes and --process"),
        (["--mesh", "data=2", "--coordinator", "h:1", "--processes", "2", "--process", "2"], "they are 0..1"),
        (["--mesh", "data=2", "--process", "1"], "--process without --coordinator"),
        (["--mesh", "data=2", "--coordinator", "auto", "--processes", "2"], "--processes with --coordinator auto"),
        (["--mesh", "data=0"], "--mesh='data=0': 'data=0' is none of"),
        (["--mesh", "model=99"], "it has 99 devices, and there"),
    ],
)
def test_wrong_words_are_one_line(words, said, capsys, tmp_path):
    folder = ["--target", str(tmp_path), "--method", "autoregressive"]
    assert decode.main(["--prompt_ids", "1", *folder, *words]) in (1, 2)
    error = capsys.readouterr().err
    assert said in error and "Traceback" not in error


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


def together(count: int, devices: int, words) -> list[str]:
    """What processes print that run together, each with the words for its number."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count={devices}"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    started = [subprocess.Popen([sys.executable, *words(i)], cwd=ROOT, env=env, **pipes) for i in range(count)]
    try:
        found = [process.communicate(timeout=500) for process in started]
    finally:
        for process in started:
            process.kill()
    for process, (_, error) in zip(started, found, strict=True):
        assert process.returncode == 0, error[-3000:]
    assert not any(output or error for output, error in found[1:]), "the first one alone prints"
    return [output for output, _ in found]


@pytest.mark.slow
def test_two_processes_decode_the_tokens_of_one(tmp_path):
    target, head = eight.target("dense"), eight.head("jetspec")
    tiny.save_target(tmp_path / "target", target.config, eight._raw("dense"), target.params)
    checkpoint.save_head(tmp_path / "head", head.config, head.params)
    rows = [{"prompt_ids": ids, "seed": i} for i, ids in enumerate(eight.PROMPTS)]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    words = ["decode.py", "--target", str(tmp_path / "target"), "--head", str(tmp_path / "head"), "--json", "--compare"]
    words += ["--prompt_file", str(tmp_path / "p.jsonl"), "--batch", "8", "--max_new_tokens", "10", "--budget", "8"]
    read = lambda text: [json.loads(line)["token_ids"] for line in text.splitlines()]
    alone = read(together(1, 1, lambda i: words)[0])
    for mesh in ("data=2,model=2", "model=4"):  # a group a process, and a group over both
        at = ["--mesh", mesh, "--coordinator", f"127.0.0.1:{port()}", "--processes", "2", "--process"]
        assert read(together(2, 2, lambda i: [*words, *at, str(i)])[0]) == alone  # noqa: B023


TRAIN = """
import json, os, pathlib, sys
sys.path.insert(0, "tests")
from jetspec_jax import train
import small
from jetspec_jax.files import load
from jetspec_jax.files import mesh as on_mesh

load.load_target = lambda source, dtype, backend="auto", mesh=None: on_mesh.target_on(small.target(), mesh)
sys.exit(train.main(sys.argv[1:]))
"""


@pytest.mark.slow
@pytest.mark.parametrize("features", ["online", "memory", "disk"])
def test_two_processes_train_the_head_of_one(tmp_path, features):
    """Ten steps, with evaluation, checkpoints and export; then some more in one process on another mesh."""
    import small

    draw = np.random.default_rng(0)
    answers = ["".join(draw.choice([*"abcdefgh"], 12)) for _ in range(48)]
    talk = lambda text: [{"role": "user", "content": text[:3]}, {"role": "assistant", "content": text}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps({"messages": talk(text)}) + "\n" for text in answers))
    given = small.RUN | {"data": str(tmp_path / "rows.jsonl"), "answers": "corpus", "features": features, "heldout": 2}
    given |= {"steps": 10, "batch": 4, "accumulate": 1, "eval_every": 5, "save_every": 5, "export": "last"}
    (tmp_path / "c.py").write_text(f"def get_config():\n    return {given!r}\n")

    def words(name, *more):
        return ["-c", TRAIN, "--config", str(tmp_path / "c.py"), "--workdir", str(tmp_path / name), *more]

    together(1, 4, lambda i: words("one", "--mesh", "data=2,model=2"))
    at = ["--mesh", "data=2,model=2", "--coordinator", f"127.0.0.1:{port()}", "--processes", "2", "--process"]
    together(2, 2, lambda i: words("two", *at, str(i)))
    read = lambda name: [json.loads(x) for x in (tmp_path / name / "train" / "metrics.jsonl").read_text().splitlines()]
    np.testing.assert_allclose([x["loss"] for x in read("one")], [x["loss"] for x in read("two")], rtol=1e-5)
    assert read("one")[-1]["heldout"]["acceptance"] == read("two")[-1]["heldout"]["acceptance"]
    one, two = (safe_open(tmp_path / name / "head" / "model.safetensors", "flax") for name in ("one", "two"))
    for name in one.keys():  # noqa: SIM118
        np.testing.assert_allclose(*(jax.device_get(x.get_tensor(name)).astype("f4") for x in (one, two)), atol=1e-2)
