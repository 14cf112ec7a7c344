"""Draws the curves of a run: loss, and acceptance length in training and on held-out rows.

    python -m jetspec_jax.training.plot DIR [OUT.png]

DIR is a run's work folder or its train folder; the picture goes to DIR/curves.png.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.training.plot")

from collections.abc import Sequence
from pathlib import Path

from jetspec_jax import command
from jetspec_jax.config import ConfigError
from jetspec_jax.options import Option
from jetspec_jax.training import journal


def draw(folder: Path, out: Path) -> None:
    """Reads metrics.jsonl and writes a picture. Raises ConfigError without records, or without matplotlib."""
    records = journal.read(folder)
    if not records:
        raise ConfigError(f"{folder / journal.FILE}: no records; give the folder of a run")
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        raise ConfigError('it needs matplotlib: pip install "jetspec_jax[plot]"') from None

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    steps = [r["step"] for r in records]
    left.plot(steps, [r["loss"] for r in records])
    left.set(xlabel="step", ylabel="loss", yscale="log")
    right.plot(steps, [r["run_length"] for r in records], label="training, chain", color="grey")
    judged = [r for r in records if "heldout" in r]
    for budget in judged[0]["heldout"]["acceptance"] if judged else ():
        values = [r["heldout"]["acceptance"][budget] for r in judged]
        right.plot([r["step"] for r in judged], values, marker=".", label=f"held-out, budget {budget}")
    right.set(xlabel="step", ylabel="acceptance length, bonus token included")
    right.legend()
    figure.savefig(out, dpi=120)
    pyplot.close(figure)


LINE = command.Line(
    __doc__,
    [],
    [
        Option("folder", "text", "A run's work folder or its train folder.", required=True, metavar="DIR"),
        Option("out", "text", "The picture. Default: DIR/curves.png.", metavar="OUT.png"),
    ],
)


@command.tool("plot")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)
    folder = Path(args.folder)
    folder = folder / "train" if (folder / "train" / journal.FILE).is_file() else folder
    out = Path(args.out) if args.out else folder / "curves.png"
    draw(folder, out)
    print(out)
    return 0
