"""Logits and hidden states against transformers: stored ones always, live ones where torch is installed."""

import importlib.util
import json
import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.files import load
from jetspec_jax.layers import masks, moe

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
FOLDERS = sorted((FIXTURES / "reference").iterdir())


def close(actual, wanted, tolerance=1e-5) -> float:
    """max|difference| <= tolerance * max|value|; the ratio is returned."""
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    assert actual.shape == wanted.shape
    ratio = np.abs(actual - wanted).max() / np.abs(wanted).max()
    assert ratio <= tolerance, ratio
    return ratio


def forward(target: load.LoadedTarget, ids) -> tuple[jax.Array, jax.Array]:
    """Logits [B, T, V] and taps [L, B, T, E] of whole sequences."""
    rows, taps = ids.shape[1], tuple(range(target.config.num_layers))
    positions = jnp.broadcast_to(jnp.arange(rows), ids.shape)

    @jax.jit
    def run(params, tokens):
        out = target.model.forward(params, tokens, positions, masks.causal(rows), taps=taps)
        return target.model.logits(params, out.hidden), out.taps

    logits, side_by_side = run(target.params, jnp.asarray(ids, jnp.int32))
    return logits, jnp.stack(jnp.split(side_by_side, len(taps), axis=-1))


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda f: f.name)
def test_logits_and_taps_are_those_of_transformers(folder, record_property):
    stored = np.load(folder / "reference.npz")
    target = load.load_target(folder)
    assert target.dtype == "float32"
    logits, taps = forward(target, stored["ids"])
    record_property("logits", float(close(logits, stored["logits"])))
    for i, (ours, theirs) in enumerate(zip(taps, stored["taps"], strict=True)):
        close(ours, theirs)  # tap i is the output of layer i, not its input
        if i:
            assert np.abs(ours - stored["taps"][i - 1]).max() > 0.1 * np.abs(theirs).max()


def test_the_fixtures_cover_what_they_should():
    configs = {f.name: json.loads((f / "config.json").read_text()) for f in FOLDERS}
    assert configs["qwen3_tied"]["tie_word_embeddings"] and not configs["qwen3_untied"]["tie_word_embeddings"]
    assert load.load_target(FIXTURES / "reference" / "qwen3_moe").config.moe.sparse_layers == (0, 2)
    assert len(list((FIXTURES / "reference" / "qwen3_untied").glob("*.safetensors"))) > 2
    assert sum(p.stat().st_size for f in FOLDERS for p in f.iterdir()) < 3e6


@pytest.mark.parametrize("name", [f.name for f in FOLDERS])
def test_live_comparison_with_torch(name, tmp_path):
    pytest.importorskip("torch")
    spec = importlib.util.spec_from_file_location("make_reference_logits", FIXTURES / "make_reference_logits.py")
    make = sys.modules.setdefault(spec.name, importlib.util.module_from_spec(spec))
    spec.loader.exec_module(make)
    model = make.random_model(name)
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    ids = np.random.default_rng(7).integers(0, 96, (3, 29))
    theirs = make.compute(model, ids)
    logits, taps = forward(load.load_target(tmp_path), ids)
    close(logits, theirs["logits"])
    close(taps, theirs["taps"])


def test_unbalanced_routing_drops_no_token():
    """Every token goes to the same two experts, far beyond any even share; each gets its exact mixture."""
    rng = np.random.default_rng(0)
    rows, embed, experts, width = 40, 8, 8, 6
    h = rng.normal(size=(1, rows, embed)).astype(np.float32)
    h[..., 0] = 3.0  # what the router looks at
    router = np.zeros((embed, experts), np.float32)
    router[0] = [0, 0, 0, 2.0, 0, 1.5, 0, 0]
    gate_up = rng.normal(size=(experts, embed, 2, width)).astype(np.float32)
    down = rng.normal(size=(experts, width, embed)).astype(np.float32)
    ours = moe.feed_forward(*map(jnp.asarray, (h, router, gate_up, down)), 2, True)

    def expert(i):
        gate, up = (h[0].astype(np.float64) @ gate_up[i, :, j] for j in range(2))
        return (gate / (1 + np.exp(-gate)) * up) @ down[i]

    first = 1 / (1 + np.exp(4.5 - 6.0))  # softmax of the two chosen logits 3 * 2.0 and 3 * 1.5
    close(ours[0], first * expert(3) + (1 - first) * expert(5))
