"""Time of one step inside a compiled loop, and what the machine itself reaches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp

from jetspec_jax.fields import Option
from jetspec_jax.layers.numerics import precision

REPEATS = Option("repeats", "whole", "Measurements, of which the median is taken.", 5, low=1)


def per_step(run: Callable[[int], object], short: int, long: int, repeats: int) -> float:
    """Seconds a step: median over `repeats` of (time of `long` steps - time of `short` steps) / difference.

    The difference removes what a call costs once. `run(n)` runs n steps and returns arrays to wait for.
    """
    for n in (short, long):
        jax.block_until_ready(run(n))  # warm
    found = []
    for _ in range(repeats):
        times = []
        for n in (short, long):
            begin = time.perf_counter()
            jax.block_until_ready(run(n))
            times.append(time.perf_counter() - begin)
        found.append((times[1] - times[0]) / (long - short))
    return statistics.median(found)


def looped(step: Callable, *constants) -> Callable:
    """`(n, carry) -> carry` after n applications of `step(carry, *constants)` in one program; the carry is donated."""

    def many(n, carry, constants):
        return jax.lax.fori_loop(0, n, lambda _, c: step(c, *constants), carry)

    program = jax.jit(many, donate_argnums=1)
    return lambda n, carry: program(jnp.int32(n), carry, constants)


def machine(dtype: str = "bfloat16") -> dict[str, float]:
    """Bytes a second of a read (row maxima of bf16) and FLOP a second of a `dtype` matrix product of random data.

    A product in float32 keeps all its bits, as the package's do.
    """
    gib, size = (0.005, 256) if jax.default_backend() == "cpu" else (4.0, 8192)
    rows = int(gib * 2**30) // (2 * 8192)
    big = jax.random.normal(jax.random.key(0), (rows, 8192), jnp.bfloat16)
    # The row's own maximum is added to nothing but a counter: each step reads the array once.
    read = looped(lambda c, x: c + jnp.maximum(x, c.astype(x.dtype)).max(axis=1).max(), big)
    seconds = per_step(lambda n: read(n, jnp.float32(0)), 4, 24, 5)
    bandwidth = big.nbytes / seconds
    del big
    a, b = (jax.random.normal(jax.random.key(i), (size, size), dtype) for i in range(2))
    product = looped(lambda c, b: jnp.dot(c, b, precision=precision(b.dtype)) * jnp.asarray(0.01, b.dtype), b)
    seconds = per_step(lambda n: product(n, jnp.copy(a)), 4, 24, 5)
    return {"bytes_per_second": bandwidth, "flops_per_second": 2 * size**3 / seconds}
