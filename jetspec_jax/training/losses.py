"""Distillation loss over the vocabulary, a chunk of rows at a time, with its gradient in the same pass.

Rows are block slots. f32 logits of all rows would fill the device (7,680 rows x 151,936 x 4 bytes are 4.7 GB, twice),
so one scan makes the logits of a chunk, its loss, and the gradient with respect to the draft's hidden states; the
head's vector-Jacobian product follows from those. Nothing is computed twice.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from jetspec_jax.layers.numerics import einsum


@dataclasses.dataclass(frozen=True)
class Mix:
    """Shares of the three losses, p the target's distribution and q the head's, both at `temperature` T.

    forward_kl: T^2 KL(p || q) (JetSpec, equations 8 and 9). reverse_kl: T^2 KL(q || p). cross_entropy: -log q of the
    token that the text holds, at T = 1 (the paper's SFT).
    """

    forward_kl: float = 1.0
    reverse_kl: float = 0.0
    cross_entropy: float = 0.0
    temperature: float = 1.0

    @property
    def teaches(self) -> bool:
        """Whether the teacher's logits are needed."""
        return bool(self.forward_kl or self.reverse_kl)

    def __str__(self) -> str:
        shares = {n: s for n in ("forward_kl", "reverse_kl", "cross_entropy") if (s := getattr(self, n))}
        return " + ".join(n if s == 1 else f"{s:g} {n}" for n, s in shares.items())


class Rows(NamedTuple):
    """R slots of each of B sequences."""

    draft: jax.Array  # [B, R, E] hidden states of the head
    teacher: jax.Array  # [B, R, E] final hidden states of the target one position before the label
    label: jax.Array  # [B, R] int32, the token that the text holds there
    weight: jax.Array  # [B, R] f32, 0 where there is no label


class Loss(NamedTuple):
    value: jax.Array  # [] f32, sum over rows of weight * loss
    gradient: jax.Array  # [B, R, E] d value / d draft, in the dtype of `draft`
    hit: jax.Array  # [B, R] bool: no token is better to the head than the target's best (the text's, for CE alone)


def distill(table: Float[Array, "V E"], rows: Rows, mix: Mix, chunk: int = 4096) -> Loss:
    """Returns the weighted sum of losses and its gradient; about `chunk` rows of f32 logits exist at a time.

    The chunks cut every sequence alike, so that sequences on several devices work side by side.
    """
    batch, count = rows.label.shape
    size = max(1, min(chunk // batch, count))
    padding = -count % size

    def split(x):  # to [chunks, B, size, ...]; padding rows weigh nothing
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(batch, -1, size, *x.shape[2:]).swapaxes(0, 1)

    def join(x):
        return x.swapaxes(0, 1).reshape(batch, -1, *x.shape[3:])[:, :count]

    def body(total, part: Rows):
        draft = einsum("bre,ve->brv", part.draft, table, jnp.float32)
        teacher = einsum("bre,ve->brv", part.teacher, table, jnp.float32) if mix.teaches else None
        loss, slope, hit = _loss(draft, teacher, part.label, mix)
        # A row without a label may hold anything: 0 * inf must not reach the sum.
        loss = jnp.where(part.weight > 0, loss * part.weight, 0)
        slope = jnp.where(part.weight[..., None] > 0, slope * part.weight[..., None], 0).astype(part.draft.dtype)
        return total + loss.sum(), (einsum("brv,ve->bre", slope, table), hit)

    value, (gradient, hit) = jax.lax.scan(body, jnp.float32(0), jax.tree.map(split, rows))
    return Loss(value, join(gradient), join(hit))


class _Softmax(NamedTuple):
    """Of logits: `shifted` [B, R, V] is (logits - peak) / T, `log_sum` [B, R] the logarithm of the sum of its exp."""

    shifted: jax.Array
    log_sum: jax.Array

    @property
    def logp(self) -> Float[Array, "B R V"]:
        return self.shifted - self.log_sum[..., None]


def _loss(draft: Float[Array, "B R V"], teacher: Float[Array, "B R V"] | None, label, mix: Mix):
    """Loss [B, R], its derivative by the draft's logits [B, R, V], and whether the head's best token is right [B, R].

    The logits are far larger than what a device keeps close, so what counts is how often they are read: once for their
    peaks (the teacher's with its place, the draft is only compared there), once for all sums, once for the derivative.
    """
    heat = mix.temperature
    peak = draft.max(-1)
    x = (draft - peak[..., None]) / heat
    q = _Softmax(x, jnp.log(jnp.exp(x).sum(-1)))
    loss, slope, best = jnp.zeros(draft.shape[:2]), jnp.zeros(()), label
    if teacher is not None:
        best = teacher.argmax(-1)
        y = (teacher - _at(teacher, best)[..., None]) / heat
        p = _Softmax(y, jnp.log(jnp.exp(y).sum(-1)))
        if mix.forward_kl:
            # Where p is 0 its term is 0, also where log p is -inf.
            apart = jnp.where(jnp.exp(y) > 0, jnp.exp(y) * (y - x), 0).sum(-1) / jnp.exp(p.log_sum)
            loss += mix.forward_kl * heat**2 * (apart - p.log_sum + q.log_sum)
            slope = slope + mix.forward_kl * heat * (jnp.exp(q.logp) - jnp.exp(p.logp))
        if mix.reverse_kl:
            y = jnp.maximum(y, LEAST)
            apart = jnp.where(jnp.exp(x) > 0, jnp.exp(x) * (x - y), 0).sum(-1) / jnp.exp(q.log_sum)
            loss += mix.reverse_kl * heat**2 * (apart - q.log_sum + p.log_sum)
            ratio = jnp.where(jnp.exp(x) > 0, x - y - apart[..., None], 0)
            slope = slope + mix.reverse_kl * heat * jnp.exp(q.logp) * ratio
    if mix.cross_entropy:
        x = draft - peak[..., None]
        q = _Softmax(x, jnp.log(jnp.exp(x).sum(-1)))
        loss += mix.cross_entropy * (q.log_sum - _at(x, label))
        slope = slope + mix.cross_entropy * (jnp.exp(q.logp) - jax.nn.one_hot(label, draft.shape[-1]))
    return loss, slope, _at(draft, best) >= peak


def _at(x: Float[Array, "B R V"], token) -> Float[Array, "B R"]:
    return jnp.take_along_axis(x, token[..., None], -1)[..., 0]


LEAST = -1e4  # logit below the peak that stands for no probability in the reverse KL, which would be infinite


def run_length(hit: Bool[Array, "B A D"], exists: Bool[Array, "B A D"]) -> tuple[Array, Array, Array]:
    """Sums over blocks: length it would have been accepted to with the bonus token, hits of slot 1, and blocks.

    hit, exists: from slot 1 on; blocks whose first label does not exist do not count.
    """
    run = jnp.cumprod(hit & exists, axis=-1).sum(-1)
    blocks = exists[..., 0]
    return ((1 + run) * blocks).sum(), (hit[..., 0] & blocks).sum(), blocks.sum()
