"""Checkpoints of a run through orbax: written beside the training, whole or not there, and read back bit for bit.

A checkpoint is renamed into place when it is complete, so a run that dies while saving goes on from the one before.
One that was damaged afterwards is passed over with a word. The best head so far is kept apart from the newest states.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from jetspec_jax.config import ConfigError
from jetspec_jax.training.step import TrainState

KEPT = 2  # newest states
PATTERN = set("*?[]{}\\")  # orbax takes a path for a pattern where it puts a checkpoint together: it gets a link then


def any_saved(folder: Path) -> bool:
    """Whether the folder of a run holds a state or a best head, whole or damaged."""
    return any(path.name.isdigit() for kind in ("states", "best") for path in (folder / kind).glob("*"))


class NotSaved(OSError):
    """A checkpoint cannot be written; the message is one line for the user."""


class Checkpoints:
    """The states and the best head of one run; close it to wait for what is being written."""

    def __init__(self, folder: Path):
        folder = folder.resolve()
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._link = folder, None
        place = folder
        if set(str(folder)) & PATTERN:
            self._link = tempfile.TemporaryDirectory(prefix="jetspec-")
            place = Path(self._link.name) / "run"
            place.symlink_to(folder, target_is_directory=True)
        options = ocp.CheckpointManagerOptions
        self._states = ocp.CheckpointManager(place / "states", options=options(max_to_keep=KEPT))
        self._best = ocp.CheckpointManager(place / "best", options=options(max_to_keep=1))

    def __enter__(self) -> Checkpoints:
        self._quiet = contextlib.ExitStack()
        self._quiet.enter_context(_no_echoes())
        return self

    def __exit__(self, kind, error, trace) -> None:
        with self._quiet:
            try:
                with self._writing("a checkpoint"):
                    self._states.close()
                    self._best.close()
            except NotSaved:
                if error is None:  # else what came first is what is said
                    raise
        if self._link:
            self._link.cleanup()

    def save(self, step: int, state: TrainState, notes: dict[str, Any]) -> None:
        """Copies the state off the device and writes it in the background; notes: plain values beside it."""
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(notes))
        with self._writing(f"checkpoint {step}"):
            self._take_turns(self._best)
            if not self._states.save(step, args=args):
                raise RuntimeError("a later one is there")

    def save_best(self, step: int, params: dict, acceptance: float) -> None:
        """Replaces the best head."""
        with self._writing("the best head"):
            self._replace_best(step, params, acceptance)

    def _replace_best(self, step: int, params: dict, acceptance: float) -> None:
        self._best.wait_until_finished()
        self._take_turns(self._states)
        # Of a run that went back: orbax would keep the later step. On the disk it stays: a kill may come first.
        later = [old for old in self._best.all_steps() if old >= step]
        for old in later:
            (self._folder / "best" / str(old)).rename(self._folder / f"later-best-{old}")
        if later:
            self._best.reload()
        args = ocp.args.Composite(
            params=ocp.args.StandardSave(params), notes=ocp.args.JsonSave({"step": step, "acceptance": acceptance})
        )
        self._best.save(step, args=args, force=True)

    def _take_turns(self, other: ocp.CheckpointManager) -> None:
        """Waits for what is being written by another manager, where several processes write: while they do, orbax has
        them meet at places that are not named after the manager."""
        if jax.process_count() > 1:
            other.wait_until_finished()

    def wait(self) -> None:
        """Returns when everything is on the disk."""
        with self._writing("a checkpoint"):
            self._states.wait_until_finished()
            self._best.wait_until_finished()

    @contextlib.contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """Makes one line of whatever a full disk provokes; an error of the background comes with a later call."""
        try:
            yield
        except Exception as error:
            why = _reason(error)
            whole = sorted(int(p.name) for p in (self._folder / "states").glob("*") if p.name.isdigit())
            there = f"at step {whole[-1]}" if whole else "from the beginning"
            raise NotSaved(
                f"{self._folder}: {what} cannot be written ({why}); make room, then the same command goes on {there}"
            ) from None

    def restore(
        self, like: TrainState, step: int = 0, log: Callable[[str], None] = lambda line: None
    ) -> tuple[TrainState, dict[str, Any]] | None:
        """Returns the newest whole state, or that of `step`; None where there is none yet.

        like: a state or its ShapeDtypeStructs with the shardings wanted now; the number of devices may be another than
        when it was saved.

        Raises:
          ConfigError: `step` was asked for and is not there, or no checkpoint of the folder can be read.
        """
        steps = sorted(self._states.all_steps(), reverse=True)
        if step:
            if step not in steps:
                raise ConfigError(f"--config.resume_step={step}: {self._folder} holds {steps or 'no checkpoint'}")
            steps = [step]
        reasons = []
        for number in steps:
            try:
                found = self._states.restore(
                    number,
                    args=ocp.args.Composite(
                        state=ocp.args.StandardRestore(_abstract(like)), notes=ocp.args.JsonRestore()
                    ),
                )
            except Exception as error:  # whatever a damaged file provokes
                if "RESOURCE_EXHAUSTED" in str(error) or isinstance(error, MemoryError):
                    raise  # a full device says nothing about the file
                why = str(error).strip().partition("\n")[0].partition(" See full TensorStore details")[0][:200]
                why = "an array in it is damaged" if "reading array index" in why else why or type(error).__name__
                reason = f"checkpoint {number} cannot be read ({why})"
                log(f"train: {reason}; trying the one before")
                reasons.append(reason)
                continue
            for damaged in steps[: len(reasons)]:  # out of the way: its number will be saved again
                (self._folder / "states" / str(damaged)).rename(self._folder / f"damaged-{damaged}")
            # A run that goes back would find the numbers of its steps taken.
            later = [other for other in self._states.all_steps() if step and other > number]
            for other in later:
                (self._folder / "states" / str(other)).rename(self._folder / f"later-{other}")
            if reasons or later:
                self._states.reload()
            return found["state"], found["notes"]
        if reasons:
            raise ConfigError(f"{self._folder}: {'; '.join(reasons)}; remove it to begin anew")
        return None

    def restore_best(self, like: dict, log: Callable[[str], None]) -> tuple[dict, dict[str, Any]] | None:
        """Parameters and notes of the best head; None where none was saved or, with a word, it cannot be read."""
        step = self._best.latest_step()
        if step is None:
            return None
        args = ocp.args.Composite(params=ocp.args.StandardRestore(_abstract(like)), notes=ocp.args.JsonRestore())
        try:
            found = self._best.restore(step, args=args)
        except Exception as error:  # the newest state is the better answer to a damaged file
            if "RESOURCE_EXHAUSTED" in str(error):
                raise
            log(f"train: the best head, of step {step}, cannot be read; the newest state stands in for it")
            return None
        return found["params"], found["notes"]


def _reason(error: BaseException) -> str:
    """The system's own words for why a file cannot be written, or the first line of the error."""
    text = str(error).strip()
    for number in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EACCES, errno.EIO):
        if os.strerror(number) in text:
            return os.strerror(number)
    return (text or type(error).__name__).splitlines()[0][:200]


@contextlib.contextmanager
def _no_echoes() -> Iterator[None]:
    """Keeps back what other threads print, later, when a damaged array or a full disk has ended an attempt.

    What failed is raised in the main thread too, so nothing goes unsaid.
    """
    excepthook, unraisable = sys.excepthook, sys.unraisablehook

    def echo(text: str) -> bool:
        return "Event loop is closed" in text or "_read_array_index" in text

    def new(record: logging.LogRecord) -> bool:
        orbax = record.levelno >= logging.ERROR and "orbax" in record.pathname
        return not orbax and "never retrieved" not in record.getMessage()

    sys.excepthook = lambda kind, error, trace: echo(str(error)) or excepthook(kind, error, trace)
    sys.unraisablehook = lambda args: echo(f"{args.object!r} {args.exc_value}") or unraisable(args)
    logs = [logging.getLogger(name) for name in ("asyncio", "absl")]
    for log in logs:
        log.addFilter(new)
    try:
        yield
    finally:
        sys.excepthook, sys.unraisablehook = excepthook, unraisable
        for log in logs:
            log.removeFilter(new)


def _abstract(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree)
