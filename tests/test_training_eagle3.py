"""EAGLE-3 heads in training: each step equals a path run alone, and the drafter; losses; runs whose head decodes."""

import dataclasses
import functools
import json
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_oracle as oracle
from small import (
    EAGLE,
    EAGLE_RUN,
    WIDTH,
    batch,
    eagle_recipe,
    example,
    questions,
    random_examples,
    random_params,
    target,
)

from jetspec_jax import speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.drafts import eagle3
from jetspec_jax.files import load
from jetspec_jax.loop.choice import choose
from jetspec_jax.loop.contracts import Ends, Seen
from jetspec_jax.loop.processors import Past, Sampling
from jetspec_jax.loop.tree import Frontier, Rule
from jetspec_jax.models import sharding
from jetspec_jax.training import features, journal, loop, pipeline, settings, step, teacher
from jetspec_jax.training.data import answers as answer_store
from jetspec_jax.training.data import packing
from jetspec_jax.training.data.batches import Batches
from jetspec_jax.training.losses import Mix
from jetspec_jax.training.objectives import eagle3 as learns

SCALE = jnp.linspace(0.5, 3, 32)


@functools.lru_cache(None)
def packed():
    """Two sequences: two documents and padding, and one document that is learnt from its first token on."""
    draw = np.random.default_rng(0)
    known = [example(str(n), draw.integers(4, 48, n), start) for n, start in ((13, 4), (8, 3), (24, 0))]
    found = packing.pack(known, WIDTH)
    assert sorted(found.document.max(1).tolist()) == [1, 2]
    return found


@functools.lru_cache(None)
def params(seed=3):
    """Random ones, with the table of tokens that the data gives."""
    decided = learns.decide(EAGLE, packed())
    shapes = jax.eval_shape(lambda p: learns.init(EAGLE, jax.random.key(0), p, decided), target().params)
    drawn = random_params({k: v for k, v in shapes.items() if k != "d2t"}, seed)
    return drawn | {"d2t": jnp.asarray(decided["d2t"])}


@functools.lru_cache(None)
def taps():
    """Features [B, S, F] that may be anything."""
    return jax.random.normal(jax.random.key(1), (2, WIDTH, 32)) * SCALE


def part():
    return jax.tree.map(lambda x: x[0], batch(packed(), [0, 1]))


def everywhere(r):
    """What is asked at every position."""
    place = jnp.broadcast_to(jnp.arange(WIDTH), (2, WIDTH))
    return learns.ask(r, target().params, part(), place, jnp.ones(place.shape, bool))


@functools.lru_cache(None)
def drafted(remat=False):
    """Hidden states [B, S, D, E] of steps from every position."""
    r = eagle_recipe(remat=remat)
    folded = learns.fold(params(), SCALE, jnp.float32)
    found = teacher.Features(taps(), None)
    run = jax.jit(lambda folded, found: learns.hidden(r, folded, part(), found, everywhere(r)))
    return run(folded, found)


def test_every_row_and_step_equals_its_own_path():
    """Also from a document's second token on, where nothing of the one before is seen; padding may be NaN."""
    asked, folded = everywhere(eagle_recipe()), learns.fold(params(), SCALE, jnp.float32)
    embedding, p = target().params["embedding"], part()
    one = jax.jit(lambda *given: oracle.eagle3_states(EAGLE, folded, embedding, *given, EAGLE.depth))
    compared = 0
    for row in range(2):
        document = np.asarray(p.document)[row]
        for anchor in range(WIDTH):
            count = int((np.asarray(asked.weight)[row, anchor] > 0).sum())
            learnt = np.asarray(p.learnt)[row, anchor + 1 : anchor + 1 + EAGLE.depth]
            same = document[anchor + 1 : anchor + 1 + EAGLE.depth] == document[anchor]
            first = p.position[row, anchor] == 0
            assert count == (0 if first else int(np.cumprod(learnt & same).sum()))
            if not count:
                continue
            sees = (np.arange(WIDTH) < anchor) & (document == document[anchor])
            wanted = one(p.tokens[row], taps()[row], sees, p.position[row], anchor)
            np.testing.assert_allclose(drafted()[row, anchor, :count], wanted[:count], atol=2e-5)
            compared += count
    assert compared > 60
    np.testing.assert_allclose(drafted(True), drafted(), atol=1e-6)


def test_what_is_not_seen_may_be_nan():
    """Padding, a document's last row and its neighbour's do not reach a step, nor its gradient."""
    r, p = eagle_recipe(), part()
    row = int(np.argmax(np.asarray(p.document).max(1)))
    asked = everywhere(r)
    second = (p.document == 2) & (jnp.arange(2)[:, None] == row)
    odd = jnp.where(second[..., None], taps(), jnp.nan)
    after = jnp.where(jnp.roll(second, -1, 1)[..., None], asked.inputs.after, jnp.nan)
    alone = asked._replace(
        inputs=asked.inputs._replace(after=after), weight=jnp.where(second[..., None], asked.weight, 0)
    )
    anchors = alone.inputs.anchors
    alone = alone._replace(inputs=alone.inputs._replace(anchors=anchors._replace(valid=anchors.valid & second)))

    @jax.jit
    def run(folded):
        found = learns.hidden(r, folded, p, teacher.Features(odd, None), alone)
        return jnp.where(alone.weight[..., None] > 0, found, 0).sum(), found

    slope, found = jax.grad(run, has_aux=True)(learns.fold(params(), SCALE, jnp.float32) | {"d2t": jnp.zeros(32)})
    used = np.asarray(alone.weight) > 0
    assert used.sum() > 5
    np.testing.assert_allclose(found[used], drafted()[used], atol=1e-5)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(slope))


def test_a_step_is_what_the_drafter_computes_along_the_true_path(monkeypatch):
    """Training and decoding: the same distribution over all drafted tokens at every depth of the text's own path."""
    draft, _ = eagle3.build(EAGLE, jnp.float32)
    draft = draft.shaped(Rule(64, width=EAGLE.draft_vocab_size), EAGLE.depth)
    folded, model = learns.fold(params(), SCALE, jnp.float32), target().model
    row = int(np.argmin(np.asarray(part().document).max(1)))  # one document, not padded
    tokens, found = part().tokens[row : row + 1], []
    ends = Ends(lambda t: model.embed(target().params, t), None)

    def along(children, carry, anchor, nodes, depth, frontier):
        for level in range(depth):
            token = anchor[:, None] if not level else tokens[:, length + level - 1][:, None]
            ids, logp, carry = children(level, Frontier(token, jnp.zeros_like(token)), carry)
            found.append((ids[0, 0], logp[0, 0]))
        raise AllDrafted

    class AllDrafted(Exception):
        """Says that no tree is wanted."""

    monkeypatch.setattr(eagle3.trees, "levels", along)
    for length in (5, 14):  # the anchor is the token before
        seen = Seen(taps()[row : row + 1], jnp.zeros(1, jnp.int32), jnp.array([length - 1]), tokens, False)
        state = draft.extend(folded, draft.init(folded, 1, 32), seen, ends)
        count = jnp.array([length])
        past = Past(tokens, count, count, jnp.full((1, 1), -1))
        choice = choose(Sampling(None, jnp.zeros(1, jnp.uint32)), past, count < 0, draft.depth, 48)
        with pytest.raises(AllDrafted):
            draft.propose(folded, state, choice, jnp.array([64]), ends)
        drafter, found = found, []
        for level, (ids, logp) in enumerate(drafter):
            own = jax.nn.log_softmax(folded["lm_head"] @ drafted()[row, length - 1, level])
            np.testing.assert_allclose(logp, own[jnp.searchsorted(learns.tokens(EAGLE, folded), ids)], atol=1e-4)
            assert sorted(ids.tolist()) == learns.tokens(EAGLE, folded).tolist()
        assert len(drafter) == EAGLE.depth


@pytest.mark.parametrize("mix", [pytest.param(Mix(), marks=pytest.mark.slow), Mix(0.5, 0.2, 0.3, 1.5, 0.9)], ids=str)
def test_the_gradient_is_that_of_whole_logits(mix):
    """Every anchor; against jax.grad of paths that are run alone. Ids have no gradient."""
    r, p = eagle_recipe(mix=mix, anchors=WIDTH, loss_chunk=64), part()
    found = teacher.Features(taps(), jax.random.normal(jax.random.key(2), (2, WIDTH, 16)))
    keys = jax.random.split(jax.random.key(0), 2)

    @jax.jit
    def run(params):
        asked = learns.draw(r, target().params, p, keys)
        return step._gradient(r, target().params, SCALE, params, p, found, asked)

    got, sums = run(params())
    blocks = [
        oracle.block(p, row, anchor, r.unroll, 0.0)
        for row in range(2)
        for anchor in oracle.candidates(np.asarray(p.learnt)[row], np.asarray(p.document)[row])
        if p.position[row, anchor] > 0
    ]
    fixed = {"d2t": params()["d2t"]}
    whole = lambda trained: oracle.eagle3_loss(
        r, target().params, SCALE, trained | fixed, p, blocks, found.taps, found.final
    )
    trained = {k: v for k, v in params().items() if k != "d2t"}
    (value, weight), slope = jax.jit(jax.value_and_grad(whole, has_aux=True))(trained)
    assert sums.blocks == len(blocks)
    np.testing.assert_allclose((sums.loss, sums.weight), (value, weight), rtol=1e-5)
    assert got.pop("d2t") is None
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(slope), strict=True):
        np.testing.assert_allclose(x, y, atol=2e-5 * np.abs(y).max())


def test_the_drafted_tokens_are_the_most_frequent_that_are_learnt():
    known = [example("a", [9, 9, 9, 9, 7, 7, 30, 5], 3), example("b", [9, 9, 40, 40, 7, 30, 30], 2)]
    some = packing.pack(known, 8)
    ids = lambda count: learns.tokens(c := dataclasses.replace(EAGLE, draft_vocab_size=count), learns.decide(c, some))
    assert ids(1).tolist() == [7] and ids(3).tolist() == [7, 30, 40]  # 7 and 30 thrice, 40 twice, 5 and 9 once
    assert ids(4).tolist() == [5, 7, 30, 40] and ids(6).tolist() == [0, 5, 7, 9, 30, 40]
    whole = dataclasses.replace(EAGLE, draft_vocab_size=48)
    assert learns.decide(whole, some) == {} and learns.tokens(whole, {}) is None
    got = learns.init(EAGLE, jax.random.key(0), target().params, decided := learns.decide(EAGLE, some))
    np.testing.assert_array_equal(got["lm_head"], target().params["embedding"][learns.tokens(EAGLE, decided)])
    np.testing.assert_array_equal(got["d2t"], decided["d2t"])
    again = learns.unfold(learns.fold(got, SCALE, jnp.float32), SCALE)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), again, got)


def trained(folder, packed, steps, plan=None, on_time=lambda: True, scale=SCALE, size=4, **change):
    r = eagle_recipe(steps=steps, **change)
    data = Batches(packed, min(size, len(packed.tokens)), 1, 0)
    given = loop.Given(target(), scale, data, decided=learns.decide(EAGLE, packed))
    mesh = sharding.make_mesh(1, jax.devices()[:1])
    return loop.train(r, given, folder, plan or loop.Plan(5, 1000, 1000), mesh, on_time)


def test_two_steps_and_two_are_four_and_the_ids_stay(tmp_path):
    some = packing.pack(random_examples(30), WIDTH)
    whole = trained(tmp_path / "whole", some, 4)
    clock = iter([True] * 2)
    assert int(trained(tmp_path / "halves", some, 4, on_time=lambda: next(clock, False)).state.step) == 2
    resumed = trained(tmp_path / "halves", some, 4)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    ids = learns.decide(EAGLE, some)["d2t"]
    np.testing.assert_array_equal(whole.state.params["d2t"], ids)
    shapes = [x.shape for x in jax.tree.leaves(whole.state.optimizer) if x.ndim]
    assert len(shapes) == 2 * (len(jax.tree.leaves(whole.state.params)) - 1) and (32,) not in shapes


@pytest.mark.slow  # as that of blocks with a scorer, in the default run
def test_a_run_leaves_a_head_that_decodes_as_plainly(loaded, tmp_path, monkeypatch):
    """All stages; the folder is in the published format, and remembers which tokens the data gave."""
    given = EAGLE_RUN | {"data": str(questions(tmp_path)), "eval_every": 2}
    assert pipeline.run(settings.make(given, "c"), tmp_path / "run", print)
    head = load.load_head(tmp_path / "run" / "head", target())
    assert head.family == head.metadata["family"] == "eagle3" and head.config.draft_vocab_size == 32
    prompts, option = [[5, 6, 7], [9] * 9, [8, 2]], SamplingConfig(12, eos=())
    fast = speculate.generate(target(), head, prompts, TreeConfig(8), option)
    plain = speculate.generate(target(), None, prompts, None, option)
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]
    card = (tmp_path / "run" / "head" / "README.md").read_text()
    assert "the 32 most frequent in training of 48" in card and "A 1-layer eagle3 head" in card
    held = journal.read(tmp_path / "run" / "train")[-1]["heldout"]
    assert held["anchors"] > 0 and len(held["agreement"]) == head.config.depth

    # What the data decides is part of the recipe: another one is refused. A head goes on with its own tokens.
    path = tmp_path / "run" / "train" / "settings.json"
    signed = json.loads(path.read_text())
    ids, stored = head.params["d2t"], answer_store.read(tmp_path / "run" / "answers")
    learnt = {int(t) for e in answer_store.learnable(stored, [""] * 12, False)[0] for t in e.tokens[e.learnt]}
    assert len(learnt & set(learns.tokens(head.config, {"d2t": ids}).tolist())) > 20
    with pytest.raises(ConfigError, match=r"draft_vocab=31: .* was made with 32"):
        pipeline.run(settings.make(given | {"draft_vocab": 31}, "c"), tmp_path / "run", print)
    path.write_text(json.dumps(signed | {"d2t_digest": "0"}))
    with pytest.raises(ConfigError, match=r"d2t_digest=.* was made with 0"):
        pipeline.run(settings.make(given, "c"), tmp_path / "run", print)
    change = {"init_head": str(tmp_path / "run" / "head"), "features": "online", "steps": 1}
    begun = []
    nothing = types.SimpleNamespace(state=types.SimpleNamespace(step=0), best=None, notes={})
    monkeypatch.setattr(loop, "train", lambda recipe, given, *rest: begun.append(given) or nothing)
    other = tmp_path / "other.jsonl"
    other.write_text('{"id": "1", "prompt": "zy"}\n{"id": "2", "prompt": "x"}\n')
    change |= {"data": str(other), "heldout": 0}
    assert not pipeline.run(settings.make(given | change, "c"), tmp_path / "next", print)
    assert (learns.decide(head.config, begun[0].data._packed)["d2t"] != ids).any()
    for going_on in (begun[0].start, begun[0].decided):
        np.testing.assert_array_equal(going_on["d2t"], ids)
    with pytest.raises(ConfigError, match="its draft_vocab_size is 32, this run's 30; make them equal"):
        pipeline.run(settings.make(given | change | {"draft_vocab": 30}, "c"), tmp_path / "other", print)


@pytest.mark.slow
def test_overfit_is_accepted_far_more_often(answered, tmp_path):
    """Four answers learnt by heart; before, the head guesses. The chain of the evaluation is the chain of decoding."""
    known = answer_store.learnable(answer_store.read(answered[0]), [f"p/{i}" for i in range(5)], False)[0]
    four = sorted(known, key=lambda e: -e.tokens.size)[:4]
    some = packing.pack(four, WIDTH)
    scale = features.scale(target(), some, EAGLE.tap_layers, 8, 4, "xla")
    change = {"mix": Mix(0, 0, 1), "anchors": WIDTH, "loss_chunk": 512, "warmup": 0.1, "peak_lr": 2e-2}
    plan = loop.Plan(50, 200, 1000, some, budgets=(2, 4, 8), width=4)
    outcome = trained(tmp_path, some, 200, plan, scale=scale, **change)
    last = journal.read(tmp_path)[-1]
    assert last["loss"] < 0.1

    draft, _ = eagle3.build(EAGLE, jnp.float32)
    prompts = [[int(t) for t in e.tokens[~e.learnt]] for e in four]
    limits = [SamplingConfig(int(e.learnt.sum()), eos=()) for e in four]

    def decoded(params, budget, width):
        folded = learns.fold(params, scale, "float32")
        head = dataclasses.replace(
            load.LoadedHead(draft, folded, EAGLE, "h", {}, 0.0, target().fingerprint), family="eagle3"
        )
        found = speculate.generate(target(), head, prompts, TreeConfig(budget, width=width), limits)
        assert [r.token_ids for r in found] == [e.tokens[e.learnt].tolist() for e in four]
        return np.mean([n for r in found for n in r.emitted])

    random = learns.init(EAGLE, jax.random.key(0), target().params, learns.decide(EAGLE, some))
    before, after = (decoded(p, 8, 4) for p in (random, outcome.state.params))
    assert after > 2.5 and after > 1.8 * before
    chain = decoded(outcome.state.params, EAGLE.depth + 1, 1)
    assert abs(chain - last["heldout"]["acceptance"]["4"]) < 0.5
    assert last["heldout"]["acceptance"]["4"] == last["heldout"]["acceptance"]["8"] > last["heldout"]["acceptance"]["2"]
