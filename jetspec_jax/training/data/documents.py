"""Long prompts: source files and documentation of installed packages, with a request about them.

    python -m jetspec_jax.training.data.documents --out documents.jsonl --count 500

The packages, their licences and the files that are passed over are those of `code_prompts`. A document is a run of
whole top-level definitions of one file, or the long docstrings of one, so that nothing begins or ends in the middle;
the target writes what is asked about it.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.training.data.documents")

import ast
import random
import sys
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from jetspec_jax import command
from jetspec_jax.config import ConfigError
from jetspec_jax.evals import formats
from jetspec_jax.fields import Option
from jetspec_jax.training import files
from jetspec_jax.training.data import code_prompts, rows, turns

SHORTEST, LONGEST = 1_200, 13_000  # characters: about 300 to 3,500 tokens
PROSE = 400  # characters of a docstring that counts as documentation

ABOUT_CODE = (
    "Explain what this Python code does, step by step.",
    "Summarise this Python module in one paragraph, then list its public functions and classes with a sentence each.",
    "Write unit tests with pytest for the most important function of this code.",
    "Find possible bugs or unclear places in this code and say how you would change them.",
    "Rewrite the longest function of this code so that it is easier to read. Answer with the code only.",
    "Write a short README for this code with an example of its use.",
    "Add type hints to the functions of this code and show the changed signatures.",
)
ABOUT_TEXT = (
    "Summarise this documentation in five sentences.",
    "Explain this documentation to a beginner, with a small example for each function.",
    "Write five questions that this documentation answers, each with its answer.",
    "Turn this documentation into a list of short notes.",
    "What are the parameters described here, and what is each of them for?",
)


class Document(NamedTuple):
    """A piece of one file."""

    package: str
    kind: str  # "code" or "text"
    text: str


def collect(count: int, shortest: int = SHORTEST, longest: int = LONGEST) -> list[Document]:
    """Collects at most `count` documents of so many characters, by a hash of their text; the same ones every time.

    Lengths are drawn so that as many are between 1,000 and 2,000 characters long as between 4,000 and 8,000.
    """
    found = {}
    for package in code_prompts.LICENCES:
        for path in code_prompts.source_files(package):
            for document in _documents(package, path):
                if shortest <= len(document.text) <= longest:
                    found[code_prompts.digest(document.text)] = document
    return [found[key] for key in sorted(found)[:count]]


def prompt(document: Document) -> str:
    """Words a request about a document, before it or after it; the document decides."""
    draw = random.Random(code_prompts.digest("request " + document.text))
    request = draw.choice(ABOUT_CODE if document.kind == "code" else ABOUT_TEXT)
    body = f"```python\n{document.text}\n```" if document.kind == "code" else document.text
    return f"{request}\n\n{body}" if draw.random() < 0.5 else f"{body}\n\n{request}"


def _documents(package: str, path: Path) -> Iterator[Document]:
    """Yields at most one document of code and one of text out of a file."""
    try:
        source = path.read_text(encoding="utf-8")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in strings
            tree = ast.parse(source)
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return
    if not source.isascii() or "```" in source:
        return
    draw = random.Random(code_prompts.digest(f"{package} {path.name} {source}"))
    lines = source.splitlines()
    whole = ["\n".join(lines[_first(node) - 1 : node.end_lineno]) for node in tree.body if _defines(node)]
    prose = [f"{name}\n\n{text}" for name, text in _prose(tree)]
    for kind, pieces in (("code", whole), ("text", prose)):
        text = _run(pieces, round(SHORTEST * (LONGEST / SHORTEST) ** draw.random()), draw)
        if text:
            yield Document(package, kind, text)


def _run(pieces: list[str], wanted: int, draw: random.Random) -> str | None:
    """Joins pieces that stand side by side, from a drawn one on, up to about `wanted` characters."""
    if not pieces:
        return None
    chosen: list[str] = []
    for piece in pieces[draw.randrange(len(pieces)) :]:
        if chosen and sum(map(len, chosen)) + len(piece) > wanted:
            break
        chosen.append(piece)
    text = "\n\n\n".join(chosen)
    return text if SHORTEST <= len(text) <= LONGEST else None


def _defines(node: ast.stmt) -> bool:
    return isinstance(node, ast.FunctionDef | ast.ClassDef)


def _first(node: ast.stmt) -> int:
    """Returns the first line of a definition, its decorators included."""
    decorators = getattr(node, "decorator_list", [])
    return min([node.lineno, *(d.lineno for d in decorators)])


def _prose(tree: ast.Module) -> Iterator[tuple[str, str]]:
    """Yields names and long docstrings of the public functions, classes and methods of a module."""
    for node in tree.body:
        inside = node.body if isinstance(node, ast.ClassDef) else []
        for item in (node, *inside):
            if isinstance(item, ast.FunctionDef | ast.ClassDef) and not item.name.startswith("_"):
                text = ast.get_docstring(item)
                if text and len(text) >= PROSE:
                    yield item.name, text


def _asked(path: str) -> set[str]:
    """Returns what the users of a file's rows say."""
    found: set[str] = set()
    for row in rows.read(path):
        try:
            found.update(m["content"] for m in turns.conversation(row.value) if m["role"] == "user")
        except turns.Unusable as why:
            raise ConfigError(f"--without={path}: {row.where}: {why}; give the rows of a training pool") from None
    return found


LINE = command.Line(
    __doc__,
    [
        Option("out", "text", "JSONL file to write.", required=True, metavar="FILE"),
        Option("count", "whole", "Documents at most.", 500, low=1),
        Option("shortest", "whole", "Characters of a document.", SHORTEST, low=SHORTEST, high=LONGEST),
        Option("longest", "whole", "Characters of a document.", LONGEST, low=SHORTEST, high=LONGEST),
        Option("without", "text", "Rows of a training pool, whose prompts are left out.", metavar="FILE.jsonl"),
    ],
)


@command.tool("documents")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    out = Path(args.out)
    if not out.parent.is_dir() or out.is_dir():
        raise ConfigError(f"--out={out}: give the name of a file in a folder that is there")
    known = _asked(args.without) if args.without else set()
    asked = ((d.package, prompt(d)) for d in collect(sys.maxsize, args.shortest, args.longest))
    fresh = [(package, text) for package, text in asked if text not in known][: args.count]
    made = [formats.message(f"document_{package}/{i}", text) for i, (package, text) in enumerate(fresh)]
    with files.whole(out) as unfinished:
        formats.write(unfinished, made)
    print(f"{out}: {len(made)} prompts about documents")
    return 0
