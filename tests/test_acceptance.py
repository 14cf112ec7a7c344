"""The acceptance-length report: pooled over rounds, compared with plain decoding."""

import pathlib

import pytest

from jetspec_jax import load, speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.evals import acceptance

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
    assert got["acceptance_length"] == pytest.approx(sum(sum(r.accept_lengths) for r in alone) / rounds)
    assert got["token_ids"] == [r.token_ids for r in alone]  # in the order given, though decoded by length
    low, high = got["interval_95"]
    assert 1 <= low <= got["acceptance_length"] <= high <= 8
    assert acceptance.differing(target, PROMPTS, got["token_ids"], sampling, batch=4)["equal"] == 4


def test_a_changed_token_is_reported_with_its_margin(pair):
    target, _ = pair
    sampling = SamplingConfig(8)
    outputs = [r.token_ids for r in speculate.generate(target, None, PROMPTS, None, sampling)]
    outputs[1] = [(outputs[1][0] + 1) % 64, *outputs[1][1:]]
    report = acceptance.differing(target, PROMPTS, outputs, sampling, batch=4)
    assert (report["equal"], report["different"]) == (3, 1)
    assert report["largest_margin"] > 1e-4
