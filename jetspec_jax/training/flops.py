"""Floating-point operations of a training step, and the rate at which this machine multiplies matrices.

Model FLOP utilisation = operations of the step / (its seconds * devices * measured rate). Counted are the products that
the method needs, a multiplication and an addition each, whatever is computed twice to save memory:

    target forward (where it is part of the step)
        2 * tokens * parameters of its layers (of an MoE: those that a token uses)
        + 4 * tokens * S / 2 * N * H a layer                   scores and values under the causal mask
    a block head, forward and twice that for backward, but fc once: nothing is differentiated by the features
        2 * rows * parameters of its layers + 2 * tokens * (fc + K and V of its layers)
        + 4 * rows * (S / 2 + T) * N * H a layer               context before the anchor, and the block
    lm_head, 2 * slots * V * E each: draft, gradient, and teacher where the loss reads it
    an EAGLE-3 head
        2 * rows * (attention's output and feed-forward) + 2 * (tokens + rows of later steps) * qkv + 2 * tokens * fc
        + 4 * rows * S / 2 * N * H                              context up to the row
        its own table, 2 * slots * U * E each: draft, gradient by rows, gradient by table

    a DSpark head: a block head and lm_head, and
        2 * slots * (E + M) * M, three times, for a gated Markov head of rank M
        its own table, 2 * slots * V * M each: draft, gradient by rows, gradient by table

tokens = sequences * S, rows = sequences * anchors * T block rows (of an EAGLE-3 head: its steps), slots = rows without
the anchors', which draft in a DSpark head alone.
"""

from __future__ import annotations

import functools
import time
from typing import Any

import jax
import jax.numpy as jnp

from jetspec_jax.config import ModelConfig
from jetspec_jax.layers.numerics import precision
from jetspec_jax.training.recipe import Recipe


def parts(recipe: Recipe, target: ModelConfig, sequences: int, length: int, online: bool) -> dict[str, float]:
    """Returns operations of one step by part: target, head_forward, head_backward, lm_head."""
    tokens = sequences * length
    own = 4 * tokens * length / 2 * target.num_heads * target.head_dim * target.num_layers
    head = recipe.learns.work(recipe, sequences, length)
    slots, table = head.pop("slots"), head.pop("table")
    teacher = recipe.mix.teaches * 2 * target.vocab_size * target.hidden_size
    return {
        "target": float(2 * tokens * row_parameters(target) + own) if online else 0.0,
        **head,
        "lm_head": float(slots * (table + teacher)),
    }


def row_parameters(c: Any) -> int:
    """Returns the matrix parameters that one row of a Qwen3 stack passes through; c: a target or a block head."""
    attention = c.hidden_size * c.head_dim * (2 * c.num_heads + 2 * c.num_kv_heads)
    dense, total = 3 * c.hidden_size * c.intermediate_size, 0
    for i in range(c.num_layers):
        if c.moe is not None and i in c.moe.sparse_layers:
            experts = c.moe.experts_per_token * 3 * c.moe.intermediate_size + c.moe.num_experts
            total += attention + c.hidden_size * experts
        else:
            total += attention + dense
    return total


@functools.cache  # a run asks once for each command, a benchmark for every table: the device stays what it is
def matrix_rate(dtype: str, size: int | None = None, seconds: float = 0.5) -> float:
    """Returns operations a second of a large square product on one device, the best of several."""
    size = size or (8192 if jax.default_backend() != "cpu" else 1024)
    # Random: multiplying constants draws less power, so that a device clocks higher than it does in training.
    x = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(lambda a, b: jnp.matmul(a, b, precision=precision(a.dtype)))
    product(x, x).block_until_ready()
    best, end = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < end:
        begin = time.perf_counter()
        for _ in range(4):
            out = product(x, x)
        out.block_until_ready()
        best = min(best, (time.perf_counter() - begin) / 4)
    return 2 * size**3 / best
