"""cuDNN's fused attention for the committed prefix, on NVIDIA GPUs in 16 bits; XLA for everything else."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

import jax
import jax.numpy as jnp

from jetspec_jax.backends.xla import XLA
from jetspec_jax.layers import attention


@dataclasses.dataclass(frozen=True)
class CuDNN(XLA):
    """The prefix half of attention in one kernel that keeps no score."""

    name: ClassVar[str] = "cudnn"

    def attend(self, q, fresh, mask, prefix=None, length=None):
        slots = 0 if prefix is None else prefix[0].shape[2]
        # It takes a length and no first slot, so the chunks of a long buffer divide it.
        chunk = math.gcd(attention.CHUNK, slots) if slots > attention.CHUNK else attention.CHUNK
        return attention.attend(q, fresh, mask, prefix, length, _part, chunk)


def _part(q, k, v, low, high) -> attention.Partial:
    """Attends to slots 0..high-1 of a chunk; `low` is 0."""
    batch, kv_heads, groups, rows, dim = q.shape
    flat = q.transpose(0, 3, 1, 2, 4).reshape(batch, rows, -1, dim)
    length = jnp.clip(high, 1, k.shape[2]).astype(jnp.int32)
    # It selects among the scores by itself, but multiplies all values by their weights, those of zero too.
    v = jnp.where((jnp.arange(k.shape[2]) < high[:, None])[:, None, :, None], v, 0)
    out, lse = jax.nn.dot_product_attention(
        flat, k.swapaxes(1, 2), v.swapaxes(1, 2), key_value_seq_lengths=length,
        query_seq_lengths=jnp.full_like(length, rows), implementation="cudnn", return_residual=True,
    )  # fmt: skip

    def split(x):
        return x.astype(jnp.float32).reshape(batch, rows, kv_heads, groups, -1).transpose(0, 2, 3, 1, 4)

    seen = (high > 0)[:, None, None, None]  # it takes no length of zero, so there it has read a slot too many
    peak = jnp.where(seen, split(lse)[..., 0], attention.MASKED)
    return attention.Partial(peak, jnp.ones_like(peak), jnp.where(seen[..., None], split(out), 0))
