"""Published checkpoints, in and out: what is missing, superfluous, misplaced or broken is said by name."""

import dataclasses
import json
import os
import pathlib
import shutil

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import tiny
from safetensors.numpy import load_file, save_file

from jetspec_jax.config import ConfigError, HeadConfig, ModelConfig
from jetspec_jax.drafts import block, block_files
from jetspec_jax.fields import shown
from jetspec_jax.files import checkpoint, load, text
from jetspec_jax.models import names as published_names
from jetspec_jax.models import qwen3

REFERENCE = pathlib.Path(__file__).parent / "fixtures" / "reference"
KINDS = ("qwen3_untied", "qwen3_tied", "qwen3_moe", "llama")
HEAD = HeadConfig(
    vocab_size=96, hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=40,
    norm_eps=1e-6, rope_theta=1e6, max_positions=256, num_target_layers=3, block_size=5, mask_token_id=95,
    tap_layers=(0, 2), causal=True,
)  # fmt: skip


def tensors_of(folder: pathlib.Path) -> dict[str, np.ndarray]:
    return {name: x for path in folder.glob("*.safetensors") for name, x in load_file(path).items()}


@pytest.fixture
def single(tmp_path):
    """A one-file copy of the untied reference checkpoint."""
    return copy(tmp_path / "single", tensors_of(REFERENCE / "qwen3_untied"))


def copy(folder: pathlib.Path, tensors: dict[str, np.ndarray], **changes) -> pathlib.Path:
    folder.mkdir(exist_ok=True)
    raw = json.loads((REFERENCE / "qwen3_untied" / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.fixture
def sharded(tmp_path):
    """The same in exactly three shards with an index."""
    folder, tensors = tmp_path / "sharded", tensors_of(REFERENCE / "qwen3_untied")
    folder.mkdir()
    shutil.copy(REFERENCE / "qwen3_untied" / "config.json", folder)
    names, weights = sorted(tensors), {}
    for i in range(3):
        file = f"model-{i + 1:05}-of-00003.safetensors"
        save_file({n: tensors[n] for n in names[i::3]}, folder / file)
        weights |= dict.fromkeys(names[i::3], file)
    (folder / checkpoint.INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weights}))
    return folder


def refused(folder, *words) -> str:
    """The one line that a target is refused with."""
    with pytest.raises(ConfigError) as error:
        load.load_target(folder)
    line = str(error.value)
    assert "\n" not in line
    assert all(word in line for word in words), line
    return line


def same(a, b) -> None:
    assert jax.tree.structure(a) == jax.tree.structure(b)
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert x.dtype == y.dtype
        assert x.shape == y.shape
        assert np.asarray(x).tobytes() == np.asarray(y).tobytes()


class TestTensors:
    def test_missing_ones_are_all_named(self, single):
        tensors = tensors_of(single)
        gone = ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"]
        copy(single, {n: x for n, x in tensors.items() if n not in gone})
        refused(single, str(single), "2 tensors are missing", *gone)

    def test_an_extra_one_is_warned_of_and_changes_nothing(self, single, capsys):
        before = load.load_target(single).params
        assert capsys.readouterr().err == ""
        copy(single, tensors_of(single) | {"model.layers.0.surprise.weight": np.ones(3, np.float32)})
        same(before, load.load_target(single).params)
        err = capsys.readouterr().err
        assert err.count("\n") == 1
        assert "1 tensor is not used: model.layers.0.surprise.weight" in err

    def test_stored_rotary_frequencies_are_no_surprise(self, single, capsys):
        extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(8, np.float32)}
        copy(single, tensors_of(single) | extra)
        load.load_target(single)
        assert capsys.readouterr().err == ""

    def test_a_renamed_layer_is_missing(self, single):
        renamed = {n.replace("layers.2.", "layers.3."): x for n, x in tensors_of(single).items()}
        refused(copy(single, renamed), "11 tensors are missing", "model.layers.2.input_layernorm.weight", "3 more")

    @pytest.mark.parametrize("name", ["model.layers.0.self_attn.k_proj.weight", "model.norm.weight", "lm_head.weight"])
    def test_a_wrong_shape_names_both(self, single, name):
        tensors = tensors_of(single)
        wanted = list(tensors[name].shape)
        tensors[name] = np.ascontiguousarray(tensors[name][:-1])
        refused(copy(single, tensors), name, str(wanted), str([wanted[0] - 1, *wanted[1:]]))

    def test_a_transposed_matrix_is_refused(self, single):
        tensors, name = tensors_of(single), "model.layers.0.mlp.down_proj.weight"
        tensors[name] = np.ascontiguousarray(tensors[name].T)
        refused(copy(single, tensors), name, "[48, 32]", "[32, 48]")

    def test_quantised_numbers_are_refused(self, single):
        tensors, name = tensors_of(single), "model.layers.0.mlp.down_proj.weight"
        tensors[name] = tensors[name].astype(np.int8)
        refused(copy(single, tensors), name, "I8", "unquantised")


class TestTie:
    def without_lm_head(self, folder):
        return {n: x for n, x in tensors_of(folder).items() if n != "lm_head.weight"}

    def test_tied_without_lm_head(self, single):
        target = load.load_target(copy(single, self.without_lm_head(single), tie_word_embeddings=True))
        assert "lm_head" not in target.params
        hidden = jnp.ones((1, 32))
        assert np.allclose(target.model.logits(target.params, hidden), target.params["embedding"].sum(1), atol=1e-4)

    def test_untied_without_lm_head_is_refused_with_a_hint(self, single):
        refused(copy(single, self.without_lm_head(single)), "1 tensor is missing", "lm_head.weight", "tie_word_embed")

    def test_tied_with_lm_head_uses_the_embedding_and_says_so(self, single, capsys):
        copy(single, tensors_of(single), tie_word_embeddings=True)
        assert "lm_head" not in load.load_target(single).params
        err = capsys.readouterr().err
        assert "lm_head.weight" in err and "tie_word_embeddings is true" in err


class TestShards:
    def test_three_shards_equal_a_single_file(self, sharded, single):
        same(load.load_target(sharded).params, load.load_target(single).params)

    def test_a_missing_shard_is_named_before_anything_is_read(self, sharded, monkeypatch):
        monkeypatch.setattr(checkpoint, "safe_open", None)
        gone = sharded / "model-00002-of-00003.safetensors"
        gone.unlink()
        refused(sharded, str(gone), "no such file")

    @pytest.mark.parametrize(
        "file",
        [
            "../single/model.safetensors",
            "{root}/single/model.safetensors",
            "sub/x.safetensors",
            "config.json",
            "..",
            3,
            None,
        ],
    )
    def test_an_index_cannot_leave_the_folder(self, sharded, single, tmp_path, monkeypatch, file):
        monkeypatch.setattr(checkpoint, "safe_open", None)
        (sharded / "sub").mkdir()
        shutil.copy(single / "model.safetensors", sharded / "sub" / "x.safetensors")
        index = json.loads((sharded / checkpoint.INDEX).read_text())
        file = file.format(root=tmp_path) if isinstance(file, str) else file
        index["weight_map"]["model.norm.weight"] = file
        (sharded / checkpoint.INDEX).write_text(json.dumps(index))
        refused(sharded, checkpoint.INDEX, shown(file), "of this folder")

    def test_an_index_that_names_the_wrong_shard(self, sharded):
        index = json.loads((sharded / checkpoint.INDEX).read_text())
        weights = index["weight_map"]
        other = next(f for f in set(weights.values()) if f != weights["lm_head.weight"])
        weights["lm_head.weight"] = other
        (sharded / checkpoint.INDEX).write_text(json.dumps(index))
        refused(sharded, str(sharded / other), "lm_head.weight")

    @pytest.mark.parametrize("content", ["{}", '{"weight_map": {}}', '{"weight_map": ["a"]}', "[]", "{", "\udcff"])
    def test_a_broken_index_is_named(self, sharded, content):
        (sharded / checkpoint.INDEX).write_bytes(content.encode("utf-8", "surrogateescape"))
        refused(sharded, checkpoint.INDEX)

    def test_the_file_that_the_index_names_wins(self, sharded):
        """A shard with a second, stale copy of a tensor."""
        weights = json.loads((sharded / checkpoint.INDEX).read_text())["weight_map"]
        wanted = load.load_target(sharded).params
        for other in set(weights.values()) - {weights["lm_head.weight"]}:
            tensors = load_file(sharded / other)
            save_file(tensors | {"lm_head.weight": np.zeros((96, 32), np.float32)}, sharded / other)
        same(wanted, load.load_target(sharded).params)


class TestBrokenFiles:
    @pytest.mark.parametrize("cut", [0, 4, 200, -1])
    def test_truncated_safetensors_are_named(self, single, cut):
        path = single / "model.safetensors"
        path.write_bytes(path.read_bytes()[:cut])
        refused(single, str(path), "not a complete safetensors file")

    @pytest.mark.parametrize("name", ["pytorch_model.bin", "training_state.pt", "model.pth", "model.ckpt"])
    def test_pickles_are_refused_by_name_and_not_opened(self, single, name):
        (single / "model.safetensors").unlink()
        (single / name).write_bytes(b"\x80\x04cos\nsystem\n(S'touch pwned'\ntR.")
        (single / name).chmod(0)
        refused(single, name, "pickle", "safetensors")

    def test_a_pickle_beside_safetensors_is_left_alone(self, single):
        (single / "training_state.pt").write_bytes(b"no pickle at all")
        load.load_target(single)

    @pytest.mark.parametrize(
        "instead, words",
        [(None, ""), ("model.Q4_0.gguf", "model.Q4_0.gguf is there: name the file itself"),
         ("model-00001-of-00002.safetensors", "but no index that says what it holds")],
    )  # fmt: skip
    def test_no_weights_of_the_usual_names(self, single, instead, words):
        (single / "model.safetensors").unlink()
        if instead:
            (single / instead).write_bytes(b"")
        refused(single, str(single), checkpoint.SINGLE, checkpoint.INDEX, words)

    def test_a_stale_index_beside_a_whole_file(self, single):
        index = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
        (single / checkpoint.INDEX).write_text(json.dumps(index))
        refused(single, "no such file", "model.safetensors is there: delete the index if it is a stale one")

    def test_packed_experts_are_said(self, tmp_path):
        folder = pathlib.Path(shutil.copytree(REFERENCE / "qwen3_moe", tmp_path / "moe"))
        path = folder / "model.safetensors"
        apart = {n: x for n, x in load_file(path).items() if ".mlp.experts." not in n}
        packed = {f"model.layers.{i}.mlp.experts.gate_up_proj": np.zeros((8, 32, 48), np.float32) for i in (0, 2)}
        save_file(apart | packed, path)
        refused(folder, "tensors are missing", "packed into model.layers.0.mlp.experts.gate_up_proj", "expert apart")

    def test_tensors_of_other_names_are_said(self, single):
        tensors = tensors_of(single)
        copy(single, {n.replace("mlp", "ffn"): x for n, x in tensors.items()})
        refused(single, "9 tensors are missing", "there are others instead: model.layers.0.ffn.down_proj.weight")
        copy(single, {f"language_model.{n}": x for n, x in tensors.items()})
        refused(single, "begins with model.layers.", "there are: language_model.lm_head.weight")

    def test_a_file_that_may_not_be_read(self, single, monkeypatch):
        def deny(path, *_):
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(text.os, "open", deny)
        with pytest.raises(ConfigError, match=r"model\.safetensors: cannot be read \(Permission denied\)"):
            checkpoint.Folder(single)


def target_in(dtype, kind):
    raw = json.loads((REFERENCE / kind / "config.json").read_text())
    config = ModelConfig.from_hf(raw)
    params = tiny.random_params(qwen3.build(config, dtype)[1], seed=3, scale=0.3)
    return config, raw | {"dtype": str(np.dtype(dtype))}, params


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16], ids=["f32", "bf16"])
class TestExport:
    @pytest.mark.parametrize("shard", [5 << 30, 20_000], ids=["one file", "shards"])
    @pytest.mark.parametrize("kind", KINDS)
    def test_a_target_comes_back_bit_for_bit(self, tmp_path, kind, dtype, shard, capsys):
        config, raw, params = target_in(dtype, kind)
        tiny.save_target(tmp_path / "out", config, raw, params, max_shard_bytes=shard)
        files = sorted((tmp_path / "out").glob("*.safetensors"))
        assert (len(files) > 2) == (shard == 20_000)
        again = load.load_target(tmp_path / "out")
        assert again.dtype == np.dtype(dtype).name
        same(params, again.params)
        assert capsys.readouterr().err == ""
        names = {n: x.shape for n, x in tensors_of(REFERENCE / kind).items()}
        assert names == {n: x.shape for n, x in tensors_of(tmp_path / "out").items()}

    def test_a_head_comes_back_bit_for_bit(self, tmp_path, dtype):
        params = tiny.random_params(block.build(HEAD, dtype)[1], seed=4)
        checkpoint.save_head(tmp_path / "head", HEAD, params, {"thinking": False})
        raw = json.loads((tmp_path / "head" / "config.json").read_text())
        assert raw["dtype"] == np.dtype(dtype).name
        again = block_files.config(raw, "head")
        assert dataclasses.replace(again, dtype=None) == HEAD
        read = checkpoint.assemble(
            checkpoint.Folder(tmp_path / "head"), block_files.names(again), block.build(again, dtype)[1], "head"
        )
        same(params, read)
        assert json.loads((tmp_path / "head" / "jetspec.json").read_text()) == {"thinking": False}


@pytest.mark.parametrize("kind", KINDS)
def test_reference_files_survive_import_and_export(tmp_path, kind):
    """Names, layout and bits are those that transformers wrote."""
    target = load.load_target(REFERENCE / kind)
    tiny.save_target(tmp_path / "out", target.config, {"any": 1}, target.params)
    theirs, ours = tensors_of(REFERENCE / kind), tensors_of(tmp_path / "out")
    assert theirs.keys() == ours.keys()
    for name in theirs:
        assert theirs[name].dtype == ours[name].dtype
        assert theirs[name].tobytes() == ours[name].tobytes()


@pytest.mark.parametrize("kind", KINDS)
def test_any_part_of_a_parameter_is_that_part_of_the_whole(kind):
    """What a device reads of its own; no row is read that has nothing to do with the part."""
    folder = checkpoint.Folder(REFERENCE / kind)
    fusions = published_names.of_target(load.load_target(REFERENCE / kind).config)
    draw, seen = np.random.default_rng(0), []

    def read(name, index):
        seen.append(folder.part(name, index))
        return seen[-1]

    for fusion in jax.tree.leaves(fusions, is_leaf=lambda x: isinstance(x, published_names.Fusion)):
        whole = fusion.join(folder.read)
        for _ in range(8):
            low = [int(draw.integers(0, n)) for n in whole.shape]
            cut = tuple(slice(a, int(draw.integers(a, n)) + 1) for a, n in zip(low, whole.shape, strict=True))
            np.testing.assert_array_equal(fusion.part(read, cut), whole[cut])
        # A device's part is split along one axis, which is none within a head: then what is read is the part.
        for axis, size in enumerate(whole.shape):
            cut = tuple(slice(size // 2, size) if i == axis else slice(0, n) for i, n in enumerate(whole.shape))
            seen.clear()
            part = fusion.part(read, cut)
            assert sum(x.size for x in seen) == part.size or (len(fusion.shapes) == 3 and axis >= 2)


class TestSave:
    def save(self, folder, seed):
        params = tiny.random_params(block.build(HEAD, np.float32)[1], seed=seed)
        checkpoint.save_head(folder, HEAD, params, {"seed": seed})
        return {n: x.tobytes() for n, x in tensors_of(folder).items()}

    @pytest.mark.parametrize("where", ["save_file", "shutil.rmtree", "rename", "write_text"])
    def test_an_interrupted_save_leaves_the_old_folder(self, tmp_path, monkeypatch, where):
        folder = tmp_path / "head"
        old = self.save(folder, 1)
        files = sorted(p.name for p in folder.iterdir())
        rename = pathlib.Path.rename

        def fail(*args, **kwargs):
            raise KeyboardInterrupt

        def fail_second(path, to):
            return rename(path, to) if pathlib.Path(to) != folder or path.name.endswith(".old") else fail()

        with monkeypatch.context() as patch:
            if where == "save_file":
                patch.setattr(checkpoint, "save_file", fail)
            elif where == "rename":
                patch.setattr(pathlib.Path, "rename", fail_second)
            elif where == "write_text":
                patch.setattr(pathlib.Path, "write_text", fail)
            else:
                patch.setattr(checkpoint.shutil, "rmtree", fail)
            with pytest.raises(KeyboardInterrupt):
                self.save(folder, 2)
        kept = {n: x.tobytes() for n, x in tensors_of(folder).items()}
        if where != "shutil.rmtree":  # there the new one was complete
            assert kept == old
            assert list(tmp_path.iterdir()) == [folder]
        assert sorted(p.name for p in folder.iterdir()) == files

    def test_saving_again_replaces_every_shard_and_keeps_other_files(self, tmp_path):
        config, raw, params = target_in(np.float32, "qwen3_tied")
        folder = tmp_path / "out"
        tiny.save_target(folder, config, raw, params, max_shard_bytes=20_000)
        (folder / "tokenizer.json").write_text("{}")
        (folder / "notes").mkdir()
        (folder / "notes" / "a.txt").write_text("kept")
        tiny.save_target(folder, config, raw, params)
        assert sorted(p.name for p in folder.iterdir()) == [
            "config.json",
            "model.safetensors",
            "notes",
            "tokenizer.json",
        ]
        assert (folder / "notes" / "a.txt").read_text() == "kept"
        assert list(tmp_path.iterdir()) == [folder]

    def test_a_folder_with_other_things_is_not_replaced(self, tmp_path):
        (tmp_path / "mine").mkdir()
        (tmp_path / "mine" / "thesis.txt").write_text("years of work")
        with pytest.raises(ConfigError, match="something else"):
            self.save(tmp_path / "mine", 1)
        assert [p.name for p in (tmp_path / "mine").iterdir()] == ["thesis.txt"]
        with pytest.raises(ConfigError, match="something else"):
            self.save(tmp_path / "mine" / "thesis.txt", 1)

    def test_an_empty_or_linked_folder_is_filled(self, tmp_path):
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        self.save(tmp_path / "link", 1)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "real" / "config.json").is_file()

    @pytest.mark.parametrize(
        "umask, folder, file", [(0o022, 0o755, 0o644), (0o077, 0o700, 0o600), (0o002, 0o775, 0o664)]
    )
    def test_the_users_umask_says_who_may_read_it(self, tmp_path, umask, folder, file):
        before = os.umask(umask)
        try:
            self.save(tmp_path / "head", 1)
        finally:
            os.umask(before)
        modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "head").iterdir()}
        assert set(modes.values()) == {file} and len(modes) == 3, modes
        assert (tmp_path / "head").stat().st_mode & 0o777 == folder


def published(**changes) -> HeadConfig:
    """The Qwen3-8B head."""
    values = {
        "vocab_size": 151936, "hidden_size": 4096, "num_layers": 5, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128,
        "intermediate_size": 12288, "norm_eps": 1e-6, "rope_theta": 1e6, "max_positions": 40960,
        "num_target_layers": 36, "block_size": 16, "mask_token_id": 151669, "tap_layers": (1, 9, 17, 25, 33),
        "causal": True,
    }  # fmt: skip
    return HeadConfig(**values | changes)


class TestPublishedHeads:
    def count(self, config) -> int:
        return sum(int(np.prod(x.shape)) for x in jax.tree.leaves(block.build(config, ml_dtypes.bfloat16)[1]))

    def test_parameters_of_the_8b_head(self):
        assert self.count(published()) == 1_048_626_432

    def test_parameters_of_the_30b_a3b_head(self):
        changes = {"hidden_size": 2048, "num_layers": 8, "num_kv_heads": 4, "intermediate_size": 6144}
        taps = (1, 12, 23, 34, 45)
        assert self.count(published(**changes, num_target_layers=48, tap_layers=taps)) == 473_995_264

    def test_names_of_the_8b_head(self):
        leaf = lambda x: isinstance(x, published_names.Fusion)
        fusions = jax.tree.leaves(block_files.names(published()), is_leaf=leaf)
        names = [name for fusion in fusions for name in fusion.names()]
        layer = ["input_layernorm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"]
        layer += [f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj", "q_norm", "k_norm")]
        wanted = {"fc.weight", "hidden_norm.weight", "norm.weight"}
        wanted |= {f"layers.{i}.{x}.weight" for i in range(5) for x in layer}
        assert len(names) == 58
        assert set(names) == wanted

    def test_shapes_of_the_8b_head(self):
        """A source with only the table's shapes is accepted, so that every shape is checked without its memory."""
        asked = []

        class Table:
            def __init__(self):
                self.shapes = {"fc.weight": (4096, 20480), "hidden_norm.weight": (4096,), "norm.weight": (4096,)}

            def read(self, name):
                asked.append(name)
                raise KeyboardInterrupt

        table = Table()
        for i in range(5):
            p = f"layers.{i}."
            table.shapes |= dict.fromkeys(
                (p + "input_layernorm.weight", p + "post_attention_layernorm.weight"), (4096,)
            )
            table.shapes |= dict.fromkeys((p + "self_attn.q_proj.weight", p + "self_attn.o_proj.weight"), (4096, 4096))
            table.shapes |= dict.fromkeys((p + "self_attn.k_proj.weight", p + "self_attn.v_proj.weight"), (1024, 4096))
            table.shapes |= dict.fromkeys((p + "self_attn.q_norm.weight", p + "self_attn.k_norm.weight"), (128,))
            table.shapes |= dict.fromkeys((p + "mlp.gate_proj.weight", p + "mlp.up_proj.weight"), (12288, 4096))
            table.shapes[p + "mlp.down_proj.weight"] = (4096, 12288)
        config, seen = published(), []
        shapes = block.build(config, ml_dtypes.bfloat16)[1]
        with pytest.raises(KeyboardInterrupt):
            checkpoint.assemble(table, block_files.names(config), shapes, "head", seen.append)
        assert len(asked) == 1  # all shapes were right
        assert seen == []
