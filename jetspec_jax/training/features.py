"""What the head reads and learns from, computed once and kept on the device.

The target runs once over every answer; its tapped layers (the head's input) and its final hidden states (the teacher,
through lm_head) stay in memory, so that training never runs the target. Rows lie end to end: a row is read as a window
of fixed width whose tail belongs to the next row and is masked by lengths. Memory: (taps + 1) * E * 2 bytes a position,
6.9 KB for the demo pair, so 10 M positions take 65 GiB.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from jetspec_jax import masks
from jetspec_jax.training.answers import Answers

WIDTH_STEP = 256  # padded lengths of the target's forward are multiples of this


class Features(NamedTuple):
    """P positions of N rows, end to end, and `width` spare ones."""

    taps: jax.Array  # [P, F]
    final: jax.Array  # [P, E] after the target's final norm
    tokens: jax.Array  # [P] int32
    offset: jax.Array  # [N] int32
    prompt_length: jax.Array  # [N] int32
    length: jax.Array  # [N] int32
    scale: jax.Array  # [F] f32, root mean square of every tapped channel


class Batch(NamedTuple):
    """B rows as windows of S positions; what lies behind `length` is not theirs."""

    taps: jax.Array  # [B, S, F]
    final: jax.Array  # [B, S, E]
    tokens: jax.Array  # [B, S] int32
    prompt_length: jax.Array  # [B] int32
    length: jax.Array  # [B] int32


def compute(target, params, taps: tuple[int, ...], answers: Answers, width: int, batch: int = 64) -> Features:
    """Runs the target over all rows, each at most `width` long; the rows keep their order."""
    if answers.length.max(initial=0) > width:
        raise ValueError(f"a row of {answers.length.max()} tokens does not fit width={width}")
    embed = jax.eval_shape(target.embed, params, jax.ShapeDtypeStruct((1,), jnp.int32))
    total = int(answers.length.sum()) + width
    store = (
        jnp.zeros((total, len(taps) * embed.shape[-1]), embed.dtype),
        jnp.zeros((total, embed.shape[-1]), embed.dtype),
    )
    squares = jnp.zeros((len(taps) * embed.shape[-1],), jnp.float32)

    @functools.partial(jax.jit, donate_argnums=(1, 2))
    def fill(params, store, squares, tokens, length, offset):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        out = target.forward(params, tokens, positions, masks.causal(tokens.shape[1]), taps=taps)
        inside = positions < length[:, None]
        squares += jnp.where(inside[..., None], out.taps.astype(jnp.float32) ** 2, 0).sum((0, 1))

        def put(i, store):
            # In order of offset: the padding behind a row is overwritten by the row that follows.
            rows = out.taps[i], out.hidden[i]
            return tuple(
                jax.lax.dynamic_update_slice(old, row, (offset[i], 0)) for old, row in zip(store, rows, strict=True)
            )

        return jax.lax.fori_loop(0, tokens.shape[0], put, store), squares

    rows, offset, count = answers.rows(), answers.offset, len(answers.length)
    for first in range(0, count, batch):
        index = np.minimum(np.arange(first, first + batch), count - 1)  # the last batch repeats its last row
        longest = answers.length[index].max()
        padded = np.zeros((batch, min(width, -(-longest // WIDTH_STEP) * WIDTH_STEP)), np.int32)
        for i, row in enumerate(index):
            padded[i, : answers.length[row]] = rows[row]
        unique = np.where(np.arange(first, first + batch) < count, answers.length[index], 0)
        store, squares = fill(params, store, squares, padded, unique, offset[index].astype(np.int32))

    scale = jnp.sqrt(squares / max(total - width, 1))
    return Features(
        *store,
        tokens=jnp.pad(jnp.asarray(answers.tokens.astype(np.int32)), (0, width)),
        offset=jnp.asarray(offset.astype(np.int32)),
        prompt_length=jnp.asarray(answers.prompt_length),
        length=jnp.asarray(answers.length),
        scale=jnp.maximum(scale, 1e-6),
    )


def fetch(features: Features, rows: Int[Array, " B"], width: int) -> Batch:
    """Windows of `width` positions from the first token of each row on."""
    first = features.offset[rows]

    def window(store):
        size = (width, *store.shape[1:])
        return jax.vmap(lambda i: jax.lax.dynamic_slice(store, (i,) + (0,) * (store.ndim - 1), size))(first)

    return Batch(
        window(features.taps),
        window(features.final),
        window(features.tokens),
        features.prompt_length[rows],
        features.length[rows],
    )
