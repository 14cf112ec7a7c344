"""What looks at a whole row of the vocabulary: the one room that reduces over V.

Tokens are chosen, ranked, filtered and scored by these few functions alone, so whatever splits the vocabulary over
devices one day has one file to change.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

PIECES = (128, 16)  # of the vocabulary, then of the pieces that are left


def best(x: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Returns the index of the largest number of every row; of equals the first wins, and NaN wins over all."""
    return jnp.argmax(x, axis=-1).astype(jnp.int32)


def log_total(logits: Float[Array, "*rows V"]) -> Float[Array, "*rows 1"]:
    """Returns what is taken from a row's logits to make them log-probabilities."""
    return jax.nn.logsumexp(logits, axis=-1, keepdims=True)


def gumbel(seed: UInt32[Array, ""], position: Int[Array, ""], vocab_size: int) -> Float[Array, " V"]:
    """Draws the noise of one position, 1-D over the vocabulary, so that neither batch nor padding changes it."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)


def top_k(x: Float[Array, "*rows V"], k: int) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """Computes `jax.lax.top_k`, exactly, without a sort of the whole vocabulary.

    A long axis is cut into pieces, and only the k pieces with the largest maxima can hold one of the k largest numbers.
    Of equals the first wins, as there.
    """
    index = jnp.broadcast_to(jnp.arange(x.shape[-1], dtype=jnp.int32), x.shape)
    for piece in PIECES:
        size = x.shape[-1]
        if size <= 2 * k * piece:
            continue
        pad = [(0, 0)] * (x.ndim - 1) + [(0, -size % piece)]
        filled = jnp.pad(x, pad, constant_values=-jnp.inf), jnp.pad(index, pad)
        x, index = (y.reshape(*y.shape[:-1], -1, piece) for y in filled)
        best = jnp.sort(jax.lax.top_k(x.max(-1), k)[1])[..., None]  # in their old order, for equals
        x, index = (jnp.take_along_axis(y, best, -2).reshape(*y.shape[:-2], -1) for y in (x, index))
    x, place = jax.lax.top_k(x, k)
    return x, jnp.take_along_axis(index, place, -1)


def threshold(
    scores: Float[Array, "*rows V"], weight: Float[Array, "*rows V"], need: Float[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """Finds the largest t for which the scores >= t weigh at least `need` > 0 together; -inf where even all do not.

    A search among the floating-point numbers themselves, in the order of their bits: it ends at the exact value. Each
    pass over the scores splits the bracket in `ways`. Two are the least work; on an accelerator a pass costs its launch
    and one reading of the scores, so that more ways make fewer passes.
    """
    bits = 1 if jax.default_backend() == "cpu" else 4
    ways = 1 << bits

    def narrow(_, bracket):
        low, high = bracket  # enough at low, too little at high
        step = (high - low + jnp.uint32(ways - 1)) // jnp.uint32(ways)
        probes = [jnp.minimum(low + step * jnp.uint32(i), high) for i in range(1, ways)]
        masked = [jnp.where(scores >= _number(probe)[..., None], weight, 0.0) for probe in probes]
        # One reduction of many operands, so that the scores are read once.
        sums = jax.lax.reduce(masked, [jnp.float32(0)] * len(masked), _add, (scores.ndim - 1,))
        for probe, found in zip(probes, sums, strict=True):
            enough = (found >= need) & (probe < high)
            low = jnp.where(enough, probe, low)  # probes ascend: the last that is enough
        for probe, found in zip(reversed(probes), reversed(sums), strict=True):
            high = jnp.where(found >= need, high, jnp.minimum(probe, high))  # and the first that is not
        return low, high

    bracket = _rank(jnp.full(need.shape, -jnp.inf)), _rank(scores.max(-1)) + 1
    return _number(jax.lax.fori_loop(0, 32 // bits, narrow, bracket)[0])


def _add(left, right):
    """Adds two tuples of sums, operand by operand."""
    return [a + b for a, b in zip(left, right, strict=True)]


def _rank(x: Float[Array, "*n"]) -> UInt32[Array, "*n"]:
    """Unsigned integers in the order of the numbers."""
    bits, sign = jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _number(rank: UInt32[Array, "*n"]) -> Float[Array, "*n"]:
    """The inverse of `_rank`."""
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(rank >= sign, rank & ~sign, ~rank)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
