"""NVIDIA GPUs: our kernels for a whole layer and for the loop, where the sizes suit them.

The figures behind the rules are those of an H200 (docs/performance.md). Where there is no GPU the kernels run in the
interpreter, which is exact and slow.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

import jax

from jetspec_jax.backends.kernels import gpu_attention, gpu_experts, gpu_layer, gpu_loop
from jetspec_jax.backends.xla import XLA, by_kv_head

NARROW, FEW = 64, 128  # rows up to which our swiglu, and our other products, beat XLA's choice
ROUTED = 256  # rows up to which experts are ours: they still get few each
LONG = 512  # rows of a call up to which attention is ours: rounds, and prompts read in chunks of the default size


@dataclasses.dataclass(frozen=True)
class Hopper(XLA):
    """Kernels for attention, few-row products, what lies between them, experts, commit and best-first trees."""

    name: ClassVar[str] = "pallas"

    def matmul(self, x, w):
        rows = x.shape[0] * x.shape[1]
        few = rows <= (FEW if w.shape[0] > w.shape[1] else 2 * FEW)  # a longer sum is cut into more parts
        if not few or not gpu_layer.tileable(*w.shape):
            return super().matmul(x, w)
        parts = gpu_layer.matmul(x.reshape(rows, -1), w, _interpreted())
        return parts.reshape(-1, *x.shape[:2], w.shape[1])

    def swiglu(self, x, gate_up):
        rows, (inner, _, outer) = x.shape[0] * x.shape[1], gate_up.shape
        if rows > NARROW or not gpu_layer.tileable(inner, outer):
            return super().swiglu(x, gate_up)
        return gpu_layer.swiglu(x.reshape(rows, -1), gate_up, _interpreted()).reshape(*x.shape[:2], outer)

    def mixture(self, x, router, gate_up, down, experts_per_token, normalize_top_k, first=0):
        rows, (inner, hidden) = x.shape[0] * x.shape[1], down.shape[1:]
        if rows > ROUTED or not gpu_experts.supported(hidden, inner, router.shape[1]):
            return super().mixture(x, router, gate_up, down, experts_per_token, normalize_top_k, first)
        top = gpu_experts.TopK(experts_per_token, normalize_top_k)
        given = x.reshape(rows, -1), router, gate_up, down, top, first
        return gpu_experts.mixture(*given, interpret=_interpreted()).reshape(-1, *x.shape)

    def add_norm(self, x, product, weight, eps):
        flat = None if product is None else product.reshape(-1, x.shape[0] * x.shape[1], x.shape[2])
        out = gpu_layer.add_norm(x.reshape(-1, x.shape[2]), flat, weight, eps, _interpreted())
        return out[0].reshape(x.shape), out[1].reshape(x.shape)

    def heads(self, product, shape, norms, angles, eps, dtype):
        width, dim = shape
        if not gpu_attention.supported(dim):
            return super().heads(product, shape, norms, angles, eps, dtype)
        batch, nodes, columns = product.shape[-3:]
        kv_heads = columns // (width * dim)
        parts = product.reshape(-1, batch, nodes, kv_heads, width * dim)
        q, k, v = gpu_layer.heads(parts, norms, angles, eps, dtype, _interpreted())
        q = q.reshape(batch, kv_heads, nodes, width - 2, dim).swapaxes(1, 2)
        return q.reshape(batch, nodes, -1, dim), k, v

    def attend(self, q, fresh, mask, prefix=None, length=None):
        if q.shape[1] > LONG or not gpu_attention.supported(q.shape[-1]):
            return super().attend(q, fresh, mask, prefix, length)
        rows = by_kv_head(q, fresh[0].shape[1])
        return gpu_attention.attend(rows, fresh, mask, prefix, length, _interpreted())

    def commit(self, cache, fresh, path, start):
        if not all(gpu_attention.supported(k.shape[-1]) for k, _ in cache):
            return super().commit(cache, fresh, path, start)
        return gpu_loop.commit(cache, fresh, path, start, _interpreted())

    def grow(self, builder, candidates, nodes):
        if builder != "best_first":
            return super().grow(builder, candidates, nodes)
        return gpu_loop.grow(candidates.logp, candidates.token, nodes, _interpreted())


def _interpreted() -> bool:
    return jax.default_backend() != "gpu"
