"""One choice rule for every temperature, for plain and for speculative decoding.

The token at absolute position p is `argmax(logits / temperature + noise)`, with Gumbel noise that only the request's
seed and p decide; at temperature 0 there is no noise. A token chosen so is an exact sample of
softmax(logits / temperature), and because the noise belongs to the position, a tree that verifies many nodes chooses
the very token that plain decoding with this seed would choose.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jetspec_jax.config import MIN_TEMPERATURE


def noise(seed: UInt32[Array, ""], position: Int[Array, ""], vocab_size: int) -> Float[Array, " V"]:
    """Gumbel noise of one position, drawn 1-D over the vocabulary so that neither batch nor padding changes it."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)


def choose(
    logits: Float[Array, "B T V"],
    offsets: Int[Array, "B T"],
    first: Int[Array, " B"],
    temperature: Float[Array, " B"],
    seed: UInt32[Array, " B"],
    span: int,
) -> Int[Array, "B T"]:
    """The chosen token of every row; row t of batch row b stands at position first[b] + offsets[b, t].

    Offsets lie in 0..span-1, so `span` noise rows serve all T. Noise is drawn only if some row samples.
    """
    vocab = logits.shape[-1]
    greedy = temperature < MIN_TEMPERATURE

    def sampled():
        positions = first[:, None] + jnp.arange(span)
        rows = jax.vmap(jax.vmap(noise, (None, 0, None)), (0, 0, None))(seed, positions, vocab)
        rows = jnp.where(greedy[:, None, None], 0.0, rows)
        scale = jnp.where(greedy, 1.0, temperature)[:, None, None]
        return jnp.argmax(logits / scale + jnp.take_along_axis(rows, offsets[..., None], 1), axis=-1)

    choice = jax.lax.cond(greedy.all(), lambda: jnp.argmax(logits, axis=-1), sampled)
    return choice.astype(jnp.int32)
