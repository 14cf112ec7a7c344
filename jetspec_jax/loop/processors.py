"""What changes logits before a token is chosen: bias, penalties, bans, and the filters top-k, top-p and min-p.

The order is that of transformers: bias, repetition penalty, presence and frequency penalty, bad words, end tokens that
come too early, temperature, top-k, top-p, min-p. Penalties and bad words look at the tokens before a position; for a
node of a tree these are the committed tokens and the node's own path.

Ties: a filter keeps or drops equal logits together. Top-k keeps the k largest and whatever equals the k-th. Top-p keeps
a token when those strictly above it have less than p of the probability (that top-k left). So each filter is one
threshold on the logits, and a threshold is found by counting, without a sort of the vocabulary.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, UInt32

from jetspec_jax.loop.sampling import Sampling


class Past(NamedTuple):
    """What a row has committed before a round."""

    tokens: jax.Array  # [B, S] int32
    prompt_length: jax.Array  # [B] int32
    length: jax.Array  # [B] int32
    ends: jax.Array  # [B, n] int32 end tokens, padded with -1


class Counts(NamedTuple):
    """How often each token has been there. R is 1 where all rows share the committed tokens alone."""

    seen: jax.Array  # [B, R, V] int32, in prompt and output
    made: jax.Array  # [B, R, V] int32, in the output


def committed(past: Past, sampling: Sampling, vocab_size: int) -> Counts | None:
    """Counts of what is committed, R = 1; None where no row has a penalty."""
    if sampling.penalties is None:
        return None
    at = jnp.arange(past.tokens.shape[1])
    seen = at < past.length[:, None]
    made = seen & (at >= past.prompt_length[:, None])
    count = jax.vmap(lambda tokens, mask: jnp.zeros((1, vocab_size), jnp.int32).at[0, tokens].add(mask))
    return Counts(count(past.tokens, seen.astype(jnp.int32)), count(past.tokens, made.astype(jnp.int32)))


def along(counts: Counts | None, path: Int[Array, "B R"]) -> Counts | None:
    """Counts before the choice at each node of a path; path[:, 0] is the anchor, which is committed already."""
    if counts is None:
        return None
    rows = path.shape[1]
    above = jnp.tril(jnp.ones((rows, rows), jnp.int32)).at[:, 0].set(0)
    add = jax.vmap(lambda count, p: jnp.tile(count, (rows, 1)).at[jnp.arange(rows)[:, None], p[None]].add(above))
    return Counts(add(counts.seen, path), add(counts.made, path))


def weigh(logits: Float[Array, "B R V"], sampling: Sampling, counts: Counts | None) -> Float[Array, "B R V"]:
    """Bias and penalties."""
    if sampling.bias is not None:
        token = jnp.where(sampling.bias.token < 0, logits.shape[-1], sampling.bias.token)  # padding is dropped
        row = jax.vmap(lambda t, v: jnp.zeros(logits.shape[-1]).at[t].add(v, mode="drop"))(token, sampling.bias.value)
        logits = logits + row[:, None]
    if counts is not None and sampling.penalties is not None:
        repetition, presence, frequency = (x[:, None, None] for x in sampling.penalties)
        fined = jnp.where(logits < 0, logits * repetition, logits / repetition)
        logits = jnp.where(counts.seen > 0, fined, logits)
        logits = logits - frequency * counts.made - presence * (counts.made > 0)
    return logits


def ban(logits: Float[Array, "B R V"], token: Int[Array, "B R n"], hit: Bool[Array, "B R n"]) -> Float[Array, "B R V"]:
    """-inf at each token that is hit; negative tokens are padding."""
    token = jnp.where(hit & (token >= 0), token, logits.shape[-1])
    return jax.vmap(jax.vmap(lambda row, t: row.at[t].set(-jnp.inf, mode="drop")))(logits, token)


def edit(
    logits: Float[Array, "B R V"], path: Int[Array, "B R"], past: Past, sampling: Sampling, counts: Counts | None
) -> Float[Array, "B R V"]:
    """All that happens before the temperature, for the R nodes of a path from the anchor on; `counts` are the
    committed ones."""
    batch, rows = path.shape
    logits = weigh(logits, sampling, along(counts, path))
    if sampling.bad_words is not None:
        size = sampling.bad_words.shape[-1] - 1  # tokens that must precede the last one
        at = past.length[:, None] - size + jnp.arange(size)
        tail = jnp.where(at < 0, -2, jnp.take_along_axis(past.tokens, jnp.maximum(at, 0), 1))
        line = jnp.concatenate([tail, path[:, 1:]], 1)
        window = line[:, jnp.arange(rows)[:, None] + jnp.arange(size)]  # [B, R, size]
        start = sampling.bad_words[:, None, :, :-1]
        hit = ((start == -1) | (start == window[:, :, None, :])).all(-1)
        last = sampling.bad_words[:, None, :, -1]
        logits = ban(logits, jnp.broadcast_to(last, hit.shape), hit)
    if sampling.min_length is not None:
        early = past.length[:, None] + jnp.arange(rows) < sampling.min_length[:, None]
        shape = (batch, rows, past.ends.shape[1])
        logits = ban(logits, jnp.broadcast_to(past.ends[:, None], shape), jnp.broadcast_to(early[..., None], shape))
    return logits


def scores(
    logits: Float[Array, "B R V"],
    path: Int[Array, "B R"],
    past: Past,
    sampling: Sampling,
    noise: Float[Array, "B R V"],
    counts: Counts | None,
) -> Float[Array, "B R V"]:
    """What the choice at each of the R nodes of a path is the argmax of; dropped tokens have -inf."""
    return keep(edit(logits, path, past, sampling, counts) / sampling.scale, sampling) + noise


def keep(scores: Float[Array, "*rows V"], sampling: Sampling) -> Float[Array, "*rows V"]:
    """Top-k, then top-p of what is left, then min-p; what falls out is -inf. Scores are logits / temperature.

    The largest score always stays, NaN included, so that broken logits are noticed where they are chosen.
    """
    if not sampling.filters:
        return scores
    row = lambda x: jnp.broadcast_to(x[:, None], scores.shape[:-1])
    best = scores.max(-1)
    least = jnp.full(best.shape, -jnp.inf)
    if sampling.top_k is not None:
        count = row(jnp.where(sampling.top_k > 0, sampling.top_k, scores.shape[-1]))
        count = jnp.minimum(count, scores.shape[-1])
        least = threshold(scores, jnp.ones_like(scores), count.astype(jnp.float32))
    if sampling.top_p is not None:
        weight = jnp.where(scores >= least[..., None], jnp.exp(scores - best[..., None]), 0.0)
        share = row(sampling.top_p)
        nucleus = threshold(scores, weight, share * weight.sum(-1))
        least = jnp.where(share < 1, jnp.maximum(least, nucleus), least)
    if sampling.min_p is not None:
        least = jnp.maximum(least, best + jnp.log(row(sampling.min_p)))
    return jnp.where(scores < jnp.minimum(least, best)[..., None], -jnp.inf, scores)


def threshold(
    scores: Float[Array, "*rows V"], weight: Float[Array, "*rows V"], need: Float[Array, "*rows"]
) -> Float[Array, "*rows"]:
    """The largest t for which the scores >= t weigh at least `need` > 0 together; -inf where even all do not.

    A search among the floating-point numbers themselves, in the order of their bits: it ends at the exact value. Each
    pass over the scores splits the bracket in `ways`. Two are the least work; on an accelerator a pass costs its launch
    and one reading of the scores, so that more ways make fewer passes.
    """
    bits = 1 if jax.default_backend() == "cpu" else 4
    ways = 1 << bits

    def narrow(_, bracket):
        low, high = bracket  # enough at low, too little at high
        step = (high - low + jnp.uint32(ways - 1)) // jnp.uint32(ways)
        probes = [jnp.minimum(low + step * jnp.uint32(i), high) for i in range(1, ways)]
        masked = [jnp.where(scores >= _number(probe)[..., None], weight, 0.0) for probe in probes]
        # One reduction of many operands, so that the scores are read once.
        sums = jax.lax.reduce(masked, [jnp.float32(0)] * len(masked), _add, (scores.ndim - 1,))
        for probe, found in zip(probes, sums, strict=True):
            enough = (found >= need) & (probe < high)
            low = jnp.where(enough, probe, low)  # probes ascend: the last that is enough
        for probe, found in zip(reversed(probes), reversed(sums), strict=True):
            high = jnp.where(found >= need, high, jnp.minimum(probe, high))  # and the first that is not
        return low, high

    bracket = _rank(jnp.full(need.shape, -jnp.inf)), _rank(scores.max(-1)) + 1
    return _number(jax.lax.fori_loop(0, 32 // bits, narrow, bracket)[0])


def _add(left, right):
    """Of tuples."""
    return [a + b for a, b in zip(left, right, strict=True)]


def _rank(x: Float[Array, "*n"]) -> UInt32[Array, "*n"]:
    """Unsigned integers in the order of the numbers."""
    bits, sign = jax.lax.bitcast_convert_type(x, jnp.uint32), jnp.uint32(1 << 31)
    return jnp.where(bits >= sign, ~bits, bits | sign)


def _number(rank: UInt32[Array, "*n"]) -> Float[Array, "*n"]:
    """The inverse of `_rank`."""
    sign = jnp.uint32(1 << 31)
    bits = jnp.where(rank >= sign, rank & ~sign, ~rank)
    return jax.lax.bitcast_convert_type(bits, jnp.float32)
