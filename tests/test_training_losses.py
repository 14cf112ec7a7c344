"""The losses over a vocabulary, a chunk of rows at a time, and what is counted beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.layers import numerics
from jetspec_jax.training import losses
from jetspec_jax.training.losses import Mix

MIXES = [Mix(), Mix(temperature=2.0), Mix(0, 0, 1), Mix(0, 1, 0, 1.5), Mix(0.5, 0.2, 0.3)]


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_chunked_loss_equals_the_whole(mix):
    keys = jax.random.split(jax.random.key(4), 4)
    table = jax.random.normal(keys[0], (48, 16))
    rows = losses.Rows(
        jax.random.normal(keys[1], (2, 23, 16)),
        jax.random.normal(keys[2], (2, 23, 16)),
        jnp.arange(46).reshape(2, 23) % 48,
        jax.random.uniform(keys[3], (2, 23)) * (jnp.arange(23) % 5 > 0),
    )

    def whole(draft):
        z, t = draft @ table.T, mix.temperature
        log_p, log_q = jax.nn.log_softmax(rows.teacher @ table.T / t), jax.nn.log_softmax(z / t)
        each = mix.forward_kl * t**2 * (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
        each += mix.reverse_kl * t**2 * (jnp.exp(log_q) * (log_q - log_p)).sum(-1)
        label = jnp.take_along_axis(jax.nn.log_softmax(z), rows.label[..., None], -1)[..., 0]
        return ((each - mix.cross_entropy * label) * rows.weight).sum()

    value, gradient = jax.value_and_grad(whole)(rows.draft)
    got = jax.jit(losses.distill, static_argnums=(2, 3))(table, rows, mix, 10)
    np.testing.assert_allclose(got.value, value, rtol=1e-5)
    np.testing.assert_allclose(got.gradient, gradient, atol=1e-5 * np.abs(gradient).max())
    best = (rows.teacher @ table.T).argmax(-1) if mix.teaches else rows.label
    np.testing.assert_array_equal(got.hit, (rows.draft @ table.T).argmax(-1) == best)


def test_a_certain_teacher_and_a_broken_padding_row_give_a_finite_loss():
    table = jnp.eye(8) * 400
    draft = jnp.zeros((1, 3, 8)).at[0, 2].set(jnp.nan)
    teacher_rows = jnp.zeros((1, 3, 8)).at[0, 0, 5].set(1.0)  # its distribution is one-hot
    rows = losses.Rows(draft, teacher_rows, jnp.array([[5, 0, 0]]), jnp.array([[1.0, 1.0, 0.0]]))
    for mix in (Mix(), Mix(0, 1, 0), Mix(0, 0, 1)):
        got = losses.distill(table, rows, mix)
        assert np.isfinite(got.value) and np.isfinite(got.gradient).all()
        assert not got.gradient[0, 2].any()


def test_the_loss_over_a_vocabulary_of_152k_fits_a_device_of_16_gb():
    """FC-47: 256 anchors a sequence, compiled from shapes. The CPU's compiler adds f32 copies of 16-bit operands."""
    a = jax.ShapeDtypeStruct
    hidden, flat = a((2, 256 * 15, 4096), jnp.bfloat16), (2, 256 * 15)
    rows = losses.Rows(hidden, hidden, a(flat, jnp.int32), a(flat, jnp.float32))
    table = a((151_936, 4096), jnp.bfloat16)

    def gigabytes(chunk):
        lowered = jax.jit(losses.distill, static_argnums=(2, 3)).lower(table, rows, Mix(), chunk)
        used = lowered.compile().memory_analysis()
        return (used.argument_size_in_bytes + used.temp_size_in_bytes + used.output_size_in_bytes) / 1e9

    assert gigabytes(2048) < 16 < gigabytes(7680)  # that is the whole at once


def test_run_length():
    hit = jnp.array([[[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]], bool)
    exists = jnp.array([[[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]], bool)
    run, first, blocks = losses.run_length(hit, exists)
    assert (float(run), float(first), float(blocks)) == (3 + 1 + 3, 2, 3)


def test_gradient_products_stay_in_the_operands_dtype():
    x, w = jnp.ones((4, 8), jnp.bfloat16), jnp.ones((8, 2), jnp.bfloat16)
    text = str(jax.make_jaxpr(jax.grad(lambda w: numerics.einsum("re,ef->rf", x, w, jnp.float32).sum()))(w))
    products = [line for line in text.splitlines() if "dot_general" in line]
    assert len(products) >= 1 and all("bf16" in line for line in products[1:])
    f = lambda x, w: (numerics.einsum("re,ef->rf", x, w) ** 2).sum()
    g = lambda x, w: (jnp.einsum("re,ef->rf", x, w) ** 2).sum()
    wide = jax.random.normal(jax.random.key(0), (4, 8)), jax.random.normal(jax.random.key(1), (8, 2))
    for got, wanted in zip(jax.grad(f, (0, 1))(*wide), jax.grad(g, (0, 1))(*wide), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)
