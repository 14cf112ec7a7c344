"""Round-by-round traces of a decode, for comparisons with other engines and for study."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from jetspec_jax import speculate
from jetspec_jax.config import SamplingConfig, TreeConfig


def run(
    path: str, target, head, ids: Sequence[int], tree: TreeConfig, sampling: SamplingConfig, chunk: int | None = None
) -> speculate.Result:
    """Decodes one prompt a round at a time and writes what each round did to a .npz file.

    Per round i: `round{i}_draft_logits` [D, V] f32, `round{i}_tree_tokens`, `round{i}_tree_parents` (root -1) and
    `round{i}_tree_depths` over the nodes in use, `round{i}_accepted` (node indices, root first).
    """
    engine, arrays = speculate.start(target, head, [ids], tree, sampling, prefill_chunk=chunk), {}
    for i in range(engine.decoder.capacity):
        if engine.over():
            break
        done = engine.record()
        logits, nodes, accepted = jax.device_get((done.tree.logits, done.tree, done.accepted))
        size, count = nodes.size[0], accepted.count[0]
        if logits is not None:
            arrays[f"round{i}_draft_logits"] = logits[0]
        for name in ("tokens", "parents", "depths"):
            arrays[f"round{i}_tree_{name}"] = getattr(nodes, name)[0, :size]
        arrays[f"round{i}_accepted"] = accepted.path[0, :count]
    with open(path, "wb") as file:
        np.savez(file, **arrays)
    return engine.results()[0]
