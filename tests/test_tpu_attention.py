"""The TPU attention kernel against plain jnp in the interpreter, and lowered for a TPU; all of it on a CPU.

`pytest -m tpu` adds what needs more: libtpu (`pip install libtpu`, no TPU) for its compiler, a TPU for its numbers.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from jetspec_jax.backends.kernels import tpu_attention
from jetspec_jax.layers import attention

# A program that runs once is not worth optimising; half of this file's time would go there.
jit = functools.partial(jax.jit, compiler_options={"xla_backend_optimization_level": 0})
interpreted = jit(functools.partial(tpu_attention.attend, interpret=True))
F32, BF16 = jnp.float32, jnp.bfloat16

# Batch, kv heads, groups, head dim, nodes, slots; then lengths of the rows, one call each.
CASES = {
    "plain step": ((1, 2, 1, 64, 1, 128), [[0], [1], [127], [128]]),
    "chunks of 256": ((2, 1, 8, 128, 3, 768), [[0, 1], [255, 256], [257, 768], [512, 0]]),
    "chunks of 128": ((1, 3, 3, 64, 17, 384), [[0], [1], [128], [129], [384]]),
    "more chunks than buffers": ((1, 1, 2, 64, 17, 896), [[511], [512], [513], [640], [895], [896]]),
    "full block of rows": ((2, 2, 4, 128, 64, 512), [[511, 512], [1, 0]]),
    "several blocks of rows": ((1, 1, 5, 64, 130, 1024), [[0], [512], [513], [1024]]),
    "six groups": ((1, 1, 6, 64, 3, 256), [[0], [256]]),
    "seven groups": ((1, 1, 7, 128, 1, 640), [[129], [640]]),
}
BOTH = ["plain step", "chunks of 128", "full block of rows", "several blocks of rows"]
RUNS = [(name, F32) for name in CASES] + [(name, BF16) for name in BOTH]
SHAPES = {  # Qwen3-8B: plain step, trees, a batch, a long cache; the demo pair
    **{f"8B, {nodes} nodes": (1, 8, 4, 128, nodes, 2048) for nodes in (1, 64, 256)},
    "8B, batch": (8, 8, 4, 128, 16, 2048),
    "8B, long": (1, 8, 4, 128, 128, 32768),
    **{f"demo, {nodes} nodes": (1, 3, 3, 64, nodes, 512) for nodes in (1, 64)},
}


def inputs(batch, kv_heads, groups, dim, nodes, slots, dtype=F32):
    """Queries [B, K, T * G, H], fresh K/V, the mask of a random tree a row, and prefix K/V."""
    draw = np.random.default_rng(nodes)
    one = lambda rows: jnp.asarray(draw.standard_normal((batch, kv_heads, rows, dim)), dtype)
    parents = [[-1, *(draw.integers(0, i) for i in range(1, nodes))] for _ in range(batch)]
    mask = jnp.asarray([oracles.ancestors(p) for p in parents])
    return one(nodes * groups), (one(nodes), one(nodes)), mask, (one(slots), one(slots))


@jit
def oracle(q, fresh, mask, prefix=None, length=None):
    """`attention.attend` of the same arguments."""
    batch, kv_heads, _, dim = q.shape
    nodes = mask.shape[1]
    q = q.reshape(batch, kv_heads, nodes, -1, dim).swapaxes(1, 2).reshape(batch, nodes, -1, dim)
    return attention.attend(q, fresh, mask, prefix, length)


def close(got, want, bound=None):
    assert got.shape == want.shape and got.dtype == want.dtype
    bound = bound or (1e-5 if got.dtype == F32 else 2e-2)
    np.testing.assert_allclose(np.asarray(got, np.float32), np.asarray(want, np.float32), bound, bound)


def compare(attend, shape, lengths, dtype):
    args = inputs(*shape, dtype)
    for length in lengths:
        close(attend(*args, jnp.array(length)), oracle(*args, jnp.array(length)))


@pytest.mark.parametrize(("case", "dtype"), RUNS)
def test_equals_plain_attention(case, dtype):
    compare(interpreted, *CASES[case], dtype)


def test_one_mask_for_all_rows():
    q, fresh, mask, prefix = inputs(2, 1, 3, 64, 5, 128)
    args = q, fresh, mask[:1], prefix, jnp.array([77, 0])
    close(interpreted(*args), oracle(*args))


def test_no_prefix():
    args = inputs(2, 2, 3, 64, 5, 128)[:3]
    close(interpreted(*args), oracle(*args))


def test_more_keys_than_queries():
    """A draft head's block, which has the context's rows beside it."""
    q, fresh, mask, prefix = inputs(1, 2, 2, 64, 20, 256)
    args = q[:, :, 8:], fresh, mask[:, 4:], prefix, jnp.array([200])
    close(interpreted(*args), oracle(*args))


def test_what_a_node_does_not_see_may_be_broken():
    """NaN or inf in other branches, in their queries, and after the committed length."""
    q, (k, v), mask, prefix = inputs(1, 1, 2, 64, 17, 384)
    length = jnp.array([200])
    clean = interpreted(q, (k, v), mask, prefix, length)
    path = np.asarray(mask[0, 16])
    assert path.sum() < 17
    for poison in (jnp.nan, jnp.inf):
        spoil = lambda x, good, poison=poison: jnp.where(good[:, None], x, poison)
        broken = tuple(spoil(x, path) for x in (k, v))
        after = tuple(spoil(x, jnp.arange(384) < 200) for x in prefix)
        got = interpreted(spoil(q, path.repeat(2)), broken, mask, after, length)
        assert (got[:, path] == clean[:, path]).all()
        assert jnp.isnan(got[:, ~path]).all()  # a node that is broken itself tells


def test_large_scores_do_not_overflow():
    q, *args = inputs(1, 1, 2, 64, 17, 384)
    close(interpreted(q * 300, *args, jnp.array([384])), oracle(q * 300, *args, jnp.array([384])), 1e-3)


def test_copies_follow_the_length_and_not_the_buffer(monkeypatch):
    count, real = [], pltpu.make_async_copy

    class Counted:
        def __init__(self, *args):
            self.copy = real(*args)
            self.wait = self.copy.wait

        def start(self):
            jax.debug.callback(lambda: count.append(1))
            self.copy.start()

    monkeypatch.setattr(pltpu, "make_async_copy", Counted)
    args = inputs(2, 1, 1, 64, 1, 4096)
    attend = jit(lambda *args: tpu_attention.attend(*args, interpret=True))
    for length, chunks in [((0, 0), 0), ((1, 0), 1), ((512, 513), 3), ((4096, 100), 9)]:
        count.clear()
        jax.block_until_ready(attend(*args, jnp.array(length)))
        jax.effects_barrier()
        assert len(count) == 2 * chunks  # of keys and of values


@pytest.mark.parametrize(("case", "length"), [("more chunks than buffers", [896]), ("chunks of 256", [700, 0])])
def test_no_races(case, length, capfd):
    """On two simulated cores, with NaN in all memory that nothing was written to."""
    params = pltpu.InterpretParams(detect_races=True, num_cores_or_threads=2)
    compare(jit(functools.partial(tpu_attention.attend, interpret=params)), CASES[case][0], [length], F32)
    assert "RACE" not in capfd.readouterr().out


def abstract(batch, kv_heads, groups, dim, nodes, slots, dtype, sharding=None):
    """The kernel's arguments without data."""
    array = functools.partial(jax.ShapeDtypeStruct, sharding=sharding)
    rows = lambda count: array((batch, kv_heads, count, dim), dtype)
    mask, length = array((batch, nodes, nodes), jnp.bool_), array((batch,), jnp.int32)
    return rows(nodes * groups), (rows(nodes), rows(nodes)), mask, (rows(slots), rows(slots)), length


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_lowers_for_a_tpu(shape, dtype):
    traced = jax.jit(tpu_attention.attend).trace(*abstract(*shape, dtype))
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_supported():
    assert all(tpu_attention.supported(dim, slots) for *_, dim, _, slots in SHAPES.values())
    assert all(tpu_attention.supported(dim, slots) for (*_, dim, _, slots), _ in CASES.values())
    refused = [(32, 256), (96, 256), (256, 256), (128, 0), (128, 100), (128, 320)]
    assert not any(tpu_attention.supported(*pair) for pair in refused)


@pytest.mark.tpu
@pytest.mark.parametrize("chip", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_compiler_takes_it(chip, monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # no cloud to ask what TPU this is
    device = topologies.get_topology_desc(platform="tpu", topology_name=chip).devices[0]
    for shape in [*SHAPES.values(), *(shape for shape, _ in CASES.values())]:
        for dtype in (F32, BF16):
            args = abstract(*shape, dtype, jax.sharding.SingleDeviceSharding(device))
            assert "tpu_custom_call" in jax.jit(tpu_attention.attend).lower(*args).compile().as_text()


@pytest.mark.tpu
@pytest.mark.parametrize(("case", "dtype"), RUNS)
def test_on_a_tpu(case, dtype):
    if jax.default_backend() != "tpu":
        pytest.skip("needs a TPU")
    compare(jax.jit(tpu_attention.attend), *CASES[case], dtype)
