"""What a comparison decodes with: a drafter's trees, the same drafter's chain beside each, and no draft at all."""

from __future__ import annotations

import dataclasses
import os
import pathlib
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jetspec_jax import methods
from jetspec_jax.command import UsageError
from jetspec_jax.engine import pacing
from jetspec_jax.fields import ConfigError, shown
from jetspec_jax.methods import METHODS
from jetspec_jax.options import TreeConfig

PLAIN = "autoregressive"
EXAMPLE = "give METHOD or METHOD=HEAD_FOLDER, e.g. jetspec=HEAD ngram"


class Named(NamedTuple):
    """A drafter as a word of the command line names it.

    label: what rows and tables call it: the method alone where no other drafter has it.
    """

    label: str
    method: str
    source: str | None


class Cell(NamedTuple):
    """What is compared.

    shape: "plain", "chain", "tree" or "auto". nodes: verified a round, the root included; the most that auto may take.
    """

    drafter: str
    method: str
    shape: str
    nodes: int

    def __str__(self) -> str:
        words = {"plain": "plain decoding", "auto": f"{self.drafter} auto"}
        return words.get(self.shape, f"{self.drafter} {self.shape} {self.nodes}")


class Entry(NamedTuple):
    """A cell, and what decodes it; head and tree are None in plain decoding."""

    cell: Cell
    head: Any
    tree: TreeConfig | None


NO_DRAFT = Entry(Cell(PLAIN, PLAIN, "plain", 1), None, None)


def parse(words: Sequence[str]) -> list[Named]:
    """Returns the drafters that words name, plain decoding left out: every comparison has it.

    Raises:
      UsageError: a word names no method, a head for a method without one, or the same drafter again.
    """
    found: list[tuple[str, str | None]] = []
    for word in words:
        method, equals, source = word.partition("=")
        if method not in METHODS:
            raise UsageError(
                f"--drafters {shown(word)}: no method {shown(method)} among {', '.join(METHODS)}; {EXAMPLE}"
            )
        if equals and not METHODS[method].head:
            raise UsageError(f"--drafters {shown(word)}: {method} drafts without a head; give {method} alone")
        if equals and not source:
            raise UsageError(f"--drafters {shown(word)}: the head's folder is missing; {EXAMPLE}")
        if (method, source or None) in found:
            raise UsageError(f"--drafters {shown(word)}: it is named twice; give it once")
        found.append((method, source or None))
    named: list[Named] = []
    for name, folder in found:
        mates = [_parts(other) for method, other in found if method == name]
        if name != PLAIN:
            named.append(Named(f"{name}={_short(folder, mates)}" if len(mates) > 1 else name, name, folder))
    for label, count in Counter(one.label for one in named).items():
        if count > 1:
            raise UsageError(f"--drafters: two of them are one folder, {shown(label)}; give it once")
    return named


def _parts(source: str | None) -> tuple[str, ...]:
    return ("demo",) if source is None else pathlib.Path(os.path.abspath(source)).parts


def _short(source: str | None, mates: Sequence[tuple[str, ...]]) -> str:
    """The end of a path, as long as it must be to tell it from its mates."""
    own = _parts(source)
    size = next((n for n in range(1, len(own)) if sum(own[-n:] == mate[-n:] for mate in mates) == 1), len(own))
    return "/".join(own[-size:])


def load(named: Sequence[Named], target, demo: bool, scorer: str = "own") -> list[tuple[Named, Any]]:
    """Returns every drafter with its loaded head.

    demo: whether the target is the demo's, whose head may be left out.
    scorer: "none" leaves out the scorers that heads have beside them.

    Raises:
      UsageError: a method needs a head, and none is named.
      ConfigError: a head cannot be loaded, or is of another family than the method drafts with.
    """
    from jetspec_jax.files import demo as demo_pair
    from jetspec_jax.files import load as files

    found = []
    heads: dict[str, Any] = {}  # of two methods that draft with one head there is one in memory
    for one in named:
        method = METHODS[one.method]
        if not method.head:
            found.append((one, files.load_drafter(method.drafter or one.method, target)))
            continue
        if one.source is None and not demo:
            raise UsageError(f"--drafters {one.method}: it needs a head; {EXAMPLE}")
        source = str(one.source or demo_pair.head_folder())
        if source not in heads:
            head = files.load_head(source, target)
            if scorer == "none" and hasattr(head.draft, "unscored"):
                head = dataclasses.replace(head, draft=head.draft.unscored())
            heads[source] = head
        head = heads[source]
        methods.tree(one.method, TreeConfig(), head)  # refuses another family
        found.append((one, head))
    return found


def entries(loaded: Sequence[tuple[Named, Any]], budgets: Sequence[int | str]) -> list[Entry]:
    """Returns every cell of a comparison, plain decoding first, then each tree with its drafter's own chain after it.

    Trees of the budget "auto" stand alone, for drafters that have such. A chain has as many nodes as the tree beside
    it, or as many as its drafter can draft; it stands once where several trees share it. A method whose tree is a chain
    has that alone.

    Raises:
      ConfigError: a drafter has no cell, since "auto" is the only budget and it drafts without probabilities.
    """
    found = [NO_DRAFT]
    for one, head in loaded:
        method = METHODS[one.method]
        if "budget" in method.refused:
            tree = method.tree(TreeConfig(), head)
            found.append(Entry(Cell(one.label, one.method, "chain", int(tree.budget or 0)), head, tree))
            continue
        if all(isinstance(budget, str) for budget in budgets) and not _scored(head):
            raise ConfigError(
                f"budgets=auto: {one.label} drafts without probabilities, by which it would be decided; give a number "
                "too, or leave the drafter out"
            )
        for budget in budgets:
            tree = method.tree(TreeConfig(budget), head)
            if isinstance(budget, str):
                if _scored(head):
                    most = max(pacing.SIZES[jax.default_backend()])
                    found.append(Entry(Cell(one.label, one.method, "auto", most), head, tree))
                continue
            found.append(Entry(Cell(one.label, one.method, "tree", budget), head, tree))
            line, narrow = methods.chain(one.method, budget, head)
            entry = Entry(Cell(one.label, one.method, "chain", int(line.budget or 0)), narrow, line)
            if all(entry.cell != other.cell for other in found):
                found.append(entry)
    return found


def _scored(head) -> bool:
    return getattr(head.draft, "scored", False)
