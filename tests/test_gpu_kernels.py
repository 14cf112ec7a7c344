"""The kernels for NVIDIA GPUs: against plain jnp code in the interpreter here and compiled on a GPU (-m gpu), and
lowering for CUDA without one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from checks import cuda_text, near, normal, verify

from jetspec_jax.backends import hopper
from jetspec_jax.backends.cudnn import CuDNN
from jetspec_jax.backends.hopper import Hopper
from jetspec_jax.backends.kernels import gpu_attention, gpu_layer, gpu_loop
from jetspec_jax.backends.xla import PLAIN_XLA, XLA
from jetspec_jax.config import MoEConfig
from jetspec_jax.drafts import block
from jetspec_jax.layers import attention, masks, rope
from jetspec_jax.layers import cache as kv_cache
from jetspec_jax.loop import tree
from jetspec_jax.loop.plain import PLAIN
from jetspec_jax.models import qwen3

HOW = pytest.mark.parametrize("interpret", [True, pytest.param(False, marks=pytest.mark.gpu)])
DTYPES = pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
PALLAS = Hopper()


# batch, kv heads, queries a kv head, head dim, nodes, slots, lengths: none, one, borders of 64 and of parts, all
SHAPES = [
    (2, 2, 3, 64, 5, 130, [0, 130]),
    (2, 1, 1, 64, 70, 256, [64, 65]),
    (1, 1, 8, 128, 1, 300, [1]),
    (1, 8, 4, 128, 64, 1100, [1024]),
    (4, 2, 4, 64, 33, 100, [77, 0, 1, 100]),
    (1, 3, 3, 64, 17, 512, [129]),
    (1, 2, 5, 64, 31, 256, [192]),
    (1, 2, 8, 128, 256, 2048, [1500]),
    (2, 2, 2, 64, 9, 200, [63, 128]),
    (1, 2, 6, 128, 21, 320, [257]),
    (2, 1, 7, 64, 16, 192, [5, 191]),
]
CASES = [(s, t, True) for s, t in ((SHAPES[0], jnp.float32), (SHAPES[1], jnp.bfloat16))]
CASES += [pytest.param(s, jnp.float32, True, marks=pytest.mark.slow) for s in SHAPES[2:]]
CASES += [pytest.param(s, t, False, marks=pytest.mark.gpu) for s in SHAPES for t in (jnp.float32, jnp.bfloat16)]


@pytest.mark.parametrize("shape,dtype,interpret", CASES, ids=str)
def test_attention(shape, dtype, interpret):
    batch, kv_heads, groups, dim, nodes, slots, lengths = shape
    x = normal(0, dtype)
    q = x(batch, nodes, kv_heads * groups, dim)
    fresh, prefix = ((x(batch, kv_heads, n, dim), x(batch, kv_heads, n, dim)) for n in (nodes, slots))
    mask = jnp.asarray(np.random.default_rng(1).random((batch, nodes, nodes)) < 0.5) | jnp.eye(nodes, dtype=bool)
    rows = q.reshape(batch, nodes, kv_heads, groups, dim).swapaxes(1, 2).reshape(batch, kv_heads, -1, dim)
    got = jax.jit(gpu_attention.attend, static_argnums=5)(rows, fresh, mask, prefix, jnp.array(lengths), interpret)
    near(got, jax.jit(attention.attend)(q, fresh, mask, prefix, jnp.array(lengths)), dtype)


def test_every_number_of_query_heads_a_kv_head_has_a_shape():
    assert {groups for _, _, groups, *_ in SHAPES} == {*range(1, 9)}


@HOW
def test_attention_of_fresh_keys_alone_and_of_more_keys_than_queries(interpret):
    x = normal(2, jnp.float32)
    q, fresh = x(2, 2, 3 * 2, 64), (x(2, 2, 8, 64), x(2, 2, 8, 64))
    mask = jnp.asarray(np.random.default_rng(0).random((1, 3, 8)) < 0.5).at[:, :, 0].set(True)
    flat = q.reshape(2, 2, 3, 2, 64).swapaxes(1, 2).reshape(2, 3, 4, 64)
    near(gpu_attention.attend(q, fresh, mask, interpret=interpret), attention.attend(flat, fresh, mask), jnp.float32)


@HOW
def test_what_lies_after_the_length_and_broken_branches_stay_out(interpret):
    x = normal(3, jnp.float32)
    q, fresh, prefix = x(1, 1, 3, 64), (x(1, 1, 3, 64), x(1, 1, 3, 64)), (x(1, 1, 90, 64), x(1, 1, 90, 64))
    mask, length = jnp.array([[[1, 0, 0], [1, 1, 0], [1, 0, 1]]], bool), jnp.array([70])
    loud = tuple(p.at[:, :, 70:].set(jnp.nan) for p in prefix)
    broken = fresh[0].at[:, :, 1].set(jnp.nan), fresh[1].at[:, :, 1].set(jnp.inf)
    clean = gpu_attention.attend(q, fresh, mask, prefix, length, interpret)
    other = gpu_attention.attend(q, broken, mask, loud, length, interpret)
    assert (clean[:, ::2] == other[:, ::2]).all() and jnp.isnan(other[:, 1]).all()


@HOW
@DTYPES
@pytest.mark.parametrize("sizes", [(1, 576, 960), (5, 96, 128), (64, 256, 192), (70, 128, 64)], ids=str)
def test_matrix_products(sizes, dtype, interpret):
    rows, inner, columns = sizes
    x = normal(4, dtype)
    h, w, gate_up = x(rows, inner), x(inner, columns) / 8, x(inner, 2, columns) / 8
    parts = gpu_layer.matmul(h, w, interpret)
    assert parts.dtype == jnp.float32
    near(parts.sum(0).astype(dtype), PLAIN_XLA.matmul(h[None], w)[0], dtype)
    near(gpu_layer.swiglu(h, gate_up, interpret), PLAIN_XLA.swiglu(h[None], gate_up)[0], dtype)


# Of Qwen3-8B: rows, inner, columns; too slow for the interpreter.
PRODUCTS_8B = [
    *((rows, 4096, 6144) for rows in (16, 32, 64, 128, 256)),
    *((rows, 4096, 4096) for rows in (64, 128, 256)),
    *((rows, 12288, 4096) for rows in (1, 32, 128)),
]
GLUS_8B = [(rows, 4096, 12288) for rows in (1, 16, 32, 64)]


def test_the_sizes_of_qwen3_8b_reach_every_tile_that_it_decodes_with():
    """Every row count up to where XLA takes over."""
    tiles = lambda rule, sizes: {rule(*size) for size in sizes}
    most = lambda inner, columns: hopper.FEW if inner > columns else 2 * hopper.FEW
    asked = [(n, *shape) for shape in {s[1:] for s in PRODUCTS_8B} for n in range(1, most(*shape) + 1)]
    assert tiles(gpu_layer.tile, PRODUCTS_8B) == tiles(gpu_layer.tile, asked)
    assert len({(t.columns, t.depth, t.warps, t.stages) for t in tiles(gpu_layer.tile, asked)}) == 4  # its branches
    asked = [(n, 4096, 12288) for n in range(1, hopper.NARROW + 1)]
    assert tiles(gpu_layer.glu_tile, GLUS_8B) == tiles(gpu_layer.glu_tile, asked)


def rows_near(actual, wanted, tolerance):
    """Each row against its own largest value."""
    worst = jnp.abs(actual.astype(jnp.float32) - wanted).max(-1) / jnp.abs(wanted).max(-1)
    assert actual.shape == wanted.shape and worst.max() <= tolerance, worst.max()


def exact(x, w):
    """The product in f32; those of two 16-bit numbers are exact, so that the order of a sum is all that differs."""
    return jnp.dot(x.astype(jnp.float32), w.astype(jnp.float32), precision="highest")


def check_product(rows, inner, columns, interpret=False):
    keys = jax.random.split(jax.random.key(rows))
    x = jax.random.normal(keys[0], (rows, inner), jnp.bfloat16)
    w = jax.random.normal(keys[1], (inner, columns), jnp.bfloat16) / 8
    parts = gpu_layer.matmul(x, w, interpret)
    assert len(parts) == gpu_layer.tile(rows, inner, columns).parts and parts.dtype == jnp.float32
    rows_near(parts.sum(0), exact(x, w), 1e-3)  # a row's maximum is ~50, a term that is lost ~0.1


def check_glu(rows, inner, columns, interpret=False):
    keys = jax.random.split(jax.random.key(rows))
    x = jax.random.normal(keys[0], (rows, inner), jnp.bfloat16)
    w = jax.random.normal(keys[1], (inner, 2, columns), jnp.bfloat16) / 8
    gate, up = exact(x, w[:, 0]), exact(x, w[:, 1])
    rows_near(gpu_layer.swiglu(x, w, interpret), jax.nn.silu(gate) * up, 1.6e-2)  # four roundings to 8 bits


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", PRODUCTS_8B, ids=str)
def test_matrix_products_of_qwen3_8b(sizes):
    check_product(*sizes)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", GLUS_8B, ids=str)
def test_swiglu_of_qwen3_8b(sizes):
    check_glu(*sizes)


@HOW
@DTYPES
def test_add_norm(dtype, interpret):
    x = normal(5, dtype)
    h, weight, parts = x(7, 576), x(576), normal(6, jnp.float32)(3, 7, 576)
    for product, plain in ((parts, parts.sum(0).astype(dtype)[None]), (None, None)):
        wanted = (y[0] for y in PLAIN_XLA.add_norm(h[None], plain, weight, 1e-6))
        near(gpu_layer.add_norm(h, product, weight, 1e-6, interpret), tuple(wanted), dtype)


@HOW
@DTYPES
@pytest.mark.parametrize("kv_heads,groups,dim", [(3, 3, 64), (2, 4, 128), (1, 1, 64)])
@pytest.mark.parametrize("normed", [True, False])
def test_heads(kv_heads, groups, dim, normed, dtype, interpret):
    x = normal(7, dtype)
    parts = normal(8, jnp.float32)(2, 2, 5, kv_heads * (groups + 2) * dim)
    angles = rope.angles(jnp.arange(10).reshape(2, 5), dim, 1e4)
    norms = (x(dim), x(dim)) if normed else None
    split = parts.reshape(*parts.shape[:3], kv_heads, -1)
    q, *kv = gpu_layer.heads(split, norms, angles, 1e-6, dtype, interpret)
    q = q.reshape(2, kv_heads, 5, groups, dim).swapaxes(1, 2).reshape(2, 5, -1, dim)
    shape = (groups + 2, dim)
    near((q, *kv), PLAIN_XLA.heads(parts.sum(0).astype(dtype), shape, norms, angles, 1e-6, dtype), dtype)


@HOW
@pytest.mark.parametrize(
    "rows,depth,width",
    [
        pytest.param(2, 3, 1, marks=pytest.mark.slow),
        (17, 5, 9),
        *(pytest.param(n, 15, 63, marks=pytest.mark.slow) for n in (64, 256)),
    ],
)
def test_grow(rows, depth, width, interpret):
    """Node for node the tree of the XLA rule, also where it runs out of candidates."""
    draw = np.random.default_rng(rows)
    logp = -np.sort(np.abs(draw.standard_normal((2, depth, width))) * 2, -1)
    logp[1, :, width // 2 :] = -np.inf
    check_grow(logp, draw.integers(0, 99, logp.shape), rows, interpret)


@HOW
def test_grow_with_equal_scores(interpret):
    logp = np.array([[-0.5, -1, -3], [-0.25, -2, -4], [-0.5, -2, -4]])
    check_grow(np.stack([logp, np.round(logp)]), np.tile(np.arange(9).reshape(3, 3), (2, 1, 1)), 5, interpret)


@HOW
@pytest.mark.parametrize(
    "rows,depth,width", [(2, 3, 2), (17, 5, 9), (9, 1, 12), pytest.param(64, 15, 16, marks=pytest.mark.slow)]
)
def test_grow_with_a_row_for_each_parent(rows, depth, width, interpret):
    draw = np.random.default_rng(rows)
    logp = -np.abs(draw.standard_normal((2, depth, width, width))) * 2
    logp[1] = np.where(draw.random(logp[1].shape) < 0.4, -np.inf, np.round(logp[1]))  # paths that are not, and equals
    check_grow(logp, np.stack([draw.permutation(99)[:width] for _ in range(2 * depth)]).reshape(2, depth, width), rows,
               interpret)  # fmt: skip


def check_grow(logp, token, rows, interpret):
    logp, token = jnp.asarray(logp, jnp.float32), jnp.asarray(token, jnp.int32)
    logp = logp if logp.ndim == 4 else logp[:, :, None]
    got = gpu_loop.grow(logp, token, rows, interpret)
    wanted = tree.grow("best_first", tree.Candidates(token, logp), rows)
    size = np.asarray(wanted[3])
    assert (np.asarray(got[3]) == size).all()
    for g, w in zip(got[:3], wanted[:3], strict=True):
        for b in range(2):
            assert (g[b, : size[b]] == w[b, : size[b]]).all()


@HOW
@DTYPES
def test_commit(dtype, interpret):
    x = normal(9, dtype)
    cache, fresh = (tuple((x(2, 3, n, 64), x(2, 3, n, 64)) for _ in range(3)) for n in (40, 7))
    path = jnp.asarray(np.random.default_rng(0).integers(0, 7, (2, 5)), jnp.int32)
    start = jnp.array([3, 35])
    wanted = kv_cache.write(cache, kv_cache.take(fresh, path), start)
    got = gpu_loop.commit(cache, fresh, path, start, interpret)
    assert all((g == w).all() for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True))


KINDS = ("dense", "moe", "llama")
WIDE = {"hidden_size": 64, "head_dim": 16, "intermediate_size": 64}


@functools.lru_cache(None)
def wide_pair(kind: str, how: XLA):
    """A random pair whose sizes split into tiles."""
    experts = {"moe": MoEConfig(4, 2, 16, True, (1,))} if kind == "moe" else {}
    model, shapes = qwen3.build(tiny.model_config(kind, **WIDE, **experts), jnp.float32, how)
    params = tiny.random_like(shapes, 3)
    draft, head = block.build(tiny.head_config(True, **WIDE | {"num_heads": 4}), jnp.float32, backend=how)
    return model, draft, {"target": params, "draft": tiny.random_like(head, 4)}


@pytest.mark.parametrize(
    "kind",
    # On a CPU test_lossless.py proves the dense kind through these kernels too.
    [
        *(pytest.param(k, marks=pytest.mark.slow) for k in ("dense", "moe")),
        *(pytest.param(k, marks=pytest.mark.gpu) for k in KINDS),
    ],
)
def test_lossless_in_f32(kind):
    """The pair with all kernels decodes what plain XLA decodes, speculatively and plainly: interpreted or on a GPU."""
    asked = tiny.request([[3, 1, 4, 1, 5], [9, 2]], 12, budget=[6, 4])
    wanted = None
    for how, rows in ((PLAIN_XLA, 1), (PALLAS, 1), (PALLAS, 8)):
        model, draft, params = wide_pair(kind, how)
        static = tiny.loop(model, draft if rows > 1 else PLAIN, rows, 48)
        got = tiny.outputs(tiny.decode(static, params, asked))
        wanted = wanted or got
        assert got == wanted, (how, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [256, 1280, 4096])
def test_cudnn(slots):
    x = normal(11, jnp.bfloat16)
    q, fresh = x(2, 5, 8, 128), (x(2, 2, 5, 128), x(2, 2, 5, 128))
    prefix = x(2, 2, slots, 128), x(2, 2, slots, 128)
    for lengths in ([0, slots], [1, slots // 2]):
        args = q, fresh, masks.causal(5), prefix, jnp.array(lengths)
        near(CuDNN().attend(*args), PLAIN_XLA.attend(*args), jnp.bfloat16)
        after = (jnp.arange(slots) >= args[-1][:, None])[:, None, :, None]
        broken = tuple(jnp.where(after, jnp.nan, x) for x in prefix)
        assert (CuDNN().attend(*args[:3], broken, args[-1]) == CuDNN().attend(*args)).all()


@pytest.fixture
def verified(monkeypatch):
    return verify(monkeypatch)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, pytest.param(jnp.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("nodes", [1, 64, 256])
@pytest.mark.parametrize("model", [(8, 4, 128, 4096, 12288), (3, 3, 64, 576, 1536)], ids=["8b", "135m"])
def test_kernels_lower_for_cuda(model, nodes, dtype, verified):
    kv_heads, groups, dim, embed, wide = model
    a = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct(shape, dtype)
    f32, ints = functools.partial(a, dtype=jnp.float32), functools.partial(a, dtype=jnp.int32)
    kv = lambda rows: (a(1, kv_heads, rows, dim),) * 2
    attend = lambda q, fresh, mask, prefix, length: gpu_attention.attend(q, fresh, mask, prefix, length)
    columns = kv_heads * (groups + 2) * dim
    mask = a(1, nodes, nodes, dtype=bool)
    lowered = [
        cuda_text(attend, a(1, kv_heads, nodes * groups, dim), kv(nodes), mask, kv(2048), ints(1)),
        cuda_text(gpu_layer.matmul, a(nodes, embed), a(embed, columns)),
        cuda_text(gpu_layer.swiglu, a(nodes, embed), a(embed, 2, wide)),
        cuda_text(lambda *x: gpu_layer.add_norm(*x, 1e-6), a(nodes, embed), f32(2, nodes, embed), a(embed)),
        cuda_text(
            lambda x, n, c: gpu_layer.heads(x, n, c, 1e-6, dtype), f32(2, 1, nodes, kv_heads, columns // kv_heads),
            (a(dim), a(dim)), (f32(1, nodes, dim // 2),) * 2,
        ),
        cuda_text(gpu_loop.commit, (kv(2048),) * 30, (kv(nodes),) * 30, ints(1, 16), ints(1)),
    ]  # fmt: skip
    if nodes > 1:
        for rows in (1, 63):  # a row of all parents, or one of each
            lowered.append(cuda_text(lambda x, t: gpu_loop.grow(x, t, nodes), f32(1, 15, rows, 63), ints(1, 15, 63)))
    assert all("triton" in text for text in lowered) and len(verified) >= len(lowered)
