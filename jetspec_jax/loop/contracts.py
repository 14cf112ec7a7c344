"""What the loop asks of any target and of any draft."""

from __future__ import annotations

from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.layers.cache import Cache
from jetspec_jax.loop.choice import Choice
from jetspec_jax.loop.tree import Candidates, Grown, Rule, Tree


@runtime_checkable
class Backend(Protocol):
    """How the loop's own parts are computed; a target's layers ask more of it, which is theirs to say."""

    @property
    def name(self) -> str:
        """The word by which a user chooses it."""

    def commit(self, cache: Cache, fresh: Cache, path: Int[Array, "B R"], start: Int[Array, " B"]) -> Cache:
        """Writes the fresh rows of `path` to slots start..start+R-1 of every layer."""

    def grow(self, builder: str, candidates: Candidates, nodes: int) -> Grown:
        """Computes `tree.grow`."""


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
        """Returns an empty K/V cache."""

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
        """Runs T fresh rows after the first `length` slots of `cache`; writes nothing."""

    def embed(self, params, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows E"]:
        """Returns rows of the embedding table."""

    def logits(self, params, hidden: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """Returns f32 logits of final hidden states."""


class Seen(NamedTuple):
    """Rows that a draft has not seen yet: a piece of the prompt, or the path that a round committed.

    Rows from `count` on are padding. A piece of a prompt may begin with positions that were there before; the row of
    the last committed token, the anchor, comes with the next round. The token after each row is in `tokens`, but for
    the last row of a prompt, whose successor prefill commits later: it is in `choice.past` when the draft proposes.
    """

    features: Any  # [B, R, F], outputs of the tapped layers; None without taps
    start: jax.Array  # [B] int32, position of the first row
    count: jax.Array  # type: ignore[assignment]  # [B] int32, rows of it that exist
    tokens: jax.Array  # [B, S] int32, the committed buffer: a draft may read one token past each row
    path: bool  # whether it is a committed path, R = D + 1, after which the draft proposes next (a Python value)


class Ends(NamedTuple):
    """The two ends of the target, lent to a draft."""

    embed: Any  # [*rows] int32 -> [*rows, E]
    logits: Any  # [*rows, E] -> [*rows, V] f32


@runtime_checkable
class Draft(Protocol):
    """Pure functions of a drafter; hashable, parameters and state are passed in.

    State is the family's own pytree, with rows along axis 0 of every leaf. Where its trees have `scores`, the class
    says so (`scored = True`): budgets can then follow them, and improbable nodes be left out.
    """

    @property
    def depth(self) -> int:
        """Positions D drafted a round, the longest path of its trees."""

    @property
    def nodes(self) -> int:
        """Nodes T of its trees, the root included."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target layers whose outputs the draft reads; may be empty."""

    def shaped(self, rule: Rule, depth: int) -> Draft:
        """Returns the draft with trees of another shape; `depth` is at most its own."""

    def init(self, params, batch: int, capacity: int) -> Any:
        """Returns the state of an empty context."""

    def extend(self, params, state, seen: Seen, ends: Ends) -> Any:
        """Takes in rows that the draft has not seen yet."""

    def propose(self, params, state, choice: Choice, budget: Int[Array, " B"], ends: Ends) -> tuple[Tree, Any]:
        """Returns the tree of the next round, cut to each row's budget, and the state after it."""


@runtime_checkable
class Pausing(Protocol):
    """What a draft that reads features is asked beside `Draft`, so that plain steps may come between its rounds.

    Rows that it has seen wait in its state until a pass over them is worth it. Its own round takes in those that the
    round before has left, and `absorb` what plain steps have left.
    """

    def room(self, state) -> Int[Array, " B"]:
        """Returns how many more rows may wait."""

    def wait(self, state, seen: Seen) -> Any:
        """Keeps the rows of a committed path for later, after those that wait; there must be room."""

    def absorb(self, params, state, tokens: Int[Array, "B S"], ends: Ends) -> Any:
        """Takes in the rows that wait, so that there is room for at least one, and as many as a round's path has."""

    def resized(self, state, rows: int) -> Any:
        """Returns the state with room for so many rows in all; no more than that may wait."""
