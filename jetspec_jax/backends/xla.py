"""Plain XLA: the operations of a decoder layer and of the loop, as every device computes them.

It runs everywhere, it can be differentiated, and it is what the kernels are tested against. The other backends are
subclasses that override what they compute in another way. A method reads sizes off its arrays and not off the model: a
backend may be given one device's share of them.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.layers import attention, moe, rope
from jetspec_jax.layers.cache import KV, Cache, take, write
from jetspec_jax.layers.numerics import einsum, rms_norm
from jetspec_jax.loop import tree

Norms = tuple[jax.Array, jax.Array] | None  # weights of the q and k norms, [H] each


@dataclasses.dataclass(frozen=True)
class XLA:
    """The base of all backends. A target and its head carry one; it is static in a program, so it hashes.

    A product is an array [B, T, O], or partial sums [parts, B, T, O] in f32 that the next operation adds up.
    """

    name: ClassVar[str] = "xla"  # as a user chooses it
    groups: ClassVar[int] = 1  # of devices, among which the rows of a batch are dealt out

    def matmul(self, x: Float[Array, "B T A"], w: Float[Array, "A O"]) -> jax.Array:
        """Returns x @ w as a product."""
        return einsum("bta,ao->bto", x, w)

    def swiglu(self, x: Float[Array, "B T E"], gate_up: Float[Array, "E 2 F"]) -> Float[Array, "B T F"]:
        """Returns silu(x @ gate) * (x @ up)."""
        inner, _, outer = gate_up.shape
        gate, up = jnp.split(einsum("bte,ef->btf", x, gate_up.reshape(inner, 2 * outer)), 2, axis=-1)
        return jax.nn.silu(gate) * up

    def mixture(
        self,
        x: Float[Array, "B T E"],
        router: Float[Array, "E X"],
        gate_up: Float[Array, "Y E 2 F"],
        down: Float[Array, "Y F E"],
        experts_per_token: int,
        normalize_top_k: bool,
        first: int | Int[Array, ""] = 0,
    ) -> jax.Array:
        """Returns what the rows' experts make of them as a product; arguments of `moe.feed_forward`."""
        return moe.feed_forward(x, router, gate_up, down, experts_per_token, normalize_top_k, first)

    def add_norm(
        self, x: Float[Array, "B T E"], product: jax.Array | None, weight: Float[Array, " E"], eps: float
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"]]:
        """Returns the residual stream with a product added (None adds nothing), and its RMSNorm."""
        if product is not None:
            x = x + product
        return x, rms_norm(x, weight, eps)

    def heads(
        self, product: jax.Array, shape: tuple[int, int], norms: Norms, angles: rope.Rope, eps: float, dtype
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
        """Splits the fused product into queries, keys and values, and norms and rotates queries and keys.

        Args:
          product: of the layer's qkv weight; each kv head's G queries, key and value lie side by side.
          shape: (G + 2, H).
          norms: of queries and keys, or None.
          angles: of the rows' positions.
          eps: of the norms.
          dtype: of the result, which partial sums do not tell.
        """
        width, dim = shape
        batch, nodes = product.shape[-3:-1]
        split = total(product, dtype).reshape(batch, nodes, -1, width, dim)
        q, k, v = split[..., : width - 2, :].reshape(batch, nodes, -1, dim), split[..., -2, :], split[..., -1, :]
        if norms is not None:
            q, k = rms_norm(q, norms[0], eps), rms_norm(k, norms[1], eps)
        return rope.rotate(q, angles), rope.rotate(k, angles).swapaxes(1, 2), v.swapaxes(1, 2)

    def attend(
        self,
        q: Float[Array, "B T N H"],
        fresh: KV,
        mask: Bool[Array, "_ T R"],
        prefix: KV | None = None,
        length: Int[Array, " B"] | None = None,
    ) -> Float[Array, "B T N H"]:
        """Returns the rows' attention over a committed prefix and over fresh keys; arguments of `attention.attend`."""
        return attention.attend(q, fresh, mask, prefix, length)

    def joined(self, product: jax.Array, parts: tuple[str, ...], dtype) -> jax.Array:
        """Returns the whole of a product that several devices have parts of.

        Args:
          product: of this device.
          parts: by what its sum was split, `model` or `expert`; none where it is whole.
          dtype: of the rows.
        """
        return product

    def place(self, part: str) -> int | Int[Array, ""]:
        """Returns which part this device has of what is split by `model` or `expert`."""
        return 0

    def commit(self, cache: Cache, fresh: Cache, path: Int[Array, "B R"], start: Int[Array, " B"]) -> Cache:
        """Writes the fresh rows of `path` to slots start..start+R-1 of every layer, and returns the cache."""
        return write(cache, take(fresh, path), start)

    def grow(self, builder: str, candidates: tree.Candidates, nodes: int) -> tree.Grown:
        """Returns tokens, parents, depths and number of the first `nodes` nodes of a tree; see `tree.grow`."""
        return tree.grow(builder, candidates, nodes)


PLAIN_XLA = XLA()


def total(product: jax.Array, dtype) -> Float[Array, "B T O"]:
    """Returns the value of a product."""
    return product.sum(0).astype(dtype) if product.ndim == 4 else product


def by_kv_head(q: Float[Array, "B T N H"], kv_heads: int) -> Float[Array, "B K M H"]:
    """Sorts queries by the kv head that they read, as the kernels take them: the G heads of a node side by side."""
    batch, nodes, _, dim = q.shape
    return q.reshape(batch, nodes, kv_heads, -1, dim).swapaxes(1, 2).reshape(batch, kv_heads, -1, dim)
