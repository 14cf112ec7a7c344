"""Benchmark prompts in the format of JetSpec's own benchmark, from folders of jsonl files.

    python -m jetspec_jax.evals.formats NAME FOLDER OUT.jsonl

    python -m jetspec_jax.evals.formats --all FOLDER --into DIR

NAME is one of gsm8k, math500, aime24, aime25, humaneval, mbpp, livecodebench, mt_bench, spec_bench; FOLDER holds one
folder a benchmark, in the fields of its origin. OUT is what `decode.py --prompt_file` reads: {"id": ..., "messages":
[...]}, one object a line. What an answer is judged by goes into OUT.gold.jsonl beside it, where the benchmark has it.
--all lays out every benchmark that FOLDER has, and copies the prompt files that lie in FOLDER itself as they are; it
says which benchmarks are missing.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.evals.formats")

import contextlib
import json
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jetspec_jax import command
from jetspec_jax.command import UsageError
from jetspec_jax.fields import ConfigError, Option, shown
from jetspec_jax.files import output, prompts, text

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
    """Where a benchmark lies below the folder, what it calls its rows, and how a row becomes the user's message.

    key: one field, or several that are joined by slashes; None: rows are numbered. gold: what an answer is judged by,
    a line of `scorers.read` without its id; None where the files do not say.
    """

    file: str
    key: str | tuple[str, ...] | None
    prompt: Callable[[dict[str, Any]], str]
    gold: Callable[[dict[str, Any]], dict[str, Any]] | None = None


def _number(row: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "number", "answer": row["answer"].split("####")[1].strip()}


def _math(row: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "math", "answer": str(row["answer"])}


def _humaneval(row: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "humaneval"} | {key: row[key] for key in ("prompt", "entry_point", "test")}


def _mbpp(row: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "mbpp", "tests": row["test_list"], "setup": row["test_setup_code"]}


BENCHMARKS = {
    "gsm8k": Benchmark("gsm8k/test.jsonl", None, lambda row: reasoning(row["question"]), _number),
    "math500": Benchmark("math500/test.jsonl", "unique_id", lambda row: reasoning(row["problem"]), _math),
    "aime24": Benchmark("aime24/test.jsonl", "id", lambda row: reasoning(row["problem"]), _math),
    "aime25": Benchmark("aime25/test.jsonl", None, lambda row: reasoning(row["problem"]), _math),
    "humaneval": Benchmark("humaneval/test.jsonl", "task_id", lambda row: function(row["prompt"]), _humaneval),
    "mbpp": Benchmark("mbpp/test.jsonl", "task_id", lambda row: tested(row["text"], row["test_list"]), _mbpp),
    "livecodebench": Benchmark("livecodebench/test.jsonl", "question_id", lambda row: contest(row["question_content"])),
    "mt_bench": Benchmark("mt_bench/question.jsonl", "question_id", lambda row: row["turns"][0]),
}
# Suites that others publish; a training pool does not ask for their files.
EVERY = BENCHMARKS | {
    "spec_bench": Benchmark("spec_bench/question.jsonl", ("category", "question_id"), lambda row: row["turns"][0])
}


def load(name: str, folder: str | Path) -> list[dict[str, Any]]:
    """Returns rows {"id": str, "messages": [one user message]} of a benchmark, in the file's order."""
    return [row for row, _ in laid_out(name, folder)]


def laid_out(name: str, folder: str | Path) -> list[tuple[dict[str, Any], dict[str, Any] | None]]:
    """Returns rows of a benchmark as `load` does, each with its gold line; None where the file has no answer."""
    if name not in EVERY:
        raise ConfigError(f"benchmark={name!r}: choose one of {', '.join(EVERY)}")
    benchmark = EVERY[name]
    rows = read(Path(folder) / benchmark.file)
    found: list[tuple[dict[str, Any], dict[str, Any] | None]] = []
    for i, row in enumerate(rows):
        try:
            keys = (benchmark.key,) if isinstance(benchmark.key, str) else benchmark.key
            identity = f"{name}/{'/'.join(str(row[key]) for key in keys) if keys else i}"
            asked = message(identity, benchmark.prompt(row))
        except (KeyError, TypeError, IndexError) as error:
            raise ConfigError(
                f"{Path(folder) / benchmark.file}: row {i + 1} has not the fields of {name} ({error!r})"
            ) from None
        gold = None
        with contextlib.suppress(KeyError, TypeError, IndexError, AttributeError):
            gold = {"id": identity} | benchmark.gold(row) if benchmark.gold else None
        found.append((asked, gold))
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
    """Writes a jsonl file of the rows, whole or not at all."""
    output.write(Path(path), "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows))


def lay_out(name: str, folder: str | Path, out: Path) -> str:
    """Writes a benchmark's prompt file, and its gold file where it has answers; returns what was written, one line."""
    rows = laid_out(name, folder)
    gold = [line for _, line in rows if line is not None]
    write(out, [row for row, _ in rows])
    if not gold:
        return f"{out}: {len(rows)} prompts of {name}"
    beside = out.with_name(f"{out.stem}.gold.jsonl")
    write(beside, gold)
    return f"{out}: {len(rows)} prompts of {name}, {len(gold)} with an answer in {beside.name}"


def lay_out_all(folder: Path, into: Path) -> list[str]:
    """Lays out what a folder has; returns a line for each benchmark and for each file in it.

    Raises:
      ConfigError: the folder has nothing.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder}: no such folder; give the one that holds the prompt sets")
    into.mkdir(parents=True, exist_ok=True)
    there = [name for name, benchmark in EVERY.items() if (folder / benchmark.file).is_file()]
    said = [lay_out(name, folder, into / f"{name}.jsonl") for name in there]
    done = len(there)
    for path in sorted(folder.glob("*.jsonl")):
        name = path.name.removesuffix(".jsonl").removesuffix(".gold")
        if name in there:  # its gold answers too: those of an earlier run may be of other rows
            said.append(f"{path}: left out; {name} is the name of a benchmark that is there")
        elif path.name.endswith(".gold.jsonl"):
            _copy(path, into / path.name)
        else:
            try:
                count = len(prompts.read(path))
            except ConfigError as error:
                said.append(f"left out: {error}")
                continue
            _copy(path, into / path.name)
            said.append(f"{into / path.name}: {count} prompts, as they are")
            done += 1
    missing = [f"{name} ({folder / benchmark.file})" for name, benchmark in EVERY.items() if name not in there]
    said += [f"missing: {', '.join(missing)}"] if missing else []
    if not done:
        raise ConfigError(f"{folder}: no benchmark and no prompt file in it; it may hold {', '.join(EVERY)}")
    return said


def _copy(path: Path, out: Path) -> None:
    if path.resolve() != out.resolve():
        shutil.copyfile(path, out)


LINE = command.Line(
    __doc__,
    [
        Option("all", "text", "Lay out every benchmark of this folder.", metavar="FOLDER"),
        Option("into", "text", "Folder that --all writes into.", metavar="DIR"),
    ],
    [
        Option("name", "choice", "The benchmark.", choices=tuple(EVERY), metavar="NAME"),
        Option("folder", "text", "Folder of the benchmarks.", metavar="FOLDER"),
        Option("out", "text", "Prompt file to write.", metavar="OUT.jsonl"),
    ],
)


@command.tool("formats")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    if args.all or args.into:
        if args.name:
            raise UsageError(f"{shown(args.name)} with --{'all' if args.all else 'into'}: give either of them")
        for name in ("all", "into"):
            if not getattr(args, name):
                raise UsageError(f"--{name} is missing; --help lists the options")
        said = lay_out_all(Path(args.all), Path(args.into))
    else:
        for option in LINE.positional.values():
            if getattr(args, option.name) is None:
                raise UsageError(f"{option.metavar} is missing; --help lists the options")
        said = [lay_out(args.name, args.folder, Path(args.out))]
    print("\n".join(said), file=sys.stderr)
    return 0
