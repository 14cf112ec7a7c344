"""GGUF files written with the `gguf` package, against a Hugging Face folder of the same weights."""

import hashlib
import json
import pathlib
import shutil
import struct
import subprocess
import sys

import gguf
import ggufs
import jax
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file, save_file

from jetspec_jax.config import ConfigError
from jetspec_jax.files import cache_folder, demo, load, tokenizer
from jetspec_jax.files.gguf_file import GGUF


def refused(path, *words) -> str:
    with pytest.raises(ConfigError) as error:
        load.load_target(path)
    line = str(error.value)
    assert "\n" not in line and str(path) in line
    assert all(word in line for word in words), line
    return line


@pytest.mark.parametrize("source", [ggufs.LLAMA, ggufs.QWEN], ids=["llama tied", "qwen3 untied"])
@pytest.mark.parametrize("alignment", [None, 64])
def test_a_file_equals_the_folder_of_the_same_weights(tmp_path, source, alignment, capsys):
    ours = load.load_target(ggufs.write(tmp_path / "m.gguf", source, alignment=alignment))
    theirs = load.load_target(source)
    assert capsys.readouterr().err == ""
    assert ours.dtype == "float32"
    for a, b in zip(jax.tree.leaves(ours.params), jax.tree.leaves(theirs.params), strict=True):
        assert np.array_equal(a, b)
    for name in ours.config.__dataclass_fields__:
        if name not in ("dtype", "eos_token_ids", "norm_eps"):
            assert getattr(ours.config, name) == getattr(theirs.config, name), name
    assert np.isclose(ours.config.norm_eps, theirs.config.norm_eps, rtol=1e-6)  # stored as f32
    assert ours.tokenizer is None


def test_the_permutation_is_not_its_own_inverse(tmp_path):
    """Else the comparison above would not see it left out or applied twice."""
    x = np.arange(64 * 2, dtype=np.float32).reshape(64, 2)
    assert not np.array_equal(ggufs.permuted(x, 4), x)
    assert not np.array_equal(ggufs.permuted(ggufs.permuted(x, 4), 4), x)


@pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_1, Kind.BF16, Kind.F16])
def test_quantised_tensors_are_those_of_their_dequantised_folder(tmp_path, kind):
    block = lambda name: Kind.F32 if "norm" in name or "down_proj" in name else kind  # rows of 48 are no 32-blocks
    file = ggufs.write(tmp_path / "m.gguf", quantised=block)
    folder = pathlib.Path(shutil.copytree(ggufs.LLAMA, tmp_path / "folder"))
    tensors = load_file(ggufs.LLAMA / "model.safetensors")
    for name, x in tensors.items():
        if block(name) != Kind.F32:
            heads = ggufs.HEADS.get(name.split(".")[-2])
            stored = gguf.quants.quantize(x, kind)  # rows are quantised alone, so their order does not matter
            tensors[name] = gguf.quants.dequantize(stored, kind).reshape(x.shape)
            assert heads is None or x.shape[0] == heads * 16
            assert not np.array_equal(tensors[name], x)
    save_file(tensors, folder / "model.safetensors")
    ours, theirs = load.load_target(file).params, load.load_target(folder).params
    for a, b in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert np.array_equal(a, b)


def test_contents_are_those_of_the_packages_reader(tmp_path):
    fields = [("a.text", "é世😀"), ("a.number", 7), ("a.real", 0.5)]
    path = ggufs.write(tmp_path / "m.gguf", vocabulary=ggufs.byte_level_vocabulary(), fields=fields)
    ours, theirs = GGUF(path), gguf.GGUFReader(path)
    for key, field in theirs.fields.items():
        if not key.startswith("GGUF."):
            assert ours.fields.raw[key] == field.contents()
    assert len(ours.shapes) == len(theirs.tensors)


@pytest.mark.parametrize("source", [ggufs.LLAMA, ggufs.QWEN], ids=["llama", "qwen3"])
def test_a_rope_factor_without_a_type_is_linear(tmp_path, source):
    """As llama.cpp reads it; a type of "none" or a factor of 0 or 1 scales nothing."""
    arch = json.loads((source / "config.json").read_text())["model_type"]
    name = f"{arch}.rope.scaling"
    refused(ggufs.write(tmp_path / "m.gguf", source, fields=[(f"{name}.factor", 4.0)]), "RoPE scaling 'linear'")
    none = (f"{name}.type", "none")
    for fields in ([(f"{name}.factor", 1.0)], [(f"{name}.factor", 0.0)], [none, (f"{name}.factor", 4.0)]):
        assert load.load_target(ggufs.write(tmp_path / "m.gguf", source, fields=fields)).config.rope_scaling is None


class TestTokenizer:
    def read(self, tmp_path, **options):
        return load.load_target(ggufs.write(tmp_path / "m.gguf", vocabulary=ggufs.byte_level_vocabulary(), **options))

    def test_ids_text_and_template(self, tmp_path):
        target = self.read(tmp_path)
        tok, vocabulary = target.tokenizer, ggufs.byte_level_vocabulary()
        ids = tok.encode(" hello é12<|im_end|>")
        assert [vocabulary[i] for i in ids] == ["Ġhello", "Ġ", "Ã©", "1", "2", "<|im_end|>"]
        assert tok.decode(ids) == " hello é12"
        assert tok.encode("世😀 x\n") and tok.decode(tok.encode("世😀 x\n")) == "世😀 x\n"
        assert tok.encode_chat([{"role": "user", "content": "hello"}]) == [1, *tok.encode("hello"), 2]
        assert tok.eos == (2,)

    def test_end_tokens(self, tmp_path):
        assert self.read(tmp_path).eos == (0, 2)  # <|im_end|>, which the file names, and <|endoftext|>

    @pytest.mark.parametrize("key", ["eot", "eom"])
    @pytest.mark.parametrize("kinds", [True, False])
    def test_the_end_of_a_turn_has_a_key_of_its_own(self, tmp_path, key, kinds):
        """Whatever the token is and whatever its type: here a plain letter."""
        end = ggufs.byte_level_vocabulary().index("Z")
        target = self.read(tmp_path, fields=[(f"tokenizer.ggml.{key}_token_id", end)], kinds=kinds)
        assert end in target.eos and 2 in target.eos
        assert target.tokenizer.decode([end, 4]) == target.tokenizer.decode([4])

    @pytest.mark.parametrize("kind", [1, 3, 4])
    def test_end_marks_end_a_turn_whatever_type_they_have(self, tmp_path, kind):
        types = ggufs.SPECIAL | {"<|im_end|>": kind, "<|endoftext|>": kind}
        target = self.read(tmp_path, types=types, eos=ggufs.byte_level_vocabulary().index("Z"))
        assert {0, 2} <= set(target.eos)
        ids = target.tokenizer.encode("he<|im_end|>")
        assert ids[-1] == 2 and target.tokenizer.decode(ids) == "he"

    def test_a_begin_token_where_the_file_asks_for_one(self, tmp_path):
        fields = [("tokenizer.ggml.bos_token_id", 0)]
        for asked, first in ((True, [0]), (False, [])):
            tok = self.read(tmp_path, fields=[*fields, ("tokenizer.ggml.add_bos_token", asked)]).tokenizer
            plain = tok.encode("hello")
            assert tok.encode("hello", begin=True) == first + plain
            assert tok.encode_chat([{"role": "user", "content": "hello"}]) == [1, *plain, 2]

    def test_user_defined_tokens_are_matched_whole_and_shown(self, tmp_path):
        tok = self.read(tmp_path).tokenizer
        assert tok.encode("a<think>")[-1] == 3
        assert len(tok.encode("a<think>")) == 2
        assert tok.decode(tok.encode("a<think>b")) == "a<think>b"

    def test_a_file_without_token_types(self, tmp_path):
        target = self.read(tmp_path, kinds=False)
        assert target.eos == (2,)
        assert target.tokenizer.decode(target.tokenizer.encode("hello")) == "hello"

    @pytest.mark.parametrize("pre", ["smollm", "gpt-2", "qwen2"])
    def test_against_a_tokenizer_folder(self, tmp_path, pre):
        """The same tokenizer, saved as a folder, gives the same ids."""
        ours = self.read(tmp_path, fields=[("tokenizer.ggml.pre", pre)]).tokenizer
        ours._inner.save_pretrained(tmp_path / "folder")
        theirs = tokenizer.from_folder(tmp_path / "folder")
        for text in ("hello 123 hello\n\n  don't", "é e\u0301 世<think>😀<|im_end|>"):
            assert ours.encode(text) == theirs.encode(text)
            assert ours.decode(ours.encode(text)) == theirs.decode(theirs.encode(text))
        assert len(ours.encode("12")) == (1 if pre == "gpt-2" else 2)  # there is a merge, but digits stand alone
        assert (ours.encode("e\u0301") == ours.encode("é")) == (pre == "qwen2")  # which composes characters first

    @pytest.mark.parametrize(
        ("options", "word"),
        [
            ({"fields": [("tokenizer.ggml.pre", "martian")]}, "martian"),
            ({"merges": ["q unknowntoken"]}, "tokenizer.ggml.merges"),
            ({"merges": ["nospace"]}, "tokenizer.ggml.merges"),
        ],
    )
    def test_what_cannot_be_read_is_said(self, tmp_path, options, word):
        target = self.read(tmp_path, **options)
        with pytest.raises(ConfigError, match=word) as error:
            _ = target.tokenizer
        assert "\n" not in str(error.value) and str(tmp_path / "m.gguf") in str(error.value)


class TestRefusals:
    @pytest.mark.parametrize(
        "content", [b"", b"GG", b"GGUF", b"not a gguf file at all" * 9, b"GGUF\x09\0\0\0" + bytes(64)]
    )
    def test_not_a_gguf_file(self, tmp_path, content):
        (tmp_path / "m.gguf").write_bytes(content)
        refused(tmp_path / "m.gguf", "GGUF")

    def test_a_file_cut_anywhere(self, tmp_path):
        whole = ggufs.write(tmp_path / "m.gguf", vocabulary=ggufs.byte_level_vocabulary()).read_bytes()
        path = tmp_path / "cut.gguf"
        for size in [*range(0, 400, 7), *range(400, len(whole) - 32, len(whole) // 60), len(whole) - 40]:
            path.write_bytes(whole[:size])
            refused(path, "not a complete GGUF file")

    @pytest.mark.parametrize("axes", [0, 5, 2**32 - 1])
    def test_a_tensor_of_no_axes_or_too_many(self, tmp_path, axes):
        name, kind = b"general.architecture", b"llama"
        text = lambda x: struct.pack("<Q", len(x)) + x
        head = b"GGUF" + struct.pack("<IQQ", 3, 1, 1) + text(name) + struct.pack("<I", 8) + text(kind)
        (tmp_path / "m.gguf").write_bytes(head + text(b"x") + struct.pack("<I", axes) + bytes(64))
        refused(tmp_path / "m.gguf", f"x has {axes} axes")

    def test_a_file_with_one_byte_changed_never_ends_in_a_traceback(self, tmp_path):
        whole = ggufs.write(tmp_path / "m.gguf", vocabulary=ggufs.byte_level_vocabulary()).read_bytes()
        path, rng, failed = tmp_path / "odd.gguf", np.random.default_rng(0), 0
        for at in rng.integers(4, 1500, 150):
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x80]) + whole[at + 1 :])
            try:
                GGUF(path).config()
            except ConfigError as error:
                assert "\n" not in str(error)
                failed += 1
        assert failed > 10

    @pytest.mark.parametrize(
        ("field", "words"),
        [
            (("general.architecture", "mamba"), None),
            (("llama.rope.scaling.type", "yarn"), ("yarn",)),
            (("llama.rope.scale_linear", 4.0), ("linear",)),
            (("llama.attention.sliding_window", 64), ("sliding",)),
            (("split.count", 3), ("3 parts",)),
        ],
    )
    def test_what_would_be_computed_wrongly(self, tmp_path, field, words):
        if words is None:
            path = tmp_path / "m.gguf"
            writer = gguf.GGUFWriter(path, "mamba")
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.close()
            refused(path, "mamba", "llama", "qwen3")
        else:
            refused(ggufs.write(tmp_path / "m.gguf", fields=[field]), *words)

    def test_rope_factors_in_a_tensor(self, tmp_path):
        refused(ggufs.write(tmp_path / "m.gguf", extra=[("rope_freqs.weight", np.ones(8, np.float32))]), "llama3")

    def test_biases(self, tmp_path):
        refused(ggufs.write(tmp_path / "m.gguf", extra=[("blk.0.attn_q.bias", np.ones(64, np.float32))]), "bias")

    def test_a_missing_number(self, tmp_path):
        writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        refused(tmp_path / "m.gguf", "llama.attention.head_count", "None")

    def test_a_type_without_a_decoder(self, tmp_path):
        """Not every type of the format has one in the package."""
        path = ggufs.write(tmp_path / "m.gguf")
        file = GGUF(path)
        name = "model.layers.0.self_attn.v_proj.weight"
        _, offset, _ = file._blocks[name]
        file._blocks[name] = Kind.I8, offset, (32, 32)
        with pytest.raises(ConfigError, match="I8"):
            file.read(name)


def real_file() -> pathlib.Path:
    return cache_folder.path() / pathlib.PurePosixPath(demo.MEMBER).name


@pytest.mark.slow
@pytest.mark.skipif(not real_file().is_file(), reason="the demo target is not in the cache")
def test_the_demo_target():
    path = real_file()
    assert hashlib.sha256(path.read_bytes()).hexdigest() == demo.GGUF_SHA256
    file = GGUF(path)
    assert len(file.shapes) == 272
    tok = tokenizer.from_gguf(file)
    ids = tok.encode_chat([{"role": "user", "content": "Why is the sky blue? 2024 é世😀"}])
    assert "Why is the sky blue? 2024 é世😀" in tok.decode(ids)
    assert tokenizer.end_tokens(file, 49152) == (0, 2)


@pytest.mark.slow
@pytest.mark.skipif(not real_file().is_file(), reason="the demo target is not in the cache")
def test_the_demo_target_opens_quickly():
    """In a process of its own, for types are not checked at run time there."""
    code = "import pathlib, sys, time; from jetspec_jax.files.gguf_file import GGUF; import gguf; "
    code += "begin = time.perf_counter(); "
    code += "GGUF(pathlib.Path(sys.argv[1])); print(time.perf_counter() - begin)"
    root = pathlib.Path(__file__).parent.parent
    out = subprocess.run([sys.executable, "-c", code, str(real_file())], cwd=root, capture_output=True, check=True)
    assert float(out.stdout) < 1.0  # 0.1 s; one array for each string would take seconds
