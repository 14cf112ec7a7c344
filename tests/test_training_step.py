"""One update: what it computes, what it must not depend on, and when it changes nothing."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import training_oracle as oracle
from small import (
    HEAD,
    MODEL,
    WIDTH,
    batch,
    example,
    random_examples,
    random_params,
    recipe,
    start,
    target,
)
from tiny import random_like

from jetspec_jax.drafts import block
from jetspec_jax.models import qwen3
from jetspec_jax.training import features, step, teacher
from jetspec_jax.training.anchors import Anchors
from jetspec_jax.training.data import packing
from jetspec_jax.training.losses import Mix
from jetspec_jax.training.objectives import block as learns

ONES = jnp.ones(32)


CHEAP = {"xla_backend_optimization_level": 0}  # compiling is most of the time here


@functools.lru_cache(None)
def update():
    return jax.jit(step.update, static_argnums=0, compiler_options=CHEAP)


def advance(r, state, b):
    return update()(r, target().params, ONES, state, b)


def test_loss_and_gradient_of_a_document_do_not_depend_on_its_neighbour():
    """B packed after A, B alone, and B after another A: the same loss and the same step, every anchor drawn."""
    b = example("b", np.random.default_rng(0).integers(4, 48, 8), 3)
    silent = lambda seed: dataclasses.replace(
        example("a", np.random.default_rng(seed).integers(4, 48, 12), 2), learnt=np.zeros(12, bool)
    )
    r = recipe()
    results = []
    for known in ([b], [silent(1), b], [silent(2), b]):
        packed = packing.pack(known, WIDTH)
        results.append(advance(r, start(r), batch(packed, [0, 0])))
    for state, metrics in results[1:]:
        assert metrics.blocks == 8 and float(metrics.loss) == pytest.approx(float(results[0][1].loss), rel=1e-5)
        moments = lambda s: jax.tree.leaves(s.optimizer)
        for x, y in zip(moments(state), moments(results[0][0]), strict=True):
            np.testing.assert_allclose(x, y, atol=1e-6)


def test_parts_add_up_to_the_whole_batch():
    packed = packing.pack(random_examples(20), WIDTH)
    r = recipe()
    whole, metrics = advance(r, start(r), batch(packed, [3, 1]))
    parts, same = advance(r, start(r), batch(packed, [3, 1], parts=2))
    for x, y in zip(metrics, same, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5)
    chex.assert_trees_all_close(whole.optimizer, parts.optimizer, atol=1e-6)  # the first rate is 0: parameters stay


def test_kept_features_and_recomputed_layers_give_the_same_step():
    packed = packing.pack(random_examples(20), WIDTH)
    r = recipe()
    online, metrics = advance(r, start(r), batch(packed, [3, 1]))
    kept = features.resident(target(), packed, HEAD.tap_layers, 4, "xla")
    b = batch(packed, [3, 1])
    brought = b._replace(features=features.gather(kept, b.rows))
    state, same = advance(dataclasses.replace(r, remat=True), start(r), brought)
    assert float(same.loss) == pytest.approx(float(metrics.loss), rel=1e-6)
    chex.assert_trees_all_close(state.optimizer, online.optimizer, atol=1e-5)  # the first rate is 0


@pytest.mark.parametrize(
    "kernel, dtype", [("xla", "float32"), pytest.param("cudnn", "bfloat16", marks=pytest.mark.gpu)]
)
def test_fused_attention_trains_as_xlas_does(kernel, dtype, monkeypatch):
    """Features of the target, loss and gradient: packed documents, padding, an anchor for which there was no place.

    Without a GPU, XLA computes what cuDNN is asked for, in f32: the CPU has no products of 16 bits into 32.
    """
    called, fused = [], teacher.fused

    def recorded(q, k, v, mask, causal=False, implementation="cudnn"):
        called.append(implementation)
        return fused(q, k, v, mask, causal, kernel)

    monkeypatch.setattr(teacher, "fused", recorded)
    wide = {"hidden_size": 64, "head_dim": 64, "num_heads": 4, "num_kv_heads": 2}
    model, shapes = qwen3.build(dataclasses.replace(MODEL, **wide), jnp.dtype(dtype))
    r = recipe(target=model, head=dataclasses.replace(HEAD, **wide), dtype=dtype, loss_chunk=64)
    params, state = random_like(shapes, 0), random_like(block.build(r.head, jnp.float32)[1], 1)
    draw = np.random.default_rng(0)
    known = [example(str(n), draw.integers(4, 48, n), 5) for n in (90, 70, 40)]
    packed = packing.pack(known, 128)
    assert packed.document.max(1).tolist() == [1, 2] and (packed.document == 0).any(1).all()
    part = jax.tree.map(lambda x: x[0], batch(packed, [0, 1]))
    anchors = Anchors(jnp.array([[7, 8, 60, 87, 0], [6, 40, 66, 80, 104]]), jnp.ones((2, 5), bool).at[0, 4].set(False))

    @functools.partial(jax.jit, static_argnums=0, compiler_options=CHEAP if kernel == "xla" else None)
    def run(r, params, state):
        where = part.tokens, part.document, part.position
        found = teacher.run(model, params, *where, r.head.tap_layers, r.attention)
        asked = learns.ask(r, params, part, *anchors)
        return found, *step._gradient(r, params, jnp.linspace(0.5, 2, 128), state, part, found, asked)

    results = [run(dataclasses.replace(r, attention=how), params, state) for how in ("xla", "cudnn")]
    assert called == ["cudnn"] * 3  # two layers of the target, one of the head
    (plain, wanted, sums), (found, gradient, same) = jax.device_get(results)
    apart = 1e-3 if kernel == "cudnn" else 1e-8  # one minus the cosine
    real = np.asarray(part.document) > 0
    for x, y in zip(found, plain, strict=True):
        assert np.isfinite(x.astype(np.float32)).all() and cosine(x[real], y[real]) > 1 - apart
    assert same.blocks == sums.blocks == 9
    assert float(same.loss) == pytest.approx(float(sums.loss), rel=10 * apart + 1e-5)
    every = lambda tree: np.concatenate([x.ravel() for x in jax.tree.leaves(tree)])
    assert np.linalg.norm(every(gradient)) == pytest.approx(np.linalg.norm(every(wanted)), rel=10 * apart + 1e-5)
    assert cosine(every(gradient), every(wanted)) > 1 - apart
    for x, y in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
        assert cosine(x, y) > 1 - 10 * apart


def cosine(x, y):
    x, y = (np.asarray(a, np.float64).ravel() for a in (x, y))
    return x @ y / (np.linalg.norm(x) * np.linalg.norm(y))


def test_a_batch_without_an_anchor_changes_nothing():
    silent = dataclasses.replace(example("a", range(12), 2), learnt=np.zeros(12, bool))
    r = recipe()
    before, _ = advance(r, start(r), batch(packing.pack(random_examples(4), WIDTH), [0, 1]))
    after, metrics = advance(r, before, batch(packing.pack([silent], WIDTH), [0, 0]))
    assert int(after.step) == 1 and int(after.position) == 2 and int(after.broken) == -1
    assert np.isfinite(metrics.loss)
    jax.tree.map(np.testing.assert_array_equal, after.params, before.params)
    jax.tree.map(np.testing.assert_array_equal, after.optimizer, before.optimizer)


def test_the_first_value_that_is_not_finite_freezes_the_state():
    packed = packing.pack(random_examples(8), WIDTH)
    r = recipe()
    before, _ = advance(r, start(r), batch(packed, [0, 0]))
    broken = before._replace(params=before.params | {"fc": before.params["fc"] * jnp.inf})
    after, _ = advance(r, broken, batch(packed, [1, 1]))
    assert int(after.step) == 1 and int(after.broken) == 1
    later, metrics = advance(r, after._replace(params=before.params), batch(packed, [2, 2]))
    assert np.isfinite(metrics.loss) and int(later.broken) == 1 and int(later.step) == 1
    jax.tree.map(np.testing.assert_array_equal, later.params, before.params)


def test_the_target_is_never_differentiated(monkeypatch):
    """Its forward, embedding and lm_head refuse to be, and a step does not notice."""

    @jax.custom_vjp
    def guard(x):
        return x

    def refuse(_, cotangent):
        raise AssertionError("a gradient of the target")

    guard.defvjp(lambda x: (x, None), refuse)
    with pytest.raises(AssertionError, match="gradient of the target"):
        jax.grad(lambda x: guard(x).sum())(jnp.ones(2))
    guarded = lambda params: jax.tree.map(guard, params)
    monkeypatch.setattr(target().model.__class__, "embed", lambda self, p, t: self._module(guarded(p)).embed(t))
    run, plain = teacher.run, teacher.unembedding
    monkeypatch.setattr(teacher, "run", lambda model, p, *rest: run(model, guarded(p), *rest))
    monkeypatch.setattr(teacher, "unembedding", lambda p: plain(guarded(p)))
    r = recipe()
    b = batch(packing.pack(random_examples(4), WIDTH), [0])
    jax.eval_shape(functools.partial(step.update, r), target().params, ONES, start(r), b)


def test_only_matrices_decay_and_the_rate_falls_to_its_share():
    r = recipe(steps=100, weight_decay=0.5, peak_lr=0.1)
    assert float(r.schedule(0)) == 0 and float(r.schedule(4)) == pytest.approx(0.1)
    assert float(r.schedule(100)) == pytest.approx(0.01, rel=1e-3)
    state = start(r)
    nothing = jax.tree.map(jnp.zeros_like, state.params)
    change, _ = jax.jit(r.optimizer.update)(nothing, state.optimizer, state.params)
    assert not change["norm"].any() and not change["fc"].any()  # the rate begins at 0
    state = state._replace(optimizer=jax.tree.map(lambda x: x + 1 if x.dtype == jnp.int32 else x, state.optimizer))
    change, _ = jax.jit(r.optimizer.update)(nothing, state.optimizer, state.params)
    assert not change["norm"].any() and change["fc"].any()


ALL_ON = {
    "mix": Mix(0.5, 0.2, 0.3, 1.5, 0.4), "gamma": 2.0, "weight_decay": 0.3, "clip": 0.05, "beta1": 0.8, "beta2": 0.9,
    "warmup": 0.4, "final_lr": 0.3, "peak_lr": 2e-2, "steps": 5, "seed": 3,
}  # fmt: skip


@pytest.mark.parametrize(
    "causal, remat, parts", [(True, True, 2), pytest.param(False, False, 1, marks=pytest.mark.slow)]
)
def test_steps_equal_those_of_a_dense_oracle(causal, remat, parts):
    """Three updates with every option away from its default, each from where the one before ended."""
    r = recipe(**ALL_ON, head=dataclasses.replace(HEAD, causal=causal), remat=remat)
    packed = packing.pack(random_examples(16, seed=2), WIDTH)
    scale, state = jnp.linspace(0.5, 3, 32), start(r)
    state = state._replace(params=random_params(state.params, 4))  # larger than at the start, so that all layers count
    adam, key, compared = oracle.Adam(r, state.params), jax.random.key(r.seed), []
    for number in range(3):
        rows = [(3 * number + i) % len(packed.tokens) for i in range(4)]
        whole = packed.select(np.array(rows))
        blocks = oracle.drawn(whole, key, number, r.anchors, HEAD.depth, r.gamma)
        wanted = oracle.gradient(r, target().params, scale, state.params, whole, blocks)
        params = adam(state.params, wanted.gradient)
        before, (state, metrics) = state, update()(r, target().params, scale, state, batch(packed, rows, parts))
        for name, value in wanted.metrics.items():
            assert float(getattr(metrics, name)) == pytest.approx(value, rel=2e-4), name
        assert metrics.gradient_norm > 2 * r.clip and int(state.step) == int(state.position) == number + 1
        (moments,) = [s for s in jax.tree.leaves(state.optimizer, is_leaf=is_adam) if is_adam(s)]
        trees = before.params, state.params, params, moments.mu, adam.first
        for old, new, mine, m, first in zip(*map(jax.tree.leaves, trees), strict=True):
            size = np.abs(first).max()
            np.testing.assert_allclose(m, first, atol=2e-3 * size)
            # AdamW divides by the gradient's size, so what is rounding alone in the gradient is not compared.
            clear = np.abs(first) > 0.05 * size
            error = 0.05 * oracle.rate(r, number) + 1e-6
            np.testing.assert_allclose((new - old)[clear], (mine - old)[clear], atol=error)
            compared.append(clear.mean())
    assert np.mean(compared) > 0.5 and oracle.rate(r, 2) == r.peak_lr


def is_adam(x):
    return isinstance(x, optax.ScaleByAdamState)
