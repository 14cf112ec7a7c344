"""The pool of training prompts, as a file that `decode.py --prompt_file` could read.

    python -m jetspec_jax.training.data.pool --data FOLDER --out pool.jsonl [--answers]

Mathematics (the train splits of GSM8K and MATH), code (MBPP outside its test split, and functions of installed
packages, see `code_prompts`), and chat prompts of our own (`chat_topics`). No row of a benchmark, and none that shares
16 words in a row with one, is in it; nothing under a non-commercial licence is read. The order is a hash of the text,
so any first part of the file is a fair sample of it. With --answers, rows whose origin has an answer hold it as the
assistant's turn: text that the target did not write, for comparison. Counts by source are printed as JSON.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.training.data.pool")

import collections
import itertools
import json
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax import command
from jetspec_jax.config import ConfigError
from jetspec_jax.evals import formats
from jetspec_jax.fields import Option
from jetspec_jax.training import files
from jetspec_jax.training.data import chat_topics, code_prompts
from jetspec_jax.training.data import documents as long_prompts

SHARED_WORDS = 16  # in a row, with a benchmark's prompt: too close


def build(
    data: Path, code: int, per_package: int, chat_prompts: int, documents: int = 0, answers: bool = False
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Rows {"id", "messages"} and the counts by source with the licences of the packages read.

    data: folder with gsm8k/train.jsonl, math_train/train.jsonl, mbpp/rest.jsonl and the benchmarks. code: functions in
    all; per_package: of one package; documents: long prompts. Deterministic for the same files, packages and numbers.
    """
    forbidden = Forbidden(data)  # first: a wrong folder is noticed before the packages are read
    functions = code_prompts.collect(per_package) if code else []
    functions.sort(key=lambda f: code_prompts.digest(f.code))
    candidates = itertools.chain(
        _numbered("gsm8k_train", data / "gsm8k/train.jsonl", lambda r: formats.reasoning(r["question"]), "answer"),
        _numbered("math_train", data / "math_train/train.jsonl", lambda r: formats.reasoning(r["problem"]), "solution"),
        _numbered("mbpp_rest", data / "mbpp/rest.jsonl", lambda r: formats.tested(r["text"], r["test_list"]), "code"),
        ((f"code_{f.package}", i, code_prompts.prompt(f), "") for i, f in enumerate(functions[:code])),
        ((*prompt, "") for prompt in chat(chat_prompts)),
        (
            (f"document_{d.package}", i, long_prompts.prompt(d), "")
            for i, d in enumerate(long_prompts.collect(documents) if documents else ())
        ),
    )
    rows: list[dict[str, Any]] = []
    known: set[str] = set()
    counts: collections.Counter[str] = collections.Counter()
    dropped: collections.Counter[str] = collections.Counter()
    for source, number, text, answer in candidates:
        key = " ".join(words(text))
        if key in known or forbidden.matches(text):
            dropped[source] += 1
            continue
        known.add(key)
        counts[source] += 1
        row = formats.message(f"{source}/{number}", text)
        if answers and answer:
            row["messages"].append({"role": "assistant", "content": answer})
        rows.append(row)
    rows.sort(key=lambda row: code_prompts.digest(row["messages"][0]["content"]))
    packages = {s.partition("_")[2] for s in counts if s.startswith(("code_", "document_"))}
    licences = {name: code_prompts.LICENCES[name] for name in sorted(packages)}
    summary = {"total": len(rows), "sources": dict(counts), "dropped": dict(dropped), "licences": licences}
    return rows, summary


def chat(count: int) -> Iterator[tuple[str, int, str]]:
    """Makes about `count` prompts from the families of `chat_topics`, by their shares; the same ones every time."""
    total = sum(share for share, _, _ in chat_topics.FAMILIES.values())
    for family, (share, templates, fields) in chat_topics.FAMILIES.items():
        draw = random.Random(family)
        seen: set[str] = set()
        wanted = round(count * share / total)
        for _ in range(20 * wanted):  # small families run out of new ones
            if len(seen) == wanted:
                break
            template = templates[draw.randrange(len(templates))]
            chosen = {name: draw.choice(values) for name, values in fields.items()}
            text = template.format(**chosen)
            if text not in seen and len(set(chosen.values())) == len(chosen):
                seen.add(text)
                yield f"chat_{family}", len(seen), text


class Forbidden:
    """Benchmark texts, as whole short prompts and as runs of words of long ones."""

    def __init__(self, data: Path):
        self._whole: set[str] = set()
        self._runs: set[str] = set()
        for name in formats.BENCHMARKS:
            for row in formats.load(name, data):
                found = words(row["messages"][0]["content"])
                self._whole.add(" ".join(found))
                self._runs.update(_runs(found))

    @property
    def digest(self) -> str:
        """Of all texts."""
        return code_prompts.digest("\n".join(sorted(self._whole)))[:16]

    def matches(self, text: str) -> bool:
        """Whether the text is a benchmark's, or shares a run of words with one."""
        found = words(text)
        return " ".join(found) in self._whole or not self._runs.isdisjoint(_runs(found))


def words(text: str) -> list[str]:
    """Returns lower-case words without the fixed wordings around a task, which all rows of a format share."""
    for fixed in (formats.BOXED, formats.function("").split("\n")[0], formats.contest("").split("\n")[0]):
        text = text.replace(fixed, " ")
    return re.findall(r"\w+", text.lower())


def _runs(found: list[str]) -> Iterator[str]:
    return (" ".join(found[i : i + SHARED_WORDS]) for i in range(len(found) - SHARED_WORDS + 1))


def _numbered(source: str, path: Path, text, answer: str) -> Iterator[tuple[str, int, str, str]]:
    return ((source, i, text(row), row.get(answer, "")) for i, row in enumerate(formats.read(path)))


LINE = command.Line(
    __doc__,
    [
        Option("data", "text", "Folder of the prompt sets.", required=True, metavar="DIR"),
        Option("out", "text", "JSONL file to write.", required=True, metavar="FILE"),
        Option("code", "whole", "Functions in all.", 11_000),
        Option("per_package", "whole", "Functions of one package.", 600, low=1),
        Option("chat", "whole", "Chat prompts.", 2_500),
        Option("documents", "whole", "Long prompts about source files and documentation.", 0),
        Option("answers", "flag", "With the origin's answers, where it has them.", False),
    ],
)


@command.tool("pool")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    out = Path(args.out)
    if not out.parent.is_dir():
        raise ConfigError(f"--out={out}: there is no folder {out.parent}; make it first")
    if out.is_dir():
        raise ConfigError(f"--out={out}: a folder; give the name of a file")
    rows, counts = build(Path(args.data), args.code, args.per_package, args.chat, args.documents, args.answers)
    with files.whole(out) as unfinished:
        formats.write(unfinished, rows)
    print(json.dumps(counts))
    return 0
