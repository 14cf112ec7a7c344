"""The decode loop as pure functions: prefill, one round, many rounds in one XLA program.

A round drafts a tree, verifies it in one pass of the target, accepts the longest agreeing path and commits it. Plain
decoding is the same with a tree of one node. Everything that a request can change is an array in `State`; what decides
shapes is the static `Decoder`.

Invariants after prefill and after every round, for a row with `length` committed tokens: the target cache holds
positions 0..length-2 (the last committed token, the anchor, has no K/V yet), and the draft has seen the features of the
same positions.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jetspec_jax.layers import cache as kv_cache
from jetspec_jax.layers import masks, vocabulary
from jetspec_jax.layers.numerics import narrow
from jetspec_jax.loop import tree as trees
from jetspec_jax.loop.choice import Choice, choose
from jetspec_jax.loop.contracts import Draft, Ends, Seen, Target
from jetspec_jax.loop.state import LENGTH, NONFINITE, RUNNING, STOP, Request, Round, State, Top
from jetspec_jax.loop.verify import Accepted

DEFAULT_CHUNK = 512  # rows that keep a large GPU busy; their scores against each other are as large as the cache


@dataclasses.dataclass(frozen=True)
class Decoder:
    """What is static in a decode loop; hashable, so that equal decoders share their compiled programs.

    draft: `plain.PLAIN` decodes plainly.
    capacity: cache slots S of a row.
    logprobs: whether the log-probability of every committed token is recorded.
    prefill_chunk: prompt rows that prefill reads at a time; its memory grows with this and not with the prompt.
    top_logprobs: tokens K, the most probable ones, that are recorded beside every committed one.
    """

    target: Target
    draft: Draft
    capacity: int
    logprobs: bool = False
    prefill_chunk: int = DEFAULT_CHUNK
    top_logprobs: int = 0

    def __post_init__(self):
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={self.prefill_chunk}: at least one row is read at a time")

    @property
    def nodes(self) -> int:
        """Tree nodes T verified a round; a row's budget may be smaller."""
        return self.draft.nodes

    @property
    def depth(self) -> int:
        """Drafted positions D; 0 in plain decoding."""
        return self.draft.depth

    def ends(self, params: dict) -> Ends:
        """Returns the target's embedding and logits, for the draft."""
        weights = params["target"]
        return Ends(
            lambda tokens: self.target.embed(weights, tokens), lambda hidden: self.target.logits(weights, hidden)
        )

    def choice(self, state: State, depth: int) -> Choice:
        """Returns how the next tokens of every row are chosen, at most depth + 1 of them."""
        return choose(state.sampling, state.past, state.done, depth, self.target.vocab_size)


def prefill(decoder: Decoder, params: dict, request: Request) -> State:
    """Runs the prompts, fills the caches and commits the first token of every row that may have one.

    params: {"target": ..., "draft": ...}, as the two builders describe them.
    """
    return prefill_recorded(decoder, params, request)[0]


@narrow
def prefill_recorded(decoder: Decoder, params: dict, request: Request) -> tuple[State, Float[Array, "B V"]]:
    """Prefills, and returns the f32 logits that chose (or would choose) each row's first token too."""
    tokens = request.tokens
    # A commit writes D + 1 rows at once; past the buffer's end they would be shifted back over the prefix.
    room = decoder.capacity - decoder.depth - 1
    if tokens.shape[1] > room:
        raise ValueError(
            f"capacity={decoder.capacity}: {tokens.shape[1]} prompt slots need at least "
            f"{tokens.shape[1] + decoder.depth + 1}"
        )
    limit = jnp.minimum(request.limit, room)
    records = jnp.zeros((tokens.shape[0], decoder.capacity), jnp.int32)
    buffer = jax.lax.dynamic_update_slice(records, tokens, (0, 0))
    cache, drafting, last, sound = _read(decoder, params, request, buffer)
    zeros = jnp.zeros(tokens.shape[:1], jnp.int32)
    logits = decoder.target.logits(params["target"], last)
    reason = jnp.where(limit > request.prompt_length, jnp.where(sound, RUNNING, NONFINITE), LENGTH)
    state = State(
        tokens=buffer,
        length=request.prompt_length,
        prompt_length=request.prompt_length,
        limit=limit,
        budget=request.budget,
        sampling=request.sampling,
        eos=request.eos,
        reason=reason.astype(jnp.int32),
        cache=cache,
        draft=drafting,
        rounds=zeros,
        accept_lengths=records,
        tree_sizes=records,
        emitted=records,
        logprobs=jnp.zeros(records.shape) if decoder.logprobs else None,
        least=request.least,
        top=no_top(decoder, tokens.shape[0]),
    )
    choice = decoder.choice(state, 0)
    root = trees.root(choice.anchor)
    first = choice.accept(root, masks.ancestors(root.parents, 0), logits)
    return commit(state, first, logits)[0], logits[:, 0]


def no_top(decoder: Decoder, batch: int) -> Top | None:
    """Returns room for the most probable tokens beside every token; None where they are not recorded."""
    if not decoder.top_logprobs:
        return None
    shape = batch, decoder.capacity, decoder.top_logprobs
    return Top(jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32))


def _read(decoder: Decoder, params: dict, request: Request, buffer: Int[Array, "B S"]):
    """Returns the filled cache, the draft's state, each prompt's last hidden state [B, 1, E], and whether it is sound.

    Longer prompts are read chunk by chunk up to the longest row, in one loop, so that neither scores nor features grow
    with the prompt. What a chunk computes after a row's own length lands in slots that are never read.
    """
    batch, slots = request.tokens.shape
    size, length = min(decoder.prefill_chunk, slots), request.prompt_length
    caches = (
        decoder.target.init_cache(params["target"], batch, decoder.capacity),
        decoder.draft.init(params["draft"], batch, decoder.capacity),
    )

    def piece(start, caches, prefix):
        return read_piece(decoder, params, Piece(buffer, length, start, size), caches, prefix)

    if size == slots:
        caches, last, sound = piece(0, caches, prefix=False)
        return *caches, last, sound

    def body(i, carry):
        caches, last, sound = carry
        # The last chunk of an uneven buffer starts early, and computes some rows once more.
        start = jnp.minimum(i * size, slots - size)
        caches, here, whole = piece(start, caches, prefix=True)
        inside = (length - 1 >= start) & (length - 1 < start + size)
        return caches, jnp.where(inside[:, None, None], here, last), sound & whole

    shape = jax.eval_shape(lambda c: piece(0, c, prefix=False), caches)[1]
    chunks = (length.max() + size - 1) // size
    start = caches, jnp.zeros(shape.shape, shape.dtype), jnp.ones(batch, bool)
    caches, last, sound = jax.lax.fori_loop(0, chunks, body, start)
    return *caches, last, sound


class Piece(NamedTuple):
    """Some rows of every prompt."""

    tokens: jax.Array  # [B, S] int32, prompts
    length: jax.Array  # [B] int32, of the prompts
    start: Any  # position of the first row of the piece, the same in every prompt; traced or not
    size: int  # rows of the piece (a Python value)


def read_piece(decoder: Decoder, params: dict, piece: Piece, caches: tuple[Any, Any], prefix: bool):
    """Reads a piece of prompts whose rows before it have been read.

    Args:
      decoder: the loop.
      params: of target and draft.
      piece: what is read; start + size <= S.
      caches: the target's and the draft's, as they are after the rows before.
      prefix: whether there are rows before (a Python value).

    Returns:
      Both caches, what each prompt's last token has as hidden state [B, 1, E] if it lies in the piece, and whether the
      piece is sound [B]: its keys and values are finite in every layer. Attention takes a fresh value that is not for
      0, so that the logits would not tell.
    """
    target, draft, weights, (cache, drafting) = decoder.target, decoder.draft, params["target"], caches
    buffer, length, start, size = piece
    tokens = jax.lax.dynamic_slice_in_dim(buffer, start, size, 1)
    positions = jnp.broadcast_to(start + jnp.arange(size), tokens.shape)
    starts = jnp.full(length.shape, start, jnp.int32)
    read, past = (cache, starts) if prefix else (None, None)
    out = target.forward(weights, tokens, positions, masks.causal(size), read, past, draft.taps)
    # A layer's rows are ready before its attention has read the cache, and without an order between the two XLA
    # copies the cache. So the place to write to waits for the last layer (it is `starts`, whatever `hidden` is).
    at = jnp.minimum(starts, starts + (out.hidden[:, -1, 0] > 0))
    cache = kv_cache.write(cache, out.fresh, at)
    seen = Seen(out.taps, starts, jnp.clip(length - start, 0, size), buffer, path=False)
    drafting = draft.extend(params["draft"], drafting, seen, decoder.ends(params))
    row = jnp.clip(length - 1 - start, 0, size - 1)
    finite = functools.reduce(jnp.logical_and, (jnp.isfinite(x).all((1, 3)) for x in jax.tree.leaves(out.fresh)))
    sound = (finite | (positions >= length[:, None])).all(1)
    return (cache, drafting), jnp.take_along_axis(out.hidden, row[:, None, None], 1), sound


def step(decoder: Decoder, params: dict, state: State) -> State:
    """Runs one round. Finished rows commit nothing; what lies after their length may change."""
    return step_recorded(decoder, params, state)[0]


@narrow
def rounds(decoder: Decoder, params: dict, state: State, n: Int[Array, ""]) -> State:
    """Runs at most n rounds (traced), fewer when every row has ended. Donate `state`."""

    def running(carry):
        i, state = carry
        return (i < n) & ~state.done.all()

    def body(carry):
        i, state = carry
        return i + 1, step(decoder, params, state)

    return jax.lax.while_loop(running, body, (jnp.int32(0), state))[1]


@narrow
def step_recorded(decoder: Decoder, params: dict, state: State) -> tuple[State, Round]:
    """Runs one round, and returns what it did too."""
    target, draft, weights, ends = decoder.target, decoder.draft, params["target"], decoder.ends(params)
    past = state.length - 1
    choice = decoder.choice(state, decoder.depth)
    tree, drafting = draft.propose(params["draft"], state.draft, choice, state.budget, ends)
    if state.least is not None and tree.scores is not None:
        tree = trees.prune(tree, state.least)

    ancestors = masks.ancestors(tree.parents, decoder.depth)
    positions = past[:, None] + tree.depths
    out = target.forward(weights, tree.tokens, positions, ancestors, state.cache, past, draft.taps)
    logits = target.logits(weights, out.hidden)
    accepted = choice.accept(tree, ancestors, logits)

    old, (state, kept) = state, commit(state, accepted, logits)
    cache = target.backend.commit(old.cache, out.fresh, accepted.path, past)
    features = jnp.take_along_axis(out.taps, accepted.path[..., None], 1) if out.taps is not None else None
    drafting = draft.extend(params["draft"], drafting, Seen(features, past, kept, state.tokens, path=True), ends)

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
    return state, Round(tree, accepted, logits)


def insert(decoder: Decoder, state: State, slot: Int[Array, ""], fresh: State) -> State:
    """Puts a prefilled row into a slot of a running batch. Donate `state`.

    Args:
      decoder: of both states; it says nothing that they do not, and makes this a program like the others.
      state: the batch.
      slot: row that is overwritten, whatever it held.
      fresh: a state of one row, of the same capacity and the same options.
    """
    del decoder

    def put(whole, one):
        return jax.lax.dynamic_update_slice_in_dim(whole, one.astype(whole.dtype), slot, 0)

    return jax.tree.map(put, state, fresh)


def commit(state: State, accepted: Accepted, logits: jax.Array) -> tuple[State, jax.Array]:
    """Appends the accepted tokens of the running rows; cut at the limit, then at the first end token.

    Returns the state and how many tokens were kept. A row in which the logit of a token to be kept is no finite number
    ends: NaN and +inf win every argmax, so one look at the winners tells.
    """
    tokens, rows = accepted.tokens, accepted.tokens.shape[1]
    at = jnp.arange(rows)
    kept = jnp.minimum(accepted.count, state.limit - state.length)
    ends = (tokens[:, :, None] == state.eos[:, None, :]).any(-1) & (at < kept[:, None])
    kept = jnp.where(ends.any(1), jnp.argmax(ends, 1) + 1, kept)
    won = vocabulary.chosen(logits, accepted.path, tokens)
    broken = (~jnp.isfinite(won) & (at < kept[:, None])).any(1)
    kept = jnp.where(state.done | broken, 0, kept).astype(jnp.int32)
    length = state.length + kept

    reason = jnp.where(ends.any(1), STOP, jnp.where(length >= state.limit, LENGTH, RUNNING))
    reason = jnp.where(broken, NONFINITE, reason)
    # R rows are always written: those from `length` on are overwritten by the next round or never read.
    put = jax.vmap(lambda b, t, s: jax.lax.dynamic_update_slice(b, t, (s, *[0] * (b.ndim - 1))))
    logprobs, top = state.logprobs, state.top
    if logprobs is not None or top is not None:
        line = jnp.take_along_axis(logits, accepted.path[..., None], 1)
        whole = vocabulary.log_total(line)
        logprobs = None if logprobs is None else put(logprobs, won - whole[..., 0], state.length)
        if top is not None:
            best, token = vocabulary.top_k(line, top.token.shape[-1])
            top = Top(put(top.token, token, state.length), put(top.logprob, best - whole, state.length))
    state = state._replace(
        tokens=put(state.tokens, tokens, state.length),
        length=length,
        reason=jnp.where(state.done, state.reason, reason),
        logprobs=logprobs,
        top=top,
    )
    return state, kept
