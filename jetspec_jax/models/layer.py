"""A decoder layer, and the one loop over layers: targets, draft heads and training all run through it.

Parameters are declared the way decoding wants them: one fused QKV and one fused gate-up array a layer, stored
[in, ...out]. Their middle axes are those that several devices would share: kv heads of qkv [E, K, G + 2, H] (each with
its G queries, key and value), features of gate_up [E, 2, F]. `files/checkpoint.py` alone knows the published names. No
layer writes a cache: the caller gets the fresh keys and values and decides which rows to keep.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax.backends.xla import PLAIN_XLA, XLA
from jetspec_jax.config import HeadConfig, ModelConfig, Sizes
from jetspec_jax.layers import rope
from jetspec_jax.layers.cache import KV
from jetspec_jax.layers.numerics import einsum, rms_norm

# The index of a layer, queries [B, T, N, H] and the keys and values beside them, to what is attended [B, T, N, H] and
# what the caller wants kept of the layer.
Attend = Callable[[int, jax.Array, KV], tuple[jax.Array, Any]]


class Layer(nnx.Module):
    """One decoder layer, dense or a mixture of experts, without its attention: what attends to what differs."""

    def __init__(self, config: Sizes, dtype, index: int = 0):
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

    def project(
        self, h: Float[Array, "B T E"], angles: rope.Rope, backend: XLA = PLAIN_XLA
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
        """Returns rotated queries and keys, and values, of normed rows; keys and values in the cache's layout."""
        product = backend.matmul(h, self.qkv[...].reshape(h.shape[-1], -1))
        return backend.heads(product, self.qkv.shape[2:], self._norms, angles, self.config.norm_eps, h.dtype)

    def after(
        self, x: Float[Array, "B T E"], attended: Float[Array, "B T N H"], backend: XLA = PLAIN_XLA
    ) -> tuple[Float[Array, "B T E"], jax.Array]:
        """Runs output projection and feed-forward.

        Returns the residual stream, and the last product, which is not yet added to it: whoever norms next adds it.
        """
        c, inner = self.config, self.out.shape[0]
        product = backend.matmul(attended.reshape(*x.shape[:2], -1), self.out[...])
        product = backend.joined(product, ("model",) if inner < c.num_heads * c.head_dim else (), x.dtype)
        x, h = backend.add_norm(x, product, self.post_norm[...], c.norm_eps)
        return x, self._feed_forward(h, backend)

    def context_kv(self, context: Float[Array, "B C E"], angles: rope.Rope) -> KV:
        """Returns keys and values [B, K, C, H] of a draft head's context rows, which ask nothing themselves."""
        kv = einsum("bte,ekjh->btkjh", context, self.qkv[...][:, :, -2:])
        k, v = kv[..., 0, :], kv[..., 1, :]
        if self._norms is not None:
            k = rms_norm(k, self._norms[1], self.config.norm_eps)
        return rope.rotate(k, angles).swapaxes(1, 2), v.swapaxes(1, 2)

    @property
    def _norms(self):
        return (self.q_norm[...], self.k_norm[...]) if self.config.qk_norm else None

    def _feed_forward(self, h, backend: XLA):
        m = self.config.moe
        if m is not None and self.sparse:
            experts, features = self.down.shape[:2]
            parts = ("expert",) * (experts < m.num_experts) + ("model",) * (features < m.intermediate_size)
            product = backend.mixture(
                h, self.router[...], self.gate_up[...], self.down[...], m.experts_per_token, m.normalize_top_k,
                experts * backend.place("expert") if "expert" in parts else 0,
            )  # fmt: skip
            return backend.joined(product, parts, h.dtype)
        product = backend.matmul(backend.swiglu(h, self.gate_up[...]), self.down[...])
        fewer = self.down.shape[0] < self.config.intermediate_size
        return backend.joined(product, ("model",) if fewer else (), h.dtype)


def kv_heads(params: dict) -> int:
    """Returns the kv heads of a stack's parameters, those that a device has where devices share them."""
    return params["layers"][0]["qkv"].shape[1]


class Ran(NamedTuple):
    """What rows leave on their way through the layers."""

    hidden: jax.Array  # [B, T, E] after the final norm
    streams: list[jax.Array]  # residual stream [B, T, E] after each layer
    kept: tuple[Any, ...]  # what `attend` kept of each layer


class Stack(nnx.Module):
    """Layers and the norm after them: what a target and a draft head have in common."""

    config: ModelConfig | HeadConfig

    def __init__(self, config: ModelConfig | HeadConfig, dtype):
        self.config = config
        self.layers = nnx.List([Layer(config, dtype, i) for i in range(config.num_layers)])
        self.norm = nnx.Param(jnp.zeros((config.hidden_size,), dtype))

    def angles(self, positions: Int[Array, "B T"]) -> rope.Rope:
        """Returns the rotations of these positions."""
        c = self.config
        return rope.angles(positions, c.head_dim, c.rope_theta, c.rope_scaling)

    def run(
        self,
        x: Float[Array, "B T E"],
        angles: rope.Rope,
        attend: Attend,
        backend: XLA = PLAIN_XLA,
        context: Float[Array, "B C E"] | None = None,
        remat: bool = False,
    ) -> Ran:
        """Runs rows through all layers and the final norm.

        Args:
          x: the rows.
          angles: of the context's positions, then of the rows'.
          attend: attends in every layer, and says what to keep of it.
          backend: what computes the rest.
          context: rows that every layer projects beside its own, in one product; they are not normed.
          remat: for training, keep only what enters a layer and compute the rest again.
        """
        product, streams, kept = None, [], []
        for i, layer in enumerate(self.layers):
            one = functools.partial(self._one, i, layer, angles, attend, backend, context)
            if remat and product is not None:
                x, product = x + product, None  # one array enters a layer, not two
            entered, x, product, mine = (jax.checkpoint(one) if remat else one)(x, product)
            streams.append(entered)
            kept.append(mine)
        x, hidden = backend.add_norm(x, product, self.norm[...], self.config.norm_eps)
        return Ran(hidden, [*streams[1:], x], tuple(kept))

    def _one(  # noqa: PLR0913  # `run`'s own, apart so that it can be made again in a backward pass
        self, i, layer, angles, attend, backend, context, x, product
    ):
        """Runs one layer. The last product of the layer before is added here, where the norm reads the sum anyway."""
        x, h = backend.add_norm(x, product, layer.input_norm[...], self.config.norm_eps)
        rows = h if context is None else jnp.concatenate([context, h], axis=1)
        q, k, v = layer.project(rows, angles, backend)
        attended, kept = attend(i, q, (k, v))
        return x, *layer.after(x, attended, backend), kept
