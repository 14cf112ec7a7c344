"""Every example runs as its docstring says, on a tiny pair of folders; an own drafter is lossless."""

import pathlib
import re
import runpy
import sys
import types

import jax.numpy as jnp
import pytest
import small
import tiny
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jetspec_jax import speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.drafts import block
from jetspec_jax.files import checkpoint
from jetspec_jax.loop.contracts import Seen

EXAMPLES = pathlib.Path(__file__).parent.parent / "examples"
LAST = {
    "audit_pair": r"2 of 2 outputs equal plain decoding; .*",
    "batch": r"  24 tokens, [1-4]\.\d\d a round, length",
    "decode": r"plain decoding: the same tokens",
    "known_acceptance": r"3\.[3-7]\d tokens a round, .* a second",
    "no_head": r"[1-8]\.\d\d tokens a round: '.*'",
    "own_drafter": r"plain decoding: the same tokens",
    "stream": r"\d+ tokens, .* a second",
    "train_head": r"decoding: [1-4]\.\d\d tokens a round",
}  # by file: how its output ends


def bigrams(vocab_size):
    """The drafter of examples/own_drafter.py."""
    return runpy.run_path(str(EXAMPLES / "own_drafter.py"))["Bigrams"](vocab_size)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a random target of single characters, without an end token, and of a random head."""
    folder, target = tmp_path_factory.mktemp("pair"), small.target()
    c = target.config
    raw = small.HEAD.to_hf() | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": c.num_layers}
    raw |= {"layer_types": ["full_attention"] * c.num_layers, "tie_word_embeddings": True, "dtype": "float32"}
    tiny.save_target(folder / "target", c, raw, target.params)
    letters = tokenizers.Tokenizer(models.WordLevel({x: i for i, x in enumerate(small.ALPHABET)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    letters.decoder = decoders.Fuse()
    letters.save(str(folder / "target" / "tokenizer.json"))
    (folder / "target" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    _, shapes = block.build(small.HEAD, "float32")
    checkpoint.save_head(folder / "head", small.HEAD, small.random_params(shapes, 1))
    return {"--target": str(folder / "target"), "--head": str(folder / "head")}


LONG = "train_head"
PATHS = [
    pytest.param(path, id=path.stem, marks=pytest.mark.slow if path.stem == LONG else ())
    for path in sorted(EXAMPLES.glob("*.py"))
]


@pytest.mark.parametrize("path", PATHS)
def test_an_example_runs(path, pair, monkeypatch, capsys):
    text = path.read_text()
    given = [word for name in pair if f'"{name}"' in text for word in (name, pair[name])]
    given += ["--steps", "12"] if path.stem == "train_head" else []
    monkeypatch.setattr(sys, "argv", [str(path), *given])
    try:
        runpy.run_path(str(path), run_name="__main__")
    except SystemExit as end:
        assert not end.code
    last = capsys.readouterr().out.splitlines()[-1]
    assert re.fullmatch(LAST[path.stem], last), last
    assert f"    python examples/{path.name}" in text, "the docstring has the command"
    assert 20 <= text.count("\n") <= 70, "an example fits on a screen"


def test_an_own_drafter_is_lossless():
    head = tiny.LoadedHead(bigrams(tiny.VOCAB))
    target, prompts = tiny.hash_target(), [[1, 2, 3, 1, 2], [5], [4, 4, 4]]
    sampling = SamplingConfig(40, temperature=1.0, seed=3)
    fast = speculate.generate(target, head, prompts, TreeConfig(8), sampling)
    plain = speculate.generate(target, None, prompts, None, sampling)
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]


def test_an_own_drafter_drafts_what_came_next():
    draft, tokens = bigrams(9), jnp.array([[1, 2, 3, 1, 2, 8, 8], [5, 6, 7, 5, 8, 8, 8]])
    length = jnp.array([5, 4])
    state = draft.init({}, 2, 7)
    for start, count in ((0, 2), (2, length - 3)):  # in two pieces; the anchor itself comes with the next round
        seen = Seen(None, jnp.full(2, start), jnp.broadcast_to(count, (2,)), tokens, False)
        state = draft.extend({}, state, seen, None)
    choice = types.SimpleNamespace(anchor=jnp.array([2, 5]), past=types.SimpleNamespace(tokens=tokens))
    tree, _ = draft.propose({}, state, choice, jnp.array([8, 8]), None)
    assert tree.tokens.tolist() == [[2, 3, 1, 2, 3, 1, 2, 3], [5, 6, 7, 5, 6, 7, 5, 6]]
    assert tree.parents.tolist() == [[-1, 0, 1, 2, 3, 4, 5, 6]] * 2
    tree, _ = draft.propose({}, state, choice, jnp.array([3, 1]), None)
    assert tree.size.tolist() == [3, 1] and tree.tokens.tolist()[1] == [5] + [0] * 7
    unknown = types.SimpleNamespace(anchor=jnp.array([7, 4]), past=choice.past)
    assert draft.propose({}, state, unknown, jnp.array([8, 8]), None)[0].size.tolist() == [1, 1]
