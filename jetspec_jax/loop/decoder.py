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
from jaxtyping import Array, Float, Int

from jetspec_jax.layers import cache as kv_cache
from jetspec_jax.layers import masks
from jetspec_jax.layers.numerics import narrow
from jetspec_jax.loop import processors, sampling
from jetspec_jax.loop import tree as trees
from jetspec_jax.loop.contracts import Backend, Draft, Target
from jetspec_jax.loop.sampling import Sampling
from jetspec_jax.loop.tree import Tree
from jetspec_jax.loop.verify import Accepted, accept, settle
from jetspec_jax.options import SHARPNESS

# `State.reason`: an end token, the limit, broken logits; TEXT, a stop string, is set by the host between rounds.
RUNNING, STOP, LENGTH, NONFINITE, TEXT = range(5)
DEFAULT_CHUNK = 512  # rows that keep a large GPU busy; their scores against each other are as large as the cache


@dataclasses.dataclass(frozen=True)
class Decoder:
    """What is static in a decode loop; hashable, so that equal decoders share their compiled programs.

    rows: tree nodes T verified a round; a row's budget may be smaller. Without a draft it is 1.
    capacity: cache slots S of a row.
    sharpness: of the draft's scores under the noise of sampled rows; 0 leaves the noise out.
    logprobs: whether the log-probability of every committed token is recorded.
    prefill_chunk: prompt rows that prefill reads at a time; its memory grows with this and not with the prompt.
    """

    target: Target
    draft: Draft | None
    rows: int
    capacity: int
    builder: str = "best_first"
    width: int = 64
    sharpness: float = SHARPNESS
    logprobs: bool = False
    prefill_chunk: int = DEFAULT_CHUNK

    def __post_init__(self):
        if self.prefill_chunk < 1:
            raise ValueError(f"prefill_chunk={self.prefill_chunk}: at least one row is read at a time")
        if self.draft is None and self.rows != 1:
            raise ValueError(f"rows={self.rows}: without a draft there is one row")

    @property
    def ops(self) -> Backend:
        """How the loop's own parts are computed: as the target is."""
        return self.target.ops

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
    sampling: Sampling
    eos: Int[Array, "B n"]  # padded with -1


class State(NamedTuple):
    """A batch in flight. Donated from program to program, so the cache is never copied."""

    tokens: jax.Array  # [B, S] int32, prompt and committed tokens
    length: jax.Array  # [B] int32, committed tokens, prompt included
    prompt_length: jax.Array  # [B] int32
    limit: jax.Array  # [B] int32, length at which the row ends
    budget: jax.Array  # [B] int32, tree nodes of a round
    sampling: Sampling
    eos: jax.Array  # [B, n] int32, end tokens, -1 where there are fewer
    reason: jax.Array  # [B] int32: RUNNING, STOP, LENGTH, NONFINITE or TEXT
    cache: kv_cache.Cache  # the target's K/V
    draft: Any  # the draft's own pytree, None without a draft
    rounds: jax.Array  # [B] int32, rounds that the row has run
    accept_lengths: jax.Array  # [B, S] int32, per round: agreed nodes + bonus, as verified
    tree_sizes: jax.Array  # [B, S] int32, per round
    emitted: jax.Array  # [B, S] int32, per round: tokens committed, after end token and limit
    logprobs: jax.Array | None  # [B, S] f32 beside `tokens`: of committed tokens, None where they are not recorded

    @property
    def done(self) -> jax.Array:
        """[B] bool."""
        return self.reason != RUNNING

    @property
    def past(self) -> processors.Past:
        """What the choice of the next tokens may look at."""
        return processors.Past(self.tokens, self.prompt_length, self.length, self.eos)


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
    return traced_prefill(decoder, params, request)[0]


@narrow
def traced_prefill(decoder: Decoder, params: dict, request: Request) -> tuple[State, Float[Array, "B V"]]:
    """Prefill, and the f32 logits that chose (or would choose) each row's first token."""
    tokens = request.tokens
    # A commit writes D + 1 rows at once; past the buffer's end they would be shifted back over the prefix.
    room = decoder.capacity - decoder.depth - 1
    if tokens.shape[1] > room:
        raise ValueError(
            f"capacity={decoder.capacity}: {tokens.shape[1]} prompt slots need at least "
            f"{tokens.shape[1] + decoder.depth + 1}"
        )
    limit = jnp.minimum(request.limit, room)
    cache, drafting, last = _read(decoder, params, tokens, request.prompt_length)
    zeros = jnp.zeros(tokens.shape[:1], jnp.int32)
    logits = decoder.target.logits(params["target"], last)
    records = jnp.zeros((tokens.shape[0], decoder.capacity), jnp.int32)
    state = State(
        tokens=jax.lax.dynamic_update_slice(records, tokens, (0, 0)),
        length=request.prompt_length,
        prompt_length=request.prompt_length,
        limit=limit,
        budget=request.budget,
        sampling=request.sampling,
        eos=request.eos,
        reason=jnp.where(limit > request.prompt_length, RUNNING, LENGTH).astype(jnp.int32),
        cache=cache,
        draft=drafting,
        rounds=zeros,
        accept_lengths=records,
        tree_sizes=records,
        emitted=records,
        logprobs=jnp.zeros(records.shape) if decoder.logprobs else None,
    )
    root = trees.root(jnp.take_along_axis(tokens, request.prompt_length[:, None] - 1, 1)[:, 0])
    counts = processors.committed(state.past, state.sampling, decoder.target.vocab_size)
    first = _accept(state, root, masks.ancestors(root.parents, 0), logits, None, counts, 0)
    return _commit(decoder, state, first, logits)[0], logits[:, 0]


def _read(
    decoder: Decoder, params: dict, tokens: jax.Array, length: jax.Array
) -> tuple[kv_cache.Cache, Any, jax.Array]:
    """The filled cache, the draft's state, and the hidden state [B, 1, E] of each prompt's last token.

    Longer prompts are read chunk by chunk up to the longest row, in one loop, so that neither scores nor features grow
    with the prompt. What a chunk computes behind a row's own length lands in slots that are never read.
    """
    target, draft, weights = decoder.target, decoder.draft, params["target"]
    batch, slots = tokens.shape
    size = min(decoder.prefill_chunk, slots)
    taps = draft.taps if draft else ()
    cache = target.init_cache(weights, batch, decoder.capacity)
    drafting = draft.init(params["draft"], batch, decoder.capacity) if draft else None

    def piece(start, cache, drafting, prefix):
        """Reads `size` rows from `start` on; also what each row's last token would have as hidden state."""
        piece = jax.lax.dynamic_slice_in_dim(tokens, start, size, 1)
        positions = jnp.broadcast_to(start + jnp.arange(size), piece.shape)
        starts = jnp.full((batch,), start, jnp.int32)
        behind = (cache, starts) if prefix else (None, None)
        out = target.forward(weights, piece, positions, masks.causal(size), *behind, taps=taps)
        # A layer's rows are ready before its attention has read the cache, and without an order between the two XLA
        # copies the cache. So the place to write to waits for the last layer (it is `starts`, whatever `hidden` is).
        at = jnp.minimum(starts, starts + (out.hidden[:, -1, 0] > 0))
        cache = kv_cache.write(cache, out.fresh, at)
        if draft:
            drafting = draft.prefill(params["draft"], drafting, out.taps, length, starts)
        row = jnp.clip(length - 1 - start, 0, size - 1)
        return cache, drafting, jnp.take_along_axis(out.hidden, row[:, None, None], 1)

    if size == slots:
        return piece(0, cache, drafting, prefix=False)

    def body(i, carry):
        cache, drafting, last = carry
        # The last chunk of an uneven buffer starts early, and computes some rows once more.
        start = jnp.minimum(i * size, slots - size)
        cache, drafting, here = piece(start, cache, drafting, prefix=True)
        inside = (length - 1 >= start) & (length - 1 < start + size)
        return cache, drafting, jnp.where(inside[:, None, None], here, last)

    shape = jax.eval_shape(lambda c, d: piece(0, c, d, prefix=False), cache, drafting)[2]
    chunks = (length.max() + size - 1) // size
    return jax.lax.fori_loop(0, chunks, body, (cache, drafting, jnp.zeros(shape.shape, shape.dtype)))


def step(decoder: Decoder, params: dict, state: State) -> State:
    """One round. Finished rows commit nothing; what lies behind their length may change."""
    return traced_step(decoder, params, state)[0]


@narrow
def rounds(decoder: Decoder, params: dict, state: State, n: Int[Array, ""]) -> State:
    """At most n rounds (traced), fewer when every row has ended. Donate `state`."""

    def running(carry):
        i, state = carry
        return (i < n) & ~state.done.all()

    def body(carry):
        i, state = carry
        return i + 1, step(decoder, params, state)

    return jax.lax.while_loop(running, body, (jnp.int32(0), state))[1]


@narrow
def traced_step(decoder: Decoder, params: dict, state: State) -> tuple[State, Round]:
    """One round, and what it did."""
    target, draft, depth = decoder.target, decoder.draft, decoder.depth
    weights = params["target"]
    past = state.length - 1
    anchor = jnp.take_along_axis(state.tokens, past[:, None], 1)[:, 0]

    counts = processors.committed(state.past, state.sampling, target.vocab_size)
    draft_logits, drafting, noise = None, state.draft, None
    if draft:
        draft_logits, drafting = draft.propose(
            params["draft"],
            drafting,
            state.tokens,
            state.length,
            lambda tokens: target.embed(weights, tokens),
            lambda hidden: target.logits(weights, hidden),
        )
        # What bends the target's choice bends the draft's guess of it: bias, penalties, and the noise.
        ranked = processors.weigh(draft_logits, state.sampling, counts)
        if decoder.sharpness:
            ranked, noise = sampling.foresee(ranked, state.length, state.sampling, decoder.sharpness)
        tree = trees.build(decoder.builder, decoder.width, decoder.rows, ranked, anchor, state.budget, decoder.ops.grow)
    else:
        tree = trees.root(anchor)

    ancestors = masks.ancestors(tree.parents, depth)
    positions = past[:, None] + tree.depths
    out = target.forward(weights, tree.tokens, positions, ancestors, state.cache, past, draft.taps if draft else ())
    logits = target.logits(weights, out.hidden)
    accepted = _accept(state, tree, ancestors, logits, noise, counts, depth)

    old, (state, kept) = state, _commit(decoder, state, accepted, logits)
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


def _accept(
    state: State,
    tree: Tree,
    ancestors: jax.Array,
    logits: jax.Array,
    noise: jax.Array | None,
    counts: processors.Counts | None,
    depth: int,
) -> Accepted:
    """The path on which the target agrees. `noise` [B, D + 1, V] where it has been drawn, counts of what is committed.

    Without options that change logits every node's choice is one pass over its logits. With them, a pass guesses, and
    only the nodes that the path visits have their row processed.
    """
    options, first = state.sampling, state.length
    if not (options.edits or options.filters):
        return accept(tree, ancestors, sampling.pick(logits, tree.depths, first, options, depth + 1, noise), depth)
    if noise is None:
        noise = sampling.noise_rows(options, first, depth + 1, logits.shape[-1])

    def rule(path):
        rows = jnp.take_along_axis(logits, path[..., None], 1)
        line = jnp.take_along_axis(tree.tokens, path, 1)
        best = processors.scores(rows, line, state.past, options, noise, counts)
        return jnp.argmax(best, -1).astype(jnp.int32)

    if depth == 0:
        return accept(tree, ancestors, rule(jnp.zeros_like(tree.tokens)), depth)
    weighed = processors.weigh(logits, options, counts)
    guess = sampling.pick(weighed, tree.depths, first, options, depth + 1, noise)
    return settle(tree, ancestors, guess, state.done, rule, depth)


def _commit(decoder: Decoder, state: State, accepted: Accepted, logits: jax.Array) -> tuple[State, jax.Array]:
    """Appends the accepted tokens of the running rows; cut at the limit, then at the first end token.

    Returns the state and how many tokens were kept. A row in which the logit of a token to be kept is no finite number
    ends: NaN and +inf win every argmax, so one look at the winners tells.
    """
    tokens, rows = accepted.tokens, accepted.tokens.shape[1]
    at = jnp.arange(rows)
    kept = jnp.minimum(accepted.count, state.limit - state.length)
    ends = (tokens[:, :, None] == state.eos[:, None, :]).any(-1) & (at < kept[:, None])
    kept = jnp.where(ends.any(1), jnp.argmax(ends, 1) + 1, kept)
    won = jax.vmap(lambda x, n, c: x[n, c])(logits, accepted.path, tokens)
    broken = (~jnp.isfinite(won) & (at < kept[:, None])).any(1)
    kept = jnp.where(state.done | broken, 0, kept).astype(jnp.int32)
    length = state.length + kept

    reason = jnp.where(ends.any(1), STOP, jnp.where(length >= state.limit, LENGTH, RUNNING))
    reason = jnp.where(broken, NONFINITE, reason)
    # R rows are always written: those behind `length` are overwritten by the next round or never read.
    put = jax.vmap(lambda b, t, s: jax.lax.dynamic_update_slice(b, t, (s,)))
    logprobs = state.logprobs
    if logprobs is not None:
        whole = jax.nn.logsumexp(jnp.take_along_axis(logits, accepted.path[..., None], 1), axis=-1)
        logprobs = put(logprobs, won - whole, state.length)
    state = state._replace(
        tokens=put(state.tokens, tokens, state.length),
        length=length,
        reason=jnp.where(state.done, state.reason, reason),
        logprobs=logprobs,
    )
    return state, kept
