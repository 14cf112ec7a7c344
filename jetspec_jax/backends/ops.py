"""The operations of a decoder layer, and the rule that chooses how each is computed.

`Ops()` is plain XLA: it runs everywhere, it can be differentiated, and it is what the kernels are tested against. A
target and its head carry one `Ops`; `resolve` turns the user's choice into it. What the rules rest on is in
docs/performance.md.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.backends.kernels import gpu_attention, gpu_layer, gpu_loop, tpu_attention
from jetspec_jax.config import ConfigError
from jetspec_jax.layers import attention, rope
from jetspec_jax.layers.cache import KV, Cache, take, write
from jetspec_jax.layers.numerics import einsum, rms_norm
from jetspec_jax.loop import tree

ATTENTIONS = ("auto", "xla", "cudnn", "pallas")
NARROW, FEW = 64, 128  # rows up to which our swiglu, and our other products, beat XLA's choice
LONG = 512  # rows of a call up to which attention is ours: rounds, and prompts read in chunks of the default size

Norms = tuple[jax.Array, jax.Array] | None  # weights of the q and k norms, [H] each


@dataclasses.dataclass(frozen=True)
class Ops:
    """attention: xla, cudnn or pallas; pallas brings the kernels for everything else along, where there are any.

    A product is an array [B, T, O], or partial sums [S, B, T, O] in f32 that the next operation adds up.
    """

    attention: str = "xla"

    @property
    def kernels(self) -> bool:
        """Whether the rest of a layer and the loop may use our kernels: TPUs have one for attention alone."""
        return self.attention == "pallas" and jax.default_backend() != "tpu"

    def matmul(self, x: Float[Array, "B T A"], w: Float[Array, "A O"]) -> jax.Array:
        """x @ w as a product."""
        rows = x.shape[0] * x.shape[1]
        few = rows <= (FEW if w.shape[0] > w.shape[1] else 2 * FEW)  # a longer sum is cut into more parts
        if self.kernels and few and gpu_layer.tileable(*w.shape):
            parts = gpu_layer.matmul(x.reshape(rows, -1), w, _interpreted())
            return parts.reshape(-1, *x.shape[:2], w.shape[1])
        return einsum("bta,ao->bto", x, w)

    def swiglu(self, x: Float[Array, "B T E"], gate_up: Float[Array, "E 2 F"]) -> Float[Array, "B T F"]:
        """silu(x @ gate) * (x @ up)."""
        rows, (inner, _, outer) = x.shape[0] * x.shape[1], gate_up.shape
        if self.kernels and rows <= NARROW and gpu_layer.tileable(inner, outer):
            return gpu_layer.swiglu(x.reshape(rows, -1), gate_up, _interpreted()).reshape(*x.shape[:2], outer)
        gate, up = jnp.split(einsum("bte,ef->btf", x, gate_up.reshape(inner, 2 * outer)), 2, axis=-1)
        return jax.nn.silu(gate) * up

    def add_norm(
        self, x: Float[Array, "B T E"], product: jax.Array | None, weight: Float[Array, " E"], eps: float
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"]]:
        """The residual stream with a product added (None adds nothing), and its RMSNorm."""
        if self.kernels:
            flat = None if product is None else product.reshape(-1, x.shape[0] * x.shape[1], x.shape[2])
            out = gpu_layer.add_norm(x.reshape(-1, x.shape[2]), flat, weight, eps, _interpreted())
            return out[0].reshape(x.shape), out[1].reshape(x.shape)
        if product is not None:
            x = x + product
        return x, rms_norm(x, weight, eps)

    def heads(
        self, product: jax.Array, shape: tuple[int, int, int], norms: Norms, angles: rope.Rope, eps: float, dtype
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B K T H"], Float[Array, "B K T H"]]:
        """Queries, keys and values out of the fused product; q and k normed and rotated.

        shape: (K, G + 2, H): each kv head's G queries, key and value lie side by side.
        """
        kv_heads, width, dim = shape
        batch, nodes = product.shape[-3:-1]
        if self.kernels and gpu_attention.supported(dim):
            parts = product.reshape(-1, batch, nodes, kv_heads, width * dim)
            q, k, v = gpu_layer.heads(parts, norms, angles, eps, dtype, _interpreted())
            q = q.reshape(batch, kv_heads, nodes, width - 2, dim).swapaxes(1, 2)
            return q.reshape(batch, nodes, -1, dim), k, v
        split = total(product, dtype).reshape(batch, nodes, kv_heads, width, dim)
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
        """As `attention.attend`."""
        batch, nodes, _, dim = q.shape
        tpu = jax.default_backend() == "tpu"
        slots = prefix[0].shape[2] if prefix is not None else tpu_attention.LANES
        fits = tpu_attention.supported(dim, slots) if tpu else gpu_attention.supported(dim)
        if self.attention == "pallas" and nodes <= LONG and fits:
            kv_heads = fresh[0].shape[1]
            q = q.reshape(batch, nodes, kv_heads, -1, dim).swapaxes(1, 2).reshape(batch, kv_heads, -1, dim)
            if tpu:
                return tpu_attention.attend(q, fresh, mask, prefix, length)
            return gpu_attention.attend(q, fresh, mask, prefix, length, _interpreted())
        return attention.attend(q, fresh, mask, prefix, length, "cudnn" if self.attention == "cudnn" else "xla")

    def commit(self, cache: Cache, fresh: Cache, path: Int[Array, "B R"], start: Int[Array, " B"]) -> Cache:
        """Writes the fresh rows of `path` to slots start..start+R-1 of every layer."""
        if self.kernels and all(gpu_attention.supported(k.shape[-1]) for k, _ in cache):
            return gpu_loop.commit(cache, fresh, path, start, _interpreted())
        return write(cache, take(fresh, path), start)

    def grow(
        self, builder: str, candidates: tree.Candidates, nodes: int
    ) -> tuple[Int[Array, "B T"], Int[Array, "B T"], Int[Array, "B T"], Int[Array, " B"]]:
        """As `tree.grow`."""
        if self.kernels and builder == "best_first":
            return gpu_loop.grow(candidates.logp[:, :, 0], candidates.token, nodes, _interpreted())
        return tree.grow(builder, candidates, nodes)


XLA = Ops()


def total(product: jax.Array, dtype) -> Float[Array, "B T O"]:
    """The value of a product."""
    return product.sum(0).astype(dtype) if product.ndim == 4 else product


def resolve(choice: str, dtype: str, head_dim: int) -> Ops:
    """What a user's `--attention` means on this device: auto takes the kernels for 16-bit weights on Hopper GPUs.

    On a TPU pallas is attention alone, and only when asked for: no TPU has run it yet.

    Raises:
      ConfigError: the choice is unknown, or this device or model cannot run it.
    """
    if choice not in ATTENTIONS:
        raise ConfigError(f"attention={choice!r}: choose one of {', '.join(ATTENTIONS)}")
    gpu, half = jax.default_backend() == "gpu", dtype != "float32"
    fits = gpu_attention.supported(head_dim)
    if choice == "auto":
        return Ops("pallas") if half and fits and _hopper() else XLA
    if choice == "pallas" and not fits:
        raise ConfigError(f"attention=pallas: head_dim={head_dim} is no power of two of at least 16; use xla")
    if choice == "cudnn" and not (gpu and half):
        raise ConfigError(f"attention=cudnn: it needs an NVIDIA GPU and 16-bit weights (dtype={dtype}); use xla")
    return Ops(choice)


def _hopper() -> bool:
    """Whether the devices are NVIDIA GPUs like the one that the sizes of tiles were measured on, or newer."""
    if jax.default_backend() != "gpu":
        return False
    device = jax.devices()[0]
    return "nvidia" in device.device_kind.lower() and float(getattr(device, "compute_capability", 0)) >= 9


def _interpreted() -> bool:
    """Where there is no GPU the kernels run in the interpreter: right, and slow."""
    return jax.default_backend() != "gpu"
