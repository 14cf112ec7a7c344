"""The losses over a vocabulary, a chunk of rows at a time, and what is counted beside them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.layers import numerics
from jetspec_jax.training import losses
from jetspec_jax.training.losses import Logits, Mix, Term

KEYS = jax.random.split(jax.random.key(4), 7)
TABLE = jax.random.normal(KEYS[0], (48, 16))
DRAFT = jax.random.normal(KEYS[1], (2, 23, 16))
ROWS = losses.Rows(
    jax.random.normal(KEYS[2], (2, 23, 16)),
    jnp.arange(46).reshape(2, 23) % 48,
    jax.random.uniform(KEYS[3], (2, 23)) * (jnp.arange(23) % 5 > 0),
)
MIXES = [
    Mix(),
    Mix(temperature=2.0),
    Mix(0, 0, 1),
    Mix(0, 1, 0, 1.5),
    Mix(0.5, 0.2, 0.3),
    Mix(0, temperature=1.5, total_variation=1),
    Mix(0.5, 0.2, 0.3, 1.5, 0.9),
]
distill = jax.jit(losses.distill, static_argnums=(3, 4, 5))


def each_row(z, teacher, label, mix):
    """Losses of whole logits, and the overlap."""
    t = mix.temperature
    log_p, log_q = jax.nn.log_softmax(teacher / t), jax.nn.log_softmax(z / t)
    each = mix.forward_kl * t**2 * (jnp.exp(log_p) * (log_p - log_q)).sum(-1)
    each += mix.reverse_kl * t**2 * (jnp.exp(log_q) * (log_q - log_p)).sum(-1)
    apart = jnp.abs(jnp.exp(log_q) - jnp.exp(log_p)).sum(-1)
    label = jnp.take_along_axis(jax.nn.log_softmax(z), label[..., None], -1)[..., 0]
    return each - mix.cross_entropy * label + mix.total_variation * apart, 1 - apart / 2


def near(got, wanted):
    np.testing.assert_allclose(got, wanted, atol=1e-5 * np.abs(wanted).max())


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_chunked_loss_equals_the_whole(mix):
    def whole(draft):
        each, overlap = each_row(draft @ TABLE.T, ROWS.teacher @ TABLE.T, ROWS.label, mix)
        return (each * ROWS.weight).sum(), overlap

    (value, overlap), gradient = jax.value_and_grad(whole, has_aux=True)(DRAFT)
    got = distill(TABLE, Logits((Term(DRAFT, TABLE),)), ROWS, mix, 10, mix.cross_entropy > 0)
    np.testing.assert_allclose(got.value, value, rtol=1e-5)
    near(got.slopes[0].rows, gradient)
    assert got.slopes[0].table is None
    best = (ROWS.teacher @ TABLE.T).argmax(-1) if mix.teaches else ROWS.label
    np.testing.assert_array_equal(got.hit, (DRAFT @ TABLE.T).argmax(-1) == best)
    np.testing.assert_array_equal(got.weight, ROWS.weight)
    if mix.cross_entropy:
        np.testing.assert_allclose(got.overlap, overlap, atol=1e-5)
    else:
        assert got.overlap is None


@pytest.mark.parametrize(
    "mix",
    [*(pytest.param(m, marks=pytest.mark.slow) for m in (Mix(), Mix(0, 0, 1))), Mix(0.5, 0.2, 0.3, 1.5, 0.9)],
    ids=str,
)
def test_tables_of_a_heads_own_over_a_part_of_the_vocabulary(mix):
    """A frozen table and two trained ones, of other widths; what cannot be drafted is not learnt and no hit."""
    ids = jnp.array([1, 2, 3, *range(7, 30), 46])
    made = DRAFT, jax.random.normal(KEYS[4], (2, 23, 5)), jnp.ones((2, 23, 1))
    tables = TABLE[ids], *(jax.random.normal(k, (ids.size, n)) for k, n in zip(KEYS[5:], (5, 1), strict=True))
    place = {int(token): i for i, token in enumerate(ids)}
    teacher = ROWS.teacher @ TABLE.T
    best, text = np.asarray(teacher.argmax(-1)), np.asarray(ROWS.label)
    inside = np.ones(text.shape, bool)
    for needed, of in ((mix.teaches, best), (mix.cross_entropy, text)):
        inside &= ~np.bool_(needed) | np.isin(of, ids)
    label = np.vectorize(lambda token: place.get(int(token), 0))(text)
    weight = np.where(inside, ROWS.weight, 0)
    assert 5 < (weight > 0).sum() < (np.asarray(ROWS.weight) > 0).sum() - 5

    def whole(made, tables):
        z = sum(x @ t.T for x, t in zip(made, tables, strict=True))
        return (each_row(z, teacher[..., ids], label, mix)[0] * weight).sum(), z

    (value, z), (by_rows, by_table) = jax.value_and_grad(whole, (0, 1), has_aux=True)(made, tables)
    terms = tuple(Term(x, t, trained) for x, t, trained in zip(made, tables, (False, True, True), strict=True))
    got = distill(TABLE, Logits(terms, ids), ROWS, mix, 10)
    np.testing.assert_allclose(got.value, value, rtol=1e-5)
    for slope, rows, table, term in zip(got.slopes, by_rows, by_table, terms, strict=True):
        near(slope.rows, rows)
        assert (slope.table is not None) == term.trained
        if term.trained:
            near(slope.table, table)
    np.testing.assert_array_equal(got.weight, weight)
    np.testing.assert_array_equal(got.hit, (ids[z.argmax(-1)] == (best if mix.teaches else text)) & inside)
    spread = Logits(terms, ids).whole(48)
    np.testing.assert_allclose(spread[..., ids], z, rtol=1e-5, atol=1e-5)
    assert np.isneginf(np.delete(spread, ids, -1)).all()


def test_a_certain_teacher_and_a_broken_padding_row_give_a_finite_loss():
    table = jnp.eye(8) * 400
    draft = jnp.zeros((1, 3, 8)).at[0, 2].set(jnp.nan)
    teacher_rows = jnp.zeros((1, 3, 8)).at[0, 0, 5].set(1.0)  # its distribution is one-hot
    rows = losses.Rows(teacher_rows, jnp.array([[5, 0, 0]]), jnp.array([[1.0, 1.0, 0.0]]))
    for mix in (Mix(), Mix(0, 1, 0), Mix(0, 0, 1), Mix(0, total_variation=1)):
        got = losses.distill(table, Logits((Term(draft, table, trained=True),)), rows, mix)
        (slope,) = got.slopes
        assert np.isfinite(got.value) and np.isfinite(slope.rows).all() and np.isfinite(slope.table).all()
        assert not slope.rows[0, 2].any()


def test_the_loss_over_a_vocabulary_of_152k_fits_a_device_of_16_gb():
    """FC-47: 256 anchors a sequence, compiled from shapes. The CPU's compiler adds f32 copies of 16-bit operands."""
    a = jax.ShapeDtypeStruct
    hidden, flat = a((2, 256 * 15, 4096), jnp.bfloat16), (2, 256 * 15)
    rows = losses.Rows(hidden, a(flat, jnp.int32), a(flat, jnp.float32))
    table = a((151_936, 4096), jnp.bfloat16)

    def gigabytes(chunk):
        lowered = distill.lower(table, Logits((Term(hidden, table),)), rows, Mix(), chunk)
        used = lowered.compile().memory_analysis()
        return (used.argument_size_in_bytes + used.temp_size_in_bytes + used.output_size_in_bytes) / 1e9

    assert gigabytes(2048) < 16 < gigabytes(7680)  # that is the whole at once


def test_expected_probabilities():
    """Against the formula of the cross entropy; a row that weighs nothing may hold anything."""
    logit, wanted = jnp.array([[2.0, -3.0, jnp.nan, 60.0]]), jnp.array([[0.7, 0.9, jnp.nan, 0.0]])
    weight = jnp.array([[1.0, 0.5, 0.0, 2.0]])
    value, slope = losses.expect(logit, wanted, weight)
    say = lambda x, p: -(p * jnp.log(jax.nn.sigmoid(x)) + (1 - p) * jnp.log(jax.nn.sigmoid(-x)))
    one = [say(x, p) for x, p in ((2.0, 0.7), (-3.0, 0.9))]
    np.testing.assert_allclose(value, one[0] + one[1] / 2 + 2 * 60, rtol=1e-6)
    slopes = [jax.grad(say)(2.0, 0.7), jax.grad(say)(-3.0, 0.9) / 2, 0, 2]
    np.testing.assert_allclose(slope, [slopes], rtol=1e-6)


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
