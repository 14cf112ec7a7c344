"""Which backend a user's choice means on this device."""

from __future__ import annotations

import jax

from jetspec_jax.backends.cudnn import CuDNN
from jetspec_jax.backends.hopper import Hopper
from jetspec_jax.backends.kernels import gpu_attention
from jetspec_jax.backends.tpu import TPU
from jetspec_jax.backends.xla import PLAIN_XLA, XLA
from jetspec_jax.fields import ConfigError
from jetspec_jax.options import BACKENDS


def resolve(choice: str, dtype: str, head_dim: int) -> XLA:
    """Returns the backend of a choice; auto is the fastest that was measured: our kernels for 16 bits on Hopper GPUs.

    On a TPU, where no device has run them, the kernels are there only when asked for.

    Args:
      choice: auto, xla, cudnn or pallas.
      dtype: of the weights.
      head_dim: of the target.

    Raises:
      ConfigError: the choice is unknown, or this device or model cannot run it.
    """
    if choice not in BACKENDS:
        raise ConfigError(f"backend={choice!r}: choose one of {', '.join(BACKENDS)}")
    device, half = jax.default_backend(), dtype != "float32"
    fits = gpu_attention.supported(head_dim)
    if choice == "auto":
        return Hopper() if half and fits and _is_hopper() else PLAIN_XLA
    if choice == "pallas":
        if not fits:
            raise ConfigError(f"backend=pallas: head_dim={head_dim} is no power of two of at least 16; use xla")
        return TPU() if device == "tpu" else Hopper()
    if choice == "cudnn":
        if device != "gpu" or not half:
            raise ConfigError(f"backend=cudnn: it needs an NVIDIA GPU and 16-bit weights (dtype={dtype}); use xla")
        return CuDNN()
    return PLAIN_XLA


def _is_hopper() -> bool:
    """Whether the devices are NVIDIA GPUs like the one that the sizes of tiles were measured on, or newer."""
    if jax.default_backend() != "gpu":
        return False
    device = jax.devices()[0]
    return "nvidia" in device.device_kind.lower() and float(getattr(device, "compute_capability", 0)) >= 9
