"""The two small heads of DSpark (arXiv 2607.05147) that read the token before: a Markov head, and a confidence.

A block's slots are computed at once, so none knows which token the slot before it drafted. The Markov head adds to a
slot's logits what that token makes of them, of low rank, so that no pass of the block is repeated; the confidence says
how probable it is that the drafted token is accepted, if all before it are.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax.drafts.dspark_files import DSparkConfig
from jetspec_jax.layers import vocabulary
from jetspec_jax.layers.numerics import einsum


class Markov(nnx.Module):
    """What the token before adds to a slot's logits. M is the rank, Z what is remembered of a path: M, or 0 = nothing.

    vanilla: W2 W1[token]. gated: its row of W1 is scaled by a gate out of the slot and the row itself. rnn: a gated
    memory of all tokens of the path before.
    """

    def __init__(self, config: DSparkConfig, dtype):
        self.config, rank, width = config, config.markov_rank, config.hidden_size
        weight = lambda *shape: nnx.Param(jnp.zeros(shape, dtype))
        self.w1, self.w2 = weight(config.vocab_size, rank), weight(config.vocab_size, rank)
        if config.markov == "gated":
            self.gate, self.gate_bias = weight(width + rank, rank), weight(rank)
        elif config.markov == "rnn":
            self.joint, self.joint_bias = weight(2 * rank + width, 3 * rank), weight(3 * rank)

    def start(self, batch: int) -> Float[Array, "B 1 Z"]:
        """Returns what is remembered at the anchor."""
        return jnp.zeros((batch, 1, self.config.markov_rank if self.config.markov == "rnn" else 0), self.w1.dtype)

    def embed(self, token: Int[Array, "B T"]) -> Float[Array, "B T M"]:
        """Returns the rows of W1."""
        return jnp.take(self.w1[...], token, axis=0)

    def rows(
        self, hidden: Float[Array, "B T E"], token: Int[Array, "B T"], memory: Float[Array, "B T Z"]
    ) -> tuple[Float[Array, "B T M"], Float[Array, "B T Z"]]:
        """Returns the rows that W2 makes logits of, and what is remembered after their tokens.

        Args:
          hidden: of the slots.
          token: drafted before each.
          memory: of the path up to that token.
        """
        row = self.embed(token)
        if self.config.markov == "gated":
            row = row * jax.nn.sigmoid(_affine(self.gate, self.gate_bias, hidden, row))
        elif self.config.markov == "rnn":
            gate, new, out = jnp.split(_affine(self.joint, self.joint_bias, memory, row, hidden), 3, axis=-1)
            kept = jax.nn.sigmoid(gate)
            memory = kept * memory + (1 - kept) * jnp.tanh(new)
            row = jnp.tanh(out)
        return row, memory

    def bias(
        self, hidden: Float[Array, "B T E"], token: Int[Array, "B T"], memory: Float[Array, "B T Z"]
    ) -> tuple[Float[Array, "B T V"], Float[Array, "B T Z"]]:
        """Returns what is added to the slots' logits (f32), and what is remembered, as `rows` does."""
        row, memory = self.rows(hidden, token, memory)
        return einsum("btm,vm->btv", row, vocabulary.share(self.w2[...], 0), jnp.float32), memory


class Confidence(nnx.Module):
    """How probable it is that a slot's token is accepted, if all before it are; a logit."""

    def __init__(self, config: DSparkConfig, dtype):
        inputs = config.hidden_size + config.markov_rank * config.confidence_markov
        self.proj, self.bias = nnx.Param(jnp.zeros((1, inputs), dtype)), nnx.Param(jnp.zeros((1,), dtype))

    def logits(self, *inputs: Float[Array, "B T _"]) -> Float[Array, "B T"]:
        """Returns the f32 logits of slots: of their hidden states, and of their rows of W1 where it reads them."""
        x = jnp.concatenate(inputs, -1)
        return einsum("bti,oi->bto", x, self.proj[...], jnp.float32)[..., 0] + self.bias[...].astype(jnp.float32)


def _affine(weight, bias, *inputs: Float[Array, "B T _"]) -> Float[Array, "B T _"]:
    """Multiplies the inputs, side by side, and adds the bias; in their dtype."""
    return einsum("bti,io->bto", jnp.concatenate(inputs, -1), weight[...]) + bias[...]
