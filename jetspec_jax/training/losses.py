"""Distillation loss over the vocabulary, a chunk of rows at a time, with its gradient in the same pass.

Rows are drafted slots. f32 logits of all rows would fill the device (7,680 rows x 151,936 x 4 bytes are 4.7 GB, twice),
so one scan makes the logits of a chunk, its loss, and the gradient with respect to what the logits are made of; the
head's vector-Jacobian product follows from those. Nothing is computed twice.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.layers.numerics import einsum


@dataclasses.dataclass(frozen=True)
class Mix:
    """Shares of the losses, p the target's distribution and q the head's, both at `temperature` T.

    forward_kl: T^2 KL(p || q) (JetSpec, equations 8 and 9). reverse_kl: T^2 KL(q || p). cross_entropy: -log q of the
    token that the text holds, at T = 1 (the paper's SFT). total_variation: |p - q|_1, twice the share of drafts that
    rejection sampling refuses (DSpark).
    """

    forward_kl: float = 1.0
    reverse_kl: float = 0.0
    cross_entropy: float = 0.0
    temperature: float = 1.0
    total_variation: float = 0.0

    @property
    def teaches(self) -> bool:
        """Whether the teacher's logits are needed."""
        return bool(self.forward_kl or self.reverse_kl or self.total_variation)

    def __str__(self) -> str:
        names = ("forward_kl", "reverse_kl", "cross_entropy", "total_variation")
        shares = {n: s for n in names if (s := getattr(self, n))}
        return " + ".join(n if s == 1 else f"{s:g} {n}" for n, s in shares.items())


@functools.partial(jax.tree_util.register_dataclass, data_fields=["rows", "table"], meta_fields=["trained"])
@dataclasses.dataclass(frozen=True)
class Term:
    """Rows and a table whose product is a part of the drafted logits.

    rows: [*rows, E], of any width; they are always the head's. table: [U, E]. trained: whether it is the head's too, so
    that its gradient is wanted.
    """

    rows: Any  # arrays, or what stands for them while a program is made
    table: Any
    trained: bool = False


class Logits(NamedTuple):
    """Drafted logits as the sum of products, of which few rows exist at a time.

    ids: [U] int32, the target's tokens for which they stand, each once; None where they are all of them in their order.
    """

    terms: tuple[Term, ...]
    ids: jax.Array | None = None

    def whole(self, vocabulary: int) -> Float[Array, "*rows V"]:
        """Returns them in f32 over the target's vocabulary; -inf where a token cannot be drafted."""
        own = _sum(self.terms)
        if self.ids is None:
            return own
        return jnp.full((*own.shape[:-1], vocabulary), -jnp.inf).at[..., self.ids].set(own)


def _sum(terms: tuple[Term, ...]) -> Float[Array, "*rows U"]:
    parts = [einsum("...e,ve->...v", term.rows, term.table, jnp.float32) for term in terms]
    return functools.reduce(jnp.add, parts)


class Rows(NamedTuple):
    """What R slots of each of B sequences are to draft."""

    teacher: jax.Array  # [B, R, E] final hidden states of the target one position before the label
    label: jax.Array  # [B, R] int32, the token that the text holds there
    weight: jax.Array  # [B, R] f32, 0 where there is no label


class Slope(NamedTuple):
    """Derivatives by a term."""

    rows: jax.Array  # [B, R, E], in the dtype of the rows
    table: jax.Array | None  # [U, E], in the dtype of the table; None where it is not trained


class Loss(NamedTuple):
    value: jax.Array  # [] f32, sum over rows of weight * loss
    slopes: tuple[Slope, ...]  # d value / d each term
    hit: jax.Array  # [B, R] bool: no token is better to the head than the target's best (the text's, for CE alone)
    weight: jax.Array  # [B, R] f32, of the rows; 0 also where what is to be drafted cannot be
    overlap: jax.Array | None  # [B, R] f32, 1 - |p - q|_1 / 2 of what can be drafted; None: not asked for


def distill(
    table: Float[Array, "V E"], drafted: Logits, rows: Rows, mix: Mix, chunk: int = 4096, overlap: bool = False
) -> Loss:
    """Returns the weighted sum of losses and its gradient; about `chunk` rows of f32 logits exist at a time.

    The chunks cut every sequence alike, so that sequences on several devices work side by side. Where the head drafts a
    part of the vocabulary, the target's distribution is the one over that part, and a row counts only if the target's
    best token (and the text's, where cross entropy is learnt) is in it.

    Args:
      table: lm_head of the target.
      drafted: logits of the rows [B, R, E].
      rows: what they are compared with.
      mix: of losses.
      chunk: rows at a time.
      overlap: whether that of each row is wanted.
    """
    batch, count = rows.label.shape
    size = max(1, min(chunk // batch, count))
    padding = -count % size
    tables, trained = [term.table for term in drafted.terms], [term.trained for term in drafted.terms]
    part_of = _part(drafted.ids, table.shape[0])

    def split(x):  # to [chunks, B, size, ...]; padding rows weigh nothing
        x = jnp.pad(x, ((0, 0), (0, padding)) + ((0, 0),) * (x.ndim - 2))
        return x.reshape(batch, -1, size, *x.shape[2:]).swapaxes(0, 1)

    def join(x):
        return x.swapaxes(0, 1).reshape(batch, -1, *x.shape[3:])[:, :count]

    def body(total, part):
        made, given = part
        draft = _sum(tuple(map(Term, made, tables)))
        wanted = mix.teaches or overlap
        teacher = einsum("bre,ve->brv", given.teacher, table, jnp.float32) if wanted else None
        teacher, label, known = part_of(teacher, given.label, mix)
        loss, slope, hit, same = _loss(draft, teacher, label, mix, overlap)
        weight = given.weight if known is None else jnp.where(known, given.weight, 0)
        hit = hit if known is None else hit & known
        # A row without a label may hold anything: 0 * inf must not reach the sum.
        loss = jnp.where(weight > 0, loss * weight, 0)
        slope = jnp.where(weight[..., None] > 0, slope * weight[..., None], 0)
        narrow = [slope.astype(x.dtype) for x in made]
        by_rows = tuple(einsum("brv,ve->bre", s, t) for s, t in zip(narrow, tables, strict=True))
        by_table = tuple(
            einsum("brv,bre->ve", s, jnp.where(weight[..., None] > 0, x, 0), jnp.float32)
            for s, x, learnt in zip(narrow, made, trained, strict=True)
            if learnt
        )
        value, sums = total
        return (value + loss.sum(), tuple(map(jnp.add, sums, by_table))), (by_rows, hit, weight, same)

    empty = tuple(jnp.zeros(t.shape, jnp.float32) for t, learnt in zip(tables, trained, strict=True) if learnt)
    parts = tuple(term.rows for term in drafted.terms), rows
    (value, sums), found = jax.lax.scan(body, (jnp.float32(0), empty), jax.tree.map(split, parts))
    by_rows, hit, weight, same = jax.tree.map(join, found)
    left = iter(sums)
    slopes = tuple(
        Slope(x, next(left).astype(t.dtype) if learnt else None)
        for x, t, learnt in zip(by_rows, tables, trained, strict=True)
    )
    return Loss(value, slopes, hit, weight, same)


def _part(ids: Int[Array, " U"] | None, vocabulary: int):
    """A function from the teacher's logits and labels to those of the drafted part, and whether a row is known there.

    All of the vocabulary is known: None.
    """
    if ids is None:
        return lambda teacher, label, mix: (teacher, label, None)
    place = jnp.full(vocabulary, -1).at[ids].set(jnp.arange(ids.size))

    def part_of(teacher, label, mix: Mix):
        known = place[label] >= 0 if mix.cross_entropy else jnp.ones(label.shape, bool)
        if mix.teaches:
            known &= place[teacher.argmax(-1)] >= 0
        fewer = None if teacher is None else jnp.take(teacher, ids, axis=-1)
        return fewer, jnp.maximum(place[label], 0), known

    return part_of


class _Softmax(NamedTuple):
    """Of logits: `shifted` [B, R, V] is (logits - peak) / T, `log_sum` [B, R] the logarithm of the sum of its exp."""

    shifted: jax.Array
    log_sum: jax.Array

    @property
    def logp(self) -> Float[Array, "B R V"]:
        return self.shifted - self.log_sum[..., None]


def _loss(draft: Float[Array, "B R V"], teacher: Float[Array, "B R V"] | None, label, mix: Mix, overlap: bool):
    """Loss [B, R], its derivative by the draft's logits [B, R, V], whether the head's best token is right [B, R], and
    the overlap of the two distributions [B, R] or None.

    The logits are far larger than what a device keeps close, so what counts is how often they are read: once for their
    peaks (the teacher's with its place, the draft is only compared there), once for all sums, once for the derivative.
    """
    heat = mix.temperature
    peak = draft.max(-1)
    x = (draft - peak[..., None]) / heat
    q = _Softmax(x, jnp.log(jnp.exp(x).sum(-1)))
    loss, slope, best, same = jnp.zeros(draft.shape[:2]), jnp.zeros(()), label, None
    if teacher is not None:
        top = teacher.argmax(-1)
        best = top if mix.teaches else label
        y = (teacher - _at(teacher, top)[..., None]) / heat
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
        if mix.total_variation or overlap:
            apart = jnp.exp(q.logp) - jnp.exp(p.logp)
            distance = jnp.abs(apart).sum(-1)
            same = 1 - distance / 2 if overlap else None
        if mix.total_variation:
            sign = jnp.sign(apart)
            mean = (sign * jnp.exp(q.logp)).sum(-1, keepdims=True)
            loss += mix.total_variation * distance
            slope = slope + mix.total_variation / heat * jnp.exp(q.logp) * (sign - mean)
    if mix.cross_entropy:
        x = draft - peak[..., None]
        q = _Softmax(x, jnp.log(jnp.exp(x).sum(-1)))
        loss += mix.cross_entropy * (q.log_sum - _at(x, label))
        slope = slope + mix.cross_entropy * (jnp.exp(q.logp) - jax.nn.one_hot(label, draft.shape[-1]))
    return loss, slope, _at(draft, best) >= peak, same


def _at(x: Float[Array, "B R V"], token) -> Float[Array, "B R"]:
    return jnp.take_along_axis(x, token[..., None], -1)[..., 0]


def expect(
    logit: Float[Array, "*rows"], wanted: Float[Array, "*rows"], weight: Float[Array, "*rows"]
) -> tuple[Float[Array, ""], Float[Array, "*rows"]]:
    """Returns the weighted sum of binary cross entropies of probabilities, and its derivative by the logits.

    wanted: the probability that each is to say, itself not learnt by this. weight: 0 where it may be anything.
    """
    counts = weight > 0
    loss = jax.nn.softplus(logit) - wanted * logit
    slope = jax.nn.sigmoid(logit) - wanted
    return jnp.where(counts, loss * weight, 0).sum(), jnp.where(counts, slope * weight, 0)


LEAST = -1e4  # logit below the peak that stands for no probability in the reverse KL, which would be infinite


def run_length(hit: Bool[Array, "B A D"], exists: Bool[Array, "B A D"]) -> tuple[Array, Array, Array]:
    """Sums over blocks: length it would have been accepted to with the bonus token, hits of slot 1, and blocks.

    hit, exists: from slot 1 on; blocks whose first label does not exist do not count.
    """
    run = jnp.cumprod(hit & exists, axis=-1).sum(-1)
    blocks = exists[..., 0]
    return ((1 + run) * blocks).sum(), (hit[..., 0] & blocks).sum(), blocks.sum()
