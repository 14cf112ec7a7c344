"""What documents say is there: rooms, files, commands and their options, the README's code, the pages of docstrings."""

import importlib
import os
import pathlib
import re
import shlex
import subprocess
import sys

import pytest
import small

from jetspec_jax.drafts import block
from jetspec_jax.files import load

ROOT = pathlib.Path(__file__).parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
README = DOCUMENTS[0].read_text()
INSTALLED = {"jetspec-decode": "decode", "jetspec-train": "training.options", "jetspec-audit": "audit"}
INSTALLED |= {"jetspec-serve": "serve.server", "jetspec_jax.serve": "serve.server"}
INSTALLED |= {"jetspec-doctor": "doctor", "decode.py": "decode", "train.py": "training.options"}


def commands() -> list[tuple[str, str, list[str]]]:
    """Document, module and words of every command of ours that stands in a block of code."""
    found = []
    for path in DOCUMENTS:
        text = re.sub(r"\\\n\s*", " ", path.read_text())
        lines = [line.strip() for line in text.splitlines() if line.startswith("    ")]
        lines += [line for fenced in re.findall(r"```bash\n(.*?)```", text, re.S) for line in fenced.split("&&")]
        for words in (shlex.split(line.split("    ")[0], comments=True) for line in lines if line.count('"') % 2 == 0):
            for i, word in enumerate(words):
                module = INSTALLED.get(word) or (re.fullmatch(r"bench/(\w+)\.py", word) or "xx")[1].strip("x")
                if not module and word.startswith("jetspec_jax.") and i and words[i - 1] == "-m":
                    module = word.removeprefix("jetspec_jax.")
                if module:
                    name = module if word.startswith("bench/") else f"jetspec_jax.{module}"
                    found.append((path.name, name, words[i + 1 :]))
                    break
    return found


def test_every_option_in_a_document_is_one(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "bench"))
    found = commands()
    assert len(found) > 25
    assert {document for document, _, _ in found} >= {"README.md", "doubts.md", "measurements.md", "training.md"}
    for document, name, words in found:
        line = getattr(importlib.import_module(name), "LINE", None)
        known = set(line.options) if line else set()
        for word in words:
            option = re.match(r"--([\w.]+)", word)
            if option and option[1] != "config.KEY":
                name_of = {option[1], re.sub("^no_?", "", option[1])}
                assert name_of & known, f"{document}: {name} has no {word}"


def test_the_layout_names_every_room_and_nothing_else():
    layout = re.search(r"## Layout\n(.*?)\n## ", README, re.S)[1]
    block = [line for line in layout.splitlines() if line.startswith("    ")]
    assert len(block) <= 40, "the layout fits on a screen"
    inside = [line for line in block if line.startswith("      ")]
    named = set(re.findall(r"[\w/]+(?:\.py|/)(?= |$|,|;|\))", "\n".join(block)))
    package = ROOT / "jetspec_jax"
    rooms = {p.name + "/" * p.is_dir() for p in package.iterdir() if p.name[0] not in "_." and p.suffix != ".pyc"}
    assert rooms - {"configs/", "assets/"} <= named, "write the new room into the README's layout"
    files = {path.name for path in package.rglob("*.py")} | {path.name for path in ROOT.glob("*.py")}
    assert {name for name in named if name.endswith(".py")} <= files
    folders = {path for path in named if path.endswith("/")}
    places = (ROOT, package, package / "backends", package / "training")
    assert all(any((place / folder).is_dir() for place in places) for folder in folders), folders
    assert len(inside) > 15


def test_paths_in_documents_exist():
    for path in DOCUMENTS:
        for name in re.findall(r"`((?:jetspec_jax|tests|bench|docs|configs|examples)/[\w/.]+)`", path.read_text()):
            assert (ROOT / name).exists(), f"{path.name}: {name}"
        for link in re.findall(r"\]\(([\w/.]+)(?:#[\w-]+)?\)", path.read_text()):
            assert (path.parent / link).exists(), f"{path.name}: {link}"


@pytest.mark.slow
def test_the_code_of_the_readme_runs(monkeypatch, capsys):
    monkeypatch.setattr(load, "load_target", lambda source: small.target())
    draft, shapes = block.build(small.HEAD, "float32")
    head = load.LoadedHead(draft, small.random_params(shapes, 1), small.HEAD, "", {}, 0.0, "")
    monkeypatch.setattr(load, "load_head", lambda source, target: head)
    exec(re.search(r"```python\n(.*?)```", README, re.S)[1], {})
    assert capsys.readouterr().out


@pytest.mark.slow
def test_pages_of_all_public_modules_are_written(tmp_path):
    pytest.importorskip("pdoc")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, sys.path)])}
    command = [sys.executable, "-W", "error", str(ROOT / "docs" / "api.py"), str(tmp_path)]
    subprocess.run(command, check=True, env=environment, cwd=tmp_path)
    pages = {str(path.relative_to(tmp_path)).removesuffix(".html") for path in tmp_path.rglob("*.html")}
    rooms = [f"jetspec_jax/{room}" for room in ("drafts", "engine", "evals")]
    files = {f"{room}/{path.stem}" for room in rooms for path in (ROOT / room).glob("[!_]*.py")}
    names = ("speculate", "baseline", "audit", "doctor", "options", "config", "loop/contracts")
    assert pages >= files | {"index", "jetspec_jax"} | {f"jetspec_jax/{name}" for name in names}
