"""Rounds of one size among several, and what they say of the others: the programs that `pacing` chooses from."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jetspec_jax.layers import masks
from jetspec_jax.layers.numerics import narrow
from jetspec_jax.loop.contracts import Seen
from jetspec_jax.loop.decoder import Decoder, step, step_recorded
from jetspec_jax.loop.pacing import Belief, faded
from jetspec_jax.loop.paused import Paused
from jetspec_jax.loop.state import Round, State


@dataclasses.dataclass(frozen=True)
class Pace:
    """One program of a ladder; static.

    decoder: of this size; its draft is `Paused` for a plain step.
    nodes: G, of the largest.
    depth: longest path of the largest.
    """

    decoder: Decoder
    nodes: int
    depth: int


@narrow
def paced(
    pace: Pace, params: dict, state: State, belief: Belief, n: Int[Array, ""]
) -> tuple[State, Belief, Int[Array, ""]]:
    """Runs at most n rounds of one size as `rounds` does; also what they say, and how many there were. Donate `state`.

    Between the programs of a ladder a draft's state has room for the rows of the longest path.
    """
    decoder = pace.decoder
    if isinstance(decoder.draft, Paused):
        return _rested(pace, decoder.draft, params, state, belief, n)

    def running(carry):
        i, state, _ = carry
        return (i < n) & ~state.done.all()

    def body(carry):
        i, state, belief = carry
        after, done = step_recorded(decoder, params, state)
        return i + 1, after, observed(pace, belief, state, done)

    state = narrowed(pace, params, state)
    ran, state, belief = jax.lax.while_loop(running, body, (jnp.int32(0), state, belief))
    return widened(pace, state), belief, ran


@narrow
def paced_recorded(pace: Pace, params: dict, state: State, belief: Belief) -> tuple[State, tuple[Belief, Round]]:
    """Runs one round of a size, and returns what it did too."""
    draft = pace.decoder.draft
    if isinstance(draft, Paused):
        after, done = step_recorded(pace.decoder, params, with_room(pace.decoder, params, state))
        return after, (faded(belief, jnp.float32(1.0), jnp.float32(1.0)), done)
    state = narrowed(pace, params, state)
    after, done = step_recorded(pace.decoder, params, state)
    return widened(pace, after), (observed(pace, belief, state, done), done)


def observed(pace: Pace, belief: Belief, before: State, done: Round) -> Belief:
    """Returns the belief after a round with trees.

    What a row's own budget or its least probability keeps from being verified is worth nothing to it, however probable.

    Args:
      pace: whose round it was.
      belief: before it.
      before: the state before it.
      done: what it did.
    """
    scores, tree, accepted = done.tree.scores, done.tree, done.accepted
    assert scores is not None  # callers refuse drafts without
    counted = ~before.done
    share = counted / jnp.maximum(counted.sum(), 1)
    mean = lambda rows: (rows * share[:, None]).sum(0)
    nodes = jnp.arange(1, pace.nodes)
    path = jnp.exp(scores.node[:, 1:])
    verified = nodes < tree.size[:, None]
    on_path = jnp.arange(accepted.path.shape[1]) < accepted.count[:, None]
    kept = ((accepted.path[..., None] == nodes) & on_path[..., None]).any(1)
    foreseen = _prolonged(pace, scores.spine, path)
    least = 0.0 if before.least is None else before.least[:, None]
    allowed = (nodes < before.budget[:, None]) & (foreseen >= least)

    some = counted.any().astype(jnp.float32)
    belief = faded(belief, (accepted.count * share).sum(), jnp.float32(0.0))
    return belief._replace(
        weight=belief.weight + some,
        path=belief.path + mean(jnp.where(allowed, foreseen, 0.0)),
        promised=belief.promised + mean(jnp.where(verified, path, 0.0)),
        kept=belief.kept + mean(kept),
        tested=belief.tested + some,
        rested=jnp.where(some > 0, 0.0, belief.rested),
    )


def _prolonged(pace: Pace, spine: Float[Array, "B D"], path: Float[Array, "B m"]) -> Float[Array, "B m"]:
    """Returns the probabilities of nodes as a draft of the full depth might have them.

    A small program drafts fewer positions than a large one. Its most probable path is taken to go on as it ended, and
    its nodes are put in order with the others.
    """
    more = pace.depth - spine.shape[1]
    rule = getattr(pace.decoder.draft, "rule", None)
    if more <= 0 or rule is None or rule.builder != "best_first":
        return path
    before = spine[:, -2] if spine.shape[1] > 1 else jnp.zeros_like(spine[:, 0])
    last = jnp.where(jnp.isfinite(spine[:, -1]), jnp.minimum(spine[:, -1] - before, 0.0), -jnp.inf)
    line = jnp.exp(spine[:, -1:] + last[:, None] * jnp.arange(1, more + 1))
    return -jnp.sort(-jnp.concatenate([path, line], 1), axis=1)[:, : path.shape[1]]


def _rested(pace: Pace, draft: Paused, params: dict, state: State, belief: Belief, n: Int[Array, ""]):
    """Runs plain steps. Their rows are taken in as many at a time as may wait, outside the loop over steps: a condition
    within it would cost a look at the draft's context every step."""
    decoder = pace.decoder

    def running(carry):
        i, state = carry
        return (i < n) & ~state.done.all()

    def body(carry):
        i, state = carry
        state = with_room(decoder, params, state)
        until = i + draft.room(state.draft, n - i)
        inner = lambda carry: (carry[0] < until) & ~carry[1].done.all()
        return jax.lax.while_loop(inner, lambda c: (c[0] + 1, step(decoder, params, c[1])), (i, state))

    ran, state = jax.lax.while_loop(running, body, (jnp.int32(0), state))
    steps = ran.astype(jnp.float32)
    return state, faded(belief, steps, steps), ran


def with_room(decoder: Decoder, params: dict, state: State, rows: int = 1) -> State:
    """Returns the state with room for so many more rows to wait: where there is less, those that wait are taken in.

    That reads the draft's weights once, which is a tenth of a plain step, and a short block has few of them. In a loop
    of one turn at most, the products of what waits would be moved out of it and always be computed.
    """
    draft = decoder.draft.draft if isinstance(decoder.draft, Paused) else cast(Any, decoder.draft)
    if not draft.taps:
        return state
    taken = lambda drafting: draft.absorb(params["draft"], drafting, state.tokens, decoder.ends(params))
    lacking = draft.room(state.draft).min() < rows
    return state._replace(draft=jax.lax.cond(lacking, taken, lambda drafting: drafting, state.draft))


def narrowed(pace: Pace, params: dict, state: State) -> State:
    """Returns the state with room for the rows of these rounds alone; if more wait, they are taken in."""
    decoder, draft = pace.decoder, cast(Any, pace.decoder.draft)
    if not draft.taps or decoder.depth == pace.depth:  # a round of the longest path takes in as many as may wait
        return state
    state = with_room(decoder, params, state, pace.depth - decoder.depth)
    return state._replace(draft=draft.resized(state.draft, decoder.depth + 1))


def widened(pace: Pace, state: State) -> State:
    """Returns the state with room for the rows of the longest path."""
    draft = cast(Any, pace.decoder.draft)
    return state._replace(draft=draft.resized(state.draft, pace.depth + 1)) if draft.taps else state


@narrow
def aged(decoder: Decoder, params: dict, state: State, length: Int[Array, " B"]) -> State:
    """Returns the state as if so many tokens were committed, whatever they are: rounds then take as long. Donate it."""
    draft, target, features = decoder.draft, decoder.target, None
    if draft.taps:
        one = jnp.zeros((length.size, 1), jnp.int32)
        forward = lambda: target.forward(params["target"], one, one, masks.causal(1), taps=draft.taps).taps
        shape = jax.eval_shape(forward)
        features = jnp.zeros(shape.shape, shape.dtype)
    seen = Seen(features, jnp.maximum(length - 2, 0), jnp.ones_like(length), state.tokens, path=False)
    drafting = draft.extend(params["draft"], state.draft, seen, decoder.ends(params))
    return state._replace(length=length, draft=drafting)
