"""A running batch whose rows come and go: prompts read in pieces, blocks of rounds with a report, rows that move.

The state of a batch goes from program to program and is never looked at. What the host needs of a block comes beside
it, in arrays of their own, so that a block can be read while the next one runs.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jetspec_jax.layers import masks
from jetspec_jax.layers.numerics import narrow
from jetspec_jax.loop import tree as trees
from jetspec_jax.loop.decoder import Decoder, Piece, commit, no_top, read_piece, step_recorded
from jetspec_jax.loop.state import LENGTH, NONFINITE, RUNNING, Request, State, Top
from jetspec_jax.loop.verify import Accepted

ROUNDS = 16  # of a block at most: a report has room for so many


class Drawn(NamedTuple):
    """The tree of the last round that each row ran in a block; size 0 where it ran none."""

    tokens: jax.Array  # [B, T] int32
    parents: jax.Array  # [B, T] int32
    size: jax.Array  # [B] int32
    path: jax.Array  # [B, D + 1] int32, nodes that were accepted, the root first
    count: jax.Array  # type: ignore[assignment]  # [B] int32, of them


class Report(NamedTuple):
    """What a block did to every row, for the host. M places from `start` on, R rounds from `first` on."""

    start: jax.Array  # [B] int32, position of the first token: the last one before the block, or an earlier one
    tokens: jax.Array  # [B, M] int32
    length: jax.Array  # [B] int32, committed tokens, prompt included
    reason: jax.Array  # [B] int32
    first: jax.Array  # [B] int32, rounds that the row had run before
    rounds: jax.Array  # [B] int32, and has run now
    accept_lengths: jax.Array  # [B, R] int32
    tree_sizes: jax.Array  # [B, R] int32
    emitted: jax.Array  # [B, R] int32
    logprobs: jax.Array | None  # [B, M] f32
    top: Top | None  # [B, M, K]
    drawn: Drawn


@narrow
def vacant(decoder: Decoder, params: dict, request: Request) -> State:
    """Returns a state into whose rows nothing has been read; they have ended.

    Args:
      decoder: the loop.
      params: of target and draft.
      request: of as many rows, for the options that they will have.
    """
    batch = request.prompt_length.shape[0]
    records = jnp.zeros((batch, decoder.capacity), jnp.int32)
    return State(
        tokens=records,
        length=request.prompt_length,
        prompt_length=request.prompt_length,
        limit=request.limit,
        budget=request.budget,
        sampling=request.sampling,
        eos=request.eos,
        reason=jnp.full(batch, LENGTH, jnp.int32),
        cache=decoder.target.init_cache(params["target"], batch, decoder.capacity),
        draft=decoder.draft.init(params["draft"], batch, decoder.capacity),
        rounds=jnp.zeros(batch, jnp.int32),
        accept_lengths=records,
        tree_sizes=records,
        emitted=records,
        logprobs=jnp.zeros(records.shape) if decoder.logprobs else None,
        least=request.least,
        top=no_top(decoder, batch),
    )


@narrow
def read(decoder: Decoder, params: dict, state: State, request: Request, start: Int[Array, ""]) -> State:
    """Reads the next `decoder.prefill_chunk` rows of a prompt; the last piece commits the first token. Donate `state`.

    Whatever the state held is overwritten, but for the rows before `start`: they may be those of another text that
    begins with the same tokens, if it went on for at least a commit (D + 1 rows) after them.

    Args:
      decoder: the loop, with the size of the piece.
      params: of target and draft.
      state: of one row.
      request: the row, its prompt in a buffer of `capacity`.
      start: rows that have been read.
    """
    size, length = decoder.prefill_chunk, request.prompt_length
    held = start > 0  # by the piece before, or by another text that ended well
    start = jnp.minimum(start, decoder.capacity - size)  # a write past the end would be shifted back; read some again
    piece = Piece(request.tokens, length, start, size)
    caches, last, sound = read_piece(decoder, params, piece, (state.cache, state.draft), prefix=True)
    limit = jnp.minimum(request.limit, decoder.capacity - decoder.depth - 1)
    # A prompt whose earlier rows are broken stays so; else it begins to run with its last piece.
    broken = ~sound | (held & (state.reason == NONFINITE))
    ends = (length <= start + size) & (limit > length)
    reason = jnp.where(broken, NONFINITE, jnp.where(ends, RUNNING, LENGTH)).astype(jnp.int32)
    records = jnp.zeros_like(state.accept_lengths)
    state = State(
        tokens=request.tokens,
        length=length,
        prompt_length=length,
        limit=limit,
        budget=request.budget,
        sampling=request.sampling,
        eos=request.eos,
        reason=reason,
        cache=caches[0],
        draft=caches[1],
        rounds=jnp.zeros_like(length),
        accept_lengths=records,
        tree_sizes=records,
        emitted=records,
        logprobs=state.logprobs,
        least=request.least,
        top=state.top,
    )
    logits = decoder.target.logits(params["target"], last)
    choice = decoder.choice(state, 0)
    root = trees.root(choice.anchor)
    return commit(state, choice.accept(root, masks.ancestors(root.parents, 0), logits), logits)[0]


@narrow
def block(
    decoder: Decoder, params: dict, state: State, n: Int[Array, ""], ended: Bool[Array, " B"]
) -> tuple[State, Report]:
    """Runs at most n rounds, and reports them. Donate `state`.

    Args:
      decoder: the loop.
      params: of target and draft.
      state: the batch.
      n: rounds, at most `ROUNDS`; fewer when every row has ended.
      ended: rows that the host ends before the first of them.
    """
    state = state._replace(reason=jnp.where(ended & ~state.done, LENGTH, state.reason))
    before = state
    batch, path = state.length.shape[0], decoder.depth + 1
    ints = lambda *shape: jnp.zeros((batch, *shape), jnp.int32)
    drawn = Drawn(ints(decoder.nodes), ints(decoder.nodes), ints(), ints(path), ints())

    def running(carry):
        i, state, _ = carry
        return (i < jnp.minimum(n, ROUNDS)) & ~state.done.all()

    def body(carry):
        i, old, drawn = carry
        state, round_ = step_recorded(decoder, params, old)
        accepted: Accepted = round_.accepted
        now = Drawn(round_.tree.tokens, round_.tree.parents, round_.tree.size, accepted.path, accepted.count)
        keep = lambda a, b: jnp.where(old.done.reshape(-1, *[1] * (a.ndim - 1)), a, b.astype(a.dtype))
        return i + 1, state, jax.tree.map(keep, drawn, now)

    _, state, drawn = jax.lax.while_loop(running, body, (jnp.int32(0), state, drawn))
    places = min(ROUNDS * path + 1, decoder.capacity)
    start = jnp.clip(before.length - 1, 0, decoder.capacity - places)
    first = jnp.minimum(before.rounds, decoder.capacity - ROUNDS)

    def window(x, at, size):
        return jax.vmap(lambda row, i: jax.lax.dynamic_slice_in_dim(row, i, size, 0))(x, at)

    return state, Report(
        start=start,
        tokens=window(state.tokens, start, places),
        length=state.length,
        reason=state.reason,
        first=first,
        rounds=state.rounds,
        accept_lengths=window(state.accept_lengths, first, ROUNDS),
        tree_sizes=window(state.tree_sizes, first, ROUNDS),
        emitted=window(state.emitted, first, ROUNDS),
        logprobs=None if state.logprobs is None else window(state.logprobs, start, places),
        top=None if state.top is None else Top(*(window(x, start, places) for x in state.top)),
        drawn=drawn,
    )


def pick(decoder: Decoder, state: State, rows: Int[Array, " R"], live: Bool[Array, " R"]) -> State:
    """Returns a batch of some rows of another, in another order or number.

    Args:
      decoder: of both; it says nothing that they do not, and makes this a program like the others.
      state: the batch.
      rows: of it, one for each row of the new one.
      live: those that go on; the others have ended.
    """
    del decoder
    state = jax.tree.map(lambda x: x[rows], state)
    return state._replace(reason=jnp.where(live, state.reason, LENGTH))
