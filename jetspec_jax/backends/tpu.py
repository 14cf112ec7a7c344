"""TPUs: our attention kernel, and XLA for everything else. No TPU has run it yet."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from jetspec_jax.backends.kernels import tpu_attention
from jetspec_jax.backends.xla import XLA, by_kv_head

LONG = 512  # rows of a call up to which attention is ours; reasoned, not measured


@dataclasses.dataclass(frozen=True)
class TPU(XLA):
    """A kernel for attention, where heads and buffers are whole tiles."""

    name: ClassVar[str] = "pallas"

    def attend(self, q, fresh, mask, prefix=None, length=None):
        slots = tpu_attention.LANES if prefix is None else prefix[0].shape[2]
        if q.shape[1] > LONG or not tpu_attention.supported(q.shape[-1], slots):
            return super().attend(q, fresh, mask, prefix, length)
        return tpu_attention.attend(by_kv_head(q, fresh[0].shape[1]), fresh, mask, prefix, length)
