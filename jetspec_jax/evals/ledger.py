"""The file of a comparison: its settings in the first line, then one line a request; it can be gone on with.

A line is written at once, so that whatever ends the command costs at most the request it was at. The last
line of a file whose writer was killed may be half there; it is cut off before new ones are written.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import io
import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jetspec_jax.evals.drafters import Cell
from jetspec_jax.fields import ConfigError, Fields, shown
from jetspec_jax.files import text
from jetspec_jax.options import MAX_BUDGET

SHAPES = ("plain", "chain", "tree", "auto")
VERDICTS = ("plain", "equal", "tie", "differs")
KIND = "jetspec comparison"
MANY = 2.0**53


class Key(NamedTuple):
    """What a request is known by: a prompt of a set, and what decodes it how."""

    set: str
    prompt: int
    temperature: float
    cell: Cell


@dataclasses.dataclass(frozen=True)
class Request:
    """One request that was decoded. Field names are the keys of its line."""

    session: int  # which start of the command decoded it, from 1
    set: str
    prompt: int  # index among the prompts of the set that are short enough
    id: Any  # the row's own
    prompt_tokens: int
    temperature: float
    drafter: str
    method: str
    shape: str
    nodes: int
    depth: int  # positions drafted a round
    new_tokens: int
    rounds: int
    finish_reason: str
    prefill: float  # seconds
    decode: float  # seconds, the first token excluded
    accept_lengths: tuple[int, ...]  # per round, bonus included, as verified
    emitted: tuple[int, ...]  # per round, as given out
    peak_bytes: int | None  # of the process so far; None where the device does not tell
    verdict: str  # beside plain decoding: "equal", "tie" or "differs"; "plain" for plain decoding itself
    parted_at: int | None  # new token in which they first differ
    margin: float | None  # of the two best there, in standard deviations of the logits
    lost: Mapping[str, int] | None  # rounds by what they lost; None where it is not known
    score: Mapping[str, Any] | None  # what the answer is worth; None without a gold answer
    token_ids: tuple[int, ...]
    text: str

    @property
    def cell(self) -> Cell:
        """What decoded it."""
        return Cell(self.drafter, self.method, self.shape, self.nodes)

    @property
    def key(self) -> Key:
        """What it is known by."""
        return Key(self.set, self.prompt, self.temperature, self.cell)


class Run(NamedTuple):
    """What a file holds."""

    settings: dict[str, Any]
    requests: list[Request]


def read(path: str | Path) -> Run:
    """Returns what a comparison wrote; a last line that is half there is left out.

    Raises:
      ConfigError: this is no such file; the line names file, line and key.
    """
    return _read(Path(os.path.expanduser(path)))[0]


def _read(path: Path) -> tuple[Run, int]:
    """Returns what a file holds, and how many bytes of it are whole lines."""
    with text.open_regular(path) as file:
        data = file.read()
    whole = data.rfind(b"\n") + 1
    lines = data[:whole].decode("utf-8", "replace").split("\n")  # not splitlines: a text may hold U+2028
    values = [(f"{path}:{n}", text.parse(line, f"{path}:{n}")) for n, line in enumerate(lines, 1) if line.strip()]
    if not values or not isinstance(values[0][1], Mapping) or values[0][1].get("kind") != KIND:
        raise ConfigError(f"{path}: no file of a comparison (jetspec_jax.evals.compare --out writes them)")
    first = Fields(values[0][1], values[0][0])
    settings = dict(first.table("settings").raw)
    return Run(settings, [_request(Fields(value, where)) for where, value in values[1:]]), whole


def _request(fields: Fields) -> Request:
    count = lambda key: fields.whole(key, 0)
    seconds = lambda key: fields.real(key, 0.0, MANY)
    maybe = lambda key, read: read(key) if fields.has(key) else None
    table = lambda key: dict(fields.table(key).raw)
    counts = lambda key: {name: fields.table(key).whole(name, 0) for name in fields.table(key).raw}
    return Request(
        session=fields.whole("session"),
        set=fields.text("set"),
        prompt=count("prompt"),
        id=fields.raw.get("id"),
        prompt_tokens=fields.whole("prompt_tokens"),
        temperature=fields.real("temperature", 0.0, 1e30),
        drafter=fields.text("drafter"),
        method=fields.text("method"),
        shape=fields.text("shape", among=SHAPES),
        nodes=fields.whole("nodes", 1, MAX_BUDGET),
        depth=fields.whole("depth", 0, MAX_BUDGET),
        new_tokens=count("new_tokens"),
        rounds=count("rounds"),
        finish_reason=fields.text("finish_reason"),
        prefill=seconds("prefill"),
        decode=seconds("decode"),
        accept_lengths=fields.wholes("accept_lengths"),
        emitted=fields.wholes("emitted"),
        peak_bytes=maybe("peak_bytes", lambda key: fields.whole(key, 0, 2**62)),
        verdict=fields.text("verdict", among=VERDICTS),
        parted_at=maybe("parted_at", count),
        margin=maybe("margin", lambda key: fields.real(key, -1e300, 1e300)),
        lost=maybe("lost", counts),
        score=maybe("score", table),
        token_ids=fields.wholes("token_ids"),
        text=fields.text("text"),
    )


class Ledger:
    """A file that is written to.

    requests: what it holds. session: number of this start, from 1.
    """

    def __init__(self, file: io.FileIO, run: Run):
        self._file, self.requests = file, run.requests
        self.session = 1 + max((request.session for request in run.requests), default=0)
        self._done = {request.key: request for request in run.requests}

    def get(self, key: Key) -> Request | None:
        """Returns the request of a key, None where it has not been decoded."""
        return self._done.get(key)

    def add(self, request: Request) -> None:
        """Writes a request down."""
        self._done[request.key] = request
        self.requests.append(request)
        _write(self._file, _encoded(dataclasses.asdict(request)))


@contextlib.contextmanager
def opened(path: str | Path, settings: Mapping[str, Any]) -> Iterator[Ledger]:
    """Opens a comparison's file for one command alone, and makes it where it is not there.

    Args:
      path: of the file.
      settings: of the comparison, plain values; those of a file that is there must be equal.

    Raises:
      ConfigError: a setting differs, by name; another command holds the file; or it is none of a comparison.
    """
    path = Path(os.path.expanduser(path))
    wanted = json.loads(json.dumps(settings))
    if path.exists() and not path.is_file():  # a pipe would wait for its reader
        raise ConfigError(f"out={shown(str(path))}: it is no regular file; name another")
    try:
        file = open(path, "ab", buffering=0)  # noqa: SIM115  (closed below, with the lock)
    except OSError as error:
        raise ConfigError(f"out={shown(str(path))}: it cannot be written ({error.strerror}); name another") from None
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"{path}: another command is at work in it; wait for it, or name another") from None
        begin = _encoded({"kind": KIND, "settings": wanted})
        with open(path, "rb") as held:
            there = held.read(len(begin))
        if len(there) < len(begin) and begin.startswith(there):  # nothing, or the first line is half there
            file.truncate(0)
            _write(file, begin)
        run, whole = _read(path)
        same(path, run.settings, wanted)
        file.truncate(whole)
        yield Ledger(file, run)


def same(path: Path, old: Mapping[str, Any], new: Mapping[str, Any]) -> None:
    """Raises ConfigError where settings differ; the line names the first of them and both values.

    The target may lie elsewhere: its fingerprint is what tells it.
    """
    for name in [*new, *(name for name in old if name not in new)]:
        if name != "target" and old.get(name) != new.get(name):
            where, was, now = parted(name, old.get(name), new.get(name))
            raise ConfigError(
                f"{path}: begun with {where}={shown(was)}, now {shown(now)}; give what it was, or name another --out"
            )


def parted(name: str, old: Any, new: Any) -> tuple[str, Any, Any]:
    """Returns the first part in which two values of a setting differ: its name, and both.

    Of tables and lists of lists a part is named, since what a message has room for may be equal in both.
    """
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        key = next(key for key in (*new, *old) if (key in old, old.get(key)) != (key in new, new.get(key)))
        return parted(f"{name}.{key}", old.get(key), new.get(key))
    if isinstance(old, list) and isinstance(new, list) and any(isinstance(x, list) for x in (*old, *new)):
        at = next(i for i, (a, b) in enumerate(itertools.zip_longest(old, new)) if a != b)
        item = lambda values: values[at] if at < len(values) else None
        return f"{name}[{at}]", item(old), item(new)
    return name, old, new


def _encoded(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False).encode() + b"\n"


def _write(file: io.FileIO, line: bytes) -> None:
    """Writes a line; without a buffer, so that a full disk is told once and here."""
    try:
        while line:
            line = line[file.write(line) :]
    except OSError as error:
        raise ConfigError(
            f"{file.name}: it cannot be written ({error.strerror}); make room, then the same command goes on"
        ) from None
