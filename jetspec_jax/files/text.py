"""Text and JSON out of regular files of a bounded size, in UTF-8 with or without a byte order mark.

A pipe would be waited for, a device never ends, and a file of another kind and size is none that anybody wrote for us:
each is refused with one line before anything is read.
"""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from jetspec_jax.fields import ConfigError

MOST = 256 << 20  # bytes of a file that is read whole; tokenizers of 250,000 tokens take 40 MB
LINE = 64 << 20  # bytes of one line of a file that is read line by line
KINDS = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: Path) -> BinaryIO:
    """Returns a regular file, opened to read bytes; never waits.

    Raises:
      ConfigError: there is none, it may not be read, or it is a folder, pipe or device.
    """
    try:
        number = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # a null byte in the name
        raise ConfigError(f"{str(path)!r}: no such file ({error})") from None
    mode = os.fstat(number).st_mode
    if not stat.S_ISREG(mode):
        os.close(number)
        kind = KINDS.get(stat.S_IFMT(mode), "no regular file")
        raise ConfigError(f"{path}: {kind}; give a regular file")
    return os.fdopen(number, "rb")


def bounded(path: Path) -> None:
    """Refuses what a library must not be left alone with: no regular file, or one of more than `MOST` bytes."""
    with open_regular(path) as file:
        if os.fstat(file.fileno()).st_size > MOST:
            raise ConfigError(f"{path}: more than {MOST >> 20} MB, which no such file needs")


def read(path: Path, most: int = MOST) -> str:
    """Returns the text of a file of at most `most` bytes."""
    with open_regular(path) as file:
        try:
            data = file.read(most + 1)
        except OSError as error:
            raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    if len(data) > most:
        raise ConfigError(f"{path}: more than {most >> 20} MB, which no such file needs")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise ConfigError(f"{path}:{line}: not UTF-8 text ({error.reason})") from None


def read_json(path: Path, most: int = MOST) -> dict[str, Any]:
    """Returns the JSON object that a file holds; `fields.Fields` reads its values.

    Raises:
      ConfigError: there is none, and the line says what its folder holds instead; or it is no JSON object.
    """
    try:
        content = read(path, most)
    except ConfigError as error:
        if path.parent.is_dir() and str(error).endswith("no such file"):
            raise ConfigError(f"{error}; {_held(path.parent)}") from None
        raise
    value = parse(content, str(path))
    if not isinstance(value, dict):
        raise ConfigError(f"{path}: a JSON object is needed")
    return value


def _held(folder: Path) -> str:
    """Returns what a folder holds, for a message."""
    held = sorted(os.listdir(folder))
    models = [name for name in held if name.endswith(".gguf")]
    if models:
        return f"{models[0]} is there: name the file itself"
    if not held:
        return "the folder is empty"
    more = f" and {len(held) - 3} more" if len(held) > 3 else ""
    return f"the folder holds {', '.join(held[:3])}{more}"


def lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yields every line that is not blank, with its number from 1."""
    with open_regular(path) as file:
        for number, data in enumerate(iter(lambda: file.readline(LINE + 1), b""), 1):
            if len(data) > LINE:
                raise ConfigError(f"{path}:{number}: a line of more than {LINE >> 20} MB")
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path}:{number}: not UTF-8 text ({error.reason})") from None
            if line.strip():
                yield number, line


def json_lines(path: Path) -> Iterator[tuple[int, Any]]:
    """Yields the JSON value of every line that is not blank, with the line's number from 1."""
    for number, line in lines(path):
        yield number, parse(line, f"{path}:{number}")


def parse(text: str, where: str) -> Any:
    """Returns the JSON value of a text; `where` names it in messages."""
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error.msg}, line {error.lineno} column {error.colno})") from None
    except (RecursionError, ValueError):
        raise ConfigError(f"{where}: not JSON that can be read (nested too deeply, or a number too long)") from None
