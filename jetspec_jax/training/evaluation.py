"""How well a head drafts held-out text, from real trees and without a decode loop.

At every possible anchor of the held-out sequences the head drafts, the tree that decoding would build is built, and the
target's own choices, read off its logits on the text, are looked up in it. Text that the target wrote greedily is what
it would decode, so walking from anchor to anchor counts real rounds. Where the text leaves the target's choice, what
would follow is not known and the count ends; drafts past an answer's end count as wrong. Both make the figure a little
low, and lower on text that the target did not write.

Where what a node drafts depends on the path to it (`Objective.by_path`), a tree would need a pass of the head for each
of its nodes. The chain of best tokens needs none: as far as it is right it is the text itself. What is counted then is
the acceptance of that chain, cut to the nodes of a budget; trees of such a head accept more.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jetspec_jax.layers import masks
from jetspec_jax.loop import tree as trees
from jetspec_jax.loop.tree import Rule
from jetspec_jax.training import anchors as anchor_rules
from jetspec_jax.training import teacher
from jetspec_jax.training.data.batches import Batch, Data
from jetspec_jax.training.data.packing import Packed
from jetspec_jax.training.recipe import Recipe

GROUP = 64  # anchors of a sequence that are drafted at a time
RANKS = 8  # ranks told apart in the report


class Drafts(NamedTuple):
    """What the head drafted at every position of B sequences; D depths."""

    candidate: Data  # [B, S] bool: an anchor can stand here
    known: Data  # [B, S, D] bool: the target's choice at this depth can be read off the text
    place: Data  # [B, S, D] int32, tree node that is the target's choice on an accepted path; large: none
    rank: Data  # [B, S, D] int32, of the target's choice in the head's row


def measure(  # noqa: PLR0913  # arrays of one program, and its sizes
    recipe: Recipe,
    target_params: dict,
    scale: jax.Array,
    params: dict,
    packed: Packed,
    budgets: tuple[int, ...],
    width: int,
    batch: int,
    stopped: Callable[[], bool] = lambda: False,
) -> dict[str, Any] | None:
    """Returns acceptance lengths by budget (walked rounds and mean over all anchors), and figures by depth and rank.

    Args:
      params: of the head in training, with the `scale` that they are for.
      packed: held-out sequences; `batch` of them at a time.
      budgets: tree nodes, root included.
      width: candidates a depth, as in decoding.
      stopped: asked before every batch; None is returned once it says so.
    """
    run = functools.partial(_drafts, recipe, max(budgets), width)
    found = []
    count = len(packed.tokens)
    for first in range(0, count, batch):
        if stopped():
            return None
        rows = np.minimum(np.arange(first, first + batch), count - 1)
        p = packed.select(rows)
        sequences = Batch(p.tokens, p.document, p.position, p.learnt, rows.astype(np.int32))
        part = run(target_params, scale, params, sequences)
        found.append(jax.tree.map(lambda x: np.asarray(x)[: min(batch, count - first)], part))  # noqa: B023
    return summary(jax.tree.map(lambda *parts: np.concatenate(parts), *found), budgets)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _drafts(recipe: Recipe, nodes: int, width: int, target_params, scale, params, part: Batch) -> Drafts:
    depth, slots, by_path = recipe.head.depth, part.tokens.shape[1], recipe.learns.by_path(recipe.head)
    size = min(GROUP, slots)
    features = teacher.run(
        recipe.target, target_params, part.tokens, part.document, part.position, recipe.head.tap_layers,
        recipe.attention,
    )  # fmt: skip
    folded = recipe.learns.fold(params, scale, recipe.dtype)
    candidate = anchor_rules.candidates(part.learnt, part.document)
    choice = _choices(recipe, target_params, features.final)

    def group(first):
        """Anchors first .. first + size - 1 of every sequence."""
        position = jnp.minimum(first + jnp.arange(size), slots - 1)
        position = jnp.broadcast_to(position, (part.tokens.shape[0], size))
        asked = recipe.learns.ask(recipe, target_params, part, position, jnp.take_along_axis(candidate, position, 1))
        hidden = recipe.learns.hidden(recipe, folded, part, features, asked)
        drafted = recipe.learns.logits(recipe, target_params, folded, hidden, asked)
        label = asked.label
        take = lambda x: jnp.take_along_axis(x, label.reshape(x.shape[0], -1), 1).reshape(label.shape)
        # The choice for depth k is made one position before the label.
        wanted = jnp.take_along_axis(choice, label.reshape(label.shape[0], -1) - 1, 1).reshape(label.shape)
        agrees = wanted == take(part.tokens)
        before = jnp.pad(agrees, ((0, 0), (0, 0), (1, 0)), constant_values=True)[..., :-1]
        known = (asked.weight > 0) & (jnp.cumprod(before, -1) > 0)

        def one(row):  # a sequence at a time: its logits are size * D rows
            rows, *given = row
            terms = tuple(dataclasses.replace(t, rows=x) for t, x in zip(drafted.terms, rows, strict=True))
            logits = drafted._replace(terms=terms).whole(recipe.target.vocab_size)
            return _chain(logits, *given) if by_path else _look_up(nodes, width, logits, *given)

        anchor = jnp.take_along_axis(part.tokens, position, 1)
        rows = tuple(term.rows for term in drafted.terms)
        place, rank = jax.lax.map(one, (rows, anchor, wanted, known))
        return known, place, rank

    known, place, rank = jax.lax.map(group, jnp.arange(0, slots, size))  # [groups, B, size, D]
    flat = lambda x: x.swapaxes(0, 1).reshape(x.shape[1], -1, depth)[:, :slots]
    return Drafts(candidate, flat(known), flat(place), flat(rank))


def _choices(recipe: Recipe, target_params, final: Float[Array, "B S E"]) -> Int[Array, "B S"]:
    """The target's best token after every position, a sequence at a time."""
    best = lambda row: recipe.target.logits(target_params, row).argmax(-1).astype(jnp.int32)
    return jax.lax.map(best, final)


def _chain(logits: Float[Array, "A D V"], anchor, wanted, known):
    """The same of chains of the head's best tokens, whose node at depth d is the d-th."""
    hit = (logits.argmax(-1) == wanted) & known
    place = jnp.where(jnp.cumprod(hit, -1) > 0, jnp.arange(1, hit.shape[1] + 1), NOWHERE)
    return place.astype(jnp.int32), _rank(logits, wanted)


def _rank(logits: Float[Array, "A D V"], wanted: Int[Array, "A D"]) -> Int[Array, "A D"]:
    """How many tokens the head finds better than the wanted one; all, where it cannot draft that."""
    score = jnp.take_along_axis(logits, wanted[..., None], -1)
    better = (logits > score).sum(-1).astype(jnp.int32)
    return jnp.where(jnp.isneginf(score[..., 0]), logits.shape[-1], better)


def _look_up(nodes: int, width: int, logits: Float[Array, "A D V"], anchor, wanted, known):
    """Places [A, D] of the accepted nodes in the trees of A anchors, and the ranks of the target's choices."""
    budget = jnp.full(anchor.shape, nodes, jnp.int32)
    tree = trees.build(Rule(nodes, width=width), logits, anchor, budget)
    depth = wanted.shape[1]
    level = jnp.maximum(tree.depths - 1, 0)
    right = (tree.tokens == jnp.take_along_axis(wanted, level, 1)) & jnp.take_along_axis(known, level, 1)
    right = (right | (tree.depths == 0)) & tree.valid()
    above = masks.ancestors(tree.parents, depth)
    accepted = (right[:, None] | ~above).all(-1) & tree.valid()
    at_depth = accepted[:, None] & (tree.depths[:, None] == jnp.arange(1, depth + 1)[:, None])
    place = jnp.where(at_depth.any(-1), at_depth.argmax(-1), NOWHERE)
    return place.astype(jnp.int32), _rank(logits, wanted)


NOWHERE = 1 << 20


def summary(drafts: Drafts, budgets: tuple[int, ...]) -> dict[str, Any]:
    """Computes plain numbers from what was drafted.

    acceptance: mean accepted tokens + 1 over the rounds of a walk through every answer, by budget. every_anchor: the
    same over all anchors alike. agreement: share of rows whose best token is the target's, by depth. conditional: by
    depth, the share of ranks 0..7 that the target's choice has, where the largest tree holds the path so far.
    """
    depth = drafts.place.shape[-1]
    accepted = {b: (drafts.place < b).sum(-1) for b in budgets}
    anchors = drafts.candidate
    largest = accepted[max(budgets)]
    reached = drafts.known & (largest[..., None] >= np.arange(depth)) & anchors[..., None]
    conditional = [
        [_share(drafts.rank[..., d][reached[..., d]] == rank) for rank in range(RANKS)] for d in range(depth)
    ]
    known = drafts.known & anchors[..., None]
    return {
        "anchors": int(anchors.sum()),
        "acceptance": {str(b): 1 + _mean(_walk(anchors, n)) for b, n in accepted.items()},
        "every_anchor": {str(b): 1 + _mean(n[anchors]) for b, n in accepted.items()},
        "agreement": [_share(drafts.rank[..., d][known[..., d]] == 0) for d in range(depth)],
        "conditional": conditional,
    }


def _walk(anchors: np.ndarray, accepted: np.ndarray) -> np.ndarray:
    """Accepted drafts of the rounds that decoding would run: from an anchor to what it commits, to the next."""
    rounds = []
    for can, n in zip(anchors, accepted, strict=True):
        at = 0
        while at < can.size:
            if can[at]:
                rounds.append(n[at])
                at += int(n[at]) + 1
            else:
                at += 1
    return np.array(rounds)


def _mean(values: np.ndarray) -> float:
    return float(values.mean()) if values.size else 0.0


def _share(hits: np.ndarray) -> float:
    return round(_mean(hits), 4)
