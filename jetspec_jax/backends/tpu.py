"""TPUs: our kernels for attention and for few rows of a mixture of experts, and XLA for everything else.

No TPU has run them yet.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jetspec_jax.backends.kernels import tpu_attention, tpu_experts
from jetspec_jax.backends.xla import XLA, by_kv_head

ROUTED = 256  # rows up to which experts are ours, each multiplied by all of them; reasoned, not measured
LONG = 512  # rows of a call up to which attention is ours; reasoned, not measured


@dataclasses.dataclass(frozen=True)
class TPU(XLA):
    """Kernels where heads and buffers, or experts, are whole tiles."""

    name: ClassVar[str] = "pallas"

    def attend(self, q, fresh, mask, prefix=None, length=None):
        slots = tpu_attention.LANES if prefix is None else prefix[0].shape[2]
        if q.shape[1] > LONG or not tpu_attention.supported(q.shape[-1], slots):
            return super().attend(q, fresh, mask, prefix, length)
        return tpu_attention.attend(by_kv_head(q, fresh[0].shape[1]), fresh, mask, prefix, length)

    def mixture(self, x, router, gate_up, down, experts_per_token, normalize_top_k, first=0):
        rows, (count, inner, hidden) = x.shape[0] * x.shape[1], down.shape
        some = count < router.shape[1]  # a device's part of them
        if some or rows > ROUTED or not tpu_experts.supported(hidden, inner):
            return super().mixture(x, router, gate_up, down, experts_per_token, normalize_top_k, first)
        weights = router, gate_up, down, experts_per_token, normalize_top_k
        return tpu_experts.mixture(x.reshape(rows, -1), *weights).reshape(x.shape)
