"""Token ids and their options: checked against the target, and as the arrays of a `Request`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from jetspec_jax.engine import geometry as sizes
from jetspec_jax.engine.geometry import Geometry
from jetspec_jax.fields import ConfigError, shown, whole
from jetspec_jax.loop.processors import Bias, Penalties, Sampling
from jetspec_jax.loop.state import Request
from jetspec_jax.options import SamplingConfig


def resolve(target, option: SamplingConfig) -> SamplingConfig:
    """Returns the option with the target's own end tokens where it leaves them open, and bad words as token ids.

    Raises:
      ConfigError: it needs a tokenizer and the target has none.
    """
    for name in ("stop", "bad_words"):
        texts = [text for text in getattr(option, name) if isinstance(text, str)]
        if texts and target.tokenizer is None:
            instead = "give stop_token_ids" if name == "stop" else "give sequences of token ids (in Python)"
            raise ConfigError(f"{name}={shown(texts[0])}: {target.source} has no tokenizer; {instead}, or leave it out")
    for text in option.stop:
        ids = target.tokenizer.encode(text)
        if ids and not target.tokenizer.decode(ids):
            named = ",".join(map(str, ids))
            raise ConfigError(
                f"stop={shown(text)}: special tokens are no part of the text; give stop_token_ids={named}"
            )
    eos = () if option.ignore_eos else target.eos if option.eos is None else option.eos
    return dataclasses.replace(option, eos=tuple(eos), bad_words=_banned(target, option))


def _banned(target, option: SamplingConfig) -> tuple[tuple[int, ...], ...]:
    """Bad words as token ids; a text is looked for as it stands and after a space."""
    found: list[tuple[int, ...]] = []
    for word in option.bad_words:
        if isinstance(word, str):
            ids = [tuple(target.tokenizer.encode(text)) for text in (word, f" {word.lstrip()}")]
        else:
            ids = [tuple(word)]
        found += [i for i in ids if i and i not in found]
    return tuple(found)


def check(target, ids: Any, option: SamplingConfig) -> None:
    """Raises ConfigError where a prompt and its options do not fit the target."""
    if not ids:
        raise ConfigError("prompt: no tokens; give at least one")
    vocab, limit = target.model.vocab_size, target.config.context_length
    bad = [i for i in ids if not whole(i) or not 0 <= i < vocab]
    if bad:
        raise ConfigError(f"prompt: {shown(bad[0])} is no token of the target; ids are 0..{vocab - 1}")
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


def arrays(
    prompts: Sequence[Sequence[int]], options: Sequence[SamplingConfig], budgets: Sequence[int], geometry: Geometry
) -> Request:
    """Returns right-padded arrays of checked requests.

    Args:
      prompts: token ids of each.
      options: resolved options of each.
      budgets: tree nodes of each.
      geometry: sizes of the arrays; rows up to its batch are padding and end before their first round.
    """
    spare = geometry.batch - len(prompts)
    limits = [len(ids) + option.max_new_tokens for ids, option in zip(prompts, options, strict=True)]
    ends = [sizes.ends(option) for option in options]

    def ints(rows: Iterable, fill) -> jnp.ndarray:
        return on_device([*rows, *[fill] * spare], np.int32)

    def padded(row: Sequence[int], size: int, fill: int) -> list[int]:
        return [*row, *[fill] * (size - len(row))]

    return Request(
        tokens=ints((padded(ids, geometry.prompt, 0) for ids in prompts), [0] * geometry.prompt),
        prompt_length=ints(map(len, prompts), 1),
        limit=ints(limits, 1),
        budget=ints(budgets, 1),
        sampling=sampling([*map(len, prompts), *[0] * spare], [*options, *[SamplingConfig()] * spare], geometry),
        eos=ints((padded(row, geometry.ends, -1) for row in ends), [-1] * geometry.ends),
    )


def sampling(lengths: Sequence[int], options: Sequence[SamplingConfig], geometry: Geometry) -> Sampling:
    """Returns resolved options as arrays; fields that the geometry has no room for are None.

    lengths: tokens of each prompt.
    """

    def column(name: str, dtype) -> jnp.ndarray:
        return on_device([getattr(option, name) for option in options], dtype)

    def optional(name: str, dtype):
        return column(name, dtype) if name in geometry.options else None

    def penalties() -> Penalties:
        return Penalties(*(column(f"{name}_penalty", np.float32) for name in Penalties._fields))

    has, words = geometry.options, geometry.words
    early = [length + option.min_new_tokens for length, option in zip(lengths, options, strict=True)]
    return Sampling(
        temperature=optional("temperature", np.float32),
        seed=column("seed", np.uint32),
        top_k=optional("top_k", np.int32),
        top_p=optional("top_p", np.float32),
        min_p=optional("min_p", np.float32),
        penalties=penalties() if "penalties" in has else None,
        bias=_bias([_pairs(option) for option in options], words.bias) if "bias" in has else None,
        bad_words=_words([option.bad_words for option in options], words) if "bad_words" in has else None,
        min_length=on_device(early, np.int32) if "min_length" in has else None,
    )


def on_device(values: Any, dtype) -> jnp.ndarray:
    """Returns numbers as an array on the device. numpy converts them: jax would compile a program for each shape."""
    return jnp.asarray(np.array(values, dtype))


def _pairs(option: SamplingConfig) -> tuple[tuple[int, float], ...]:
    assert isinstance(option.logit_bias, tuple)  # as it is kept
    return option.logit_bias


def _bias(rows: Sequence[Sequence[tuple[int, float]]], most: int) -> Bias:
    padded = [[*row, *[(-1, 0.0)] * (most - len(row))] for row in rows]
    token, value = ([[entry[i] for entry in row] for row in padded] for i in (0, 1))
    return Bias(on_device(token, np.int32), on_device(value, np.float32))


def _words(rows: Sequence[Any], words: sizes.Words) -> jnp.ndarray:
    table = np.full((len(rows), words.bad, words.tokens), -1, np.int32)  # padded at the left
    for row, listed_words in enumerate(rows):
        for i, word in enumerate(listed_words):
            table[row, i, words.tokens - len(word) :] = word
    return jnp.asarray(table)
