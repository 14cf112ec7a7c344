"""Configurations in every spelling, heads that do not fit, dtypes, end tokens, and one line for every mistake."""

import dataclasses
import json
import os
import pathlib
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from jetspec_jax.config import ConfigError, ModelConfig, default_taps
from jetspec_jax.drafts import block as blocks
from jetspec_jax.drafts import block_files, families, scorer
from jetspec_jax.files import checkpoint, load, scorer_file

REFERENCE = pathlib.Path(__file__).parent / "fixtures" / "reference"
TARGET = REFERENCE / "qwen3_untied"
DENSE = json.loads((TARGET / "config.json").read_text())
SPARSE = json.loads((REFERENCE / "qwen3_moe" / "config.json").read_text())
BLOCK = {"causal_head": True, "mask_token_id": 95, "target_layer_ids": [0, 2]}
HEAD = {
    "model_type": "qwen3", "vocab_size": 96, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 40, "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 256, "num_target_layers": 3, "block_size": 5, "dflash_config": BLOCK,
    "dtype": "float32",
}  # fmt: skip


def without(raw, *keys):
    return {key: value for key, value in raw.items() if key not in keys}


def line_of(call, *args, **kwargs) -> str:
    """The one line of a ConfigError."""
    with pytest.raises(ConfigError) as error:
        call(*args, **kwargs)
    assert "\n" not in str(error.value)
    return str(error.value)


def make_head(folder: pathlib.Path, extra=(), meta=None, block=None, **changes) -> pathlib.Path:
    """A random head whose tensors fit its configuration."""
    raw = HEAD | changes | {"dflash_config": BLOCK | (block or {})}
    config = block_files.config(raw)
    checkpoint.save_head(folder, config, tiny.random_params(blocks.build(config, np.float32)[1]), meta)
    (folder / "config.json").write_text(json.dumps(raw))
    if meta is None:
        (folder / "jetspec.json").unlink()
    if extra:
        save_file(load_file(folder / "model.safetensors") | dict(extra), folder / "model.safetensors")
    return folder


@pytest.fixture(scope="module")
def target():
    return load.load_target(TARGET)


@pytest.fixture
def folder(tmp_path):
    """A copy of a target that may be changed."""
    return pathlib.Path(shutil.copytree(TARGET, tmp_path / "target"))


def rewrite(folder, **changes):
    (folder / "config.json").write_text(json.dumps(DENSE | changes))
    return folder


class TestSpellings:
    @pytest.mark.parametrize(
        "rope",
        [
            {"rope_theta": 5e5},
            {"rope_theta": 5e5, "rope_scaling": None},
            {"rope_theta": 500000},
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
            {"rope_parameters": {"rope_theta": 5e5}, "rope_theta": 1e4},
            {"rope_scaling": {"type": "default"}, "rope_theta": 5e5},
        ],
    )
    @pytest.mark.parametrize("kind", ["target", "head"])
    def test_rope(self, rope, kind):
        raw, read = (DENSE, ModelConfig.from_hf) if kind == "target" else (HEAD, block_files.config)
        config = read(without(raw, "rope_parameters", "rope_theta") | rope)
        assert config.rope_theta == 5e5

    @pytest.mark.parametrize("kind", ["target", "head"])
    @pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
    @pytest.mark.parametrize("word", ["type", "rope_type"])
    @pytest.mark.parametrize("name", ["longrope", "marvellous"])
    def test_other_scaled_rope_is_refused_by_name(self, kind, key, word, name):
        raw, read = (DENSE, ModelConfig.from_hf) if kind == "target" else (HEAD, block_files.config)
        line = line_of(read, raw | {key: {word: name, "factor": 4.0}}, "some/config.json")
        assert name in line and key in line and "some/config.json" in line

    def test_rope_per_kind_of_layer_and_partial_rope_are_refused(self):
        nested = {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}
        assert "rope_parameters" in line_of(ModelConfig.from_hf, DENSE | {"rope_parameters": nested})
        partial = DENSE["rope_parameters"] | {"partial_rotary_factor": 0.5}
        line = line_of(ModelConfig.from_hf, DENSE | {"rope_parameters": partial})
        assert "rope_parameters.partial_rotary_factor is 0.5" in line
        line = line_of(ModelConfig.from_hf, DENSE | {"partial_rotary_factor": 0.5})
        assert "json: partial_rotary_factor is 0.5" in line

    @pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
    def test_dtype(self, key):
        assert ModelConfig.from_hf(without(DENSE, "dtype") | {key: "float16"}).dtype == "float16"

    @pytest.mark.parametrize("key", ["num_experts", "num_local_experts"])
    def test_experts(self, key):
        moe = ModelConfig.from_hf(without(SPARSE, "num_local_experts") | {key: 8}).moe
        assert moe.num_experts == 8
        assert moe.experts_per_token == 2
        assert moe.normalize_top_k
        assert moe.sparse_layers == (0, 2)

    def test_experts_of_every_second_layer(self):
        raw = SPARSE | {"num_hidden_layers": 6, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
        assert ModelConfig.from_hf(raw).moe.sparse_layers == (1, 5)

    def test_no_experts_named(self):
        assert "num_experts" in line_of(ModelConfig.from_hf, without(SPARSE, "num_local_experts"))

    @pytest.mark.parametrize(("given", "read"), [(7, (7,)), ([7, 3], (7, 3)), (None, ())])
    def test_eos(self, given, read):
        assert ModelConfig.from_hf(DENSE | {"eos_token_id": given}).eos_token_ids == read

    @pytest.mark.parametrize("given", ["</s>", 1.5, True, 96, 2**31, 2**70, -1])
    def test_eos_that_is_no_id(self, given):
        for value in (given, [3, given]):
            line = line_of(ModelConfig.from_hf, DENSE | {"eos_token_id": value})
            assert repr(given) in line and "eos_token_id" in line and "0..95" in line

    def test_head_dim_defaults(self):
        assert ModelConfig.from_hf(without(DENSE, "head_dim")).head_dim == 128  # transformers' Qwen3
        assert ModelConfig.from_hf(without(SPARSE, "head_dim")).head_dim == 8  # hidden / heads
        assert ModelConfig.from_hf(without(DENSE, "head_dim") | {"model_type": "llama"}).head_dim == 8

    @pytest.mark.parametrize(
        "changes",
        [
            {"sliding_window": 64, "use_sliding_window": True},
            {"layer_types": ["full_attention", "sliding_attention", "full_attention"]},
            {"model_type": "llama", "sliding_window": 64, "use_sliding_window": None},
        ],
    )
    def test_sliding_window_is_refused(self, changes):
        raw = DENSE | changes
        raw = without(raw, "use_sliding_window") if raw["use_sliding_window"] is None else raw
        assert "sliding" in line_of(ModelConfig.from_hf, raw)

    def test_a_window_that_is_not_used_is_no_window(self):
        ModelConfig.from_hf(DENSE | {"sliding_window": 4096, "use_sliding_window": False})

    @pytest.mark.parametrize(
        ("changes", "words"),
        [
            ({"model_type": "gemma3"}, ("gemma3", "qwen3")),
            ({"attention_bias": True}, ("attention_bias",)),
            ({"mlp_bias": True}, ("mlp_bias",)),
            ({"hidden_act": "gelu"}, ("gelu", "silu")),
            ({"quantization_config": {"quant_method": "fp8"}}, ("quantization_config",)),
            ({"num_hidden_layers": None}, ("num_hidden_layers", "None")),
            ({"num_hidden_layers": 0}, ("num_hidden_layers", "0")),
            ({"hidden_size": "32"}, ("hidden_size", "'32'")),
            ({"num_attention_heads": 0}, ("num_attention_heads", "0")),
            ({"num_attention_heads": True}, ("num_attention_heads", "True")),
            ({"num_key_value_heads": 3}, ("num_attention_heads=4", "num_key_value_heads=3")),
            ({"head_dim": 7}, ("head_dim=7", "even")),
            ({"rms_norm_eps": "1e-6"}, ("rms_norm_eps", "'1e-6'")),
            ({"rope_parameters": {"rope_theta": -1.0}}, ("rope_theta", "-1.0")),
            ({"dtype": 16}, ("dtype", "16")),
        ],
    )
    def test_other_values_are_refused_by_name(self, changes, words):
        line = line_of(ModelConfig.from_hf, DENSE | changes, "a/config.json")
        assert all(word in line for word in (*words, "a/config.json"))

    def test_too_many_experts_a_token(self):
        assert "num_experts_per_tok=9" in line_of(ModelConfig.from_hf, SPARSE | {"num_experts_per_tok": 9})


class TestHeadConfig:
    def read(self, block=(), warnings=None, drop=(), **changes):
        raw = HEAD | changes | {"dflash_config": without(BLOCK | dict(block), *drop)}
        return block_files.config(raw, "h/config.json", (warnings if warnings is not None else []).append)

    @pytest.mark.parametrize("key", ["causal_head", "causal"])
    @pytest.mark.parametrize("value", [True, False])
    def test_either_name_of_the_causal_flag(self, key, value):
        warnings = []
        assert self.read({key: value}, warnings, {"causal_head", "causal"} - {key}).causal is value
        assert warnings == []

    def test_contradicting_flags(self):
        line = line_of(self.read, {"causal": False})
        assert "causal_head=True" in line and "causal=False" in line
        assert self.read({"causal": True}).causal

    def test_no_flag_is_bidirectional_with_a_warning(self, tmp_path, target, capsys):
        folder = make_head(tmp_path / "head")
        (folder / "config.json").write_text(json.dumps(HEAD | {"dflash_config": without(BLOCK, "causal_head")}))
        capsys.readouterr()
        assert not load.load_head(folder, target).config.causal
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert "causal_head" in err and "bidirectional" in err

    def test_is_causal_at_the_top_is_not_the_flag(self):
        assert self.read(is_causal=False).causal

    @pytest.mark.parametrize("value", ["false", 1, []])
    def test_a_flag_that_is_no_flag(self, value):
        assert "causal_head" in line_of(self.read, {"causal_head": value})

    def test_block_size_of_dflash_config_comes_first(self):
        assert self.read().block_size == 5
        assert self.read({"block_size": 7}).block_size == 7
        assert block_files.config(without(HEAD, "block_size")).block_size == 16
        assert self.read({"block_size": 7}).depth == 6

    @pytest.mark.parametrize("size", [0, 1, -3, "16"])
    def test_bad_block_sizes(self, size):
        assert "block_size" in line_of(self.read, {"block_size": size})

    def test_default_taps(self):
        assert default_taps(36, 5) == (1, 9, 17, 25, 33)
        assert default_taps(48, 5) == (1, 12, 23, 34, 45)
        assert default_taps(40, 5) == (1, 10, 19, 28, 37)
        assert default_taps(36, 1) == (18,)
        config = self.read(drop=["target_layer_ids"], num_target_layers=36, num_hidden_layers=5)
        assert config.tap_layers == (1, 9, 17, 25, 33)

    @pytest.mark.parametrize(
        ("taps", "word"), [([0, 3], "0..2"), ([-1], "0..2"), ([1, 1], "twice"), ([], "at least one"), (1, "list"),
                           (["1"], "list"), ([True], "list")]
    )  # fmt: skip
    def test_bad_taps(self, taps, word):
        line = line_of(self.read, {"target_layer_ids": taps})
        assert "target_layer_ids" in line and word in line and "h/config.json" in line

    @pytest.mark.parametrize("mask", [96, -1, None, "95", True, 3.0])
    def test_bad_mask_ids(self, mask):
        line = line_of(self.read, {"mask_token_id": mask})
        assert "mask_token_id" in line and str(mask) in line

    def test_no_mask_id(self):
        assert "mask_token_id" in line_of(self.read, drop=["mask_token_id"])

    def test_a_target_is_no_head(self):
        assert "dflash_config" in line_of(families.of_config, DENSE, "t/config.json")

    def test_an_adapter_is_refused(self):
        assert "target_hidden_size is 64" in line_of(self.read, {"target_hidden_size": 64})
        assert self.read({"target_hidden_size": 32}).hidden_size == 32

    @pytest.mark.parametrize("changes", [{"num_key_value_heads": 3}, {"head_dim": 7}, {"num_target_layers": None}])
    def test_bad_sizes(self, changes):
        assert next(iter(changes)) in line_of(self.read, **changes)

    def test_there_and_back(self):
        config = self.read({"block_size": 7}, dtype="bfloat16")
        assert block_files.config(config.to_hf()) == config


class TestHeads:
    def test_a_fitting_head_says_nothing(self, tmp_path, target, capsys):
        head = load.load_head(make_head(tmp_path / "h"), target)
        assert capsys.readouterr().err == ""
        assert head.draft.depth == 4
        assert head.metadata == {}

    @pytest.mark.parametrize(
        ("key", "ours", "theirs"), [("hidden_size", 64, 32), ("vocab_size", 128, 96), ("num_target_layers", 4, 3)]
    )
    def test_a_head_of_another_target_names_both_sizes(self, tmp_path, target, key, ours, theirs):
        line = line_of(load.load_head, make_head(tmp_path / "h", **{key: ours}), target)
        assert key in line and str(ours) in line and str(theirs) in line and str(TARGET) in line

    @pytest.mark.parametrize("names", [["lm_head.weight"], ["embed_tokens.weight", "lm_head.weight"]])
    def test_borrowed_tensors_are_ignored_with_one_line(self, tmp_path, target, names, capsys):
        plain = load.load_head(make_head(tmp_path / "a"), target).params
        extra = [(name, np.ones((96, 32), np.float32)) for name in names]
        full = load.load_head(make_head(tmp_path / "b", extra), target).params
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and all(name in err for name in names) and "ignored" in err
        assert plain.keys() == full.keys()
        assert np.array_equal(plain["fc"], full["fc"])

    def test_unknown_tensors_are_listed(self, tmp_path, target, capsys):
        load.load_head(make_head(tmp_path / "h", [("markov.weight", np.ones(3, np.float32))]), target)
        assert "1 tensor is not used: markov.weight" in capsys.readouterr().err

    @pytest.mark.parametrize("name", ["d2t", "markov_head.markov_w1.weight"])
    def test_tensors_of_another_family_are_refused(self, tmp_path, target, name):
        line = line_of(load.load_head, make_head(tmp_path / "h", [(name, np.ones(3, np.float32))]), target)
        assert name in line and "not supported yet" in line

    def test_a_missing_tensor_is_named(self, tmp_path, target):
        path = make_head(tmp_path / "h") / "model.safetensors"
        save_file({n: x for n, x in load_file(path).items() if n != "fc.weight"}, path)
        assert "fc.weight" in line_of(load.load_head, tmp_path / "h", target)

    def test_another_count_of_taps_than_fc_has(self, tmp_path, target):
        folder = make_head(tmp_path / "h")
        (folder / "config.json").write_text(json.dumps(HEAD | {"dflash_config": BLOCK | {"target_layer_ids": [1]}}))
        line = line_of(load.load_head, folder, target)
        assert "fc.weight" in line and "[32, 64]" in line and "[32, 32]" in line

    def test_fingerprints(self, tmp_path, target, capsys):
        load.load_head(make_head(tmp_path / "a", meta={"target_fingerprint": target.fingerprint}), target)
        assert capsys.readouterr().err == ""
        head = load.load_head(
            make_head(tmp_path / "b", meta={"target_fingerprint": "0123abcd", "thinking": True}), target
        )
        err = capsys.readouterr().err
        assert err.count("\n") == 1 and "0123abcd" in err and target.fingerprint in err
        assert head.metadata["thinking"] is True

    def test_the_fingerprint_sees_the_weights(self, folder, target):
        assert load.load_target(folder).fingerprint == target.fingerprint
        path = max(folder.glob("*.safetensors"))
        tensors = load_file(path)
        name = max(tensors)
        tensors[name] = tensors[name] + np.float32(1e-3)
        save_file(tensors, path, metadata={"format": "pt"})
        assert load.load_target(folder).fingerprint != target.fingerprint

    def test_a_head_runs_in_the_targets_dtype(self, tmp_path):
        target = load.load_target(TARGET, "bfloat16")
        assert load.load_head(make_head(tmp_path / "h"), target).params["fc"].dtype == ml_dtypes.bfloat16

    def test_a_file_is_no_head(self, tmp_path, target):
        assert "folder" in line_of(load.load_head, make_head(tmp_path / "h") / "model.safetensors", target)


class TestDtype:
    def bf16(self, folder, **changes):
        for path in folder.glob("*.safetensors"):
            save_file({n: x.astype(ml_dtypes.bfloat16) for n, x in load_file(path).items()}, path)
        return rewrite(folder, **{"dtype": "bfloat16"} | changes)

    @pytest.mark.parametrize(
        ("option", "wanted"),
        [(None, "bfloat16"), ("float32", "float32"), ("float16", "float16"), ("bfloat16", "bfloat16")],
    )
    def test_default_and_override(self, folder, option, wanted):
        target = load.load_target(self.bf16(folder), option)
        assert target.dtype == wanted
        assert {str(target.params[name].dtype) for name in ("embedding", "norm", "lm_head")} == {wanted}

    def test_the_old_spelling(self, folder):
        (folder / "config.json").write_text(json.dumps(without(DENSE, "dtype") | {"torch_dtype": "float16"}))
        assert load.load_target(folder).dtype == "float16"

    @pytest.mark.parametrize("stored", ["float32", "float16", "bfloat16"])
    def test_a_config_that_names_none_keeps_the_files(self, folder, stored):
        for path in folder.glob("*.safetensors"):
            cast = lambda name, x: x if name == "model.norm.weight" else x.astype(checkpoint.numpy_dtype(stored))
            save_file({name: cast(name, x) for name, x in load_file(path).items()}, path)  # a norm stays f32
        (folder / "config.json").write_text(json.dumps(without(DENSE, "dtype", "torch_dtype")))
        assert load.load_target(folder).dtype == stored
        assert load.load_target(folder, "float32").dtype == "float32"

    @pytest.mark.parametrize("name", ["int8", "fp16", "float64"])
    def test_unknown_ones(self, folder, name):
        line = line_of(load.load_target, folder, name)
        assert repr(name) in line and "bfloat16" in line
        line = line_of(load.load_target, rewrite(folder, dtype=name))
        assert repr(name) in line and "config.json" in line

    def test_float16_that_overflows_is_refused(self, folder):
        for path in folder.glob("*.safetensors"):
            tensors = load_file(path)
            if "model.norm.weight" in tensors:
                tensors["model.norm.weight"][3] = 1e6
                save_file(tensors, path)
        assert load.load_target(folder, "bfloat16").dtype == "bfloat16"
        line = line_of(load.load_target, folder, "float16")
        assert "model.norm.weight" in line and "bfloat16" in line
        for path in folder.glob("*.safetensors"):  # no dtype would help: it is said where they are computed with
            tensors = load_file(path)
            if "model.norm.weight" in tensors:
                tensors["model.norm.weight"][3] = np.nan
                save_file(tensors, path)
        assert load.load_target(folder, "float16").dtype == "float16"


class TestFiles:
    def test_end_tokens_of_both_files(self, folder):
        generation = folder / "generation_config.json"
        for ours, theirs, both in ((7, [9, 3], (3, 7, 9)), ([7, 9], 9, (7, 9)), (None, 4, (4,)), (None, None, ())):
            rewrite(folder, eos_token_id=ours)
            generation.write_text(json.dumps({"eos_token_id": theirs}))
            assert load.load_target(folder).eos == both
        generation.unlink()
        assert load.load_target(rewrite(folder, eos_token_id=5)).eos == (5,)

    def test_the_tokenizers_end_token_counts_too(self, folder):
        (folder / "generation_config.json").write_text('{"eos_token_id": 3}')
        rewrite(folder, eos_token_id=7)
        tokens = {"eos_token": "E", "added_tokens_decoder": {"9": {"content": "E"}}}
        (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
        assert load.load_target(folder).eos == (3, 7, 9)

    def test_end_tokens_that_are_none(self, folder):
        (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
        line = line_of(load.load_target, folder)
        assert "generation_config.json" in line and "</s>" in line

    @pytest.mark.parametrize(
        "name", ["nowhere", "/nowhere/at/all", "./nowhere/x", "~nobody-of-that-name/x", "", "x" * 5000]
    )
    def test_unknown_folders(self, name):
        assert name in line_of(load.load_target, name)

    def test_a_hub_id_that_cannot_be_had(self, monkeypatch):
        import huggingface_hub
        from huggingface_hub.errors import LocalEntryNotFoundError

        asked = []

        def refuse(name, allow_patterns):
            asked.append((name, allow_patterns))
            raise LocalEntryNotFoundError(" \n" if len(asked) > 1 else "no way there\nsecond line")

        monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
        line = line_of(load.load_target, "owner/name")
        assert "owner/name" in line and "no way there" in line and "second" not in line
        assert "owner/name" in line_of(load.load_target, "owner/name")
        assert asked[0][0] == "owner/name"
        assert not any(p.endswith((".py", ".bin", ".pt", "*")) for p in asked[0][1])

    @pytest.mark.parametrize("content", ["{", "", "[1]", "3", b"\xff\xfe", "[" * 100_000])
    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    def test_malformed_json(self, folder, name, content):
        (folder / name).write_bytes(content if isinstance(content, bytes) else content.encode())
        assert str(folder / name) in line_of(load.load_target, folder)

    def test_no_config(self, folder):
        (folder / "config.json").unlink()
        line = line_of(load.load_target, folder)
        assert str(folder / "config.json") in line and "no such file" in line
        assert "; the folder holds " in line
        (folder / "a.gguf").touch()
        assert line_of(load.load_target, folder).endswith("no such file; a.gguf is there: name the file itself")
        (folder / "config.json").mkdir()
        assert str(folder / "config.json") in line_of(load.load_target, folder)

    @pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
    def test_pipes_and_devices_are_not_waited_for(self, folder, name):
        (folder / name).unlink()
        os.mkfifo(folder / name)
        if name == "config.json":
            line = line_of(load.load_target, folder)
            assert str(folder / name) in line and "a pipe; give a regular file" in line
            (folder / name).unlink()
            (folder / name).symlink_to("/dev/zero")
            assert "a device; give a regular file" in line_of(load.load_target, folder)
        else:  # not named by anyone, so it is as if it were not there
            assert load.load_target(folder).eos == load.load_target(TARGET).config.eos_token_ids
        for path in ("/dev/zero", "/dev/null"):
            assert "neither a folder nor a regular file" in line_of(load.load_target, path)

    @pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin", "config.json"])
    def test_a_file_of_a_folder_is_no_target(self, tmp_path, name):
        (tmp_path / name).write_bytes(b"PK\x03\x04")
        line = line_of(load.load_target, tmp_path / name)
        assert name in line and "folder" in line

    def test_a_target_without_tokenizer(self, target):
        assert target.tokenizer is None
        assert "--prompt_ids" in line_of(target.encode_messages, [{"role": "user", "content": "x"}])


@pytest.mark.parametrize("change", [{"layer_types": 3}, {"rope_theta": 10**401}, {"tie_word_embeddings": "no"}])
def test_values_of_a_wrong_type_are_one_line(tmp_path, change):
    source = pathlib.Path(__file__).parent / "fixtures" / "peer_parity" / "dense_causal" / "target"
    folder = tmp_path / "target"
    shutil.copytree(source, folder)
    raw = json.loads((folder / "config.json").read_text()) | change
    (folder / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=r"config\.json") as error:
        load.load_target(folder)
    assert "\n" not in str(error.value)


SCORER = {"version": 1, "kind": "product", "rank": 3}
WHOLE = {name: np.ones((32, 3), np.float32) for name in ("parent", "gate", "child")}
COUNTED = dict.fromkeys(WHOLE) | {
    "next": np.zeros((96, 3), np.int32), "lift": np.ones((96, 3), np.int16), "strength": np.ones(4, np.float32),
}  # fmt: skip


@pytest.mark.parametrize(
    "said, tensors, line",
    [
        ({}, {"gate": None}, "1 tensor is missing: gate"),
        ({"rank": 4}, {}, "has shape [32, 3], but config.json asks for [32, 4]"),
        ({"rank": None}, {}, "rank is None"),
        ({"kind": "swiglu"}, {}, "width is None"),
        ({"kind": "sum"}, {}, "known is version 1, one of product, swiglu, pairs, markov, counts"),
        ({"kind": "pairs"}, {}, "gate is of another kind than pairs"),
        ({"kind": "markov"}, {}, "2 tensors are missing: w1, w2"),
        ({"kind": "counts"}, COUNTED | {"strength": np.ones(9, np.float32)}, "strength has shape [9]"),
        ({"kind": "counts"}, COUNTED | {"next": np.zeros((96, 2), np.int32)}, "next has shape [96, 2]"),
        ({"kind": "counts"}, COUNTED | {"lift": np.zeros((96, 3), np.float32)}, "whole numbers are needed"),
        ({"version": 2}, {}, "version 2"),
        ({"head_fingerprint": "0"}, {}, "the scorer of another head"),
        ({}, {"child": np.ones((32, 3), np.int32)}, "only unquantised floats"),
        ({}, {"child": np.full((32, 3), 1e30, np.float32)}, "does not fit float16"),
        (None, {}, "config.json: no such file"),  # written half: the tensors come first
        ({}, None, "neither model.safetensors"),
    ],
)
def test_a_scorer_that_is_not_whole_is_one_line(tmp_path, said, tensors, line):
    """One that is half there is not passed over: the head would draft worse, and nobody would know why."""
    beside = make_head(tmp_path / "head") / scorer_file.FOLDER
    beside.mkdir()
    if said is not None:
        made_for = {"head_fingerprint": checkpoint.fingerprint([tmp_path / "head" / checkpoint.SINGLE])}
        (beside / "config.json").write_text(json.dumps(SCORER | made_for | said))
    if tensors is not None:
        kept = {name: x for name, x in (WHOLE | tensors).items() if x is not None}
        save_file(kept, beside / checkpoint.SINGLE)
    assert line in line_of(load.load_head, tmp_path / "head", load.load_target(TARGET, "float16"))


def test_a_scorer_is_read_as_it_was_written(tmp_path, target, capsys):
    make_head(tmp_path / "head")
    bare = load.load_head(tmp_path / "head", target)
    for kind in (*scorer.KINDS, "product"):
        inner = 5 * (kind == "swiglu")
        config = dataclasses.replace(bare.config, scorer_rank=3, scorer_width=inner, scorer_kind=kind)
        shapes = scorer.shapes(config, np.float32)
        drawn = tiny.random_like({k: jax.ShapeDtypeStruct(x.shape, np.float32) for k, x in shapes.items()}, 1)
        written = {name: (9 * x).astype(shapes[name].dtype) for name, x in drawn.items()}
        scorer_file.save(tmp_path / "head", written)
        head = load.load_head(tmp_path / "head", target)
        assert head.config == config and head.params["scorer"].keys() == written.keys()
        for name, x in written.items():
            np.testing.assert_array_equal(head.params["scorer"][name], x)
            assert head.params["scorer"][name].dtype == x.dtype
    path = tmp_path / "head" / scorer_file.FOLDER / checkpoint.SINGLE
    assert path.stat().st_mode == path.with_name("config.json").stat().st_mode  # whom the umask lets may read both
    save_file(load_file(path) | {"odd": np.zeros(2, np.float32)}, path)
    load.load_head(tmp_path / "head", target)
    assert "1 tensor is not used: odd" in capsys.readouterr().err
