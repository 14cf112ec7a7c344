"""Files that are whole or not there: neither a reader nor the next command sees half of one."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """Yields a path to write to, which becomes `path` when the block ends well; several processes may write one.

    An OSError names `path`: what a full disk raises names no file.
    """
    unfinished = path.with_name(f".{path.stem}.{os.getpid()}{path.suffix}")
    try:
        yield unfinished
        os.replace(unfinished, path)
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
    finally:
        unfinished.unlink(missing_ok=True)


def write(path: Path, text: str) -> None:
    """Writes a text file."""
    with whole(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
