"""What a round costs, by how many nodes it verifies and how much is committed: measured once, and kept.

A table is for one batch, capacity and set of options on one device with one version of jax, one target and one head:
that is what makes the programs. It lies in the package's folder in the user's cache; a file that cannot be read, for
whatever reason, is measured anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import pathlib
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jaxlib

from jetspec_jax.fields import ConfigError, Fields
from jetspec_jax.files import cache_folder

VERSION = 1
PASSES = 5  # over all sizes in turn: other work on the machine then slows all of them, and not one
FIRST_CONTEXT = 256
MOST = 1e4  # seconds of a round


class Table(NamedTuple):
    """Seconds of a round. sizes: nodes, 1 a plain step. contexts: committed tokens, ascending."""

    sizes: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]  # one row a context

    def of(self, sizes: Sequence[int]) -> Table:
        """Returns the table of some of the sizes."""
        places = [self.sizes.index(size) for size in sizes]
        return Table(tuple(sizes), self.contexts, tuple(tuple(row[i] for i in places) for row in self.seconds))

    def winning(self, depth: int, least: int = 1) -> tuple[int, ...]:
        """Returns the sizes that can be the best choice for some text.

        Left out is, in every context, what costs no less than a larger one, what costs more than plain decoding of all
        that it could ever commit, and what costs as much a node as a smaller tree: its first nodes are the more
        probable ones.

        Args:
          depth: longest path of any tree.
          least: nodes that a row with a budget of its own needs; smaller sizes are left out.
        """
        able = [size for size in self.sizes if size >= least]
        plain = self.sizes.index(1) if 1 in able else None

        def pays(size: int, row: Sequence[float]) -> bool:
            place = self.sizes.index(size)
            beaten = any(row[self.sizes.index(other)] <= row[place] for other in able if other > size)
            most = min(size, depth + 1)
            beaten |= any(row[self.sizes.index(m)] * size <= row[place] * m for m in able if 1 < m < size)
            return not beaten and (plain is None or size == 1 or row[place] < most * row[plain])

        found = tuple(size for size in able if size == 1 or any(pays(size, row) for row in self.seconds))
        return found if found[-1:] > (1,) else (*found, min(size for size in able if size > 1))


def contexts(capacity: int, spare: int) -> tuple[int, ...]:
    """Returns the committed tokens at which rounds are measured: four times as many each, up to what the cache holds.

    spare: slots that the measured rounds may fill.
    """
    last = max(capacity - spare, 1)
    found, context = [], min(FIRST_CONTEXT, max(last // 2, 1))
    while context < last // 2:
        found.append(context)
        context *= 4
    return (*found, last) if last > FIRST_CONTEXT * 2 else (max(last // 2, 1),)


def measure(
    run: Callable[[int, int], float], sizes: Sequence[int], at: Sequence[int], passes: int | None = None
) -> Table:
    """Returns the table that timed rounds make.

    Args:
      run: of size and context; returns the seconds of a round.
      sizes: nodes of a round.
      at: contexts.
      passes: over all sizes; None is `PASSES`.
    """
    rows = []
    for context in at:
        turns = [[run(size, context) for size in sizes] for _ in range(passes or PASSES)]
        # A pass that other work has slowed counts by the shares of its parts.
        whole = statistics.median(sum(turn) for turn in turns)
        shares = zip(*([part / sum(turn) for part in turn] for turn in turns), strict=True)
        rows.append(tuple(whole * statistics.median(share) for share in shares))
    return Table(tuple(sizes), tuple(at), tuple(rows))


def described(target, head, draft) -> dict[str, Any]:
    """Returns what a table's file is about.

    Args:
      target: what `load_target` returns.
      head: what `load_head` returns.
      draft: as it drafts: its trees' rule, its window.
    """
    rule = getattr(draft, "rule", None)
    return {
        "device": _device(), "jax": jax.__version__, "jaxlib": jaxlib.__version__,
        "flags": os.environ.get("XLA_FLAGS", ""), "backend": target.model.backend.name,
        "target": _shapes(target.params), "head": _shapes(head.params), "draft": type(draft).__name__,
        "tree": [rule.builder, rule.candidates] if rule else [], "depth": draft.depth,
        "window": getattr(draft, "window", 0),
    } | ({"mesh": dict(target.mesh.shape)} if getattr(target, "mesh", None) else {})  # fmt: skip


def read(about: Mapping[str, Any], key: str, sizes: Sequence[int]) -> Table | None:
    """Returns a kept table with all these sizes; None where there is none that can be read.

    Args:
      about: what `described` returns.
      key: of the program's sizes.
      sizes: nodes of a round.
    """
    table = _tables(about).get(key)
    return table.of(sizes) if table and set(sizes) <= set(table.sizes) else None


def keep(about: Mapping[str, Any], key: str, table: Table) -> None:
    """Writes a table beside the others of its file, whole or not at all; nothing happens where nothing can be written.

    Args:
      about: what `described` returns.
      key: of the program's sizes.
      table: the new one.
    """
    tables = {name: other._asdict() for name, other in (_tables(about) | {key: table}).items()}
    with contextlib.suppress(OSError, ConfigError):
        path = _path(about)
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.stem, suffix=".part")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump({"version": VERSION, "about": about, "tables": tables}, file)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise


def _path(about: Mapping[str, Any]) -> pathlib.Path:
    digest = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    return cache_folder.path() / "costs" / f"{digest}.json"


def _tables(about: Mapping[str, Any]) -> dict[str, Table]:
    """The tables of a file that are sound; none of one that is not."""
    try:
        path = _path(about)
        file = Fields(json.loads(path.read_text(encoding="utf-8")), path.name)
        if file.whole("version") != VERSION or file.table("about").raw != about:
            return {}
        tables = file.table("tables")
        return {key: _table(tables.table(key)) for key in tables.raw}
    except (OSError, ValueError, RecursionError):  # of these are ConfigError, and what json and UTF-8 raise
        return {}


def _table(raw: Fields) -> Table:
    sizes, at = raw.wholes("sizes", 1), raw.wholes("contexts", 1)
    rows = raw.raw.get("seconds")
    if not isinstance(rows, list) or len(rows) != len(at) or not at:
        raise raw.wrong("seconds", "a row for each context is needed")
    seconds = tuple(Fields({"row": row}, raw.where, raw.inside).reals("row", 0.0, MOST) for row in rows)
    ascending = all(list(x) == sorted(set(x)) for x in (sizes, at))
    if not ascending or any(len(row) != len(sizes) or min(row) <= 0 for row in seconds):
        raise raw.wrong("seconds", "a positive number for each of ascending sizes and contexts is needed")
    return Table(sizes, at, seconds)


def _device() -> str:
    """The device's name; that of a CPU says nothing, so its model and the cores that this process may use."""
    kind = jax.devices()[0].device_kind
    if jax.default_backend() != "cpu":
        return kind
    model = ""
    with contextlib.suppress(OSError, StopIteration):
        lines = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
        model = next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return f"{kind}, {model}, {cores} cores"


def _shapes(params) -> str:
    """Tells parameters of other shapes or dtypes apart."""
    leaves = [
        (jax.tree_util.keystr(path), x.shape, str(x.dtype)) for path, x in jax.tree_util.tree_leaves_with_path(params)
    ]
    weights = sum(math.prod(shape) for _, shape, _ in leaves)
    return f"{weights} weights, {hashlib.sha256(repr(leaves).encode()).hexdigest()[:16]}"
