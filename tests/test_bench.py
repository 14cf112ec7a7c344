"""Every bench runs at its smallest size and ends with its JSON line. What it times on a CPU means nothing."""

import importlib
import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import pytest

ROOT = pathlib.Path(__file__).parent.parent
BENCH = ROOT / "bench"
COMMANDS = {
    "attention": "--shape tiny --rows 3 --lengths 40 --slots 64 --repeats 1 --choices xla pallas",
    "decode_latency": "--shape tiny-moe --dtype float32 --budgets 4 --contexts 24:64 --steps 8 --repeats 1 --parts",
    "long_context": "--shape tiny --prompts 40 --new 6 --budget 4 --chunk 16 --repeats 1",
    "products": "--shape tiny --rows 3 --names qkv gate_up --repeats 1",
    "serve_budgets": "--shape tiny --dtype float32 --budgets 1 4 auto --sizes 1 4 8 --clients 1 2 --answers 1 "
    "--prompt 9 --max_new_tokens 12 --context 256",
    "start_up": "--shape tiny --dtype float32 --budget 4 --prompt 24 --slots 64",
    "synthetic_accept": "--shape tiny --dtype float32 --budgets 4 --accept 3 --length 24 --slots 96 --steps 8",
    "train_step": "--shape tiny --dtype float32 --sequence 64 --anchors 8 --steps 1 --repeats 1 --parts",
    "tree_build": "--vocab 512 --depth 3 --budgets 5 --repeats 1",
}  # not sweep and auto_budget, which load a target's files (the demo's are a download), nor kernels (a GPU's trace)

pytestmark = pytest.mark.slow


def run(name: str, command: str, monkeypatch):
    """Exit status of bench/`name`.py, run in this process."""
    monkeypatch.syspath_prepend(str(BENCH))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of start_up's children
    return importlib.import_module(name).main(command.split())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_bench_ends_with_its_line(name, monkeypatch, capsys):
    assert run(name, COMMANDS[name], monkeypatch) == 0
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert found["settings"] and (name in ("start_up", "train_step") or found["rows"])
    check = {"decode_latency": check_decode_latency, "train_step": check_train_step, "products": check_products}
    check.get(name, lambda found: None)(found)


def check_decode_latency(found):
    """The floors of a mixture, by hand: E 64, 4 query and 2 kv heads of 16, a dense and a sparse layer."""
    plain, tree = found["rows"]
    attention, dense, expert, table = 64 * 16 * 12, 3 * 64 * 128, 3 * 64 * 64, 512 * 64
    norms = 2 * (2 * 64 + 2 * 16) + 64
    weights = 2 * attention + dense + 64 * 8 + table
    kv = 24 * 2 * 2 * 2 * 16
    assert plain["bytes"] == 4 * (weights + norms + 2 * expert + kv)  # a row chooses two experts of eight
    assert plain["flop"] == 2 * (weights + 2 * expert) + 4 * 24 * 64 * 2
    # Four rows can choose all eight experts. The head: one layer, a block of 4 rows, 4 rows of context.
    head, fc = attention + dense, 2 * 64 * 64
    of_head = 4 * (head + fc + (2 * 64 + 2 * 16) + 2 * 64 + kv // 2)
    assert tree["bytes"] == 4 * (weights + norms + 8 * expert + kv + table) + of_head
    block = 2 * 4 * head + 4 * 4 * 24 * 64 + 2 * 4 * (fc + 64 * 64) + 2 * 3 * table
    assert tree["flop"] == 4 * plain["flop"] + block
    for row in found["rows"]:
        assert row["read_ratio"] == pytest.approx(row["ms"] / row["read_floor_ms"])
        assert row["product_floor_ms"] == pytest.approx(1e3 * row["flop"] / found["machine"]["flops_per_second"])
        assert row["product_ratio"] == pytest.approx(row["ms"] / row["product_floor_ms"])


def check_train_step(found):
    assert set(found["ms_parts"]) == {"target forward", "head forward and backward", "lm_head and loss", "AdamW"}
    assert math.isfinite(found["loss"]) and found["temporary_bytes"] > 0


def check_products(found):
    assert [row["name"] for row in found["rows"]] == ["qkv", "gate_up"]
    assert all(0 <= row["error"] <= found["bound"] for row in found["rows"])


@pytest.mark.parametrize("name", ["tree_build", "products", "attention"])
def test_a_wrong_kernel_is_the_exit_status(name, monkeypatch, capsys):
    """The kernel's result is changed; the bench still prints its line."""
    from jetspec_jax.backends.kernels import gpu_attention, gpu_layer, gpu_loop

    module, function = {
        "tree_build": (gpu_loop, "grow"),
        "products": (gpu_layer, "matmul"),
        "attention": (gpu_attention, "attend"),
    }[name]
    right = getattr(module, function)

    def wrong(*args):
        out = right(*args)
        return (out[0] + 1, *out[1:]) if name == "tree_build" else jnp.roll(out, 1, axis=-1)

    monkeypatch.setattr(module, function, wrong)
    jax.clear_caches()  # of the right kernel's programs
    command = COMMANDS[name].replace("qkv gate_up", "out").replace("xla pallas", "pallas")
    assert run(name, command, monkeypatch) == 1
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]


def test_a_folder_without_a_trace_is_one_line(monkeypatch, tmp_path, capsys):
    assert run("kernels", str(tmp_path), monkeypatch) == 1
    assert "0 traces" in capsys.readouterr().err


def test_the_demo_pair_is_the_shipped_one(monkeypatch):
    monkeypatch.setattr(sys, "path", [str(BENCH), *sys.path])
    import shapes

    target, head = shapes.PAIRS["smollm2-135m"]
    assert (head.num_layers, head.tap_layers, head.mask_token_id) == (4, (1, 8, 14, 20, 27), 16)
    assert not head.differing(target)
