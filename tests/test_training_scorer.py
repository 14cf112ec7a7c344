"""A scorer in training: its logits are those that decoding ranks by, a frozen head stays, runs leave one beside it."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from small import HEAD, RUN, WIDTH, batch, example, random_params, recipe, target

from jetspec_jax import speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.drafts import bigram, block, scorer
from jetspec_jax.files import checkpoint, load
from jetspec_jax.loop import tree as trees
from jetspec_jax.training import gather, pipeline, settings, step, teacher
from jetspec_jax.training.data import packing
from jetspec_jax.training.objectives import block as learns

SCALE = jnp.linspace(0.5, 3, 32)
SCORED = dataclasses.replace(HEAD, scorer_rank=5)
SWIGLU = dataclasses.replace(HEAD, scorer_rank=5, scorer_width=6)
PAIRS, MARKOV = (dataclasses.replace(HEAD, scorer_rank=5, scorer_kind=kind) for kind in ("pairs", "markov"))


@functools.lru_cache(None)
def params(head=SCORED):
    shapes = jax.eval_shape(lambda p: learns.init(head, jax.random.key(0), p, {}), target().params)
    return random_params(shapes, 3)


@functools.lru_cache(None)
def part():
    draw = np.random.default_rng(0)
    packed = packing.pack([example(str(n), draw.integers(4, 48, WIDTH), 3) for n in range(2)], WIDTH)
    return jax.tree.map(lambda x: x[0], batch(packed, [0, 1]))


@functools.lru_cache(None)
def found():
    taps = jax.random.normal(jax.random.key(1), (2, WIDTH, 32)) * SCALE
    return teacher.Features(taps, jax.random.normal(jax.random.key(2), (2, WIDTH, 16)))


@pytest.mark.parametrize("head", [SCORED, SWIGLU, PAIRS, MARKOV])
def test_logits_are_those_that_decoding_conditions(head):
    """At every slot, after the text's own token: the row of a table of all tokens, without its normaliser."""
    r, p = recipe(head=head), part()
    place, features = jnp.broadcast_to(jnp.arange(WIDTH), (2, WIDTH)), found()
    asked = learns.ask(r, target().params, p, place, jnp.ones(place.shape, bool))

    @jax.jit
    def trained(params):
        folded = learns.fold(params, SCALE, jnp.float32)
        hidden = learns.hidden(r, folded, p, features, asked)
        return hidden, learns.logits(r, target().params, folded, hidden, asked).whole(48)

    hidden, logits = trained(params(head))
    embed = lambda tokens: target().model.embed(target().params, tokens)
    for at in (4, 11):
        own = hidden[:1, at]
        base = target().model.logits(target().params, own)
        order = jnp.argsort(-base[0], axis=-1)
        row = jnp.take_along_axis(jax.nn.log_softmax(base[0], -1), order, -1)
        candidates = trees.Candidates(order[None], row[None, :, None])
        table = trees.conditioned(candidates, scorer.bias(params(head)["scorer"], own, order[None], embed(order[None])))
        for depth in range(HEAD.depth):
            wanted = np.zeros(48)
            parent = 0 if not depth else int(np.flatnonzero(order[depth - 1] == p.tokens[0, at + depth])[0])
            wanted[np.asarray(order[depth])] = table.logp[0, depth, parent]
            np.testing.assert_allclose(jax.nn.log_softmax(logits[0, at, depth]), wanted, atol=1e-4)


@pytest.mark.parametrize("head", [SCORED, MARKOV])
def test_a_frozen_head_stays_and_its_scorer_learns(head):
    r = recipe(head=head, frozen_head=True, anchors=WIDTH, loss_chunk=64, peak_lr=3e-2, steps=30)
    packed = jax.tree.map(lambda x: x[None], part())._replace(features=jax.tree.map(lambda x: x[None], found()))
    fresh = {k: v for k, v in params().items() if k != "scorer"}
    state = step.init(r, target().params, fresh)
    update = jax.jit(step.update, static_argnums=0)
    losses = []
    for _ in range(25):
        state, metrics = update(r, target().params, SCALE, state, packed)
        losses.append(float(metrics.loss))
    for name, x in fresh.items():
        for a, b in zip(jax.tree.leaves(x), jax.tree.leaves(state.params[name]), strict=True):
            np.testing.assert_array_equal(a, b)
    assert all(x.any() for x in state.params["scorer"].values())
    assert np.isfinite(losses).all() and losses[-1] < 0.9 * losses[0]
    moments = [x for x in jax.tree.leaves(state.optimizer) if x.ndim == 2]
    assert {x.shape for x in moments} == {(16 if head is SCORED else 48, 5)}  # none of the head's


def test_a_new_scorer_adds_nothing_and_can_learn():
    """Its children are zero, of every kind; what meets them is not, or no gradient would leave zero."""
    for head, zeros in ((SCORED, {"child", "gate"}), (SWIGLU, {"child"}), (PAIRS, {"child"}), (MARKOV, {"w2"})):
        start = learns.init(head, jax.random.key(0), target().params, {})["scorer"]
        assert {name for name, x in start.items() if not x.any()} == zeros and len(start) > len(zeros)


COUNTS = {"scorer_kind": "counts", "frozen_head": True, "init_head": "x", "scorer_rank": 4, "steps": 0}


@pytest.mark.parametrize("change, why", [
    ({"scorer_width": 4}, "scorer_width=4: there is no scorer; give scorer_rank"),
    ({"scorer_parents": "others"}, "scorer_parents=others: there is no scorer; give scorer_rank"),
    ({"scorer_kind": "markov"}, "scorer_kind=markov: there is no scorer; give scorer_rank"),
    ({"scorer_rank": 4, "scorer_kind": "swiglu"}, "scorer_kind=swiglu: it has a width; give scorer_width"),
    ({"scorer_rank": 4, "scorer_kind": "pairs", "scorer_width": 3}, "scorer_width=3: a scorer of kind pairs"),
    ({"scorer_rank": 4, "scorer_strength": 0.3}, "scorer_strength=0.3: a scorer of kind product has no use for it"),
    ({"scorer_rank": 4, "scorer_kind": "pair"}, "scorer_kind=pair: choose one of .*did you mean pairs"),
    ({"scorer_rank": 4, "block_size": 2}, "scorer_rank=4: block_size=2 has no pair of slots"),
    ({"scorer_rank": 4, "scorer_parents": "drafted", "cross_entropy": 0.1}, "scorer_parents=drafted: cross_entropy"),
    (COUNTS | {"steps": 2}, "steps=2: a scorer of counts takes no steps; give steps=0 and epochs=0"),
    (COUNTS | {"epochs": 2.0}, "epochs=2.0: a scorer of counts takes no steps"),
    (COUNTS | {"frozen_head": False}, "scorer_kind=counts: .* give frozen_head=true"),
    (COUNTS | {"init_head": ""}, "frozen_head=true: .*give init_head"),
    (COUNTS | {"scorer_parents": "others"}, "scorer_parents=others: a scorer of kind counts has no use for it"),
])  # fmt: skip
def test_a_scorer_that_cannot_be_is_refused(change, why):
    with pytest.raises(ConfigError, match=f"^--config.{why}"):
        learns.configure(settings.make(RUN | {"data": "-"} | change, "c"), target().config)


def test_the_settings_know_the_kinds_that_there_are():
    assert settings.Settings.__dataclass_fields__["scorer_kind"].metadata["choices"] == ("", *scorer.KINDS)


@pytest.mark.parametrize("change, kind", [
    ({}, "product"), ({"scorer_width": 3}, "swiglu"), ({"scorer_kind": "product"}, "product"),
    ({"scorer_kind": "swiglu", "scorer_width": 3}, "swiglu"), ({"scorer_kind": "markov"}, "markov"),
])  # fmt: skip
def test_a_kind_is_told_by_its_name_or_else_by_its_width(change, kind):
    made = learns.configure(settings.make(RUN | {"data": "-", "scorer_rank": 4} | change, "c"), target().config)
    assert made.scorer_kind == made.scorer == kind
    assert dataclasses.replace(made, scorer_kind=change.get("scorer_kind", "")).scorer == kind


def test_a_control_learns_from_the_tokens_of_other_places():
    p, place = part(), jnp.broadcast_to(jnp.arange(WIDTH), (2, WIDTH))
    valid = jnp.ones(place.shape, bool)
    own, other = (
        learns.ask(recipe(head=SCORED, scorer_parents=name), target().params, p, place, valid).inputs.before
        for name in ("text", "others")
    )
    np.testing.assert_array_equal(other, jnp.roll(own, 1, axis=1))
    assert (own != other).any()


def test_a_run_leaves_a_scorer_beside_its_head(finished, loaded, tmp_path):
    """A scorer for a head that is there: files, what is refused, and decoding with and without it."""
    run, given, _ = finished
    bare = run / "head"
    change = {
        "init_head": str(bare),
        "scorer_rank": 5,
        "scorer_width": 6,
        "frozen_head": True,
        "steps": 6,
        "peak_lr": 5e-2,
    }
    shutil.copytree(run / "answers", tmp_path / "more" / "answers")
    quick = {"decode_prompts": "", "eval_every": 6}
    assert pipeline.run(settings.make(given | change | quick, "c"), tmp_path / "more", print)
    folder = tmp_path / "more" / "head"
    made, first = load.load_head(folder, target()), load.load_head(bare, target())
    assert (made.config.scorer_rank, made.config.scorer_width) == (5, 6) and first.config.scorer_rank == 0
    raw = json.loads((folder / "config.json").read_text())
    assert raw == json.loads((bare / "config.json").read_text())  # nothing that another engine would not know
    for name in first.params:
        for a, b in zip(jax.tree.leaves(first.params[name]), jax.tree.leaves(made.params[name]), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-2, atol=1e-3)  # bfloat16, once more through the scale
    prompts, option = [[5, 6, 7], [9] * 9, [8, 2]], SamplingConfig(12, eos=())
    plain = speculate.generate(target(), None, prompts, None, option)
    lengths = []
    for tree in (TreeConfig(8, width=5), TreeConfig(8, width=5, scorer="none")):
        fast = speculate.generate(target(), made, prompts, tree, option)
        assert [r.token_ids for r in fast] == [r.token_ids for r in plain]
        lengths.append([r.accept_lengths for r in fast])
    own = speculate.generate(target(), first, prompts, TreeConfig(8, width=5), option)
    assert lengths[1] == [r.accept_lengths for r in own]

    def begun(**change):
        again = settings.make(given | quick | {"init_head": str(folder), "scorer_rank": 5} | change, "c")
        return pipeline._start(again, target(), learns, learns.configure(again, target().config))

    assert "scorer" not in begun(frozen_head=True, scorer_width=6)  # another run of it is no continuation
    assert "scorer" not in begun(frozen_head=True, scorer_rank=3, scorer_kind="pairs")
    assert "scorer" not in begun(scorer_rank=0)
    assert "scorer" in begun(scorer_width=6)  # head and scorer go on together
    with pytest.raises(ConfigError, match="its scorer_rank is 5, this run's 3"):
        begun(scorer_rank=3, scorer_width=6)

    said = json.loads((folder / "scorer" / "config.json").read_text())
    for key, value, why in (
        ("rank", 4, "child has shape"),
        ("width", 5, "down has shape"),
        ("kind", "product", "missing: gate"),
    ):
        (folder / "scorer" / "config.json").write_text(json.dumps(said | {key: value}))
        with pytest.raises(ConfigError, match=why):
            load.load_head(folder, target())


def test_counts_are_written_beside_a_head_that_stays(finished, loaded, tmp_path):
    """Of the pairs in answers alone, in seconds and without a step; into the run's own head too."""
    run, given, _ = finished
    shutil.copytree(run / "answers", tmp_path / "more" / "answers")
    change = {k: v for k, v in COUNTS.items() if k != "init_head"} | {"init_head": str(run / "head")}
    change |= {"scorer_strength": 0.3, "decode_prompts": "", "features": "memory"}
    made = settings.make(given | change, "c")
    assert pipeline.run(made, tmp_path / "more", print)
    folder = tmp_path / "more" / "head"
    assert sorted(x.name for x in (tmp_path / "more").iterdir() if x.is_dir()) == ["answers", "head"]
    for path in (run / "head").iterdir():
        assert (folder / path.name).read_bytes() == path.read_bytes()  # its card, its window, its weights
    head = load.load_head(folder, target())
    found, said = head.params["scorer"], json.loads((folder / "scorer" / "training.json").read_text())
    assert head.config.scorer_kind == "counts" and said["config"]["scorer_strength"] == 0.3
    np.testing.assert_array_equal(found["strength"], np.full(HEAD.depth, 0.3, np.float32))

    rows = gather.gather(made, tmp_path / "more", target(), gather.source(made, tmp_path / "more", print), bool, print)
    seen = set()
    for row in rows.train:
        learnt = np.flatnonzero(row.learnt[:-1] & row.learnt[1:])
        seen |= set(zip(row.tokens[learnt].tolist(), row.tokens[learnt + 1].tolist(), strict=True))
    above, place = np.nonzero(np.asarray(found["lift"]))
    kept = set(zip(above.tolist(), np.asarray(found["next"])[above, place].tolist(), strict=True))
    assert kept and kept <= seen
    prompts, option = [[5, 6, 7], [9] * 9, [8, 2]], SamplingConfig(12, eos=())
    plain = speculate.generate(target(), None, prompts, None, option)
    fast = speculate.generate(target(), head, prompts, TreeConfig(8, width=5), option)
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]

    again = {"init_head": str(folder), "scorer_strength": 1.0}
    assert pipeline.run(settings.make(given | change | again, "c"), tmp_path / "more", print)  # in its place
    assert load.load_head(folder, target()).params["scorer"]["strength"].max() == 1
    save_file({name: x + 1 for name, x in load_file(folder / checkpoint.SINGLE).items()}, folder / checkpoint.SINGLE)
    with pytest.raises(ConfigError, match="holds another head; use a new --workdir"):
        pipeline.run(made, tmp_path / "more", print)


@pytest.mark.parametrize("change, why", [
    ({"frozen_head": True, "scorer_rank": 4}, "give init_head"),
    ({"frozen_head": True, "init_head": "x"}, "give scorer_rank"),
])  # fmt: skip
def test_a_frozen_head_needs_a_head_and_a_scorer(change, why):
    with pytest.raises(ConfigError, match=why):
        settings.make(RUN | {"data": "-"} | change, "c")


def test_the_gradient_of_a_repeated_token_is_summed_in_f32():
    """Of tables in 16 bits a sum of many small terms would stand still."""
    table, token = jnp.ones((3, 1), jnp.bfloat16), jnp.zeros(1000, int)
    slope = jax.grad(lambda t: bigram.children({"w2": t}, token).astype(jnp.float32).sum())(table)
    assert slope[0, 0] == 1000


def test_published_shapes_have_no_scorer():
    _, shapes = block.build(HEAD, jnp.float32)
    assert "scorer" not in shapes
