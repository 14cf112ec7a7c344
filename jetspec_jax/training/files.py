"""Files that are whole or not there: neither a reader nor the next command sees half of one."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jetspec_jax.config import ConfigError


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which becomes `path` when the block ends well; several processes may write one."""
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def alone(folder: Path, name: str = ".lock") -> Iterator[None]:
    """Holds the folder, for what `name` stands for, until the block or the process ends.

    Raises:
      ConfigError: another command holds it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / name, "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(
                f"{folder}: another command is at work in it; wait for it, or use another folder"
            ) from None
        yield


def write(path: Path, text: str) -> None:
    """Writes a text file."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file, one key a line."""
    write(path, json.dumps(value, indent=1) + "\n")
