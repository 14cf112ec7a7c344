"""A training run from end to end: answers, features in files, the loop and its checkpoints, evaluation, export."""

import contextlib
import dataclasses
import json
import logging
import os
import pathlib
import signal
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import small
from small import HEAD, MODEL, WIDTH, random_examples, recipe, target

from jetspec_jax import speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.drafts import block
from jetspec_jax.files import load, pair
from jetspec_jax.layers import masks
from jetspec_jax.models import sharding
from jetspec_jax.training import answers as answer_store
from jetspec_jax.training import (
    evaluation,
    features,
    files,
    journal,
    loop,
    manifest,
    own_prompts,
    packing,
    pipeline,
    plot,
    regenerate,
    rows,
    settings,
    step,
    study,
)
from jetspec_jax.training.batches import Batches
from jetspec_jax.training.evaluation import Drafts

ROOT = pathlib.Path(__file__).parent.parent
ARGS = {"batch": 2, "max_prompt": 9, "max_new": 15, "save_batches": 1}


@pytest.fixture(scope="module")
def answered(tmp_path_factory):
    """Five prompts with the target's greedy answers."""
    folder = tmp_path_factory.mktemp("answers")
    prompts = [[5, 6, 7], [9] * 9, [8, 2], [11, 12, 13, 14], [4, 4]]
    assert regenerate.regenerate(target(), prompts, folder, **ARGS)
    return folder, prompts


@pytest.fixture(scope="module")
def known(answered):
    """The answers as examples."""
    return answer_store.learnable(answer_store.read(answered[0]), [f"p/{i}" for i in range(5)], False)[0]


# ---- answers


def test_answers_are_the_targets_and_come_exactly_once(answered, tmp_path):
    folder, prompts = answered
    found = answer_store.read(folder)
    assert sorted(found.prompt) == [0, 1, 2, 3, 4] and len(list(folder.glob("part-*"))) == 3
    forward = jax.jit(target().model.forward)
    for i, row in zip(found.prompt, found.rows(), strict=True):
        assert row[: len(prompts[i])].tolist() == prompts[i]
        tokens = np.pad(row.astype(np.int32), (0, WIDTH - row.size))[None]
        out = forward(target().params, tokens, jnp.arange(WIDTH)[None], masks.causal(WIDTH))
        best = target().model.logits(target().params, out.hidden)[0].argmax(-1)
        assert best[len(prompts[i]) - 1 : row.size - 1].tolist() == row[len(prompts[i]) :].tolist()

    left = iter([True, True])  # stopped after two batches of three, then called again, and again
    assert not regenerate.regenerate(target(), prompts, tmp_path, **ARGS, on_time=lambda: next(left, False))
    for _ in range(2):
        assert regenerate.regenerate(target(), prompts, tmp_path, **ARGS)
        for a, b in zip(answer_store.read(tmp_path), found, strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ConfigError, match="its answers differ in prompts"):
        regenerate.regenerate(target(), [[7, 7, 7]], tmp_path, **ARGS)


@pytest.mark.slow
def test_a_head_changes_no_answer(answered, tmp_path):
    draft, shapes = block.build(HEAD, jnp.float32)
    head = load.LoadedHead(draft, small.random_params(shapes, 3), HEAD, "h", {}, 0.0, target().fingerprint)
    assert regenerate.regenerate(target(), answered[1], tmp_path, **ARGS, head=head, budget=4)
    for a, b in zip(answer_store.read(tmp_path), answer_store.read(answered[0]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_counts_add_up_and_cut_answers_are_marked(answered, tmp_path):
    values = [{"id": i, "prompt": "ab"} for i in (1, 2, 2)] + [{"prompt": "a" * 40}, {"messages": []}, {"text": "x"}]
    given = [rows.Row(f"f:{i}", str(v.get("id", i + 10)), v) for i, v in enumerate(values)]
    asked = regenerate.ask(target(), given, 9, None)
    assert asked.identities == ["1", "2"] and asked.total == 6
    assert asked.ids[0] == target().tokenizer.encode("@ab$>")
    assert asked.skipped == {
        "the id of an earlier row": 1,
        "a prompt of more than 9 tokens": 1,
        "no messages": 1,
        "plain text, which asks for no answer": 1,
    }
    one = lambda *x: np.array(x)
    found = answer_store.join(
        [np.array([5, 6, 7, 1]), np.array([5, 6, 7, 8])],
        one(0, 1), one(0, 0), one(2, 2), one(4, 4), one(True, False), one(False, False),
    )  # fmt: skip
    counts = regenerate.counts(asked, found)
    assert counts["input"] == counts["answered"] + counts["errors"] + counts["skipped"] == 6
    assert counts["truncated"] == 1 and counts["tokens"] == 4
    regenerate.write_rows(tmp_path / "a.jsonl", target(), asked, found)
    lines = [json.loads(line) for line in (tmp_path / "a.jsonl").read_text().splitlines()]
    assert [(r["id"], r["finish_reason"], r["new_tokens"]) for r in lines] == [("1", "stop", 2), ("2", "length", 2)]
    assert lines[0]["messages"][-1] == {"role": "assistant", "content": target().tokenizer.decode([7])}
    with pytest.raises(ConfigError, match="none of 1 rows can be asked"):
        regenerate.ask(target(), given[-1:], 9, None)


def test_loops_are_cut_to_two_periods():
    body = np.array([9, 8] + [1, 2, 3] * 12, np.uint16)
    one = lambda x: np.array([x])
    make = lambda row, n: answer_store.join([row], one(0), one(0), one(n), one(row.size), one(True), one(False))
    cut = answer_store.without_loops(make(np.concatenate([np.array([7, 7], np.uint16), body]), 2))
    assert cut.tokens.tolist() == [7, 7, 9, 8, 1, 2, 3, 1, 2, 3] and not cut.ended[0]
    assert answer_store.without_loops(make(np.arange(40), 0)).length[0] == 40
    failed = make(np.arange(9), 2)._replace(failed=one(True))
    assert answer_store.learnable(failed, ["a"], True) == ([], {"logits that are not finite": 1})


def test_the_target_writes_prompts_of_its_own(monkeypatch):
    """A target that is told to say four words and stop; repeats and benchmark rows are left out."""
    said = ["one two three four$", "one two three four$", "no$", "a b c d$", "five six seven eight"]
    encode = target().tokenizer.encode

    class Told:
        def __init__(self, target, batch, capacity):
            self.batch = batch

        def __call__(self, prompts, seeds, max_new, temperature):
            texts = [said[i % len(said)] for i in range(self.batch)]
            found = [np.array([*prompts[0], *encode(t)]) for t in texts]
            return found, np.array([1 if t.endswith("$") else 2 for t in texts])

    monkeypatch.setattr(own_prompts, "Answerer", Told)
    got = own_prompts.write(target(), 4, 1.0, 0, 5, lambda text: text == "a b c d")
    assert [r["messages"][0]["content"] for r in got] == ["one two three four"]
    assert own_prompts.opening(target()) == encode("@")


def test_own_prompts_are_asked_beside_the_first_rows(loaded, tmp_path, monkeypatch):
    written = [{"id": f"own/{i}", "prompt": text} for i, text in enumerate(("no", "go"))]
    monkeypatch.setattr(own_prompts, "write", lambda *args: written)
    change = {"data": str(questions(tmp_path)), "target": "t", "until": "answers", "max_prompts": 3, "own_prompts": 2}
    log = []
    assert pipeline.run(settings.make(SMALL | change, "c"), tmp_path / "run", log.append)
    assert json.loads((tmp_path / "run" / "answers.json").read_text())["answered"] == 3 + 2
    assert any("own prompts: not compared with any benchmark" in line for line in log)


# ---- features


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

    with pytest.raises(ConfigError, match="tap_layers differs"):
        features.Stored(tmp_path, target(), packed, (1, 0))
    with pytest.raises(ConfigError, match="data differs"):
        features.write(tmp_path, target(), packed._replace(tokens=packed.tokens + 1), HEAD.tap_layers, 4, "xla")
    shard = tmp_path / "features-00001.safetensors"
    shard.write_bytes(shard.read_bytes()[:-50])
    with pytest.raises(ConfigError, match=r"features-00001.*not a whole file"):
        features.Stored(tmp_path, target(), packed, HEAD.tap_layers)


# ---- the loop


def run(folder, steps, packed, plan=None, data=None, **change):
    r = recipe(steps=steps)
    plan = plan or loop.Plan(log_every=5, eval_every=1000, save_every=1000)
    data = data or Batches(packed, 4, 1, 0)
    scale = jnp.ones(32)
    return loop.train(r, target(), scale, data, None, folder, plan, sharding.make_mesh(1, jax.devices()[:1]), **change)


def test_twenty_steps_are_ten_and_ten_to_the_bit(tmp_path):
    packed = packing.pack(random_examples(30), WIDTH)
    whole = run(tmp_path / "whole", 20, packed)
    clock = iter([True] * 10)
    stopped = run(tmp_path / "halves", 20, packed, on_time=lambda: next(clock, False))
    assert int(stopped.state.step) == 10
    resumed = run(tmp_path / "halves", 20, packed)
    jax.tree.map(np.testing.assert_array_equal, resumed.state, whole.state)
    curves = [[(r["step"], r["loss"]) for r in journal.read(tmp_path / name)] for name in ("whole", "halves")]
    assert curves[0] == curves[1] and len(curves[0]) == 4

    # A damaged checkpoint is passed over with a word; one that is asked for by number must be there.
    newest = tmp_path / "halves" / "states" / "20"
    for path in newest.rglob("*"):
        if path.is_file() and path.stat().st_size > 1000:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    said = []
    again = run(tmp_path / "halves", 20, packed, log=said.append)
    assert not any("bound method" in line or "\n" in line for line in said)
    assert any("checkpoint 20 cannot be read" in line for line in said) and "going on at step 10" in said[-1]
    jax.tree.map(np.testing.assert_array_equal, again.state, whole.state)
    with pytest.raises(ConfigError, match=r"resume_step=7: .* holds \[20, 10\]"):
        run(tmp_path / "halves", 20, packed, loop.Plan(5, 1000, 1000, resume_step=7))


def test_echoes_of_a_damaged_array_are_kept_back_and_nothing_else_is(tmp_path, capsys):
    hook = sys.excepthook
    with loop.Checkpoints(tmp_path):
        sys.excepthook(RuntimeError, RuntimeError("Event loop is closed"), None)
        closed = types.SimpleNamespace(object=None, exc_value=RuntimeError("Event loop is closed"))
        sys.unraisablehook(closed)
        logging.getLogger("asyncio").error("Task exception was never retrieved")
        assert capsys.readouterr().err == ""
        sys.excepthook(RuntimeError, RuntimeError("another"), None)
        assert "another" in capsys.readouterr().err
    assert sys.excepthook is hook and not logging.getLogger("asyncio").filters


def test_a_full_device_is_no_damaged_checkpoint(tmp_path, monkeypatch):
    packed = packing.pack(random_examples(30), WIDTH)
    first = run(tmp_path, 5, packed, loop.Plan(5, 5, 5))

    def full(*given, **named):
        raise ValueError("RESOURCE_EXHAUSTED: out of memory")

    with monkeypatch.context() as patch, pytest.raises(ValueError, match="RESOURCE_EXHAUSTED"):
        patch.setattr(ocp.CheckpointManager, "restore", full)
        run(tmp_path, 5, packed, loop.Plan(5, 5, 5))
    again = run(tmp_path, 5, packed, loop.Plan(5, 5, 5))
    jax.tree.map(np.testing.assert_array_equal, again.state.params, first.state.params)


def test_the_best_head_keeps_its_own_step_when_the_run_goes_back(tmp_path, monkeypatch):
    packed = packing.pack(random_examples(30), WIDTH)
    figures = iter([1.5, 3.0, 2.0, 2.5])
    monkeypatch.setattr(loop, "_evaluate", lambda *given: {"acceptance": {"2": next(figures)}})
    plan = loop.Plan(5, 5, 5, heldout=packed, budgets=(2,))
    best = lambda found: (found.notes["best_step"], found.notes["best"])
    assert best(run(tmp_path, 10, packed, plan)) == (10, 3.0)
    again = run(tmp_path, 10, packed, dataclasses.replace(plan, resume_step=5))
    assert best(again) == (10, 3.0)  # 2.0 is no new best, though the state of step 5 knows of 1.5 alone
    jax.tree.map(np.testing.assert_array_equal, again.best, again.state.params)
    with loop.Checkpoints(tmp_path) as checkpoints:
        checkpoints.save_best(5, again.best, 4.0)
        checkpoints.wait()
        assert checkpoints.restore_best(again.best, print)[1] == {"step": 5, "acceptance": 4.0}
    assert (tmp_path / "later-best-10").is_dir()  # a kill before the save loses nothing


def test_a_damaged_best_head_is_said_and_none_to_beat(tmp_path, monkeypatch):
    """FC-52: a figure whose head is lost must not keep worse heads from being the best."""
    packed = packing.pack(random_examples(30), WIDTH)
    figures = iter([3.0, 2.0])
    monkeypatch.setattr(loop, "_evaluate", lambda *given: {"acceptance": {"2": next(figures)}})
    plan = loop.Plan(5, 5, 5, heldout=packed, budgets=(2,))
    left = iter(range(5))
    run(tmp_path, 10, packed, plan, on_time=lambda: next(left, None) is not None)
    for path in (tmp_path / "best" / "5" / "params").rglob("*"):
        if path.is_file() and path.stat().st_size > 500:
            path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    said = []
    found = run(tmp_path, 10, packed, plan, log=said.append)
    assert any(line.startswith("train: the best head, of step 5, cannot be read") for line in said)
    assert (found.notes["best_step"], found.notes["best"]) == (10, 2.0)
    jax.tree.map(np.testing.assert_array_equal, found.best, found.state.params)


def test_a_manifest_that_is_no_object_matches_nothing(tmp_path):
    (tmp_path / "settings.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"no readable manifest .no JSON object.; fix"):
        manifest.check(tmp_path / "settings.json", {"a": 1}, "fix")


def test_sigterm_saves_and_ends(tmp_path):
    packed = packing.pack(random_examples(30), WIDTH)

    class Ending(Batches):
        def __getitem__(self, number):
            if number == 3:
                os.kill(os.getpid(), signal.SIGTERM)
            return super().__getitem__(number)

    said = []
    outcome = run(tmp_path, 20, packed, data=Ending(packed, 4, 1, 0), log=said.append)
    assert int(outcome.state.step) == 4 and "train: SIGTERM at step 4 of" in said[-1]
    assert (tmp_path / "states" / "4").is_dir()


def test_silent_batches_are_skipped_and_a_broken_one_stops_the_run(tmp_path):
    packed = packing.pack(random_examples(30), WIDTH)

    class Gaps(Batches):
        def anchored(self, number):
            return number % 3 > 0

    outcome = run(tmp_path / "skip", 6, packed, data=Gaps(packed, 4, 1, 0))
    assert int(outcome.state.position) == 9 and outcome.notes["skipped"] == 3 and int(outcome.state.step) == 6

    broken = outcome.state.params | {"fc": outcome.state.params["fc"] * np.inf}
    with pytest.raises(loop.TrainingError, match=r"step 0: .* batch 0 is not finite .*documents r/.*peak_lr"):
        run(tmp_path / "nan", 6, packed, start=broken)
    names = json.loads((tmp_path / "nan" / "broken.json").read_text())
    assert names == {"position": 0, "documents": Batches(packed, 4, 1, 0).identities(0)}


def test_overfit_drafts_close_to_the_block_limit(known, tmp_path, capsys):
    """Four answers learnt by heart (FC-27): cross entropy under 0.05, then decoding accepts nearly whole blocks."""
    four = sorted(known, key=lambda e: -e.tokens.size)[:4]
    packed = packing.pack(four, WIDTH)
    r = recipe(steps=200, mix=step.Mix(0, 0, 1), anchors=WIDTH, gamma=0.0, loss_chunk=512, warmup=0.1, peak_lr=3e-2)
    plan = loop.Plan(100, 200, 1000, packed, budgets=(2, 4, 8), width=4)
    scale = features.scale(target(), packed, HEAD.tap_layers, 8, 4, "xla")
    data = Batches(packed, len(packed.tokens), 1, 0)
    mesh = sharding.make_mesh(1, jax.devices()[:1])
    outcome = loop.train(r, target(), scale, data, None, tmp_path, plan, mesh)
    last = journal.read(tmp_path)[-1]
    assert last["loss"] < 0.05
    line = capsys.readouterr().out.strip().splitlines()[-1]
    assert line.startswith("step 200/200  loss 0.0") and "MFU" in line and "held-out 2:" in line and "ETA" in line
    depth = HEAD.depth
    assert last["heldout"]["acceptance"]["8"] > 0.75 * (depth + 1) and min(last["heldout"]["agreement"]) > 0.95

    draft, _ = block.build(HEAD, jnp.float32)
    head = load.LoadedHead(draft, step.fold(outcome.best, scale, "float32"), HEAD, "h", {}, 0.0, target().fingerprint)
    prompts = [[int(t) for t in e.tokens[~e.learnt]] for e in four]
    limits = [SamplingConfig(int(e.learnt.sum()), eos=()) for e in four]
    found = speculate.generate(target(), head, prompts, TreeConfig(8, width=4), limits)
    assert [r.token_ids for r in found] == [e.tokens[e.learnt].tolist() for e in four]
    lengths = [n for r in found for n in r.emitted]
    blocks = sum(-(-(limit.max_new_tokens - 1) // (depth + 1)) for limit in limits)
    assert len(lengths) <= 1.2 * blocks  # hardly more rounds than whole blocks need
    walked = last["heldout"]["acceptance"]["8"]
    assert abs(np.mean(lengths) - walked) < 0.5  # the figure of the evaluation is the one of decoding


def test_evaluation_counts_rounds_depths_and_ranks():
    """Two anchors by hand: places decide by budget, the walk skips what a round commits."""
    candidate = np.array([[1, 1, 1, 1, 0]], bool)
    known = np.array([[[1, 1], [1, 1], [1, 1], [1, 0], [0, 0]]], bool)
    no = evaluation.NOWHERE
    place = np.array([[[1, 5], [no, no], [2, no], [no, no], [no, no]]])
    rank = np.array([[[0, 1], [9, 0], [1, 3], [2, 0], [0, 0]]])
    got = evaluation.summary(Drafts(candidate, known, place, rank), (4, 8))
    assert got["acceptance"] == {"4": pytest.approx(1 + (1 + 1) / 2), "8": pytest.approx(1 + (2 + 0) / 2)}
    assert got["every_anchor"] == {"4": 1.5, "8": 1.75} and got["anchors"] == 4
    assert got["agreement"] == [0.25, pytest.approx(1 / 3, abs=1e-4)]
    assert got["conditional"][0][:3] == [0.25, 0.25, 0.25] and got["conditional"][1][:4] == [0, 0.5, 0, 0.5]


# ---- the whole command


SMALL = {
    "mask_token_id": 3,
    "max_prompt_tokens": 9,
    "max_new_tokens": 15,
    "answer_batch": 4,
    "sequence_length": WIDTH,
    "heldout": 1,
    "features": "memory",
    "feature_batch": 2,
    "head_layers": 1,
    "tap_layers": (0, 1),
    "block_size": 4,
    "anchors": 4,
    "steps": 2,
    "batch": 2,
    "peak_lr": 1e-2,
    "log_every": 1,
    "eval_every": 1,
    "eval_budgets": (2, 4),
    "eval_width": 2,
    "loss_chunk": 64,
}


def questions(folder):
    path = folder / "rows.jsonl"
    texts = ["ab", "cde", "f", "gh", "ijk", "l", "mn", "op", "q", "rst", "u", "v"]
    path.write_text("".join(json.dumps({"id": f"s/{i}", "prompt": t}) + "\n" for i, t in enumerate(texts)))
    return path


@pytest.fixture
def loaded(monkeypatch):
    monkeypatch.setattr(load, "load_target", lambda source, dtype: target())


def test_the_pipeline_leaves_a_head_that_loads_bit_equal(loaded, tmp_path):
    data = questions(tmp_path)
    asked = tmp_path / "prompts.jsonl"
    asked.write_text(json.dumps({"messages": [{"role": "user", "content": "ab"}]}) + "\n")
    given = SMALL | {"data": str(data), "target": "t", "decode_prompts": str(asked), "decode_budget": 4}
    config = settings.make(given, "c")
    log = []
    assert pipeline.run(config, tmp_path / "run", log.append)
    assert any(line.startswith("decode: acceptance length") for line in log)
    folder = tmp_path / "run" / "head"
    head = load.load_head(folder, target())
    assert head.config == dataclasses.replace(config.head_config(MODEL, (1,)), dtype="bfloat16")
    assert head.metadata["target_fingerprint"] == "f00d" and head.metadata["training_length"] < WIDTH
    card, stored = (folder / "README.md").read_text(), answer_store.read(tmp_path / "run" / "answers")
    assert "12 prompts, of which 0 were left out; 12 greedy answers" in card and "Unfinished" not in card
    longest = max(e.tokens.size for e in answer_store.learnable(stored, [""] * 12, False)[0])
    assert f"| longest row in training | {head.metadata['training_length']} tokens |" in card
    assert head.metadata["training_length"] == longest
    assert "| s | 11 |" in card and "11 examples with" in card and "1 held out" in card
    assert "causal, mask token 3" in card and "held-out, budget 4" in card
    scale = jnp.asarray(np.load(tmp_path / "run" / "scale.npy"))
    with loop.Checkpoints(tmp_path / "run" / "train") as checkpoints:
        like = jax.jit(lambda n: step.init(recipe(), n))(target().params["norm"])
        params = (checkpoints.restore_best(like.params, print) or pytest.fail("no best head"))[0]
    wanted = jax.tree.map(lambda x: x.astype(jnp.float32), step.fold(params, scale, "bfloat16"))
    jax.tree.map(np.testing.assert_array_equal, head.params, wanted)

    log.clear()
    assert pipeline.run(config, tmp_path / "run", log.append)
    assert not any("batch 1/" in line for line in log) and any("going on at step 2" in line for line in log)
    jax.tree.map(np.testing.assert_array_equal, load.load_head(folder, target()).params, head.params)


def test_another_recipe_than_the_checkpoints_is_refused_by_name(loaded, tmp_path):
    data = questions(tmp_path)
    given = SMALL | {"data": str(data), "target": "t", "eval_sequences": 0}
    go = lambda **change: pipeline.run(settings.make(given | change, "c"), tmp_path / "run", lambda line: None)
    assert go()
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
    assert go(log_every=2, save_every=1, features="online", accumulate=2)

    # Without its scale the run cannot go on; another one would move its coordinates.
    scale = tmp_path / "run" / "scale.npy"
    scale.write_bytes(scale.read_bytes()[:-9])
    with pytest.raises(ConfigError, match=r"scale.npy: cannot be read .*; copy it back, or use a new --workdir"):
        go()


def test_time_is_up_in_training(loaded, tmp_path, monkeypatch):
    """No head of random parameters; one of an unfinished run says so."""
    given = SMALL | {"data": str(questions(tmp_path)), "target": "t", "eval_sequences": 0}
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


def test_outputs_of_other_settings_are_refused_by_name(loaded, tmp_path, monkeypatch):
    found = [{"id": f"s/{i}", "messages": [{"role": "user", "content": t}]} for i, t in enumerate(["ab", "cde"])]
    monkeypatch.setattr(pipeline.pool, "build", lambda *given: (found, {}))
    own = [found[0] | {"id": "own/0"}]
    monkeypatch.setattr(pipeline.own_prompts, "write", lambda *given: own)
    monkeypatch.setattr(pipeline.pool, "Forbidden", lambda folder: types.SimpleNamespace(matches=None, digest="abc"))
    given = SMALL | {"prompt_sets": str(tmp_path), "target": "t", "until": "answers", "own_prompts": 1}
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
    monkeypatch.setattr(pipeline.pool, "Forbidden", known)
    monkeypatch.setattr(pipeline.own_prompts, "write", lambda *given: asked.append(given[5]) or [])
    given = SMALL | {"data": str(questions(tmp_path)), "target": "t", "until": "answers", "own_prompts": 1}
    log = []
    for name, change in (("with", {"prompt_sets": str(tmp_path)}), ("without", {})):
        assert pipeline.run(settings.make(given | change, "c"), tmp_path / name, log.append)
    assert asked[0] == tmp_path and asked[1]("text") is False
    assert sum(line.startswith("own prompts: not compared") for line in log) == 1
    # What was kept off no benchmark is not taken for what was; the other way round it is good enough.
    with pytest.raises(ConfigError, match=r"benchmarks=.*made with none; remove .*/own.jsonl"):
        pipeline.run(settings.make(given | {"prompt_sets": str(tmp_path)}, "c"), tmp_path / "without", log.append)
    assert pipeline.run(settings.make(given, "c"), tmp_path / "with", log.append)


def test_what_cannot_work_is_refused_before_anything_slow(loaded, tmp_path, monkeypatch):
    monkeypatch.setattr(pipeline, "_source", lambda *given: pytest.fail("too late"))
    config = lambda **change: settings.make(SMALL | {"data": str(questions(tmp_path)), "target": "t"} | change, "c")
    head = config().head_config(target().config, target().eos)
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


@pytest.mark.parametrize(
    "option,message",
    [
        ("--samples=-1", "--samples=-1: give a number >= 0"),
        ("--limit=-2", "--limit=-2: give a number >= 0"),
        ("--temperature=nan", "--temperature=nan: give a number > 0 and <= 10"),
        ("--sampels=1", "--sampels=1: no such option; did you mean --samples?"),
    ],
)
def test_wrong_numbers_of_the_answers_command(option, message, tmp_path, capsys):
    with pytest.raises(SystemExit) if "no such" in message else contextlib.nullcontext():
        assert regenerate.main(["--prompts=p.jsonl", f"--out={tmp_path}", option]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_the_answers_as_a_data_set_of_their_own(loaded, tmp_path):
    """Regenerated rows, features in files, going on from a head that is there."""
    data = questions(tmp_path)
    first = settings.make(SMALL | {"data": str(data), "target": "t", "eval_sequences": 0}, "c")
    assert pipeline.run(first, tmp_path / "run", lambda line: None)
    folder, regenerated, log = tmp_path / "run" / "head", tmp_path / "answers.jsonl", []
    asked = regenerate.ask(target(), rows.read(data), 9, None)
    regenerate.write_rows(regenerated, target(), asked, answer_store.read(tmp_path / "run" / "answers"))
    change = {"data": str(regenerated), "answers": "corpus", "features": "disk", "init_head": str(folder), "steps": 1}
    assert pipeline.run(settings.make(SMALL | change | {"target": "t"}, "c"), tmp_path / "second", log.append)
    assert any(line.startswith("data: 12 rows read, 12 used") for line in log)
    assert "12 rows with their own answers" in (tmp_path / "second" / "head" / "README.md").read_text()
    assert (tmp_path / "second" / "features" / "manifest.json").is_file()


def study_command(tmp_path, monkeypatch, **change):
    """A study of two variants, and its command without --steps."""
    data = tmp_path / "rows.jsonl"
    texts = [("ab", "cde"), ("f", "gh"), ("ijk", "lmn"), ("l", "op"), ("mn", "qrs"), ("op", "tu"), ("q", "vw")]
    lines = [{"id": f"s/{i}", "prompt": q, "response": a} for i, (q, a) in enumerate(texts)] + [{"prompt": "none"}]
    lines += [{"id": "long", "prompt": "a" * 9, "response": "bc"}, {"id": "much", "prompt": "a", "response": "b" * 15}]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "c.py"
    path.write_text(f"def get_config():\n  return {SMALL | {'target': 't'} | change!r}\n")
    monkeypatch.setattr(study, "BUDGETS", (2, 4))
    two = ("forward KL, causal, gamma 0", "corpus answers, forward KL, causal, gamma 0")
    monkeypatch.setattr(study, "VARIANTS", {name: study.VARIANTS[name] for name in two})
    prompts = tmp_path / "p.jsonl"
    prompts.write_text(json.dumps({"messages": [{"role": "user", "content": "ab"}]}) + "\n")
    return [f"--config={path}", f"--data={data}", f"--workdir={tmp_path / 'w'}", f"--prompts={prompts}"]


@pytest.mark.slow
def test_the_study_goes_on_and_ends_with_one_table(loaded, tmp_path, monkeypatch, capsys):
    command = [*study_command(tmp_path, monkeypatch), "--steps=1"]
    assert study.main([*command, "--max_minutes=1e-9"]) == 0
    assert "time is up" in capsys.readouterr().err
    assert study.main(command) == 0
    out = capsys.readouterr()
    table = [line.split(" | ") for line in out.out.splitlines() if line.startswith("| ")]
    assert len(table) == 4 and table[2][1].endswith("(1.00)") and table[3][1] and "study: done" in out.err
    assert len((tmp_path / "w" / "shared" / "rows.jsonl").read_text().splitlines()) == 7
    assert study.main(command) == 0 and "step 1/1" not in capsys.readouterr().out


@pytest.fixture
def stages(monkeypatch):
    """Stages that only leave answers, of which the third gives nothing to learn from; what they were given."""
    ran = []

    def run(config, folder, log):
        ran.append((config, folder))
        if config.until == "answers":
            count = sum(1 for _ in rows.read(config.data))
            one = lambda x: np.full(count, x)
            found = [np.array([5, 6, 7] if i == 2 else [5, 6, 7, 8]) for i in range(count)]
            length, index = np.array([row.size for row in found]), np.arange(count)
            known = answer_store.join(found, index, one(0), one(2), length, one(True), one(False))
            answer_store.write(folder / "answers", 0, known)
        return True

    monkeypatch.setattr(pipeline, "run", run)
    monkeypatch.setattr(load, "load_head", lambda folder, target: None)
    monkeypatch.setattr(pair, "thinking", lambda target, head, given: given)
    return ran


def test_a_study_keeps_every_figure_and_asks_the_time_before_it(loaded, stages, tmp_path, monkeypatch, capsys):
    """Killed in the middle of measuring: neither training nor a figure is made twice."""
    command = [*study_command(tmp_path, monkeypatch), "--steps=1"]
    made, kill = [], [None, KeyboardInterrupt, None, jax.errors.JaxRuntimeError("out of memory\nmore")]

    def measure(target, head, ids, tree, sampling, batch):
        if kill and (error := kill.pop(0)):
            raise error
        made.append(tree.budget)
        return {"acceptance_length": 1.5}

    monkeypatch.setattr(study.acceptance, "measure", measure)
    assert study.main(command) == 130 and "study: interrupted" in capsys.readouterr().err
    assert study.main(command) == 1
    err = capsys.readouterr().err.splitlines()
    assert err[-1].startswith("study: out of memory (if the device is full") and "Traceback" not in err
    assert study.main([*command, "--max_minutes=1e-9"]) == 0 and made == [2, 4]
    assert study.main(command) == 0 and made == [2, 4, 2, 4]
    trained = [folder.name for config, folder in stages if config.until == "export"]
    assert trained == ["variant-0", "variant-1"] and "1.50 (1.00) | 1.50 (1.00)" in capsys.readouterr().out


def test_rows_of_the_study_may_be_taken_alone(loaded, stages, tmp_path, monkeypatch, capsys):
    command = [*study_command(tmp_path, monkeypatch), "--steps=1"]
    monkeypatch.setattr(study.acceptance, "measure", lambda *given: {"acceptance_length": 1.5})
    assert study.main([*command, "--variants", "2"]) == 1
    assert "study: --variants=2: the table has the rows 0..1" in capsys.readouterr().err
    assert study.main([*command, "--variants", "1"]) == 0
    trained = lambda: [folder.name for config, folder in stages if config.until == "export"]
    assert trained() == ["variant-1"] and "| 1.50 | 1.50 |" in capsys.readouterr().out
    assert study.main(command) == 0 and trained() == ["variant-1", "variant-0"]


def test_a_study_in_the_folder_of_another_is_refused_by_name(loaded, stages, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(study.acceptance, "measure", lambda *args: {"acceptance_length": 1.5})
    command = study_command(tmp_path, monkeypatch)
    other = tmp_path / "other.jsonl"
    other.write_text("{}\n")
    assert study.main([*command, "--steps=2"]) == 0
    capsys.readouterr()
    for more, message in [
        (["--steps=5000"], "its study has steps=2, this command steps=5000; use a new --workdir"),
        (["--steps=2", "--limit=3"], "limit=64, this command limit=3"),
        (["--steps=2", f"--prompts={other}"], "this command prompts other="),
        (["--steps=2", f"--data={other}"], "its study has data="),
        (["--steps=0"], "--steps=0: give a number >= 1"),
    ]:
        assert study.main([*command, *more]) == 1
        out = capsys.readouterr()
        assert message in out.err and out.err.count("\n") == 1 and not out.out
    moved = pathlib.Path(command[1].partition("=")[2]).rename(tmp_path / "moved.jsonl")  # the same rows elsewhere
    assert study.main([*command, "--steps=2", f"--data={moved}"]) == 0 and "2 steps of" in capsys.readouterr().out
    command = study_command(tmp_path, monkeypatch, loss_chunk=32, feature_batch=1)  # what a full device may need
    assert study.main([*command, "--steps=2"]) == 0


def test_all_variants_of_a_study_learn_the_same_prompts(loaded, stages, tmp_path, monkeypatch):
    monkeypatch.setattr(study.acceptance, "measure", lambda *args: {"acceptance_length": 1.5})
    command = study_command(tmp_path, monkeypatch, max_prompts=5, max_prompt_tokens=9)
    assert study.main([*command, "--steps=1"]) == 0
    names = lambda path: [row.identity for row in rows.read(path)]
    (_, _), (one, _), (two, _) = stages
    assert names(one.data) == [f"s/{i}" for i in range(5)] and one.answers == "target"
    assert names(two.data) == ["s/0", "s/1", "s/3", "s/4"] and two.answers == "corpus"  # the third gives nothing
    other = [*study_command(tmp_path, monkeypatch)[:2], f"--workdir={tmp_path / 'x'}", command[3], "--steps=1"]
    assert study.main(other) == 0  # neither the prompt nor the answer that is too long
    assert names(stages[-2][0].data) == [f"s/{i}" for i in range(7)]


def test_the_curves_are_drawn_or_the_missing_package_is_named(tmp_path, capsys):
    record = {"step": 1, "loss": 2.0, "run_length": 1.5, "heldout": {"acceptance": {"16": 2.0}}}
    (tmp_path / "metrics.jsonl").write_text(json.dumps(record) + "\n" + '{"step": 2, "lo')
    status = plot.main([str(tmp_path)])
    if status:
        assert "needs matplotlib" in capsys.readouterr().err
    else:
        assert (tmp_path / "curves.png").stat().st_size > 1000
    assert plot.main([str(tmp_path / "none")]) == 1 and plot.main([]) == 2


def cli(*argv):
    return subprocess.run(
        [sys.executable, "train.py", *argv], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )


def test_a_work_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").touch()
    config = settings.make({"mask_token_id": 3, "steps": 1, "data": str(tmp_path)}, "c")
    with pytest.raises(ConfigError, match=r"--workdir=.*/file/y: cannot be made \(Not a directory\); give a folder"):
        pipeline.run(config, tmp_path / "file" / "y", print)


def test_mistakes_on_the_command_line_are_one_line(tmp_path):
    path = tmp_path / "c.py"
    path.write_text("def get_config():\n  return dict(mask_token_id=3, steps=1)\n")
    base = [f"--config={path}", f"--workdir={tmp_path / 'w'}"]
    for more, message in [
        ([], "--config.data is missing"),
        (["--config.data=nowhere"], "--config.data=nowhere: no such file or folder"),
        (["--config.dtaa=x"], "--config.dtaa: no such key; did you mean --config.data?"),
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
