"""The mixture of experts for few rows on a GPU: against plain code in the interpreter here and compiled on a GPU
(-m gpu), lowered for CUDA without one, and whole models through it."""

import dataclasses
import functools
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checks import cuda_text, near, normal, verify

from jetspec_jax.backends import hopper
from jetspec_jax.backends.hopper import Hopper
from jetspec_jax.backends.kernels import gpu_experts
from jetspec_jax.backends.kernels.gpu_experts import TopK
from jetspec_jax.backends.xla import PLAIN_XLA, XLA, total
from jetspec_jax.config import MoEConfig
from jetspec_jax.drafts import block
from jetspec_jax.files import load
from jetspec_jax.layers import masks, moe
from jetspec_jax.models import qwen3

HOW = pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
F32, BF16 = jnp.float32, jnp.bfloat16


def mixture(x, router, gate_up, down, count, normalize, interpret, first=0):
    return gpu_experts.mixture(x, router, gate_up, down, TopK(count, normalize), first, interpret)


oracle = jax.jit(lambda x, *weights: moe.feed_forward(x[None], *weights)[0], static_argnums=(4, 5))

# rows, hidden, inner, experts, experts a row; then how the rows are spread: over all experts, all to the same ones,
# half of them to the same, or 16 to the same ones and the others to others
A30B = (2048, 768, 128, 8)
SHAPES = {
    "one row": ((1, 64, 48, 8, 2), "spread"),
    "fewer places than experts": ((3, 32, 16, 16, 4), "spread"),
    "more places than experts": ((7, 64, 32, 6, 3), "spread"),
    "a whole tile": ((16, 32, 32, 8, 2), "spread"),
    "lists of one tile": ((17, 64, 48, 12, 3), "spread"),
    "lists of a middle tile": ((41, 64, 48, 8, 2), "half"),
    "lists of the largest tile": ((70, 64, 48, 8, 2), "half"),
    "lists that fill their tiles": ((48, 32, 16, 8, 2), "filled"),
    "lists of fewer places than experts": ((17, 32, 16, 64, 2), "spread"),
    "several tiles of one expert": ((150, 32, 32, 5, 2), "same"),
    "an expert a row": ((19, 32, 16, 4, 1), "spread"),
    "all experts": ((5, 32, 16, 4, 4), "spread"),
    **{f"30B-A3B, {rows} rows": ((rows, *A30B), "spread") for rows in (1, 2, 16, 17, 65, 128, 256)},
    **{f"30B-A3B, {n} rows, {how}": ((n, *A30B), how) for n, how in ((16, "half"), (64, "half"), (200, "same"))},
}
HERE = [
    ("one row", F32), ("fewer places than experts", BF16), ("more places than experts", F32),
    ("lists of the largest tile", F32), ("lists that fill their tiles", F32), ("several tiles of one expert", BF16),
    ("lists of fewer places than experts", F32),
]  # fmt: skip
SMALL = [name for name in SHAPES if "A3B" not in name]
RUNS = [pytest.param(*run, True) for run in HERE]
RUNS += [pytest.param(n, t, True, marks=pytest.mark.slow) for n in SMALL for t in (F32, BF16) if (n, t) not in HERE]
RUNS += [pytest.param(n, BF16, False, marks=pytest.mark.gpu) for n in SHAPES]
WIDE = ["30B-A3B, 1 rows", "30B-A3B, 64 rows, half"]
RUNS += [pytest.param(n, F32, False, marks=pytest.mark.gpu) for n in (*SMALL, *WIDE)]


def on_device(seed, dtype):
    """`normal` for arrays that take the host seconds."""
    keys = iter(jax.random.split(jax.random.key(seed), 8))
    return lambda *shape: jax.random.normal(next(keys), shape, dtype)


def weights(sizes, dtype, how="spread"):
    """Rows, router, gate_up and down; the router looks at the first number of a row for what is not spread."""
    rows, hidden, inner, experts, count = sizes
    draw = on_device(rows, dtype) if hidden > 64 else normal(rows, dtype)
    scaled = lambda x, size: (x / np.sqrt(size)).astype(dtype)
    x, router = draw(rows, hidden), scaled(draw(hidden, experts), hidden)
    if how != "spread":
        row = jnp.arange(rows)
        first = {"same": row >= 0, "half": row % 2 == 0, "filled": row < 16}[how]
        x = x.at[:, 0].set(jnp.where(first, 4, 0)).at[:, 1].set(jnp.where(first | (how == "half"), 0, 4))
        router = router.at[:2].set(0).at[0, -count:].add(10).at[1, :count].add(10)
    return x, router, scaled(draw(experts, hidden, 2, inner), hidden), scaled(draw(experts, inner, hidden), inner)


def chosen(arrays, count):
    return np.asarray(jax.jit(moe.choose, static_argnums=(2, 3))(*arrays[:2], count, True)[1])


@pytest.mark.parametrize("name,dtype,interpret", RUNS)
def test_equals_plain_code(name, dtype, interpret):
    """Experts that no row chose hold NaN in the kernel's run: they are not touched."""
    sizes, how = SHAPES[name]
    count = sizes[-1]
    arrays = weights(sizes, dtype, how)
    expert = chosen(arrays, count)
    untouched = np.setdiff1d(np.arange(sizes[3]), expert)
    spoilt = [jnp.asarray(w).at[untouched].set(jnp.nan) for w in arrays[2:]]
    parts = mixture(*arrays[:2], *spoilt, count, True, interpret)
    assert parts.shape == (count, *arrays[0].shape) and parts.dtype == jnp.float32
    near(parts.sum(0).astype(dtype), oracle(*arrays, count, True), dtype, 2 if name in WIDE else 1)
    assert how != "same" or len(np.unique(expert)) == count


def test_the_cases_have_experts_without_rows_and_lists_of_every_tile():
    counted = {
        name: np.bincount(chosen(weights(sizes, F32, how), sizes[-1]).ravel(), minlength=sizes[3])
        for name, (sizes, how) in SHAPES.items()
        if name in SMALL
    }
    assert all(0 in counted[name] for name in ("one row", "fewer places than experts"))
    lists = np.concatenate([n for name, n in counted.items() if SHAPES[name][0][0] > gpu_experts.TILE])
    for low, high in ((0, 16), (16, 32), (32, 64), (64, 150)):
        assert ((lists > low) & (lists <= high)).any(), (low, high)


@HOW
@pytest.mark.parametrize("rows", [1, 40])
def test_a_row_that_is_not_finite_is_alone(rows, interpret):
    arrays = weights((rows + 1, 64, 48, 8, 2), F32)
    clean = mixture(*arrays, 2, True, interpret)
    for poison in (jnp.nan, jnp.inf):
        got = mixture(arrays[0].at[rows // 2].set(poison), *arrays[1:], 2, True, interpret)
        others = np.arange(rows + 1) != rows // 2
        assert (got[:, others] == clean[:, others]).all()
        assert not jnp.isfinite(got[:, rows // 2]).any()


@HOW
def test_choose(interpret):
    """Equal probabilities, partial sums, experts that are no power of two, and weights as they are."""
    logits = np.random.default_rng(0).standard_normal((9, 12)).astype(np.float32)
    logits[1], logits[2, 3:] = 0, 1.5
    logits[3, ::2] = -np.inf
    parts = jnp.asarray(np.stack([logits / 4, logits * 3 / 4]))
    for normalize in (True, False):
        weight, expert = gpu_experts.choose(parts, TopK(3, normalize), interpret)
        wanted = jax.lax.top_k(jax.nn.softmax(parts.sum(0)), 3)
        near(weight, wanted[0] / wanted[0].sum(-1, keepdims=True) if normalize else wanted[0], F32)
        assert (expert == wanted[1]).all()
    broken = gpu_experts.choose(parts.at[0, 4, 7].set(jnp.nan).at[0, 5].set(jnp.nan), TopK(3, True), interpret)
    assert jnp.isnan(broken[0][4:6]).all()
    for odd in (set(row.tolist()) for row in broken[1][4:6]):
        assert len(odd) == 3 and odd < set(range(12))
    assert (broken[1][6:] == expert[6:]).all()
    far = parts * 1000  # an exponential of these alone is infinite
    weight, expert = gpu_experts.choose(far, TopK(3, False), interpret)
    near(weight, jax.lax.top_k(jax.nn.softmax(far.sum(0)), 3)[0], F32)


@HOW
def test_weights_of_a_single_row_stay_as_they_are(interpret):
    """Where gate and up choose: logits far from zero, and weights that are not made to sum to one."""
    x, router, *rest = weights(SHAPES["one row"][0], F32)
    for scale in (1, 300):
        arrays = x, router * scale, *rest
        near(mixture(*arrays, 2, False, interpret).sum(0), oracle(*arrays, 2, False), F32)


@HOW
@pytest.mark.parametrize("rows", [17, 100])
def test_lists(rows, interpret):
    draw = np.random.default_rng(rows)
    expert = np.stack([draw.permutation(9)[:3] for _ in range(rows)])
    expert[expert == 4] = 9  # an expert without rows
    found, total = gpu_experts.lists(jnp.asarray(expert, jnp.int32), 10, interpret)
    for e in range(10):
        wanted = np.flatnonzero(expert.ravel() == e)
        assert total[e] == len(wanted) and (found[e, : len(wanted)] == wanted).all()
    assert total[4] == 0


def test_from_which_rows_on_and_for_which_sizes_xla_computes_it(monkeypatch):
    seen = []
    real = gpu_experts.mixture
    monkeypatch.setattr(gpu_experts, "mixture", lambda *args, **more: (seen.append(args), real(*args, **more))[1])
    shape = lambda *s: jax.ShapeDtypeStruct(s, F32)

    def ours(batch, rows, inner=16, experts=8, all_experts=8):
        seen.clear()
        arrays = shape(batch, rows, 32), shape(32, all_experts), shape(experts, 32, 2, inner), shape(experts, inner, 32)
        mixture = functools.partial(Hopper().mixture, experts_per_token=2, normalize_top_k=True)
        out = jax.eval_shape(mixture, *arrays)
        assert out.shape[-3:] == (batch, rows, 32)
        return bool(seen)

    assert ours(1, 1) and ours(1, hopper.ROUTED) and ours(4, hopper.ROUTED // 4)
    assert ours(1, 1, experts=4)
    assert (
        not ours(1, hopper.ROUTED + 1) and not ours(1, 1, inner=24) and not ours(1, 1, all_experts=gpu_experts.MOST + 1)
    )


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
def test_it_lowers_for_cuda_at_the_sizes_of_30b_a3b(rows, monkeypatch):
    """Both dtypes where the kernels differ by dtype alone."""
    verified = verify(monkeypatch)
    hidden, inner, experts, count = A30B
    for dtype in (BF16, F32) if rows in (1, 64) else (BF16,):
        shape = lambda *s, dtype=dtype: jax.ShapeDtypeStruct(s, dtype)
        text = cuda_text(
            lambda *x: gpu_experts.mixture(*x, TopK(count, True)), shape(rows, hidden), shape(hidden, experts),
            shape(experts, hidden, 2, inner), shape(experts, inner, hidden),
        )  # fmt: skip
        assert "triton" in text
    assert len(verified) >= 3


@HOW
@pytest.mark.parametrize("name", ["one row", "more places than experts", "lists of the largest tile"])
@pytest.mark.parametrize("first,here", [(1, 4), (2, 3), (4, 2)])
def test_a_part_of_the_experts(name, first, here, interpret):
    """What a device of a mesh computes; experts of the others are no part of its arrays, and their parts are zero."""
    sizes, how = SHAPES[name]
    count = sizes[-1]
    x, router, gate_up, down = weights(sizes, F32, how)
    mine = slice(first, first + here)
    parts = mixture(x, router, gate_up[mine], down[mine], count, True, interpret, jnp.int32(first))
    near(parts.sum(0), oracle(x, router, gate_up[mine], down[mine], count, True, first), F32)
    expert = chosen((x, router), count)
    absent = (expert < first) | (expert >= first + here)
    assert absent.any() and not np.asarray(parts)[absent.T].any()


@pytest.mark.parametrize("chosen", [(0, 3), (3, 7), (1, 6), (4, 3)], ids=str)
def test_nothing_is_computed_for_experts_that_are_elsewhere(chosen):
    """Their weights are not in memory. What no program of the interpreter writes is NaN."""
    x, router, gate_up, _ = weights(SHAPES["one row"][0], F32)
    x = x.at[0].set(0).at[0, 0].set(1)
    router = router.at[0].set(0).at[0, jnp.array(chosen)].set(jnp.array([9, 8]))
    top, here = TopK(2, True), [2 <= expert < 6 for expert in chosen]
    routed, found = gpu_experts.route(x, router, 4, top, 2, True)
    assert found is not None and found[0].tolist() == here
    flat, cut = gate_up[2:6].reshape(4, 64, -1), gpu_experts.cuts(1, 64, 48, F32)
    wide, _ = gpu_experts.gate_up_product(x, flat, routed, top, cut.gate_up, True)
    assert np.isfinite(wide).all(1).tolist() == here and np.isnan(wide).all(1).tolist() == [not one for one in here]


@dataclasses.dataclass(frozen=True)
class Few(XLA):
    """Plain XLA but for the experts."""

    name = "pallas"

    def mixture(self, *args):
        return total(Hopper().mixture(*args), args[0].dtype)


def test_logits_are_those_of_transformers():
    """The stored ones of the other tests, through the kernel; its tiles want a multiple of 16 features, so the experts
    get features that are zero."""
    folder = pathlib.Path(__file__).parent / "fixtures" / "reference" / "qwen3_moe"
    stored = np.load(folder / "reference.npz")
    target = load.load_target(folder)
    config = target.config
    extra = -config.moe.intermediate_size % 16
    wide = dataclasses.replace(config.moe, intermediate_size=config.moe.intermediate_size + extra)
    model, _ = qwen3.build(dataclasses.replace(config, moe=wide), F32, Few())
    layers = dict(target.params["layers"])
    for i in config.moe.sparse_layers:
        gate_up, down = layers[i]["gate_up"], layers[i]["down"]
        layers[i] = layers[i] | {
            "gate_up": jnp.pad(gate_up, ((0, 0), (0, 0), (0, 0), (0, extra))),
            "down": jnp.pad(down, ((0, 0), (0, extra), (0, 0))),
        }
    ids = jnp.asarray(stored["ids"], jnp.int32)
    batch, rows = ids.shape
    assert extra and gpu_experts.TILE < batch * rows <= hopper.ROUTED

    @jax.jit
    def run(params):
        positions = jnp.broadcast_to(jnp.arange(rows), ids.shape)
        out = model.forward(params, ids, positions, masks.causal(rows))
        return model.logits(params, out.hidden)

    logits = np.asarray(run(target.params | {"layers": layers}), np.float64)
    assert np.abs(logits - stored["logits"]).max() <= 1e-5 * np.abs(stored["logits"]).max()


@pytest.mark.parametrize("how", [Few(), pytest.param(Hopper(), marks=pytest.mark.gpu)], ids=["experts", "all"])
def test_lossless_in_f32(how):
    """Plainly (a row is its own list) and in trees, tokens are those of plain decoding with XLA."""
    small = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}
    config = tiny.model_config("moe", moe=MoEConfig(6, 2, 32, True, (0, 1)), **small)
    asked = tiny.request([[3, 1, 4, 1, 5], [9, 2]], 12, budget=[12, 9])
    shapes = qwen3.build(config, F32)[1]
    params = tiny.random_like(shapes, 3)
    head, head_shapes = block.build(tiny.head_config(True, **small | {"num_heads": 4, "num_layers": 1}), F32)
    plain = functools.partial(tiny.plain, asked=asked, capacity=48)
    loaded = lambda backend: tiny.Loaded(qwen3.build(config, F32, backend)[0], params, config)
    wanted = plain(loaded(PLAIN_XLA))
    assert tiny.outputs(plain(loaded(how))) == tiny.outputs(wanted)
    static = tiny.loop(loaded(how).model, tiny.CoachedDraft(head.depth, tiny.VOCAB, head), 12, 48)
    draft = tiny.coached(wanted.tokens, [[0, 1, 0, 0], [0, 0, -1, 0]], tiny.random_like(head_shapes, 4))
    state = tiny.decode(static, {"target": params, "draft": draft}, asked)
    assert tiny.outputs(state) == tiny.outputs(wanted) and state.accept_lengths.max() > 1
