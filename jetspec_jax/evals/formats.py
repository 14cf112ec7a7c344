"""Benchmark prompts in the format of JetSpec's own benchmark, from folders of jsonl files.

    python -m jetspec_jax.evals.formats NAME FOLDER OUT.jsonl

NAME is one of gsm8k, math500, aime24, aime25, humaneval, mbpp, livecodebench, mt_bench; FOLDER holds one folder a
benchmark, in the fields of its origin. OUT is what `decode.py --prompt_file` reads: {"id": ..., "messages": [...]}, one
object a line.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.evals.formats")

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jetspec_jax import command
from jetspec_jax.fields import ConfigError, Option, shown
from jetspec_jax.files import text

BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def reasoning(problem: str) -> str:
    """Returns a mathematics problem with the suffix that asks for a boxed answer."""
    return problem + BOXED


def function(code: str) -> str:
    """Returns a function to complete, in the wording used with HumanEval."""
    return f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{code}\n```"


def tested(text: str, tests: list[str]) -> str:
    """Returns a task with its assertions, in the wording used with MBPP."""
    return f"{text}\nYour code should pass these tests:\n" + "\n".join(tests)


def contest(statement: str) -> str:
    """Returns a competitive-programming problem, in the wording used with LiveCodeBench."""
    return f"Write a Python solution to the following competitive-programming problem:\n```\n{statement}\n```"


class Benchmark(NamedTuple):
    """Where a benchmark lies below the folder, what it calls its rows, and how a row becomes the user's message."""

    file: str
    key: str | None  # None: rows are numbered
    prompt: Callable[[dict[str, Any]], str]


BENCHMARKS = {
    "gsm8k": Benchmark("gsm8k/test.jsonl", None, lambda row: reasoning(row["question"])),
    "math500": Benchmark("math500/test.jsonl", "unique_id", lambda row: reasoning(row["problem"])),
    "aime24": Benchmark("aime24/test.jsonl", "id", lambda row: reasoning(row["problem"])),
    "aime25": Benchmark("aime25/test.jsonl", None, lambda row: reasoning(row["problem"])),
    "humaneval": Benchmark("humaneval/test.jsonl", "task_id", lambda row: function(row["prompt"])),
    "mbpp": Benchmark("mbpp/test.jsonl", "task_id", lambda row: tested(row["text"], row["test_list"])),
    "livecodebench": Benchmark("livecodebench/test.jsonl", "question_id", lambda row: contest(row["question_content"])),
    "mt_bench": Benchmark("mt_bench/question.jsonl", "question_id", lambda row: row["turns"][0]),
}


def load(name: str, folder: str | Path) -> list[dict[str, Any]]:
    """Returns rows {"id": str, "messages": [one user message]} of a benchmark, in the file's order."""
    if name not in BENCHMARKS:
        raise ConfigError(f"benchmark={name!r}: choose one of {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    rows = read(Path(folder) / benchmark.file)
    found = []
    for i, row in enumerate(rows):
        try:
            identity = str(i if benchmark.key is None else row[benchmark.key])
            found.append(message(f"{name}/{identity}", benchmark.prompt(row)))
        except (KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"{Path(folder) / benchmark.file}: row {i + 1} has not the fields of {name} ({error!r})"
            ) from None
    return found


def message(identity: str, text: str) -> dict[str, Any]:
    """Returns a row of a prompt file with one user message."""
    return {"id": identity, "messages": [{"role": "user", "content": text}]}


def read(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a jsonl file."""
    if not path.exists():
        raise ConfigError(f"{path}: no such file; give the folder that holds the prompt sets")
    rows = []
    for number, row in text.json_lines(path):
        if not isinstance(row, dict):
            raise ConfigError(f"{path}:{number}: {shown(row)} is no JSON object")
        rows.append(row)
    return rows


def write(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """Writes a jsonl file of the rows."""
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


LINE = command.Line(
    __doc__,
    [],
    [
        Option("name", "choice", "The benchmark.", choices=tuple(BENCHMARKS), required=True, metavar="NAME"),
        Option("folder", "text", "Folder of the benchmarks.", required=True, metavar="FOLDER"),
        Option("out", "text", "Prompt file to write.", required=True, metavar="OUT.jsonl"),
    ],
)


@command.tool("formats")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    rows = load(args.name, args.folder)
    write(args.out, rows)
    print(f"{args.out}: {len(rows)} prompts of {args.name}", file=sys.stderr)
    return 0
