"""Rotary position embedding, half-rotation convention, with the scaling rules of `rope_scaling`."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jetspec_jax.layers.rope_scaling import RopeScaling

Rope = tuple[jax.Array, jax.Array]  # cosines and sines, [B, T, H/2] f32


def angles(positions: Int[Array, "B T"], head_dim: int, theta: float, scaling: RopeScaling | None = None) -> Rope:
    """Returns cosines and sines [B, T, H/2] in f32; 16-bit frequencies would dephase with the position.

    Every rule is a function of the position alone, so a row is rotated alike in a prompt, in a chunk and in a tree.
    """
    phase = positions[..., None].astype(jnp.float32) * inverse_frequencies(head_dim, theta, scaling, positions)
    if scaling is None:
        return jnp.cos(phase), jnp.sin(phase)
    return jnp.cos(phase) * scaling.attention_factor, jnp.sin(phase) * scaling.attention_factor


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None, positions: Int[Array, "B T"]
) -> Float[Array, "*rows half"]:
    """Returns [H/2] f32, or [B, T, H/2] for `dynamic`, the only rule that looks at the position.

    Formulas and f32 arithmetic are those of transformers' `modeling_rope_utils`.
    """
    exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
    inverse = 1.0 / theta**exponent
    if scaling is None:
        return inverse
    if scaling.kind == "linear":
        return inverse / scaling.factor
    if scaling.kind == "dynamic":
        return _dynamic(scaling, theta, head_dim, exponent, positions)
    if scaling.kind == "yarn":
        return _yarn(scaling, theta, head_dim, inverse)
    return _llama3(scaling, inverse)


def _dynamic(s: RopeScaling, theta: float, head_dim: int, exponent, positions) -> jax.Array:
    """NTK with the base of the length that ends at each position: what token-by-token decoding with a cache computes,
    whose keys keep the frequencies of the length at which they were made."""
    length = jnp.maximum(positions + 1, s.original_length)[..., None].astype(jnp.float32)
    growth = s.factor * length / s.original_length - (s.factor - 1)
    return 1.0 / (theta * growth ** (head_dim / (head_dim - 2))) ** exponent


def _yarn(s: RopeScaling, theta: float, head_dim: int, inverse) -> jax.Array:
    """Fast channels stay, slow ones are divided by the factor, with a ramp between (arXiv 2309.00071)."""

    def channel(turns: float) -> float:
        return head_dim * math.log(s.original_length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = channel(s.beta_fast), channel(s.beta_slow)
    if s.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    width = high - low or 0.001  # no division by zero
    slow = jnp.clip((jnp.arange(head_dim // 2, dtype=jnp.float32) - low) / width, 0, 1)
    return inverse / s.factor * slow + inverse * (1 - slow)


def _llama3(s: RopeScaling, inverse) -> jax.Array:
    """Wavelengths beyond the original length are divided by the factor, short ones stay, a ramp between."""
    wavelength = 2 * math.pi / inverse
    ramp = s.original_length / wavelength - s.low_freq_factor
    smooth = jnp.clip(ramp / (s.high_freq_factor - s.low_freq_factor), 0, 1)
    return (1 - smooth) * inverse / s.factor + smooth * inverse


def rotate(x: Float[Array, "B T N H"], rope: Rope) -> Float[Array, "B T N H"]:
    """Rotates queries or keys; f32 inside, the dtype of `x` outside."""
    cos, sin = (r[:, :, None, :] for r in rope)
    low, high = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    out = jnp.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)
    return out.astype(x.dtype)
