"""Writes pages of the public modules out of their docstrings.

    .venv/bin/pip install -q -e '.[docs]' && .venv/bin/python docs/api.py

They go to build/api/, or to the folder that is named; open index.html.
"""

import importlib
import pathlib
import sys
import typing

import pdoc

import jetspec_jax

MODULES = [
    "jetspec_jax",  # with speculate and baseline, which are among its names
    "jetspec_jax.options",
    "jetspec_jax.config",
    "jetspec_jax.audit",
    "jetspec_jax.doctor",
    "jetspec_jax.loop.contracts",
    "jetspec_jax.drafts",
    "jetspec_jax.engine",
    "jetspec_jax.evals",
]  # a room brings its files


def write(folder: pathlib.Path) -> None:
    """Writes index.html and a page for each module into the folder."""
    for name in jetspec_jax.__all__:  # public names are loaded when they are first used, which pdoc would not do
        setattr(jetspec_jax, name, getattr(jetspec_jax, name))
    for name in pdoc.extract.walk_specs(MODULES):
        _resolve(importlib.import_module(name))
    pdoc.render.configure(docformat="google", footer_text=f"jetspec_jax {jetspec_jax.__version__}")
    pdoc.pdoc(*MODULES, output_directory=folder)


def _resolve(module) -> None:
    """Gives named tuples their types: annotations are text, which pdoc would read outside of their module."""
    for kind in vars(module).values():
        if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
            kind.__new__.__annotations__ = typing.get_type_hints(kind)


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else "build/api"))
