"""Target models, and what the decode core asks of any of them."""

from __future__ import annotations

from typing import NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.cache import Cache
from jetspec_jax.ops import Ops


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
    def ops(self) -> Ops:
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
