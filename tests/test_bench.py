"""Every bench runs at its smallest size and ends with its JSON line. What it times on a CPU means nothing."""

import importlib
import json
import math
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

ROOT = pathlib.Path(__file__).parent.parent
BENCH = ROOT / "bench"
COMMANDS = {
    "attention": "--shape tiny --rows 3 --lengths 40 --slots 64 --repeats 1 --choices xla pallas",
    "devices": "--shape tiny --dtype float32 --meshes one data=1 --budgets 1 4 --length 40 --slots 64 --repeats 1 "
    "--tokens 5",
    "decode_latency": "--shape tiny-moe --dtype float32 --budgets 4 --contexts 24:64 --steps 8 --repeats 1 --parts "
    "--scorer 4:8",
    "long_context": "--shape tiny --prompts 40 --new 6 --budget 4 --chunk 16 --repeats 1",
    "moe": "--shape tiny-moe --rows 3 20 --layers 2 --dtype float32 --repeats 1",
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
    # Four rows can choose all eight experts; some do. The head: one layer, a block of 4 rows, 4 rows of context.
    assert plain["experts_by_layer"] == [2] and 2 <= tree["experts_by_layer"][0] <= 8
    touched = tree["experts_by_layer"][0]
    head, fc = attention + dense, 2 * 64 * 64
    scorer = 2 * 64 * 2 * 8 + 8 * 4 + 64 * 4  # slot and parent, down, child
    of_head = 4 * (head + fc + (2 * 64 + 2 * 16) + 2 * 64 + kv // 2 + scorer)
    assert tree["bytes"] == 4 * (weights + norms + touched * expert + kv + table) + of_head
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


@pytest.mark.parametrize("name", ["tree_build", "products", "attention", "moe"])
def test_a_wrong_kernel_is_the_exit_status(name, monkeypatch, capsys):
    """The kernel's result is changed; the bench still prints its line."""
    from jetspec_jax.backends.kernels import gpu_attention, gpu_experts, gpu_layer, gpu_loop

    module, function = {
        "tree_build": (gpu_loop, "grow"),
        "products": (gpu_layer, "matmul"),
        "attention": (gpu_attention, "attend"),
        "moe": (gpu_experts, "mixture"),
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


def test_experts_are_counted_layer_by_layer(monkeypatch):
    """Beside a walk through the same step's rows with NumPy; the rows of both sequences count together."""
    monkeypatch.syspath_prepend(str(BENCH))
    import shapes
    import touched

    from jetspec_jax.backends.xla import XLA
    from jetspec_jax.loop import decoder
    from jetspec_jax.loop.plain import PLAIN

    pair = shapes.random_pair("tiny-moe", "float32", "xla")
    static = decoder.Decoder(pair.target, PLAIN, 64)
    state = shapes.state_at(static, pair.plain, 24, 2, 1)
    rows, real = [], XLA.mixture

    def noted(self, x, router, *rest):
        rows.append((np.asarray(x).reshape(-1, x.shape[-1]), np.asarray(router)))
        return real(self, x, router, *rest)

    found = touched.by_layer(static, pair.plain, state, 1)
    with monkeypatch.context() as patched, jax.disable_jit():
        patched.setattr(XLA, "mixture", noted)
        decoder.step(static, pair.plain, state)
    assert found == [len(np.unique(np.argsort(-(x @ router), 1)[:, :2])) for x, router in rows] and len(found) == 1


def test_the_model_of_touched_experts(monkeypatch, capsys):
    """Even routing touches what chance says, correlated nodes fewer; a chain's tokens are a geometric series."""
    monkeypatch.syspath_prepend(str(BENCH))
    import experts

    mixture = experts.shapes.PAIRS["qwen3-30b-a3b"][0].moe
    parents, odds = experts.grown(0.9, (2, 5), 15)
    assert parents.tolist() == [-1, 0, 1, 2, 3] and odds == pytest.approx([0.9**d for d in range(5)], rel=1e-6)
    even = experts.experts((parents, odds), (2, 5), mixture, (0.0, 0.0), 2000)
    for nodes in (1, 2, 5):
        assert even[nodes] == pytest.approx(128 * (1 - (1 - 8 / 128) ** nodes), rel=0.01)
    alike = experts.experts((parents, odds), (2, 5), mixture, (0.0, 1.0), 50)
    assert alike == {1: 8, 2: 8, 5: 8}
    skewed = experts.experts((parents, odds), (2, 5), mixture, (0.5, 0.5), 200)
    assert 8 < skewed[5] < even[5]
    assert experts.main(["--budgets", "2", "4", "--layers", "20", "--hits", "0.7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| plain step | 8.0 | 1.32 | 1.00 |") and "| hit rate 0.7 |" in lines[-1]
    assert experts.main(["--measured", "nowhere.json"]) == 1
