"""Matrix product and RMSNorm with the package's precision rules."""

from __future__ import annotations

import jax
import jax.numpy as jnp


def precision(dtype) -> jax.lax.Precision:
    """float32 products keep all their bits (a GPU would use TF32 otherwise); 16-bit ones run as they are."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def einsum(spec: str, x: jax.Array, w: jax.Array, out: jax.typing.DTypeLike | None = None) -> jax.Array:
    """`jnp.einsum` accumulated in f32, returned in `out` or the dtype of `x`."""
    y = jnp.einsum(spec, x, w, precision=precision(x.dtype), preferred_element_type=jnp.float32)
    return y.astype(out or x.dtype)


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis: f32 inside, cast back, then scaled (the order of Qwen3)."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight
