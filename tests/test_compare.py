"""The comparison of drafters: its requests, its file, the tables of both, and how it ends."""

import dataclasses
import json
import os
import pathlib
import resource
import shutil
import signal
import subprocess
import sys
import time
import types
import xml.etree.ElementTree as ET

import pytest
from compared import BASE, SETTINGS

from jetspec_jax import baseline, speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.evals import ceiling, compare, drafters, ledger, summary, tables
from jetspec_jax.evals.drafters import Cell
from jetspec_jax.files import load, scorer_file

ROOT = pathlib.Path(__file__).parent.parent
PAIR = ROOT / "tests" / "fixtures" / "peer_parity" / "dense_trained"
PROMPTS = [[11, 12, 17], [49], [5, 6, 7, 8, 9], [30, 31]]
NEW = 24


def words(folder, *more):
    """The command's options for the small pair."""
    return [
        "--prompts", str(folder / "some.jsonl"), "--out", str(folder / "run.jsonl"), "--target", str(PAIR / "target"),
        "--drafters", f"jetspec={PAIR / 'head'}", "ngram", "autoregressive", "--budgets", "4",
        "--max_new_tokens", str(NEW), *more,
    ]  # fmt: skip


def prompts(folder):
    path = folder / "some.jsonl"
    path.write_text("".join(json.dumps({"id": f"some/{i}", "prompt_ids": ids}) + "\n" for i, ids in enumerate(PROMPTS)))


@pytest.fixture(scope="module")
def done(tmp_path_factory):
    """A folder with a whole comparison."""
    folder = tmp_path_factory.mktemp("compare")
    prompts(folder)
    assert compare.main(words(folder, "--svg", str(folder / "run.svg"))) == 0
    return folder


def test_times_of_repeats_are_their_medians():
    """Of three runs neither the first nor the best."""
    target = load.load_target(PAIR / "target")
    (result,) = [speculate.generate(target, None, PROMPTS[0], None, SamplingConfig(2))]
    runs = [
        dataclasses.replace(result, seconds=result.seconds | {"prefill": a, "decode": b})
        for a, b in ((1.0, 9.0), (3.0, 4.0), (2.0, 5.0))
    ]
    asked = drafters.NO_DRAFT, compare.Prompt(0, "a", PROMPTS[0], None), SamplingConfig(2)
    where = 1, ledger.Key("some", 0, 0.0, drafters.NO_DRAFT.cell)
    made = compare._request(target, False, where, asked, runs, None, None)
    assert (made.prefill, made.decode, made.verdict) == (2.0, 5.0, "plain")


def test_the_first_prompts_that_are_short_enough_are_read(tmp_path):
    """A prompt as long as may be is in; of the two that are left out one is too long, and one is beyond the limit."""
    prompts(tmp_path)
    target = load.load_target(PAIR / "target")
    args = types.SimpleNamespace(prompts=[str(tmp_path / "some.jsonl")], max_prompt_tokens=3, limit=2)
    (found,) = compare.read(target, args, None)
    assert [(p.place, p.id, p.ids) for p in found.prompts] == [(0, "some/0", PROMPTS[0]), (1, "some/1", PROMPTS[1])]
    assert (found.name, found.room) == ("some", 3)


def test_gold_answers_come_with_their_prompts_and_tell_files_apart(tmp_path):
    prompts(tmp_path)
    target, gold = load.load_target(PAIR / "target"), tmp_path / "some.gold.jsonl"
    args = types.SimpleNamespace(prompts=[str(tmp_path / "some.jsonl")], max_prompt_tokens=9, limit=9)
    (bare,) = compare.read(target, args, None)
    found = []
    for answer in ("1", "2"):
        gold.write_text(json.dumps({"id": "some/1", "kind": "number", "answer": answer}) + "\n")
        (read,) = compare.read(target, args, None)
        assert [p.gold for p in read.prompts] == [None, {"kind": "number", "answer": answer}, None, None]
        found.append(read.digest)
    assert len({bare.digest, *found}) == 3


def test_heads_are_told_apart_by_the_scorer_beside_them(tmp_path):
    shutil.copytree(PAIR / "head", tmp_path / "head")
    head = types.SimpleNamespace(source=str(tmp_path / "head"), draft=types.SimpleNamespace())
    alone = compare._fingerprint(head)
    shutil.copytree(PAIR / "head", tmp_path / "head" / scorer_file.FOLDER)  # any weights
    assert compare._fingerprint(head) != alone
    head.draft.alone = True  # --scorer none
    assert compare._fingerprint(head) == alone


@pytest.mark.parametrize(
    "margin, std, verdict",
    [(5e-5, 1.0, "tie"), (2e-4, 1.0, "differs"), (5e-5, 0.1, "differs"), (-1e-6, 1.0, "differs")],
)
def test_a_tie_is_a_margin_that_rounding_explains(monkeypatch, margin, std, verdict):
    """In standard deviations of the logits; below zero the other token had the larger logit: no tie."""
    monkeypatch.setattr(baseline, "first_difference", lambda *_: baseline.Difference(3, 1, 2, margin, std))
    found = compare.judged(None, [1], [1], [2], SamplingConfig(4))
    assert found == {"verdict": verdict, "parted_at": 3, "margin": pytest.approx(margin / std)}


def test_rounds_of_auto_are_not_recorded(tmp_path, monkeypatch):
    """Their sizes follow the clock, so that a second decode would tell of other rounds."""
    result = speculate.generate(load.load_target(PAIR / "target"), None, [PROMPTS[0]], None, SamplingConfig(2))[0]
    monkeypatch.setattr(compare, "decode", lambda *_: result)
    monkeypatch.setattr(compare.lost, "split", lambda *_: {"nothing": 1})
    monkeypatch.setattr(compare, "judged", lambda *_: {"verdict": "equal", "parted_at": None, "margin": None})
    cell = lambda shape: Cell("jetspec", "jetspec", shape, 8)
    entries = [
        drafters.NO_DRAFT, drafters.Entry(cell("auto"), None, TreeConfig("auto")),
        drafters.Entry(cell("tree"), None, TreeConfig(8)),
    ]  # fmt: skip
    sampling, prompt = SamplingConfig(2), compare.Prompt(0, "a", PROMPTS[0], None)
    part = compare.Set("some", [prompt], "")
    task = compare.Task(None, entries, [part], [sampling], 1, True, False)
    with ledger.opened(tmp_path / "x.jsonl", SETTINGS) as book:
        compare._prompt(task, book, entries, part, prompt, sampling)
    assert [r.lost for r in book.requests] == [None, None, {"nothing": 1}]


def test_one_program_serves_all_prompts_of_a_set():
    """With the room of the longest, only the first of unequal prompts compiles anything, and all say the same."""
    target, tree = load.load_target(PAIR / "target"), TreeConfig(4)
    head = load.load_head(PAIR / "head", target)
    entry = drafters.Entry(Cell("jetspec", "jetspec", "tree", 4), head, tree)
    prompts, sampling = [[5, 6, 7] * 11, [49], [11] * 20], SamplingConfig(NEW)
    compiled = []
    for ids in prompts:
        engine = speculate.start(target, head, [ids], tree, sampling, room=33)
        (result,) = engine.finish()
        compiled.append(result.seconds["compile"] > 0)
        assert result.token_ids == speculate.generate(target, None, [ids], None, sampling)[0].token_ids
    assert compiled == [True, False, False]
    assert compare.decode(target, entry, prompts[1], sampling, 33).seconds["compile"] == 0


@pytest.mark.slow  # compiles a pair of programs that no other test has
def test_warming_up_compiles_all_that_a_cell_runs(monkeypatch):
    target = load.load_target(PAIR / "target")
    head = load.load_head(PAIR / "head", target)
    entry = drafters.Entry(Cell("jetspec", "jetspec", "tree", 4), head, TreeConfig(4, depth=2))  # no other test has it
    monkeypatch.setattr(compare, "range", lambda n: [0], raising=False)  # no second try
    compare.warm(target, [drafters.NO_DRAFT, entry], PROMPTS[0], SamplingConfig(NEW), 33)
    assert compare.decode(target, entry, PROMPTS[0], SamplingConfig(NEW), 33).seconds["compile"] == 0


def copied(done, tmp_path, keep=None) -> pathlib.Path:
    """The comparison in another folder, cut to so many bytes."""
    (tmp_path / "some.jsonl").write_bytes((done / "some.jsonl").read_bytes())
    (tmp_path / "run.jsonl").write_bytes((done / "run.jsonl").read_bytes()[:keep])
    return tmp_path / "run.jsonl"


def test_every_request_is_what_decoding_it_alone_gives(done):
    run = ledger.read(done / "run.jsonl")
    cells = ["plain decoding", "jetspec tree 4", "jetspec chain 4", "ngram tree 4", "ngram chain 4"]
    assert [(r.id, str(r.cell)) for r in run.requests] == [(f"some/{i}", cell) for i in range(4) for cell in cells]
    target = load.load_target(PAIR / "target")
    head = load.load_head(PAIR / "head", target)
    by = {(r.prompt, str(r.cell)): r for r in run.requests}
    for i, ids in enumerate(PROMPTS):
        plain = speculate.generate(target, None, [ids], None, SamplingConfig(NEW))[0]
        tree = speculate.generate(target, head, [ids], TreeConfig(4), SamplingConfig(NEW))[0]
        got = by[i, "jetspec tree 4"]
        assert by[i, "plain decoding"].token_ids == tuple(plain.token_ids) == got.token_ids
        assert got.accept_lengths == tuple(tree.accept_lengths) and got.emitted == tuple(tree.emitted)
        assert (got.prompt_tokens, got.rounds, got.depth) == (len(ids), tree.rounds, 3)
        assert sum(got.lost.values()) == got.rounds and by[i, "ngram tree 4"].lost is None
        chain = by[i, "jetspec chain 4"]  # without siblings no token can lie below another parent
        assert chain.lost["parent wrong"] == chain.lost["not in the tree"] == 0
        assert sum(chain.accept_lengths) <= sum(chain.lost.values()) * 4
    assert all(r.decode > 0 and r.prefill > 0 and r.session == 1 for r in run.requests)
    assert {r.verdict for r in run.requests} == {"plain", "equal"}
    ET.parse(done / "run.svg")


def part(done, folder, name, drafters, **settings) -> pathlib.Path:
    """A file with some drafters of the comparison, plain decoding among them, as another run would leave it."""
    first, *rest = map(json.loads, (done / "run.jsonl").read_text().splitlines())
    kept = ("autoregressive", *drafters)
    said = first["settings"]
    said |= {**settings, "cells": [cell for cell in said["cells"] if cell[0] in kept]}
    lines = [first, *(row for row in rest if row["drafter"] in kept)]
    (folder / name).write_text("".join(json.dumps(line) + "\n" for line in lines))
    return folder / name


class TestOverview:
    def test_files_of_one_comparison_are_shown_as_one(self, done, tmp_path, capsys):
        one, two = part(done, tmp_path, "a.jsonl", ["jetspec"]), part(done, tmp_path, "b.jsonl", ["ngram"])
        whole = summary.of(ledger.read(done / "run.jsonl"))
        found = summary.joined([summary.of(ledger.read(path)) for path in (one, two)])
        assert found.groups == whole.groups and found.totals == whole.totals and found.lengths == whole.lengths
        assert compare.main(["--table", str(one), str(two), "--overview", "--svg", str(tmp_path / "x.svg")]) == 0
        text = capsys.readouterr().out
        assert text.count("### ") == 3 and text.count("| plain decoding |") == 1
        ET.parse(tmp_path / "x.svg")
        total = {g.cell: g.figures for g in found.totals}[Cell("jetspec", "jetspec", "tree", 4)]
        assert f"| jetspec tree 4 | {total.acceptance:.2f} | {total.acceptance:.2f} |" in text

    def test_figures_of_fewer_prompts_are_in_brackets(self, done, tmp_path):
        path = part(done, tmp_path, "a.jsonl", ["jetspec"])
        lines = path.read_text().splitlines(keepends=True)
        path.write_text("".join(lines[:-1]))  # without the last chain
        shown = tables.overview(summary.joined([summary.of(ledger.read(path))]))
        (row,) = [line for line in shown.splitlines() if line.startswith("| jetspec chain 4") and line.count("|") == 4]
        assert row.count("(") == 2

    @pytest.mark.parametrize(
        "name, value",
        [
            ("dtype", "bfloat16"),
            ("limit", 3),
            ("jax", "0"),
            ("sets.x", [4, ""]),
            ("sampling.max_new_tokens", 9),
        ],
    )
    def test_files_of_different_runs_are_not_joined(self, done, tmp_path, capsys, name, value):
        key, _, inside = name.partition(".")
        said = ledger.read(done / "run.jsonl").settings[key]
        paths = (
            part(done, tmp_path, "a.jsonl", ["jetspec"]),
            part(done, tmp_path, "b.jsonl", ["ngram"], **{key: said | {inside: value} if inside else value}),
        )
        assert compare.main(["--table", *map(str, paths), "--overview"]) == 1
        was = said.get(inside) if inside else said
        assert f"files of different {name}, {was!r} and {value!r}; give" in capsys.readouterr().err

    def test_a_cell_of_two_files_is_named(self, done, tmp_path, capsys):
        path = part(done, tmp_path, "a.jsonl", ["jetspec"])
        assert compare.main(["--table", str(path), str(path), "--overview"]) == 1
        assert "jetspec tree 4 of some is in two files" in capsys.readouterr().err
        assert compare.main(words(tmp_path, "--overview")) == 2


class TestGoingOn:
    def test_what_is_done_is_not_decoded_again(self, done, tmp_path, monkeypatch, capsys):
        """The file is cut in the middle of its ninth request: eight stay, and the half line goes."""
        whole = (done / "run.jsonl").read_bytes()
        lines = whole.splitlines(keepends=True)
        path = copied(done, tmp_path, sum(map(len, lines[:9])) + 40)
        seen, decode = [], compare.decode
        monkeypatch.setattr(compare, "decode", lambda t, e, *rest: seen.append(str(e.cell)) or decode(t, e, *rest))
        assert compare.main(words(tmp_path)) == 0
        assert len(seen) == 12 and seen[:2] == ["ngram tree 4", "ngram chain 4"]
        assert path.read_bytes().startswith(b"".join(lines[:9]))
        first, again = ledger.read(done / "run.jsonl"), ledger.read(path)
        same = lambda run: [(r.key, r.token_ids, r.accept_lengths, r.verdict) for r in run.requests]
        assert same(first) == same(again) and [r.session for r in again.requests] == [1] * 8 + [2] * 12
        out, err = capsys.readouterr()
        assert "8 requests are there" in err and "about" in err and "Decoded in 2 starts" in out
        monkeypatch.setattr(compare, "decode", None)
        before = path.read_bytes()
        assert compare.main(words(tmp_path)) == 0 and path.read_bytes() == before

    @pytest.mark.parametrize(
        "more, said",
        [
            (["--budgets", "8"], "cells[1]=['jetspec', 'jetspec', 'tree', 4], now ['jetspec', 'jetspec', 'tree', 8]"),
            (["--max_new_tokens", "8"], "sampling.max_new_tokens=24, now 8"), (["--limit", "2"], "limit=16, now 2"),
            (["--top_k", "3"], "sampling.top_k=None, now 3"), (["--nolost"], "lost=True, now False"),
            (["--temperatures", "0", "1"], "sampling.temperature=[0.0], now [0.0, 1.0]"),
            (["--run_code"], "run_code=False, now True"), (["--repeats", "2"], "repeats=1, now 2"),
        ],
    )  # fmt: skip
    def test_a_setting_that_has_changed_is_refused_by_name(self, done, tmp_path, capsys, more, said):
        path = copied(done, tmp_path)
        before = path.read_bytes()
        assert compare.main(words(tmp_path, *more)) == 1
        err = capsys.readouterr().err.splitlines()[-1]
        assert f"run.jsonl: begun with {said};" in err and "another --out" in err and path.read_bytes() == before

    def test_other_prompts_of_the_same_name_are_refused(self, done, tmp_path, capsys):
        copied(done, tmp_path)
        (tmp_path / "some.jsonl").write_text((tmp_path / "some.jsonl").read_text().replace("11", "13"))
        assert compare.main(words(tmp_path)) == 1 and "begun with sets.some=[4, " in capsys.readouterr().err

    def test_a_prompt_that_does_not_fit_is_named(self, tmp_path, capsys):
        prompts(tmp_path)
        assert compare.main(words(tmp_path, "--max_new_tokens", "100000")) == 1
        assert "some, prompt 1: " in capsys.readouterr().err and not (tmp_path / "run.jsonl").exists()

    def test_another_calibration_or_window_of_the_head_is_refused(self, done, tmp_path, capsys):
        """The weights are the same, and the drafts are not."""
        path = copied(done, tmp_path)
        shutil.copytree(PAIR / "head", tmp_path / "head")
        argv = [word.replace(str(PAIR / "head"), str(tmp_path / "head")) for word in words(tmp_path)]
        assert compare.main(argv) == 0  # it may lie elsewhere
        before, meta = path.read_bytes(), tmp_path / "head" / "jetspec.json"
        depth = json.loads((PAIR / "head" / "config.json").read_text())["block_size"] - 1
        for change in ({"context_window": 5}, {"calibration": {"version": 1, "temperature": [2.0] * depth}}):
            meta.write_text(json.dumps({"fitted_on": "x"} | change))
            assert compare.main(argv) == 1
            assert "run.jsonl: begun with heads.jetspec=" in capsys.readouterr().err and path.read_bytes() == before

    def test_a_file_whose_first_line_is_half_there_is_begun_again(self, tmp_path):
        path = tmp_path / "x.jsonl"
        with ledger.opened(path, SETTINGS) as book:
            book.add(BASE)
        whole = path.read_bytes()
        for keep in (0, 1, 30, whole.index(b"\n")):
            path.write_bytes(whole[:keep])
            with ledger.opened(path, SETTINGS) as book:
                assert (book.requests, book.session) == ([], 1)
                book.add(BASE)
            assert path.read_bytes() == whole
        path.write_bytes(b'{"kind": "something else')
        with pytest.raises(ConfigError, match="no file of a comparison"), ledger.opened(path, SETTINGS):
            pass
        assert path.read_bytes() == b'{"kind": "something else'

    def test_a_full_disk_is_one_line_and_costs_one_request(self, tmp_path):
        """Files may have as many bytes as two requests and a half take; Python is told instead of ended."""
        path, limits = tmp_path / "x.jsonl", resource.getrlimit(resource.RLIMIT_FSIZE)
        with ledger.opened(path, SETTINGS) as book:
            book.add(BASE)
        line = len(path.read_bytes().splitlines()[1]) + 1
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + line + line // 2, limits[1]))
        try:
            said = r"x.jsonl: it cannot be written \(File too large\); make room, then the same command goes on"
            with pytest.raises(ConfigError, match=said), ledger.opened(path, SETTINGS) as book:
                for prompt in (1, 2, 3):
                    book.add(dataclasses.replace(BASE, prompt=prompt))
                    last = prompt
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        assert last == 1 and [r.prompt for r in ledger.read(path).requests] == [0, 1]  # half a line is no success
        with ledger.opened(path, SETTINGS) as book:
            book.add(dataclasses.replace(BASE, prompt=2))
        assert [r.prompt for r in ledger.read(path).requests] == [0, 1, 2]

    def test_a_pipe_is_refused_and_not_waited_for(self, tmp_path):
        os.mkfifo(tmp_path / "pipe")
        for path in (tmp_path / "pipe", tmp_path, pathlib.Path("/dev/null")):
            with pytest.raises(ConfigError, match="it is no regular file; name another"), ledger.opened(path, SETTINGS):
                pass

    def test_two_commands_do_not_write_one_file(self, done, tmp_path, capsys):
        path = copied(done, tmp_path)
        with ledger.opened(path, ledger.read(path).settings):
            assert compare.main(words(tmp_path)) == 1
        assert "another command is at work in it" in capsys.readouterr().err

    def test_ctrl_c_is_answered_in_two_seconds_and_nothing_is_lost(self, tmp_path):
        prompts(tmp_path)
        running = subprocess.Popen(
            [sys.executable, "-m", "jetspec_jax.evals.compare", *words(tmp_path, "--nolost", "--repeats", "900")],
            cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(ROOT)}, start_new_session=True,
        )  # fmt: skip
        path, begin = tmp_path / "run.jsonl", time.monotonic()
        while not path.exists() and time.monotonic() - begin < 100:
            time.sleep(0.05)
        time.sleep(1)
        begin = time.monotonic()
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=60)
        assert time.monotonic() - begin < 2
        assert running.returncode == 130 and out == ""
        assert err.splitlines()[-1] == "compare: interrupted; the same command goes on"
        assert ledger.read(path).settings["limit"] == 16


class TestTables:
    def test_a_table_from_the_file_alone(self, done, capsys, monkeypatch):
        monkeypatch.setattr(load, "load_target", None)
        assert compare.main(["--table", str(done / "run.jsonl")]) == 0
        out = capsys.readouterr().out
        assert out.count("| some | 0 | jetspec tree 4 | 4 |") == 5 and "4 equal" in out
        rows = [line for line in out.splitlines() if line.startswith("|")]
        blocks = [len(line.split(" | ")) for line in rows if line.startswith(("| set", "| prompt"))]
        assert len(blocks) == 5 and "| not available |" in out

    @pytest.mark.parametrize(
        "text, said",
        [
            ("", "no file of a comparison"), ("{}\n", "no file of a comparison"), ('{"kind": 3', "no file of a"),
            ('{"kind": "jetspec comparison"}\n', "sets, sampling and cells are needed"),
            ('{"kind": "jetspec comparison", "settings": {}}\n{"set": 3}\n', ":2: session is None"),
            ("nonsense\n", ":1: not JSON"),
        ],
    )  # fmt: skip
    def test_files_that_are_none(self, tmp_path, capsys, text, said):
        (tmp_path / "x.jsonl").write_text(text)
        assert compare.main(["--table", str(tmp_path / "x.jsonl")]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and said in err

    @pytest.mark.parametrize(
        "change, said",
        [
            ({"lost": {"nothing": "x"}}, "lost.nothing is 'x'; a whole"), ({"lost": {"nothing": None}}, "lost."),
            ({"depth": 2**31 - 1}, "depth is 2147483647; a whole number in 0..1024"),
            ({"nodes": 2000}, "nodes is 2000"), ({"decode": float("nan")}, "decode is nan"),
            ({"accept_lengths": [1.5]}, "accept_lengths[0] is 1.5"),
        ],
    )  # fmt: skip
    def test_requests_that_are_none(self, tmp_path, capsys, change, said):
        with ledger.opened(tmp_path / "x.jsonl", SETTINGS):
            pass
        with open(tmp_path / "x.jsonl", "a") as file:
            file.write(json.dumps(dataclasses.asdict(BASE) | change) + "\n")
        assert compare.main(["--table", str(tmp_path / "x.jsonl")]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and f"x.jsonl:2: {said}" in err

    def test_a_line_separator_within_a_text_ends_no_line(self, tmp_path):
        with ledger.opened(tmp_path / "x.jsonl", SETTINGS) as book:
            book.add(dataclasses.replace(BASE, text="a\u2028b\x85c"))
        assert ledger.read(tmp_path / "x.jsonl").requests[0].text == "a\u2028b\x85c"


class TestOptions:
    @pytest.mark.parametrize(
        "argv, said",
        [
            ([], "either --prompts and --out, or --table"), (["--prompts", "x"], "--out is missing"),
            (["--prompts", "x", "--table", "y"], "either"), (["--table", "x", "y", "--svg", "z"], "one comparison"),
            (["--prompts", "x", "--out", "y", "--budgets", "8", "8"], "--budgets: 8 8: one is there twice"),
            (["--prompts", "a/x.jsonl", "b/x.jsonl", "--out", "y"], "--prompts: x x: one is there twice"),
            (["--prompts", "x", "--out", "y", "--drafters", "oak"], "no method 'oak'"),
            (["--table", "x", "--out", "y"], "--out with --table: nothing is decoded; leave it out"),
            (["--prompts", "x", "--out", "y", "--budgets", "1"], "--budgets=1: give a whole number in 2..1024"),
        ],
    )  # fmt: skip
    def test_wrong_ones_are_one_line(self, capsys, argv, said):
        assert compare.main(argv) == 2
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and said in err


def test_a_picture_that_cannot_be_written_is_refused_before_the_work(done, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(load, "load_target", None)
    argv = words(tmp_path), ["--table", str(done / "run.jsonl")], ["--table", str(done / "run.jsonl"), "--overview"]
    lost = str(tmp_path / "none" / "x.svg")
    for more in argv:
        assert compare.main([*more, "--svg", lost]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1
        assert (
            err.startswith("compare: svg='/") and "cannot be written (No such file or directory); name another" in err
        )
    assert ceiling.main(["--svg", lost]) == 1 and "name another" in capsys.readouterr().err


def test_the_ceiling_reads_the_file(done, capsys, tmp_path):
    assert ceiling.main(["--rows", str(done / "run.jsonl"), "--svg", str(tmp_path / "c.svg")]) == 0
    assert "| some | 0 | jetspec chain 4 | 3 |" in capsys.readouterr().out
    ET.parse(tmp_path / "c.svg")


def test_the_verdict_of_an_output_that_was_changed():
    target = load.load_target(PAIR / "target")
    plain = speculate.generate(target, None, [PROMPTS[1]], None, SamplingConfig(8))[0].token_ids
    changed = [(plain[0] + 1) % 64, *plain[1:]]
    found = compare.judged(target, PROMPTS[1], plain, changed, SamplingConfig(8))
    assert (found["verdict"], found["parted_at"]) == ("differs", 0) and found["margin"] > 1e-4
    assert compare.judged(target, PROMPTS[1], plain, plain, SamplingConfig(8))["verdict"] == "equal"


def test_settings_that_a_file_lacks(tmp_path):
    with pytest.raises(ConfigError, match="begun with limit=None, now 4"):
        ledger.same(tmp_path, {"target": "a"}, {"target": "b", "limit": 4})
