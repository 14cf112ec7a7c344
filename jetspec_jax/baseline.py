"""Plain decoding on the same state: the oracle for losslessness and the yardstick for speed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jetspec_jax import batch, masks, processors, sampling, speculate
from jetspec_jax.config import SamplingConfig


@dataclasses.dataclass
class Difference:
    """Where two outputs part.

    margin: gap between the two best scores there (logits as the options and the noise make them), from a plain forward
    over the tokens that both share; where a filter dropped `token`, how far below the cut it lies. std: of the logits.

    In f32 a margin under 1e-4 std is a tie of rounding, not a defect.
    """

    position: int  # index into the new tokens
    plain_token: int | None  # None: the output had ended
    token: int | None
    margin: float
    std: float


def generate(target, prompts, sampling=None, chat=None):
    """`speculate.generate` without a draft."""
    return speculate.generate(target, None, prompts, None, sampling, chat)


def compare(target, prompt: Sequence[int], plain, result, option: SamplingConfig) -> dict:
    """The `compare` object of `decode.py --json`: equal tokens, speed-up, and the first difference if there is one."""
    difference = first_difference(target, prompt, plain.token_ids, result.token_ids, option)
    rate = plain.tokens_per_second
    return {
        "equal": difference is None,
        "speedup": result.tokens_per_second / rate if rate else 0.0,
        "plain_tokens_per_second": rate,
        "first_difference": dataclasses.asdict(difference) if difference else None,
    }


def first_difference(
    target, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], option: SamplingConfig
) -> Difference | None:
    """None when the token ids are equal, else the first difference with the margin that the plain run had there."""
    if list(plain) == list(other):
        return None
    shared = zip(plain, other, strict=False)
    at = next((i for i, (a, b) in enumerate(shared) if a != b), min(len(plain), len(other)))
    pick = lambda ids: ids[at] if at < len(ids) else None
    logits = next_logits(target, [*prompt, *plain[:at]])
    margin = _margin(target, prompt, plain[:at], pick(other), logits, option)
    return Difference(at, pick(plain), pick(other), min(margin, float(jnp.finfo(jnp.float32).max)), float(logits.std()))


def _margin(target, prompt, new, token: int | None, logits: jax.Array, option: SamplingConfig) -> float:
    option, ids = batch.resolve(target, option), [*prompt, *new]
    ask = batch.request([list(prompt)], [option], [1], len(prompt))
    length = jnp.array([len(ids)])
    past = processors.Past(jnp.array([ids], jnp.int32), ask.prompt_length, length, ask.eos)
    counts = processors.committed(past, ask.sampling, logits.size)
    scores = processors.edit(logits[None, None], past.tokens[:, -1:], past, ask.sampling, counts) / ask.sampling.scale
    kept = processors.keep(scores, ask.sampling)
    if token is not None and kept[0, 0, token] == -jnp.inf:
        return float(jnp.where(kept == -jnp.inf, jnp.inf, kept).min() - scores[0, 0, token])
    best = jax.lax.top_k((kept + sampling.noise_rows(ask.sampling, length, 1, logits.size))[0, 0], 2)[0]
    return float(best[0] - best[1])


def next_logits(target, ids: Sequence[int]) -> jax.Array:
    """f32 logits [V] of the token behind `ids`, from one plain forward."""
    width = -(-len(ids) // 128) * 128  # few programs: causal rows do not see the padding behind them
    tokens = jnp.array([[*ids, *[0] * (width - len(ids))]], jnp.int32)
    return _logits_at(target.model, target.params, tokens, len(ids) - 1)


@functools.partial(jax.jit, static_argnums=0)
def _logits_at(model, params, tokens, row):
    width = tokens.shape[1]
    out = model.forward(params, tokens, jnp.arange(width)[None], masks.causal(width))
    return model.logits(params, out.hidden[0, row])
