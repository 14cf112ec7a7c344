"""Benchmark prompts in the format of JetSpec's own benchmark, from folders of jsonl files.

    python -m jetspec_jax.evals.prompts NAME FOLDER OUT.jsonl

NAME is one of gsm8k, math500, aime24, aime25, humaneval, mbpp, livecodebench, mt_bench; FOLDER holds one folder a
benchmark, in the fields of its origin. OUT is what `decode.py --prompt_file` reads: {"id": ..., "messages": [...]}, one
object a line.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from jetspec_jax import speculate
from jetspec_jax.config import ConfigError, SamplingConfig

OPTIONS = {field.name for field in dataclasses.fields(SamplingConfig)}
BOXED = "\nPlease reason step by step, and put your final answer within \\boxed{}."


def reasoning(problem: str) -> str:
    """A mathematics problem with the suffix that asks for a boxed answer."""
    return problem + BOXED


def function(code: str) -> str:
    """A function to complete, in the wording used with HumanEval."""
    return f"Write a solution to the following problem and make sure that it passes the tests:\n```python\n{code}\n```"


def tested(text: str, tests: list[str]) -> str:
    """A task with its assertions, in the wording used with MBPP."""
    return f"{text}\nYour code should pass these tests:\n" + "\n".join(tests)


def contest(statement: str) -> str:
    """A competitive-programming problem, in the wording used with LiveCodeBench."""
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
    """Rows {"id": str, "messages": [one user message]} of a benchmark, in the file's order."""
    if name not in BENCHMARKS:
        raise ConfigError(f"benchmark={name!r}: choose one of {', '.join(BENCHMARKS)}")
    benchmark = BENCHMARKS[name]
    rows = read(Path(folder) / benchmark.file)
    names = [str(i if benchmark.key is None else row[benchmark.key]) for i, row in enumerate(rows)]
    return [message(f"{name}/{n}", benchmark.prompt(row)) for n, row in zip(names, rows, strict=True)]


def message(identity: str, text: str) -> dict[str, Any]:
    """A row of a prompt file with one user message."""
    return {"id": identity, "messages": [{"role": "user", "content": text}]}


def read(path: Path) -> list[dict[str, Any]]:
    """The objects of a jsonl file."""
    try:
        with open(path, encoding="utf-8") as f:
            rows = [json.loads(line) for line in f if line.strip()]
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the folder that holds the prompt sets") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not a jsonl file in UTF-8 ({error})") from None
    odd = next((number for number, row in enumerate(rows, 1) if not isinstance(row, dict)), None)
    if odd is not None:
        raise ConfigError(f"{path}: row {odd} is no JSON object")
    return rows


def encode(target, path: Path, thinking: bool | None = None) -> list[list[int]]:
    """Token ids of a prompt file: {"prompt": text}, {"messages": [...]} or {"prompt_ids": [...]} a line, and an id.

    Options in a line are refused: what reads files this way decodes all prompts alike.

    target: what `load_target` returns; a file of ids alone needs no tokenizer.

    Raises:
      ConfigError: a line is none of these, by number, or there is no line.
    """
    ids = []
    for number, row in enumerate(read(path), 1):
        try:
            ids.append(_encode(target, row, thinking))
        except ConfigError as error:
            raise ConfigError(f"{path}: prompt {number}: {error}") from None
    if not ids:
        raise ConfigError(f"{path}: no prompt in it")
    return ids


def _encode(target, row: dict[str, Any], thinking: bool | None) -> list[int]:
    given = [key for key in ("prompt", "messages", "prompt_ids") if key in row]
    if len(given) != 1:
        raise ConfigError('give one of {"prompt": "..."}, {"messages": [...]}, {"prompt_ids": [...]}')
    extra = sorted(row.keys() - {"id", *given})
    if extra:
        what = (
            "options of a line are for decode.py; here all prompts have the command's own"
            if extra[0] in OPTIONS
            else ("the keys are prompt, messages, prompt_ids and id")
        )
        raise ConfigError(f"{extra[0]}: {what}; take it out")
    value = row[given[0]]
    if given[0] == "messages":
        turns = isinstance(value, list) and all(isinstance(m, dict) for m in value)
        if not value or not turns or not all(isinstance(m.get(k), str) for m in value for k in ("role", "content")):
            raise ConfigError("messages must be a list of {role, content}, both text")
        return target.encode_messages(value, thinking=thinking)
    if given[0] == "prompt" and not isinstance(value, str):
        raise ConfigError(f"prompt is {value!r}; text is needed")
    if given[0] == "prompt_ids" and not (isinstance(value, list) and value and all(type(i) is int for i in value)):
        raise ConfigError(f"prompt_ids is {str(value)[:40]}; a list of token ids is needed")
    return speculate.prompt_ids(target, value, thinking=thinking)


def write(path: str | Path, rows: list[dict[str, Any]]) -> None:
    """A jsonl file of the rows."""
    with open(path, "w", encoding="utf-8") as f:
        f.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def main(argv: list[str]) -> int:
    """The command of the module's docstring; the exit status."""
    if len(argv) != 3:
        print(__doc__.split("\n\n")[1].strip(), file=sys.stderr)
        return 2
    name, folder, out = argv
    try:
        rows = load(name, folder)
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 2 if name not in BENCHMARKS else 1
    write(out, rows)
    print(f"{out}: {len(rows)} prompts of {name}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
