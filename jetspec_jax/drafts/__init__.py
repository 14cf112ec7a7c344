"""Draft families, and what the decode core asks of any of them.

A draft turns what the target has shown so far into logits for the next D positions. One file a family.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

from jaxtyping import Array, Float, Int


@runtime_checkable
class Draft(Protocol):
    """Pure functions of a drafter; hashable, parameters and state are passed in.

    State is the family's own pytree, with rows along axis 0 of every leaf. `length` counts committed tokens; the last
    of them, the anchor, has no target features yet.
    """

    @property
    def depth(self) -> int:
        """Positions D drafted a round."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs the draft reads; may be empty."""

    def init(self, params, batch: int, capacity: int) -> Any:
        """State of an empty context."""

    def prefill(
        self,
        params,
        state,
        features: Float[Array, "B R F"] | None,
        length: Int[Array, " B"],
        start: Int[Array, " B"] | None = None,
    ) -> Any:
        """Takes in the features (None without taps) of the prompt's positions start..start+R-1; `start` None is 0.

        length: of the whole prompt; right-padded. A long prompt comes in several pieces, in order; a piece may begin
        with positions that were there before.
        """

    def propose(
        self,
        params,
        state,
        tokens: Int[Array, "B S"],
        length: Int[Array, " B"],
        embed: Callable,
        logits: Callable,
    ) -> tuple[Float[Array, "B D V"], Any]:
        """f32 logits of positions length..length+D-1, and the state after it; `embed`, `logits` are the target's."""

    def keep(self, state, features: Float[Array, "B R F"] | None, count: Int[Array, " B"]) -> Any:
        """Takes the features of the first `count` rows that a round committed, R = D + 1."""
