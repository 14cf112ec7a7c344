"""The decode loop as pure functions: prefill, one round, many rounds in one XLA program.

A round drafts, builds the tree, verifies it in one pass of the target, accepts the longest agreeing path and commits
it. Plain decoding is the same machinery without a draft: a tree of one node. Everything that a request can change is an
array in `State`; what decides shapes is the static `Decoder`.

Invariants after prefill and after every round, for a row with `length` committed tokens: the target cache holds
positions 0..length-2 (the last committed token, the anchor, has no K/V yet), and the draft has seen the features of the
same positions.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jetspec_jax import cache as kv_cache
from jetspec_jax import masks, sampling
from jetspec_jax import tree as trees
from jetspec_jax.drafts import Draft
from jetspec_jax.models import Target
from jetspec_jax.ops import XLA, Ops
from jetspec_jax.tree import Tree
from jetspec_jax.verify import Accepted, accept

RUNNING, STOP, LENGTH, NONFINITE = range(4)  # `State.reason`


@dataclasses.dataclass(frozen=True)
class Decoder:
    """What is static in a decode loop; hashable, so that equal decoders share their compiled programs.

    rows: tree nodes T verified a round; a row's budget may be smaller. Without a draft it is 1.
    capacity: cache slots S of a row. ops: how the loop's own parts are computed.
    """

    target: Target
    draft: Draft | None
    rows: int
    capacity: int
    builder: str = "best_first"
    width: int = 64
    ops: Ops = XLA

    def __post_init__(self):
        if self.draft is None and self.rows != 1:
            raise ValueError(f"rows={self.rows}: without a draft there is one row")

    @property
    def depth(self) -> int:
        """Drafted positions D; 0 without a draft."""
        return self.draft.depth if self.draft else 0


class Request(NamedTuple):
    """What prefill needs of every row; right-padded."""

    tokens: Int[Array, "B P"]
    prompt_length: Int[Array, " B"]  # >= 1
    limit: Int[Array, " B"]  # prompt_length + max_new_tokens, cut to capacity - D - 1
    budget: Int[Array, " B"]
    temperature: Float[Array, " B"]
    seed: UInt32[Array, " B"]
    eos: Int[Array, "B n"]  # padded with -1


class State(NamedTuple):
    """A batch in flight. Donated from program to program, so the cache is never copied."""

    tokens: jax.Array  # [B, S] int32, prompt and committed tokens
    length: jax.Array  # [B] int32, committed tokens, prompt included
    prompt_length: jax.Array  # [B] int32
    limit: jax.Array  # [B] int32, length at which the row ends
    budget: jax.Array  # [B] int32, tree nodes of a round
    temperature: jax.Array  # [B] f32
    seed: jax.Array  # [B] uint32
    eos: jax.Array  # [B, n] int32, end tokens, -1 where there are fewer
    reason: jax.Array  # [B] int32: RUNNING, STOP, LENGTH or NONFINITE
    cache: kv_cache.Cache  # the target's K/V
    draft: Any  # the draft's own pytree, None without a draft
    rounds: jax.Array  # [B] int32, rounds that the row has run
    accept_lengths: jax.Array  # [B, S] int32, per round: agreed nodes + bonus, as verified
    tree_sizes: jax.Array  # [B, S] int32, per round
    emitted: jax.Array  # [B, S] int32, per round: tokens committed, after end token and limit

    @property
    def done(self) -> jax.Array:
        """[B] bool."""
        return self.reason != RUNNING


class Round(NamedTuple):
    """What one round did, for traces and tests."""

    logits: jax.Array | None  # [B, D, V] f32 draft logits
    tree: Tree
    accepted: Accepted
    target_logits: jax.Array  # [B, T, V] f32


def prefill(decoder: Decoder, params: dict, request: Request) -> State:
    """Runs the prompts, fills the caches and commits the first token of every row that may have one.

    params: {"target": ..., "draft": ...}, as the two builders describe them.
    """
    target, draft, tokens = decoder.target, decoder.draft, request.tokens
    batch, slots = tokens.shape
    # A commit writes D + 1 rows at once; past the buffer's end they would be shifted back over the prefix.
    room = decoder.capacity - decoder.depth - 1
    if slots > room:
        raise ValueError(f"capacity={decoder.capacity}: {slots} prompt slots need at least {slots + decoder.depth + 1}")
    limit = jnp.minimum(request.limit, room)
    positions = jnp.broadcast_to(jnp.arange(slots), tokens.shape)
    taps = draft.taps if draft else ()
    out = target.forward(params["target"], tokens, positions, masks.causal(slots), taps=taps)
    zeros = jnp.zeros((batch,), jnp.int32)
    cache = kv_cache.write(target.init_cache(params["target"], batch, decoder.capacity), out.fresh, zeros)
    drafting = None
    if draft:
        drafting = draft.init(params["draft"], batch, decoder.capacity)
        drafting = draft.prefill(params["draft"], drafting, out.taps, request.prompt_length)

    last = jnp.take_along_axis(out.hidden, request.prompt_length[:, None, None] - 1, 1)
    logits = target.logits(params["target"], last)
    first = sampling.choose(logits, zeros[:, None], request.prompt_length, request.temperature, request.seed, span=1)
    records = jnp.zeros((batch, decoder.capacity), jnp.int32)
    state = State(
        tokens=jax.lax.dynamic_update_slice(records, tokens, (0, 0)),
        length=request.prompt_length,
        prompt_length=request.prompt_length,
        limit=limit,
        budget=request.budget,
        temperature=request.temperature,
        seed=request.seed,
        eos=request.eos,
        reason=jnp.where(limit > request.prompt_length, RUNNING, LENGTH).astype(jnp.int32),
        cache=cache,
        draft=drafting,
        rounds=zeros,
        accept_lengths=records,
        tree_sizes=records,
        emitted=records,
    )
    return _commit(state, first, jnp.ones_like(zeros), _finite(logits, zeros[:, None], first))[0]


def step(decoder: Decoder, params: dict, state: State) -> State:
    """One round. Finished rows commit nothing; what lies behind their length may change."""
    return traced_step(decoder, params, state)[0]


def rounds(decoder: Decoder, params: dict, state: State, n: Int[Array, ""]) -> State:
    """At most n rounds (traced), fewer when every row has ended. Donate `state`."""

    def running(carry):
        i, state = carry
        return (i < n) & ~state.done.all()

    def body(carry):
        i, state = carry
        return i + 1, step(decoder, params, state)

    return jax.lax.while_loop(running, body, (jnp.int32(0), state))[1]


def traced_step(decoder: Decoder, params: dict, state: State) -> tuple[State, Round]:
    """One round, and what it did."""
    target, draft, depth = decoder.target, decoder.draft, decoder.depth
    weights = params["target"]
    past = state.length - 1
    anchor = jnp.take_along_axis(state.tokens, past[:, None], 1)[:, 0]

    draft_logits, drafting = None, state.draft
    if draft:
        draft_logits, drafting = draft.propose(
            params["draft"],
            drafting,
            state.tokens,
            state.length,
            lambda tokens: target.embed(weights, tokens),
            lambda hidden: target.logits(weights, hidden),
        )
        tree = trees.build(
            decoder.builder, decoder.width, decoder.rows, draft_logits, anchor, state.budget, decoder.ops.kernels
        )
    else:
        tree = trees.root(anchor)

    ancestors = masks.ancestors(tree.parents, depth)
    positions = past[:, None] + tree.depths
    out = target.forward(weights, tree.tokens, positions, ancestors, state.cache, past, draft.taps if draft else ())
    logits = target.logits(weights, out.hidden)
    choice = sampling.choose(logits, tree.depths, state.length, state.temperature, state.seed, span=depth + 1)
    accepted = accept(tree, ancestors, choice, depth)

    finite = _finite(logits, accepted.path, accepted.tokens)
    old, (state, kept) = state, _commit(state, accepted.tokens, accepted.count, finite)
    cache = decoder.ops.commit(old.cache, out.fresh, accepted.path, past)
    if draft:
        features = jnp.take_along_axis(out.taps, accepted.path[..., None], 1) if out.taps is not None else None
        drafting = draft.keep(drafting, features, kept)

    row = jnp.where(old.done, decoder.capacity, old.rounds)  # out of bounds for finished rows: dropped

    def record(log, value):
        return jax.vmap(lambda r, i, x: r.at[i].set(x, mode="drop"))(log, row, value)

    state = state._replace(
        cache=cache,
        draft=drafting,
        rounds=old.rounds + ~old.done,
        accept_lengths=record(old.accept_lengths, accepted.count),
        tree_sizes=record(old.tree_sizes, tree.size),
        emitted=record(old.emitted, kept),
    )
    return state, Round(draft_logits, tree, accepted, logits)


def _finite(logits: jax.Array, nodes: jax.Array, chosen: jax.Array) -> jax.Array:
    """[B, R]: the winning logit of each node is a number. NaN and +inf win every argmax, so one look tells the row."""
    return jnp.isfinite(jax.vmap(lambda x, n, c: x[n, c])(logits, nodes, chosen))


def _commit(state: State, tokens: jax.Array, count: jax.Array, finite: jax.Array) -> tuple[State, jax.Array]:
    """Appends the first `count` of R tokens to the running rows; cut at the limit, then at the first end token."""
    rows = tokens.shape[1]
    at = jnp.arange(rows)
    kept = jnp.minimum(count, state.limit - state.length)
    ends = (tokens[:, :, None] == state.eos[:, None, :]).any(-1) & (at < kept[:, None])
    kept = jnp.where(ends.any(1), jnp.argmax(ends, 1) + 1, kept)
    broken = (~finite & (at < kept[:, None])).any(1)
    kept = jnp.where(state.done | broken, 0, kept).astype(jnp.int32)
    length = state.length + kept

    reason = jnp.where(ends.any(1), STOP, jnp.where(length >= state.limit, LENGTH, RUNNING))
    reason = jnp.where(broken, NONFINITE, reason)
    # R rows are always written: those behind `length` are overwritten by the next round or never read.
    buffer = jax.vmap(lambda b, t, s: jax.lax.dynamic_update_slice(b, t, (s,)))(state.tokens, tokens, state.length)
    return (
        state._replace(tokens=buffer, length=length, reason=jnp.where(state.done, state.reason, reason)),
        kept,
    )
