"""The mixture of experts on a TPU against plain jnp in the interpreter, and lowered for a TPU; all of it on a CPU.

`pytest -m tpu` adds what needs libtpu (`pip install libtpu`, no TPU): its compiler.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from checks import near, normal
from jax.experimental import topologies
from jax.experimental.pallas import tpu as pltpu

from jetspec_jax.backends import tpu
from jetspec_jax.backends.kernels import tpu_experts
from jetspec_jax.backends.tpu import TPU
from jetspec_jax.layers import moe

F32, BF16 = jnp.float32, jnp.bfloat16
oracle = jax.jit(lambda x, *weights: moe.feed_forward(x[None], *weights)[0], static_argnums=(4, 5))
interpreted = jax.jit(functools.partial(tpu_experts.mixture, interpret=True), static_argnums=(4, 5))

# Rows, hidden, inner, experts, experts a row.
SIZES = [(1, 128, 128, 16, 3), (21, 128, 256, 12, 2)]
A30B = [(rows, 2048, 768, 128, 8) for rows in (1, 7, 64, 256)]


def arrays(rows, hidden, inner, experts, count, dtype):
    draw = normal(rows, dtype)
    scaled = lambda x, size: (x / np.sqrt(size)).astype(dtype)
    weights = draw(hidden, experts), draw(experts, hidden, 2, inner), draw(experts, inner, hidden)
    return draw(rows, hidden), *map(scaled, weights, (hidden, hidden, inner))


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_equals_plain_code(sizes, dtype, monkeypatch):
    """Experts that no row chose hold NaN in the kernel's run; blocks of features are smaller than an expert."""
    monkeypatch.setattr(tpu_experts, "BLOCK", 1)
    count, given = sizes[-1], arrays(*sizes, dtype)
    untouched = np.setdiff1d(np.arange(sizes[3]), moe.choose(*given[:2], count, True)[1])
    spoilt = [w.at[untouched].set(jnp.nan) for w in given[2:]]
    near(interpreted(*given[:2], *spoilt, count, True), oracle(*given, count, True), dtype)
    assert sizes[0] > 1 or len(untouched) == sizes[3] - count


def test_a_row_that_is_not_finite_is_alone():
    given = arrays(*SIZES[1], F32)
    clean = interpreted(*given, 2, True)
    got = interpreted(given[0].at[4].set(jnp.nan), *given[1:], 2, True)
    others = np.arange(21) != 4
    assert jnp.isnan(got[4]).all()
    near(got[others], clean[others], F32)


def test_no_races(capfd):
    params = pltpu.InterpretParams(detect_races=True)
    given = arrays(*SIZES[0], F32)
    run = jax.jit(functools.partial(tpu_experts.mixture, interpret=params), static_argnums=(4, 5))
    near(run(*given, 3, True), oracle(*given, 3, True), F32)
    assert "RACE" not in capfd.readouterr().out


def abstract(rows, hidden, inner, experts, dtype, sharding=None):
    array = lambda *shape: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
    return array(rows, hidden), array(hidden, experts), array(experts, hidden, 2, inner), array(experts, inner, hidden)


@pytest.mark.parametrize("dtype", [F32, BF16])
@pytest.mark.parametrize("sizes", A30B, ids=str)
def test_lowers_for_a_tpu(sizes, dtype):
    traced = jax.jit(tpu_experts.mixture, static_argnums=(4, 5)).trace(*abstract(*sizes[:4], dtype), sizes[4], True)
    assert "tpu_custom_call" in traced.lower(lowering_platforms=("tpu",)).as_text()


def test_from_which_rows_on_xla_computes_it(monkeypatch):
    seen = []
    monkeypatch.setattr(tpu_experts, "mixture", lambda x, *rest: (seen.append(1), x)[1])

    def ours(batch, rows, inner=128):
        seen.clear()
        shapes = abstract(rows, 128, inner, 8, F32)
        x = jax.ShapeDtypeStruct((batch, rows, 128), F32)
        ask = functools.partial(TPU().mixture, experts_per_token=2, normalize_top_k=True)
        assert jax.eval_shape(ask, x, *shapes[1:]).shape == x.shape
        return bool(seen)

    assert ours(1, tpu.ROUTED) and ours(2, tpu.ROUTED // 2)
    assert not ours(1, tpu.ROUTED + 1) and not ours(1, 1, inner=96)


@pytest.mark.tpu
@pytest.mark.parametrize("chip", ["v4:2x2x1", "v5e:2x2", "v5p:2x2x1", "v6e:2x2", "tpu7x:2x2x1"])
def test_the_compiler_takes_it(chip, monkeypatch):
    pytest.importorskip("libtpu")
    monkeypatch.setenv("TPU_SKIP_MDS_QUERY", "1")  # no cloud to ask what TPU this is
    device = topologies.get_topology_desc(platform="tpu", topology_name=chip).devices[0]
    for sizes in A30B:
        given = abstract(*sizes[:4], BF16, jax.sharding.SingleDeviceSharding(device))
        compiled = jax.jit(tpu_experts.mixture, static_argnums=(4, 5)).lower(*given, sizes[4], True).compile()
        assert "tpu_custom_call" in compiled.as_text()
        assert compiled.memory_analysis().temp_size_in_bytes < 16 * 2**20, "the weights were copied"
