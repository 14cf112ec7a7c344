"""What a request chooses by, as arrays, and what it does to logits: bias, penalties, bans, top-k, top-p and min-p.

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
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.layers import vocabulary
from jetspec_jax.options import MIN_TEMPERATURE


class Penalties(NamedTuple):
    """Of tokens that have been there; 1, 0 and 0 are off."""

    repetition: jax.Array  # [B] f32, of prompt and output
    presence: jax.Array  # [B] f32, of the output
    frequency: jax.Array  # [B] f32, of the output, for each time


class Bias(NamedTuple):
    """Numbers added to the logits of some tokens; n is the longest list of the batch."""

    token: jax.Array  # [B, n] int32, padded with -1
    value: jax.Array  # [B, n] f32


class Sampling(NamedTuple):
    """How each row of a batch chooses, as arrays: changing their values compiles nothing.

    An option that no row uses is None. Which are None is static, so an unused option is not part of the program.
    """

    temperature: jax.Array | None  # [B] f32; None: every row is greedy
    seed: jax.Array  # [B] uint32
    top_k: jax.Array | None = None  # [B] int32, 0 keeps all
    top_p: jax.Array | None = None  # [B] f32, 1 keeps all
    min_p: jax.Array | None = None  # [B] f32, 0 keeps all
    penalties: Penalties | None = None
    bias: Bias | None = None
    bad_words: jax.Array | None = None  # [B, n, m] int32: m tokens that must not come in a row; padded at the left: -1
    min_length: jax.Array | None = None  # [B] int32: no end token at a position before it

    @property
    def greedy(self) -> jax.Array:
        """[B] bool."""
        return jnp.ones(self.seed.shape, bool) if self.temperature is None else self.temperature < MIN_TEMPERATURE

    @property
    def scale(self) -> jax.Array:
        """[B, 1, 1] f32, what logits are divided by."""
        return jnp.where(self.greedy, 1.0, 1.0 if self.temperature is None else self.temperature)[:, None, None]

    @property
    def filters(self) -> bool:
        """Whether some row drops tokens by rank or probability."""
        return not (self.top_k is None and self.top_p is None and self.min_p is None)

    @property
    def edits(self) -> bool:
        """Whether some row changes logits."""
        return not (self.penalties is None and self.bias is None and self.bad_words is None and self.min_length is None)


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
    """Counts what is committed, R = 1; None where no row has a penalty."""
    if sampling.penalties is None:
        return None
    at = jnp.arange(past.tokens.shape[1])
    seen = at < past.length[:, None]
    made = seen & (at >= past.prompt_length[:, None])
    held = vocabulary.held(vocab_size)
    place = vocabulary.slot(past.tokens, held)
    count = jax.vmap(lambda tokens, mask: jnp.zeros((1, held), jnp.int32).at[0, tokens].add(mask))
    return Counts(count(place, seen.astype(jnp.int32)), count(place, made.astype(jnp.int32)))


def along(counts: Counts | None, path: Int[Array, "B R"]) -> Counts | None:
    """Counts what is there before the choice at each node of a path; path[:, 0] is the anchor, committed already."""
    if counts is None:
        return None
    rows, path = path.shape[1], vocabulary.slot(path, counts.seen.shape[-1])
    above = jnp.tril(jnp.ones((rows, rows), jnp.int32)).at[:, 0].set(0)
    add = jax.vmap(lambda count, p: jnp.tile(count, (rows, 1)).at[jnp.arange(rows)[:, None], p[None]].add(above))
    return Counts(add(counts.seen, path), add(counts.made, path))


def bias_and_penalties(
    logits: Float[Array, "B R V"], sampling: Sampling, counts: Counts | None
) -> Float[Array, "B R V"]:
    """Returns logits with bias and penalties."""
    if sampling.bias is not None:
        held = logits.shape[-1]
        token = jnp.where(sampling.bias.token < 0, held, vocabulary.slot(sampling.bias.token, held))  # padding: dropped
        row = jax.vmap(lambda t, v: jnp.zeros(logits.shape[-1]).at[t].add(v, mode="drop"))(token, sampling.bias.value)
        logits = logits + row[:, None]
    if counts is not None and sampling.penalties is not None:
        repetition, presence, frequency = (x[:, None, None] for x in sampling.penalties)
        fined = jnp.where(logits < 0, logits * repetition, logits / repetition)
        logits = jnp.where(counts.seen > 0, fined, logits)
        logits = logits - frequency * counts.made - presence * (counts.made > 0)
    return logits


def ban(logits: Float[Array, "B R V"], token: Int[Array, "B R n"], hit: Bool[Array, "B R n"]) -> Float[Array, "B R V"]:
    """Returns logits with -inf at each token that is hit; negative tokens are padding."""
    held = logits.shape[-1]
    token = jnp.where(hit & (token >= 0), vocabulary.slot(token, held), held)
    return jax.vmap(jax.vmap(lambda row, t: row.at[t].set(-jnp.inf, mode="drop")))(logits, token)


def edit(
    logits: Float[Array, "B R V"], path: Int[Array, "B R"], past: Past, sampling: Sampling, counts: Counts | None
) -> Float[Array, "B R V"]:
    """Does all that happens before the temperature, for the R nodes of a path from the anchor on.

    Args:
      logits: of the R nodes.
      path: tokens of the nodes, the anchor first.
      past: what is committed.
      sampling: options of the rows.
      counts: of the committed tokens.
    """
    batch, rows = path.shape
    logits = bias_and_penalties(logits, sampling, along(counts, path))
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
    noise: Float[Array, "B R V"] | None,
    counts: Counts | None,
) -> Float[Array, "B R V"]:
    """Returns what the choice at each of the R nodes of a path is the argmax of; dropped tokens have -inf."""
    kept = keep(edit(logits, path, past, sampling, counts) / sampling.scale, sampling)
    return kept if noise is None else kept + noise


def keep(scores: Float[Array, "*rows V"], sampling: Sampling) -> Float[Array, "*rows V"]:
    """Applies top-k, then top-p of what is left, then min-p; what falls out is -inf. Scores are logits / temperature.

    The largest score always stays, NaN included, so that broken logits are noticed where they are chosen.
    """
    if not sampling.filters:
        return scores
    row = lambda x: jnp.broadcast_to(x[:, None], scores.shape[:-1])
    best = vocabulary.largest(scores)
    least = jnp.full(best.shape, -jnp.inf)
    if sampling.top_k is not None:
        size = vocabulary.size(scores)
        count = jnp.minimum(row(jnp.where(sampling.top_k > 0, sampling.top_k, size)), size)
        least = vocabulary.threshold(scores, jnp.ones_like(scores), count.astype(jnp.float32))
    if sampling.top_p is not None:
        weight = jnp.where(scores >= least[..., None], jnp.exp(scores - best[..., None]), 0.0)
        share = row(sampling.top_p)
        nucleus = vocabulary.threshold(scores, weight, share * vocabulary.total(weight))
        least = jnp.where(share < 1, jnp.maximum(least, nucleus), least)
    if sampling.min_p is not None:
        least = jnp.maximum(least, best + jnp.log(row(sampling.min_p)))
    return jnp.where(scores < jnp.minimum(least, best)[..., None], -jnp.inf, scores)
