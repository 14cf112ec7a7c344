"""Draws the curves of a run: loss, and acceptance length in training and on held-out rows.

    python -m jetspec_jax.training.plot DIR [OUT.png]

DIR is a run's work folder or its train folder; the picture goes to DIR/curves.png.
"""

from __future__ import annotations

import sys
from pathlib import Path

from jetspec_jax.training import journal


def draw(folder: Path, out: Path) -> None:
    """Reads metrics.jsonl and writes a picture. Raises ImportError without matplotlib, OSError without records."""
    records = journal.read(folder)
    if not records:
        raise OSError(f"{folder / journal.FILE}: no records; give the folder of a run")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

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


def main(argv: list[str]) -> int:
    """The command of the module's docstring; the exit status."""
    if len(argv) not in (1, 2):
        print(__doc__.split("\n\n")[1].strip(), file=sys.stderr)
        return 2
    folder = Path(argv[0])
    folder = folder / "train" if (folder / "train" / journal.FILE).is_file() else folder
    out = Path(argv[1]) if len(argv) == 2 else folder / "curves.png"
    try:
        draw(folder, out)
    except ImportError:
        print('plot: it needs matplotlib: pip install "jetspec_jax[plot]"', file=sys.stderr)
        return 1
    except OSError as error:
        print(f"plot: {error}", file=sys.stderr)
        return 1
    print(out)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
