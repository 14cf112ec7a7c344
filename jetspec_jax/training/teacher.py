"""The frozen target over packed sequences: tapped layers for the head's input, final hidden states for the loss."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.layers.attention import attend
from jetspec_jax.models.layer import Ran
from jetspec_jax.models.qwen3 import Qwen3Target


class Features(NamedTuple):
    """Of B sequences, or of all M that are kept; jax arrays, or numpy arrays on their way from files."""

    taps: Any  # [B, S, F] tapped layers side by side
    final: Any  # [B, S, E] after the target's final norm: lm_head makes the teacher's logits of it


def run(
    target: Qwen3Target,
    params: dict,
    tokens: Int[Array, "B S"],
    document: Int[Array, "B S"],
    position: Int[Array, "B S"],
    taps: tuple[int, ...],
    attention: str = "xla",
) -> Features:
    """Runs every document of every sequence as if it stood alone.

    position: within the document. attention: "xla", or "cudnn" for the fused kernel of NVIDIA GPUs (16-bit only).
    """
    ran = _run(target, params, tokens, document, position, visible(document), attention)
    return Features(jnp.concatenate([ran.streams[i] for i in taps], axis=-1), ran.hidden)


def after(
    target: Qwen3Target,
    params: dict,
    tokens: Int[Array, "B S"],
    others: Int[Array, "B S"],
    document: Int[Array, "B S"],
    position: Int[Array, "B S"],
    attention: str = "xla",
) -> Float[Array, "B S E"]:
    """Returns the final hidden states of `others`, each in the place of one token of the text, after those before it.

    Text and others run side by side: an other sees what the text's token sees in its place, and itself.
    """
    twice = lambda x: jnp.concatenate([x, x], axis=1)
    seen, itself = visible(document), jnp.eye(tokens.shape[1], dtype=bool)
    mask = jnp.block([[seen, jnp.zeros_like(seen)], [seen & ~itself, jnp.broadcast_to(itself, seen.shape)]])
    both = jnp.concatenate([tokens, others], axis=1)
    return _run(target, params, both, twice(document), twice(position), mask, attention).hidden[:, tokens.shape[1] :]


def _run(target: Qwen3Target, params, tokens, document, position, mask: Bool[Array, "B R R"], attention: str) -> Ran:
    """mask: none of it above the diagonal."""
    model = nnx.merge(target.graphdef, nnx.State(params))

    def own(_, q, kv):
        return fused(q, *kv, mask, True) if attention == "cudnn" else attend(q, kv, mask), None

    x = jnp.where((document > 0)[..., None], model.embed(tokens), 0)  # the padding token's embedding may be NaN
    return model.run(x, model.angles(position), own)


def unembedding(params: dict) -> jax.Array:
    """Returns lm_head [V, E] of the target; a tied one is its embedding."""
    return params["lm_head"] if "lm_head" in params else params["embedding"]


def visible(document: Int[Array, "B S"]) -> Bool[Array, "B S S"]:
    """Returns a mask that is causal within each document. Padding is a document too, so that no row is empty."""
    return (document[:, :, None] == document[:, None]) & jnp.tril(jnp.ones((document.shape[1],) * 2, bool))


def fused(
    q: Float[Array, "B T N H"],
    k: Float[Array, "B K R H"],
    v: Float[Array, "B K R H"],
    mask: Bool[Array, "_ T R"],
    causal: bool = False,
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B T N H"]:
    """Computes attention in one kernel that keeps no score; `causal` says that the mask is, so half can be left out."""
    return jax.nn.dot_product_attention(
        q, k.swapaxes(1, 2), v.swapaxes(1, 2), mask=mask[:, None], is_causal=causal, implementation=implementation
    )


def kernel(choice: str, dtype) -> str:
    """Returns the attention that "auto" means here: cuDNN's on an NVIDIA GPU in 16 bits."""
    if choice != "auto":
        return choice
    cuda = any("nvidia" in d.device_kind.lower() for d in jax.local_devices())
    return "cudnn" if cuda and jnp.dtype(dtype).itemsize == 2 else "xla"
