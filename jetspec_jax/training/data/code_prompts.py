"""Prompts that ask for a function, made from the signatures and docstrings of installed Python code.

Source files are parsed and never imported. Only the standard library and packages under permissive licences are read;
the list is explicit, with each licence, and a package that is not installed is passed over. The target writes the
bodies itself, so what comes from a package is a signature and at most 600 characters of description.
"""

from __future__ import annotations

import ast
import hashlib
import importlib.metadata
import re
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from jetspec_jax.evals import formats

STANDARD_LIBRARY = "python"
LICENCES = {  # distribution: SPDX identifier; "PSF-2.0" for matplotlib's own, which is based on it
    STANDARD_LIBRARY: "PSF-2.0",
    "accelerate": "Apache-2.0", "aiohttp": "Apache-2.0", "anyio": "MIT", "attrs": "MIT", "botorch": "MIT",
    "chex": "Apache-2.0", "click": "BSD-3-Clause", "diffrax": "Apache-2.0", "e3nn": "MIT", "einops": "MIT",
    "equinox": "Apache-2.0", "etils": "Apache-2.0", "flax": "Apache-2.0", "formulaic": "MIT", "fsspec": "BSD-3-Clause",
    "gpytorch": "MIT", "h5py": "BSD-3-Clause", "httpx": "BSD-3-Clause", "huggingface-hub": "Apache-2.0",
    "humanize": "MIT", "imageio": "BSD-2-Clause", "jax": "Apache-2.0", "jinja2": "BSD-3-Clause",
    "joblib": "BSD-3-Clause", "lightning": "Apache-2.0", "linear-operator": "MIT", "lineax": "Apache-2.0",
    "matplotlib": "PSF-2.0", "mpmath": "BSD-3-Clause", "networkx": "BSD-3-Clause", "numba": "BSD-2-Clause",
    "numpy": "BSD-3-Clause", "numpyro": "Apache-2.0", "onnx": "Apache-2.0", "opt-einsum": "MIT",
    "optax": "Apache-2.0", "optimistix": "Apache-2.0", "orbax-checkpoint": "Apache-2.0", "packaging": "Apache-2.0",
    "pandas": "BSD-3-Clause", "patsy": "BSD-2-Clause", "peft": "Apache-2.0", "psutil": "BSD-3-Clause",
    "pygments": "BSD-2-Clause", "pyparsing": "MIT", "requests": "Apache-2.0", "rich": "MIT",
    "scikit-image": "BSD-3-Clause", "scikit-learn": "BSD-3-Clause", "scipy": "BSD-3-Clause", "seaborn": "BSD-3-Clause",
    "sentence-transformers": "Apache-2.0", "sortedcontainers": "Apache-2.0", "statsmodels": "BSD-3-Clause",
    "sympy": "BSD-3-Clause", "tabulate": "MIT", "tifffile": "BSD-3-Clause", "timm": "Apache-2.0",
    "toolz": "BSD-3-Clause", "torch": "BSD-3-Clause", "torch-geometric": "MIT", "torchaudio": "BSD-2-Clause",
    "torchmetrics": "Apache-2.0",
    "torchvision": "BSD-3-Clause", "transformers": "Apache-2.0", "treescope": "Apache-2.0", "urllib3": "MIT",
    "werkzeug": "BSD-3-Clause", "xarray": "Apache-2.0",
}  # fmt: skip
# Vendored code has licences of its own, tests and generated stubs say little.
SKIPPED = {"test", "tests", "testing", "_vendor", "vendor", "externals", "extern", "third_party", "site-packages",
           "idlelib", "lib2to3", "dist-packages", "pip", "_pytest", "__pycache__"}  # fmt: skip
DOCSTRING = 24, 600  # characters
SIGNATURE = 240  # characters at most


class Function(NamedTuple):
    """A documented function or method."""

    package: str
    name: str
    owner: str | None  # class of a method
    code: str  # signature and docstring, inside its class
    summary: str  # first paragraph of the docstring on one line
    tests: list[str]  # assertions from the docstring's examples


def collect(per_package: int) -> list[Function]:
    """Collects functions, at most `per_package` of each package but the standard library, no docstring twice."""
    known, chosen = set(), []
    for package in LICENCES:
        found = {}
        for path in source_files(package):
            for function in _functions(package, path):
                key = re.sub(r"\W+", "", function.summary.lower())
                if key not in known:
                    known.add(key)
                    found[digest(function.code)] = function
        ranked = [found[key] for key in sorted(found)]
        chosen += ranked if package == STANDARD_LIBRARY else ranked[:per_package]
    return chosen


def prompt(function: Function) -> str:
    """Words a request for the function, in one of several wordings; the function decides which."""
    kind = "method" if function.owner else "function"
    block = f"```python\n{function.code}\n```"
    draw = int(digest("wording " + function.code), 16) % 100
    if function.tests and draw < 50:
        return formats.tested(f"Write a Python function `{function.name}`. {function.summary}", function.tests)
    if draw < 45:
        return formats.function(function.code)
    if draw < 55:
        return f"Complete the following Python {kind}.\n\n{block}"
    if draw < 65:
        return f"Implement this {kind} in Python. Answer with the code only.\n\n{block}"
    if draw < 73:
        return f"Write the body of this Python {kind} and explain briefly how it works.\n\n{block}"
    if draw < 80:
        return f"{block}\n\nFill in the missing code of this {kind}."
    where = f" of a class `{function.owner}`" if function.owner else ""
    if draw < 90:
        return f"Write a Python {kind} `{function.name}`{where} that does the following: {function.summary}"
    return f"Write a Python {kind} named {function.name}{where}. {function.summary} Add a short usage example."


def digest(text: str) -> str:
    """Returns a stable number for orders and draws that do not depend on the process."""
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()


def source_files(package: str) -> Iterator[Path]:
    """Yields the Python files of a package, or of the standard library, in order; none where it is not installed."""
    if package == STANDARD_LIBRARY:
        root = Path(sysconfig.get_paths()["stdlib"])
        files = [path.relative_to(root) for path in root.rglob("*.py")]
    else:
        try:
            distribution = importlib.metadata.distribution(package)
        except importlib.metadata.PackageNotFoundError:
            return
        root = Path(str(distribution.locate_file("")))
        files = [Path(str(f)) for f in distribution.files or () if f.suffix == ".py"]
    for path in sorted(files):
        if not SKIPPED & set(path.parts) and not path.name.startswith(("test_", "conftest")):
            yield root / path


def _functions(package: str, path: Path) -> Iterator[Function]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # old escapes in strings
            tree = ast.parse(path.read_text(encoding="utf-8"))
    except (OSError, SyntaxError, UnicodeDecodeError, ValueError):
        return
    for node in tree.body:
        owner = node.name if isinstance(node, ast.ClassDef) and not node.name.startswith("_") else None
        for item in node.body if owner and isinstance(node, ast.ClassDef) else [node]:
            if isinstance(item, ast.FunctionDef) and not item.name.startswith(("_", "test")):
                function = _function(package, owner, item)
                if function:
                    yield function


def _function(package: str, owner: str | None, node: ast.FunctionDef) -> Function | None:
    text = ast.get_docstring(node)
    if not text or not DOCSTRING[0] <= len(text) <= DOCSTRING[1] or '"""' in text or not text.isascii():
        return None
    summary = " ".join(text.split("\n\n")[0].split())
    if len(summary.split()) < 4 or "deprecated" in text.lower():
        return None
    node.decorator_list, node.body = [], [ast.Pass()]
    signature = ast.unparse(node).rsplit("\n", 1)[0]
    if len(signature) > SIGNATURE:
        return None
    lines = [signature, *_indent(f'"""{text}\n"""' if "\n" in text else f'"""{text}"""')]
    if owner:
        lines = [f"class {owner}:", *_indent("\n".join(lines))]
    return Function(package, node.name, owner, "\n".join(lines), summary, [] if owner else _tests(node.name, text))


def _indent(text: str) -> list[str]:
    return ["    " + line if line.strip() else "" for line in text.split("\n")]


def _tests(name: str, docstring: str) -> list[str]:
    """Assertions from examples of the form `>>> name(...)` with a literal on the next line."""
    found = []
    for call, result in re.findall(rf"^\s*>>> ({re.escape(name)}\(.*\))\n\s*([^\s>.].*)$", docstring, re.MULTILINE):
        try:
            ast.literal_eval(result)
            ast.parse(call)
        except (SyntaxError, ValueError):
            continue
        found.append(f"assert {call} == {result.strip()}")
    return found[:3]
