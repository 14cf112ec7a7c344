"""What looks at a whole row of the vocabulary: the one room that reduces over V.

Tokens are chosen, ranked, filtered and scored by these few functions alone. Inside of `split` each device of an axis
holds an equal part of every row, in the order of the devices, and the functions answer for the whole row: what they
exchange is a few numbers a row, never the row.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

PIECES = (128, 16)  # of the vocabulary, then of the pieces that are left

# Axis of devices over which the program that is being traced splits the vocabulary; None where every device has it all.
_AXIS: contextvars.ContextVar[str | None] = contextvars.ContextVar("axis", default=None)


@contextlib.contextmanager
def split(axis: str | None) -> Iterator[None]:
    """Traces what is inside for devices that share the vocabulary, within `jax.shard_map`; None changes nothing."""
    token = _AXIS.set(axis)
    try:
        yield
    finally:
        _AXIS.reset(token)


def size(x: Float[Array, "*rows V"]) -> int:
    """Returns how many tokens there are, of rows of logits."""
    axis = _AXIS.get()
    return x.shape[-1] * (jax.lax.axis_size(axis) if axis else 1)


def held(vocab_size: int) -> int:
    """Returns how many of the tokens this device holds."""
    axis = _AXIS.get()
    return vocab_size // jax.lax.axis_size(axis) if axis else vocab_size


def slot(token: Int[Array, "*n"], held: int) -> Int[Array, "*n"]:
    """Returns where a token stands among those that this device holds; `held`, to be dropped, where another does.

    held: how many this device holds. Tokens from the size of the vocabulary on stay out of bounds.
    """
    axis = _AXIS.get()
    if not axis:
        return token
    place = token - jax.lax.axis_index(axis) * held
    return jnp.where((place >= 0) & (place < held), place, held)


def share(x: jax.Array, along: int = -1) -> jax.Array:
    """Returns this device's part of an array that has all tokens along an axis."""
    axis = _AXIS.get()
    if not axis:
        return x
    own = held(x.shape[along])
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * own, own, along % x.ndim)


def rows(table: Float[Array, "V E"], token: Int[Array, "*rows"]) -> Float[Array, "*rows E"]:
    """Returns rows of a table with one row a token, such as an embedding."""
    axis = _AXIS.get()
    if not axis:
        return table[token]
    place = slot(token, len(table))
    found = table[jnp.minimum(place, len(table) - 1)]
    return jax.lax.psum(jnp.where((place < len(table))[..., None], found, 0), axis)


def chosen(logits: Float[Array, "B T V"], node: Int[Array, "B R"], token: Int[Array, "B R"]) -> Float[Array, "B R"]:
    """Returns the logit of a token at each of R nodes."""
    axis = _AXIS.get()
    if not axis:
        return jax.vmap(lambda x, n, c: x[n, c])(logits, node, token)
    own = logits.shape[-1]
    place = slot(token, own)
    found = jax.vmap(lambda x, n, c: x[n, c])(logits, node, jnp.minimum(place, own - 1))
    return jax.lax.psum(jnp.where(place < own, found, 0.0), axis)


def at(x: Float[Array, "*rows V"], token: Int[Array, "*rows"]) -> Float[Array, "*rows 1"]:
    """Returns what stands at one token of every row."""
    axis, own = _AXIS.get(), x.shape[-1]
    place = slot(token, own)[..., None]
    found = jnp.take_along_axis(x, jnp.minimum(place, own - 1) if axis else place, -1)
    return jax.lax.psum(jnp.where(place < own, found, 0.0), axis) if axis else found


def largest(x: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Returns the largest number of every row; NaN where there is one."""
    axis, found = _AXIS.get(), x.max(-1)
    return jax.lax.all_gather(found, axis).max(0) if axis else found


def total(x: Float[Array, "*rows V"]) -> Float[Array, "*rows"]:
    """Returns the sum of every row."""
    axis, found = _AXIS.get(), x.sum(-1)
    return jax.lax.psum(found, axis) if axis else found


def best(x: Float[Array, "*rows V"]) -> Int[Array, "*rows"]:
    """Returns the index of the largest number of every row; of equals the first wins, and NaN wins over all."""
    axis, place = _AXIS.get(), jnp.argmax(x, axis=-1).astype(jnp.int32)
    if not axis:
        return place
    value = jnp.take_along_axis(x, place[..., None], -1)[..., 0]
    values, tokens = _gathered(value, place + jax.lax.axis_index(axis) * x.shape[-1], axis)
    return jnp.take_along_axis(tokens, jnp.argmax(values, axis=0)[None], 0)[0]


def log_total(logits: Float[Array, "*rows V"]) -> Float[Array, "*rows 1"]:
    """Returns what is taken from a row's logits to make them log-probabilities."""
    axis, found = _AXIS.get(), jax.nn.logsumexp(logits, axis=-1, keepdims=True)
    return jax.nn.logsumexp(jax.lax.all_gather(found, axis), axis=0) if axis else found


def gumbel(seed: UInt32[Array, ""], position: Int[Array, ""], vocab_size: int) -> Float[Array, " V"]:
    """Draws the noise of one position, 1-D over the vocabulary, so that neither batch nor padding changes it.

    Where devices share the vocabulary each draws all of it and keeps its part: numbers cost less than their exchange.
    """
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return share(jax.random.gumbel(key, (vocab_size,), jnp.float32))


def top_k(x: Float[Array, "*rows V"], k: int) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
    """Computes `jax.lax.top_k`, exactly, without a sort of the whole vocabulary.

    A long axis is cut into pieces, and only the k pieces with the largest maxima can hold one of the k largest numbers.
    Of equals the first wins, as there. Of devices that share the vocabulary each gives the k largest that it holds.
    """
    axis = _AXIS.get()
    if not axis:
        return _top_k(x, k)
    value, token = _top_k(x, min(k, x.shape[-1]))
    found = _gathered(value, token + jax.lax.axis_index(axis) * x.shape[-1], axis)
    # In the order of the devices, which is that of the tokens, so that of equals the first wins again.
    values, tokens = (jnp.moveaxis(y, 0, -2).reshape(*y.shape[1:-1], -1) for y in found)
    best, place = jax.lax.top_k(values, k)
    return best, jnp.take_along_axis(tokens, place, -1)


def _gathered(value: Float[Array, "*n"], token: Int[Array, "*n"], axis: str) -> tuple[jax.Array, jax.Array]:
    """Returns the numbers and tokens of all devices, in one exchange; whole numbers pass untouched."""
    both = jnp.stack([jax.lax.bitcast_convert_type(value, jnp.int32), token])
    every = jax.lax.all_gather(both, axis)
    return jax.lax.bitcast_convert_type(every[:, 0], jnp.float32), every[:, 1]


def _top_k(x: Float[Array, "*rows V"], k: int) -> tuple[Float[Array, "*rows k"], Int[Array, "*rows k"]]:
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
    axis = _AXIS.get()
    bits = 1 if jax.default_backend() == "cpu" else 4
    ways = 1 << bits

    def narrow(_, bracket):
        low, high = bracket  # enough at low, too little at high
        step = (high - low + jnp.uint32(ways - 1)) // jnp.uint32(ways)
        probes = [jnp.minimum(low + step * jnp.uint32(i), high) for i in range(1, ways)]
        masked = [jnp.where(scores >= _number(probe)[..., None], weight, 0.0) for probe in probes]
        # One reduction of many operands, so that the scores are read once.
        sums = jax.lax.reduce(masked, [jnp.float32(0)] * len(masked), _add, (scores.ndim - 1,))
        sums = jax.lax.psum(sums, axis) if axis else sums
        for probe, found in zip(probes, sums, strict=True):
            enough = (found >= need) & (probe < high)
            low = jnp.where(enough, probe, low)  # probes ascend: the last that is enough
        for probe, found in zip(reversed(probes), reversed(sums), strict=True):
            high = jnp.where(found >= need, high, jnp.minimum(probe, high))  # and the first that is not
        return low, high

    bracket = _rank(jnp.full(need.shape, -jnp.inf)), _rank(largest(scores)) + 1
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
