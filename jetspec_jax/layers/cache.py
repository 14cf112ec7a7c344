"""The K/V cache: a tuple with one (k, v) pair a layer, each [B, K, S, H].

Slots 0..length-1 of a row are valid. What lies after them may be anything, NaN too: whoever reads the cache keeps it
out. The layout is also that of fresh keys and values [B, K, T, H], so a commit moves rows and nothing else.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

KV = tuple[jax.Array, jax.Array]  # keys and values of one layer, [B, K, S or T, H]
Cache = tuple[KV, ...]


def init(num_layers: int, batch: int, kv_heads: int, capacity: int, head_dim: int, dtype) -> Cache:
    """Returns an empty cache of `capacity` slots a row."""
    shape = (batch, kv_heads, capacity, head_dim)
    return tuple((jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(num_layers))


def write(cache: Cache, new: Cache, start: Int[Array, " B"]) -> Cache:
    """Writes the rows of `new` [B, K, R, H] to slots start..start+R-1 of each row, and returns the cache.

    The caller keeps start + R <= S (`engine.geometry.Geometry` sizes the buffers so): a write past the end would be
    shifted back over the prefix.
    """

    def put(old, fresh, first):
        return jax.lax.dynamic_update_slice(old, fresh, (0, first, 0))

    def one(old, fresh):
        if old.shape[0] == 1:  # one contiguous write, no scatter
            return jax.lax.dynamic_update_slice(old, fresh, (0, 0, start[0], 0))
        return jax.vmap(put)(old, fresh, start)

    return tuple((one(k, nk), one(v, nv)) for (k, v), (nk, nv) in zip(cache, new, strict=True))


def latest(layer: KV, length: Int[Array, " B"], window: int) -> tuple[KV, Int[Array, " B"]]:
    """Returns the last `window` committed slots of each row of a layer's cache, and how many of them are committed.

    Keys are rotated by where they stand, so it does not matter in which slot they lie. A window of 0, or one that the
    whole cache fits into, returns what is given.
    """
    if not 0 < window < layer[0].shape[2]:
        return layer, length
    first = jnp.maximum(length - window, 0)

    def cut(x):
        if len(x) == 1:  # one contiguous read, no gather
            return jax.lax.dynamic_slice_in_dim(x, first[0], window, 2)
        return jax.vmap(lambda row, at: jax.lax.dynamic_slice_in_dim(row, at, window, 1))(x, first)

    return (cut(layer[0]), cut(layer[1])), length - first


def take(new: Cache, rows: Int[Array, "B R"]) -> Cache:
    """Gathers rows of fresh K/V [B, K, T, H] along T: the accepted path, on its way into the cache."""
    index = rows[:, None, :, None]
    return tuple((jnp.take_along_axis(k, index, 2), jnp.take_along_axis(v, index, 2)) for k, v in new)
