"""The Qwen3 decoder: dense, mixture of experts, and (without q/k norms) the Llama layout."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.backends.xla import PLAIN_XLA, XLA
from jetspec_jax.config import ModelConfig
from jetspec_jax.layers import cache as kv_cache
from jetspec_jax.layers import vocabulary
from jetspec_jax.layers.cache import Cache
from jetspec_jax.layers.numerics import einsum
from jetspec_jax.loop.contracts import Output
from jetspec_jax.models.layer import Stack, kv_heads


class Qwen3(Stack):
    """The target: embedding, layers, final norm and lm_head (absent where it is tied to the embedding)."""

    config: ModelConfig

    def __init__(self, config: ModelConfig, dtype):
        super().__init__(config, dtype)
        self.embedding = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        if not config.tie_embeddings:
            self.lm_head = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))

    def __call__(
        self,
        tokens: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        mask: Bool[Array, "_ T T"],
        cache: Cache | None = None,
        length: Int[Array, " B"] | None = None,
        taps: tuple[int, ...] = (),
        backend: XLA = PLAIN_XLA,
    ) -> Output:
        """Runs T fresh rows after the committed ones; arguments of `contracts.Target.forward`."""

        def attend(i, q, fresh):
            return backend.attend(q, fresh, mask, None if cache is None else cache[i], length), fresh

        ran = self.run(self.embed(tokens), self.angles(positions), attend, backend)
        tapped = [ran.streams[i] for i in taps]
        return Output(ran.hidden, ran.kept, jnp.concatenate(tapped, axis=-1) if taps else None)

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows E"]:
        """Returns rows of the embedding table."""
        return vocabulary.rows(self.embedding[...], tokens)

    def logits(self, hidden: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """Returns f32 logits of final hidden states, the target's or the head's."""
        table = self.embedding if self.config.tie_embeddings else self.lm_head
        return einsum("...e,ve->...v", hidden, table[...], jnp.float32)


@dataclasses.dataclass(frozen=True)
class Qwen3Target:
    """The model as pure functions; implements `contracts.Target`. Equal configurations are equal targets."""

    config: ModelConfig
    graphdef: nnx.GraphDef = dataclasses.field(compare=False, repr=False)
    backend: XLA = PLAIN_XLA

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def init_cache(self, params, batch: int, capacity: int) -> Cache:
        c, dtype = self.config, params["embedding"].dtype
        return kv_cache.init(c.num_layers, batch, kv_heads(params), capacity, c.head_dim, dtype)

    def forward(self, params, tokens, positions, mask, cache=None, length=None, taps=()) -> Output:
        return self._module(params)(tokens, positions, mask, cache, length, taps, self.backend)

    def embed(self, params, tokens):
        return self._module(params).embed(tokens)

    def logits(self, params, hidden):
        return self._module(params).logits(hidden)

    def _module(self, params) -> Qwen3:
        return nnx.merge(self.graphdef, nnx.State(params))


def build(config: ModelConfig, dtype, backend: XLA = PLAIN_XLA) -> tuple[Qwen3Target, dict]:
    """Returns the pure functions of a target, and its parameters as shapes, to be filled from files or at random."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Qwen3(config, dtype)))
    return Qwen3Target(config, graphdef, backend), nnx.to_pure_dict(state)
