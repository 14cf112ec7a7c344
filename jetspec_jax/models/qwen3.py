"""Qwen3 decoder: dense, mixture of experts, and (without q/k norms) the Llama layout.

Parameters are declared the way decoding wants them: one fused QKV and one fused gate-up array a layer, stored
[in, ...out]. Their middle axes are those that several devices would share: kv heads of qkv [E, K, G + 2, H] (each with
its G queries, key and value), features of gate_up [E, 2, F]. `checkpoint.py` alone knows the published names. The
forward never writes a cache: it returns fresh K/V, and the caller decides which rows to keep.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.backends.ops import XLA, Ops
from jetspec_jax.config import HeadConfig, ModelConfig
from jetspec_jax.layers import cache as kv_cache
from jetspec_jax.layers import moe, rope
from jetspec_jax.layers.cache import KV, Cache
from jetspec_jax.layers.numerics import einsum, rms_norm
from jetspec_jax.loop.contracts import Output


class Layer(nnx.Module):
    """One decoder layer. The draft head is built of its parts, with context rows that give keys and values only."""

    def __init__(self, config: ModelConfig | HeadConfig, dtype, index: int = 0):
        c = config
        self.config = c
        self.sparse = c.moe is not None and index in c.moe.sparse_layers

        def weight(*shape):
            return nnx.Param(jnp.zeros(shape, dtype))

        self.input_norm = weight(c.hidden_size)
        self.qkv = weight(c.hidden_size, c.num_kv_heads, c.num_heads // c.num_kv_heads + 2, c.head_dim)
        if c.qk_norm:
            self.q_norm, self.k_norm = weight(c.head_dim), weight(c.head_dim)
        self.out = weight(c.num_heads * c.head_dim, c.hidden_size)
        self.post_norm = weight(c.hidden_size)
        if c.moe is not None and self.sparse:
            x, f = c.moe.num_experts, c.moe.intermediate_size
            self.router = weight(c.hidden_size, x)
            self.gate_up, self.down = weight(x, c.hidden_size, 2, f), weight(x, f, c.hidden_size)
        else:
            self.gate_up = weight(c.hidden_size, 2, c.intermediate_size)
            self.down = weight(c.intermediate_size, c.hidden_size)

    def __call__(
        self,
        x: Float[Array, "B T E"],
        h: Float[Array, "B T E"],
        angles: rope.Rope,
        mask: Bool[Array, "_ T T"],
        prefix: KV | None = None,
        length: Int[Array, " B"] | None = None,
        ops: Ops = XLA,
    ) -> tuple[Float[Array, "B T E"], jax.Array, KV]:
        """Residual stream and the layer's last product, not yet added: whoever norms next adds it. K/V of the T rows.

        h: `x` under the layer's input norm.
        """
        q, k, v = self.project(h, angles, ops)
        x, product = self.after(x, ops.attend(q, (k, v), mask, prefix, length), ops)
        return x, product, (k, v)

    def normed(self, x: Float[Array, "B T E"]) -> Float[Array, "B T E"]:
        """What attention reads of the residual stream."""
        return rms_norm(x, self.input_norm[...], self.config.norm_eps)

    def project(
        self, h: Float[Array, "B T E"], angles: rope.Rope, ops: Ops = XLA
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
        """Rotated queries and keys, and values; keys and values in the cache's layout."""
        product = ops.matmul(h, self.qkv[...].reshape(h.shape[-1], -1))
        return ops.heads(product, self.qkv.shape[1:], self._norms, angles, self.config.norm_eps, h.dtype)

    def after(
        self, x: Float[Array, "B T E"], attended: Float[Array, "B T N H"], ops: Ops = XLA
    ) -> tuple[Float[Array, "B T E"], jax.Array]:
        """Output projection and feed-forward: the residual stream, and the product that is still to be added to it."""
        product = ops.matmul(attended.reshape(*x.shape[:2], -1), self.out[...])
        x, h = ops.add_norm(x, product, self.post_norm[...], self.config.norm_eps)
        return x, self._feed_forward(h, ops)

    def finish(self, x: Float[Array, "B T E"], attended: Float[Array, "B T N H"]) -> Float[Array, "B T E"]:
        """Output projection and feed-forward, each added to the residual stream."""
        x, product = self.after(x, attended)
        return x + product

    def context_kv(self, context: Float[Array, "B C E"], angles: rope.Rope) -> KV:
        """K/V of a draft head's context rows [B, K, C, H], without any query."""
        kv = einsum("bte,ekjh->btkjh", context, self.qkv[...][:, :, -2:])
        k, v = kv[..., 0, :], kv[..., 1, :]
        if self._norms is not None:
            k = rms_norm(k, self._norms[1], self.config.norm_eps)
        return rope.rotate(k, angles).swapaxes(1, 2), v.swapaxes(1, 2)

    @property
    def _norms(self):
        return (self.q_norm[...], self.k_norm[...]) if self.config.qk_norm else None

    def _feed_forward(self, h, ops: Ops):
        m = self.config.moe
        if m is not None and self.sparse:
            return moe.feed_forward(
                h, self.router[...], self.gate_up[...], self.down[...], m.experts_per_token, m.normalize_top_k
            )
        return ops.matmul(ops.swiglu(h, self.gate_up[...]), self.down[...])


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
        ops: Ops = XLA,
    ) -> Output:
        """Runs T fresh rows behind the first `length` slots of `cache`; tap i is the output of layer i (0-based)."""
        c = self.config
        x, product = self.embed(tokens), None
        angles = rope.angles(positions, c.head_dim, c.rope_theta, c.rope_scaling)
        fresh, streams = [], []
        for i, layer in enumerate(self.layers):
            x, h = ops.add_norm(x, product, layer.input_norm[...], c.norm_eps)
            streams.append(x)
            x, product, kv = layer(x, h, angles, mask, None if cache is None else cache[i], length, ops)
            fresh.append(kv)
        x, hidden = ops.add_norm(x, product, self.norm[...], c.norm_eps)
        streams.append(x)
        tapped = [streams[i + 1] for i in taps]
        return Output(hidden, tuple(fresh), jnp.concatenate(tapped, axis=-1) if taps else None)

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
    backend: Ops = XLA

    @property
    def vocab_size(self) -> int:
        return self.config.vocab_size

    def init_cache(self, params, batch: int, capacity: int) -> Cache:
        c = self.config
        dtype = params["embedding"].dtype
        return kv_cache.init(c.num_layers, batch, c.num_kv_heads, capacity, c.head_dim, dtype)

    def forward(self, params, tokens, positions, mask, cache=None, length=None, taps=()) -> Output:
        return self._module(params)(tokens, positions, mask, cache, length, taps, self.backend)

    def embed(self, params, tokens):
        return self._module(params).embed(tokens)

    def logits(self, params, hidden):
        return self._module(params).logits(hidden)

    def _module(self, params) -> Qwen3:
        return nnx.merge(self.graphdef, nnx.State(params))


def build(config: ModelConfig, dtype, ops: Ops = XLA) -> tuple[Qwen3Target, dict]:
    """The pure functions of a target and its parameters as shapes, to be filled from files or at random."""
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Qwen3(config, dtype)))
    return Qwen3Target(config, graphdef, ops), nnx.to_pure_dict(state)
