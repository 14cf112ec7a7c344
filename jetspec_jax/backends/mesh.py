"""Several devices: another backend, which computes each device's part, and the sums that join the parts.

A program runs on every device of the mesh at once, each with its rows of the batch and its part of the weights
(`jax.shard_map`). Layers and loop are the same as on one device: they read sizes off their arrays, a product whose sum
was split is joined here, and what looks at the whole vocabulary exchanges a few numbers a row
(`layers/vocabulary.py`). Groups of devices with other rows exchange nothing, so that each runs its own rounds.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from jetspec_jax.backends.xla import XLA, total


@dataclasses.dataclass(frozen=True)
class Sharded(XLA):
    """Another backend on each device of a mesh.

    inner: what computes a device's part.
    mesh: with the axes `data`, `model` and perhaps `expert`.
    experts: axis over which experts are split.
    vocabulary: axis over which the vocabulary is split; None where every device has all of it.
    """

    inner: XLA
    mesh: Mesh | AbstractMesh
    experts: str = "model"
    vocabulary: str | None = "model"

    name: ClassVar[str] = property(lambda self: self.inner.name)  # type: ignore[assignment]
    groups: ClassVar[int] = property(lambda self: self.mesh.shape["data"])  # type: ignore[assignment]

    def matmul(self, x, w):
        return self.inner.matmul(x, w)

    def swiglu(self, x, gate_up):
        return self.inner.swiglu(x, gate_up)

    def mixture(self, x, router, gate_up, down, experts_per_token, normalize_top_k, first=0):
        return self.inner.mixture(x, router, gate_up, down, experts_per_token, normalize_top_k, first)

    def add_norm(self, x, product, weight, eps):
        return self.inner.add_norm(x, product, weight, eps)

    def heads(self, product, shape, norms, angles, eps, dtype):
        return self.inner.heads(product, shape, norms, angles, eps, dtype)

    def attend(self, q, fresh, mask, prefix=None, length=None):
        return self.inner.attend(q, fresh, mask, prefix, length)

    def commit(self, cache, fresh, path, start):
        return self.inner.commit(cache, fresh, path, start)

    def grow(self, builder, candidates, nodes):
        return self.inner.grow(builder, candidates, nodes)

    def joined(self, product, parts, dtype):
        if not parts:
            return product
        own = total(product, product.dtype)
        return jax.lax.psum(own, tuple(self._axis(part) for part in parts)).astype(dtype)

    def place(self, part):
        return jax.lax.axis_index(self._axis(part)).astype(jnp.int32)

    def _axis(self, part: str) -> str:
        return self.experts if part == "expert" else part
