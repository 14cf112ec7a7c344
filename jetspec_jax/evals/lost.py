"""Where a round lost the token that would have made it longer.

A round ends at a node whose right successor, the target's own choice there, is not below it. For drafts with one row of
logits a depth that has one of three reasons: the token is no candidate of its depth; it is a candidate, and the tree
has no such node at that depth; or the tree has it at that depth, below other parents. With a scorer beside the head the
reasons are the same, and a chain too has several candidates. A path as long as the tree may be deep has lost nothing.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jetspec_jax import speculate
from jetspec_jax.layers.numerics import narrow
from jetspec_jax.loop import tree as trees
from jetspec_jax.loop.choice import Choice
from jetspec_jax.loop.decoder import Decoder, step_recorded
from jetspec_jax.loop.state import Round, State
from jetspec_jax.loop.tree import Rule
from jetspec_jax.options import SamplingConfig, TreeConfig

KINDS = ("nothing", "no candidate", "not in the tree", "parent wrong")
NOTHING, NO_CANDIDATE, NOT_BUILT, WRONG_PARENT = range(4)


def kinds(rule: Rule, choice: Choice, done: Round) -> Int[Array, " B"]:
    """Returns what each row of a round lost, an index into `KINDS`; -1 for drafts without a row of logits a depth.

    Args:
      rule: by which the tree was built.
      choice: of the round, which ranked the candidates.
      done: what the round did.
    """
    tree, accepted = done.tree, done.accepted
    if tree.logits is None:
        return jnp.full(accepted.count.shape, -1, jnp.int32)
    paired = tree.pairs is not None
    candidates = trees.candidates(rule, choice.foresee(tree.logits, rule.sharpness), paired).token
    depth = candidates.shape[1]
    row = jnp.minimum(accepted.count, depth) - 1  # of the first depth that is not on the path
    among = jnp.take_along_axis(candidates, row[:, None, None], 1)[:, 0]
    right = jnp.take_along_axis(accepted.tokens, accepted.count[:, None] - 1, 1)
    there = (tree.depths == accepted.count[:, None]) & (tree.tokens == right)  # padding is as deep as the root
    missed = jnp.where((among == right).any(1), NOT_BUILT, NO_CANDIDATE)
    found = jnp.where(there.any(1), WRONG_PARENT, missed)
    return jnp.where(accepted.count > depth, NOTHING, found).astype(jnp.int32)


@narrow
def watched(decoder: Decoder, params: dict, state: State) -> tuple[State, tuple[jax.Array, jax.Array]]:
    """Runs a round; returns the state, and what each row lost and how many nodes of it were agreed."""
    choice = decoder.choice(state, decoder.depth)
    state, done = step_recorded(decoder, params, state)
    rule = getattr(decoder.draft, "rule", Rule(decoder.nodes))
    return state, (kinds(rule, choice, done), done.accepted.count)


def split(
    target, head, ids: Sequence[int], tree: TreeConfig, sampling: SamplingConfig, room: int = 0
) -> dict[str, int] | None:
    """Decodes one prompt a round at a time; returns how many rounds lost what, by the names of `KINDS`.

    None for drafts without a row of logits a depth: what their candidates were is not known afterwards. room: tokens of
    the longest prompt that the same programs serve.
    """
    engine = speculate.start(target, head, [list(ids)], tree, sampling, room=room)
    counts = dict.fromkeys(KINDS, 0)
    while not engine.over():
        kind = int(np.asarray(engine.run(watched)[0])[0])
        if kind < 0:
            return None
        counts[KINDS[kind]] += 1
    return counts
