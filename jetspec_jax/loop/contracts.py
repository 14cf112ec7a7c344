"""What the loop asks of any target and of any draft."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.layers.cache import Cache


@runtime_checkable
class Backend(Protocol):
    """How the loop's own parts are computed; a target's layers ask more of it, which is theirs to say."""

    def commit(self, cache: Cache, fresh: Cache, path: Int[Array, "B R"], start: Int[Array, " B"]) -> Cache:
        """Writes the fresh rows of `path` to slots start..start+R-1 of every layer."""

    def grow(
        self, builder: str, logp: Float[Array, "B D W"], token: Int[Array, "B D W"], rows: int
    ) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B T"], Int[Array, " B"]]:
        """Tokens, parents, depths and number of the first `rows` nodes, as `tree.grow`."""


class Output(NamedTuple):
    """What a forward pass over T fresh rows returns."""

    hidden: jax.Array  # [B, T, E] after the final norm
    fresh: Cache  # K/V of the T rows, one pair [B, K, T, H] a layer
    taps: jax.Array | None  # [B, T, len(taps) * E], outputs of the tapped layers side by side


@runtime_checkable
class Target(Protocol):
    """Pure functions of a frozen verifier; hashable, parameters are passed in."""

    @property
    def vocab_size(self) -> int:
        """Rows of the vocabulary that exist, padding of the device layout excluded."""

    @property
    def backend(self) -> Backend:
        """How it computes; the loop's own parts follow it."""

    def init_cache(self, params, batch: int, capacity: int) -> Cache:
        """An empty K/V cache."""

    def forward(
        self,
        params,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "_ T T"],
        cache: Cache | None = None,
        length: Int[Array, " B"] | None = None,
        taps: tuple[int, ...] = (),
    ) -> Output:
        """T fresh rows behind the first `length` slots of `cache`; writes nothing."""

    def embed(self, params, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows E"]:
        """Rows of the embedding table."""

    def logits(self, params, hidden: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """f32 logits of final hidden states."""


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
