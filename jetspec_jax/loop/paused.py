"""A draft that rests: plain steps that still show it what is committed, so that it can go on at any time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Int

from jetspec_jax.loop import tree
from jetspec_jax.loop.contracts import Ends, Seen


@dataclasses.dataclass(frozen=True)
class Paused:
    """Drafts nothing, and keeps another draft's state up to date; implements `contracts.Draft`.

    Features of plain steps wait in the draft's state, where it reads any: a pass over one row costs what a pass over
    many does. The draft's `absorb` takes them in when there is no more room.
    """

    draft: Any

    depth = 0
    nodes = 1

    @property
    def taps(self) -> tuple[int, ...]:
        return self.draft.taps

    def shaped(self, rule, depth):
        return self

    def init(self, params, batch, capacity):
        return self.draft.init(params, batch, capacity)

    def extend(self, params, state, seen: Seen, ends: Ends):
        if seen.path and self.taps:
            return self.draft.wait(state, seen)
        return self.draft.extend(params, state, seen, ends)

    def propose(self, params, state, choice, budget, ends: Ends):
        return tree.root(choice.anchor), state

    def room(self, state, most: Int[Array, ""]) -> Int[Array, ""]:
        """Returns how many plain steps all rows have room for; `most` where nothing waits."""
        return jnp.minimum(self.draft.room(state).min(), most) if self.taps else most
