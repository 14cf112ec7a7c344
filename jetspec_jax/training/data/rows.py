"""Rows of a data set, one JSON object each, from JSONL, Parquet or a Hugging Face dataset on disk.

Parquet and Arrow files need pyarrow (`pip install "jetspec_jax[data]"`); JSONL needs nothing.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jetspec_jax.config import ConfigError
from jetspec_jax.files import text

SUFFIXES = (".jsonl", ".parquet", ".arrow")
BATCH = 1024  # rows of a columnar file that are turned into objects at a time


class Row(NamedTuple):
    """One object of a file."""

    where: str  # file and line or row, for messages
    identity: str  # its `id`, or where it stands
    value: Any  # what the file holds there; a dict in a well-formed set


def read(source: str | Path) -> Iterator[Row]:
    """Reads all rows in order.

    source: a file, a folder of files of one kind, or a folder that `datasets.save_to_disk` wrote (of several splits,
    `train` is taken).

    Raises:
      ConfigError: there is no such file, it holds no rows, or a line is not JSON; the line says which.
    """
    for path in _files(Path(os.path.expanduser(source))):
        reader = {".jsonl": _jsonl, ".parquet": _parquet, ".arrow": _arrow}[path.suffix]
        for number, value in reader(path):
            where = f"{path}:{number}"
            own = value.get("id") if isinstance(value, dict) else None
            yield Row(where, str(own) if own not in (None, "") else f"{path.name}:{number}", value)


def _files(path: Path) -> list[Path]:
    if not path.exists():
        raise ConfigError(f"{path}: no such file or folder")
    if path.is_file():
        if path.suffix not in SUFFIXES:
            raise ConfigError(f"{path}: rows come from {', '.join(SUFFIXES)} files; this one ends in {path.suffix!r}")
        return [path]
    if (path / "dataset_dict.json").is_file():
        splits = text.read_json(path / "dataset_dict.json").get("splits") or []
        if "train" not in splits:
            raise ConfigError(f"{path}: it has the splits {', '.join(map(str, splits))}; name one of these folders")
        path = path / "train"
    if (path / "state.json").is_file():
        named = text.read_json(path / "state.json").get("_data_files") or []
        files = [path / str(entry.get("filename")) for entry in named if isinstance(entry, dict)]
    else:
        files = sorted(p for p in path.iterdir() if p.suffix in SUFFIXES)
        kinds = {p.suffix for p in files}
        if len(kinds) > 1:
            raise ConfigError(f"{path}: it holds {' and '.join(sorted(kinds))} files; name one file, or keep one kind")
    if not files:
        raise ConfigError(f"{path}: no {', '.join(SUFFIXES)} files in it")
    for file in files:
        if not file.is_file():
            raise ConfigError(f"{file}: the data set names this file, but there is none")
    return files


def _jsonl(path: Path) -> Iterator[tuple[int, Any]]:
    with open(path, "rb") as file:  # bytes: a decoder reads ahead, and would name the wrong line
        for number, data in enumerate(file, 1):
            try:
                line = data.decode("utf-8-sig" if number == 1 else "utf-8")
                if line.strip():
                    yield number, json.loads(line)
            except UnicodeDecodeError as error:
                raise ConfigError(f"{path}:{number}: not UTF-8 text ({error.reason})") from None
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{path}:{number}: not a JSON object ({error})") from None


def _parquet(path: Path) -> Iterator[tuple[int, Any]]:
    _pyarrow(path)
    import pyarrow
    import pyarrow.parquet

    number = 0
    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches(BATCH):
            for value in batch.to_pylist():
                number += 1
                yield number, value
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable Parquet file ({str(error).splitlines()[0]})") from None


def _arrow(path: Path) -> Iterator[tuple[int, Any]]:
    _pyarrow(path)
    import pyarrow

    number = 0
    try:
        with pyarrow.memory_map(str(path)) as source, pyarrow.ipc.open_stream(source) as stream:
            for batch in stream:
                for value in batch.to_pylist():
                    number += 1
                    yield number, value
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{path}: not a readable Arrow stream ({str(error).splitlines()[0]})") from None


def _pyarrow(path: Path) -> None:
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise ConfigError(
            f'{path}: {path.suffix} files need pyarrow: pip install "jetspec_jax[data]", or give .jsonl'
        ) from None
