"""Every example runs as its docstring says, on a tiny pair of folders; an own drafter is lossless."""

import pathlib
import re
import runpy
import sys

import pytest
import small
import tiny
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from jetspec_jax import speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.drafts import block
from jetspec_jax.files import checkpoint

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


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Folders of a random target of single characters, without an end token, and of a random head."""
    folder, target = tmp_path_factory.mktemp("pair"), small.target()
    c = target.config
    raw = small.HEAD.to_hf() | {"architectures": ["Qwen3ForCausalLM"], "num_hidden_layers": c.num_layers}
    raw |= {"layer_types": ["full_attention"] * c.num_layers, "tie_word_embeddings": True, "dtype": "float32"}
    checkpoint.save_target(folder / "target", c, raw, target.params)
    letters = tokenizers.Tokenizer(models.WordLevel({x: i for i, x in enumerate(small.ALPHABET)}, unk_token="?"))
    letters.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(r"[\s\S]"), "isolated")
    letters.decoder = decoders.Fuse()
    letters.save(str(folder / "target" / "tokenizer.json"))
    (folder / "target" / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    _, shapes = block.build(small.HEAD, "float32")
    checkpoint.save_head(folder / "head", small.HEAD, small.random_params(shapes, 1))
    return {"--target": str(folder / "target"), "--head": str(folder / "head")}


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
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


def test_an_own_drafter_is_lossless_and_learns():
    """Against plain decoding of a stub target with unequal rows; where the text goes round, whole chains are right."""
    bigrams = runpy.run_path(str(EXAMPLES / "own_drafter.py"))["Bigrams"](tiny.VOCAB)
    target = tiny.hash_target()
    head = tiny.LoadedHead(bigrams)
    prompts, sampling = [[1, 2, 3, 1, 2], [5], [4, 4, 4]], SamplingConfig(40, temperature=1.0, seed=3)
    fast = speculate.generate(target, head, prompts, TreeConfig(8), sampling)
    plain = speculate.generate(target, None, prompts, None, sampling)
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]
    same = tiny.dataclasses.replace(target, params=target.params | {"table": 0 * target.params["table"]})
    result = speculate.generate(same, head, prompts, TreeConfig(8), SamplingConfig(40))[1]
    assert result.token_ids == [0] * 40 and max(result.accept_lengths) == 8
