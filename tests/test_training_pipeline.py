"""The stages one after the other: what each leaves, what is refused, where the same command goes on."""

import dataclasses
import json
import shutil
import sys
import types
from xml.etree import ElementTree

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import (
    HEAD,
    MODEL,
    RUN,
    WIDTH,
    example,
    questions,
    random_examples,
    recipe,
    target,
)

from jetspec_jax.config import ConfigError
from jetspec_jax.files import load
from jetspec_jax.training import (
    export,
    files,
    gather,
    journal,
    loop,
    manifest,
    pipeline,
    plot,
    regenerate,
    settings,
    step,
)
from jetspec_jax.training.data import answers as answer_store
from jetspec_jax.training.data import packing, rows
from jetspec_jax.training.objectives import block as learns


@pytest.fixture
def resumed(finished, tmp_path, loaded):
    """A copy of the finished work folder, and its settings."""
    return shutil.copytree(finished[0], tmp_path / "run"), finished[1]


def test_the_pipeline_leaves_a_head_that_loads_bit_equal(finished, resumed):
    work, given = resumed
    config, log = settings.make(given, "c"), finished[2]
    assert any(line.startswith("decode: acceptance length") for line in log)
    folder = work / "head"
    head = load.load_head(folder, target())
    assert head.config == dataclasses.replace(learns.configure(config, MODEL), dtype="bfloat16")
    assert head.metadata["target_fingerprint"] == "f00d" and head.metadata["training_length"] < WIDTH
    card, stored = (folder / "README.md").read_text(), answer_store.read(work / "answers")
    assert "12 prompts, of which 0 were left out; 12 greedy answers" in card and "Unfinished" not in card
    longest = max(e.tokens.size for e in answer_store.learnable(stored, [""] * 12, False)[0])
    assert f"| longest row in training | {head.metadata['training_length']} tokens |" in card
    assert head.metadata["training_length"] == longest
    assert "| s | 11 |" in card and "license: unknown" in card and "11 examples with" in card and "1 held out" in card
    assert "causal, mask token 3" in card and "held-out, budget 4" in card
    scale = jnp.asarray(np.load(work / "scale.npy"))
    with loop.Checkpoints(work / "train") as checkpoints:
        like = jax.jit(lambda p: step.init(recipe(), p))(target().params)
        params = (checkpoints.restore_best(like.params, print) or pytest.fail("no best head"))[0]
    wanted = jax.tree.map(lambda x: x.astype(jnp.float32), learns.fold(params, scale, "bfloat16"))
    jax.tree.map(np.testing.assert_array_equal, head.params, wanted)

    log = []
    assert pipeline.run(config, work, log.append)
    assert not any("batch 1/" in line for line in log) and any("going on at step 2" in line for line in log)
    jax.tree.map(np.testing.assert_array_equal, load.load_head(folder, target()).params, head.params)


def test_another_recipe_than_the_checkpoints_is_refused_by_name(resumed):
    work, given = resumed
    go = lambda **change: pipeline.run(settings.make(given | change, "c"), work, lambda line: None)
    for change, line in [
        ({"tap_layers": (1, 0)}, "--config.tap_layers=1,0: "),
        (
            {"causal": False},
            "--config.causal=false: .*/train was made with true; use a new --workdir, or the old value",
        ),
        ({"head_layers": 2}, "--config.head_layers=2: .* was made with 1;"),
        ({"steps": 3}, "--config.steps=3: .* was made with 2;"),
        ({"peak_lr": 0.5, "seed": 7}, "--config.seed=7: .* was made with 0;"),
        ({"heldout": 0}, "--config.heldout=0: .* was made with 1;"),
    ]:
        with pytest.raises(ConfigError, match=line):
            go(**change)
    assert go(log_every=2, save_every=1, features="online", accumulate=2, decode_prompts="")

    # Without its scale the run cannot go on; another one would move its coordinates.
    scale = work / "scale.npy"
    scale.write_bytes(scale.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"scale.npy: cannot be read .*; copy it back, or use a new --workdir"):
        go()


def test_the_card_says_what_was_measured_at_which_step(finished):
    folder = finished[0]
    card, records = (folder / "head" / "README.md").read_text(), journal.read(folder / "train")
    saved = json.loads((folder / "head" / "jetspec.json").read_text())["training_steps"]
    rows = {r["step"]: r["heldout"]["acceptance"]["4"] for r in records}
    assert rows.keys() == {1, 2} and f"| **{saved} (this head)** |" in card
    for line in card.splitlines():
        if line.startswith(("| 1 |", "| 2 |", "| **")):
            number = int(line.split("|")[1].strip(" *").split()[0])
            assert line.endswith(f" {rows[number]:.2f} |")
    decoded = json.loads((folder / "decode.json").read_text())
    assert f"acceptance length {decoded['acceptance_length']:.2f}" in card and "prompts of `prompts.jsonl`" in card
    assert f"{jax.device_count()} x {jax.devices()[0].device_kind}" in card and "budget 4" in card
    assert "called from Python" in card and "not evaluated" not in card
    assert (folder / "head" / "curves.svg").read_text().count("<polyline") == 4


def test_the_card_of_other_runs(monkeypatch):
    record = lambda at, **more: {"step": at, "loss": 1.0, "run_length": 1.5, "first_hit": 0.5} | more
    judged = lambda at: record(at, heldout={"acceptance": {"16": float(at)}})
    table = export._figures([judged(i) if i % 5 == 0 else record(i) for i in range(1, 101)], 55)
    assert "| **55 (this head)** | 1.000 | 1.50 | 0.50 | 55.00 |" in table and "| 100 |" in table
    assert len(table.splitlines()) <= 2 + 9 and "not evaluated" not in table
    late = export._figures([judged(5), record(7)], 7)
    assert "Step 7, the one of this head, was not evaluated on held-out prompts." in late and "| 7 |" not in late
    assert "evals.acceptance" in export._acceptance(None)
    monkeypatch.setattr(sys, "argv", ["/x/train.py", "--config", "a b.py", "--config.steps=3"])
    assert export._command().startswith("`python train.py --config 'a b.py' --config.steps=3`")
    sources = {"gsm8k_train": 1, "math_train": 1, "mbpp_rest": 1, "code_numpy": 1, "rows": 1}
    text = export._sources({"sources": {name: {"examples": 1, "tokens": 2} for name in sources}})
    for licence in ("GSM8K, train split: MIT", "MATH, train split: MIT", "CC-BY-4.0", "numpy (BSD-3-Clause)"):
        assert licence in text


def test_all_answers_to_a_prompt_are_on_one_side_and_sampled_ones_are_not_judged():
    known = [example(f"p/{i}{mark}", range(5), 2) for i in range(20) for mark in ("", "#sample1", "#sample2")]
    config = settings.make(RUN | {"data": "d", "heldout": 2}, "c")
    train, judged = gather._split(known, config, print)
    prompts = lambda found: {e.identity.partition("#")[0] for e in found}
    assert len(judged) == 2 and not any("#" in e.identity for e in judged)
    assert len(train) == 18 * 3 and not prompts(train) & prompts(judged)


def test_fewer_held_out_prompts_than_asked_for_are_said(loaded, tmp_path):
    log, given = [], RUN | {"data": str(questions(tmp_path)), "until": "answers", "heldout": 5}
    assert pipeline.run(settings.make(given, "c"), tmp_path / "run", log.append)
    assert "data: 1 of 12 prompts held out, not 5: a tenth is the most (heldout)" in log


def test_time_is_up_in_training(loaded, tmp_path, monkeypatch):
    """No head of random parameters; one of an unfinished run says so."""
    given = RUN | {"data": str(questions(tmp_path)), "target": "t", "eval_sequences": 0}
    config, log, real = settings.make(given, "c"), [], loop.train
    go = lambda steps: monkeypatch.setattr(
        loop, "train", lambda *a: real(*a[:-2], iter([True] * steps + [False] * 9).__next__, a[-1])
    )
    go(0)
    assert not pipeline.run(config, tmp_path / "run", log.append)
    assert "train: time is up at step 0 of 2; the same command goes on" in log
    assert not (tmp_path / "run" / "head").exists() and not any((tmp_path / "run" / "train" / "states").glob("[0-9]*"))
    go(1)
    assert not pipeline.run(config, tmp_path / "run", log.append)
    assert log[-1].endswith("head (step 1; unfinished: the run is at step 1 of 2)")
    card = tmp_path / "run" / "head" / "README.md"
    assert "**Unfinished: the run is at step 1 of 2.**" in card.read_text()
    go(1)
    assert pipeline.run(config, tmp_path / "run", log.append) and "Unfinished" not in card.read_text()


def test_every_setting_is_free_or_of_the_recipe():
    assert set(settings.KINDS) >= manifest.FREE
    config = settings.make({"mask_token_id": 3, "steps": 1, "data": "d"}, "c")
    packed = packing.pack(random_examples(3), WIDTH)
    values = manifest.recipe(config, target(), HEAD, 1, packed)
    assert set(settings.KINDS) <= set(values) | manifest.FREE
    relearnt = packed._replace(learnt=~packed.learnt)
    assert manifest.recipe(config, target(), HEAD, 1, relearnt)["data_digest"] != values["data_digest"]


def test_a_manifest_that_is_no_object_matches_nothing(tmp_path):
    (tmp_path / "settings.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"no readable manifest .no JSON object.; fix"):
        manifest.sign(tmp_path / "settings.json", {"a": 1}, "fix", True)


def test_outputs_of_other_settings_are_refused_by_name(loaded, tmp_path, monkeypatch):
    found = [{"id": f"s/{i}", "messages": [{"role": "user", "content": t}]} for i, t in enumerate(["ab", "cde"])]
    monkeypatch.setattr(gather.pool, "build", lambda *given: (found, {}))
    own = [found[0] | {"id": "own/0"}]
    monkeypatch.setattr(gather.own_prompts, "write", lambda *given: own)
    monkeypatch.setattr(gather.pool, "Forbidden", lambda folder: types.SimpleNamespace(matches=None, digest="abc"))
    given = RUN | {"prompt_sets": str(tmp_path), "target": "t", "until": "answers", "own_prompts": 1}
    go = lambda **change: pipeline.run(settings.make(given | change, "c"), tmp_path / "run", lambda line: None)
    assert go()
    with pytest.raises(ConfigError, match=r"--config.code_prompts=5: .*; remove .*/pool.jsonl to make it anew, use a"):
        go(code_prompts=5)
    for key in ("own_prompts", "max_prompts"):
        with pytest.raises(ConfigError, match=rf"--config.{key}=2: .*/answers was made with .*; remove .*/answers"):
            go(**{key: 2})
    (tmp_path / "run" / "pool.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"--config.code_prompts=5: .*; remove .*/answers"):
        go(code_prompts=5)  # the pool is made anew, its answers are stale
    part = next((tmp_path / "run" / "answers").glob("part-*"))
    part.write_bytes(part.read_bytes()[:-30])
    with pytest.raises(ConfigError, match=r"part-00000.npz: not a whole file of answers \(.*\); remove it"):
        answer_store.read(part.parent)
    part.unlink()
    assert go(code_prompts=5)


def test_own_prompts_keep_off_the_benchmarks_of_prompt_sets_beside_other_rows(loaded, tmp_path, monkeypatch):
    asked = []
    known = lambda folder: types.SimpleNamespace(matches=folder, digest=folder.name)
    monkeypatch.setattr(gather.pool, "Forbidden", known)
    monkeypatch.setattr(gather.own_prompts, "write", lambda *given: asked.append(given[5]) or [])
    given = RUN | {"data": str(questions(tmp_path)), "target": "t", "until": "answers", "own_prompts": 1}
    log = []
    for name, change in (("with", {"prompt_sets": str(tmp_path)}), ("without", {})):
        assert pipeline.run(settings.make(given | change, "c"), tmp_path / name, log.append)
    assert asked[0] == tmp_path and asked[1] is None
    assert sum(line.startswith("own prompts: not compared") for line in log) == 1
    # What was kept off no benchmark is not taken for what was; the other way round it is good enough.
    with pytest.raises(ConfigError, match=r"benchmarks=.*made with none; remove .*/own.jsonl"):
        pipeline.run(settings.make(given | {"prompt_sets": str(tmp_path)}, "c"), tmp_path / "without", log.append)
    assert pipeline.run(settings.make(given, "c"), tmp_path / "with", log.append)


def test_what_cannot_work_is_refused_before_anything_slow(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(gather, "source", lambda *given: pytest.fail("too late"))
    config = lambda **change: settings.make(RUN | {"data": str(questions(tmp_path)), "target": "t"} | change, "c")
    head = learns.configure(config(), target().config)
    other = types.SimpleNamespace(config=dataclasses.replace(head, max_positions=9, block_size=5), params={})
    monkeypatch.setattr(load, "load_head", lambda source, target: other)
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"messages": [{"role": "user", "content": "a" * 40}]}) + "\n")
    for change, message in [
        ({"init_head": "h"}, "--config.init_head=h: its block_size is 5, this run's 4; make them equal"),
        ({"decode_prompts": str(tmp_path)}, "--config.decode_prompts=.*: a file is needed, this is a folder"),
        ({"decode_prompts": str(long)}, "--config.decode_prompts=.*: no prompt of the file is short enough"),
    ]:
        with pytest.raises(ConfigError, match=message):
            pipeline.run(config(**change), tmp_path / "run", lambda line: None)
    with files.alone(tmp_path / "run"), pytest.raises(ConfigError, match="run: another command is at work in it"):
        pipeline.run(config(), tmp_path / "run", lambda line: None)


@pytest.mark.slow
def test_the_answers_as_a_data_set_of_their_own(loaded, tmp_path):
    """Regenerated rows, features in files, going on from a head that is there."""
    data = questions(tmp_path)
    first = settings.make(RUN | {"data": str(data), "eval_sequences": 0}, "c")
    assert pipeline.run(first, tmp_path / "run", lambda line: None)
    folder, regenerated, log = tmp_path / "run" / "head", tmp_path / "answers.jsonl", []
    asked = regenerate.ask(target(), rows.read(data), 9, None)
    regenerate.write_rows(regenerated, target(), asked, answer_store.read(tmp_path / "run" / "answers"))
    change = {"data": str(regenerated), "answers": "corpus", "features": "disk", "init_head": str(folder), "steps": 1}
    assert pipeline.run(settings.make(RUN | change | {"target": "t"}, "c"), tmp_path / "second", log.append)
    assert any(line.startswith("data: 12 rows read, 12 used") for line in log)
    assert "12 rows with their own answers" in (tmp_path / "second" / "head" / "README.md").read_text()
    assert (tmp_path / "second" / "features" / "manifest.json").is_file()


def test_the_curves_of_a_run_are_drawn(tmp_path, capsys):
    record = {"step": 1, "loss": 2.0, "run_length": 1.5, "heldout": {"acceptance": {"16": 2.0, "32": 2.25}}}
    lines = [record, {"step": 3, "loss": 0.5, "run_length": 2.0}, record | {"step": 4, "loss": 0.25}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines) + '{"step": 5, "lo')
    assert plot.main([str(tmp_path)]) == 0 and capsys.readouterr().out == f"{tmp_path / 'curves.svg'}\n"
    picture = ElementTree.parse(tmp_path / "curves.svg").getroot()
    drawn = [e.get("points").split() for e in picture.iter() if e.tag.endswith("polyline")]
    assert [len(points) for points in drawn] == [3, 3, 2, 2]  # loss, chain, two budgets
    across, down = zip(*(map(float, p.split(",")) for p in drawn[0]), strict=True)
    assert across[0] < across[1] < across[2] and down[0] < down[1] < down[2]  # the loss falls: further down
    assert plot.main([str(tmp_path / "none")]) == 1 and plot.main([]) == 2
    assert plot.main([str(tmp_path), str(tmp_path / "no" / "x.svg")]) == 1


def test_a_work_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    config = settings.make({"mask_token_id": 3, "steps": 1, "data": str(tmp_path)}, "c")
    with pytest.raises(ConfigError, match=r"--workdir=.*/file/y: cannot be made \(Not a directory\); give a folder"):
        pipeline.run(config, tmp_path / "file" / "y", print)
