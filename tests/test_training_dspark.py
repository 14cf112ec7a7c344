"""DSpark heads in training: loss and gradients against whole logits, the drafter's figures, runs whose head decodes."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_oracle as oracle
from small import (
    DSPARK,
    DSPARK_RUN,
    WIDTH,
    batch,
    dspark_recipe,
    example,
    questions,
    random_params,
    target,
)

from jetspec_jax import speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.drafts import dspark
from jetspec_jax.files import load
from jetspec_jax.loop.choice import choose
from jetspec_jax.loop.contracts import Ends, Seen
from jetspec_jax.loop.processors import Past, Sampling
from jetspec_jax.loop.tree import Frontier, Rule
from jetspec_jax.models import sharding
from jetspec_jax.training import anchors, features, journal, loop, pipeline, settings, step, teacher
from jetspec_jax.training.data import answers as answer_store
from jetspec_jax.training.data import packing
from jetspec_jax.training.data.batches import Batches
from jetspec_jax.training.losses import Mix
from jetspec_jax.training.objectives import dspark as learns

SCALE = jnp.linspace(0.5, 3, 32)
PAPER = Mix(0, 0, 0.1, 1, 0.9)
GAP = 12  # of the long document: not learnt, with learnt tokens around it


@functools.lru_cache(None)
def known():
    """Two documents that fit into one sequence, and one that fills another, with a token in it that is not learnt."""
    draw = np.random.default_rng(0)
    first, second, long = (example(str(n), draw.integers(4, 48, n), at) for n, at in ((13, 4), (8, 3), (24, 2)))
    return first, second, dataclasses.replace(long, learnt=long.learnt & (np.arange(24) != GAP))


@functools.lru_cache(None)
def part(*which):
    """A batch of two sequences."""
    packed = packing.pack([known()[i] for i in which or (0, 1, 2)], WIDTH)
    rows = np.argsort((packed.document == 0).sum(1), kind="stable")  # the one without padding first
    return jax.tree.map(lambda x: x[0], batch(packed, rows))


def head(kind):
    return dataclasses.replace(DSPARK, markov=kind)


@functools.lru_cache(None)
def params(kind="vanilla"):
    shapes = jax.eval_shape(lambda p: learns.init(head(kind), jax.random.key(0), p, {}), target().params)
    return random_params(shapes, 3)


@functools.lru_cache(None)
def found():
    """Features [B, S, F] and final states that may be anything."""
    taps = jax.random.normal(jax.random.key(1), (2, WIDTH, 32)) * SCALE
    return teacher.Features(taps, jax.random.normal(jax.random.key(2), (2, WIDTH, 16)))


@functools.partial(jax.jit, static_argnums=0)
def gradient(r, params, part, found, asked):
    """The package's gradient of the summed loss, and sums."""
    return step._gradient(r, target().params, SCALE, params, part, found, asked)


def everywhere(r, part, valid=None):
    """What is asked at every position, or at these [B, S]."""
    place = jnp.broadcast_to(jnp.arange(WIDTH), (2, WIDTH))
    return learns.ask(r, target().params, part, place, jnp.ones(place.shape, bool) if valid is None else valid)


def close(got, wanted, sharp=2e-5):
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        assert np.abs(y).max() > 1e-3
        np.testing.assert_allclose(x, y, atol=sharp * np.abs(y).max())


@pytest.mark.parametrize(
    "kind, mix, share", [("vanilla", PAPER, 1.0), ("gated", Mix(0.5, 0.2, 0.3, 1.5, 0.9), 0.4)], ids=str
)
def test_loss_and_gradient_are_those_of_whole_logits(kind, mix, share):
    """Every anchor; against jax.grad of blocks that are run alone, for every parameter."""
    r, p = dspark_recipe(head=head(kind), mix=mix, confidence=share, anchors=WIDTH, loss_chunk=64), part()
    asked = learns.draw(r, target().params, p, jax.random.split(jax.random.key(0), 2))
    got, sums = gradient(r, params(kind), p, found(), asked)
    blocks = [
        oracle.block(p, row, anchor, DSPARK.block_size, r.gamma)
        for row in range(2)
        for anchor in oracle.candidates(np.asarray(p.learnt)[row], np.asarray(p.document)[row])
    ]
    whole = lambda params: oracle.dspark_loss(r, target().params, SCALE, params, p, blocks, *found())
    (value, weight), slope = jax.jit(jax.value_and_grad(whole, has_aux=True))(params(kind))
    assert sums.blocks == len(blocks) > 25
    np.testing.assert_allclose((sums.loss, sums.weight), (value, weight), rtol=1e-5)
    assert {"markov", "confidence", "layers", "fc"} < set(got)
    close(got, slope)


def test_a_head_without_the_two_small_ones_is_one_in_which_they_do_nothing():
    bare = dataclasses.replace(DSPARK, markov_rank=0, confidence=False, confidence_markov=False)
    change = {"mix": PAPER, "anchors": WIDTH, "loss_chunk": 64}
    less, more = dspark_recipe(head=bare, **change), dspark_recipe(confidence=0.0, **change)
    still = params() | {"markov": params()["markov"] | {"w2": jnp.zeros((48, 8))}}
    own = {name: x for name, x in params().items() if name not in ("markov", "confidence")}
    asked = everywhere(less, part(), anchors.candidates(part().learnt, part().document))
    got, sums = gradient(less, own, part(), found(), asked)
    wanted, same = gradient(more, still, part(), found(), asked)
    np.testing.assert_allclose(sums, same, rtol=1e-5)
    assert wanted["markov"]["w2"].any() and not jax.tree.reduce(
        lambda a, x: a + np.abs(x).sum(), wanted["confidence"], 0
    )
    close(got, {name: wanted[name] for name in got})
    assert "markov" not in got and less.learns.describe(less)["Markov head"] == "none"


def test_slots_after_a_token_that_is_not_learnt_weigh_nothing():
    """Weights fall off by slot up to there; what the text and the target say after it changes no loss and no slope."""
    r, p = dspark_recipe(mix=PAPER, anchors=WIDTH, loss_chunk=64), part()
    asked = learns.draw(r, target().params, p, jax.random.split(jax.random.key(0), 2))
    row, at = 0, np.asarray(asked.inputs.blocks.anchors.position)
    before = {int(a): np.asarray(asked.weight)[row, i] for i, a in enumerate(at[row]) if 0 < a < GAP - 1}
    assert sorted(before) == list(range(2, GAP - 1))
    for anchor, weight in before.items():
        count = min(GAP - 1 - anchor, DSPARK.block_size)
        np.testing.assert_allclose(weight, np.exp(-np.arange(4) / 4) * (np.arange(4) < count), rtol=1e-6)

    valid = (jnp.arange(WIDTH) < GAP) & (jnp.arange(2)[:, None] == row)
    other = p._replace(tokens=jnp.where(jnp.arange(WIDTH) >= GAP, (p.tokens + 9) % 48, p.tokens))
    final = jnp.where((jnp.arange(WIDTH) >= GAP)[:, None], jnp.nan, found().final)
    once, again = (
        gradient(r, params(), text, found()._replace(final=said), everywhere(r, text, valid & p.learnt))
        for text, said in ((p, found().final), (other, final))
    )
    assert once[1].weight == 30  # six anchors with four slots, and three, two, one
    jax.tree.map(np.testing.assert_array_equal, once, again)


def test_a_packed_document_is_as_if_alone():
    """Its neighbour, and padding, may be NaN."""
    r, packed, alone = dspark_recipe(mix=PAPER, anchors=WIDTH, loss_chunk=64), part(), part(1, 2)
    where = packed.document[1] == 2
    size, first = int(where.sum()), int(where.argmax())
    assert (size, first) == (8, 13)
    one = jnp.arange(2)[:, None] == 1
    both = jax.tree.map(lambda x: jnp.where((one & where)[..., None], x, jnp.nan), found())
    own = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan).at[1, :size].set(x[1, first : first + size]), found())
    valid = jnp.where(one, where, False), jnp.where(one, jnp.arange(WIDTH) < size, False)
    found_in = gradient(r, params(), packed, both, everywhere(r, packed, valid[0] & packed.learnt))
    found_alone = gradient(r, params(), alone, own, everywhere(r, alone, valid[1] & alone.learnt))
    assert found_alone[1].weight == 10  # anchors with four, three, two slots and one
    close(found_in[0], found_alone[0])
    np.testing.assert_allclose(found_in[1], found_alone[1], rtol=1e-5)


@pytest.mark.parametrize("kind", [pytest.param("vanilla", marks=pytest.mark.slow), "gated"])
def test_a_slot_is_what_the_drafter_computes_along_the_true_path(kind, monkeypatch):
    """Hidden states, confidence, and the distribution over all tokens at every depth of the text's own path."""
    r, p, c = dspark_recipe(head=head(kind)), part(), head(kind)
    folded, model = learns.fold(params(kind), SCALE, jnp.float32), target().model
    asked, features = everywhere(r, p), found()

    @jax.jit
    def trained(folded):
        hidden = learns.hidden(r, folded, p, features, asked)
        logits = learns.logits(r, target().params, folded, hidden, asked).whole(c.vocab_size)
        return hidden, logits, learns.confidence(r, folded, hidden, asked)

    hidden, logits, trust = trained(folded)
    draft, _ = dspark.build(c, jnp.float32)
    draft = draft.shaped(Rule(64, width=c.vocab_size), c.depth)
    tokens, drafted = p.tokens[:1], []  # one document, not padded
    ends = Ends(lambda t: model.embed(target().params, t), lambda h: model.logits(target().params, h))

    def along(children, carry, anchor, nodes, depth, frontier):
        for level in range(depth):
            token = anchor[:, None] if not level else tokens[:, length + level - 1][:, None]
            ids, logp, carry = children(level, Frontier(token, jnp.zeros_like(token)), carry)
            drafted.append((ids[0, 0], logp[0, 0]))
        raise AllDrafted

    class AllDrafted(Exception):
        """Says that no tree is wanted."""

    monkeypatch.setattr(dspark.trees, "levels", along)
    for length in (5, 14):  # the anchor is the token before
        seen = Seen(found().taps[:1], jnp.zeros(1, jnp.int32), jnp.array([length - 1]), tokens, False)
        state = draft.extend(folded, draft.init(folded, 1, 32), seen, ends)
        count = jnp.array([length])
        choice = choose(
            Sampling(None, jnp.zeros(1, jnp.uint32)), Past(tokens, count, count, jnp.full((1, 1), -1)), count < 0,
            draft.depth, 48,
        )  # fmt: skip
        own, _ = draft.hidden(folded, state, choice.anchor, count, ends)
        np.testing.assert_allclose(hidden[0, length - 1], own[0], atol=2e-5)
        path = tokens[:, length - 1 : length - 1 + c.depth]
        np.testing.assert_allclose(trust[0, length - 1], draft.confidence(folded, own, path)[0], atol=1e-4)
        drafted.clear()
        with pytest.raises(AllDrafted):
            draft.propose(folded, state, choice, jnp.array([64]), ends)
        assert len(drafted) == c.depth
        for level, (ids, logp) in enumerate(drafted):
            assert sorted(ids.tolist()) == list(range(c.vocab_size))
            np.testing.assert_allclose(logp, jax.nn.log_softmax(logits[0, length - 1, level])[ids], atol=1e-4)


def test_first_parameters_and_their_coordinates():
    got = learns.init(head("gated"), jax.random.key(0), target().params, {})
    np.testing.assert_allclose(got["norm"], 0.3 * target().params["norm"], rtol=1e-6)
    assert not got["markov"]["gate_bias"].any() and not got["confidence"]["bias"].any()
    assert 0.01 < got["markov"]["w1"].std() < 0.03 and got["layers"][0]["q_norm"].all()
    again = learns.unfold(learns.fold(got, SCALE, jnp.float32), SCALE)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), again, got)
    bare = dataclasses.replace(DSPARK, markov_rank=0, confidence=False, confidence_markov=False)
    assert not {"markov", "confidence"} & learns.init(bare, jax.random.key(0), target().params, {}).keys()


@pytest.mark.slow
def test_a_run_leaves_a_head_that_decodes_as_plainly(loaded, tmp_path):
    """All stages; the folder is in the published format; the chain and the tree of the head change no token."""
    given = DSPARK_RUN | {"data": str(questions(tmp_path)), "eval_every": 2}
    assert pipeline.run(settings.make(given, "c"), tmp_path / "run", print)
    made = load.load_head(tmp_path / "run" / "head", target())
    assert made.family == made.metadata["family"] == "dspark"
    assert (made.config.markov_rank, made.config.confidence_markov, made.config.depth) == (6, True, 4)
    raw = json.loads((tmp_path / "run" / "head" / "config.json").read_text())
    assert raw["architectures"] == ["Qwen3DSparkModel"] and raw["num_anchors"] == 4
    prompts, option = [[5, 6, 7], [9] * 9, [8, 2]], SamplingConfig(12, eos=())
    plain = speculate.generate(target(), None, prompts, None, option)
    for tree in (TreeConfig(5, width=1), TreeConfig(8)):
        fast = speculate.generate(target(), made, prompts, tree, option)
        assert [r.token_ids for r in fast] == [r.token_ids for r in plain]
    card = (tmp_path / "run" / "head" / "README.md").read_text()
    for said in ("Markov head | vanilla, rank 6", "share of 1 beside", "0.1 cross_entropy + 0.9 total_variation"):
        assert said in card
    held = journal.read(tmp_path / "run" / "train")[-1]["heldout"]
    assert held["anchors"] > 0 and len(held["agreement"]) == made.config.depth
    change = {"init_head": str(tmp_path / "run" / "head"), "markov_rank": 5, "features": "online"}
    with pytest.raises(ConfigError, match="its markov_rank is 6, this run's 5; make them equal"):
        pipeline.run(settings.make(given | change, "c"), tmp_path / "other", print)


@pytest.mark.slow
def test_overfit_is_accepted_far_more_often(answered, tmp_path):
    """Four answers learnt by heart; before, the head guesses. Its confidence then expects what is accepted."""
    stored = answer_store.learnable(answer_store.read(answered[0]), [f"p/{i}" for i in range(5)], False)[0]
    four = sorted(stored, key=lambda e: -e.tokens.size)[:4]
    some = packing.pack(four, WIDTH)
    scale = features.scale(target(), some, DSPARK.tap_layers, 8, 4, "xla")
    change = {"mix": PAPER, "anchors": WIDTH, "loss_chunk": 512, "warmup": 0.1, "peak_lr": 2e-2}
    r = dspark_recipe(steps=300, **change)
    plan = loop.Plan(50, 300, 1000, some, budgets=(2, 4, 8), width=4)
    given = loop.Given(target(), scale, Batches(some, min(4, len(some.tokens)), 1, 0))
    outcome = loop.train(r, given, tmp_path, plan, sharding.make_mesh(1, jax.devices()[:1]))
    last = journal.read(tmp_path)[-1]

    draft, _ = dspark.build(DSPARK, jnp.float32)
    prompts = [[int(t) for t in e.tokens[~e.learnt]] for e in four]
    limits = [SamplingConfig(int(e.learnt.sum()), eos=()) for e in four]

    def decoded(params, budget, width):
        folded = learns.fold(params, scale, "float32")
        own = dataclasses.replace(
            load.LoadedHead(draft, folded, DSPARK, "h", {}, 0.0, target().fingerprint), family="dspark"
        )
        answers = speculate.generate(target(), own, prompts, TreeConfig(budget, width=width), limits)
        assert [x.token_ids for x in answers] == [e.tokens[e.learnt].tolist() for e in four]
        return np.mean([n for x in answers for n in x.emitted])

    before = decoded(learns.init(DSPARK, jax.random.key(0), target().params, {}), 5, 1)
    chain = decoded(outcome.state.params, 5, 1)
    assert chain > 2.5 and chain > 1.8 * before
    assert abs(chain - last["heldout"]["acceptance"]["8"]) < 0.5
    assert decoded(outcome.state.params, 64, 4) >= chain  # siblings too

    sequences = jax.tree.map(lambda x: x[0], batch(some, range(len(some.tokens))))
    states = teacher.run(
        target().model, target().params, sequences.tokens, sequences.document, sequences.position, DSPARK.tap_layers,
        "xla",
    )  # fmt: skip
    place = jnp.broadcast_to(jnp.arange(WIDTH), sequences.tokens.shape)
    asked = learns.ask(r, target().params, sequences, place, anchors.candidates(sequences.learnt, sequences.document))
    folded = learns.fold(outcome.state.params, scale, jnp.float32)
    hidden = learns.hidden(r, folded, sequences, states, asked)
    drafted = learns.logits(r, target().params, folded, hidden, asked).whole(48)
    wanted = target().model.logits(target().params, states.final)
    index = asked.label.reshape(len(wanted), -1, 1) - 1
    wanted = jnp.take_along_axis(wanted, index, 1).reshape(drafted.shape)
    same = jnp.minimum(jax.nn.softmax(wanted), jax.nn.softmax(drafted)).sum(-1)
    trust = jax.nn.sigmoid(learns.confidence(r, folded, hidden, asked))
    used = np.asarray(asked.weight) > 0
    assert np.abs(trust - same)[used].mean() < 0.05
