"""The evaluation: what it counts, and that decoding accepts as much."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import training_oracle as oracle
from small import HEAD, WIDTH, recipe, target

from jetspec_jax import speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.drafts import block
from jetspec_jax.files import load
from jetspec_jax.models import sharding
from jetspec_jax.training import (
    evaluation,
    features,
    journal,
    loop,
)
from jetspec_jax.training.data import answers as answer_store
from jetspec_jax.training.data import packing
from jetspec_jax.training.data.batches import Batches
from jetspec_jax.training.evaluation import Drafts
from jetspec_jax.training.losses import Mix
from jetspec_jax.training.objectives import block as learns


@pytest.mark.slow
def test_overfit_drafts_close_to_the_block_limit(answered, tmp_path, capsys):
    """Four answers learnt by heart (FC-27): cross entropy under 0.05, then decoding accepts nearly whole blocks."""
    known = answer_store.learnable(answer_store.read(answered[0]), [f"p/{i}" for i in range(5)], False)[0]
    four = sorted(known, key=lambda e: -e.tokens.size)[:4]
    packed = packing.pack(four, WIDTH)
    r = recipe(steps=200, mix=Mix(0, 0, 1), anchors=WIDTH, gamma=0.0, loss_chunk=512, warmup=0.1, peak_lr=3e-2)
    plan = loop.Plan(100, 200, 1000, packed, budgets=(2, 4, 8), width=4)
    scale = features.scale(target(), packed, HEAD.tap_layers, 8, 4, "xla")
    data = Batches(packed, len(packed.tokens), 1, 0)
    mesh = sharding.make_mesh(1, jax.devices()[:1])
    outcome = loop.train(r, loop.Given(target(), scale, data), tmp_path, plan, mesh)
    last = journal.read(tmp_path)[-1]
    assert last["loss"] < 0.05
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line.startswith("step 200/200  loss 0.0") and "MFU" in line and "held-out 2:" in line and "ETA" in line
    depth = HEAD.depth
    assert last["heldout"]["acceptance"]["8"] > 0.75 * (depth + 1) and min(last["heldout"]["agreement"]) > 0.95

    draft, _ = block.build(HEAD, jnp.float32)
    head = load.LoadedHead(draft, learns.fold(outcome.best, scale, "float32"), HEAD, "h", {}, 0.0, target().fingerprint)
    prompts = [[int(t) for t in e.tokens[~e.learnt]] for e in four]
    limits = [SamplingConfig(int(e.learnt.sum()), eos=()) for e in four]
    found = speculate.generate(target(), head, prompts, TreeConfig(8, width=4), limits)
    assert [r.token_ids for r in found] == [e.tokens[e.learnt].tolist() for e in four]
    lengths = [n for r in found for n in r.emitted]
    blocks = sum(-(-(limit.max_new_tokens - 1) // (depth + 1)) for limit in limits)
    assert len(lengths) <= 1.2 * blocks  # hardly more rounds than whole blocks need
    walked = last["heldout"]["acceptance"]["8"]
    assert abs(np.mean(lengths) - walked) < 0.5  # the figure of the evaluation is the one of decoding

    # Other tokens put into the answers: what follows one of them in a block is not known. Against trees walked by hand.
    draw, odd = np.random.default_rng(1), packed.tokens.copy()
    places = np.argwhere(packed.learnt)
    for row, at in places[draw.choice(len(places), 8, replace=False)]:
        odd[row, at] = draw.integers(4, 48)
    other = packed._replace(tokens=odd)
    # A head that is less sure, so that trees hold what its best chain misses.
    noise = jax.random.normal(jax.random.key(0), outcome.best["fc"].shape)
    unsure = outcome.best | {"fc": outcome.best["fc"] * (1 + noise)}
    got = evaluation.measure(r, target().params, scale, unsure, other, (2, 4, 8), 4, len(odd))
    folded = unsure | {"fc": unsure["fc"] / scale[:, None]}
    wanted = oracle.acceptance(r, target().params, folded, other, (2, 4, 8), 4)
    assert got.keys() == wanted.keys() and got["anchors"] == wanted["anchors"] > 20
    for name in ("acceptance", "every_anchor"):
        assert got[name] == pytest.approx(wanted[name]), name
    assert got["agreement"] == wanted["agreement"] and got["conditional"] == wanted["conditional"]
    two, four, eight = got["every_anchor"].values()
    assert 1.2 < two < four < eight < walked and 0.2 < got["agreement"][1] < 0.95


def test_evaluation_counts_rounds_depths_and_ranks():
    """Two anchors by hand: places decide by budget, the walk skips what a round commits."""
    candidate = np.array([[1, 1, 1, 1, 0]], bool)
    known = np.array([[[1, 1], [1, 1], [1, 1], [1, 0], [0, 0]]], bool)
    no = evaluation.NOWHERE
    place = np.array([[[1, 5], [no, no], [2, no], [no, no], [no, no]]])
    rank = np.array([[[0, 1], [9, 0], [1, 3], [2, 0], [0, 0]]])
    got = evaluation.summary(Drafts(candidate, known, place, rank), (4, 8))
    assert got["acceptance"] == {"4": pytest.approx(1 + (1 + 1) / 2), "8": pytest.approx(1 + (2 + 0) / 2)}
    assert got["every_anchor"] == {"4": 1.5, "8": 1.75} and got["anchors"] == 4
    assert got["agreement"] == [0.25, pytest.approx(1 / 3, abs=1e-4)]
    assert got["conditional"][0][:3] == [0.25, 0.25, 0.25] and got["conditional"][1][:4] == [0, 0.5, 0, 0.5]


def test_the_chain_of_best_tokens_ends_at_the_first_that_is_wrong():
    """What a head cannot draft is wrong, and has the last rank; what the text does not tell ends the count."""
    draw = np.random.default_rng(0)
    logits = draw.standard_normal((40, 3, 7)).astype(np.float32)
    logits[::5, :, 2] = -np.inf
    wanted = np.where(draw.random((40, 3)) < 0.7, logits.argmax(-1), 2).astype(np.int32)
    known = np.cumprod(draw.random((40, 3)) < 0.9, -1) > 0
    place, rank = evaluation._chain(jnp.asarray(logits), None, jnp.asarray(wanted), jnp.asarray(known))
    lengths = set()
    for row, place_here, rank_here, told, right in zip(logits, place, rank, known, wanted, strict=True):
        length = 0
        while length < 3 and told[length] and row[length].argmax() == right[length]:
            length += 1
        lengths.add(length)
        assert place_here.tolist() == [*range(1, length + 1), *[evaluation.NOWHERE] * (3 - length)]
        for scores, token, found in zip(row, right, rank_here, strict=True):
            assert int(found) == (7 if np.isneginf(scores[token]) else np.sum(scores > scores[token]))
    assert lengths == {0, 1, 2, 3}
