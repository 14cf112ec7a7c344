"""Distillation loss over the vocabulary, a chunk of rows at a time, with its gradient in the same pass.

Rows are block slots. f32 logits of all rows would fill the device (30,720 rows x 49,152 x 4 bytes are 6 GB, twice), so
one scan makes the logits of a chunk, its loss, and the gradient with respect to the draft's hidden states; the head's
vector-Jacobian product follows from those. Nothing is computed twice.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jetspec_jax.numerics import einsum

KINDS = ("forward_kl", "cross_entropy")


class Rows(NamedTuple):
    """R slots with a label."""

    draft: jax.Array  # [R, E] hidden states of the head
    teacher: jax.Array  # [R, E] final hidden states of the target one position before the label
    label: jax.Array  # [R] int32, the token that the answer holds there
    weight: jax.Array  # [R] f32


class Loss(NamedTuple):
    value: jax.Array  # [] f32, weighted mean
    gradient: jax.Array  # [R, E] d value / d draft, in the dtype of `draft`
    hit: jax.Array  # [R] bool: the head's best token is the target's


def distill(
    table: Float[Array, "V E"], rows: Rows, kind: str = "forward_kl", temperature: float = 1.0, chunk: int = 4096
) -> Loss:
    """Weighted mean loss over rows of one kind of `KINDS`.

    forward_kl: T^2 KL(softmax(teacher / T) || softmax(draft / T)) (JetSpec, equations 8 and 9).
    cross_entropy: -log softmax(draft)[label], and `hit` compares with the label; the teacher is not read.
    """
    count, embed = rows.draft.shape
    chunk = min(chunk, count)
    padding = -count % chunk
    scaled = rows._replace(weight=rows.weight / jnp.maximum(rows.weight.sum(), 1e-9))
    # Padding rows weigh nothing.
    split = lambda x: jnp.pad(x, ((0, padding),) + ((0, 0),) * (x.ndim - 1)).reshape(-1, chunk, *x.shape[1:])

    def body(total, part: Rows):
        draft = einsum("re,ve->rv", part.draft, table, jnp.float32)
        if kind == "forward_kl":
            teacher = einsum("re,ve->rv", part.teacher, table, jnp.float32)
            best = teacher.argmax(-1)
            p, q = jax.nn.log_softmax(teacher / temperature), jax.nn.log_softmax(draft / temperature)
            loss = temperature**2 * (jnp.exp(p) * (p - q)).sum(-1)
            slope = temperature * (jnp.exp(q) - jnp.exp(p))
        else:
            best, q = part.label, jax.nn.log_softmax(draft)
            loss = -jnp.take_along_axis(q, part.label[:, None], 1)[:, 0]
            slope = jnp.exp(q) - jax.nn.one_hot(part.label, table.shape[0])
        slope = (slope * part.weight[:, None]).astype(part.draft.dtype)
        gradient = einsum("rv,ve->re", slope, table)
        return total + (loss * part.weight).sum(), (gradient, draft.argmax(-1) == best)

    value, (gradient, hit) = jax.lax.scan(body, jnp.float32(0), jax.tree.map(split, scaled))
    return Loss(value, gradient.reshape(-1, embed)[:count], hit.reshape(-1)[:count])


def run_length(hit: Array, exists: Array) -> tuple[Array, Array]:
    """Mean length a block would have been accepted to, the bonus token included, and the hit rate of slot 1.

    hit, exists: [B, A, D] bool, from slot 1 on; blocks whose first label does not exist do not count.
    """
    run = jnp.cumprod(hit & exists, axis=-1).sum(-1)
    blocks = exists[..., 0]
    count = jnp.maximum(blocks.sum(), 1)
    return 1 + (run * blocks).sum() / count, (hit[..., 0] & blocks).sum() / count
