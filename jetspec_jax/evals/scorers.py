"""Scores answers: mathematics by the final answer, programs by their tests.

    python -m jetspec_jax.evals.scorers --gold gsm8k.gold.jsonl --answers run.jsonl

--answers are lines of `jetspec_jax.evals.compare --out` or of `decode.py --json`; a line is judged by the gold line of
its id (`jetspec_jax.evals.formats` writes FILE.gold.jsonl beside FILE.jsonl). One JSON line an item, then the counts on
stderr. An answer is right, wrong, or unparsed: nothing in it can be compared. Programs are NOT RUN unless --run_code
says so: they come from a language model, run with your rights, and are held by limits of time and memory alone.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.evals.scorers")

import ast
import functools
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax import command
from jetspec_jax.evals import answers, sandbox
from jetspec_jax.fields import ConfigError, Fields, Option
from jetspec_jax.files import text as texts

KINDS = ("number", "math", "humaneval", "mbpp")
VERDICTS = RIGHT, WRONG, UNPARSED, NOT_RUN = "right", "wrong", "unparsed", "not run"
OTHERS = "without a gold answer"
LOUD = (
    "--run_code: PROGRAMS WRITTEN BY THE MODEL WILL RUN ON THIS MACHINE, with your rights, held by limits of time and "
    "memory alone; use a machine that may be lost"
)
Gold = Mapping[str, Any]


def beside(path: str | Path) -> dict[str, Gold]:
    """Returns the gold lines of a prompt file by id, of FILE.gold.jsonl beside FILE.jsonl; {} where there is none."""
    path = Path(os.path.expanduser(path))
    gold = path.with_name(f"{path.stem}.gold.jsonl")
    return read(gold) if gold.exists() else {}


def read(path: str | Path) -> dict[str, Gold]:
    """Returns gold lines by id.

    Raises:
      ConfigError: a line has no id, or not the fields of its kind.
    """
    found: dict[str, Gold] = {}
    for number, value in texts.json_lines(Path(path)):
        fields = Fields(value, f"{path}:{number}")
        kind = fields.text("kind", among=KINDS)
        row: dict[str, Any] = {"kind": kind}
        if kind in ("number", "math"):
            row["answer"] = fields.text("answer")
        elif kind == "humaneval":
            row |= {key: fields.text(key) for key in ("prompt", "entry_point", "test")}
        else:
            row |= {"tests": list(fields.texts("tests")), "setup": fields.text("setup", "")}
        if not fields.has("id"):
            raise fields.wrong("id", "the id of the prompt is needed")
        found[str(fields.raw["id"])] = row
    return found


def score(gold: Gold, text: str, run_code: bool = False, ended: bool = True) -> dict[str, Any]:
    """Returns what an answer is worth: {"verdict", "answer", "why"}; equal texts have equal scores.

    Args:
      gold: a line of `read`.
      text: of the answer.
      run_code: whether its program is run; without that its verdict is "not run".
      ended: whether it ended by itself; of one that the limit cut, the last number is no answer.
    """
    kind = gold["kind"]
    if kind == "number":
        return _number(gold["answer"], text, ended)
    if kind == "math":
        found = answers.final(text)
        if found is None:
            return _verdict(UNPARSED, None, "no final answer")
        return _verdict(RIGHT if answers.same(found, gold["answer"]) else WRONG, found)
    found = program(gold, text)
    if found is None:
        return _verdict(UNPARSED, None, "no program")
    if not run_code:
        return _verdict(NOT_RUN, None, "--run_code runs it")
    came = _run(found)
    return _verdict(RIGHT if came.passed else WRONG, None, came.why)


def _verdict(verdict: str, answer: str | None, why: str = "") -> dict[str, Any]:
    return {"verdict": verdict, "answer": answer, "why": why}


_run = functools.lru_cache(4096)(sandbox.run)  # a program is the same to the letter with any drafter


def _number(gold: str, text: str, ended: bool) -> dict[str, Any]:
    """Judges the number of the final answer, or its first; without such an answer, the last number of the text."""
    wanted, stated, why = answers.value(answers.normal(gold)), answers.final(text), ""
    if stated is None:
        why = "the last number"
        found = next(iter(answers.numbers(text)[::-1]), None)
    elif answers.value(answers.normal(stated)) is not None:
        found = answers.normal(stated)
    else:
        found = next(iter(answers.numbers(stated)), None)
    if stated is None and not ended:
        return _verdict(UNPARSED, None, "cut before a final answer")
    if found is None:
        return _verdict(UNPARSED, None, "no number")
    value = answers.value(answers.normal(found))
    right = value == wanted if wanted is not None else answers.same(found, gold)
    return _verdict(RIGHT if right else WRONG, found, why)


def program(gold: Gold, text: str) -> str | None:
    """Returns the program that tests an answer; None where the answer holds no Python.

    Of a HumanEval answer without the function's head the task's own is put before it; of one with it, the task's
    imports are.
    """
    code = _code(text, gold.get("entry_point"))
    if gold["kind"] == "mbpp":
        return None if code is None else "\n".join([code, gold["setup"], *gold["tests"]]).replace("\r\n", "\n")
    head, name = gold["prompt"], gold["entry_point"]
    if code is None:  # a body that goes on after the task's last line
        body = head + _unfenced(text)
        code = body if _parses(body) and text.strip() else None
    elif re.search(rf"^def\s+{re.escape(name)}\b", code, re.M):
        code = head[: head.index(f"def {name}")] + "\n" + code if f"def {name}" in head else code
    else:
        code = head + "\n" + code
    return None if code is None else f"{code}\n\n{gold['test']}\n\ncheck({name})\n"


def _code(text: str, name: str | None) -> str | None:
    """The first fenced block that defines what is asked for, else the first that parses, else the text if it does."""
    blocks = re.findall(r"```[ \t]*(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", text, re.S | re.I)
    blocks = [block for block in blocks if _parses(block)]
    defining = [
        b for b in blocks if re.search(rf"^def\s+{re.escape(name)}\b" if name else r"^(?:def|class)\s", b, re.M)
    ]
    if defining or blocks:
        return (defining or blocks)[0]
    return text if re.search(r"^(?:def|class)\s", text, re.M) and _parses(text) else None


def _unfenced(text: str) -> str:
    found = re.search(r"```[ \t]*(?:python|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", text, re.S | re.I)
    return found[1] if found else text


def _parses(code: str) -> bool:
    try:
        return bool(ast.parse(code).body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


LINE = command.Line(
    __doc__,
    [
        Option("gold", "text", "Files of gold answers.", many=True, required=True, metavar="FILE.gold.jsonl"),
        Option("answers", "text", "File of answers.", required=True, metavar="FILE.jsonl"),
        Option("run_code", "flag", "Run the programs that the model wrote. UNSAFE, see above.", False),
    ],
)
SHOWN = ("set", "temperature", "drafter", "shape", "nodes", "method")


@command.tool("scorers")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    gold: dict[str, Gold] = {}
    for path in args.gold:
        gold |= read(path)
    if args.run_code:
        print(LOUD, file=sys.stderr, flush=True)
    counts: Counter[str] = Counter()
    for _, value in texts.json_lines(Path(args.answers)):
        if not isinstance(value, Mapping) or not isinstance(value.get("text"), str) or str(value.get("id")) not in gold:
            counts[OTHERS] += isinstance(value, Mapping) and "text" in value
            continue
        ended = value.get("finish_reason") != "length"
        found = score(gold[str(value["id"])], value["text"], args.run_code, ended)
        counts[found["verdict"]] += 1
        print(json.dumps({key: value[key] for key in ("id", *SHOWN) if key in value} | found), flush=True)
    if not counts.total():
        raise ConfigError(f"{args.answers}: no line has a text")
    print(", ".join(f"{counts[name]} {name}" for name in (*VERDICTS, OTHERS) if counts[name]), file=sys.stderr)
    return 0
