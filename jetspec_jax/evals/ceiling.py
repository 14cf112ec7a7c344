"""The speed-up that a chain of guesses can have at most, by the chance of a guess and the cost of drafting.

    python -m jetspec_jax.evals.ceiling --a 0.85 --svg ceiling.svg
    python -m jetspec_jax.evals.ceiling --rows run.jsonl --svg ceiling.svg

A round of N guesses, each right with chance a after right ones, gives out 1 + a + ... + a^N tokens on average, and
costs one step of the target and N drafting steps of c target steps each:

    E[speed-up] = (1 - a^(N+1)) / ((1 - a) (N c + 1))

A drafter that guesses all N in one pass costs c in all, whatever N is. --a and --c give a table and curves over N.
--rows reads what `jetspec_jax.evals.compare --out` wrote, fits one a and one c for each set, temperature, drafter and
shape over all its budgets, and puts the predicted speed-up beside the measured one. There c is what a round costs
beyond a plain step, verifying more rows than one included; a tree counts as a chain whose guess is right where any node
below is.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.evals.ceiling")

import itertools
import pathlib
from collections.abc import Sequence
from typing import NamedTuple

from jetspec_jax import command
from jetspec_jax.command import UsageError
from jetspec_jax.evals import chart, ledger, summary
from jetspec_jax.evals.chart import Curve
from jetspec_jax.evals.summary import Figures, Group
from jetspec_jax.evals.tables import number, table
from jetspec_jax.fields import Option
from jetspec_jax.methods import METHODS

SMALL_GAP = 1e-4  # of a from 1, below which the quotient loses its digits


def tokens(a: float, n: int) -> float:
    """Returns the tokens that a round of n guesses gives out on average: 1 + a + ... + a^n."""
    if 1 - a < SMALL_GAP:  # a series about 1; its next term is below n^3 * 1e-12
        gap = 1 - a
        return n + 1 - gap * n * (n + 1) / 2 + gap * gap * (n - 1) * n * (n + 1) / 6
    return (1 - a ** (n + 1)) / (1 - a)


def speedup(a: float, c: float, n: int, one_pass: bool = False) -> float:
    """Returns the expected speed-up over plain decoding.

    Args:
      a: chance in 0..1 that a guess is right, given that those before it are.
      c: cost of a drafting step, or of the one drafting pass, in steps of the target.
      n: guesses a round; 0 is plain decoding.
      one_pass: whether all guesses are drafted in one pass.
    """
    return tokens(a, n) / (1 + c * (min(n, 1) if one_pass else n))


class Fit(NamedTuple):
    """What the budgets of one drafter say together. a or c is None where there was nothing to fit it to."""

    one_pass: bool
    a: float | None
    c: float | None
    groups: list[Group]


def fit(groups: Sequence[Group]) -> Fit:
    """Returns the most probable a, and the c with the least squares of what rounds cost, over all groups.

    A round that kept k of n guesses tried k + 1 of them, or n where all were right; so a is the share of right ones
    among those that were tried.
    """
    one_pass = not METHODS[groups[0].cell.method].sequential if groups[0].cell.method in METHODS else True
    measured = [(g.figures, relative(g.figures)) for g in groups if g.figures is not None]
    right = sum(f.kept[0] for f, _ in measured)
    tried = right + sum(f.kept[1] for f, _ in measured)
    times = [(1 if one_pass else f.depth, cost - 1) for f, cost in measured if cost is not None and f.depth]
    squares = sum(n * n for n, _ in times)
    c = max(sum(n * more for n, more in times) / squares, 0.0) if squares else None
    return Fit(one_pass, right / tried if tried else None, c, list(groups))


def relative(f: Figures) -> float | None:
    """Returns what a round costs in plain steps; None where one of the two was not measured."""
    return f.round_seconds / f.step_seconds if f.round_seconds is not None and f.step_seconds else None


def fits(found: summary.Summary, pooled: bool = False) -> list[Fit]:
    """Returns a fit for each set, temperature, drafter and shape of a comparison; pooled: for all sets together."""
    key = lambda g: (g.set, g.temperature, g.cell.drafter, g.cell.shape)
    drafted = sorted((g for g in (found.totals if pooled else found.groups) if g.cell.shape != "plain"), key=key)
    return [fit(list(some)) for _, some in itertools.groupby(drafted, key)]


NAMES = ("set", "T", "cell", "N", "a", "c", "drafting", "round / step", "predicted", "measured", "measured / predicted")


def predicted(found: Sequence[Fit]) -> str:
    """Returns the predicted speed-up of every cell beside the measured one, as a Markdown table."""
    rows = []
    for one in found:
        for group in one.groups:
            f, first = group.figures, [group.set, f"{group.temperature:g}", str(group.cell)]
            if f is None:
                rows.append([*first, "absent", *["-"] * (len(NAMES) - 4)])
                continue
            told = None
            if one.a is not None and one.c is not None:
                told = speedup(one.a, one.c, f.depth, one.one_pass)
            ratio = f.speedup / told if told and f.speedup is not None else None
            rows.append([
                *first, str(f.depth), number(one.a, ".3f"), number(one.c, ".3f"),
                "one pass" if one.one_pass else "N passes", number(relative(f)), number(told), number(f.speedup),
                number(ratio),
            ])  # fmt: skip
    return table(NAMES, rows)


def grid(chances: Sequence[float], costs: Sequence[float], lengths: Sequence[int], one_pass: bool) -> str:
    """Returns the expected speed-up for every a, c and N, and the best N among them, as a Markdown table."""
    rows = []
    for a, c in itertools.product(chances, costs):
        values = [speedup(a, c, n, one_pass) for n in lengths]
        best = lengths[max(range(len(values)), key=values.__getitem__)]
        rows.append([f"{a:g}", f"{c:g}", *(f"{v:.2f}" for v in values), str(best)])
    return table(["a", "c", *(f"N = {n}" for n in lengths), "best N of these"], rows)


def drawn(a: float, costs: Sequence[float], most: int, one_pass: bool) -> str:
    """Returns a panel with the curve over N of every c."""
    lines = [Curve(f"c = {c:g}", [(n, speedup(a, c, n, one_pass)) for n in range(most + 1)]) for c in costs]
    return chart.curves(f"expected speed-up over N, a = {a:.3g}{', one pass' if one_pass else ''}", lines)


def drawn_fit(one: Fit, most: int) -> str:
    """Returns a panel with a fit's curve and what was measured."""
    name = (
        f"{one.groups[0].set} T {one.groups[0].temperature:g}: {one.groups[0].cell.drafter} {one.groups[0].cell.shape}"
    )
    lines = []
    if one.a is not None and one.c is not None:
        a, c = one.a, one.c
        lines.append(Curve("predicted", [(n, speedup(a, c, n, one.one_pass)) for n in range(most + 1)]))
    measured = [
        (f.depth, f.speedup) for f in (g.figures for g in one.groups) if f is not None and f.speedup is not None
    ]
    lines.append(Curve("measured", [(float(n), value) for n, value in sorted(measured)]))
    return chart.curves(name, lines)


LINE = command.Line(
    __doc__,
    [
        Option("a", "number", "Chances that a guess is right.", (0.8, 0.9, 0.95), high=1.0, many=True),
        Option("c", "number", "Costs of drafting, in steps of the target.", (0.05, 0.0005), high=1e6, many=True),
        Option("n", "whole", "Lengths of the table; the curves go to the largest.", (0, 1, 2, 4, 8, 16, 32, 64),
               high=4096, many=True),
        Option("one_pass", "flag", "All N are drafted in one pass of cost c.", False),
        Option("rows", "text", "A comparison to fit a and c to; its files, where it was made by several runs.", (),
               many=True, metavar="FILE.jsonl"),
        Option("pooled", "flag", "With --rows: all sets together, and no set alone.", False),
        Option("svg", "text", "Draw the curves into this file.", metavar="FILE.svg"),
    ],
)  # fmt: skip


@command.tool("ceiling")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    command.writable("svg", args.svg)
    if args.rows:
        for name in ("a", "c", "n", "one_pass"):
            if name in args.given:
                raise UsageError(f"--{name} with --rows: it is fitted to what was measured; leave it out")
        whole = [summary.of(ledger.read(path)) for path in args.rows]
        found = fits(summary.joined(whole) if len(whole) > 1 else whole[0], args.pooled)
        print(predicted(found))
        longest = max((f.depth for one in found for f in (g.figures for g in one.groups) if f), default=1)
        panels = [drawn_fit(one, longest) for one in found]
    elif args.pooled:
        raise UsageError("--pooled: it is of a comparison; give its files with --rows")
    else:
        lengths = sorted(set(args.n))
        print(grid(args.a, args.c, lengths, args.one_pass))
        panels = [drawn(a, args.c, lengths[-1], args.one_pass) for a in args.a]
    if args.svg:
        pathlib.Path(args.svg).write_text(chart.picture(panels), encoding="utf-8")
    return 0
