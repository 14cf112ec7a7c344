"""Attention in two halves against one softmax."""

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny

from jetspec_jax.layers import attention, masks

attend = jax.jit(attention.attend)


def inputs(batch, rows, slots, kv_heads, groups, dim, dtype=jnp.float32, keys=None, seed=0):
    """Queries, fresh and prefix K/V, all random; `keys` fresh rows, as many as queries unless told."""
    draw = np.random.default_rng(seed)
    one = lambda *shape: jnp.asarray(draw.standard_normal(shape), dtype)
    fresh = [one(batch, kv_heads, keys or rows, dim) for _ in range(2)]
    prefix = [one(batch, kv_heads, slots, dim) for _ in range(2)]
    return one(batch, rows, kv_heads * groups, dim), tuple(fresh), tuple(prefix)


def naive(q, fresh, mask, prefix, lengths):
    out = []
    for b in range(q.shape[0]):
        length = int(lengths[b])
        k, v = (np.concatenate([np.asarray(p[b, :, :length], np.float64), np.asarray(f[b], np.float64)], 1)
                for p, f in zip(prefix, fresh, strict=True))  # fmt: skip
        inside = np.asarray(mask[b % mask.shape[0]])
        visible = np.concatenate([np.ones((len(inside), length), bool), inside], 1)
        out.append(oracles.attention(np.asarray(q[b], np.float32), k, v, visible))
    return np.stack(out)


@pytest.mark.parametrize("groups", [1, 2, 3, 4])
def test_prefix_and_fresh(groups):
    q, fresh, prefix = inputs(3, 5, 17, 2, groups, 6)
    mask = masks.ancestors(jnp.array([[-1, 0, 0, 1, 2], [-1, 0, 1, 2, 3], [-1, -1, -1, -1, -1]]), 4)
    for lengths in ([0, 1, 17], [16, 7, 0]):
        got = attend(q, fresh, mask, prefix, jnp.array(lengths))
        tiny.close(got, naive(q, fresh, mask, prefix, lengths))


def test_fresh_alone_with_a_shared_mask():
    q, fresh, _ = inputs(2, 7, 1, 1, 2, 4)
    mask = masks.causal(7)
    empty = tuple(x[:, :, :0] for x in fresh)
    tiny.close(attend(q, fresh, mask), naive(q, fresh, mask, empty, [0, 0]))


def test_more_keys_than_queries():
    q, fresh, prefix = inputs(1, 3, 4, 2, 1, 4, keys=8)
    mask = jnp.asarray(np.random.default_rng(0).random((1, 3, 8)) < 0.5).at[:, :, 0].set(True)
    tiny.close(attend(q, fresh, mask, prefix, jnp.array([3])), naive(q, fresh, mask, prefix, [3]))


@pytest.mark.parametrize("extra", [1, 700, attention.CHUNK, attention.CHUNK + 476])
def test_long_prefix_is_read_in_chunks(extra):
    """Buffers that no whole number of chunks fills, at lengths around every border."""
    slots = attention.CHUNK + extra
    q, fresh, prefix = inputs(2, 3, slots, 1, 2, 4, seed=extra)
    mask = masks.causal(3)
    border = attention.CHUNK
    for lengths in ([0, 1], [border - 1, border], [border + 1, slots], [slots, 0], [slots - 1, 5]):
        got = attend(q, fresh, mask, prefix, jnp.array(lengths))
        tiny.close(got, naive(q, fresh, mask, prefix, lengths))


@pytest.mark.parametrize("slots,lengths", [(17, [2, 16]), (attention.CHUNK + 476, [2, attention.CHUNK + 1])])
def test_what_a_query_does_not_see_has_no_influence(slots, lengths):
    """Numbers, NaN and inf, in keys and in values: after the length of a short and of a long buffer, and in fresh rows
    that the mask hides. What a query does see tells, in keys and in values of the prefix."""
    q, fresh, prefix = inputs(2, 3, slots, 1, 2, 4)
    mask, lengths = masks.causal(3), jnp.array(lengths)
    after = (jnp.arange(slots) >= lengths[:, None])[:, None, :, None]
    hidden = (jnp.arange(3) > 1)[:, None]  # of the first two queries
    clean = attend(q, fresh, mask, prefix, lengths)
    for value in (1e4, jnp.nan, jnp.inf):
        for spoiled in ((True, False), (False, True)):
            spoil = lambda pair, where, value=value, spoiled=spoiled: tuple(
                jnp.where(where & s, value, x) for s, x in zip(spoiled, pair, strict=True)
            )
            got = attend(q, fresh, mask, spoil(prefix, after), lengths)
            assert (got == clean).all()
            got = attend(q, spoil(fresh, hidden), mask, spoil(prefix, after), lengths)
            assert (got[:, :2] == clean[:, :2]).all()
            if value is jnp.nan:
                assert jnp.isnan(attend(q, fresh, mask, spoil(prefix, ~after), lengths)).all()


def test_large_scores_do_not_overflow():
    q, fresh, prefix = inputs(1, 3, 9, 1, 1, 4)
    q = q * 300
    mask = masks.causal(3)
    tiny.close(attend(q, fresh, mask, prefix, jnp.array([9])), naive(q, fresh, mask, prefix, [9]), 1e-4)


def test_bfloat16():
    """Inputs and outputs are rounded, the softmax and the join are not."""
    q, fresh, prefix = inputs(2, 5, 40, 2, 2, 8, jnp.bfloat16)
    mask = masks.causal(5)
    got = attend(q, fresh, mask, prefix, jnp.array([40, 11]))
    assert got.dtype == jnp.bfloat16
    tiny.close(got.astype(jnp.float32), naive(q, fresh, mask, prefix, [40, 11]), 1e-2)
