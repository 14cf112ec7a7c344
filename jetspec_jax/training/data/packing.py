"""Several documents in one sequence, kept apart by a number: nothing of one is seen from another.

Sequences are filled by best fit in falling order of length, which leaves about two percent of padding where documents
are much shorter than a sequence. Positions count from each document's own first token.
"""

from __future__ import annotations

import bisect
from typing import NamedTuple

import numpy as np

from jetspec_jax.training.data.examples import Example


class Packed(NamedTuple):
    """M sequences of S positions."""

    tokens: np.ndarray  # [M, S] int32
    document: np.ndarray  # [M, S] int32, 1, 2, ... within a sequence; 0 is padding
    position: np.ndarray  # [M, S] int32, within the document
    learnt: np.ndarray  # [M, S] bool
    identities: tuple[tuple[str, ...], ...]  # of the documents of a sequence, in order

    def select(self, rows: np.ndarray) -> Packed:
        """Selects the named sequences, in that order."""
        names = tuple(self.identities[int(i)] for i in rows)
        return Packed(self.tokens[rows], self.document[rows], self.position[rows], self.learnt[rows], names)

    def sample(self, count: int) -> Packed:
        """Selects at most `count` sequences, evenly out of all: they lie in falling order of their longest document."""
        return self.select(np.linspace(0, len(self.tokens) - 1, min(count, len(self.tokens))).astype(int))

    @property
    def paired(self) -> np.ndarray:
        """[M, S - 1] bool: a token and the next one are learnt in one document."""
        return self.learnt[:, :-1] & self.learnt[:, 1:] & (self.document[:, :-1] == self.document[:, 1:])

    @property
    def anchored(self) -> np.ndarray:
        """[M] bool: a block can start somewhere in the sequence."""
        return np.any(self.paired, axis=1)


def pack(examples: list[Example], length: int) -> Packed:
    """Packs all examples, each whole in one sequence; none may be longer than `length`. The same order every time."""
    order = sorted(range(len(examples)), key=lambda i: (-examples[i].tokens.size, i))
    bins: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free positions, sequence), ascending
    for i in order:
        size = examples[i].tokens.size
        if size > length:
            raise ValueError(f"{examples[i].identity}: {size} tokens in sequences of {length}")
        place = bisect.bisect_left(room, (size, -1))
        if place == len(room):
            free, at = length, len(bins)
            bins.append([])
        else:
            free, at = room.pop(place)
        bins[at].append(i)
        if free > size:
            bisect.insort(room, (free - size, at))

    shape = len(bins), length
    packed = Packed(
        np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, bool),
        tuple(tuple(examples[i].identity for i in rows) for rows in bins),
    )  # fmt: skip
    for m, rows in enumerate(bins):
        at = 0
        for number, i in enumerate(rows, 1):
            here = slice(at, at + examples[i].tokens.size)
            packed.tokens[m, here] = examples[i].tokens
            packed.learnt[m, here] = examples[i].learnt
            packed.document[m, here] = number
            packed.position[m, here] = np.arange(examples[i].tokens.size)
            at = here.stop
    return packed
