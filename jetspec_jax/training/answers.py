"""Answers of the target, as rows of token ids on disk and in memory.

A folder of `part-NNNNN.npz` files, each written once and whole; a row is a prompt with one answer. Rows are stored end
to end, so nothing is spent on padding.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jetspec_jax.config import ConfigError

LONGEST_PERIOD = 48  # tokens; repetitions of longer pieces are left alone
KEPT_PERIODS = 2  # of a loop: enough to learn that it repeats
SHORTEST_LOOP = 24  # tokens that a repetition must cover to count as a loop


class Answers(NamedTuple):
    """N rows; row i is tokens[offset[i] : offset[i] + length[i]], its first prompt_length[i] tokens are the prompt."""

    tokens: np.ndarray  # [P] uint16 or uint32, all rows end to end
    prompt: np.ndarray  # [N] int32, index of the prompt in the pool
    sample: np.ndarray  # [N] int32, 0 is the greedy answer
    prompt_length: np.ndarray  # [N] int32
    length: np.ndarray  # [N] int32, prompt and answer
    ended: np.ndarray  # [N] bool, an end token and not the limit ended it

    @property
    def offset(self) -> np.ndarray:
        """[N] int64."""
        return np.concatenate([[0], np.cumsum(self.length.astype(np.int64))[:-1]])

    def rows(self) -> list[np.ndarray]:
        """The token ids of every row."""
        return np.split(self.tokens, self.offset[1:])

    def select(self, index: np.ndarray) -> Answers:
        """The named rows, in that order."""
        rows = self.rows()
        return join([rows[i] for i in index], *(field[index] for field in self[1:]))


def join(rows: list[np.ndarray], prompt, sample, prompt_length, length, ended) -> Answers:
    """Answers from single rows; the fields are as in `Answers`."""
    tokens = np.concatenate(rows) if len(rows) else np.zeros(0, np.uint16)
    return Answers(tokens, prompt, sample, prompt_length, length, ended)


def write(folder: Path, number: int, answers: Answers) -> Path:
    """Writes part `number`; a reader never sees half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"part-{number:05d}.npz"
    temporary = path.with_suffix(".tmp")
    with open(temporary, "wb") as f:
        np.savez_compressed(f, **answers._asdict())
    os.replace(temporary, path)
    return path


def read(folder: Path) -> Answers:
    """All parts of a folder in order; no rows where there is none."""
    none = np.zeros(0, np.int32)
    parts = [join([], none, none, none, none, none.astype(bool))]
    for path in sorted(folder.glob("part-*.npz")):
        with np.load(path) as stored:
            parts.append(Answers(**stored))
    return concatenate(parts)


def concatenate(parts: list[Answers]) -> Answers:
    """The rows of all parts."""
    return Answers(*(np.concatenate(field) for field in zip(*parts, strict=True)))


def usable(known: Answers, trim_loops: bool) -> Answers:
    """Answers that hold at least one anchor and its successor, by length, so that the target's forward pads little."""
    if trim_loops:
        known = without_loops(known)
    order = np.argsort(known.length, kind="stable")
    order = order[known.length[order] - known.prompt_length[order] >= 2]
    if not order.size:
        raise ConfigError("answers: none is longer than one token; there is nothing to learn from")
    return known.select(order)


def fitting(known: Answers, positions: int, seed: int) -> Answers:
    """Random rows with at most that many tokens in all, in their old order."""
    order = np.random.default_rng(seed).permutation(len(known.length))
    kept = order[np.cumsum(known.length[order], dtype=np.int64) <= positions]
    return known.select(np.sort(kept))


def without_loops(answers: Answers) -> Answers:
    """Cuts an answer that ends by repeating itself to the first two periods of the repetition.

    Such text is easy to draft and says nothing about the rest; a small target produces much of it.
    """
    rows, length = answers.rows(), answers.length.copy()
    for i, row in enumerate(rows):
        body = row[answers.prompt_length[i] :]
        length[i] = answers.prompt_length[i] + _before_loop(body)
        rows[i] = row[: length[i]]
    ended = answers.ended & (length == answers.length)
    return join(rows, answers.prompt, answers.sample, answers.prompt_length, length, ended)


def _before_loop(body: np.ndarray) -> int:
    """Tokens to keep: all of them, or those up to the second period of the loop at the end."""
    for period in range(1, min(LONGEST_PERIOD, body.size // 3) + 1):
        differs = np.flatnonzero(body[period:] != body[:-period])
        start = differs[-1] + 1 if differs.size else 0  # body[start:] has this period
        if body.size - start >= max(SHORTEST_LOOP, 3 * period):
            return int(start + KEPT_PERIODS * period)
    return body.size
