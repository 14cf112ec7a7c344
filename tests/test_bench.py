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
    "prices": "--shape tiny-moe --hits 0.7 --nodes 8 --rounds 3 --known 4",
    "products": "--shape tiny --rows 3 --names qkv gate_up --repeats 1",
    "serve_budgets": "--shape tiny --dtype float32 --budgets 1 4 auto --sizes 1 4 8 --clients 1 2 --answers 1 "
    "--prompt 9 --max_new_tokens 12 --context 256",
    "start_up": "--shape tiny --dtype float32 --budget 4 --prompt 24 --slots 64",
    "synthetic_accept": "--shape tiny --dtype float32 --budgets 4 --accept 3 --length 24 --slots 96 --steps 8",
    "train_step": "--shape tiny --dtype float32 --sequence 64 --anchors 8 --steps 1 --repeats 1 --parts",
    "tree_build": "--vocab 512 --depth 3 --budgets 5 --repeats 1",
}
# Not sweep, auto_budget and serve_overhead, which load a target's files (the demo's are a download), nor kernels (a
# GPU's trace).

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

    def wrong(*args, **options):
        out = right(*args, **options)
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
    even = experts.experts(parents, (2, 5), mixture, experts.Router(), 2000)
    for nodes in (1, 2, 5):
        assert even[nodes] == pytest.approx(128 * (1 - (1 - 8 / 128) ** nodes), rel=0.01)
    alike = experts.experts(parents, (2, 5), mixture, experts.Router(correlation=1.0), 50)
    assert alike == {1: 8, 2: 8, 5: 8}
    skewed = experts.experts(parents, (2, 5), mixture, experts.Router(0.5, 0.7), 200)
    assert 8 < skewed[5] < even[5]
    same = np.array([0, 1, 2, 1, 2])
    hit = experts.routed(parents, same, mixture, experts.Router(share=1.0), 50, np.random.default_rng(0))
    assert (hit.sum(-1) == 8).all() and (hit[1:3] == hit[3:5]).all() and (hit[0] != hit[1]).any()
    assert experts.main(["--budgets", "2", "4", "--layers", "20", "--hits", "0.7"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].startswith("| plain step | 8.0 | 1.32 | 1.00 |") and "| hit rate 0.7 |" in lines[-1]
    assert experts.main(["--measured", "nowhere.json"]) == 1


def test_measured_rounds_cost_what_they_took(monkeypatch, tmp_path, capsys):
    """At the experts that they touched; others by the rate of the run's plain read; between budgets, along a line."""
    monkeypatch.syspath_prepend(str(BENCH))
    import experts

    def written(*rows):
        line = {"settings": {"shape": "qwen3-30b-a3b"}, "machine": {"bytes_per_second": 4e12}}
        line["rows"] = [{"budget": n, "ms": ms, "experts_by_layer": [one]} for n, ms, one in rows]
        (tmp_path / "run.json").write_text("a table\n" + json.dumps(line) + "\n")
        return str(tmp_path / "run.json")

    file = written((1, 3.0, 8), (64, 10.0, 80), (16, 8.0, 50))
    cost = experts.Cost("qwen3-30b-a3b", None, file)
    each = 1e3 * 48 * 3 * 2048 * 768 * 2 / 4e12
    assert cost.expert == pytest.approx(each) and cost.largest == 64
    assert [cost.ms(1, 8), cost.ms(16, 50), cost.ms(64, 80)] == pytest.approx([3.0, 8.0, 10.0])
    assert cost.ms(16, 128) == pytest.approx(8.0 + 78 * each) and cost.ms(4, 50) == pytest.approx(8.0)
    assert cost.ms(40, 65) == pytest.approx(9.0)
    assert experts.Cost("qwen3-30b-a3b", 2.0, file).expert == pytest.approx(2 * each)
    assert experts.main(["--measured", file, "--layers", "5", "--hits", "0.7"]) == 0
    assert "| 64 |" in (out := capsys.readouterr().out) and "| 128 |" not in out
    assert experts.main(["--measured", file, "--budgets", "65"]) == 1
    assert "budgets=65" in capsys.readouterr().err
    assert experts.main(["--measured", written((1, 3.0, 8))]) == 1
    assert experts.main(["--measured", written((16, 8.0, 50))]) == 1


def test_nodes_come_by_probability_over_price(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import prices

    parents, odds, rest = np.array([-1, 0, 0, 1, 2]), np.array([1, 0.6, 0.3, 0.25, 0.2]), np.full(5, 2.0)

    def order(*experts):
        hit = np.zeros((5, 1, 10), bool)
        for node, touched in enumerate(experts):
            hit[node, 0, list(touched)] = True
        return prices.priced(parents, odds, rest, 0.1, prices.Left(hit).adds).tolist()

    assert order((0, 1), (2, 3), (4, 5), (6, 7), (8, 9)) == [0, 1, 2, 3, 4]  # nothing is shared
    assert order((0, 1), (2, 3), (4, 5), (6, 7), (5, 4)) == [0, 1, 2, 4, 3]  # the last has what its parent has
    assert order((0, 1), (2, 3), (4, 5), (6, 7), (0, 1)) == [0, 1, 2, 4, 3]  # cheap at once, but its parent is not in
    assert order((0, 1), (2, 3), (0, 1), (6, 7), (0, 4)) == [0, 2, 1, 4, 3]
    assert prices.priced(parents, odds, rest, 0.1, lambda _: np.array([1, 1, 1, 9, 1])).tolist() == [0, 1, 2, 4, 3]

    draw = np.random.default_rng(0)
    parents = np.array([-1, *(draw.integers(0, node) for node in range(1, 30))])
    odds, hit = np.sort(draw.random(30))[::-1], draw.random((30, 3, 16)) < 0.2
    rest = np.linspace(2, 3, 20)
    taken = [0]
    while len(taken) < 20:
        price = lambda node: rest[1] - rest[0] + 0.1 * (hit[node] & ~hit[taken].any(0)).sum() / 3
        able = [node for node in range(30) if node not in taken and parents[node] in taken]
        taken.append(max(able, key=lambda node: odds[node] / price(node)))
    assert prices.priced(parents, odds, rest, 0.1, prices.Left(hit).adds).tolist() == taken != sorted(taken)


def test_prices_by_depth_are_means_over_trees(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import prices

    expected, depths = np.array([[2.0, 4, 5], [2, 4, 7]]), np.array([[0, 1, 1], [0, 1, 2]])
    curve, level = prices.curves(expected, depths)
    assert curve.tolist() == [2, 2, 2] and level[:4] == pytest.approx([1, 5 / 6, 3 / 2, 1])


def test_cuts_of_trees_are_what_they_are_called(monkeypatch):
    """Beside all ways to cut three trees."""
    monkeypatch.syspath_prepend(str(BENCH))
    import itertools

    import prices

    class Cost:
        def round(self, nodes, experts):
            return 2 + 0.1 * nodes + experts

    draw = np.random.default_rng(3)
    tokens = 1 + np.cumsum(np.sort(draw.random((3, 5)) * [[0.2], [0.6], [1.0]], 1)[:, ::-1], 1)
    trees = [prices.Grown(one, np.cumsum(draw.random(5)), np.cumsum(draw.random(5))) for one in tokens]
    said, took = (
        np.array([Cost().round(np.arange(1, 6), x) for x in xs])
        for xs in zip(*((one.expected, one.touched) for one in trees), strict=True)
    )
    found, each = prices.played(trees, Cost(), 5), np.arange(3)
    ratio = lambda ms, at: tokens[each, list(at)].sum() / ms[each, list(at)].sum()
    every = list(itertools.product(range(5), repeat=3))
    at = {
        "rate": max(every, key=lambda at: ratio(said, at)),
        "best": (tokens / said).argmax(1),
        "fixed": [max(range(1, 5), key=lambda n: ratio(took, [n] * 3))] * 3,
    }
    for cut, ends in at.items():
        sums, nodes = found[cut]
        assert nodes == pytest.approx(np.mean(ends) + 1)
        assert sums == pytest.approx(np.stack([x[each, list(ends)] for x in (tokens, took)], 1))
    assert len({tuple(map(int, ends)) for ends in at.values()}) == 3
    one, low, high = prices.gain(np.array([[2.0, 1.0]] * 4), np.array([[1.0, 1.0]] * 4))
    assert one == low == high == 100
