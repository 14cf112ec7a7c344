"""Training: masks, losses, the loop and what it saves, on a two-layer random target."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jetspec_jax import load, masks, rope
from jetspec_jax.attention import attend
from jetspec_jax.config import ConfigError, HeadConfig, ModelConfig
from jetspec_jax.drafts import jetspec
from jetspec_jax.evals import prompts
from jetspec_jax.models import qwen3
from jetspec_jax.numerics import rms_norm
from jetspec_jax.training import anchors as anchor_rules
from jetspec_jax.training import answers as answer_store
from jetspec_jax.training import (
    features,
    forward,
    loop,
    losses,
    options,
    pipeline,
    regenerate,
    step,
)
from jetspec_jax.training.anchors import Anchors

WIDTH = 24
MODEL = ModelConfig("qwen3", 48, 16, 4, 2, 1, 8, 24, 1e-6, 1e4, 512, True, True, eos_token_ids=(1,))
HEAD = HeadConfig(48, 16, 2, 2, 1, 8, 24, 1e-6, 1e4, 512, 4, 4, 3, (0, 1), True)


def random_params(shapes, seed):
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        0.3 * jax.random.normal(k, x.shape) if len(x.shape) > 1 else 1 + 0.1 * jax.random.normal(k, x.shape)
        for k, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, drawn)


@pytest.fixture(scope="module")
def target():
    model, shapes = qwen3.build(MODEL, jnp.float32)
    params = random_params(shapes, 0)
    return load.LoadedTarget(
        model, params, MODEL, "float32", MODEL.eos_token_ids, "tiny.gguf", "f00d", 0.0, lambda: None
    )


@pytest.fixture(scope="module")
def answered(target, tmp_path_factory):
    """Five prompts with the target's greedy answers."""
    folder = tmp_path_factory.mktemp("answers")
    prompts = [[5, 6, 7], [9] * 9, [], [8, 2], [11, 12, 13, 14], [4, 4]]
    args = {"batch": 2, "max_prompt": 9, "max_new": 15, "save_batches": 1}
    assert regenerate.regenerate(target, prompts, folder, **args)
    return folder, prompts, args


def plain(target, row):
    """The target's forward over one row, padded to one width."""
    tokens = np.zeros((1, WIDTH), np.int32)
    tokens[0, : row.size] = row
    forward = jax.jit(target.model.forward, static_argnames="taps")
    return forward(target.params, tokens, jnp.arange(WIDTH)[None], masks.causal(WIDTH), taps=HEAD.tap_layers)


def recipe(target, steps=4, **change):
    values = {
        "target": target.model,
        "head": HEAD,
        "dtype": "float32",
        "width": WIDTH,
        "anchors": 4,
        "gamma": 7.0,
        "loss": "forward_kl",
        "temperature": 1.0,
        "loss_chunk": 16,
        "peak_lr": 1e-2,
        "steps": steps,
    }
    return step.Recipe(**values | change)


def dense_mask(positions, slots, block, causal=True):
    """[A * T, S + A * T] of the rules that the forward keeps apart."""
    anchors = Anchors(jnp.array([positions]), jnp.ones((1, len(positions)), bool))
    seen = np.asarray(anchor_rules.seen(anchors, slots))[0]
    own = np.asarray(masks.causal(block))[0] if causal else np.ones((block, block), bool)
    return np.concatenate([seen.repeat(block, 0), np.kron(np.eye(len(positions), dtype=bool), own)], axis=1)


def test_worked_mask_example():
    """Sequence of 7, block of 3, anchors 2 and 4: context strictly before each anchor, causal inside its block."""
    expected = """1100000 100 000
                  1100000 110 000
                  1100000 111 000
                  1111000 000 100
                  1111000 000 110
                  1111000 000 111"""
    rows = [[int(x) for x in line.replace(" ", "")] for line in expected.split("\n")]
    np.testing.assert_array_equal(dense_mask([2, 4], 7, 3), np.array(rows, bool))


@pytest.mark.parametrize("causal", [True, False])
def test_forward_equals_dense_attention_and_inference(causal):
    """One joined attention a block equals one masked attention over everything, and the head as it decodes."""
    config = dataclasses.replace(HEAD, causal=causal)
    draft, shapes = jetspec.build(config, jnp.float32)
    params = random_params(shapes, 1)
    head = nnx.merge(draft.graphdef, nnx.State(params))
    positions, block = [3, 8], config.block_size
    anchors = Anchors(jnp.array([positions, positions]), jnp.array([[True, True], [True, False]]))
    taps = jax.random.normal(jax.random.key(2), (2, 12, 32))
    slots = jax.random.normal(jax.random.key(3), (2, 2, block, 16))
    got = jax.jit(functools.partial(forward.hidden, head))(slots, anchors, taps)
    assert np.isfinite(got).all()

    mask = jnp.asarray(dense_mask(positions, 12, block, causal))[None]

    @jax.jit
    def dense(slots, taps):
        where = jnp.concatenate([a + jnp.arange(block) for a in positions])[None]
        angles = rope.angles(where, config.head_dim, config.rope_theta)
        context = head.context_kv(head.context(taps), jnp.arange(12)[None])
        x = slots.reshape(1, -1, 16)
        for layer, (ck, cv) in zip(head.layers, context, strict=True):
            q, k, v = layer.project(layer.normed(x), angles)
            x = layer.finish(x, attend(q, (jnp.concatenate([ck, k], 2), jnp.concatenate([cv, v], 2)), mask))
        return rms_norm(x, head.norm[...], config.norm_eps).reshape(1, 2, block, 16)

    np.testing.assert_allclose(got[:1], dense(slots[:1], taps[:1]), atol=1e-5)

    @jax.jit
    def decoding(slots, anchor):
        state = draft.prefill(params, draft.init(params, 1, 32), taps[:1], anchor)
        return head(slots, anchor, head.context(state.pending), state.count, state.context, state.length)[0]

    for i, a in enumerate(positions):
        np.testing.assert_allclose(decoding(slots[:1, i], jnp.array([a]))[0], got[0, i], atol=1e-5)


def test_a_slot_depends_on_what_it_may_see_and_on_nothing_else():
    draft, shapes = jetspec.build(HEAD, jnp.float32)
    head = nnx.merge(draft.graphdef, nnx.State(random_params(shapes, 1)))
    anchors = Anchors(jnp.array([[3, 8]]), jnp.ones((1, 2), bool))
    taps = jax.random.normal(jax.random.key(2), (1, 12, 32))
    slots = jax.random.normal(jax.random.key(3), (1, 2, 4, 16))
    to_slots, to_taps = jax.jit(
        jax.jacrev(lambda s, t: forward.hidden(head, s, anchors, t).sum(-1)[0], argnums=(0, 1))
    )(slots, taps)
    reads = np.abs(to_slots[:, :, 0]).sum(-1) > 0  # [A, T, A, T]
    np.testing.assert_array_equal(reads.reshape(8, 8), dense_mask([3, 8], 12, 4)[:, 12:])
    context = np.abs(to_taps[:, :, 0]).sum(-1) > 0
    np.testing.assert_array_equal(context.reshape(8, 12), dense_mask([3, 8], 12, 4)[:, :12])


def test_anchors_lie_on_answer_tokens_with_a_successor():
    drawn = anchor_rules.sample(jax.random.key(0), jnp.array([3, 9, 5]), jnp.array([9, 10, 5]), 8, 12)
    valid = [np.asarray(p)[v] for p, v in zip(drawn.position, np.asarray(drawn.valid), strict=True)]
    assert [v.tolist() for v in valid] == [[3, 4, 5, 6, 7], [], []]
    few = anchor_rules.sample(jax.random.key(1), jnp.array([2]), jnp.array([12]), 3, 12)
    assert few.valid.all() and (np.diff(few.position[0]) > 0).all() and few.position.min() >= 2
    weight = anchor_rules.weights(drawn, jnp.array([9, 10, 5]), 3, 2.0)
    np.testing.assert_allclose(weight[0, 4], [1, 0, 0])
    np.testing.assert_allclose(weight[0, 0], np.exp(-np.arange(3) / 2), rtol=1e-6)
    assert anchor_rules.weights(drawn, jnp.array([9, 10, 5]), 3, 0.0)[0, 0].tolist() == [1, 1, 1]


@pytest.mark.parametrize(("kind", "temperature"), [("forward_kl", 1.0), ("forward_kl", 2.0), ("cross_entropy", 1.0)])
def test_chunked_loss_equals_the_whole(kind, temperature):
    keys = jax.random.split(jax.random.key(4), 4)
    table = jax.random.normal(keys[0], (48, 16))
    rows = losses.Rows(
        jax.random.normal(keys[1], (23, 16)),
        jax.random.normal(keys[2], (23, 16)),
        jnp.arange(23) % 48,
        jax.random.uniform(keys[3], (23,)) * (jnp.arange(23) % 5 > 0),
    )

    def whole(draft):
        q, p = draft @ table.T / temperature, jax.nn.softmax(rows.teacher @ table.T / temperature)
        q = jax.nn.log_softmax(q)
        each = (
            temperature**2 * (p * (jnp.log(p) - q)).sum(-1) if kind == "forward_kl" else -q[jnp.arange(23), rows.label]
        )
        return (each * rows.weight).sum() / rows.weight.sum()

    value, gradient = jax.value_and_grad(whole)(rows.draft)
    got = losses.distill(table, rows, kind, temperature, chunk=8)
    np.testing.assert_allclose(got.value, value, rtol=1e-5)
    np.testing.assert_allclose(got.gradient, gradient, atol=1e-5)
    best = (rows.teacher @ table.T).argmax(-1) if kind == "forward_kl" else rows.label
    np.testing.assert_array_equal(got.hit, (rows.draft @ table.T).argmax(-1) == best)


def test_run_length():
    hit = jnp.array([[[1, 1, 0, 1], [0, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 1]]], bool)
    exists = jnp.array([[[1, 1, 1, 1], [1, 1, 1, 1], [1, 1, 0, 0], [0, 0, 0, 0]]], bool)
    mean, first = losses.run_length(hit, exists)
    assert float(mean) == pytest.approx(1 + (2 + 0 + 2) / 3) and float(first) == pytest.approx(2 / 3)


def test_answers_are_the_targets_and_come_exactly_once(target, answered, tmp_path):
    folder, prompts, args = answered
    known = answer_store.read(folder)
    assert sorted(known.prompt) == [0, 1, 3, 4, 5] and len(list(folder.iterdir())) == 3
    for i, row in zip(known.prompt, known.rows(), strict=True):
        assert row[: len(prompts[i])].tolist() == prompts[i]
        best = target.model.logits(target.params, plain(target, row).hidden)[0].argmax(-1)
        assert best[len(prompts[i]) - 1 : row.size - 1].tolist() == row[len(prompts[i]) :].tolist()

    left = iter([True, True])  # stopped after two batches of three, then called again
    assert not regenerate.regenerate(target, prompts, tmp_path, **args, on_time=lambda: next(left, False))
    assert regenerate.regenerate(target, prompts, tmp_path, **args)
    for a, b in zip(answer_store.read(tmp_path), known, strict=True):
        np.testing.assert_array_equal(a, b)
    with pytest.raises(ConfigError, match="another pool"):
        regenerate.regenerate(target, [[7, 7, 7]], tmp_path, **args)


def test_loops_are_cut_to_two_periods():
    body = np.array([9, 8] + [1, 2, 3] * 12, np.uint16)
    one = lambda x: np.array([x])
    row = answer_store.join([np.concatenate([[7, 7], body])], one(0), one(0), one(2), one(2 + body.size), one(True))
    cut = answer_store.without_loops(row)
    assert cut.tokens.tolist() == [7, 7, 9, 8, 1, 2, 3, 1, 2, 3] and not cut.ended[0]
    assert answer_store.fitting(row, 40, seed=0).length.tolist() == [40]
    assert answer_store.fitting(row, 39, seed=0).length.size == 0
    plain = answer_store.join([np.arange(40)], one(0), one(0), one(2), one(40), one(True))
    assert answer_store.without_loops(plain).length[0] == 40


def test_features_are_the_targets(target, answered):
    known = answer_store.usable(answer_store.read(answered[0]), trim_loops=False)
    store = features.compute(target.model, target.params, HEAD.tap_layers, known, WIDTH, batch=2)
    batch = features.fetch(store, jnp.arange(len(known.length)), WIDTH)
    squares = []
    for i, row in enumerate(known.rows()):
        out = plain(target, row)
        np.testing.assert_allclose(batch.taps[i, : row.size], out.taps[0, : row.size], atol=1e-5)
        np.testing.assert_allclose(batch.final[i, : row.size], out.hidden[0, : row.size], atol=1e-5)
        np.testing.assert_array_equal(batch.tokens[i, : row.size], row)
        squares.append(np.asarray(out.taps[0, : row.size]) ** 2)
    np.testing.assert_allclose(store.scale, np.sqrt(np.concatenate(squares).mean(0)), rtol=1e-4)


def test_overfits_a_few_answers_and_resumes_to_the_same_bits(target, answered, tmp_path):
    known = answer_store.usable(answer_store.read(answered[0]), trim_loops=False)
    store = features.compute(target.model, target.params, HEAD.tap_layers, known, WIDTH, batch=2)
    rows, args = np.arange(4), {"batch": 4, "log_every": 10, "eval_every": 40, "save_every": 1000}
    long = recipe(target, steps=80)
    whole = loop.train(long, target.params, store, rows, rows[:1], tmp_path / "whole", **args)
    first, *_, last = map(json.loads, (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines())
    assert last["loss"] < 0.5 * first["loss"] and last["run_length"] > first["run_length"] + 0.5
    assert last["heldout_run_length"] > 1

    clock = iter([True] * 30)
    stopped = loop.train(
        long, target.params, store, rows, rows[:1], tmp_path / "halves", **args, on_time=lambda: next(clock, False)
    )
    assert int(stopped.step) == 30
    resumed = loop.train(long, target.params, store, rows, rows[:1], tmp_path / "halves", **args)
    jax.tree.map(np.testing.assert_array_equal, resumed, whole)


def test_folding_the_scale_keeps_the_numbers(target):
    params = step.init(recipe(target), target.params).params
    scale = jnp.geomspace(0.5, 400, 32)
    taps = jax.random.normal(jax.random.key(5), (1, 6, 32)) * scale
    graphdef = jetspec.build(HEAD, jnp.float32)[0].graphdef
    context = lambda p, x: nnx.merge(graphdef, nnx.State(p)).context(x)
    folded = step.fold(params, scale, jnp.float32)
    np.testing.assert_allclose(context(folded, taps), context(params, taps / scale), atol=1e-5)


def test_pipeline_leaves_a_head_that_loads(target, tmp_path, monkeypatch):
    """All stages on a random target; the second call finds every stage done."""
    config = options.load(pathlib.Path("configs/demo.py"))
    small = {
        "pool": str(tmp_path / "pool.jsonl"),
        "max_prompt_tokens": 9,
        "max_new_tokens": 15,
        "answer_batch": 2,
        "feature_batch": 2,
        "head_layers": 2,
        "taps": 1,
        "block_size": 4,
        "mask_token_id": 3,
        "steps": 2,
        "batch": 2,
        "anchors": 4,
        "log_every": 1,
        "loss_chunk": 16,
    }
    config.update(small)
    lines = [prompts.message(f"chat_x/{i}", "x" * (i + 2)) for i in range(3)]
    prompts.write(config.pool, [*lines, prompts.message("code_numpy/0", "x" * 40)])
    monkeypatch.setattr(load.LoadedTarget, "encode_messages", lambda self, rows: [5] * len(rows[0]["content"]))
    monkeypatch.setattr(load, "load_target", lambda source, dtype: target)
    config.target = "tiny.gguf"
    log = []
    pipeline.run(config, tmp_path / "run", log.append)
    head = load.load_head(tmp_path / "run" / "head", target)
    assert head.config == dataclasses.replace(pipeline.head_config(config, MODEL), dtype="bfloat16")
    assert head.metadata["target_fingerprint"] == "f00d" and head.metadata["training_length"] == 24
    assert "3 prompts, 3 answers" in (tmp_path / "run" / "head" / "README.md").read_text()

    log.clear()
    pipeline.run(config, tmp_path / "run", log.append)
    assert not any("regenerate" in line or "step 1 " in line for line in log)
    again = load.load_head(tmp_path / "run" / "head", target)
    jax.tree.map(np.testing.assert_array_equal, again.params, head.params)
