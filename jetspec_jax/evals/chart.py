"""Charts as SVG: curves and bars in panels side by side, and the picture of a comparison made of them."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple
from xml.sax.saxutils import escape

from jetspec_jax.evals.summary import BIN_NAMES, BINS, Group, Summary

WIDE, HIGH, EDGE = 420, 280, 44  # of one panel, and room for its numbers
ROW = 13  # of the legend
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d", "#888888")


class Curve(NamedTuple):
    """A line of a panel."""

    name: str
    points: list[tuple[float, float]]


class Bars(NamedTuple):
    """A colour of bars: one value a group, stacked upon the ones before where the panel stacks; None leaves a gap."""

    name: str
    values: list[float | None]


def picture(panels: Sequence[str], row: int = 3) -> str:
    """Returns a picture of panels, so many a row; each is what `curves` or `bars` returns."""
    across = min(len(panels), row)
    down = -(-len(panels) // row)
    size = f'width="{WIDE * across}" height="{HIGH * down}" viewBox="0 0 {WIDE * across} {HIGH * down}"'
    placed = [
        f'<g transform="translate({WIDE * (i % row)} {HIGH * (i // row)})">\n{panel}\n</g>'
        for i, panel in enumerate(panels)
    ]
    style = 'font-family="sans-serif" font-size="10"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(placed) + "\n</svg>\n"


def curves(title: str, lines: Sequence[Curve], log: bool = False) -> str:
    """Returns a panel of lines, from zero upwards.

    Args:
      title: of the panel; it names both axes.
      lines: with points in the order of x.
      log: whether x is laid out by its logarithm.
    """
    lines = [line for line in lines if line.points]
    points = [point for line in lines for point in line.points]
    if not points:
        return _empty(title)
    along = math.log2 if log else float
    left, right = min(along(x) for x, _ in points), max(along(x) for x, _ in points)
    top = _round(max(y for _, y in points) or 1.0)
    x = lambda value: EDGE + (WIDE - 1.5 * EDGE) * ((along(value) - left) / (right - left) if right > left else 0.5)
    legend, y = _legend([line.name for line in lines], top)
    out = [*_frame(title, top, y), *legend]
    ticks = sorted({value for value, _ in points})
    ticks = ticks if len(ticks) <= 8 else [ticks[round(i * (len(ticks) - 1) / 7)] for i in range(8)]
    out += [f'<text x="{x(v):.1f}" y="{HIGH - EDGE + 12}" text-anchor="middle">{v:g}</text>' for v in ticks]
    for i, line in enumerate(lines):
        where = [(x(a), y(b)) for a, b in line.points]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in where)
        out.append(f'<polyline points="{path}" fill="none" stroke="{_colour(i)}" stroke-width="1.5"/>')
        if len(where) < 20:
            out += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{_colour(i)}"/>' for a, b in where]
    return "\n".join(out)


def bars(title: str, groups: Sequence[str], colours: Sequence[Bars], stacked: bool = False) -> str:
    """Returns a panel of bars, from zero upwards; what is absent is marked by a dash on the ground.

    Args:
      title: of the panel.
      groups: names below the bars.
      colours: their values, each in the order of the groups.
      stacked: whether the values of a group stand on each other rather than side by side.
    """
    heights = [[v or 0.0 for v in one.values] for one in colours]
    if not groups or not colours:
        return _empty(title)
    top = max(map(sum, zip(*heights, strict=True))) if stacked else max(map(max, heights))
    top = _round(top or 1.0)
    legend, y = _legend([one.name for one in colours], top)
    out = [*_frame(title, top, y), *legend]
    room = (WIDE - 1.5 * EDGE) / len(groups)
    wide = 0.8 * room / (1 if stacked else len(colours))
    for g, name in enumerate(groups):
        start, ground = EDGE + room * (g + 0.1), 0.0
        out.append(_below(name, start + 0.4 * room, len(groups)))
        for i, one in enumerate(colours):
            value, left = one.values[g], start + (0 if stacked else wide * i)
            if value is None:
                out.append(f'<text x="{left + wide / 2:.1f}" y="{HIGH - EDGE - 2}" text-anchor="middle">-</text>')
                continue
            high, low = y(ground + value), y(ground)
            box = f'x="{left:.1f}" y="{high:.1f}" width="{wide:.1f}" height="{low - high:.1f}"'
            out.append(f'<rect {box} fill="{_colour(i)}"><title>{escape(one.name)}: {value:.3g}</title></rect>')
            ground += value if stacked else 0.0
    return "\n".join(out)


def _colour(index: int) -> str:
    return COLOURS[index % len(COLOURS)]


def _round(top: float) -> float:
    """The next number of which a quarter is a round one."""
    unit = 10.0 ** math.floor(math.log10(top / 4))
    return next(4 * unit * n for n in (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10) if 4 * unit * n >= top * (1 - 1e-9))


def _frame(title: str, top: float, y: Callable[[float], float]) -> list[str]:
    """The panel's ground, its title, and lines at quarters of the height."""
    out = [
        f'<rect width="{WIDE}" height="{HIGH}" fill="white"/>',
        f'<text x="{EDGE}" y="16" font-weight="bold" font-size="12">{escape(title)}</text>',
    ]
    for part in range(5):
        at = y(top * part / 4)
        out.append(f'<line x1="{EDGE}" x2="{WIDE - EDGE / 2:g}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        out.append(f'<text x="{EDGE - 4}" y="{at + 3:.1f}" text-anchor="end">{top * part / 4:.3g}</text>')
    return out


def _legend(names: Sequence[str], top: float) -> tuple[list[str], Callable[[float], float]]:
    """Names in their colours under the title, as many a row as fit; and where a value lies in the room below them."""
    out, x, row = [], float(EDGE), 29.0
    for i, name in enumerate(names):
        wide = 5.4 * len(name) + 12
        if x > EDGE and x + wide > WIDE:
            x, row = float(EDGE), row + ROW
        out.append(f'<text x="{x:.0f}" y="{row:.0f}" fill="{_colour(i)}">{escape(name)}</text>')
        x += wide
    high = max(HIGH - EDGE - row - ROW, HIGH / 4)
    return out, lambda value: HIGH - EDGE - high * value / top


def _below(name: str, x: float, count: int) -> str:
    """A name below a bar; aslant where many stand side by side."""
    y = HIGH - EDGE + 12
    turn = f' transform="rotate(-25 {x:.1f} {y})" text-anchor="end"' if count > 4 else ' text-anchor="middle"'
    return f'<text x="{x:.1f}" y="{y}"{turn}>{escape(name)}</text>'


def _empty(title: str) -> str:
    return "\n".join(
        [*_frame(title, 1.0, _legend([], 1.0)[1]), f'<text x="{EDGE}" y="{HIGH / 2:g}">nothing measured</text>']
    )


def comparison(found: Summary) -> str:
    """Returns the picture of a comparison: speed-up, acceptance by budget and by prompt length, and time."""
    sets = list(dict.fromkeys((g.set, g.temperature) for g in found.groups))
    several = len({t for _, t in sets}) > 1
    named = lambda name, t: f"{name} T {t:g}" if several else name
    cells = list(dict.fromkeys(g.cell for g in found.groups))
    by = {(g.set, g.temperature, g.cell): g.figures for g in found.groups}
    figure = lambda key, cell, what: getattr(by[(*key, cell)], what, None)
    drafted = [cell for cell in cells if cell.shape != "plain"]
    speed = [Bars(str(cell), [figure(key, cell, "speedup") for key in sets]) for cell in drafted]
    groups = [named(*key) for key in sets]
    panels = [bars("decode speed-up, pooled", groups, speed)]
    panels.append(curves("acceptance length by nodes a round", _by_nodes(found.groups, named), log=True))
    panels.append(curves("acceptance length by prompt tokens, at most", _by_length(found), log=True))
    for key in sets:
        parts = [Bars(part, [figure(key, cell, part) for cell in cells]) for part in ("prefill", "decode")]
        panels.append(bars(f"seconds, {named(*key)}", list(map(str, cells)), parts, stacked=True))
    return picture(panels)


def overview(found: Summary) -> str:
    """Returns the picture of a comparison at its lowest temperature: each drafter's fastest cell by set, and by budget.

    The first panel has bars for each set; then come speed-up, acceptance length and milliseconds of a round by nodes.
    """
    heat = min(g.temperature for g in found.totals)
    totals = [g for g in found.totals if g.temperature == heat and g.cell.shape != "plain" and g.figures]
    fastest: dict[str, Group] = {}
    for g in totals:
        best = fastest.get(g.cell.drafter)
        if best is None or (g.figures.speedup or 0) > (best.figures.speedup or 0):  # type: ignore[union-attr]
            fastest[g.cell.drafter] = g
    sets = list(dict.fromkeys(g.set for g in found.groups))
    by = {(g.set, g.cell): g.figures for g in found.groups if g.temperature == heat}
    shown = [
        Bars(f"{g.cell} ({g.figures.speedup:.2f})", [getattr(by.get((s, g.cell)), "speedup", None) for s in sets])
        for g in fastest.values()  # in the order of the lines, so that a drafter has one colour
        if g.figures and g.figures.speedup
    ]
    panels = [bars("decode speed-up, each drafter's fastest (all sets)", sets, shown)]
    alone = Counter(g.cell.drafter for g in totals)  # a drafter of one cell is a point, whatever its shape
    for title, name, times in (
        ("decode speed-up by nodes a round", "speedup", 1.0),
        ("acceptance length by nodes a round", "acceptance", 1.0),
        ("milliseconds of a round by its nodes", "round_seconds", 1e3),
    ):
        lines: dict[str, list[tuple[float, float]]] = {}
        for g in totals:
            value = getattr(g.figures, name)
            if value is not None and (g.cell.shape == "tree" or alone[g.cell.drafter] == 1):
                lines.setdefault(g.cell.drafter, []).append((float(g.cell.nodes), times * value))
        panels.append(curves(title, [Curve(name, sorted(points)) for name, points in lines.items()], log=True))
    return picture(panels, 2)


def _by_nodes(groups: Sequence[Group], named) -> list[Curve]:
    """A line for each drafter, shape, set and temperature."""
    key = lambda g: (g.cell.drafter, g.cell.shape, g.set, g.temperature)
    drafted = [g for g in groups if g.cell.shape != "plain" and g.figures and g.figures.acceptance is not None]
    return [
        Curve(
            f"{drafter} {shape}, {named(name, t)}",
            sorted((float(g.cell.nodes), g.figures.acceptance) for g in some),  # type: ignore[union-attr, misc]
        )
        for (drafter, shape, name, t), some in itertools.groupby(sorted(drafted, key=key), key)
    ]


def _by_length(found: Summary) -> list[Curve]:
    """A line for each cell and temperature; the last bin, which has no end, stands at twice the one before."""
    ends = [*map(float, BINS), 2.0 * BINS[-1]]
    lines: dict[str, list[tuple[float, float]]] = {}
    for end, name in zip(ends, BIN_NAMES, strict=True):
        for g in found.lengths.get(name, ()):
            if g.cell.shape != "plain" and g.figures and g.figures.acceptance is not None:
                lines.setdefault(f"{g.cell} T {g.temperature:g}", []).append((end, g.figures.acceptance))
    return [Curve(name, points) for name, points in lines.items()]
