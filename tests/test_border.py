"""The border of files: every key of every format with every wrong type and size is one short line, or a right value."""

import json
import pathlib
import shutil
from types import SimpleNamespace

import gguf
import ggufs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec_jax.config import ConfigError, ModelConfig
from jetspec_jax.drafts import block_files, dspark_files, families
from jetspec_jax.fields import Fields, shown
from jetspec_jax.files import checkpoint, gguf_file, load, pair, tokenizer
from jetspec_jax.files.gguf_file import GGUF

FIXTURES = pathlib.Path(__file__).parent / "fixtures"
PAIR = FIXTURES / "peer_parity" / "dense_causal"
TARGET = json.loads((PAIR / "target" / "config.json").read_text())
MOE = json.loads((FIXTURES / "reference" / "qwen3_moe" / "config.json").read_text())
HEAD = json.loads((PAIR / "head" / "config.json").read_text())
DSPARK = {key: value for key, value in HEAD.items() if key != "dflash_config"} | {
    "architectures": ["Qwen3DSparkModel"], "target_layer_ids": [0], "mask_token_id": 3, "markov_rank": 4,
    "markov_head_type": "gated", "enable_confidence_head": True, "confidence_head_with_markov": True,
}  # fmt: skip
WRONG = [
    None, True, False, 0, -1, 1, 7, 2**31, 2**70, 10**400, 0.5, 64.0, -0.0, float("nan"), float("inf"), "", "x", "1",
    "false", "None", "two\nlines", "\ud800", "y" * 100_000, [], [1], [-1], ["x"], [None], [[1]], [2**70], [True],
    {}, {"a": 1}, {"rope_type": 3}, {"rope_type": "yarn", "factor": "4"}, {"content": 3}, {"x": {"y": {}}},
    ["z"] * 9999,
]  # fmt: skip
ANYTHING = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ROPE = ("rope_type", "type", "factor", "original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow",
        "truncate", "mscale", "mscale_all_dim", "low_freq_factor", "high_freq_factor", "rope_theta",
        "partial_rotary_factor")  # fmt: skip
MOE_KEYS = ("num_experts", "num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob",
            "decoder_sparse_step", "mlp_only_layers")  # fmt: skip
COMMON = sorted(block_files.READ - {*block_files.TABLES, "num_target_layers", "block_size"})


def one_line(read, *args) -> str:
    """The line that a wrong value is refused with, "" where it is a right one."""
    try:
        read(*args)
    except ConfigError as error:
        line = str(error)
        assert "\n" not in line and len(line) < 600, line
        line.encode("utf-8", "backslashreplace")
        return line
    return ""


def head(raw):
    return families.of_config(raw, "h/config.json").config(raw, "h/config.json")


def with_rope(raw, key, value):
    kind = {"low_freq_factor": "llama3", "high_freq_factor": "llama3"}.get(key, "yarn")
    usual = {"rope_type": kind, "factor": 2.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    return raw | {"rope_scaling": usual | {key: value}}


CASES = {
    "target": (lambda key, value: ModelConfig.from_hf(TARGET | {key: value}),
               [*COMMON, "eos_token_id", "tie_word_embeddings"]),
    "moe": (lambda key, value: ModelConfig.from_hf(MOE | {key: value}), MOE_KEYS),
    "rope": (lambda key, value: ModelConfig.from_hf(with_rope(TARGET, key, value)), ROPE),
    "head": (lambda key, value: head(HEAD | {key: value}), [*sorted(block_files.READ), *sorted(families.KEYS)]),
    "block": (lambda key, value: head(HEAD | {"dflash_config": HEAD["dflash_config"] | {key: value}}),
              [*sorted(block_files.READ_INSIDE), *sorted(families.KEYS), "unheard_of"]),
    "dspark": (lambda key, value: head(DSPARK | {key: value}),
               [*sorted(block_files.READ), *sorted(dspark_files.KEYS), "num_anchors", "unheard_of"]),
    "jetspec.json": (lambda key, value: pair.oddities(block_files.config(HEAD), {key: value}),
                     ["family", "thinking", "training_length", "target_fingerprint", "calibration"]),
}  # fmt: skip
EVERY = [(name, key) for name, (_, keys) in CASES.items() for key in keys]


@pytest.mark.parametrize("name", CASES)
def test_every_key_with_every_wrong_value(name):
    read, keys = CASES[name]
    refused = 0
    for key in keys:
        for value in WRONG:
            line = one_line(read, key, value)
            refused += bool(line)
            assert not line or "config.json" in line or name == "jetspec.json"
    assert name == "jetspec.json" or refused > len(keys) * len(WRONG) / 3


@given(st.sampled_from(EVERY), ANYTHING)
def test_every_key_with_anything(case, value):
    read, _ = CASES[case[0]]
    one_line(read, case[1], value)


@given(st.fixed_dictionaries({}, optional={"dflash_config": ANYTHING, "model_type": st.just("qwen3")}))
def test_a_file_of_anything(raw):
    assert one_line(head, raw) and one_line(ModelConfig.from_hf, raw)


def test_words_that_are_no_flags():
    for value in ("false", "true", 0, 1, [], {}):
        assert "norm_topk_prob" in one_line(ModelConfig.from_hf, MOE | {"norm_topk_prob": value})
        assert "tie_word_embeddings" in one_line(ModelConfig.from_hf, TARGET | {"tie_word_embeddings": value})
    assert not ModelConfig.from_hf(MOE | {"norm_topk_prob": None}).moe.normalize_top_k


def test_a_value_is_shown_on_one_line():
    assert shown(np.zeros((2, 2))) == "array([[0., 0.], [0., 0.]])" and shown("a\n  b") == repr("a\n  b")
    assert shown(10**5000) == "a number of thousands of digits" and len(shown("x" * 10**5)) <= 60


def test_the_reader_itself():
    fields = Fields({"a": 3, "b": None, "t": {"c": "x"}, "l": [1, "2"]}, "f.json")
    assert fields.whole("a") == 3 and fields.whole("b", default=9) == 9 and fields.real("a", 0, 5) == 3.0
    assert fields.table("t").text("c") == "x" and not fields.table("none").raw and not fields.has("b")
    for read, words in (
        (lambda: fields.whole("a", 4, 8), "f.json: a is 3; a whole number in 4..8 is needed"),
        (lambda: fields.whole("b"), "f.json: b is None; a whole number >= 1 is needed"),
        (lambda: fields.table("t").whole("c"), "f.json: t.c is 'x'; a whole number >= 1 is needed"),
        (lambda: fields.table("a"), "f.json: a is 3; a JSON object is needed"),
        (lambda: fields.wholes("l"), "f.json: l[1] is '2'; a list of whole numbers"),
        (lambda: Fields([1], "f.json"), "f.json: a JSON object is needed"),
    ):
        assert words in one_line(read)


class TestSizesBeforeWork:
    """Nothing is looped over or allocated for a number that a file claims."""

    def folder(self, tmp_path, kind="target", **changes):
        folder = pathlib.Path(shutil.copytree(PAIR / kind, tmp_path / kind))
        (folder / "config.json").write_text(json.dumps((TARGET if kind == "target" else HEAD) | changes))
        return folder

    @pytest.mark.parametrize(
        "changes, words",
        [
            ({"num_hidden_layers": 10**7}, "num_hidden_layers is 10000000; a whole number in 1..1024"),
            ({"num_hidden_layers": 1000}, "num_hidden_layers is 1000, but there are tensors of 8 layers"),
            ({"num_hidden_layers": 9}, "11 tensors are missing: model.layers.8.input_layernorm.weight"),
            ({"vocab_size": 10**7, "eos_token_id": None}, "model.embed_tokens.weight has shape [64, 64]"),
            ({"vocab_size": 10**9}, "vocab_size is 1000000000"), ({"hidden_size": 2**20}, "but config.json asks for"),
            ({"intermediate_size": 2**19}, "mlp.down_proj.weight has shape"),
            ({"head_dim": 2**20}, "but config.json asks for"), ({"max_position_embeddings": 2**40}, "max_position"),
        ],
    )  # fmt: skip
    def test_target(self, tmp_path, monkeypatch, changes, words):
        if "num_hidden_layers" in changes:
            monkeypatch.setattr(load.qwen3, "build", None)
        assert words in one_line(load.load_target, self.folder(tmp_path, **changes))

    def test_experts(self, tmp_path):
        folder = pathlib.Path(shutil.copytree(FIXTURES / "reference" / "qwen3_moe", tmp_path / "moe"))
        raw = json.loads((folder / "config.json").read_text())
        experts = "num_experts" if raw.get("num_experts") else "num_local_experts"
        (folder / "config.json").write_text(json.dumps(raw | {experts: 4000}))
        assert "tensors are missing" in one_line(load.load_target, folder)

    @pytest.mark.parametrize(
        "changes, words",
        [
            ({"block_size": 10**9}, "block_size is 1000000000; a whole number in 1..1024"),
            ({"num_hidden_layers": 1000}, "tensors are missing: layers.10.input_layernorm"),
            ({"intermediate_size": 2**19}, "layers.0.mlp.down_proj.weight has shape"),
            ({"num_target_layers": 10**7}, "num_target_layers is 10000000"),
        ],
    )
    def test_head(self, tmp_path, changes, words):
        target = load.load_target(PAIR / "target")
        assert words in one_line(load.load_head, self.folder(tmp_path, "head", **changes), target)


class TestEndTokens:
    @pytest.mark.parametrize("token", [64, 2**31, 2**70, -1, "</s>", 1.0, [3, 64], True, {"a": 1}])
    def test_of_a_folder(self, tmp_path, token):
        for name in ("config.json", "generation_config.json"):
            folder = pathlib.Path(shutil.copytree(PAIR / "target", tmp_path / name))
            raw = json.loads((folder / name).read_text()) | {"eos_token_id": token}
            (folder / name).write_text(json.dumps(raw))
            line = one_line(load.load_target, folder)
            assert str(folder / name) in line and "eos_token_id" in line and "0..63" in line

    def test_of_a_tokenizer_that_knows_more_than_the_model(self, tmp_path, capsys):
        folder = pathlib.Path(shutil.copytree(PAIR / "target", tmp_path / "t"))
        (folder / "tokenizer_config.json").write_text(
            '{"eos_token": "E", "added_tokens_decoder": {"64": {"content": "E"}}}'
        )
        assert load.load_target(folder).eos == (62,)
        err = capsys.readouterr().err
        assert "end token 64 is none of the model's 64" in err and err.count("\n") == 1

    @given(st.dictionaries(st.sampled_from(["eos_token", "added_tokens_decoder", "x"]), ANYTHING), ANYTHING)
    def test_of_tokenizer_files_of_anything(self, tmp_path_factory, config, added):
        folder = tmp_path_factory.mktemp("t")
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
        assert isinstance(tokenizer.end_tokens_of_folder(folder), tuple)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("g") / "m.gguf"
    return GGUF(ggufs.write(path, vocabulary=ggufs.byte_level_vocabulary()))


class TestGGUF:
    def read(self, file, key, value):
        odd = SimpleNamespace(path=file.path, fields=Fields(file.fields.raw | {key: value}, "m.gguf"))
        own = object.__new__(GGUF)
        own.__dict__ |= file.__dict__ | {"fields": odd.fields}
        config = ModelConfig.from_hf(own.config(), "m.gguf")
        tokenizer.end_tokens(odd, config.vocab_size)
        tokenizer.from_gguf(odd)

    def test_every_key_with_every_wrong_value(self, file, monkeypatch):
        monkeypatch.setattr(
            tokenizer, "_transformers", lambda: SimpleNamespace(PreTrainedTokenizerFast=lambda **_: None)
        )
        keys = [k for k in file.fields.raw if not k.startswith("general.")]
        keys += [*tokenizer.ENDS, "tokenizer.ggml.bos_token_id", "tokenizer.ggml.add_bos_token",
                 "llama.rope.scaling.type", "llama.rope.scale_linear", "llama.attention.sliding_window"]  # fmt: skip
        refused = 0
        for key in dict.fromkeys(keys):
            for value in WRONG:
                refused += bool(one_line(self.read, file, key, value))
        assert refused > 200

    @pytest.mark.parametrize("value", [3, ["llama"], None])
    @pytest.mark.parametrize("key", ["general.architecture", "split.count"])
    def test_keys_that_are_read_first(self, tmp_path, monkeypatch, key, value):
        path, whole = ggufs.write(tmp_path / "m.gguf"), gguf_file._Contents

        def odd(data):
            found = whole(data)
            found.fields[key] = value
            return found

        monkeypatch.setattr(gguf_file, "_Contents", odd)
        assert (key, value) == ("split.count", None) or (
            "parts" if (key, value) == ("split.count", 3) else key
        ) in one_line(GGUF, path)

    @pytest.mark.parametrize("key", ["eos", "eot", "eom"])
    @pytest.mark.parametrize("token", [267, 2**31, 2**32 - 1])
    def test_end_tokens_beyond_the_vocabulary(self, file, key, token):
        line = one_line(self.read, file, f"tokenizer.ggml.{key}_token_id", token)
        assert f"{key}_token_id is {token}" in line

    def test_a_table_of_tensors_that_claims_more_than_there_is(self, tmp_path):
        """2**32 x 2**32 bytes are 0 in 64 bits."""
        path = tmp_path / "m.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_tensor_info("x", (2**32, 2**32), gguf.np.dtype("int8"), 0, gguf.GGMLQuantizationType.I8)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        writer.close()
        path.write_bytes(path.read_bytes() + bytes(64))  # room for nothing
        assert "lies beyond its end" in one_line(GGUF, path)


BASE = {k: v for k, v in HEAD.items() if k != "dflash_config"}
BLOCK = HEAD["dflash_config"]


class TestHeadsOfOthers:
    """Trimmed configurations of published heads: each is refused by its name."""

    @pytest.mark.parametrize(
        "top, block, name",
        [
            ({"markov_rank": 256, "markov_head_type": "vanilla", "enable_confidence_head": True}, BLOCK, "DSpark"),
            ({"architectures": ["Qwen3DSparkModel"]}, BLOCK, "DSpark"), ({"markov_rank": 256}, None, "DSpark"),
            ({"projector_type": "dspark"}, BLOCK, "DSpark"),
            ({}, BLOCK | {"projector_type": "domino", "emb_dim": 256, "gru_hidden_dim": 1024}, "Domino"),
            ({"architectures": ["DominoDraftModel"]}, BLOCK, "Domino"),
            ({"architectures": ["DFlash2DraftModel"]}, BLOCK, "DFlash 2"),
            ({}, BLOCK | {"conv_group_size": 16, "conv_kernel_size": 2, "selector_rank": 256}, "DFlash 2"),
            ({"architectures": ["LlamaForCausalLMEagle"], "model_type": "llama"}, None, "EAGLE"),
            ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1]}}, BLOCK, "EAGLE"),
            ({"draft_vocab_size": 32}, BLOCK, "a reduced draft vocabulary"),
            ({}, BLOCK | {"draft_vocab_size": 32}, "a reduced draft vocabulary"),
            ({"final_logit_softcapping": 30.0}, BLOCK, "a softcap"), ({"kv_lora_rank": 512}, BLOCK, "MLA"),
            ({"medusa_num_heads": 4}, None, "Medusa"), ({"attention_mode": "mla"}, BLOCK, "MLA"),
        ],
    )  # fmt: skip
    def test_by_configuration(self, top, block, name):
        raw = BASE | top | ({"dflash_config": block} if block else {})
        line = one_line(head, raw)
        assert name in line and "not supported yet" in line and "jetspec, dflash" in line

    @pytest.mark.parametrize(
        "tensor, name",
        [("d2t", "reduced draft"), ("t2d", "reduced draft"), ("markov_head.markov_w1.weight", "DSpark"),
         ("layers.0.attention_conv.weight", "DFlash 2"), ("prefix_gru.weight_ih_l0", "Domino"),
         ("midlayer.hidden_norm.weight", "EAGLE"), ("hidden_dim_adapter.proj.weight", "an adapter")],
    )  # fmt: skip
    def test_by_tensors(self, tensor, name):
        ours = families.named("jetspec")
        line = one_line(families.refuse_foreign_tensors, ours, ["fc.weight", tensor], "h")
        assert name in line and tensor in line
        families.refuse_foreign_tensors(ours, ["fc.weight", "layers.0.mlp.up_proj.weight", "markov.weight"], "h")

    def test_unknown_keys_are_refused_unless_they_are_off(self):
        for value in (None, False, 0, 0.0, "", [], {}):
            assert head(HEAD | {"unheard_of": value}) == head(HEAD)
        line = one_line(head, HEAD | {"unheard_of": "y" * 1000})
        assert "config.json: unheard_of is 'yyy" in line and "take it out" in line
        line = one_line(head, HEAD | {"dflash_config": BLOCK | {"fc_layernorm": True}})
        assert "dflash_config.fc_layernorm is True" in line

    def test_what_tools_write_passes(self):
        more = {
            "auto_map": {"AutoModel": "dflash.DFlashDraftModel"}, "transformers_version": "5.0", "is_causal": False,
            "architectures": ["Qwen3DFlashDraftModel"], "_attn_implementation": "sdpa", "bos_token_id": 1,
            "draft_vocab_size": 64, "attention_mode": "gqa", "projector_type": "dflash", "pad_token_id": None,
            "initializer_range": 0.02, "num_experts": 128, "norm_topk_prob": True, "mask_token_id": 63,
        }  # fmt: skip
        assert head(HEAD | more) == head(HEAD)
        assert "mask_token_id" in one_line(head, HEAD | {"mask_token_id": 5})  # contradicts the table

    def test_jetspec_config_is_read_alike(self):
        renamed = BASE | {"jetspec_config": BLOCK}
        assert head(renamed) == head(HEAD) and families.of_config(renamed, "h").name == "jetspec"
        assert "together" in one_line(head, HEAD | {"jetspec_config": BLOCK})
        for flag, family in ((True, "jetspec"), (False, "dflash"), (None, "dflash")):
            raw = HEAD | {"dflash_config": BLOCK | {"causal_head": flag}}
            assert families.of_config(raw, "h").name == family

    def test_a_saved_head_goes_through_its_row(self, tmp_path):
        target = load.load_target(PAIR / "target")
        ours = load.load_head(PAIR / "head", target)
        assert ours.family == "jetspec"
        checkpoint.save_head(tmp_path / "again", ours.config, ours.params)
        assert load.load_head(tmp_path / "again", target).config == ours.config
