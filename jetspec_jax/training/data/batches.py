"""Batches of packed sequences by number, through grain: which sequences a step sees depends on its number alone.

Sequences are shuffled anew in every epoch. With several processes each one loads its share of every batch; all shares
together are the batch that one process alone would load. Tokens lie in memory, so taking a batch is microseconds of
indexing, and neither threads nor processes of grain would pay; features in files are read ahead by one of its threads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import grain
import numpy as np

from jetspec_jax.training.data.packing import Packed
from jetspec_jax.training.teacher import Features

LAST = 1 << 40  # no run takes as many batches
READ_AHEAD = 2  # batches with their features; each is as large as a step's activations

Data = Any  # numpy arrays on the host, jax arrays in a step


class Batch(NamedTuple):
    """Sequences of one update; axis 0 counts the parts that are accumulated, axis 1 the B sequences of a part."""

    tokens: Data  # [n, B, S] int32
    document: Data  # [n, B, S] int32, 0 is padding
    position: Data  # [n, B, S] int32
    learnt: Data  # [n, B, S] bool
    rows: Data  # [n, B] int32, numbers of the sequences
    features: Features | None = None  # [n, B, S, ...] where they are not made in the step

    @property
    def size(self) -> int:
        """Positions that are no padding."""
        return int((np.asarray(self.document) > 0).sum())


class Batches:
    """`batches[i]` is batch i of an endless stream."""

    def __init__(
        self,
        packed: Packed,
        batch: int,
        accumulate: int,
        seed: int,
        features: Callable[[np.ndarray], Features] | None = None,
        process: int = 0,
        processes: int = 1,
    ):
        """features: from sequence numbers to their stored features, where the host brings them."""
        if batch % (accumulate * processes):
            raise ValueError(f"batch={batch} does not split into {accumulate} parts on {processes} processes")
        self._packed, self._features = packed, features
        self._anchored = packed.anchored  # once: a pass over all data, asked for at every step
        self._shape = accumulate, batch // (accumulate * processes)
        numbers = grain.MapDataset.range(len(packed.tokens)).shuffle(seed=seed).repeat()
        self._all = numbers.batch(batch)
        self._process = process

    def __getitem__(self, number: int) -> Batch:
        """This process's share of batch `number`."""
        # Side by side in every part, as the devices of the processes lie: a step then sees the rows in one order.
        parts = np.asarray(self._all[number], np.int32).reshape(self._shape[0], -1, self._shape[1])
        rows = parts[:, self._process].reshape(-1)
        stored = self._features(rows) if self._features else None
        if stored is not None:
            stored = Features(*(x.reshape(*self._shape, *x.shape[1:]) for x in stored))
        p = self._packed
        take = lambda x: x[rows].reshape(*self._shape, -1)
        return Batch(
            take(p.tokens), take(p.document), take(p.position), take(p.learnt), rows.reshape(self._shape), stored
        )

    def stream(self, first: int) -> Iterator[Batch | None]:
        """Batches from number `first` on; None stands for one in which no block can start."""
        ahead = READ_AHEAD if self._features else 0
        numbers = grain.MapDataset.range(first, LAST).map(self._take)
        read = numbers.to_iter_dataset(grain.ReadOptions(num_threads=min(ahead, 1), prefetch_buffer_size=ahead))
        return (batch for (batch,) in read)

    def _take(self, number: int) -> tuple[Batch | None]:
        return (self[number] if self.anchored(number) else None,)  # grain leaves out an element that is None

    def anchored(self, number: int) -> bool:
        """Whether a block can start anywhere in batch `number`, of all processes."""
        return bool(self._anchored[np.asarray(self._all[number])].any())

    def identities(self, number: int) -> list[str]:
        """Returns what the documents of batch `number` are called, of all processes."""
        return [name for row in np.asarray(self._all[number]) for name in self._packed.identities[int(row)]]
