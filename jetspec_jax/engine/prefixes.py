"""Rows that are kept after their end, so that the next turn of a conversation begins where the last one ended."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np


@dataclasses.dataclass(eq=False)
class Prefix:
    """A kept row: the tokens that it is known to have committed, and its state on the device."""

    ids: np.ndarray
    state: Any


class Prefixes:
    """The most recently used kept rows."""

    def __init__(self, limit: int):
        """limit: rows at most; each takes the memory of a slot. 0 keeps none."""
        self.limit = limit
        self._kept: list[Prefix] = []  # the least recently used first

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, ids: Sequence[int], state: Any) -> None:
        """Keeps a row, and forgets those that it continues, and what there is no room for."""
        fresh = Prefix(np.array(ids, np.int32), state)
        self._kept = [old for old in self._kept if common(old.ids, fresh.ids) < len(old.ids)]
        self._kept.append(fresh)
        self._kept = self._kept[max(len(self._kept) - self.limit, 0) :]

    def longest(self, ids: Sequence[int]) -> tuple[Prefix | None, int]:
        """Returns the kept row that shares the longest beginning with some tokens, and how many tokens that is."""
        tokens = np.array(ids, np.int32)
        found = [(common(kept.ids, tokens), i) for i, kept in enumerate(self._kept)]
        most, at = max(found, default=(0, -1))
        if not most:
            return None, 0
        self._kept.append(self._kept.pop(at))
        return self._kept[-1], most

    def drop(self, prefix: Prefix) -> None:
        """Forgets a row: its state is used up."""
        self._kept.remove(prefix)


def common(a: np.ndarray, b: np.ndarray) -> int:
    """Returns how many tokens two rows begin with together."""
    size = min(len(a), len(b))
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if differ.size else size
