"""Draws the curves of a run as SVG: loss, and acceptance length in training and on held-out rows.

    python -m jetspec_jax.training.plot DIR [OUT.svg]

DIR is a run's work folder or its train folder; the picture goes to DIR/curves.svg.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.training.plot")

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jetspec_jax import command
from jetspec_jax.config import ConfigError
from jetspec_jax.fields import Option
from jetspec_jax.training import files, journal

WIDE, HIGH, EDGE = 400, 240, 44  # of one panel, and room for its numbers
COLOURS = ("#888888", "#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e")


class Curve(NamedTuple):
    """A line of a panel."""

    name: str
    points: list[tuple[float, float]]


def curves(records: list[dict[str, Any]]) -> str:
    """Returns the picture of a run's records; some of them must have a loss."""
    loss = Curve("loss", [(r["step"], r["loss"]) for r in records if r.get("loss", 0) > 0])
    chain = Curve("training, chain", [(r["step"], r["run_length"]) for r in records if "run_length" in r])
    judged = [(r["step"], r["heldout"]["acceptance"]) for r in records if "heldout" in r]
    budgets = dict.fromkeys(budget for _, found in judged for budget in found)
    heldout = [Curve(f"held-out, budget {b}", [(s, a[b]) for s, a in judged if b in a]) for b in budgets]
    panels = _panel("loss", [loss], 0, True), _panel("acceptance length", [chain, *heldout], WIDE, False)
    size = f'width="{2 * WIDE}" height="{HIGH}" viewBox="0 0 {2 * WIDE} {HIGH}"'
    style = 'font-family="sans-serif" font-size="11"'
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size} {style}>\n' + "\n".join(panels) + "\n</svg>\n"


def _panel(title: str, lines: list[Curve], left: int, log: bool) -> str:
    every = [point for line in lines for point in line.points] or [(0.0, 1.0)]
    down: Callable[[float], float] = math.log10 if log else float
    most = max(x for x, _ in every) or 1
    low, high = min(down(y) for _, y in every), max(down(y) for _, y in every)
    high = high if high > low else low + 1

    def place(x: float, y: float) -> str:
        along = left + EDGE + (WIDE - 1.5 * EDGE) * x / most
        return f"{along:.1f},{HIGH - EDGE + (1.75 * EDGE - HIGH) * (down(y) - low) / (high - low):.1f}"

    top, bottom = (10**v if log else v for v in (high, low))
    drawn = [f'<rect x="{left}" width="{WIDE}" height="{HIGH}" fill="white"/>']
    drawn += [f'<text x="{left + EDGE}" y="16" font-weight="bold">{title}, by step</text>']
    for value in (bottom, top):
        x, y = place(0, value).split(",")
        drawn.append(f'<text x="{float(x) - 6:.0f}" y="{y}" text-anchor="end">{value:.3g}</text>')
    drawn.append(f'<text x="{left + WIDE - EDGE / 2}" y="{HIGH - EDGE / 2}" text-anchor="end">{most:,.0f}</text>')
    for i, line in enumerate(lines):
        colour = COLOURS[(i + (len(lines) == 1)) % len(COLOURS)]
        where = " ".join(place(x, y) for x, y in line.points)
        drawn.append(f'<polyline points="{where}" fill="none" stroke="{colour}" stroke-width="1.5"/>')
        if len(lines) > 1:
            row = HIGH - EDGE - 8 - 13 * i
            drawn.append(f'<text x="{left + WIDE - 10}" y="{row}" text-anchor="end" fill="{colour}">{line.name}</text>')
    return "\n".join(drawn)


LINE = command.Line(
    __doc__,
    [],
    [
        Option("folder", "text", "A run's work folder or its train folder.", required=True, metavar="DIR"),
        Option("out", "text", "The picture. Default: DIR/curves.svg.", metavar="OUT.svg"),
    ],
)


@command.tool("plot")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    folder = Path(args.folder)
    folder = folder / "train" if (folder / "train" / journal.FILE).is_file() else folder
    records = journal.read(folder)
    if not records:
        raise ConfigError(f"{folder / journal.FILE}: no records; give the folder of a run")
    out = Path(args.out) if args.out else folder / "curves.svg"
    files.write(out, curves(records))
    print(out)
    return 0
