"""The choice rule: its noise, its thresholds, and the law of what plain and tree decoding emit."""

import functools

import jax
import jax.numpy as jnp
import laws
import numpy as np
import pytest
import tiny
from scipy import stats

from jetspec_jax.config import ConfigError, SamplingConfig
from jetspec_jax.layers import vocabulary
from jetspec_jax.loop import choice
from jetspec_jax.loop.decoder import Decoder
from jetspec_jax.loop.processors import Past, Sampling


@functools.partial(jax.jit, static_argnums=5)
def choose_rows(logits, offsets, first, temperature, seed, span):
    past = Past(jnp.zeros((first.size, 1), jnp.int32), first, first, jnp.full((first.size, 1), -1))
    asked = Sampling(temperature, seed)
    made = choice.choose(asked, past, jnp.zeros(first.size, bool), span - 1, logits.shape[-1])
    return made._pick(logits, offsets)


def choose(logits, offsets, first, temperature, seed, span):
    row = lambda values, dtype: jnp.asarray(values, dtype)
    return choose_rows(
        row(logits, jnp.float32), row(offsets, jnp.int32), row(first, jnp.int32), row(temperature, jnp.float32),
        row(seed, jnp.uint32), span,
    )  # fmt: skip


def test_noise_belongs_to_seed_and_position_alone():
    """Any batch, any order of rows, any span and any mates: the same token."""
    logits = np.random.default_rng(0).standard_normal((3, 4, 50))
    offsets, first, seeds, warm = [[0, 1, 1, 2], [2, 0, 2, 1], [1, 1, 0, 2]], [7, 8, 30], [5, 5, 6], [1.0, 0.5, 2.0]
    whole = choose(logits, offsets, first, warm, seeds, 3)
    for b in range(3):
        for t in range(4):
            position = first[b] + offsets[b][t]
            alone = choose(logits[b, t][None, None], [[0]], [position], [warm[b]], [seeds[b]], 1)
            assert whole[b, t] == alone[0, 0]
            noise = laws.noise_of(jnp.uint32(seeds[b]), jnp.int32(position), 50)
            assert whole[b, t] == jnp.argmax(logits[b, t] / warm[b] + noise)


def test_noise_differs_between_positions_and_seeds():
    rows = [vocabulary.gumbel(jnp.uint32(s), jnp.int32(p), 64) for s in (0, 1, 2**32 - 1) for p in (0, 1, 2)]
    corr = np.corrcoef(np.stack(rows))
    assert (np.abs(corr - np.eye(len(rows))) < 0.5).all()


def test_greedy_rows_hear_no_noise():
    logits = np.random.default_rng(1).standard_normal((4, 2, 30))
    mixed = choose(logits, [[0, 1]] * 4, [3] * 4, [0.0, 1e-6, 9.9e-5, 1.0], [1, 2, 3, 4], 2)
    assert (mixed[:3] == logits[:3].argmax(-1)).all()


def test_temperatures_above_the_threshold_sample():
    """FC-18: at 1e-3 two logits 1e-4 apart are nearly even."""
    seeds = np.arange(400)
    logits = np.broadcast_to([0.0, 1e-4, -1.0], (400, 1, 3))
    picked = np.asarray(choose(logits, np.zeros((400, 1)), np.zeros(400), np.full(400, 1e-3), seeds, 1))
    assert 100 < (picked == 0).sum() < 300 and not (picked == 2).any()


@pytest.mark.parametrize("value", [-1.0, -1e-9, float("nan"), float("inf")])
def test_impossible_temperatures_are_refused(value):
    with pytest.raises(ConfigError, match=f"temperature={value}"):
        SamplingConfig(temperature=value)


@pytest.mark.parametrize("value", [0.0, 1e-6, 1e-3, 2.0])
def test_possible_temperatures_are_taken(value):
    assert SamplingConfig(temperature=value).temperature == value


@functools.lru_cache(None)
def draw(static: Decoder, temperature: float, kind: str | None) -> tuple[np.ndarray, float]:
    """Three new tokens [DRAWS, 3] of as many seeds, and the mean acceptance length of the first round."""
    draft = None if kind is None else {"logits": jnp.asarray(laws.draft_logits(kind), jnp.float32)}
    params, out, accepted = {"target": laws.LOADED.params, "draft": draft}, [], []
    for start in range(0, laws.DRAWS, laws.BATCH):
        seeds = np.arange(start, start + laws.BATCH)
        asked = tiny.request([[laws.PROMPT]] * laws.BATCH, 3, temperature=temperature, seed=seeds, slots=1)
        state = tiny.decode(static, params, asked)
        assert (state.length == 4).all()
        out.append(np.asarray(state.tokens[:, 1:4]))
        accepted.append(float(state.accept_lengths[:, 0].mean()))
    return np.concatenate(out), float(np.mean(accepted))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_plain_law(temperature):
    assert laws.p_value(draw(laws.ALONE, temperature, None)[0], laws.law(temperature)) > 0.001


def _cases() -> list:
    """Every draft of a tree at temperature 1; the rest is slow."""
    found = []
    for static, shape in ((laws.TREE, "tree"), (laws.CHAIN, "chain")):
        for kind in ("good", "bad", "adversarial"):
            for temperature in (0.5, 1.0, 2.0):
                usual = temperature == 1 and shape == "tree" and kind != "bad"
                name, marks = f"{shape}-{kind}-{temperature}", () if usual else pytest.mark.slow
                found.append(pytest.param(static, kind, temperature, id=name, marks=marks))
    return found


@pytest.mark.parametrize(("static", "kind", "temperature"), _cases())
def test_speculative_law(static, kind, temperature):
    """FC-12, FC-14: the joint law of three tokens, two of them from a tree, is the target's; so are the very tokens."""
    tokens, _ = draw(static, temperature, kind)
    assert laws.p_value(tokens, laws.law(temperature)) > 0.001
    assert (tokens == draw(laws.ALONE, temperature, None)[0]).all(1).mean() > 0.9999  # rounding of the noise, at most


def test_acceptance_tells_the_drafters_apart():
    """Else the law above would be tested on trees that are never entered, or never left."""
    means = {kind: draw(laws.TREE, 1.0, kind)[1] for kind in ("good", "adversarial")}
    assert means["good"] > 1.45 > 1.35 > means["adversarial"] > 1.0


def test_drafts_are_ranked_under_the_noise_of_the_choice():
    """The very noise that the target's choice will hear, row by row; a greedy row in a warm batch keeps its logits."""
    logits = np.random.default_rng(4).standard_normal((3, 2, 50)).astype(np.float32)
    options = Sampling(jnp.array([1.0, 0.0, 0.6]), jnp.array([5, 6, 7], jnp.uint32))
    first = jnp.array([3, 9, 20])

    @jax.jit
    def foreseen(logits):
        past = Past(jnp.zeros((3, 1), jnp.int32), first, first, jnp.full((3, 1), -1))
        made = choice.choose(options, past, jnp.zeros(3, bool), 2, 50)
        return made.foresee(logits, 0.5), made.noise, made.foresee(logits, 0.0)

    ranked, rows, deaf = foreseen(jnp.asarray(logits))
    for b, d in [(0, 0), (0, 1), (2, 0), (2, 1)]:
        noise = laws.noise_of(options.seed[b], first[b] + d, 50)
        np.testing.assert_array_equal(rows[b, d], noise)
        wanted = 0.5 * (logits[b, d] + choice.NOISE_SHARE * options.temperature[b] * noise)
        np.testing.assert_allclose(ranked[b, d], wanted, rtol=1e-5, atol=1e-6)
    assert (ranked[1] == logits[1]).all() and not rows[1].any()
    assert (deaf == logits).all()  # a sharpness of 0 leaves the noise out


@pytest.mark.parametrize("temperature", [pytest.param(0.5, marks=pytest.mark.slow), 1.0])
def test_the_noise_helps_a_good_draft(temperature):
    """The same tokens in fewer rounds."""
    blind = tiny.loop(laws.LOADED.model, tiny.TableDraft(laws.DEPTH), 8, 8, "best_first", 3, 0.0)
    (tokens, without), (same, helped) = draw(blind, temperature, "good"), draw(laws.TREE, temperature, "good")
    assert (tokens == same).all(1).mean() > 0.9999
    assert helped > without + 0.05


def test_the_test_sees_a_wrong_law():
    """A temperature that is 2 % off, or a second token drawn without looking at the first."""
    tokens, joint = draw(laws.ALONE, 1.0, None)[0], laws.law(1.0)
    assert laws.p_value(tokens, laws.law(1.02)) < 0.001
    blind = joint.sum((1, 2))[:, None, None] * joint.sum(0)[None]
    assert laws.p_value(tokens, blind) < 0.001


def test_chain_does_not_take_the_argmax():
    """FC-14: 2000 seeds; the second token, given the first, is no constant."""
    tokens = draw(laws.CHAIN, 1.0, "good")[0][:2000]
    joint = laws.law(1.0).sum(2)
    assert laws.p_value(tokens[:, :2], joint) > 0.001
    common = np.bincount(tokens[:, 0]).argmax()
    assert len(set(tokens[tokens[:, 0] == common, 1])) > 3


def test_two_siblings_keep_the_targets_odds():
    """FC-17: target .6 and .4, draft .9 and .1, both siblings in the tree."""
    odds = lambda a, b: jnp.log(jnp.array([a, b] + [1e-30] * (laws.VOCAB - 2), jnp.float32))
    target = laws.LOADED.params | {"table": jnp.broadcast_to(odds(0.6, 0.4), laws.LOADED.params["table"].shape)}
    params = {"target": target, "draft": {"logits": jnp.stack([odds(0.9, 0.1)] * laws.DEPTH)}}
    asked = tiny.request([[laws.PROMPT]] * laws.BATCH, 3, temperature=1.0, seed=np.arange(laws.BATCH), slots=1)
    state = tiny.decode(laws.TREE, params, asked)
    for i in (1, 2, 3):
        assert stats.binomtest(int((state.tokens[:, i] == 0).sum()), laws.BATCH, 0.6).pvalue > 0.001
    assert float(state.accept_lengths[:, 0].mean()) > 2  # the siblings were there to be taken


def test_seed_repeats_and_seeds_differ():
    """FC-15: the same seed gives the same ids among any mates; fifty seeds give several outputs."""
    params = {"target": laws.LOADED.params, "draft": {"logits": jnp.asarray(laws.draft_logits("good"), jnp.float32)}}
    seeds = np.arange(1, 51)
    run = lambda seeds, prompts, warm: tiny.outputs(
        tiny.decode(laws.TREE, params, tiny.request(prompts, 4, temperature=warm, seed=seeds, slots=1))
    )
    one = run(seeds, [[laws.PROMPT]] * 50, 1.0)
    assert one == run(seeds, [[laws.PROMPT]] * 50, 1.0)
    assert len({tuple(x) for x in one}) > 25
    mates = run(
        np.where(seeds % 2, seeds, 999), [[laws.PROMPT if s % 2 else 1] for s in seeds], np.where(seeds % 2, 1.0, 0)
    )
    assert mates[::2] == one[::2] and mates[1::2] != one[1::2]
