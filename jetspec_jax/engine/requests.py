"""A batch of prompts and their options as the arrays of a `Request`; what does not fit the target is refused here."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax.numpy as jnp

from jetspec_jax.config import MIN_TEMPERATURE
from jetspec_jax.fields import shown
from jetspec_jax.loop.decoder import Request
from jetspec_jax.loop.sampling import Bias, Penalties, Sampling
from jetspec_jax.options import ConfigError, SamplingConfig

MAX_ENDS = 8  # end tokens of a row, unless it gives more


def resolve(target, option: SamplingConfig) -> SamplingConfig:
    """The option with the target's own end tokens where it leaves them open, and bad words as token ids.

    Raises:
      ConfigError: it needs a tokenizer and the target has none.
    """
    for name in ("stop", "bad_words"):
        texts = [text for text in getattr(option, name) if isinstance(text, str)]
        if texts and target.tokenizer is None:
            instead = "give stop_token_ids" if name == "stop" else "give sequences of token ids (in Python)"
            raise ConfigError(f"{name}={texts[0]!r}: {target.source} has no tokenizer; {instead}, or leave it out")
    for text in option.stop:
        ids = target.tokenizer.encode(text)
        if ids and not target.tokenizer.decode(ids):
            named = ",".join(map(str, ids))
            raise ConfigError(f"stop={text!r}: special tokens are no part of the text; give stop_token_ids={named}")
    eos = () if option.ignore_eos else target.eos if option.eos is None else option.eos
    return dataclasses.replace(option, eos=tuple(eos), bad_words=_banned(target, option))


def _banned(target, option: SamplingConfig) -> tuple[tuple[int, ...], ...]:
    """Bad words as token ids; a text is looked for as it stands and behind a space."""
    found: list[tuple[int, ...]] = []
    for word in option.bad_words:
        if isinstance(word, str):
            ids = [tuple(target.tokenizer.encode(text)) for text in (word, f" {word.lstrip()}")]
        else:
            ids = [tuple(word)]
        found += [i for i in ids if i and i not in found]
    return tuple(found)


def check(target, ids: Sequence[int], option: SamplingConfig) -> None:
    """Raises ConfigError where a prompt and its options do not fit the target."""
    if not ids:
        raise ConfigError("prompt: no tokens; give at least one")
    vocab, limit = target.model.vocab_size, target.config.context_length
    bad = [i for i in ids if not 0 <= i < vocab]
    if bad:
        raise ConfigError(f"prompt: {shown(bad[0])} is not a token; ids are 0..{vocab - 1}")
    if len(ids) > limit:
        raise ConfigError(f"prompt: {len(ids)} tokens, and the target's context is {limit}; shorten the prompt")
    scaling = target.config.rope_scaling
    if scaling and scaling.kind == "dynamic" and len(ids) > scaling.original_length:
        # transformers rotates all of such a prompt by its whole length, and later tokens by theirs; rows that are read
        # in chunks or verified in a tree would need to know the prompt they belong to.
        raise ConfigError(
            f"prompt: {len(ids)} tokens, and with rope_type='dynamic' a prompt may have {scaling.original_length} "
            "(what is generated may go beyond); use yarn or linear for longer ones"
        )
    if len(ids) + option.max_new_tokens > limit:
        raise ConfigError(
            f"max_new_tokens={option.max_new_tokens}: with a prompt of {len(ids)} tokens that is "
            f"{len(ids) + option.max_new_tokens}, and the target's context is {limit}; "
            f"give at most {limit - len(ids)}"
        )
    option, eos = resolve(target, option), option.eos or ()
    named: dict[str, Sequence[int]] = {
        "eos": eos,
        "stop_token_ids": option.stop_token_ids,
        "logit_bias": [token for token, _ in _pairs(option)],
        "bad_words": [token for word in option.bad_words for token in word if not isinstance(token, str)],
    }
    for name, tokens in named.items():
        bad = [i for i in tokens if not 0 <= i < vocab]
        if bad:
            raise ConfigError(f"{name}: {shown(bad[0])} is not a token; ids are 0..{vocab - 1}")


def request(ids: Sequence[list[int]], options: Sequence[SamplingConfig], budgets: Sequence[int], width: int) -> Request:
    """Right-padded arrays of resolved options; the batch is padded to a power of two with rows that end before their
    first round. `width`: prompt slots."""
    spare = power(len(ids), 1) - len(ids)
    limits = [len(i) + o.max_new_tokens for i, o in zip(ids, options, strict=True)]
    ints = lambda rows, fill: jnp.array([*rows, *[fill] * spare], jnp.int32)
    ends = [[*(o.eos or ()), *o.stop_token_ids] for o in options]
    most = power(max(map(len, ends)), MAX_ENDS)
    return Request(
        tokens=ints([i + [0] * (width - len(i)) for i in ids], [0] * width),
        prompt_length=ints(map(len, ids), 1),
        limit=ints(limits, 1),
        budget=ints(budgets, 1),
        sampling=sampling(ids, [*options, *[SamplingConfig()] * spare]),
        eos=ints([e + [-1] * (most - len(e)) for e in ends], [-1] * most),
    )


def sampling(ids: Sequence[list[int]], options: Sequence[SamplingConfig]) -> Sampling:
    """The arrays of resolved options; one that no row uses is None. Rows behind the prompts are padding."""
    column = lambda name, dtype: jnp.array([getattr(o, name) for o in options], dtype)
    used = lambda name: any(getattr(o, name) != getattr(SamplingConfig, name) for o in options)
    optional = lambda name, dtype: column(name, dtype) if used(name) else None
    warm = any(o.temperature >= MIN_TEMPERATURE for o in options)
    penalties = [f"{name}_penalty" for name in Penalties._fields]
    early = [len(i) + o.min_new_tokens for i, o in zip(ids, options, strict=False)]
    return Sampling(
        temperature=column("temperature", jnp.float32) if warm else None,
        seed=column("seed", jnp.uint32),
        top_k=optional("top_k", jnp.int32),
        top_p=optional("top_p", jnp.float32),
        min_p=optional("min_p", jnp.float32),
        penalties=Penalties(*(column(n, jnp.float32) for n in penalties)) if any(map(used, penalties)) else None,
        bias=_bias([_pairs(o) for o in options]) if used("logit_bias") else None,
        bad_words=_words([o.bad_words for o in options]) if used("bad_words") else None,
        min_length=jnp.array(early + [0] * (len(options) - len(ids)), jnp.int32) if used("min_new_tokens") else None,
    )


def power(size: int, smallest: int) -> int:
    """The next power of two: arrays come in few sizes, for each size is a program."""
    return max(smallest, 1 << (size - 1).bit_length())


def _pairs(option: SamplingConfig) -> tuple[tuple[int, float], ...]:
    assert isinstance(option.logit_bias, tuple)  # as it is kept
    return option.logit_bias


def _bias(rows) -> Bias:
    most = power(max(map(len, rows)), 4)
    padded = [[*row, *[(-1, 0.0)] * (most - len(row))] for row in rows]
    token, value = ([[pair[i] for pair in row] for row in padded] for i in (0, 1))
    return Bias(jnp.array(token, jnp.int32), jnp.array(value, jnp.float32))


def _words(rows):
    most = power(max(map(len, rows)), 4)
    size = power(max(len(word) for row in rows for word in row), 1)
    fill = lambda word: [-1] * (size - len(word)) + list(word)
    return jnp.array([[*map(fill, row), *[[-1] * size] * (most - len(row))] for row in rows], jnp.int32)
