"""The host's side of `budget="auto"` for a running batch: what blocks cost, and how many nodes the next one verifies.

A block is started before the one before it has been read, so what a report says holds from the block after the next
one on. What the host does about that is here: a look at trees, or at plain steps, that is already on its way is not
ordered a second time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jetspec_jax.engine.costs import Table
from jetspec_jax.engine.pacing import FIRST_ROUNDS, Drift
from jetspec_jax.engine.requests import on_device
from jetspec_jax.loop import pacing
from jetspec_jax.loop.pacing import Ladder, Next, Price

# Powers of two that can win, and rows of a batch with all their nodes beyond which none can: a CPU pays for every row.
SIZES = {"cpu": (1, 4, 8, 16), "gpu": (1, 8, 16, 32, 64, 128, 256), "tpu": (1, 8, 16, 32, 64, 128, 256)}
ROWS = {"cpu": 16, "gpu": 2048, "tpu": 2048}
NEVER = 1e6  # seconds of a round that there is no program for


class Tempo:
    """Chooses how many nodes the rounds of the next block verify.

    ladder: the sizes, plain decoding (1) the first of them. drift: of their costs.
    """

    def __init__(self, ladder: Ladder, usual: int):
        """Makes one that knows no costs yet.

        Args:
          ladder: all sizes.
          usual: nodes of the first block.
        """
        if not ladder.plain:
            raise ValueError(f"sizes={ladder.sizes}: plain decoding (1) is always among them")
        self.ladder, self.drift = ladder, Drift()
        self._tables: dict[int, Table] = {}
        self._prices: dict[tuple[int, tuple[int, ...]], Price] = {}
        self._size = self._tree = usual
        self._most, self._block = pacing.MANY, FIRST_ROUNDS
        self._fresh = self._worked = 0.0
        self._seconds: dict[int, float] = {}

    def learn(self, batch: int, table: Table) -> None:
        """Takes in what rounds of a batch cost; the sizes that it has not are never chosen for it."""
        self._tables[batch] = table

    def sizes(self, batch: int) -> tuple[int, ...]:
        """Returns the sizes that a batch may have, ascending."""
        return self._tables[batch].sizes

    def price(self, batch: int, sizes: tuple[int, ...]) -> Price:
        """Returns what rounds of a batch cost now.

        Args:
          batch: its rows.
          sizes: of which there are programs.
        """
        if (batch, sizes) not in self._prices:
            self._prices[batch, sizes] = self._priced(self._tables[batch], sizes)
        factor: Any = np.array(self.drift.of(self.ladder.sizes), np.float32)
        return self._prices[batch, sizes]._replace(factor=factor)

    def _priced(self, table: Table, sizes: tuple[int, ...]) -> Price:
        place = {size: i for i, size in enumerate(table.sizes) if size in sizes}
        rows = [[row[place[n]] if n in place else NEVER for n in self.ladder.sizes] for row in table.seconds]
        floats = lambda values: on_device(values, np.float32)
        return Price(floats(table.contexts), floats(rows), floats([1.0] * len(self.ladder.sizes)))

    def nodes(self, sizes: Sequence[int]) -> int:
        """Returns the nodes of the next block, one of the sizes that there are programs for."""
        return max((size for size in sizes if size <= self._size), default=min(sizes))

    def rounds(self, nodes: int, batch: int, seconds: float) -> int:
        """Returns how many rounds the next block should have.

        Args:
          nodes: of its trees.
          batch: its rows.
          seconds: that it should take at most.
        """
        expected = self._seconds.get(nodes) or self._measured(batch, nodes)
        most = min(self._most, max(int(seconds / expected), 1))
        return most if nodes == 1 else min(most, self._block)

    def admitted(self, share: float) -> None:
        """Says that a share of the running rows is new. A text of its own has its rounds with trees at once."""
        self._fresh = min(self._fresh + share, 1.0)
        if self._fresh >= 0.5:
            self._block = FIRST_ROUNDS
            if self._size == 1:
                self._size, self._most = self._tree, 1

    def taken(self) -> tuple[float, float]:
        """Returns what the next block is told: the share of its rows that are new, and `Order.worked`."""
        fresh, self._fresh = self._fresh, 0.0
        return fresh, self._worked

    def hear(self, nodes: int, said: Next, flying: int | None) -> None:
        """Takes in what a block says of the next one.

        Args:
          nodes: of the block.
          said: on the host.
          flying: nodes of the block that runs meanwhile; None where there is none.
        """
        sizes = self.ladder.sizes
        self._seconds = dict(zip(sizes, said.seconds.tolist(), strict=True))
        size, most, resting = sizes[int(said.place)], int(said.rounds), bool(said.resting)
        if self._fresh >= 0.5:
            return  # the report is of other texts
        looks = size > 1 and most < pacing.MANY
        if looks and (flying or 0) > 1:
            size, most = 1, pacing.MANY
        elif size == 1 and not resting and flying == 1:  # plain steps that are timed between trees
            size, most = self._tree, pacing.MANY
        self._block = FIRST_ROUNDS if size == 1 else min(2 * self._block, pacing.MANY)
        self._size, self._most = size, most
        if size > 1:
            self._tree = size

    def timed(self, nodes: int, ran: int, spent: float | None) -> None:
        """Takes in how long a block took; before `hear` of the same block.

        Args:
          nodes: of it.
          ran: rounds of it.
          spent: seconds; None where the device did other work too.
        """
        expected = self._seconds.get(nodes)
        if nodes == 1:
            self._worked = 0.0
        else:
            self._worked += spent or ran * (expected or 0.0)
        if ran and spent and expected:
            self.drift.heed(nodes, ran, spent, expected)

    def plain(self, batch: int) -> float:
        """Returns the seconds of a plain step of a batch: what was measured, times how much longer steps take now."""
        return self._measured(batch, 1) * self.drift.of([1])[0]

    def _measured(self, batch: int, nodes: int) -> float:
        table = self._tables[batch]
        return table.seconds[0][table.sizes.index(nodes)] if nodes in table.sizes else NEVER


def start(nodes: int) -> tuple[pacing.Belief, jnp.ndarray]:
    """Returns what the first block believes, and that nothing rests.

    nodes: of the largest tree.
    """
    return pacing.start(nodes), jnp.bool_(False)
