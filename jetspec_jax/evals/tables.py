"""The tables of a comparison, as Markdown."""

from __future__ import annotations

import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from jetspec_jax.evals import lost, scorers, summary
from jetspec_jax.evals.ledger import Run
from jetspec_jax.evals.summary import Figures, Group, Summary

SHOWN = 16  # depths of a row, at most

NOTES = """\
Speed-up, pooled: decode time per token of plain decoding over that of the cell, both pooled over prompts; mean: of each
prompt's own ratio; over own chain: pooled, of a tree over the same drafter's chain of as many nodes (or its longest),
with the prompts on which the tree was faster. Tokens/s: decoding alone. Acceptance length: tokens a round gave out,
bonus included, pooled over rounds; mean over prompts beside it. Efficiency: pooled speed-up over pooled acceptance
length. Batch 1; the first token, which comes with the prompt, counts nowhere."""
SPLIT = """\
Seconds of all requests. Draft and verification within decode: not measured; a round is one program, and timing its
parts alone would time others."""
LOST = """\
Share of rounds by what the token after the accepted path was: no candidate of its depth; a candidate that the tree has
nowhere at that depth; in the tree at that depth, below other parents; or nothing lost, the path being as deep as it may
be. A chain has one candidate a depth, and several where a scorer chooses among them."""


def markdown(run: Run) -> str:
    """Returns all tables of a comparison."""
    found = summary.of(run)
    parts = [
        _head(found), _speed(found.groups), NOTES, "### By prompt length, all sets", *_lengths(found),
        "### Accepted drafts by depth", _depths(found.groups), "### Time", _time(found), SPLIT,
        "### What rounds lost", _lost(found.groups), LOST, *_scores(run, found),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def overview(found: Summary) -> str:
    """Returns tables of a row a cell for each temperature: speed-ups, acceptance lengths, and what rounds lost."""
    sets = list(found.settings["sets"])
    by = {(g.set, g.temperature, g.cell): g for g in found.groups}
    parts = [_head(found)]
    for heat in sorted({g.temperature for g in found.totals}):
        totals = [g for g in found.totals if g.temperature == heat]
        for title, name in (("Speed-up, pooled", "speedup"), ("Acceptance length, pooled", "acceptance")):
            rows = []
            for total in totals:
                if name == "acceptance" and total.cell.shape == "plain":
                    continue
                cells = [_told(by.get((one, heat, total.cell)), name) for one in sets]
                rows.append([str(total.cell), *cells, _told(total, name), *_beside(total.figures, name)])
            more = BESIDE if name == "speedup" else ()
            parts += [f"### {title}, T {heat:g}", table(["cell", *sets, "all sets", *more], rows)]
        if len(found.lengths) > 1:
            parts += [f"### Acceptance length by prompt tokens, all sets, T {heat:g}", _by_length(found, heat), LENGTHS]
        told = [g for g in totals if g.figures and g.figures.lost]
        if told:
            rows = [[str(g.cell), *_kinds(g.figures)] for g in told]
            parts += [f"### What rounds lost, all sets, T {heat:g}", table(["cell", *lost.KINDS], rows), LOST]
    return "\n\n".join([*parts, OVERVIEW, NOTES]) + "\n"


BESIDE = ("tokens/s", "ms a round", "over own chain", "efficiency", "beside plain decoding")
OVERVIEW = """\
A figure in brackets lacks some of the prompts that were asked for, and a dash all of them. Each run is compared with
its own plain decoding; that of the first one is shown."""


LENGTHS = "Pooled over rounds, with its 95 % interval over prompts (bootstrap)."


def _by_length(found: Summary, heat: float) -> str:
    """Rows of drafted cells, columns of bins; a figure lacks prompts as in the other tables."""
    by = {(name, g.cell): g for name, some in found.lengths.items() for g in some if g.temperature == heat}
    cells = [g.cell for g in found.totals if g.temperature == heat and g.cell.shape != "plain"]
    counts = [f"{name} ({max(g.wanted for g in some)} prompts)" for name, some in found.lengths.items()]

    def shown(group: Group | None) -> str:
        f = group.figures if group else None
        if f is None or f.interval_95 is None:
            return "-"
        low, high = f.interval_95
        return f"{_told(group, 'acceptance')} [{low:.2f}, {high:.2f}]"

    rows = [[str(cell), *(shown(by.get((name, cell))) for name in found.lengths)] for cell in cells]
    return table(["cell", *counts], rows)


def _told(group: Group | None, name: str) -> str:
    if group is None or group.figures is None:
        return "-"
    value = number(getattr(group.figures, name))
    return value if group.figures.prompts == group.wanted else f"({value})"


def _beside(f: Figures | None, name: str) -> list[str]:
    if name != "speedup":
        return []
    if f is None:
        return ["-"] * len(BESIDE)
    seconds = None if f.round_seconds is None else 1e3 * f.round_seconds
    return [number(f.tokens_per_second, ",.0f"), number(seconds), _over(f), number(f.efficiency), verdicts(f)]


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Returns a Markdown table; a bar within a cell is escaped."""
    line = lambda cells: "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"
    return "\n".join([line(names), line(["---"] * len(names)), *map(line, rows)])


def number(value: float | None, form: str = ".2f") -> str:
    """Returns a figure as tables show it; a dash where there is none."""
    return "-" if value is None else format(value, form)


def _head(found: Summary) -> str:
    s = found.settings
    said = ", ".join(f"{name} {s[name]}" for name in ("device", "jax", "dtype", "backend") if name in s)
    options = ", ".join(f"{name} {value}" for name, value in dict(s.get("sampling", {})).items())
    starts = "" if found.sessions < 2 else f" Decoded in {found.sessions} starts of the command, not in one."
    peak = "not told by this device"
    if found.peak_bytes is not None:
        peak = f"{found.peak_bytes / 2**20:,.0f} MiB, of the whole process: the device keeps one mark for all cells"
    source = str(s.get("target"))
    name = pathlib.PurePath(source).name if pathlib.PurePath(source).is_absolute() else source
    return f"## Target {name}\n\n{said}; {options}.{starts} Peak memory: {peak}."


def _rows(groups: Iterable[Group], cells: Callable[[Figures], Sequence[str]], width: int) -> list[list[str]]:
    """Rows of a table of groups; what is absent is said."""
    rows = []
    for group in groups:
        f = group.figures
        first = [group.set, f"{group.temperature:g}", str(group.cell)]
        if f is None:
            rows.append([*first, f"absent (0 of {group.wanted})", *["-"] * width])
        else:
            count = f"{f.prompts}" if f.prompts == group.wanted else f"{f.prompts} of {group.wanted}"
            rows.append([*first, count, *cells(f)])
    return rows


FIRST = ("set", "T", "cell", "prompts")
SPEED = (
    "speed-up, pooled", "speed-up, mean", "over own chain", "tokens/s", "acceptance length, pooled", "mean",
    "efficiency", "beside plain decoding",
)  # fmt: skip


def _speed(groups: Sequence[Group]) -> str:
    cells = lambda f: [
        number(f.speedup), number(f.speedup_mean), _over(f), number(f.tokens_per_second, ".1f"),
        number(f.acceptance), number(f.acceptance_mean), number(f.efficiency), verdicts(f),
    ]  # fmt: skip
    return table([*FIRST, *SPEED], _rows(groups, cells, len(SPEED)))


def _over(f: Figures) -> str:
    if f.over_chain is None:
        return "-"
    times, faster, prompts = f.over_chain
    return f"{times:.2f} ({faster} of {prompts})"


def verdicts(f: Figures) -> str:
    """Returns how outputs compare with plain decoding's, in words."""
    if f.verdicts.get("plain"):
        return "itself"
    words = [f"{f.verdicts[name]} {name}" for name in ("equal", "tie") if f.verdicts.get(name)]
    if f.verdicts.get("differs"):
        words.append(f"{f.verdicts['differs']} differs (margin up to {number(f.margin, '.1e')} std)")
    return ", ".join(words)


def _lengths(found: Summary) -> list[str]:
    """The same table by prompt length; bins without a prompt are said."""
    groups = [g._replace(set=f"{name} tokens") for name, some in found.lengths.items() for g in some]
    empty = [name for name in summary.BIN_NAMES if name not in found.lengths]
    said = [f"No prompt has {', '.join(empty)} tokens."] if empty else []
    return [_speed(groups).replace("| set |", "| prompt |", 1), *said]


def _depths(groups: Sequence[Group]) -> str:
    drafted = [g for g in groups if g.cell.shape != "plain"]
    deepest = min(max((g.figures.depth for g in drafted if g.figures), default=1), SHOWN)
    padded = lambda values: [number(v) for v in values[:deepest]] + ["-"] * (deepest - len(values))
    rows = _rows(drafted, lambda f: ["that accepted the one before", *padded(f.conditional)], deepest + 1)
    rows += _rows(drafted, lambda f: ["all", *padded(f.reached)], deepest + 1)
    return table([*FIRST, "of rounds", *map(str, range(1, deepest + 1))], rows)


def _time(found: Summary) -> str:
    names = ("prefill", "decode", "ms a round", "draft", "verification")
    cells = lambda f: [
        number(f.prefill), number(f.decode), number(None if f.round_seconds is None else 1e3 * f.round_seconds),
        "not measured", "not measured",
    ]  # fmt: skip
    return table([*FIRST, *names], _rows(found.groups, cells, len(names)))


def _lost(groups: Sequence[Group]) -> str:
    drafted = [g for g in groups if g.cell.shape != "plain"]
    return table([*FIRST, *lost.KINDS], _rows(drafted, _kinds, len(lost.KINDS)))


def _kinds(f: Figures | None) -> list[str]:
    total = sum(f.lost.values()) if f and f.lost else 0
    if f is None or f.lost is None or not total:
        return ["not available"] * len(lost.KINDS)
    return [f"{f.lost.get(name, 0) / total:.1%}" for name in lost.KINDS]


def _scores(run: Run, found: Summary) -> list[str]:
    """Scores of each cell, then of each item; nothing where no request has one."""
    if not any(r.score for r in run.requests):
        return ["No answer was scored: no FILE.gold.jsonl lay beside the prompts."]
    names = scorers.VERDICTS
    cells = lambda f: [*(str(f.scores.get(name, 0)) for name in names), str(f.score_differs)]
    scored = [g for g in found.groups if g.figures is None or g.figures.scores]
    rows = _rows(scored, cells, len(names) + 1)
    parts = ["### Scores", table([*FIRST, *names, "other than plain"], rows)]
    return [*parts, "### Scores, item by item", _items(run)]


def _items(run: Run) -> str:
    """One row an item, one column a cell."""
    cells = list(dict.fromkeys(r.cell for r in run.requests if r.score))
    items: dict[tuple[str, float, str], dict[Any, Mapping[str, Any]]] = {}
    for r in run.requests:
        if r.score:
            items.setdefault((r.set, r.temperature, str(r.prompt if r.id is None else r.id)), {})[r.cell] = r.score
    rows = [
        [name, f"{heat:g}", identity, *(str(found.get(cell, {}).get("verdict", "absent")) for cell in cells)]
        for (name, heat, identity), found in items.items()
    ]
    return table(["set", "T", "item", *map(str, cells)], rows)
