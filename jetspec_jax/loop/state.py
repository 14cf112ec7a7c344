"""What a batch in flight is: its request, its state, and the record of one round."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Float, Int

from jetspec_jax.layers.cache import Cache
from jetspec_jax.loop.processors import Past, Sampling
from jetspec_jax.loop.tree import Tree
from jetspec_jax.loop.verify import Accepted

# `State.reason`: an end token, the limit, broken logits; TEXT, a stop string, is set by the host between rounds.
RUNNING, STOP, LENGTH, NONFINITE, TEXT = range(5)


class Request(NamedTuple):
    """What prefill needs of every row; right-padded."""

    tokens: Int[Array, "B P"]
    prompt_length: Int[Array, " B"]  # >= 1
    limit: Int[Array, " B"]  # prompt_length + max_new_tokens; prefill cuts it to capacity - D - 1
    budget: Int[Array, " B"]
    sampling: Sampling
    eos: Int[Array, "B n"]  # padded with -1
    least: Float[Array, " B"] | None = None  # probability of a path under which nodes are not verified; None is 0


class Top(NamedTuple):
    """The K most probable tokens at every place under the target's own distribution, most probable first."""

    token: jax.Array  # [B, S, K] int32
    logprob: jax.Array  # [B, S, K] f32


class State(NamedTuple):
    """A batch in flight, rows along axis 0 of every leaf. Donated from program to program: the cache is not copied."""

    tokens: jax.Array  # [B, S] int32, prompt and committed tokens
    length: jax.Array  # [B] int32, committed tokens, prompt included
    prompt_length: jax.Array  # [B] int32
    limit: jax.Array  # [B] int32, length at which the row ends
    budget: jax.Array  # [B] int32, tree nodes of a round
    sampling: Sampling
    eos: jax.Array  # [B, n] int32, end tokens, -1 where there are fewer
    reason: jax.Array  # [B] int32: RUNNING, STOP, LENGTH, NONFINITE or TEXT
    cache: Cache  # the target's K/V
    draft: Any  # the draft's own pytree
    rounds: jax.Array  # [B] int32, rounds that the row has run
    accept_lengths: jax.Array  # [B, S] int32, per round: agreed nodes + bonus, as verified
    tree_sizes: jax.Array  # [B, S] int32, per round
    emitted: jax.Array  # [B, S] int32, per round: tokens committed, after end token and limit
    logprobs: jax.Array | None  # [B, S] f32 beside `tokens`: of committed tokens, None where they are not recorded
    least: jax.Array | None = None  # [B] f32, probability of a path under which nodes are not verified; None is 0
    top: Top | None = None  # beside `tokens`: what else could have been committed, None where it is not recorded

    @property
    def done(self) -> jax.Array:
        """[B] bool."""
        return self.reason != RUNNING

    @property
    def past(self) -> Past:
        """What the choice of the next tokens may look at."""
        return Past(self.tokens, self.prompt_length, self.length, self.eos)


class Round(NamedTuple):
    """What one round did, for traces and tests."""

    tree: Tree  # with the draft's logits, where it has any
    accepted: Accepted
    target_logits: jax.Array  # [B, T, V] f32
