"""A running batch whose rows come and go: prompts read in pieces, blocks of rounds with a report, rows that move.

The state of a batch goes from program to program and is never looked at. What the host needs of a block comes beside
it, in arrays of their own, so that a block can be read while the next one runs. `block` runs rounds of one size;
`paced_block` those of one size among several, and says which of them the next block should have.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from jetspec_jax.layers import masks
from jetspec_jax.layers.numerics import narrow
from jetspec_jax.loop import tree as trees
from jetspec_jax.loop.decoder import Decoder, Piece, commit, no_top, read_piece, step_recorded
from jetspec_jax.loop.paced import Pace, narrowed, observed, widened, with_room
from jetspec_jax.loop.pacing import Belief, Ladder, Next, Price, choose, faded, renewed
from jetspec_jax.loop.paused import Paused
from jetspec_jax.loop.state import LENGTH, NONFINITE, RUNNING, Request, Round, State, Top
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
    next: Next | None = None  # what the next block should be; None where there is one size


@dataclasses.dataclass(frozen=True)
class Rung:
    """A program of blocks of one size among several; static.

    pace: its rounds. ladder: the sizes that a batch may have.
    """

    pace: Pace
    ladder: Ladder


class Order(NamedTuple):
    """What the host says to a block."""

    rounds: jax.Array  # [] int32, at most; no more than `ROUNDS`
    ended: jax.Array  # [B] bool, rows that the host ends before the first of them
    fresh: jax.Array  # [] f32, share of the running rows that no block has had
    worked: jax.Array  # [] f32, seconds of rounds with trees since the last plain step


class Mind(NamedTuple):
    """What a block hands on to the next one beside the state."""

    belief: Belief
    resting: jax.Array  # [] bool, `Next.resting`


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
    before = _ended(state, ended)
    walk = _Walk(jnp.int32(0), before, None, _undrawn(decoder, before))
    walk = _walked(decoder, params, walk, n, lambda said, *_: said)
    return walk.state, _report(decoder.capacity, decoder.depth, before, walk)


@narrow
def paced_block(
    rung: Rung, params: dict, state: State, mind: Mind, price: Price, order: Order
) -> tuple[State, Mind, Report]:
    """Runs a block as `block` does, with what its rounds say of all sizes, and chooses the next one. Donate `state`.

    Between blocks a draft's state has room for the rows of the longest path, whatever their sizes are.

    Args:
      rung: the size of this block, and all sizes.
      params: of target and draft.
      state: the batch.
      mind: what the block before has left.
      price: of the sizes, for a batch of so many rows.
      order: what the host says.
    """
    pace, decoder = rung.pace, rung.pace.decoder
    before = _ended(state, order.ended)
    belief = renewed(rung.ladder, mind.belief, order.fresh)
    walk = _Walk(jnp.int32(0), before, belief, _undrawn(decoder, before))
    if isinstance(decoder.draft, Paused):
        walk = _rested(decoder, params, walk, order.rounds)
    else:
        walk = walk._replace(state=narrowed(pace, params, before))
        tell = lambda said, old, done: observed(pace, said, old, done)
        walk = _walked(decoder, params, walk, order.rounds, tell)
        walk = walk._replace(state=widened(pace, walk.state))
    state = walk.state
    following = choose(rung.ladder, walk.said, price, state.length, state.reason, mind.resting, order.worked)
    report = _report(decoder.capacity, decoder.depth, before, walk)
    return state, Mind(walk.said, following.resting), report._replace(next=following)


def _packed(function: Callable) -> Callable:
    """Returns the function with its report as one array: the host then waits for one, and not for twenty."""

    @functools.wraps(function)
    def run(*args):
        *rest, report = function(*args)
        bits = lambda x: jax.lax.bitcast_convert_type(x, jnp.int32) if x.dtype == jnp.float32 else x.astype(jnp.int32)
        return *rest, jnp.concatenate([bits(x).ravel() for x in jax.tree.leaves(report)])

    return run


packed_block, packed_paced_block = narrow(_packed(block)), narrow(_packed(paced_block))


def report_shapes(decoder: Decoder, state: State, sizes: int = 0) -> Report:
    """Returns the shapes of a block's report.

    Args:
      decoder: of the block.
      state: the batch, or its shapes.
      sizes: of the ladder; 0 where there is none.
    """

    def made(state):
        walk = _Walk(jnp.int32(0), state, None, _undrawn(decoder, state))
        report = _report(decoder.capacity, decoder.depth, state, walk)
        said = Next(jnp.int32(0), jnp.int32(0), jnp.bool_(False), jnp.zeros(sizes, jnp.float32))
        return report._replace(next=said) if sizes else report

    return jax.eval_shape(made, state)


class _Walk(NamedTuple):
    """A block on its way: rounds so far, the batch, what they have said, and the trees of each row's last one."""

    count: jax.Array  # type: ignore[assignment]  # [] int32
    state: State
    said: Any
    drawn: Drawn


def _ended(state: State, ended: Bool[Array, " B"]) -> State:
    return state._replace(reason=jnp.where(ended & ~state.done, LENGTH, state.reason))


def _undrawn(decoder: Decoder, state: State) -> Drawn:
    ints = lambda *shape: jnp.zeros((state.length.shape[0], *shape), jnp.int32)
    return Drawn(ints(decoder.nodes), ints(decoder.nodes), ints(), ints(decoder.depth + 1), ints())


def _walked(decoder: Decoder, params: dict, walk: _Walk, until: jax.Array, tell: Callable) -> _Walk:
    """Runs rounds until there have been so many or every row has ended.

    tell: what is said after a round, out of what was said before it, the state before it, and the round.
    """

    def running(walk):
        return (walk.count < jnp.minimum(until, ROUNDS)) & ~walk.state.done.all()

    def body(walk):
        old = walk.state
        state, done = step_recorded(decoder, params, old)
        now = _drawn(done)
        keep = lambda a, b: jnp.where(old.done.reshape(-1, *[1] * (a.ndim - 1)), a, b.astype(a.dtype))
        return _Walk(walk.count + 1, state, tell(walk.said, old, done), jax.tree.map(keep, walk.drawn, now))

    return jax.lax.while_loop(running, body, walk)


def _rested(decoder: Decoder, params: dict, walk: _Walk, n: jax.Array) -> _Walk:
    """Runs plain steps, whose rows a paused draft takes in as many at a time as may wait."""
    draft, n = decoder.draft, jnp.minimum(n, ROUNDS)

    def running(walk):
        return (walk.count < n) & ~walk.state.done.all()

    def body(walk):
        state = with_room(decoder, params, walk.state)
        until = walk.count + draft.room(state.draft, n - walk.count)
        return _walked(decoder, params, walk._replace(state=state), until, lambda said, *_: said)

    walk = jax.lax.while_loop(running, body, walk)
    steps = walk.count.astype(jnp.float32)
    return walk._replace(said=faded(walk.said, steps, steps))


def _drawn(done: Round) -> Drawn:
    accepted: Accepted = done.accepted
    return Drawn(done.tree.tokens, done.tree.parents, done.tree.size, accepted.path, accepted.count)


def _report(capacity: int, depth: int, before: State, walk: _Walk) -> Report:
    """Returns the report of a block.

    Args:
      capacity: slots of a row.
      depth: longest path of its rounds.
      before: the batch before it.
      walk: the block, at its end.
    """
    state, places = walk.state, min(ROUNDS * (depth + 1) + 1, capacity)
    start = jnp.clip(before.length - 1, 0, capacity - places)
    first = jnp.minimum(before.rounds, capacity - ROUNDS)

    def window(x, at, size):
        return jax.vmap(lambda row, i: jax.lax.dynamic_slice_in_dim(row, i, size, 0))(x, at)

    return Report(
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
        drawn=walk.drawn,
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
