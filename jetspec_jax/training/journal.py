"""What a run says: a line on stdout, a JSON object in a file, TensorBoard where it is installed, a bar on terminals."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any, TextIO

from jetspec_jax.training import files

FILE = "metrics.jsonl"
BAR = 24  # characters


class Journal:
    """Records of one run. Steps that were written before and lie after where it goes on are taken back."""

    def __init__(self, folder: Path, steps: int, at: int, lead: bool = True):
        """lead: whether this process writes; the others of a run say nothing."""
        self._lead = lead
        if not lead:
            return
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / FILE
        kept = [r for r in read(folder) if r["step"] <= at]
        files.write(path, "".join(json.dumps(r) + "\n" for r in kept))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - closed by __exit__
        self._steps = steps
        self._bar: TextIO | None = sys.stderr if sys.stderr.isatty() else None
        self._board = _board(folder)
        self._begin, self._first = time.monotonic(), at

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error) -> None:
        if not self._lead:
            return
        self._clear()
        self._file.close()
        if self._board:
            self._board.close()

    def record(self, values: dict[str, Any]) -> None:
        """Writes one moment; `step` is in it."""
        if not self._lead:
            return
        self._file.write(json.dumps(values) + "\n")
        self._file.flush()
        for name, value in _scalars(values) if self._board else ():
            self._board.add_scalar(name, value, values["step"])
        self._clear()
        print(self._line(values), flush=True)

    def tick(self, step: int) -> None:
        """Moves the bar, on a terminal."""
        if self._lead and self._bar:
            done = BAR * step // max(self._steps, 1)
            left = _time(self._left(step))
            self._bar.write(f"\r[{'#' * done}{'.' * (BAR - done)}] {step}/{self._steps}  {left} left ")
            self._bar.flush()

    def _clear(self) -> None:
        if self._bar:
            self._bar.write("\r" + " " * (BAR + 40) + "\r")

    def _left(self, step: int) -> float:
        done = step - self._first
        return (time.monotonic() - self._begin) / done * (self._steps - step) if done else 0.0

    def _line(self, r: dict[str, Any]) -> str:
        parts = [f"step {r['step']}/{self._steps}"]
        if "loss" in r:
            parts += [f"loss {r['loss']:.3f}", f"tau {r['run_length']:.2f}"]
        if "heldout" in r:
            parts += ["held-out " + " ".join(f"{b}:{t:.2f}" for b, t in r["heldout"]["acceptance"].items())]
        if "lr" in r:
            parts += [f"lr {r['lr']:.2e}"]
        if "mfu" in r:
            parts += [f"{r['tokens_per_second']:,.0f} tokens/s", f"MFU {r['mfu']:.1%}"]
        if r.get("skipped"):
            parts += [f"skipped {r['skipped']}"]
        return "  ".join([*parts, f"ETA {_time(self._left(r['step']))}"])


def read(folder: Path) -> list[dict[str, Any]]:
    """Records of a run by step; a line that was cut off is left out, and of two for one step the later holds."""
    path = folder / FILE
    found: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines() if path.is_file() else ():
        try:
            record = json.loads(line)
            found[int(record["step"])] = record
        except (ValueError, KeyError, TypeError):
            continue
    return [found[step] for step in sorted(found)]


def _scalars(values: dict[str, Any], prefix: str = "") -> list[tuple[str, float]]:
    """Numbers of nested records under names with slashes; lists are left to the file."""
    flat: list[tuple[str, float]] = []
    for key, value in values.items():
        if isinstance(value, dict):
            flat += _scalars(value, f"{prefix}{key}/")
        elif isinstance(value, int | float):
            flat.append((prefix + key, float(value)))
    return flat


def _board(folder: Path):
    try:
        from tensorboardX import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder / "tensorboard"))


def _time(seconds: float) -> str:
    minutes, second = divmod(int(seconds), 60)
    hours, minute = divmod(minutes, 60)
    return f"{hours}:{minute:02}:{second:02}" if hours else f"{minute}:{second:02}"
