"""Matrix product and RMSNorm with the package's precision rules, and the size that arrays are padded to."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import jax
import jax.numpy as jnp

Function = TypeVar("Function", bound=Callable)


def narrow(function: Function) -> Function:
    """Returns the function as it is with JAX_ENABLE_X64 off: every program here is 32-bit, whatever the caller's are.

    With it on, a plain `jnp.arange` or `argmax` is an int64, and does not fit beside the int32 of tokens and positions.
    """

    @functools.wraps(function)
    def run(*args: Any, **options: Any) -> Any:
        with jax.enable_x64(False):
            return function(*args, **options)

    return cast(Function, run)


def precision(dtype) -> jax.lax.Precision:
    """Returns how a product is computed: f32 keeps all its bits (a GPU would use TF32), 16 bits run as they are."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def einsum(spec: str, x: jax.Array, w: jax.Array, out: jax.typing.DTypeLike | None = None) -> jax.Array:
    """Computes `jnp.einsum`, accumulated in f32 and returned in `out` or the dtype of `x`.

    The product itself returns that dtype: its units accumulate in f32 anyway, and a cast of its own would cost a pass
    over memory.

    Its gradient products run in the dtype of `x`, however wide the result was: a 16-bit operand beside an f32 cotangent
    would be widened, and the product would leave the fast units.
    """
    return _einsum(spec, jnp.dtype(out or x.dtype), x, w)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _einsum(spec, out, x, w):
    return jnp.einsum(spec, x, w, precision=precision(x.dtype), preferred_element_type=out)


def _forward(spec, out, x, w):
    return _einsum(spec, out, x, w), (x, w)


def _backward(spec, out, operands, cotangent):
    x, w = operands
    narrow = functools.partial(jnp.einsum, spec, precision=precision(x.dtype), preferred_element_type=x.dtype)
    return jax.vjp(narrow, x, w)[1](cotangent.astype(x.dtype))


_einsum.defvjp(_forward, _backward)


def power(size: int, smallest: int = 1) -> int:
    """Returns the next power of two, of at least `smallest`."""
    return max(smallest, 1 << (size - 1).bit_length())


def rms_norm(x: jax.Array, weight: jax.Array, eps: float) -> jax.Array:
    """Norms the last axis by its root mean square: f32 inside, cast back, then scaled (the order of Qwen3)."""
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * weight
