"""Mixture-of-experts feed-forward that drops no token."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jetspec_jax.layers.numerics import einsum, precision


def choose(
    x: Float[Array, "R E"], router: Float[Array, "E X"], experts_per_token: int, normalize_top_k: bool
) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """Returns weights and ids of each row's experts, the most probable first; arguments of `feed_forward`."""
    probability = jax.nn.softmax(einsum("re,ex->rx", x, router, jnp.float32), axis=-1)
    weight, expert = jax.lax.top_k(probability, experts_per_token)
    return (weight / weight.sum(-1, keepdims=True) if normalize_top_k else weight), expert


def feed_forward(
    x: Float[Array, "B T E"],
    router: Float[Array, "E X"],
    gate_up: Float[Array, "Y E 2 F"],
    down: Float[Array, "Y F E"],
    experts_per_token: int,
    normalize_top_k: bool,
    first: int | Int[Array, ""] = 0,
) -> Float[Array, "B T E"]:
    """Returns what the chosen SwiGLU experts of Qwen3-MoE make of each row, weighed by the router.

    Rows are sorted by expert and multiplied in ragged groups, so every routed row is computed, whatever the balance:
    a capacity limit would make a row's result depend on its batch mates.

    Args:
      x: normed rows.
      router: its probabilities are computed in f32.
      gate_up: gate and up of each expert side by side.
      down: of each expert.
      experts_per_token: experts that a row is sent to.
      normalize_top_k: whether their weights are made to sum to one.
      first: where only Y of all X experts are given, which is the first of them; what the others make is left out.
    """
    batch, rows, hidden = x.shape
    flat = x.reshape(-1, hidden)
    weight, expert = choose(flat, router, experts_per_token, normalize_top_k)
    count = len(gate_up)
    if count < router.shape[1]:  # rows of the other experts come last, in no group
        here = (expert >= first) & (expert < first + count)
        weight, expert = jnp.where(here, weight, 0), jnp.where(here, expert - first, count)
    order = jnp.argsort(expert.reshape(-1), stable=True)  # routed rows, grouped by expert
    source = order // experts_per_token
    sizes = jnp.bincount(expert.reshape(-1), length=count).astype(jnp.int32)

    def ragged(a, w):
        wide = jax.lax.ragged_dot(a, w, sizes, precision=precision(a.dtype), preferred_element_type=jnp.float32)
        return wide.astype(a.dtype)

    gate, up = jnp.split(ragged(flat[source], gate_up.reshape(*gate_up.shape[:2], -1)), 2, axis=-1)
    out = ragged(jax.nn.silu(gate) * up, down)
    if count < router.shape[1]:
        out = jnp.where(jnp.arange(len(out))[:, None] < sizes.sum(), out, 0)
    # Back in the order of the rows, so that each adds its experts in one fixed order: a scatter would add them in any.
    out = out[jnp.argsort(order)].reshape(-1, experts_per_token, hidden).astype(jnp.float32)
    return (out * weight[..., None]).sum(1).astype(x.dtype).reshape(batch, rows, hidden)
