"""Drafted parents in training: what the head itself draws, and what the target says after it."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import HEAD, WIDTH, batch, example, random_params, recipe, target

from jetspec_jax.training import siblings, step, teacher
from jetspec_jax.training.data import packing
from jetspec_jax.training.objectives import block as learns

SCORED = dataclasses.replace(HEAD, scorer_rank=5, scorer_width=6)
SCALE = jnp.linspace(0.5, 3, 32)


@functools.lru_cache(None)
def part():
    """Two documents in a row, and a padded one."""
    draw = np.random.default_rng(0)
    examples = [example(str(n), draw.integers(4, 48, size), 2) for n, size in enumerate((10, 13, 20))]
    return jax.tree.map(lambda x: x[0], batch(packing.pack(examples, WIDTH), [0, 1]))


def run(tokens, document, position):
    return teacher.run(target().model, target().params, tokens, document, position, HEAD.tap_layers)


def after(others):
    p = part()
    return teacher.after(target().model, target().params, p.tokens, others, p.document, p.position)


def alone(sequence, at, token):
    """The target's final state of `token` in the place of the text's at `at`, without all that follows."""
    p, row = part(), slice(sequence, sequence + 1)
    changed = p.tokens.at[sequence, at].set(token)
    return run(changed[row, : at + 1], p.document[row, : at + 1], p.position[row, : at + 1]).final[0, at]


def test_states_after_other_tokens_are_those_of_a_text_that_holds_them():
    p = part()
    others = jnp.asarray(np.random.default_rng(1).integers(4, 48, p.tokens.shape))
    found = after(others)
    for sequence, at in np.argwhere(np.asarray(p.document) > 0)[::3]:
        np.testing.assert_allclose(found[sequence, at], alone(sequence, at, others[sequence, at]), atol=2e-5)
    own = np.asarray(p.document)[..., None] > 0
    np.testing.assert_allclose(np.where(own, after(p.tokens), 0), np.where(own, run(*p[:3]).final, 0), atol=2e-5)


@functools.lru_cache(None)
def asked(sharp: float = 1.0, seed: int = 0):
    """The head's parameters, what is asked at all places, and with what the head draws; sharp: times its logits."""
    r, p = recipe(head=SCORED, anchors=WIDTH, scorer_parents="drafted"), part()
    params = random_params(jax.eval_shape(lambda t: learns.init(SCORED, jax.random.key(0), t, {}), target().params), 3)
    params |= {"norm": params["norm"] * sharp}
    features = run(*p[:3])
    keys = jax.random.split(jax.random.key(seed), 2)
    first = learns.draw(r, target().params, p, keys)
    both, then = jax.jit(siblings.drafted, static_argnums=0)(
        r, target().params, SCALE, params, p, features, first, keys
    )
    return r, params, features, first, both, then


def changed(first, then):
    return np.argwhere(np.asarray(then.taught != first.label - 1))


@pytest.mark.parametrize("seed", [0, 1])
def test_a_drafted_parent_is_taught_by_what_the_target_says_after_it(seed):
    _, _, features, first, both, then = asked(seed=seed)
    p, places = part(), set()
    slots = changed(first, then)
    assert len(slots) > 10
    np.testing.assert_array_equal(then.label, first.label)
    np.testing.assert_array_equal(then.weight, first.weight)
    np.testing.assert_array_equal(both.final[:, :WIDTH], features.final)
    for sequence, block, slot in slots:
        assert slot > 0 and first.weight[sequence, block, slot] > 0  # the root's token is the anchor
        at = int(first.label[sequence, block, slot - 1])
        token = int(then.inputs.before[sequence, block, slot])
        assert token != p.tokens[sequence, at] and (sequence, at) not in places  # one a place
        places.add((sequence, at))
        row = both.final[sequence, then.taught[sequence, block, slot]]
        np.testing.assert_allclose(row, alone(sequence, at, token), atol=2e-5)
    same = np.asarray(then.taught == first.label - 1)
    assert (np.asarray(then.inputs.before == first.inputs.before) >= same).all()


def test_what_is_drawn_is_what_the_slot_above_drafts():
    """Of logits a thousand times as far apart only the best is ever drawn, the scorer's share among them."""
    r, params, features, first, _, then = asked(sharp=1e3)
    folded = learns.fold(params, SCALE, jnp.float32)
    hidden = learns.hidden(r, folded, part(), features, first)
    best = learns.logits(r, target().params, folded, hidden, first).whole(48).argmax(-1)
    bare = hidden @ teacher.unembedding(target().params).T
    assert (best != bare.argmax(-1)).any()
    slots = changed(first, then)
    assert len(slots) > 10
    for sequence, block, slot in slots:
        assert then.inputs.before[sequence, block, slot] == best[sequence, block, slot - 1]


def test_draws_differ_with_the_key_and_reach_most_places():
    found = [asked(seed=seed) for seed in (0, 1)]
    tokens = [np.asarray(then.inputs.before) for *_, then in found]
    assert (tokens[0] != tokens[1]).any()
    *_, first, _, then = found[0]
    possible = {(s, int(first.label[s, b, k - 1])) for s, b, k in np.argwhere(np.asarray(first.weight) > 0) if k}
    assert len(changed(first, then)) > 0.8 * len(possible)  # a random head seldom draws the text's own


def test_a_step_learns_from_them():
    drafted = {"scorer_parents": "drafted", "frozen_head": True}
    r, p = recipe(head=SCORED, anchors=WIDTH, steps=30, peak_lr=3e-2, **drafted), part()
    packed = jax.tree.map(lambda x: x[None], p)
    fresh = {k: v for k, v in asked()[1].items() if k != "scorer"}
    state, losses = step.init(r, target().params, fresh), []
    update = jax.jit(step.update, static_argnums=0)
    for _ in range(25):
        state, metrics = update(r, target().params, SCALE, state, packed)
        losses.append(float(metrics.loss))
    assert np.isfinite(losses).all() and np.mean(losses[-5:]) < 0.9 * np.mean(losses[:5])
    text = dataclasses.replace(r, scorer_parents="text")
    _, other = jax.jit(step.update, static_argnums=0)(text, target().params, SCALE, state, packed)
    assert abs(float(other.loss) - losses[-1]) > 1e-3  # others are asked
