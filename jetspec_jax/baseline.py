"""Plain decoding on the same state: the oracle for losslessness and the yardstick for speed."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jetspec_jax import speculate
from jetspec_jax.engine import geometry, requests
from jetspec_jax.engine.geometry import Geometry
from jetspec_jax.engine.programs import program
from jetspec_jax.engine.spread import fetch
from jetspec_jax.layers.numerics import narrow
from jetspec_jax.loop import processors
from jetspec_jax.loop.choice import noise_rows
from jetspec_jax.loop.decoder import DEFAULT_CHUNK, Decoder, prefill_recorded
from jetspec_jax.loop.plain import PLAIN
from jetspec_jax.options import SamplingConfig


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


def generate(target, prompts, sampling=None, chat=None, **options):
    """Decodes like `speculate.generate`, without a draft; options: `thinking`, `prefill_chunk`."""
    return speculate.generate(target, None, prompts, None, sampling, chat, **options)


def compare(target, prompt: Sequence[int], plain, result, option: SamplingConfig) -> dict:
    """Returns the `compare` object of `decode.py --json`: equal tokens, speed-up, and the first difference, if any."""
    difference = first_difference(target, prompt, plain.token_ids, result.token_ids, option)
    rate = plain.tokens_per_second
    return {
        "equal": difference is None,
        "speedup": result.tokens_per_second / rate if rate else 0.0,
        "plain_tokens_per_second": rate,
        "first_difference": dataclasses.asdict(difference) if difference else None,
    }


@narrow
def parted(plain: Sequence[int], other: Sequence[int]) -> int | None:
    """Returns the index of the first token in which two outputs differ, None where they are equal."""
    if list(plain) == list(other):
        return None
    shared = zip(plain, other, strict=False)
    return next((i for i, (a, b) in enumerate(shared) if a != b), min(len(plain), len(other)))


def first_difference(
    target, prompt: Sequence[int], plain: Sequence[int], other: Sequence[int], option: SamplingConfig
) -> Difference | None:
    """Returns the first difference with the margin that the plain run had there, None when the ids are equal."""
    at = parted(plain, other)
    if at is None:
        return None
    pick = lambda ids: ids[at] if at < len(ids) else None
    logits = next_logits(target, [[*prompt, *plain[:at]]])[0]
    raw, noisy = scores(target, prompt, plain[:at], logits, option)
    token = pick(other)
    margin = margin_of(raw, noisy, token)
    return Difference(at, pick(plain), token, min(margin, float(jnp.finfo(jnp.float32).max)), float(logits.std()))


@narrow
def scores(
    target, prompt: Sequence[int], new: Sequence[int], logits: jax.Array, option: SamplingConfig
) -> tuple[jax.Array, jax.Array]:
    """Returns what the choice after `new` is made by, from its logits [V].

    Returns:
      Scores before the filters, and what the choice is the largest of (filtered, with the noise); both over the
      temperature.
    """
    option, ids = requests.resolve(target, option), [*prompt, *new]
    sizes = Geometry.fit([prompt], [option], PLAIN, DEFAULT_CHUNK)
    ask = requests.arrays([list(prompt)], [option], [1], sizes)
    length = jnp.array([len(ids)])
    past = processors.Past(jnp.array([ids], jnp.int32), ask.prompt_length, length, ask.eos)
    counts = processors.committed(past, ask.sampling, logits.size)
    raw = processors.edit(logits[None, None], past.tokens[:, -1:], past, ask.sampling, counts) / ask.sampling.scale
    kept = processors.keep(raw, ask.sampling)
    return raw[0, 0], (kept + noise_rows(ask.sampling, length, 1, logits.size))[0, 0]


def margin_of(raw: jax.Array, noisy: jax.Array, token: int | None) -> float:
    """Returns the gap between the two best; for a token that a filter dropped, its distance from the last one kept."""
    if token is not None and noisy[token] == -jnp.inf:
        return float(jnp.where(noisy == -jnp.inf, jnp.inf, raw).min() - raw[token])
    best = jax.lax.top_k(noisy, 2)[0]
    return float(best[0] - best[1])


@narrow
def next_logits(target, rows: Sequence[Sequence[int]]) -> jax.Array:
    """Returns f32 logits [R, V] of the tokens after each of the rows, from one plain prefill."""
    option = SamplingConfig(0, eos=())
    capacity = -(-(max(map(len, rows)) + 1) // 1024) * 1024  # few programs
    sizes = Geometry(geometry.rows(len(rows), geometry.groups(target.model)), capacity, 1, capacity - 1)
    request = requests.arrays([list(row) for row in rows], [option] * len(rows), [1] * len(rows), sizes)
    decoder, params = Decoder(target.model, PLAIN, capacity), {"target": target.params, "draft": None}
    return jnp.asarray(fetch(program(prefill_recorded, decoder, params, request).run(params, request)[1]))[: len(rows)]
