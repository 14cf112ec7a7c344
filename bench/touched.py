"""Which experts a step of a decoder reads, layer by layer."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jetspec_jax.backends.xla import XLA
from jetspec_jax.layers import moe
from jetspec_jax.loop import decoder
from jetspec_jax.loop.state import State


def by_layer(static: decoder.Decoder, params: dict, state: State, steps: int) -> list[float]:
    """Experts that a step's rows chose in each sparse layer, means over `steps` steps from a state, which is kept.

    The step is compiled again, with the choices beside its result; the rows that a tree has room for count all, for all
    are computed.
    """
    seen: list[jax.Array] = []
    backend = _watched(static.target.backend, seen)
    watched = dataclasses.replace(static, target=dataclasses.replace(static.target, backend=backend))

    @jax.jit
    def step(params, state):
        seen.clear()
        state = decoder.step(watched, params, state)
        return state, jnp.stack(seen)

    totals = []
    for _ in range(steps):
        state, counts = step(params, state)
        totals.append(counts)
    return (sum(totals) / steps).tolist()


def _watched(backend: XLA, seen: list[jax.Array]) -> XLA:
    """The backend, which notes how many experts each mixture of a traced step touches."""

    class Watched(type(backend)):  # type: ignore[misc]  # whatever class it is
        def mixture(self, x, router, gate_up, down, experts_per_token, normalize_top_k, first=0):
            _, expert = moe.choose(x.reshape(-1, x.shape[-1]), router, experts_per_token, normalize_top_k)
            hit = jnp.zeros(router.shape[1], jnp.int32).at[expert.reshape(-1)].set(1)
            seen.append(hit.sum())
            return super().mixture(x, router, gate_up, down, experts_per_token, normalize_top_k, first)

    return Watched(**{f.name: getattr(backend, f.name) for f in dataclasses.fields(backend)})
