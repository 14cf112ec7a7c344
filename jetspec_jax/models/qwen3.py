"""Qwen3 decoder: dense, mixture of experts, and (without q/k norms) the Llama layout.

Parameters are declared the way decoding wants them: one fused QKV and one fused gate-up matrix a layer, stored
[in, out]. `checkpoint.py` alone knows the published names. The forward never writes a cache: it returns fresh K/V, and
the caller decides which rows to keep.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax import cache as kv_cache
from jetspec_jax import moe, rope
from jetspec_jax.attention import attend
from jetspec_jax.cache import KV, Cache
from jetspec_jax.config import HeadConfig, ModelConfig
from jetspec_jax.models import Output
from jetspec_jax.numerics import einsum, rms_norm


class Layer(nnx.Module):
    """One decoder layer. The draft head is built of its parts, with context rows that give keys and values only."""

    def __init__(self, config: ModelConfig | HeadConfig, dtype, index: int = 0):
        c = config
        self.config = c
        self.sparse = c.moe is not None and index in c.moe.sparse_layers

        def weight(*shape):
            return nnx.Param(jnp.zeros(shape, dtype))

        self.input_norm = weight(c.hidden_size)
        self.qkv = weight(c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim)
        if c.qk_norm:
            self.q_norm, self.k_norm = weight(c.head_dim), weight(c.head_dim)
        self.out = weight(c.num_heads * c.head_dim, c.hidden_size)
        self.post_norm = weight(c.hidden_size)
        if c.moe is not None and self.sparse:
            x, f = c.moe.num_experts, c.moe.intermediate_size
            self.router = weight(c.hidden_size, x)
            self.gate_up, self.down = weight(x, c.hidden_size, 2 * f), weight(x, f, c.hidden_size)
        else:
            self.gate_up = weight(c.hidden_size, 2 * c.intermediate_size)
            self.down = weight(c.intermediate_size, c.hidden_size)

    def __call__(
        self,
        x: Float[Array, "B T E"],
        angles: rope.Rope,
        mask: Bool[Array, "_ T T"],
        prefix: KV | None = None,
        length: Int[Array, " B"] | None = None,
    ) -> tuple[Float[Array, "B T E"], KV]:
        """Residual stream after the layer, and K/V of the T rows."""
        q, k, v = self.project(self.normed(x), angles)
        return self.finish(x, attend(q, (k, v), mask, prefix, length)), (k, v)

    def normed(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """What attention reads of the residual stream."""
        return rms_norm(x, self.input_norm[...], self.config.norm_eps)

    def project(
        self, h: Float[Array, "B T E"], angles: rope.Rope
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
        """Rotated queries and keys, and values; keys and values in the cache's layout."""
        c = self.config
        sizes = c.num_heads, c.num_kv_heads, c.num_kv_heads
        qkv = einsum("bte,eh->bth", h, self.qkv[...]).reshape(*h.shape[:2], sum(sizes), c.head_dim)
        q, k, v = jnp.split(qkv, (sizes[0], sizes[0] + sizes[1]), axis=2)
        if c.qk_norm:
            q, k = rms_norm(q, self.q_norm[...], c.norm_eps), rms_norm(k, self.k_norm[...], c.norm_eps)
        return rope.rotate(q, angles), rope.rotate(k, angles).swapaxes(1, 2), v.swapaxes(1, 2)

    def finish(self, x: Float[Array, "B T E"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T E"]:
        """Output projection and feed-forward, each added to the residual stream."""
        x = x + einsum("bth,he->bte", attended.reshape(*x.shape[:2], -1), self.out[...])
        return x + self._feed_forward(rms_norm(x, self.post_norm[...], self.config.norm_eps))

    def context_kv(self, context: Float[Array, "B C E"], angles: rope.Rope) -> KV:
        """K/V of a draft head's context rows [B, K, C, H], without any query."""
        c = self.config
        kv = einsum("bte,eh->bth", context, self.qkv[...][:, c.num_heads * c.head_dim :])
        k, v = jnp.split(kv.reshape(*kv.shape[:2], 2 * c.num_kv_heads, c.head_dim), 2, axis=2)
        if c.qk_norm:
            k = rms_norm(k, self.k_norm[...], c.norm_eps)
        return rope.rotate(k, angles).swapaxes(1, 2), v.swapaxes(1, 2)

    def _feed_forward(self, h):
        if self.sparse:
            m = self.config.moe
            return moe.feed_forward(
                h, self.router[...], self.gate_up[...], self.down[...], m.experts_per_token, m.normalize_top_k
            )
        gate, up = jnp.split(einsum("bte,ef->btf", h, self.gate_up[...]), 2, axis=-1)
        return einsum("btf,fe->bte", jax.nn.silu(gate) * up, self.down[...])


class Qwen3(nnx.Module):
    """The target: embedding, layers, final norm and lm_head (absent where it is tied to the embedding)."""

    def __init__(self, config: ModelConfig, dtype):
        self.config = config
        self.embedding = nnx.Param(jnp.zeros((config.vocab_size, config.hidden_size), dtype))
        self.layers = nnx.List([Layer(config, dtype, i) for i in range(config.num_layers)])
        self.norm = nnx.Param(jnp.zeros((config.hidden_size,), dtype))
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
    ) -> Output:
        """Runs T fresh rows behind the first `length` slots of `cache`; tap i is the output of layer i (0-based)."""
        c = self.config
        x = self.embed(tokens)
        angles = rope.angles(positions, c.head_dim, c.rope_theta, c.rope_scaling)
        fresh, tapped = [], {}
        for i, layer in enumerate(self.layers):
            x, kv = layer(x, angles, mask, None if cache is None else cache[i], length)
            fresh.append(kv)
            if i in taps:
                tapped[i] = x
        side_by_side = jnp.concatenate([tapped[i] for i in taps], axis=-1) if taps else None
        return Output(rms_norm(x, self.norm[...], c.norm_eps), tuple(fresh), side_by_side)

    def embed(self, tokens: Int[Array, "*rows"]) -> Float[Array, "*rows E"]:
        """Rows of the embedding table."""
        return self.embedding[...][tokens]

    def logits(self, hidden: Float[Array, "*rows E"]) -> Float[Array, "*rows V"]:
        """f32 logits of final hidden states, the target's or the head's."""
        table = self.embedding if self.config.tie_embeddings else self.lm_head
        return einsum("...e,ve->...v", hidden, table[...], jnp.float32)


@dataclasses.dataclass(frozen=True)
class Qwen3Target:
    """The model as pure functions; implements `models.Target`. Equal configurations are equal targets."""

    config: ModelConfig
    graphdef: nnx.GraphDef = dataclasses.field(compare=False, repr=False)

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def init_cache(self, params, batch: int, capacity: int) -> Cache:
        c = self.config
        dtype = params["embedding"].dtype
        return kv_cache.init(c.num_layers, batch, c.num_kv_heads, capacity, c.head_dim, dtype)

    def forward(self, params, tokens, positions, mask, cache=None, length=None, taps=()) -> Output:
        return self._module(params)(tokens, positions, mask, cache, length, taps)

    def embed(self, params, tokens):
        return self._module(params).embed(tokens)

    def logits(self, params, hidden):
        return self._module(params).logits(hidden)

    def _module(self, params) -> Qwen3:
        return nnx.merge(self.graphdef, nnx.State(params))


def build(config: ModelConfig, dtype) -> tuple[Qwen3Target, dict]:
    """The pure functions of a target and its parameters as shapes, to be filled from files or at random."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Qwen3(config, dtype)))
    return Qwen3Target(config, graphdef), nnx.to_pure_dict(state)
