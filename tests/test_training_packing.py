"""Documents in sequences, sequences in batches, and features of them in files."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import HEAD, WIDTH, example, random_examples, target

from jetspec_jax.config import ConfigError
from jetspec_jax.layers import masks
from jetspec_jax.training import features, teacher
from jetspec_jax.training.data import packing
from jetspec_jax.training.data.batches import Batches


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


def test_batches_by_number_and_shares_of_processes():
    packed = packing.pack(random_examples(60), 24)
    count = len(packed.tokens)
    data = Batches(packed, 4, 2, seed=1)
    assert data[3].tokens.shape == (2, 2, 24) and (data[3].rows == data[3].rows).all()
    epoch = np.concatenate([data[i].rows.ravel() for i in range(-(-count // 4))])
    assert sorted(epoch[:count]) == list(range(count))
    np.testing.assert_array_equal(data[5].tokens[0, 0], packed.tokens[data[5].rows[0, 0]])
    shares = [Batches(packed, 4, 1, seed=1, process=p, processes=2)[3].rows.ravel() for p in range(2)]
    np.testing.assert_array_equal(np.concatenate(shares), data[3].rows.ravel())
    parts = [Batches(packed, 4, 2, seed=1, process=p, processes=2)[3].rows for p in range(2)]
    np.testing.assert_array_equal(np.concatenate(parts, axis=1), data[3].rows)  # as devices lie: in each part
    names = data.identities(3)
    assert set(names) == {n for r in data[3].rows.ravel() for n in packed.identities[r]} and data.anchored(3)
    with pytest.raises(ValueError, match="does not split"):
        Batches(packed, 5, 2, seed=1)
    silent = Batches(packed._replace(learnt=np.zeros_like(packed.learnt)), 4, 2, seed=1)
    assert not silent.anchored(0)


def test_anchors_are_looked_for_once_and_not_at_every_step(monkeypatch):
    data = Batches(packing.pack(random_examples(60), 24), 4, 2, seed=1)
    monkeypatch.setattr(packing.Packed, "anchored", property(lambda self: pytest.fail("looked for again")))
    assert data.anchored(0) and data.anchored(1)


def test_features_in_files_are_those_of_the_device(tmp_path, monkeypatch):
    monkeypatch.setattr(features, "SHARD", 4)
    packed = packing.pack(random_examples(20), WIDTH)
    kept = features.resident(target(), packed, HEAD.tap_layers, 4, "xla")
    args = (target(), packed, HEAD.tap_layers, 4, "xla")
    left = iter([True])
    assert not features.write(tmp_path, *args, on_time=lambda: next(left, False))
    assert features.write(tmp_path, *args)
    stored = features.Stored(tmp_path, target(), packed, HEAD.tap_layers)
    order = np.array([5, 0, len(packed.tokens) - 1])
    for a, b in zip(stored(order), kept, strict=True):
        np.testing.assert_allclose(a, b[order], atol=1e-6)
    scale = features.scale(target(), packed, HEAD.tap_layers, 1000, 4, "xla")
    real = np.asarray(kept.taps[: len(packed.tokens)])[packed.document > 0]
    np.testing.assert_allclose(scale, np.sqrt((real**2).mean(0)), rtol=1e-4)

    with pytest.raises(ConfigError, match=r"--config.tap_layers=1,0: .* was made with 0,1; remove the folder"):
        features.Stored(tmp_path, target(), packed, (1, 0))
    with pytest.raises(ConfigError, match=r"data=.* was made with"):
        features.write(tmp_path, target(), packed._replace(tokens=packed.tokens + 1), HEAD.tap_layers, 4, "xla")
    shard = tmp_path / "features-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(ConfigError, match=r"features-00001.*not a whole file"):
        features.Stored(tmp_path, target(), packed, HEAD.tap_layers)


def test_features_of_files_are_read_ahead_in_order():
    packed = packing.pack(random_examples(60), 24)
    read = []

    def stored(rows):
        read.append(rows.tolist())
        return teacher.Features(np.ones((len(rows), 24, 1)), np.ones((len(rows), 24, 1)))

    data = Batches(packed, 4, 2, seed=1, features=stored)
    plain, stream = Batches(packed, 4, 2, seed=1), data.stream(3)
    for number in range(3, 8):
        batch = next(stream)
        np.testing.assert_array_equal(batch.rows, plain[number].rows)
        assert batch.features.taps.shape == (2, 2, 24, 1)
    assert read[:5] == [plain[n].rows.ravel().tolist() for n in range(3, 8)]
    silent = Batches(packed._replace(learnt=np.zeros_like(packed.learnt)), 4, 2, seed=1, features=stored)
    assert next(silent.stream(0)) is None


def test_the_order_is_drawn_by_seed_and_anew_in_every_epoch():
    packed = packing.pack(random_examples(60), 24)
    count = len(packed.tokens) // 4 * 4
    even = packed.select(np.arange(count))

    def epoch(seed, number):
        data = Batches(even, 4, 1, seed=seed)
        return np.concatenate([data[number * count // 4 + i].rows.ravel() for i in range(count // 4)]).tolist()

    orders = [epoch(1, 0), epoch(1, 1), epoch(5, 0), list(range(count))]  # epoch i has the seed + i
    assert all(sorted(order) == orders[-1] for order in orders)
    assert len({tuple(order) for order in orders}) == 4 and epoch(1, 0) == orders[0]
