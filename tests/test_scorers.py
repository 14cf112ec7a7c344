"""Scores of answers: final answers of mathematics, programs and their limits, gold files, and the layout of sets."""

import json
import os
import pathlib
import time

import pytest

from jetspec_jax.config import ConfigError
from jetspec_jax.evals import answers, formats, sandbox, scorers
from jetspec_jax.files import prompts

DATA = pathlib.Path(os.environ.get("JETSPEC_PROMPT_SETS", "none"))  # a folder as `formats` reads it


class TestFinalAnswers:
    @pytest.mark.parametrize(
        "text, wanted",
        [
            (r"so \boxed{3} or \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
            (r"\boxed{a \text{ if } \{b\}}", r"a \text{ if } \{b\}"),
            (r"\boxed{4", None), (r"\boxed 7$", "7"), (r"\fbox{x}", "x"), (r"\boxed{\boxed{5}}", "5"),
            (r"{\boxed{\{5\}}", r"\{5\}"),
            ("16 - 3 = 13\n#### 13", "13"),
            ("The answer is 42. Then", "42"), ("**Answer:** 3.5", "3.5"),
            ("the final answer is $\\frac{1}{2}$.", r"\frac{1}{2}"),
            ("nothing here", None), ("", None), (r"\boxed{}", None), ("answer is: yes\nThe answer is no", "no"),
        ],
    )  # fmt: skip
    def test_where_it_stands(self, text, wanted):
        assert answers.final(text) == wanted

    @pytest.mark.parametrize(
        "one, other",
        [
            (r"\frac34", r"\dfrac{3}{4}"), ("0.75", r"\frac{3}{4}"), ("3/4", "0.75"),
            (r"\frac{270}7", r"\frac{270}{7}"),
            (r"10,\!080", "10080"), (r"\$32,\!348", "32348"), ("$1,000$", "1000"), ("1,234,567.50", "1234567.5"),
            (r"145^\circ", "145"), (r"145^{\circ}", "145"), ("90°", "90"),
            (r"\frac{270}7\text{ degrees}", r"\frac{270}{7}"),
            (r"1\frac{4}{5}", "1.8"), (r"137 \frac{1}{2}", "137.5"), (r"-1\frac{1}{2}", "-1.5"),
            (r"-\frac{24}{25}", r"\frac{-24}{25}"), (".5", "0.50"), ("11.00", "11"), ("7.", "7"), ("\u22125", "-5"),
            ("3, 5, 7", "7,3,5"), (r"\{1\pm\sqrt{5},-2\}", r"\{ -2, 1 \pm \sqrt5 \}"), ("(0.5, 3)", r"(\frac12,3)"),
            (r"\left( 3, \frac{\pi}{2} \right)", r"(3,\frac{\pi}{2})"), (r"x \in (2,\infty)", r"(2, \infty)"),
            ("x = 5", "5"), (r"5\text{ cm}^2", "5"), ("5 cm", "5"), ("12 square feet", "12"), ("18 dollars", "18"),
            (r"15\%", "15"), ("15%", "15"), (r"\text{(B)}", "B"), (r"\text{Evelyn}", "Evelyn"), ("52_{8}", "52_8"),
            (r"\sqrt5", r"\sqrt{5}"), (r"2 \times 3", r"2\cdot 3"), ("(0,9) \\cup (9,36)", r"(0,9)\cup(9,36)"),
        ],
    )  # fmt: skip
    def test_the_same_in_another_spelling(self, one, other):
        assert answers.same(one, other) and answers.same(other, one), (answers.normal(one), answers.normal(other))

    @pytest.mark.parametrize(
        "one, other",
        [
            ("(1,2)", "(2,1)"), ("(1,2]", "(1,2)"), ("3", "4"), ("1,2", "1,2,3"), ("1,1,2", "1,2,2"), ("x+1", "x+2"),
            ("100, 200", "100200"), (r"\frac{1}{2}", "2"), ("-3", "3"), (r"\frac{1}{0}", "0"), ("3m", "3"),
            ("12", "1.2"), ("x^2", "x^3"), ("52_8", "52_9"), (r"\{1,2\}", "(1,2)"), (r"\sqrt{50}", r"\sqrt{5}0"),
        ],
    )  # fmt: skip
    def test_what_is_not_the_same(self, one, other):
        assert not answers.same(one, other) and not answers.same(other, one)

    @pytest.mark.parametrize(
        "text", ["{" * 5000, "\\frac" * 3000, "9" * 5000, "((((,))", "\\boxed{" * 2000, "\x00", "1/"]
    )
    def test_no_text_breaks_it(self, text):
        begin = time.monotonic()
        answers.same(text, "3")
        answers.final(text)
        answers.final(f"\\boxed{{{text}}}")
        assert time.monotonic() - begin < 2


TASK = 'import math\n\ndef twice(x):\n    """Doubles."""\n'
CHECK = "def check(candidate):\n    assert candidate(2) == 4\n    assert math.pi\n"
HUMAN = {"kind": "humaneval", "entry_point": "twice", "prompt": TASK, "test": CHECK}
MBPP = {"kind": "mbpp", "tests": ["assert thrice(2) == 6"], "setup": ""}


class TestScores:
    @pytest.mark.parametrize(
        "text, verdict, answer",
        [
            (r"Thus \boxed{18}.", "right", "18"), ("#### 18", "right", "18"), (r"\boxed{\$18.00}", "right", "18.00"),
            ("She makes 9 * 2 = 18 dollars", "right", "18"), ("The answer is 18 apples for 3 people", "right", "18"),
            ("18 and then 19", "wrong", "19"), (r"18 \boxed{19}", "wrong", "19"), ("none", "unparsed", None),
            (r"18 \boxed{many}", "unparsed", None),
        ],
    )  # fmt: skip
    def test_numbers(self, text, verdict, answer):
        found = scorers.score({"kind": "number", "answer": "18"}, text)
        assert (found["verdict"], found["answer"]) == (verdict, answer)

    def test_the_last_number_of_an_answer_that_was_cut_is_none(self):
        verdict = lambda text: scorers.score({"kind": "number", "answer": "18"}, text, ended=False)["verdict"]
        assert [verdict("9 * 2 = 18"), verdict("#### 18")] == ["unparsed", "right"]

    def test_mathematics(self):
        gold = {"kind": "math", "answer": r"\frac{14}{3}"}
        verdict = lambda text: scorers.score(gold, text)["verdict"]
        assert [verdict(r"\boxed{14/3}"), verdict(r"\boxed{5}"), verdict("so 14/3")] == ["right", "wrong", "unparsed"]

    @pytest.mark.parametrize(
        "gold, text, verdict",
        [
            (HUMAN, "Sure:\n```python\ndef twice(x):\n    return 2 * x\n```\nIt works.", "right"),
            (HUMAN, "```python\ndef twice(x):\n    return 3 * x\n```", "wrong"),
            (HUMAN, "    return 2 * x\n", "right"), (HUMAN, "```\n    return 2 * x\n```", "right"),
            (HUMAN, "```python\nprint(1)\n```\n```python\ndef twice(x):\n    return 2 * x\n```", "right"),
            (HUMAN, "```python\ndef twice(x):\n    return 2 * x", "right"),  # cut by the limit, and whole
            (HUMAN, "I cannot: do that!", "unparsed"), (HUMAN, "", "unparsed"),
            (MBPP, "```python\ndef thrice(x):\n    return 3 * x\n```", "right"), (MBPP, "no idea (", "unparsed"),
            (MBPP, "def thrice(x):\n    return 3 * x\n", "right"), (MBPP, "```python\nx = (\n```", "unparsed"),
            (MBPP, "```python\nraise SystemExit(0)\n```", "wrong"),
        ],
    )  # fmt: skip
    def test_programs(self, gold, text, verdict):
        assert scorers.score(gold, text, run_code=True)["verdict"] == verdict
        wanted = "unparsed" if verdict == "unparsed" else "not run"
        assert scorers.score(gold, text)["verdict"] == wanted  # nothing is run unless it is asked for

    def test_nothing_is_run_unasked(self, monkeypatch):
        monkeypatch.setattr(scorers, "_run", None)
        assert scorers.score(MBPP, "def thrice(x):\n    return 1\n")["verdict"] == "not run"


class TestSandbox:
    def test_ends(self):
        assert sandbox.run("x = 1\nprint(x)") == (True, "")
        assert sandbox.run("assert 1 == 2, 'no'") == (False, "AssertionError: no")
        assert sandbox.run("import os; os._exit(0)") == (False, "it ended before its tests did")
        assert sandbox.run("def f(:").why.startswith("SyntaxError")

    def test_limits(self):
        begin = time.monotonic()
        ends = "killed at its limit of 1 seconds of CPU, or of memory", "no end within 3 seconds"  # on a busy machine
        assert sandbox.run("while True: pass", seconds=1).why in ends
        assert sandbox.run("import time; time.sleep(60)", seconds=1).why == ends[1]
        told = "from resource import *\nassert getrlimit(RLIMIT_CPU) == (7, 7) and getrlimit(RLIMIT_AS)[1] == 1 << 28"
        assert sandbox.run(told, seconds=7, memory=1 << 28) == (True, "")
        assert "MemoryError" in sandbox.run("x = bytearray(1 << 30)", memory=1 << 28).why
        assert time.monotonic() - begin < 20

    def test_what_it_starts_ends_with_it(self, tmp_path):
        mark = tmp_path / "mark"
        program = f"import subprocess\nsubprocess.Popen(['/bin/sh', '-c', 'sleep 1; echo > {mark}'])\n"
        assert sandbox.run(program).passed
        time.sleep(1.3)
        assert not mark.exists()

    def test_it_sees_neither_the_folder_nor_the_environment(self, monkeypatch, tmp_path):
        monkeypatch.setenv("JETSPEC_SECRET", "x")
        monkeypatch.chdir(tmp_path)
        program = "import os\nassert 'JETSPEC_SECRET' not in os.environ and os.listdir() == ['program.py']"
        assert sandbox.run(program) == (True, "")


class TestCommand:
    def test_items_and_counts(self, tmp_path, capsys):
        (tmp_path / "g.jsonl").write_text('{"id": "a", "kind": "number", "answer": "3"}\n')
        rows = [{"id": "a", "text": "#### 3", "drafter": "x"}, {"id": "a", "text": "?"}, {"id": "b", "text": "3"}]
        (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in [{"kind": "header"}, *rows]))
        assert scorers.main(["--gold", str(tmp_path / "g.jsonl"), "--answers", str(tmp_path / "a.jsonl")]) == 0
        out, err = capsys.readouterr()
        first, second = map(json.loads, out.splitlines())
        assert first == {"id": "a", "drafter": "x", "verdict": "right", "answer": "3", "why": ""}
        assert second["verdict"] == "unparsed" and err == "1 right, 1 unparsed, 1 without a gold answer\n"

    @pytest.mark.parametrize(
        "line, said",
        [
            ('{"id": 1, "kind": "oak"}', "kind is 'oak'; use number"),
            ('{"kind": "math", "answer": "1"}', "id is None"),
            ('{"id": 1, "kind": "math"}', "answer is None; a text"), ("[]", "a JSON object is needed"),
            ('{"id": 1, "kind": "mbpp", "tests": [3]}', "tests[0] is 3"),
        ],
    )  # fmt: skip
    def test_wrong_gold_lines(self, tmp_path, line, said):
        (tmp_path / "g.jsonl").write_text(line + "\n")
        with pytest.raises(ConfigError, match=r"g\.jsonl:1: ") as error:
            scorers.read(tmp_path / "g.jsonl")
        assert said in str(error.value)


SETS = {
    "gsm8k/test.jsonl": [{"question": "1 + 1?", "answer": "so 2\n#### 2"}, {"question": "2?", "answer": "two"}],
    "math500/test.jsonl": [{"unique_id": "a/1.json", "problem": "x?", "answer": "\\pi"}],
    "mbpp/test.jsonl": [{"task_id": 11, "text": "t", "test_list": ["assert f()"], "test_setup_code": "y = 1"}],
    "humaneval/test.jsonl": [{"task_id": "HumanEval/0", "prompt": "def f():\n", "entry_point": "f", "test": "T"}],
    "spec_bench/question.jsonl": [{"question_id": 81, "category": "writing", "turns": ["Write.", "Again."]}],
}


class TestLayout:
    @pytest.fixture
    def folder(self, tmp_path):
        for name, rows in SETS.items():
            path = tmp_path / "from" / name
            path.parent.mkdir(parents=True)
            formats.write(path, rows)
        formats.write(tmp_path / "from" / "mine.jsonl", [{"prompt": "hello", "id": 7}])
        formats.write(tmp_path / "from" / "mine.gold.jsonl", [{"id": 7, "kind": "math", "answer": "8"}])
        formats.write(tmp_path / "from" / "gsm8k.jsonl", [{"prompt": "another"}])
        formats.write(tmp_path / "from" / "gsm8k.gold.jsonl", [{"id": "gsm8k/0", "kind": "number", "answer": "9"}])
        formats.write(tmp_path / "from" / "odd.jsonl", [{"question": "x"}])
        return tmp_path / "from"

    def test_all_of_a_folder(self, folder, tmp_path, capsys):
        into = tmp_path / "deep" / "into"
        assert formats.main(["--all", str(folder), "--into", str(into)]) == 0
        err = capsys.readouterr().err
        assert "gsm8k.jsonl: 2 prompts of gsm8k, 1 with an answer in gsm8k.gold.jsonl" in err
        assert "missing: aime24 (" in err and "mt_bench (" in err and "math500 (" not in err
        assert "odd.jsonl:1: give one of" in err and "gsm8k is the name of a benchmark that is there" in err
        names = {"gsm8k", "math500", "mbpp", "humaneval", "spec_bench", "mine"}
        files = {path.name for path in into.iterdir()}
        assert files == {f"{n}.jsonl" for n in names} | {f"{n}.gold.jsonl" for n in names - {"spec_bench"}}
        rows = [row for path in into.glob("*.jsonl") if ".gold" not in path.name for row in prompts.read(path)]
        assert {row.id for row in rows} >= {"spec_bench/writing/81", "gsm8k/0", "math500/a/1.json", "mbpp/11", 7}
        spec = prompts.read(into / "spec_bench.jsonl")[0]
        assert spec.prompt == [{"role": "user", "content": "Write."}]
        gold = {k: v for path in into.glob("*.gold.jsonl") for k, v in scorers.read(path).items()}
        assert set(gold) == {"gsm8k/0", "math500/a/1.json", "mbpp/11", "humaneval/HumanEval/0", "7"}
        assert gold["gsm8k/0"]["answer"] == "2" and gold["mbpp/11"]["setup"] == "y = 1"
        assert scorers.beside(into / "mine.jsonl") == {"7": {"kind": "math", "answer": "8"}}
        assert scorers.beside(into / "spec_bench.jsonl") == {}
        assert formats.main(["--all", str(into), "--into", str(into)]) == 0  # onto itself: the files as they are

    def test_wrong_words(self, folder, tmp_path, capsys):
        for argv, status, said in (
            ([], 2, "NAME is missing"), (["gsm8k"], 2, "FOLDER is missing"),
            (["gsm8k", "x"], 2, "OUT.jsonl is missing"),
            (["--all", "x"], 2, "--into is missing"), (["--into", "x"], 2, "--all is missing"),
            (["gsm8k", "--all", "x", "--into", "y"], 2, "'gsm8k' with --all"),
            (["--all", str(tmp_path / "none"), "--into", "y"], 1, "no such folder"),
            (["--all", str(folder / "gsm8k"), "--into", str(tmp_path / "z")], 1, "no prompt file in it"),
        ):  # fmt: skip
            assert formats.main(argv) == status, argv
            err = capsys.readouterr().err
            assert said in err and err.count("\n") == 1

    @pytest.mark.skipif(not (DATA / "math500").is_dir(), reason="JETSPEC_PROMPT_SETS names no folder of prompt sets")
    def test_published_solutions_are_right(self):
        """The benchmarks' own solutions, all of them; of the programs a few are run."""
        for name, solution in (("gsm8k", "answer"), ("math500", "solution")):
            rows = formats.read(DATA / formats.BENCHMARKS[name].file)
            for row, (_, gold) in zip(rows, formats.laid_out(name, DATA), strict=True):
                assert scorers.score(gold, row[solution])["verdict"] == "right", row
        for name, solution in (("humaneval", "canonical_solution"), ("mbpp", "code")):
            rows = formats.read(DATA / formats.BENCHMARKS[name].file)
            for row, (_, gold) in [*zip(rows, formats.laid_out(name, DATA), strict=True)][::100]:
                text = row[solution] if name == "humaneval" else f"```python\n{row[solution]}\n```"
                assert scorers.score(gold, text, run_code=True)["verdict"] == "right", row
