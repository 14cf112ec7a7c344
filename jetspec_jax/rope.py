"""Rotary position embedding, half-rotation convention."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

Rope = tuple[jax.Array, jax.Array]  # cosines and sines, [B, T, H/2] f32


def angles(positions: Int[Array, "B T"], head_dim: int, theta: float) -> Rope:
    """Cosines and sines [B, T, H/2] in f32; 16-bit frequencies would dephase with the position."""
    inverse = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    phase = positions[..., None].astype(jnp.float32) * inverse
    return jnp.cos(phase), jnp.sin(phase)


def rotate(x: Float[Array, "B T N H"], rope: Rope) -> Float[Array, "B T N H"]:
    """Rotates queries or keys; f32 inside, the dtype of `x` outside."""
    cos, sin = (r[:, :, None, :] for r in rope)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return out.astype(x.dtype)
