"""One comparison against another, cell by cell: how many times as long the paths are, and how many times as fast.

Requests are paired by prompt and temperature, cells by method, shape and nodes. So two heads of a family meet over the
same prompts, or one head with and without its scorer. Several comparisons, of as many seeds, stand below each other and
then together.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from jetspec_jax.evals import summary, tables
from jetspec_jax.evals.drafters import Cell
from jetspec_jax.evals.ledger import Request, Run, parted
from jetspec_jax.evals.summary import TOTAL
from jetspec_jax.fields import ConfigError, shown

Pair = tuple[Request, Request]
SEEDS = "all files"  # the name of several together
NOTES = """\
Ratios over the prompts that both have. Acceptance length: tokens a round gave out, pooled over rounds; in brackets the
95 % interval over all prompts, which are drawn in pairs (bootstrap). Times as fast: decode time per token, pooled."""


class Ratios(NamedTuple):
    """A cell against its like. by_set: of acceptance lengths, also over all sets; None where no prompt is of both."""

    temperature: float
    cell: Cell
    prompts: int
    by_set: Mapping[str, float | None]
    interval: tuple[float, float]
    faster: float | None


def of(run: Run, other: Run) -> list[Ratios]:
    """Returns a row for each drafted cell and temperature that both have.

    Raises:
      ConfigError: they differ in what their figures depend on, have no request in common, or a cell has several likes.
    """
    _alike(run, other, "--against")
    sets, temperatures, cells = summary.grid(run.settings)
    others, found = summary.grid(other.settings)[2], []
    for heat, cell in itertools.product(temperatures, cells):
        like = _like(cell, others)
        beside = {(r.set, r.prompt): r for r in other.requests if (r.temperature, r.cell) == (heat, like)}
        own = [r for r in run.requests if (r.temperature, r.cell) == (heat, cell)]
        pairs = [(r, beside[r.set, r.prompt]) for r in own if (r.set, r.prompt) in beside]
        pairs = [(r, o) for r, o in pairs if r.rounds and o.rounds]
        if cell.shape == "plain" or not pairs:
            continue
        by_set = {name: _lengths([p for p in pairs if p[0].set == name]) for name in sets}
        found.append(Ratios(heat, cell, len(pairs), by_set | {TOTAL: _lengths(pairs)}, _interval(pairs), _times(pairs)))
    if not found:
        raise ConfigError("--against: the files have no drafted request in common; give those of the same prompts")
    return found


def together(runs: Sequence[Run]) -> Run:
    """Returns several comparisons as one: each prompt's requests of a cell are one request, whose rounds are theirs.

    Prompts and cells that one of them lacks are left out.

    Raises:
      ConfigError: they differ in what their figures depend on.
    """
    first = runs[0]
    for run in runs[1:]:
        _alike(first, run, "--table")
    likes = [{r.key: r for r in run.requests} for run in runs]
    merged = []
    for key in likes[0]:
        same = [like[key] for like in likes if key in like]
        if len(same) == len(runs):
            steps = sum(r.new_tokens - 1 for r in same)  # the first token came with the prompt
            joined = dataclasses.replace(
                same[0], new_tokens=1 + steps, rounds=sum(r.rounds for r in same), decode=sum(r.decode for r in same),
                emitted=tuple(itertools.chain.from_iterable(r.emitted for r in same)),
            )  # fmt: skip
            merged.append(joined)
    return Run(first.settings, merged)


def markdown(runs: Mapping[str, Run], other: Run) -> str:
    """Returns the rows of each of these comparisons against the other as a table, and of all of them together."""
    several, rows = len(runs) > 1, []
    parts = [*runs.items(), *([(SEEDS, together([*runs.values()]))] if several else [])]
    for name, run in parts:
        for one in of(run, other):
            *single, total = one.by_set.values()
            low, high = one.interval
            rows.append([
                *([name] if several else []), str(one.cell), f"{one.temperature:g}", str(one.prompts),
                *map(tables.number, single), f"{tables.number(total)} [{low:.2f}, {high:.2f}]",
                tables.number(one.faster),
            ])  # fmt: skip
    sets = summary.grid(next(iter(runs.values())).settings)[0]
    names = [*(["file"] if several else []), "cell", "T", "prompts", *sets, TOTAL, "times as fast"]
    return f"{tables.table(names, rows)}\n\n{NOTES}\n"


def _alike(run: Run, other: Run, option: str) -> None:
    """Raises ConfigError where they differ in what their figures depend on."""
    for name in summary.SAME:
        own, its = run.settings.get(name), other.settings.get(name)
        if own != its:
            where, a, b = parted(name, own, its)
            raise ConfigError(f"{option}: files of different {where}, {shown(a)} and {shown(b)}")


def _like(cell: Cell, others: Sequence[Cell]) -> Cell | None:
    """Returns the other comparison's cell that draws the same: that of the same name, else the only one."""
    likes = [other for other in others if other[1:] == cell[1:]]
    if cell not in likes and len(likes) > 1:
        names = " and ".join(map(str, likes))
        raise ConfigError(f"--against: {cell} could be {names} of the other file; give one that has one of them")
    return cell if cell in likes else next(iter(likes), None)


def _lengths(pairs: Sequence[Pair]) -> float | None:
    pooled = lambda some: sum(sum(r.emitted) for r in some) / sum(r.rounds for r in some)
    return pooled([r for r, _ in pairs]) / pooled([o for _, o in pairs]) if pairs else None


def _interval(pairs: Sequence[Pair]) -> tuple[float, float]:
    counts = np.array([[sum(r.emitted), r.rounds, sum(o.emitted), o.rounds] for r, o in pairs])
    draws = np.random.default_rng(0).integers(0, len(pairs), (2000, len(pairs)))
    own, rounds, its, others = counts[draws].sum(1).T
    low, high = np.percentile(own / rounds / (its / others), (2.5, 97.5))
    return float(low), float(high)


def _times(pairs: Sequence[Pair]) -> float | None:
    pace = lambda some: sum(r.decode for r in some) / max(sum(r.new_tokens - 1 for r in some), 1)
    own = pace([r for r, _ in pairs])
    return pace([o for _, o in pairs]) / own if own else None
