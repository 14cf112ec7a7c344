"""How well a head drafts text that is already there, under its own configuration and under others.

The target's answers are known, so every anchor of them is one row of a batch: context up to the anchor, one pass of the
head, and a look at how far its chain of best guesses runs. Taps come out of one pass of the target with every layer
tapped, and the mask row is an argument, so most other configurations cost one more run of the same program.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.backends.xla import PLAIN_XLA
from jetspec_jax.config import HeadConfig, default_taps
from jetspec_jax.drafts import families
from jetspec_jax.layers import masks
from jetspec_jax.layers.numerics import narrow
from jetspec_jax.loop.contracts import Ends, Seen

ANCHORS = 40  # of each text
ROWS = 4  # texts; every anchor keeps features of its own
KNOWN_MASKS = (151669, 248070)  # of published heads


class Variant(NamedTuple):
    """Another configuration: which value of config.json would be another, and the whole."""

    key: str
    given: Any
    other: Any
    config: HeadConfig


class Texts(NamedTuple):
    """Answers of the target, and every layer of it over them. R rows, A anchors."""

    tokens: jax.Array  # [R, S] int32
    layers: jax.Array  # [R, S, L * E]
    anchors: np.ndarray  # [R, A] absolute positions, each with a whole block after it


@narrow
def texts(target, prompts: Sequence[Sequence[int]], answers: Sequence[Sequence[int]], depth: int) -> Texts | None:
    """Reads the target's layers over prompts and answers; None where no answer is as long as a block."""
    pairs = [(len(p), [*p, *a]) for p, a in zip(prompts, answers, strict=True) if len(a) > depth + 1]
    pairs = pairs[:ROWS]
    if not pairs:
        return None
    slots = -(-max(len(row) for _, row in pairs) // 64) * 64
    tokens = jnp.array([row + [0] * (slots - len(row)) for _, row in pairs], jnp.int32)
    anchors = [np.linspace(first - 1, len(row) - depth - 1, ANCHORS).round().astype(np.int32) for first, row in pairs]
    layers = _layers(target.model, target.config.num_layers, target.params, tokens)
    return Texts(tokens, layers, np.maximum(np.stack(anchors), 1))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _layers(model, count: int, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    taps = tuple(range(count))
    return model.forward(params, tokens, positions, masks.causal(tokens.shape[1]), taps=taps).taps


@narrow
def runs(target, head, found: Texts, config: HeadConfig) -> tuple[np.ndarray, np.ndarray]:
    """Tokens that a chain would commit at every anchor [R * A], bonus included; read in place, and read one later.

    config: of the head as it would be; sizes are those of `head`.
    """
    # Taps and mask are arguments of the program, so all configurations with one block mask and RoPE share it.
    own = dataclasses.replace(
        head.config,
        causal=config.causal,
        rope_theta=config.rope_theta,
        rope_scaling=config.rope_scaling,
        tap_layers=tuple(range(len(config.tap_layers))),
        mask_token_id=0,
    )
    draft = families.of_config(own.to_hf(), "config.json").build(own, head.params["fc"].dtype, PLAIN_XLA)[0]
    slots = found.tokens.shape[1]
    wide = found.layers.shape[-1] // config.num_target_layers
    features = jnp.concatenate([found.layers[..., i * wide : (i + 1) * wide] for i in config.tap_layers], -1)
    spread = lambda x: jnp.repeat(x, ANCHORS, 0)
    at = found.anchors.reshape(-1)
    guesses = np.asarray(
        _guesses(
            target.model, draft, target.params, head.params, spread(features), spread(found.tokens), jnp.asarray(at),
            jnp.int32(config.mask_token_id),
        )
    )  # fmt: skip
    text = np.repeat(np.asarray(found.tokens), ANCHORS, 0)
    after = lambda first: text[
        np.arange(len(at))[:, None], np.minimum(at[:, None] + first + np.arange(guesses.shape[1]), slots - 1)
    ]
    length = lambda right: 1 + np.cumprod(guesses == right, axis=1).sum(1)
    return length(after(1)), length(after(2))


@functools.partial(jax.jit, static_argnums=(0, 1))
def _guesses(  # noqa: PLR0913  # arrays of one program
    model, draft, weights, params, features, tokens, anchors, mask
):
    """The head's best token of every drafted position after every anchor [B, D]."""
    ends = Ends(
        lambda block: model.embed(weights, block.at[:, 1:].set(mask)), lambda hidden: model.logits(weights, hidden)
    )
    state = draft.init(params, tokens.shape[0], tokens.shape[1] + draft.depth + 1)
    state = draft.extend(params, state, Seen(features, jnp.zeros_like(anchors), anchors, tokens, path=False), ends)
    anchor = jnp.take_along_axis(tokens, anchors[:, None], 1)[:, 0]
    return draft.guesses(params, state, anchor, anchors + 1, ends)


def variants(head: HeadConfig, target, words: int | None) -> Iterator[Variant]:
    """Configurations that a mistake could have turned into the given one. words: tokens that the tokenizer knows."""
    replace = lambda key, field, given, other: Variant(key, given, other, dataclasses.replace(head, **{field: other}))
    for taps in _taps(head, target.num_layers):
        yield replace("target_layer_ids", "tap_layers", list(head.tap_layers), taps)
    near = [head.mask_token_id + 1, head.mask_token_id - 1, *KNOWN_MASKS, head.vocab_size - 1, words or 0]
    for mask in dict.fromkeys(near):
        if 0 < mask < head.vocab_size and mask != head.mask_token_id:
            yield replace("mask_token_id", "mask_token_id", head.mask_token_id, mask)
    yield replace("causal_head", "causal", head.causal, not head.causal)
    if head.rope_theta != target.rope_theta:
        yield replace("rope_theta", "rope_theta", head.rope_theta, target.rope_theta)
    if head.rope_scaling != target.rope_scaling:
        yield replace("rope_scaling", "rope_scaling", head.rope_scaling, target.rope_scaling)


def _taps(head: HeadConfig, layers: int) -> list[tuple[int, ...]]:
    """Other orders of the taps (all of few, else the likely ones), their neighbours, and the usual formula."""
    given = head.tap_layers
    ordered = tuple(sorted(given))
    if len(given) <= 4:
        orders = list(itertools.permutations(ordered))
    else:
        swap = lambda i, j: tuple(given[{i: j, j: i}.get(k, k)] for k in range(len(given)))
        orders = [ordered, given[::-1], *(swap(i, j) for i, j in itertools.combinations(range(len(given)), 2))]
    moved = [tuple(i + by for i in base) for base in (given, ordered) for by in (1, -1)]
    every = dict.fromkeys([*orders, *moved, default_taps(layers, len(given))])
    return [
        taps for taps in every if taps != given and all(0 <= i < layers for i in taps) and len(set(taps)) == len(taps)
    ]
