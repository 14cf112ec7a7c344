"""Answers of the target to the prompts of a pool: what the head learns to draft.

A head trained on anybody else's text drafts that text; the published ablation puts it far behind. Prompts are sorted
by length, decoded plainly in batches, and saved every few batches; a run that was cut off goes on behind its last part.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax import speculate
from jetspec_jax.config import ConfigError
from jetspec_jax.decoder import STOP
from jetspec_jax.sampling import Sampling
from jetspec_jax.training import answers as store
from jetspec_jax.training.answers import Answers

PROMPT_STEP = 128  # padded prompt widths are multiples of this: one prefill program each


def tokenize(target, rows: Sequence[dict], longest: int) -> list[list[int]]:
    """Prompt ids of the rows of a pool through the chat template; [] for those longer than `longest` tokens."""
    ids = [target.encode_messages(row["messages"]) for row in rows]
    return [i if len(i) <= longest else [] for i in ids]


def regenerate(
    target,
    prompts: Sequence[Sequence[int]],
    folder: Path,
    *,
    batch: int,
    max_prompt: int,
    max_new: int,
    samples: int = 0,
    temperature: float = 0.8,
    save_batches: int = 8,
    on_time: Callable[[], bool] = lambda: True,
    log: Callable[[str], None] = lambda line: None,
) -> bool:
    """Writes one greedy and `samples` sampled answers a prompt to `folder`, each exactly once.

    target: what `load_target` returns. prompts: ids, [] to leave a prompt out. on_time: asked before every batch.
    Returns whether all are there; False when time ran out, and the same call later finishes.
    """
    lengths = np.array([len(p) for p in prompts])
    order = np.argsort(lengths, kind="stable")
    order = order[lengths[order] > 0]
    if not order.size:
        raise ConfigError(f"max_prompt={max_prompt}: no prompt of the pool is that short")
    # Greedy answers first: with little time left they are the more useful half.
    jobs = [
        (sample, order[first : first + batch]) for sample in range(1 + samples) for first in range(0, order.size, batch)
    ]
    done = _finished(store.read(folder), jobs, lengths, folder)
    decode = _decoder(target, -(-max_prompt // PROMPT_STEP) * PROMPT_STEP + max_new + 1)
    part, begin, tokens = len(list(folder.glob("part-*.npz"))), time.perf_counter(), 0
    pending: list[Answers] = []
    for number in range(done, len(jobs)):
        if not on_time():
            break
        sample, index = jobs[number]
        heat = temperature if sample else 0.0
        pending.append(_answer(decode, target, prompts, index, sample, batch, max_new, heat))
        tokens += int((pending[-1].length - pending[-1].prompt_length).sum())
        spent = time.perf_counter() - begin
        log(f"regenerate: batch {number + 1}/{len(jobs)}, {tokens:,} tokens, {tokens / spent:,.0f} tokens/s")
        if len(pending) == save_batches:
            store.write(folder, part, store.concatenate(pending))
            part, pending = part + 1, []
        done = number + 1
    if pending:
        store.write(folder, part, store.concatenate(pending))
    return done == len(jobs)


def _finished(known: Answers, jobs, lengths, folder: Path) -> int:
    """Number of jobs whose answers are in the folder; they must be the first ones, row for row."""
    if not len(known.prompt):
        return 0
    ends = np.cumsum([len(index) for _, index in jobs])
    expected = np.concatenate([index for _, index in jobs])[: len(known.prompt)]
    fits = np.array_equal(known.prompt, expected) and np.array_equal(known.prompt_length, lengths[expected])
    if not fits or len(known.prompt) not in ends:
        raise ConfigError(f"{folder}: its parts come from another pool, batch or samples; remove the folder")
    return int(np.searchsorted(ends, len(known.prompt))) + 1


def _decoder(target, capacity: int):
    """Prefill and rounds as two programs; one capacity, so that all batches share the second."""
    decoder = speculate.Decoder(target.model, None, 1, capacity)
    prefill = jax.jit(functools.partial(speculate.prefill, decoder))
    rounds = jax.jit(functools.partial(speculate.rounds, decoder), donate_argnums=1)

    def run(request: speculate.Request, n: int) -> speculate.State:
        params = {"target": target.params, "draft": None}
        return rounds(params, prefill(params, request), jnp.int32(n))

    return run


def _answer(decode, target, prompts, index, sample, batch, max_new, temperature) -> Answers:
    """Decodes the prompts `index` as one batch, padded with rows that end before their first round."""
    lengths = np.ones(batch, np.int32)
    lengths[: len(index)] = [len(prompts[i]) for i in index]
    width = -(-int(lengths.max()) // PROMPT_STEP) * PROMPT_STEP
    padded = np.zeros((batch, width), np.int32)
    for row, i in enumerate(index):
        padded[row, : lengths[row]] = prompts[i]
    limit = lengths + max_new * (np.arange(batch) < len(index)).astype(np.int32)
    seed = np.zeros(batch, np.uint32)
    seed[: len(index)] = (index * 1_000_003 + sample) % 2**32  # of a row and not of a batch
    request = speculate.Request(
        tokens=jnp.asarray(padded),
        prompt_length=jnp.asarray(lengths),
        limit=jnp.asarray(limit),
        budget=jnp.ones(batch, jnp.int32),
        sampling=Sampling(jnp.full(batch, temperature, jnp.float32), jnp.asarray(seed)),
        eos=jnp.broadcast_to(jnp.asarray(target.eos, jnp.int32), (batch, len(target.eos))),
    )
    state = decode(request, max_new)
    tokens, length, reason = (np.asarray(x)[: len(index)] for x in (state.tokens, state.length, state.reason))
    kind = np.uint16 if target.model.vocab_size <= 2**16 else np.uint32
    return store.join(
        [row[:n].astype(kind) for row, n in zip(tokens, length, strict=True)],
        index.astype(np.int32),
        np.full(len(index), sample, np.int32),
        lengths[: len(index)],
        length.astype(np.int32),
        reason == STOP,
    )
