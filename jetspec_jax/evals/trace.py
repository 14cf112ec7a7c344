"""Round-by-round records of a decode, for comparisons with other engines, for pictures and for study."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from jetspec_jax import speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.loop import tree as trees


class Recorded(NamedTuple):
    """What one round did to a row, on the host. T nodes in use, node 0 the root."""

    tokens: np.ndarray  # [T] int32
    parents: np.ndarray  # [T] int32, -1 for the root
    depths: np.ndarray  # [T] int32
    accepted: np.ndarray  # [A] int32, nodes, root first
    bonus: int  # the target's own token after them
    draft_logits: np.ndarray | None  # [D, V] f32
    target_logits: np.ndarray | None  # [T, V] f32, of the round that was asked for
    foretold: np.ndarray | None = None  # [T] f32, of the same round: `tree.foretold`, where the draft has logits


def record(
    target, head, ids: Sequence[int], tree: TreeConfig, sampling: SamplingConfig, chunk: int | None = None,
    full: int = 0,
) -> tuple[list[Recorded], speculate.Result]:  # fmt: skip
    """Decodes one prompt a round at a time; returns what each round did, and the result.

    full: number of the round, from 1, whose target logits are kept: those of all would be gigabytes. What the draft
      foretold of its nodes is computed for it alone.
    """
    engine = speculate.start(target, head, [ids], tree, sampling, prefill_chunk=chunk)
    found: list[Recorded] = []
    while not engine.over():
        done = engine.record()
        asked = len(found) + 1 == full
        kept = done.target_logits if asked else None
        told = jax.jit(trees.foretold)(done.tree) if asked and done.tree.logits is not None else None
        found.append(_recorded(jax.device_get((done.tree._replace(pairs=None), done.accepted, kept, told))))
    return found, engine.results()[0]


def _recorded(fetched: tuple[Any, ...]) -> Recorded:
    """The first row of a round."""
    tree, accepted, target, told = fetched
    size, count = tree.size[0], accepted.count[0]
    tokens, parents, depths = (getattr(tree, name)[0, :size] for name in ("tokens", "parents", "depths"))
    path, bonus = accepted.path[0, :count], int(accepted.tokens[0, count - 1])
    return Recorded(
        tokens,
        parents,
        depths,
        path,
        bonus,
        None if tree.logits is None else tree.logits[0],
        None if target is None else target[0, :size],
        None if told is None else told[0, :size],
    )


def save(path: str, rounds: Sequence[Recorded]) -> None:
    """Writes what each round did to a .npz file.

    Per round i: `round{i}_draft_logits` [D, V] f32 (the head's own, without what a scorer adds),
    `round{i}_tree_tokens`, `round{i}_tree_parents` (root -1) and `round{i}_tree_depths` over the nodes in use,
    `round{i}_accepted` (node indices, root first).
    """
    arrays: dict[str, Any] = {}
    for i, done in enumerate(rounds):
        if done.draft_logits is not None:
            arrays[f"round{i}_draft_logits"] = done.draft_logits
        for name in ("tokens", "parents", "depths"):
            arrays[f"round{i}_tree_{name}"] = getattr(done, name)
        arrays[f"round{i}_accepted"] = done.accepted
    with open(path, "wb") as file:
        np.savez(file, **arrays)
