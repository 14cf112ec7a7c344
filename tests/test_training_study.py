"""The ablation: equal data, figures that are kept, folders that are not mixed."""

import json
import pathlib

import jax
import numpy as np
import pytest
from small import RUN

from jetspec_jax.files import load, pair
from jetspec_jax.training import (
    pipeline,
    study,
)
from jetspec_jax.training.data import answers as answer_store
from jetspec_jax.training.data import rows


def study_command(tmp_path, monkeypatch, **change):
    """A study of two variants, and its command without --steps."""
    data = tmp_path / "rows.jsonl"
    texts = [("ab", "cde"), ("f", "gh"), ("ijk", "lmn"), ("l", "op"), ("mn", "qrs"), ("op", "tu"), ("q", "vw")]
    lines = [{"id": f"s/{i}", "prompt": q, "response": a} for i, (q, a) in enumerate(texts)] + [{"prompt": "none"}]
    lines += [{"id": "long", "prompt": "a" * 9, "response": "bc"}, {"id": "much", "prompt": "a", "response": "b" * 15}]
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = tmp_path / "c.py"
    path.write_text(f"def get_config():\n  return {RUN | {'target': 't'} | change!r}\n")
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
    assert study.main([*command, "--variants", "2"]) == 2
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
        (["--steps=5000"], "--steps=5000: {w} was made with 2; use a new --workdir"),
        (["--steps=2", "--limit=3"], "limit=3: {w} was made with 64"),
        (["--steps=2", f"--prompts={other}"], "prompts=other:"),
        (["--steps=2", f"--data={other}"], "--data="),
        (["--steps=0"], "--steps=0: give a whole number >= 1"),
    ]:
        assert study.main([*command, *more]) == (2 if ": give a whole" in message else 1)
        out = capsys.readouterr()
        assert message.format(w=tmp_path / "w") in out.err and out.err.count("\n") == 1 and not out.out
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
