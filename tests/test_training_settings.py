"""Settings of a run: ranges, the command line, the committed configurations."""

import dataclasses
import math
import pathlib
import subprocess
import sys

import pytest
from small import MODEL as SMALL

from jetspec_jax.config import ConfigError
from jetspec_jax.training import (
    objective,
    options,
    pipeline,
    settings,
)
from jetspec_jax.training.objectives import block as learns
from jetspec_jax.training.objectives import dspark, eagle3

ROOT = pathlib.Path(__file__).parent.parent


LEAST = {"mask_token_id": 3, "steps": 10, "data": "x"}


MODEL = dataclasses.replace(SMALL, num_layers=4)


WRONG = [
    ({"mask_token_id": -1}, "mask_token_id is missing: give the id"),
    ({"mask_token_id": -7}, "mask_token_id=-7: negative"),
    ({"block_size": 1}, "block_size=1: give a number >= 2"),
    ({"sequence_length": 8}, "block_size=16: longer than sequence_length=8"),
    ({"markov_head": "rnn"}, "markov_head=rnn: choose one of vanilla, gated"),
    ({"markov_rank": -1}, "markov_rank=-1: give a number >= 0"),
    ({"confidence": -1}, "confidence=-1.0: give a number >= 0"),
    ({"unroll": 0}, "unroll=0: give a number >= 1"),
    ({"unroll_decay": 0}, "unroll_decay=0.0: give a number > 0 and <= 1"),
    ({"dtype": "bfloat61"}, "dtype=bfloat61: choose one of .*did you mean bfloat16"),
    ({"clip": 0}, "clip=0.0: give a number > 0"),
    ({"peak_lr": math.nan}, "peak_lr=nan: a finite number is needed"),
    ({"gamma": math.inf}, "gamma=inf: a finite number"),
    ({"anchors": 2.5}, "anchors=2.5: a whole number is needed"),
    ({"anchors": True}, "anchors=True: a whole number"),
    ({"causal": 1}, "causal=1: true or false is needed"),
    ({"tap_layers": "1,2"}, "tap_layers='1,2': a list of whole numbers"),
    ({"beta2": 1.0}, "beta2=1.0: give a number >= 0 and <= 0.99999"),
    ({"forward_kl": 0.0}, "are all 0; give one a share"),
    ({"steps": 0}, "give one of the two"),
    ({"batch": 8, "accumulate": 3}, "accumulate=3: it must divide batch=8"),
    ({"eval_budgets": (1, 16)}, "give numbers in 2..1024"),
    ({"answers": "corpus", "data": ""}, "give the rows with"),
    ({"steps": 10**12}, "steps=1000000000000: give a number >= 0 and <= 2147483647"),
    ({"seed": 10**5000}, "seed=a number of thousands of digits: give a number"),
    ({"anchors": [10**5000]}, "anchors=.*: a whole number is needed"),
    ({"peak_lr": 10**400}, "peak_lr=1000.*: a finite number"),
    ({"tap_layers": (1, 10**5000)}, "tap_layers=.*: a list of whole numbers"),
    ({"export": "x" * 10**5}, r"export='xxx.{40,60}: choose one of best, last"),
    ({"data": str(ROOT), "decode_prompts": "x\ny"}, r"decode_prompts='x\\ny': no such file"),
    ({"untill": "pool"}, "untill: no such key; did you mean until"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[text[:24] for _, text in WRONG])
def test_wrong_settings_are_named(change, message):
    with pytest.raises(ConfigError, match=message) as error:
        settings.make(LEAST | change, "c.py").check_files()
    assert "\n" not in str(error.value) and len(str(error.value)) < 400


@pytest.mark.parametrize("path", ["x" * 10**5, "\ud800", "a\0b"], ids=["long", "surrogate", "null"])
@pytest.mark.parametrize("key", ["data", "prompt_sets", "decode_prompts"])
def test_names_that_no_system_takes(tmp_path, key, path):
    with pytest.raises(ConfigError, match=f"--config.{key}=.*no such file") as error:
        settings.make(LEAST | {"data": str(tmp_path), key: path}, "c.py").check_files()
    str(error.value).encode("utf-8")


def test_taps_and_the_mask_must_fit_the_target():
    make = lambda **change: settings.make(LEAST | {"tap_layers": (0, 2), "sequence_length": 64} | change, "c.py")

    def fit(**change):
        config = make(**change)
        config.check_target(MODEL, (1, 2))
        return learns.configure(config, MODEL)

    head = fit()
    assert head.tap_layers == (0, 2) and head.vocab_size == 48 and head.causal
    for change, message in [
        ({"mask_token_id": 48}, "mask_token_id=48: the target has the embedding rows 0..47"),
        ({"mask_token_id": 2}, "mask_token_id=2: an end token of the target"),
        ({"tap_layers": (0, 4)}, r"tap_layers=\(0, 4\): does not fit the target .*0-based, 0..3"),
        ({"tap_layers": (1, 1)}, "a layer is listed twice"),
        ({"sequence_length": 513}, "the target has 512 positions"),
    ]:
        with pytest.raises(ConfigError, match=message):
            fit(**change)


def test_keys_of_another_family_are_refused():
    """They would do nothing; an EAGLE-3 head has no mask, and drafts no more tokens than there are."""
    for family, change, message in [
        ("eagle3", {"block_size": 4}, "block_size=4: eagle3 heads have no use for it"),
        ("eagle3", {"mask_token_id": 3}, "mask_token_id=3: eagle3 heads have no use"),
        ("eagle3", {"gamma": 7.0}, "gamma=7.0: eagle3 heads have no use"),
        ("eagle3", {"causal": False}, "causal=false: eagle3 heads have no use"),
        ("eagle3", {"head_layers": 2}, "head_layers=2: eagle3 heads have no use"),
        ("eagle3", {"taps": 2, "tap_layers": ()}, "taps=2: eagle3 heads have no use"),
        ("eagle3", {"draft_vocab": 49}, "draft_vocab=49: the target has 48 tokens"),
        ("eagle3", {"tap_layers": (0, 4)}, r"tap_layers=\(0, 4\): does not fit the target .*0-based, 0..3"),
        ("jetspec", {"mask_token_id": 3, "unroll": 3}, "unroll=3: jetspec heads have no use for it; leave it out"),
        ("jetspec", {"mask_token_id": 3, "unroll_decay": 0.5}, "unroll_decay=0.5: jetspec heads have no use"),
        ("dflash", {"mask_token_id": 3, "causal": False, "markov_rank": 8}, "markov_rank=8: dflash heads have no use"),
        ("eagle3", {"markov_head": "gated"}, "markov_head=gated: eagle3 heads have no use"),
        ("jetspec", {"mask_token_id": 3, "confidence": 0.0}, "confidence=0.0: jetspec heads have no use"),
        ("dspark", {"mask_token_id": 3, "causal": False}, "causal=false: dspark heads have no use for it"),
        ("dspark", {"mask_token_id": 3, "unroll": 3}, "unroll=3: dspark heads have no use"),
        ("dspark", {"mask_token_id": 48}, "mask_token_id=48: the target has the embedding rows 0..47"),
        ("dspark", {"mask_token_id": 3, "tap_layers": (0, 4)}, r"tap_layers=\(0, 4\): does not fit the target"),
        (
            "dspark",
            {"mask_token_id": 3, "markov_rank": 0, "markov_head": "gated"},
            "markov_head=gated: markov_rank=0 is no Markov head",
        ),
        ("", {"mask_token_id": 3, "draft_vocab": 5}, "draft_vocab=5: jetspec heads have no use for it"),
    ]:
        config = settings.make({"family": family, "steps": 1, "data": "x", "tap_layers": (0, 2)} | change, "c.py")
        with pytest.raises(ConfigError, match=message):
            objective.load(objective.module(config.family_name)).configure(config, MODEL)
    config = settings.make({"family": "eagle3", "steps": 1, "data": "x"}, "c.py")
    config.check_target(MODEL, (1, 2))
    with pytest.raises(ConfigError, match="tap_layers=the published ones: does not fit the target"):
        eagle3.configure(config, SMALL)
    deep = eagle3.configure(config, dataclasses.replace(SMALL, num_layers=30))
    assert deep.tap_layers == (1, 14, 26) and deep.draft_vocab_size == 48 and not deep.reduced


def test_what_a_dspark_head_has_is_told_by_its_settings():
    usual = {"family": "dspark", "steps": 1, "data": "x", "mask_token_id": 3, "block_size": 7, "tap_layers": (0, 2)}

    def made(**change):
        c = dspark.configure(settings.make(usual | change, "c.py"), MODEL)
        return c.depth, c.causal, c.markov_rank, c.markov, c.confidence, c.confidence_markov, c.num_anchors

    assert made(anchors=5) == (7, False, 256, "vanilla", True, True, 5)
    assert made(markov_rank=8, markov_head="gated", confidence=0.0) == (7, False, 8, "gated", False, False, 256)
    assert made(markov_rank=0, confidence=0.5) == (7, False, 0, "vanilla", True, False, 256)


def test_missing_paths_are_noticed_at_once(tmp_path):
    for change, message in [
        ({"data": ""}, "--config.data is missing"),
        ({"data": str(tmp_path / "rows")}, r"--config.data=.*rows: no such file or folder"),
        ({"data": "", "prompt_sets": str(tmp_path / "x")}, "prompt_sets=.*x: no such file"),
        ({"data": str(tmp_path), "decode_prompts": "nowhere.jsonl"}, "decode_prompts=nowhere.jsonl: no such file"),
    ]:
        with pytest.raises(ConfigError, match=message):
            settings.make(LEAST | change, "c.py").check_files()


def test_command_line(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("def get_config():\n  return dict(mask_token_id=3, steps=1, data='d', gamma=7)\n")
    base = ["--config", str(path), f"--workdir={tmp_path}"]
    config, workdir = options.parse([*base, "--config.steps=7", "--config.causal", "false", "--config.tap_layers=1,9"])
    assert (config.steps, config.causal, config.gamma, config.tap_layers) == (7, False, 7.0, (1, 9))
    assert workdir == tmp_path
    for wrong, message in [
        ("--config.stepz=3", r"did you mean --config\.steps"),
        ("--config.steps=x", "steps=x: a whole number is needed"),
        ("--config.peak_lr=nan", "a finite number"),
        ("--config.causal=maybe", "true or false"),
        ("--wordkir=x", "did you mean --workdir"),
        ("--config.steps", "a value is missing"),
        ("steps=3", "unexpected argument"),
    ]:
        with pytest.raises(ConfigError, match=message):
            options.parse([*base, wrong])
    for text, message in [
        ("x = 1", "no function get_config"),
        ("get_config = 3", "no function get_config"),
        ("def get_config(): return 7", "returns int; a ConfigDict or dict"),
        ("def get_config(): return {}['a']", "get_config.. fails .KeyError"),
        ("def get_config(a): return {}", "get_config.. fails .TypeError"),
        ("raise SystemExit(3)", "not a configuration file"),
        ("def get_config(:", "not a configuration file .SyntaxError"),
        ("def get_config(): return {'stepz': 3}", "c.py: stepz: no such key; did you mean steps"),
    ]:
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as error:
            options.parse(base)
        assert "\n" not in str(error.value)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="a folder is needed"):
        options.parse([*base[:2], f"--workdir={tmp_path / 'file'}"])


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.py")), ids=lambda p: p.stem)
def test_committed_configurations_are_valid(path):
    config = settings.make(options.load(path) | {"data": "rows.jsonl", "prompt_sets": ""}, str(path))
    assert config.steps or config.epochs
    text = path.read_text()
    assert f"--config configs/{path.name}" in text and ("Run " in text or "Not run" in text)


def cli(*argv):
    return subprocess.run(
        [sys.executable, "train.py", *argv], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_mistakes_on_the_command_line_are_one_line(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("def get_config():\n  return dict(mask_token_id=3, steps=1)\n")
    base = [f"--config={path}", f"--workdir={tmp_path / 'w'}"]
    for more, message in [
        ([], "--config.data is missing"),
        (["--config.data=nowhere"], "--config.data=nowhere: no such file or folder"),
        (["--config.dtaa=x"], "--config.dtaa: no such option; did you mean --config.data?"),
    ]:
        got = cli(*base, *more)
        assert got.returncode == 2 and got.stdout == ""
        assert got.stderr == f"train.py: {message}" + got.stderr[len(f"train.py: {message}") :]
        assert got.stderr.count("\n") == 1 and "Traceback" not in got.stderr
    assert not (tmp_path / "w").exists()
    data = tmp_path / "d.jsonl"
    data.write_text('{"text": "x"}\n')
    got = cli(*base, f"--config.data={data}", "--config.target=nowhere")
    assert got.returncode == 1 and got.stderr.startswith("train.py: nowhere: no such file or folder")
    assert got.stderr.count("\n") == 1


def test_a_work_folder_that_no_system_takes(tmp_path):
    (tmp_path / "c.py").write_text(f"def get_config():\n    return {LEAST | {'data': str(tmp_path)}}\n")
    config, workdir = options.parse(["--config", str(tmp_path / "c.py"), "--workdir", "x" * 9000])
    with pytest.raises(ConfigError, match=r"^--workdir=xxx.*: cannot be made \(File name too long\)") as error:
        pipeline.run(config, workdir, print)
    assert len(str(error.value)) < 200
