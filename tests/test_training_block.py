"""Blocks of a head in training: masks, anchors, weights, the forward over many blocks at once."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import (
    HEAD,
    batch,
    example,
    random_params,
    recipe,
    start,
    target,
)

from jetspec_jax.backends.xla import PLAIN_XLA
from jetspec_jax.drafts import block
from jetspec_jax.layers import masks, rope
from jetspec_jax.layers.attention import attend
from jetspec_jax.layers.numerics import rms_norm
from jetspec_jax.loop.contracts import Ends, Seen
from jetspec_jax.training import anchors as anchor_rules
from jetspec_jax.training import flops, step, teacher
from jetspec_jax.training.anchors import Anchors
from jetspec_jax.training.data import packing
from jetspec_jax.training.objectives import block as learns


def dense_mask(positions, document, block, causal=True):
    """[A * T, S + A * T] of the rules that the forward keeps apart."""
    anchors = Anchors(jnp.array([positions]), jnp.ones((1, len(positions)), bool))
    seen = np.asarray(anchor_rules.seen(anchors, jnp.array([document])))[0]
    own = np.asarray(masks.causal(block))[0] if causal else np.ones((block, block), bool)
    return np.concatenate([seen.repeat(block, 0), np.kron(np.eye(len(positions), dtype=bool), own)], axis=1)


def head_of(config=HEAD, seed=1):
    draft, shapes = block.build(config, jnp.float32)
    params = random_params(shapes, seed)
    return draft, params, nnx.merge(draft.graphdef, nnx.State(params))


def test_worked_example():
    """Sequence of 7, block of 3, anchors 2 and 4: mask, positions, labels and teacher rows."""
    expected = """1100000 100 000
                  1100000 110 000
                  1100000 111 000
                  1111000 000 100
                  1111000 000 110
                  1111000 000 111"""
    rows = [[int(x) for x in line.replace(" ", "")] for line in expected.split("\n")]
    np.testing.assert_array_equal(dense_mask([2, 4], [1] * 7, 3), np.array(rows, bool))
    anchors = Anchors(jnp.array([[2, 4]]), jnp.ones((1, 2), bool))
    label = anchor_rules.labels(anchors, 7, 2)
    assert label.tolist() == [[[3, 4], [5, 6]]] and (label - 1).tolist() == [[[2, 3], [4, 5]]]
    learnt, document = jnp.ones((1, 7), bool), jnp.ones((1, 7), jnp.int32)
    assert anchor_rules.weights(anchors, learnt, document, 2, 0.0).tolist() == [[[1, 1], [1, 1]]]


@pytest.mark.parametrize("causal", [True, False])
def test_forward_equals_dense_attention_and_inference(causal):
    """Two partial attentions joined equal one masked attention, the fused form, and the head as it decodes."""
    config = dataclasses.replace(HEAD, causal=causal, num_layers=2)
    draft, params, head = head_of(config)
    positions, block = [3, 8], config.block_size
    anchors = Anchors(jnp.array([positions, positions]), jnp.array([[True, True], [True, False]]))
    taps = jax.random.normal(jax.random.key(2), (2, 12, 32))
    slots = jax.random.normal(jax.random.key(3), (2, 2, block, 16))
    where = jnp.ones((2, 12), jnp.int32), jnp.broadcast_to(jnp.arange(12), (2, 12))
    got = jax.jit(functools.partial(learns.forward, head))(slots, anchors, taps, *where)
    assert np.isfinite(got).all()
    mask = jnp.asarray(dense_mask(positions, [1] * 12, block, causal))[None]

    @jax.jit
    def dense(slots, taps):
        at = jnp.concatenate([a + jnp.arange(block) for a in positions])[None]
        angles = rope.angles(at, config.head_dim, config.rope_theta)
        context = head.context_kv(head.context(taps), jnp.arange(12)[None])
        x = slots.reshape(1, -1, 16)
        for layer, (ck, cv) in zip(head.layers, context, strict=True):
            q, k, v = layer.project(rms_norm(x, layer.input_norm[...], config.norm_eps), angles)
            x = sum(layer.after(x, attend(q, (jnp.concatenate([ck, k], 2), jnp.concatenate([cv, v], 2)), mask)))
        return rms_norm(x, head.norm[...], config.norm_eps).reshape(1, 2, block, 16)

    np.testing.assert_allclose(got[:1], dense(slots[:1], taps[:1]), atol=1e-5)

    @jax.jit
    def decoding(slots, anchor):
        seen = Seen(taps[:1], jnp.zeros(1, jnp.int32), anchor, None, path=False)
        state = draft.extend(params, draft.init(params, 1, 32), seen, Ends(None, None))
        return head(slots, anchor, head.context(state.pending), state.count, state.context, state.length)[0]

    for i, a in enumerate(positions):
        np.testing.assert_allclose(decoding(slots[:1, i], jnp.array([a]))[0], got[0, i], atol=1e-5)


@pytest.mark.parametrize("window", [pytest.param(4, marks=pytest.mark.slow), 11])
def test_blocks_that_look_back_at_a_window(window):
    """Keys cut out for each block equal masked ones, with their gradients, and the head as it decodes with a window."""
    config = dataclasses.replace(HEAD, num_layers=2)
    draft, params, head = head_of(config)
    positions = [0, 2, 8]  # nothing before it; less than a window; two documents before it
    anchors = Anchors(jnp.array([positions]), jnp.array([[True, True, True]]))
    document = jnp.array([[1] * 3 + [2] * 9])
    index = jnp.array([[*range(3), *range(9)]])
    taps = jax.random.normal(jax.random.key(2), (1, 12, 32))
    slots = jax.random.normal(jax.random.key(3), (1, 3, config.block_size, 16))

    def cut(slots, taps):
        return learns.forward(head, slots, anchors, taps, document, index, window=window)

    def masked(slots, taps):
        with pytest.MonkeyPatch.context() as patch:
            seen = anchor_rules.seen(anchors, document, window)
            patch.setattr(anchor_rules, "seen", lambda *_: seen)
            return learns.forward(head, slots, anchors, taps, document, index)

    pull = jax.random.normal(jax.random.key(4), slots.shape)
    pulled = [jax.jit(lambda *x, f=f: jax.vjp(f, *x)[1](pull))(slots, taps) for f in (cut, masked)]
    for one, other in zip(*pulled, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-5)
    got = jax.jit(cut)(slots, taps)
    np.testing.assert_allclose(got, jax.jit(masked)(slots, taps), atol=1e-5)

    at, own = 8, taps[:, 3:8]  # the third block, as its document alone decodes
    seen = Seen(own, jnp.zeros(1, jnp.int32), jnp.array([5]), None, path=False)
    state = draft.extend(params, draft.init(params, 1, 32), seen, Ends(None, None))
    out = head(
        slots[:, 2], jnp.array([at - 3]), head.context(state.pending), state.count, state.context, state.length,
        PLAIN_XLA, window,
    )[0]  # fmt: skip
    np.testing.assert_allclose(out[0], got[0, 2], atol=1e-5)


def test_the_fused_form_of_attention_is_the_same():
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (2, 8, 4, 8))
    block = tuple(jax.random.normal(k, (2, 2, 8, 8)) for k in keys[1:3])
    context = tuple(jax.random.normal(k, (2, 2, 12, 8)) for k in keys[3:])
    anchors = Anchors(jnp.array([[3, 8], [5, 0]]), jnp.array([[True, True], [True, False]]))
    seen = anchor_rules.seen(anchors, jnp.ones((2, 12), jnp.int32))
    own = masks.causal(4)[0]
    fused = jax.jit(learns._fused, static_argnums=5)(q, block, context, seen, own, "xla")
    np.testing.assert_allclose(fused, jax.jit(learns._attend)(q, block, context, seen, own), atol=1e-5)


def test_a_slot_depends_on_what_it_may_see_and_on_nothing_else():
    _, _, head = head_of()
    anchors = Anchors(jnp.array([[3, 8]]), jnp.ones((1, 2), bool))
    document = [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]  # the second anchor is in the second document
    where = jnp.array([document]), jnp.array([[*range(6), *range(6)]])
    taps = jax.random.normal(jax.random.key(2), (1, 12, 32))
    slots = jax.random.normal(jax.random.key(3), (1, 2, 4, 16))
    to_slots, to_taps = jax.jit(
        jax.jacrev(lambda s, t: learns.forward(head, s, anchors, t, *where).sum(-1)[0], argnums=(0, 1))
    )(slots, taps)
    reads = np.abs(to_slots[:, :, 0]).sum(-1) > 0  # [A, T, A, T]
    mask = dense_mask([3, 8], document, 4)
    np.testing.assert_array_equal(reads.reshape(8, 8), mask[:, 12:])
    context = np.abs(to_taps[:, :, 0]).sum(-1) > 0
    np.testing.assert_array_equal(context.reshape(8, 12), mask[:, :12])
    assert mask[4:, 6:8].all() and not mask[4:, :6].any()


def test_anchors_lie_on_answer_tokens_with_a_successor():
    learnt = np.zeros((3, 12), bool)
    learnt[0, 3:9] = learnt[1, 9:10] = True
    document = jnp.ones((3, 12), jnp.int32)
    candidate = anchor_rules.candidates(jnp.asarray(learnt), document)
    keys = jax.random.split(jax.random.key(0), 3)
    drawn = anchor_rules.sample(keys, candidate, 8)
    valid = [np.asarray(p)[v] for p, v in zip(drawn.position, np.asarray(drawn.valid), strict=True)]
    assert [v.tolist() for v in valid] == [[3, 4, 5, 6, 7], [], []]
    weight = anchor_rules.weights(drawn, jnp.asarray(learnt), document, 3, 2.0)
    np.testing.assert_allclose(weight[0, 4], [1, 0, 0])
    np.testing.assert_allclose(weight[0, 0], np.exp(-np.arange(3) / 2), rtol=1e-6)
    assert anchor_rules.weights(drawn, jnp.asarray(learnt), document, 3, 0.0)[0, 0].tolist() == [1, 1, 1]

    long = jnp.arange(12)[None] >= 2
    few = anchor_rules.sample(keys[:1], anchor_rules.candidates(long, document[:1]), 3)
    assert few.valid.all() and (np.diff(few.position[0]) > 0).all() and few.position.min() >= 2


def test_no_label_after_a_gap_or_in_another_document():
    one = lambda position: Anchors(jnp.array([[position]]), jnp.ones((1, 1), bool))
    learnt = jnp.array([[0, 1, 1, 0, 1, 1, 1, 1]], bool)
    document = jnp.array([[1, 1, 1, 1, 1, 1, 2, 2]])
    assert anchor_rules.candidates(learnt, document)[0].nonzero()[0].tolist() == [1, 4, 6]
    weigh = lambda a: anchor_rules.weights(one(a), learnt, document, 4, 0.0)[0, 0].tolist()
    assert weigh(1) == [1, 0, 0, 0]  # the answer goes on at 4, after another's turn
    assert weigh(4) == [1, 0, 0, 0]
    assert weigh(6) == [1, 0, 0, 0]


def test_folding_the_scale_keeps_the_numbers():
    params = start(recipe()).params
    scale = jnp.geomspace(0.5, 400, 32)
    taps = jax.random.normal(jax.random.key(5), (1, 6, 32)) * scale
    graphdef = block.build(HEAD, jnp.float32)[0].graphdef
    context = lambda p, x: nnx.merge(graphdef, nnx.State(p)).context(x)
    folded = learns.fold(params, scale, jnp.float32)
    np.testing.assert_allclose(context(folded, taps), context(params, taps / scale), atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), learns.unfold(folded, scale), params)


def test_operations_of_fc_are_those_that_the_compiler_counts():
    """One tap more is a product forward and one backward: the features are frozen."""
    shape = 2, 256
    two = Anchors(jnp.full((2, 2), 8), jnp.ones((2, 2), bool))
    packed = packing.pack([example("e", np.full(shape[1], 5), 2)] * 2, shape[1])

    def count(taps):
        r = recipe(head=dataclasses.replace(HEAD, tap_layers=taps), anchors=2)
        params, scale = start(r).params, jnp.ones(len(taps) * HEAD.hidden_size)
        given = teacher.Features(jnp.ones((*shape, scale.size)), jnp.ones((*shape, HEAD.hidden_size)))
        part = jax.tree.map(lambda x: x[0], batch(packed, range(2)))
        asked = learns.ask(r, target().params, part, *two)
        run = lambda p, f: step._gradient(r, target().params, scale, p, part, f, asked)[0]
        compiled = jax.jit(run).lower(params, given).compile()
        work = flops.parts(r, target().config, *shape, online=False)
        return compiled.cost_analysis()["flops"], work["head_forward"] + work["head_backward"]

    (more, ours), (less, before) = count((0, 1)), count((0,))
    assert (more - less) == pytest.approx(ours - before, rel=0.1)


def test_the_matrix_rate_is_that_of_random_numbers(monkeypatch):
    seen = []
    monkeypatch.setattr(flops.jax, "jit", lambda f: lambda a, b: seen.append(a) or f(a, b))
    assert flops.matrix_rate("float32", 32, 0.01) > 0
    assert 0.9 < float(seen[0].std()) < 1.1
