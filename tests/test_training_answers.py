"""Answers of the target: each once, counted, trimmed, and prompts of its own."""

import json
import types
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from small import (
    HEAD,
    RUN,
    WIDTH,
    questions,
    target,
)

from jetspec_jax.config import ConfigError
from jetspec_jax.drafts import block
from jetspec_jax.files import load
from jetspec_jax.layers import masks
from jetspec_jax.loop.state import LENGTH, NONFINITE, STOP
from jetspec_jax.training import (
    pipeline,
    regenerate,
    settings,
)
from jetspec_jax.training.data import answers as answer_store
from jetspec_jax.training.data import own_prompts, rows, turns


def test_answers_are_the_targets_and_come_exactly_once(answered, tmp_path):
    folder, prompts, args = answered
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
    assert not regenerate.regenerate(target(), prompts, tmp_path, **args, on_time=lambda: next(left, False))
    for _ in range(2):
        assert regenerate.regenerate(target(), prompts, tmp_path, **args)
        for a, b in zip(answer_store.read(tmp_path), found, strict=True):
            np.testing.assert_array_equal(a, b)
    with pytest.raises(ConfigError, match=r"prompts=.* was made with .*; remove the folder"):
        regenerate.regenerate(target(), [[7, 7, 7]], tmp_path, **args)


@pytest.mark.slow
def test_a_head_changes_no_answer(answered, tmp_path):
    draft, shapes = block.build(HEAD, jnp.float32)
    head = load.LoadedHead(draft, small.random_params(shapes, 3), HEAD, "h", {}, 0.0, target().fingerprint)
    assert regenerate.regenerate(target(), answered[1], tmp_path, **answered[2], head=head, budget=4)
    for a, b in zip(answer_store.read(tmp_path), answer_store.read(answered[0]), strict=True):
        np.testing.assert_array_equal(a, b)


def test_counts_add_up_and_cut_answers_are_marked(tmp_path):
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


WIDE = types.SimpleNamespace(  # a target with ids that 16 bits do not hold
    model=types.SimpleNamespace(vocab_size=70_000), config=types.SimpleNamespace(context_length=64), fingerprint="f"
)


class Recording:
    """An `Answerer` that adds the largest id to each prompt, and notes what each was asked with."""

    asked: list

    def __init__(self, *args):
        pass

    def __call__(self, prompts, seeds, max_new, temperature):
        Recording.asked += [(tuple(p), temperature, int(seed)) for p, seed in zip(prompts, seeds, strict=True)]
        reasons = [NONFINITE if p[0] == 9 else LENGTH if p[0] == 8 else STOP for p in prompts]
        return [np.array([*p, 69_999]) for p in prompts], np.array(reasons)


def test_seeds_are_of_prompts_and_samples_whatever_the_batch(monkeypatch, tmp_path):
    monkeypatch.setattr(regenerate, "Answerer", Recording)
    prompts, said = [[9, 5, 7], [8], [7, 6]], []
    for batch in (1, 2, 3):
        Recording.asked = []
        folder = tmp_path / str(batch)
        regenerate.regenerate(WIDE, prompts, folder, batch=batch, max_prompt=9, max_new=4, samples=2, temperature=0.5)
        said.append(sorted(Recording.asked))
        found = answer_store.read(folder)
        assert found.tokens.max() == 69_999
        ends = {int(p): (bool(e), bool(f)) for p, e, f in zip(found.prompt, found.ended, found.failed, strict=True)}
        assert ends == {0: (False, True), 1: (False, False), 2: (True, False)}
    assert said[0] == said[1] == said[2] and len({seed for *_, seed in said[0]}) == 9
    assert [heat for _, heat, _ in said[0]] == [0.0, 0.5, 0.5] * 3


def test_long_rows_are_decoded_fewer_at_a_time(monkeypatch):
    """Of eight rows four beyond 1,024 positions and two beyond 2,048; caches are as short as the rows allow."""
    made = []

    def answer(self, prompts, seeds, how, longest, sizes):
        made.append((len(prompts), longest, sizes, seeds.tolist()))
        return [np.array(p) for p in prompts], np.full(len(prompts), STOP)

    monkeypatch.setattr(regenerate.Answerer, "_answer", answer)
    answerer = regenerate.Answerer(target(), 8, 3_000)
    for size, many, room in ((5, 8, 512), (600, 8, 1_024), (1_100, 4, 2_048), (2_500, 2, 3_000)):
        made.clear()
        found, reasons = answerer([[1] * size] * 8, np.arange(8), 10, 0.0)
        assert len(found) == len(reasons) == 8 and [seed for m in made for seed in m[3]] == list(range(8))
        assert [m[:3] for m in made] == [(many, size, (many, room))] * (8 // many)


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
    assert pipeline.run(settings.make(RUN | change, "c"), tmp_path / "run", log.append)
    assert json.loads((tmp_path / "run" / "answers.json").read_text())["answered"] == 3 + 2
    assert any("own prompts: not compared with any benchmark" in line for line in log)


@pytest.mark.parametrize(
    "option,message",
    [
        ("--samples=-1", "--samples=-1: give a whole number >= 0"),
        ("--limit=-2", "--limit=-2: give a whole number >= 0 (0 is all)"),
        ("--temperature=nan", "--temperature=nan: give a finite number in (0, 10]"),
        ("--sampels=1", "--sampels: no such option; did you mean --samples?"),
    ],
)
def test_wrong_numbers_of_the_answers_command(option, message, tmp_path, capsys):
    assert regenerate.main(["--prompts=p.jsonl", f"--out={tmp_path}", option]) == 2
    assert message in capsys.readouterr().err


def test_the_answers_command_with_its_defaults(monkeypatch, tmp_path, capsys):
    """Neither --samples nor a rate is given; what the target cannot hold is refused before the first token."""
    monkeypatch.setattr(load, "load_target", lambda *args: target())
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "ab"}\n{"prompt": "c"}\n')
    words = [f"--prompts={path}", f"--out={tmp_path / 'out'}", "--target=t", "--batch=2"]
    assert regenerate.main([*words, "--max_new_tokens=3"]) == 0
    assert json.loads(capsys.readouterr().out)["sampled"] == 0
    assert regenerate.main([*words, "--max_new_tokens=600"]) == 1
    err = capsys.readouterr().err
    assert "max_new_tokens=600" in err and "the target's context is 512; give at most 50" in err


def test_a_prompt_of_tokens_that_the_model_has_not_is_not_asked():
    small_model = types.SimpleNamespace(tokenizer=small.Letters(), model=types.SimpleNamespace(vocab_size=20))
    given = [rows.Row("f:1", "1", {"prompt": "012"}), rows.Row("f:2", "2", {"prompt": "az"})]
    found = regenerate.ask(small_model, given, 64, None)
    assert found.identities == ["1"] and dict(found.skipped) == {turns.BEYOND: 1}


def test_sampled_answers_differ_by_sample_and_come_after_the_greedy_ones(answered, tmp_path):
    _, prompts, args = answered
    assert regenerate.regenerate(target(), prompts, tmp_path, **args, samples=2, temperature=3.0)
    found = answer_store.read(tmp_path)
    assert found.sample.tolist() == [0] * 5 + [1] * 5 + [2] * 5
    said = {(p, s): row.tolist() for p, s, row in zip(found.prompt, found.sample, found.rows(), strict=True)}
    greedy = answer_store.read(answered[0])
    assert [said[p, 0] for p in greedy.prompt] == [row.tolist() for row in greedy.rows()]
    assert all(said[p, 1] != said[p, 2] and said[p, 0] not in (said[p, 1], said[p, 2]) for p in range(5))


def test_answers_that_the_limit_cut_can_be_left_out(tmp_path):
    one = lambda *x: np.array(x)
    bodies = [[5, 6, 7, 1], [5, 6, 7, 8], [5, 6, *[9, 8] * 20]]
    length = one(*(len(b) for b in bodies))
    known = answer_store.join(
        [np.array(b) for b in bodies], one(0, 1, 2), one(0, 0, 0), one(2, 2, 2), length, one(True, False, False),
        one(False, False, False),
    )  # fmt: skip
    names = lambda **more: [e.identity for e in answer_store.learnable(known, ["a", "b", "c"], True, **more)[0]]
    assert names() == ["a", "b", "c"] and names(drop_truncated=True) == ["a"]
    assert answer_store.learnable(known, ["a", "b", "c"], True, True)[1] == {"cut at the limit": 2}
    asked = regenerate.Prompts(["a", "b", "c"], [[], [], []], [[5, 6]] * 3, Counter())
    for drop, count in ((False, 3), (True, 1)):
        regenerate.write_rows(tmp_path / "a.jsonl", target(), asked, known, drop)
        assert len((tmp_path / "a.jsonl").read_text().splitlines()) == count
