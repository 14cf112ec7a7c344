"""Which backend a choice means on a device, and from which sizes on a backend leaves an operation to plain XLA."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jetspec_jax.backends import choose, hopper, tpu
from jetspec_jax.backends.cudnn import CuDNN
from jetspec_jax.backends.hopper import Hopper
from jetspec_jax.backends.kernels import gpu_attention, gpu_layer, tpu_attention
from jetspec_jax.backends.tpu import TPU
from jetspec_jax.backends.xla import PLAIN_XLA, XLA
from jetspec_jax.config import ConfigError
from jetspec_jax.layers import attention, masks
from jetspec_jax.options import BACKENDS

HALF, F32 = "bfloat16", "float32"
H200 = "gpu", "NVIDIA H200", "9.0"


def normal(seed, *shapes):
    draw = np.random.default_rng(seed)
    return [jnp.asarray(draw.standard_normal(shape), jnp.float32) for shape in shapes]


@pytest.fixture
def device(monkeypatch):
    """Pretends to be on a device: platform, kind, compute capability."""

    def pretend(platform, kind="", capability=None):
        found = types.SimpleNamespace(device_kind=kind, compute_capability=capability)
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        monkeypatch.setattr(jax, "devices", lambda: [found])

    return pretend


@pytest.mark.parametrize(
    "where,choice,dtype,head_dim,wanted",
    [
        (H200, "auto", HALF, 128, Hopper()),
        (H200, "auto", F32, 128, PLAIN_XLA),
        (H200, "auto", HALF, 80, PLAIN_XLA),
        (H200, "xla", HALF, 128, PLAIN_XLA),
        (H200, "cudnn", HALF, 80, CuDNN()),
        (H200, "pallas", F32, 64, Hopper()),
        (("gpu", "NVIDIA B200", "10.0"), "auto", HALF, 128, Hopper()),
        (("gpu", "NVIDIA L4", "8.9"), "auto", HALF, 128, PLAIN_XLA),
        (("gpu", "AMD Instinct MI300X", "9.4"), "auto", HALF, 128, PLAIN_XLA),
        (("cpu",), "auto", HALF, 128, PLAIN_XLA),
        (("cpu",), "pallas", HALF, 128, Hopper()),
        (("tpu",), "auto", HALF, 128, PLAIN_XLA),
        (("tpu",), "pallas", HALF, 128, TPU()),
    ],
)
def test_resolve(device, where, choice, dtype, head_dim, wanted):
    device(*where)
    found = choose.resolve(choice, dtype, head_dim)
    assert found == wanted and hash(found) == hash(wanted) and found.name in BACKENDS


def test_backends_of_different_devices_differ():
    """They are keys of programs. A TPU has kernels for attention and experts alone."""
    assert len({XLA(), PLAIN_XLA, CuDNN(), Hopper(), TPU()}) == 4
    assert {name for name in vars(TPU) if callable(getattr(XLA, name, None)) and name[0] != "_"} == {
        "attend",
        "mixture",
    }


@pytest.mark.parametrize(
    "where,choice,dtype,head_dim,message",
    [
        (H200, "flash", F32, 64, "^backend='flash': choose one of auto, xla, cudnn, pallas$"),
        (H200, "pallas", F32, 80, "^backend=pallas: head_dim=80 .* use xla$"),
        (H200, "cudnn", F32, 128, r"^backend=cudnn: .*16-bit weights \(dtype=float32\); use xla$"),
        (("cpu",), "cudnn", HALF, 128, "^backend=cudnn: it needs an NVIDIA GPU"),
    ],
)
def test_what_cannot_run_is_refused(device, where, choice, dtype, head_dim, message):
    device(*where)
    with pytest.raises(ConfigError, match=message):
        choose.resolve(choice, dtype, head_dim)


@pytest.fixture
def called(monkeypatch):
    """Which kernels a shape-only evaluation reached."""
    seen = []
    for module, name in [
        (gpu_layer, "matmul"), (gpu_layer, "swiglu"), (gpu_layer, "heads"), (gpu_attention, "attend"),
        (tpu_attention, "attend"),
    ]:  # fmt: skip
        real = getattr(module, name)
        note = lambda *args, real=real, name=name: (seen.append(name), real(*args))[1]
        monkeypatch.setattr(module, name, note)

    def of(function, *shapes) -> bool:
        seen.clear()
        jax.eval_shape(function, *(jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes))
        return bool(seen)

    return of


def test_products_of_few_rows_are_ours(called):
    backend = Hopper()
    for rows in (1, 64, 65, 128, 129, 256, 257):
        x = lambda inner, rows=rows: (1, rows, inner)
        assert called(backend.matmul, x(256), (256, 128)) == (rows <= hopper.FEW)  # a long sum
        assert called(backend.matmul, x(128), (128, 256)) == (rows <= 2 * hopper.FEW)
        assert called(backend.swiglu, x(128), (128, 2, 256)) == (rows <= hopper.NARROW)
    assert called(backend.matmul, (2, 64, 256), (256, 128)) and not called(backend.matmul, (2, 65, 256), (256, 128))
    assert not called(backend.matmul, (1, 1, 100), (100, 128)) and not called(backend.swiglu, (1, 1, 128), (128, 2, 80))


@pytest.mark.parametrize("backend,dim,most", [(Hopper(), 64, hopper.LONG), (TPU(), 64, tpu.LONG)], ids=["gpu", "tpu"])
def test_attention_of_short_calls_is_ours(called, backend, dim, most):
    def attend(rows, dim, slots):
        fresh = (1, 1, rows, dim)
        ask = lambda q, k, v, pk, pv: backend.attend(q, (k, v), masks.causal(rows), (pk, pv), jnp.array([3]))
        return called(ask, (1, rows, 2, dim), fresh, fresh, (1, 1, slots, dim), (1, 1, slots, dim))

    assert attend(most, dim, 128) and not attend(most + 1, dim, 128) and not attend(3, 80, 128)
    assert attend(3, dim, 100) == isinstance(backend, Hopper)  # 100 slots are no whole tiles of a TPU


def test_how_work_is_cut_on_an_h200():
    """Of Qwen3-8B, as docs/performance.md measured it: a cut of another size is right, and slower."""
    plans = {rows: tuple(gpu_attention.plan(8, rows))[:3] for rows in (4, 64, 256, 1024)}
    assert plans == {4: (16, 64, 16), 64: (64, 64, 16), 256: (64, 64, 4), 1024: (64, 64, 1)}
    assert gpu_attention.plan(64, 4).parts == 2 and gpu_attention.plan(512, 4).parts == 1
    tiles = {
        (1, 4096, 6144): (16, 64, 64, 2, 4, 5),
        (64, 4096, 4096): (64, 64, 128, 4, 4, 3),
        (64, 12288, 4096): (64, 128, 64, 4, 4, 4),
        (128, 4096, 4096): (64, 128, 64, 4, 4, 4),
        (256, 4096, 6144): (128, 128, 64, 1, 8, 5),
    }
    assert {sizes: tuple(gpu_layer.tile(*sizes)) for sizes in tiles} == tiles
    assert [tuple(gpu_layer.glu_tile(rows, 4096, 12288))[:3] for rows in (1, 64)] == [(16, 128, 64), (64, 128, 64)]


@pytest.mark.parametrize("slots", [256, 1280])
def test_the_rules_of_cudnn(monkeypatch, slots):
    """With XLA in the place of its kernel: lengths of none, of a chunk and of all, chunks that divide the buffer, and
    NaN after the length."""
    fused = jax.nn.dot_product_attention
    stand_in = lambda *args, implementation, **options: fused(*args, implementation="xla", **options)
    monkeypatch.setattr(jax.nn, "dot_product_attention", stand_in)
    q, k, v, pk, pv = normal(0, (2, 5, 4, 8), (2, 2, 5, 8), (2, 2, 5, 8), (2, 2, slots, 8), (2, 2, slots, 8))
    ask = jax.jit(lambda prefix, length: CuDNN().attend(q, (k, v), masks.causal(5), prefix, length))
    plain = jax.jit(lambda prefix, length: PLAIN_XLA.attend(q, (k, v), masks.causal(5), prefix, length))
    for lengths in ([0, slots], [1, 200], [slots - 1, 256]):
        length = jnp.array(lengths)
        tiny.close(ask((pk, pv), length), plain((pk, pv), length))
        after = (jnp.arange(slots) >= length[:, None])[:, None, :, None]
        broken = tuple(jnp.where(after, jnp.nan, x) for x in (pk, pv))
        assert (ask(broken, length) == ask((pk, pv), length)).all()
    assert slots <= attention.CHUNK or slots % attention.CHUNK
