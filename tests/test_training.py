"""What a training step computes: masks, anchors, weights, losses, gradients, and what it must not depend on."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from small import HEAD, MODEL, WIDTH, batch, example, random_examples, random_params, recipe, target
from tiny import random_like

from jetspec_jax.drafts import block
from jetspec_jax.layers import masks, numerics, rope
from jetspec_jax.layers.attention import attend
from jetspec_jax.layers.numerics import rms_norm
from jetspec_jax.loop.contracts import Ends, Seen
from jetspec_jax.models import qwen3
from jetspec_jax.training import anchors as anchor_rules
from jetspec_jax.training import features, flops, forward, losses, packing, step, teacher
from jetspec_jax.training.anchors import Anchors
from jetspec_jax.training.losses import Mix

ONES = jnp.ones(32)


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
    got = jax.jit(functools.partial(forward.hidden, head))(slots, anchors, taps, *where)
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


def test_the_fused_form_of_attention_is_the_same():
    keys = jax.random.split(jax.random.key(0), 5)
    q = jax.random.normal(keys[0], (2, 8, 4, 8))
    block = tuple(jax.random.normal(k, (2, 2, 8, 8)) for k in keys[1:3])
    context = tuple(jax.random.normal(k, (2, 2, 12, 8)) for k in keys[3:])
    anchors = Anchors(jnp.array([[3, 8], [5, 0]]), jnp.array([[True, True], [True, False]]))
    seen = anchor_rules.seen(anchors, jnp.ones((2, 12), jnp.int32))
    own = masks.causal(4)[0]
    fused = jax.jit(forward._fused, static_argnums=5)(q, block, context, seen, own, "xla")
    np.testing.assert_allclose(fused, jax.jit(forward._attend)(q, block, context, seen, own), atol=1e-5)


def test_a_slot_depends_on_what_it_may_see_and_on_nothing_else():
    _, _, head = head_of()
    anchors = Anchors(jnp.array([[3, 8]]), jnp.ones((1, 2), bool))
    document = [1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 2]  # the second anchor is in the second document
    where = jnp.array([document]), jnp.array([[*range(6), *range(6)]])
    taps = jax.random.normal(jax.random.key(2), (1, 12, 32))
    slots = jax.random.normal(jax.random.key(3), (1, 2, 4, 16))
    to_slots, to_taps = jax.jit(
        jax.jacrev(lambda s, t: forward.hidden(head, s, anchors, t, *where).sum(-1)[0], argnums=(0, 1))
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


def test_no_label_behind_a_gap_or_in_another_document():
    one = lambda position: Anchors(jnp.array([[position]]), jnp.ones((1, 1), bool))
    learnt = jnp.array([[0, 1, 1, 0, 1, 1, 1, 1]], bool)
    document = jnp.array([[1, 1, 1, 1, 1, 1, 2, 2]])
    assert anchor_rules.candidates(learnt, document)[0].nonzero()[0].tolist() == [1, 4, 6]
    weigh = lambda a: anchor_rules.weights(one(a), learnt, document, 4, 0.0)[0, 0].tolist()
    assert weigh(1) == [1, 0, 0, 0]  # the answer goes on at 4, behind another's turn
    assert weigh(4) == [1, 0, 0, 0]
    assert weigh(6) == [1, 0, 0, 0]


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


# ---- packing


def run_target(packed, rows):
    p = packed.select(np.asarray(rows))
    t = target()
    run = jax.jit(teacher.run, static_argnums=(0, 5))
    return run(t.model, t.params, p.tokens, p.document, p.position, HEAD.tap_layers)


def test_a_packed_document_is_as_if_alone():
    a, b, c = (example(n, np.arange(4, 4 + s) % 48, 2) for n, s in (("a", 9), ("b", 14), ("c", 30)))
    packed = packing.pack([a, b], WIDTH)
    assert packed.tokens.shape == (1, WIDTH) and packed.identities == (("b", "a"),)
    assert packed.position[0].tolist() == [*range(14), *range(9), 0]
    together, alone = run_target(packed, [0]), run_target(packing.pack([a], WIDTH), [0])
    for x, y in zip(together, alone, strict=True):
        np.testing.assert_allclose(x[0, 14:23], y[0, :9], atol=1e-5)
    plain = target().model.forward(
        target().params, jnp.asarray(a.tokens)[None], jnp.arange(9)[None], masks.causal(9), taps=HEAD.tap_layers
    )
    np.testing.assert_allclose(alone.taps[0, :9], plain.taps[0], atol=1e-5)
    np.testing.assert_allclose(alone.final[0, :9], plain.hidden[0], atol=1e-5)
    other = packing.pack([a, example("b", np.arange(14) + 20, 2)], WIDTH)
    np.testing.assert_array_equal(run_target(other, [0]).final[0, 14:23], together.final[0, 14:23])
    with pytest.raises(ValueError, match="c: 30 tokens"):
        packing.pack([c], WIDTH)


def test_packing_loses_nothing_and_fills_well():
    known = random_examples(200)
    packed = packing.pack(known, 64)
    assert sorted(n for names in packed.identities for n in names) == sorted(e.identity for e in known)
    assert (packed.document > 0).sum() == sum(e.tokens.size for e in known)
    assert (packed.document > 0).mean() > 0.95 and packed.learnt.sum() == sum(e.learnt.sum() for e in known)
    by_name = {e.identity: e for e in known}
    for i, names in enumerate(packed.identities):
        for number, name in enumerate(names, 1):
            here = packed.document[i] == number
            np.testing.assert_array_equal(packed.tokens[i, here], by_name[name].tokens)


def test_a_sample_of_sequences_has_long_and_short_documents():
    packed = packing.pack([example(str(n), range(n), 2) for n in range(WIDTH, 4, -1)], WIDTH)
    few, longest = packed.sample(3), lambda p: [int(row.max()) + 1 for row in p.position]
    assert len(few.tokens) == 3 and longest(few)[0] == WIDTH and longest(few)[-1] == longest(packed)[-1]
    assert packed.sample(10**6).identities == packed.identities


# ---- the step


CHEAP = {"xla_backend_optimization_level": 0}  # compiling is most of the time here


@functools.lru_cache(None)
def update():
    return jax.jit(step.update, static_argnums=0, compiler_options=CHEAP)


@functools.lru_cache(None)
def start(r):
    return jax.jit(lambda norm: step.init(r, norm))(target().params["norm"])


def advance(r, state, b):
    return update()(r, target().params, ONES, state, b)


def test_loss_and_gradient_of_a_document_do_not_depend_on_its_neighbour():
    """B packed behind A, B alone, and B behind another A: the same loss and the same step, every anchor drawn."""
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
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), whole.params, parts.params)


def test_kept_features_and_recomputed_layers_give_the_same_step():
    packed = packing.pack(random_examples(20), WIDTH)
    r = recipe()
    online, metrics = advance(r, start(r), batch(packed, [3, 1]))
    kept = features.resident(target(), packed, HEAD.tap_layers, 4, "xla")
    b = batch(packed, [3, 1])
    brought = b._replace(features=features.gather(kept, b.rows))
    state, same = advance(dataclasses.replace(r, remat=True), start(r), brought)
    assert float(same.loss) == pytest.approx(float(metrics.loss), rel=1e-6)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-5), state.params, online.params)


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
        return found, *step._gradient(r, params, jnp.linspace(0.5, 2, 128), state, part, found, anchors)

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
    run, plain = teacher.run, step.unembedding
    monkeypatch.setattr(teacher, "run", lambda model, p, *rest: run(model, guarded(p), *rest))
    monkeypatch.setattr(step, "unembedding", lambda p: plain(guarded(p)))
    r = recipe()
    b = batch(packing.pack(random_examples(4), WIDTH), [0])
    jax.eval_shape(functools.partial(step.update, r), target().params, ONES, start(r), b)


def test_folding_the_scale_keeps_the_numbers():
    params = start(recipe()).params
    scale = jnp.geomspace(0.5, 400, 32)
    taps = jax.random.normal(jax.random.key(5), (1, 6, 32)) * scale
    graphdef = block.build(HEAD, jnp.float32)[0].graphdef
    context = lambda p, x: nnx.merge(graphdef, nnx.State(p)).context(x)
    folded = step.fold(params, scale, jnp.float32)
    np.testing.assert_allclose(context(folded, taps), context(params, taps / scale), atol=1e-5)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), step.unfold(folded, scale), params)


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
        run = lambda p, f: step._gradient(r, target().params, scale, p, part, f, two)[0]
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
