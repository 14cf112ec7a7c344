"""One choice rule for every temperature, for plain and for speculative decoding.

The token at absolute position p is `argmax(logits / temperature + noise)`, with Gumbel noise that only the request's
seed and p decide; at temperature 0 there is no noise. A token chosen so is an exact sample of
softmax(logits / temperature), and because the noise belongs to the position, a tree that verifies many nodes chooses
the very token that plain decoding with this seed would choose. `processors.py` has the options that change the logits
before.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, UInt32

from jetspec_jax.config import MIN_TEMPERATURE

NOISE_SHARE = 0.7  # fitted on the demo pair at temperatures 0.7 and 1


class Penalties(NamedTuple):
    """Of tokens that have been there; 1, 0 and 0 are off."""

    repetition: jax.Array  # [B] f32, of prompt and output
    presence: jax.Array  # [B] f32, of the output
    frequency: jax.Array  # [B] f32, of the output, for each time


class Bias(NamedTuple):
    """Numbers added to the logits of some tokens; n is the longest list of the batch."""

    token: jax.Array  # [B, n] int32, padded with -1
    value: jax.Array  # [B, n] f32


class Sampling(NamedTuple):
    """How each row of a batch chooses, as arrays: changing their values compiles nothing.

    An option that no row uses is None. Which are None is static, so an unused option is not part of the program.
    """

    temperature: jax.Array | None  # [B] f32; None: every row is greedy
    seed: jax.Array  # [B] uint32
    top_k: jax.Array | None = None  # [B] int32, 0 keeps all
    top_p: jax.Array | None = None  # [B] f32, 1 keeps all
    min_p: jax.Array | None = None  # [B] f32, 0 keeps all
    penalties: Penalties | None = None
    bias: Bias | None = None
    bad_words: jax.Array | None = None  # [B, n, m] int32: m tokens that must not come in a row; padded at the left: -1
    min_length: jax.Array | None = None  # [B] int32: no end token at a position before it

    @property
    def greedy(self) -> jax.Array:
        """[B] bool."""
        return jnp.ones(self.seed.shape, bool) if self.temperature is None else self.temperature < MIN_TEMPERATURE

    @property
    def scale(self) -> jax.Array:
        """[B, 1, 1] f32, what logits are divided by."""
        return jnp.where(self.greedy, 1.0, 1.0 if self.temperature is None else self.temperature)[:, None, None]

    @property
    def filters(self) -> bool:
        """Whether some row drops tokens by rank or probability."""
        return not (self.top_k is None and self.top_p is None and self.min_p is None)

    @property
    def edits(self) -> bool:
        """Whether some row changes logits."""
        return not (self.penalties is None and self.bias is None and self.bad_words is None and self.min_length is None)


def noise(seed: UInt32[Array, ""], position: Int[Array, ""], vocab_size: int) -> Float[Array, " V"]:
    """Gumbel noise of one position, drawn 1-D over the vocabulary so that neither batch nor padding changes it."""
    key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), position)
    return jax.random.gumbel(key, (vocab_size,), jnp.float32)


def noise_rows(sampling: Sampling, first: Int[Array, " B"], span: int, vocab_size: int) -> Float[Array, "B R V"]:
    """Noise of the positions first..first+span-1 of every row; zeros for greedy rows."""
    if sampling.temperature is None:
        return jnp.zeros((first.size, span, vocab_size))
    positions = first[:, None] + jnp.arange(span)
    rows = jax.vmap(jax.vmap(noise, (None, 0, None)), (0, 0, None))(sampling.seed, positions, vocab_size)
    return jnp.where(sampling.greedy[:, None, None], 0.0, rows)


def pick(
    logits: Float[Array, "B T V"],
    offsets: Int[Array, "B T"],
    first: Int[Array, " B"],
    sampling: Sampling,
    span: int,
    rows: Float[Array, "B R V"] | None = None,
) -> Int[Array, "B T"]:
    """The best token of every row; row t of batch row b stands at position first[b] + offsets[b, t].

    Offsets lie in 0..span-1, so R = `span` noise rows serve all T: those given, else drawn only if some row samples.
    """
    if sampling.temperature is not None:
        drawn = noise_rows(sampling, first, span, logits.shape[-1]) if rows is None else rows
        logits = logits / sampling.scale + jnp.take_along_axis(drawn, offsets[..., None], 1)
    return jnp.argmax(logits, axis=-1).astype(jnp.int32)


def foresee(
    logits: Float[Array, "B D V"], first: Int[Array, " B"], sampling: Sampling, sharpness: float
) -> tuple[Float[Array, "B D V"], Float[Array, "B R V"] | None]:
    """Draft logits under the noise that will decide the target's choice, and that noise, R = D + 1 rows from `first`.

    A greedy batch has neither: its logits come back, and None.

    Were the draft's logits the target's own, the target would choose the argmax of logits / temperature + noise. They
    are an average over continuations that the draft cannot see: flatter, with an error. So the noise counts for less,
    and softmax(sharpness * (logits / temperature + NOISE_SHARE * noise)) is about how probable each token is to be the
    target's choice; the sum of its logarithms along a path ranks paths. Greedy rows stay as they are.
    """
    depth, vocab = logits.shape[1:]
    if sampling.temperature is None:
        return logits, None
    rows = noise_rows(sampling, first, depth + 1, vocab)
    ranked = sharpness * (logits / sampling.scale + NOISE_SHARE * rows[:, :depth])
    return jnp.where(sampling.greedy[:, None, None], logits, ranked), rows
