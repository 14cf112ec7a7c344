"""The acceptance-length report: pooled over rounds, compared with plain decoding."""

import dataclasses
import pathlib

import jax.numpy as jnp
import pytest
import tiny

from jetspec_jax import baseline, doctor, speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.evals import acceptance
from jetspec_jax.files import load

PAIR = pathlib.Path(__file__).parent / "fixtures" / "peer_parity" / "dense_trained"
PROMPTS = [[11, 12, 17], [49], [5, 6, 7, 8, 9], [30, 31]]


@pytest.fixture(scope="module")
def pair():
    target = load.load_target(PAIR / "target")
    return target, load.load_head(PAIR / "head", target)


def test_rounds_are_pooled_over_prompts(pair):
    target, head = pair
    tree, sampling = TreeConfig(16), SamplingConfig(24)
    got = acceptance.measure(target, head, PROMPTS, tree, sampling, batch=4)
    alone = speculate.generate(target, head, PROMPTS, tree, sampling)
    rounds = sum(r.rounds for r in alone)
    assert got["rounds"] == rounds
    assert got["acceptance_length"] == pytest.approx(sum(sum(r.emitted) for r in alone) / rounds)
    assert got["verified_per_round"] == pytest.approx(sum(sum(r.accept_lengths) for r in alone) / rounds)
    assert got["token_ids"] == [r.token_ids for r in alone]  # in the order given, though decoded by length
    low, high = got["interval_95"]
    assert 1 <= low <= got["acceptance_length"] <= high <= 8
    assert acceptance.differing(target, PROMPTS, got["token_ids"], sampling, batch=4)["equal"] == 4


def test_prompts_as_long_as_may_be_are_in():
    assert acceptance.short([[1, 2, 3], [1, 2, 3, 4], [1], [2]], 2, 3) == [[1, 2, 3], [1]]


def test_every_figure_of_known_rounds():
    """FC-49: rounds that accept 0, 2 and 5 of 5 drafts. FC-50: rounds are pooled, each prompt's length is given too."""
    base = speculate.generate(tiny.target("dense"), None, [1], None, SamplingConfig(1))
    result = lambda lengths: dataclasses.replace(
        base,
        rounds=len(lengths),
        accept_lengths=lengths,
        emitted=lengths,
        acceptance_length=sum(lengths) / len(lengths),
    )
    one = acceptance.pooled([result([1, 3, 6])])
    assert one["verified_per_round"] == one["acceptance_length"] == pytest.approx(10 / 3)
    assert one["accepted_per_round"] == pytest.approx(7 / 3)
    assert one["reached"] == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3])
    assert one["conditional"] == pytest.approx([2 / 3, 1, 1 / 2, 1, 1])
    both = acceptance.pooled([result([1, 3, 6]), result([2])])
    assert both["acceptance_length"] == 12 / 4 and both["acceptance_lengths"] == pytest.approx([10 / 3, 2])
    cut = dataclasses.replace(result([1, 3, 6]), emitted=[1, 3, 2])
    cut = acceptance.pooled([cut])
    assert (cut["acceptance_length"], cut["verified_per_round"]) == (2, pytest.approx(10 / 3))
    ended = dataclasses.replace(result([2, 4]), finish_reason="stop")
    mixed = acceptance.pooled([result([1, 3, 8]), ended])  # what the limit cut does not count here
    assert (mixed["stopped"], mixed["stopped_length"], both["stopped_length"]) == (1, 3, None)
    none = acceptance.pooled([dataclasses.replace(base, rounds=0, accept_lengths=[], emitted=[])])
    assert none["acceptance_length"] == 0 and none["conditional"] == [None]


def test_a_changed_token_is_reported_with_its_margin(pair):
    target, _ = pair
    sampling = SamplingConfig(8)
    outputs = [r.token_ids for r in speculate.generate(target, None, PROMPTS, None, sampling)]
    outputs[1] = [(outputs[1][0] + 1) % 64, *outputs[1][1:]]
    report = acceptance.differing(target, PROMPTS, outputs, sampling, batch=4)
    assert (report["equal"], report["different"]) == (3, 1)
    assert report["largest_margin"] > 1e-4


def test_a_row_that_breaks_is_no_figure(pair, monkeypatch):
    """What a broken row gave out until then would be averaged with the others."""
    base = speculate.generate(tiny.target("dense"), None, [1], None, SamplingConfig(1))
    results = [base, dataclasses.replace(base, error="not finite")]
    monkeypatch.setattr(speculate, "generate", lambda *_: results)
    with pytest.raises(speculate.DecodeError, match="prompt 2 of 2: not finite"):
        acceptance.measure(*pair, [[1], [2]], TreeConfig(4), SamplingConfig(1), batch=2)
    with pytest.raises(speculate.DecodeError, match="prompt 2 of 2: not finite"):
        doctor.measure(*pair, [[1], [2]], 1)


def test_the_margin_of_a_token_that_a_filter_dropped_is_to_the_cut():
    raw, kept = jnp.array([3.0, 2.5, 1.0]), jnp.array([3.0, 2.5, -jnp.inf])
    assert baseline.margin_of(raw, kept, 2) == 1.5 and baseline.margin_of(raw, kept, 1) == 0.5
