"""Answers of the target, as rows of token ids on disk and in memory.

A folder of `part-NNNNN.npz` files, each written once and whole; a row is a prompt with one answer. Rows are stored end
to end, so nothing is spent on padding.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from jetspec_jax.config import ConfigError
from jetspec_jax.training import files
from jetspec_jax.training.data.examples import Example

LONGEST_PERIOD = 48  # tokens; repetitions of longer pieces are left alone
KEPT_PERIODS = 2  # of a loop: enough to learn that it repeats
SHORTEST_LOOP = 24  # tokens that a repetition must cover to count as a loop
SAMPLE = "#sample"  # and a number, after the identity of a prompt: a sampled answer to it


class Answers(NamedTuple):
    """N rows; row i is tokens[offset[i] : offset[i] + length[i]], its first prompt_length[i] tokens are the prompt."""

    tokens: np.ndarray  # [P] uint16 or uint32, all rows end to end
    prompt: np.ndarray  # [N] int32, index of the prompt in the pool
    sample: np.ndarray  # [N] int32, 0 is the greedy answer
    prompt_length: np.ndarray  # [N] int32
    length: np.ndarray  # [N] int32, prompt and answer
    ended: np.ndarray  # [N] bool, an end token and not the limit ended it
    failed: np.ndarray  # [N] bool, the target's logits were not finite

    @property
    def offset(self) -> np.ndarray:
        """[N] int64."""
        return np.concatenate([[0], np.cumsum(self.length.astype(np.int64))[:-1]])

    def rows(self) -> list[np.ndarray]:
        """Returns the token ids of every row."""
        return np.split(self.tokens, self.offset[1:])


def join(rows: list[np.ndarray], prompt, sample, prompt_length, length, ended, failed) -> Answers:
    """Answers from single rows; the fields are as in `Answers`."""
    tokens = np.concatenate(rows) if len(rows) else np.zeros(0, np.uint16)
    return Answers(tokens, prompt, sample, prompt_length, length, ended, failed)


def write(folder: Path, number: int, answers: Answers) -> Path:
    """Writes part `number`; a reader never sees half of it."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"part-{number:05d}.npz"
    with files.whole(path) as unfinished:
        np.savez_compressed(unfinished, **answers._asdict())
    return path


def read(folder: Path) -> Answers:
    """Reads all parts of a folder in order; no rows where there is none.

    Raises:
      ConfigError: a part is damaged.
    """
    none = np.zeros(0, np.int32)
    parts = [join([], none, none, none, none, none.astype(bool), none.astype(bool))]
    for path in sorted(folder.glob("part-*.npz")):
        try:
            with np.load(path) as stored:
                parts.append(Answers(**stored))
        except Exception as error:  # whatever a damaged file provokes
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{path}: not a whole file of answers ({reason}); remove it and those after it") from None
    return concatenate(parts)


def concatenate(parts: list[Answers]) -> Answers:
    """Joins the rows of all parts."""
    return Answers(*(np.concatenate(field) for field in zip(*parts, strict=True)))


def learnable(
    known: Answers, identities: list[str], trim_loops: bool, drop_truncated: bool = False
) -> tuple[list[Example], Counter[str]]:
    """Returns answers with at least one anchor and its successor as examples, and the others counted by reason.

    trim_loops: cut those that end by repeating themselves. drop_truncated: leave out those that the limit cut.
    """
    whole = known.ended
    if trim_loops:
        known = without_loops(known)
    kept: list[Example] = []
    dropped: Counter[str] = Counter()
    for i, row in enumerate(known.rows()):
        begin = known.prompt_length[i]
        if known.failed[i]:
            dropped["logits that are not finite"] += 1
        elif drop_truncated and not whole[i]:
            dropped["cut at the limit"] += 1
        elif row.size - begin < 2:
            dropped["an answer of one token"] += 1
        else:
            name = identities[known.prompt[i]] + (f"{SAMPLE}{known.sample[i]}" if known.sample[i] else "")
            kept.append(Example(name, row.astype(np.int32), np.arange(row.size) >= begin))
    return kept, dropped


def without_loops(answers: Answers) -> Answers:
    """Cuts an answer that ends by repeating itself to the first two periods of the repetition.

    Such text is easy to draft and says nothing about the rest; a small target produces much of it.
    """
    rows, length = answers.rows(), answers.length.copy()
    for i, row in enumerate(rows):
        body = row[answers.prompt_length[i] :]
        length[i] = answers.prompt_length[i] + before_loop(body)
        rows[i] = row[: length[i]]
    ended = answers.ended & (length == answers.length)
    return join(rows, answers.prompt, answers.sample, answers.prompt_length, length, ended, answers.failed)


def before_loop(body: np.ndarray) -> int:
    """Returns how many tokens to keep: all of them, or those up to the second period of the loop at the end."""
    for period in range(1, min(LONGEST_PERIOD, body.size // 3) + 1):
        differs = np.flatnonzero(body[period:] != body[:-period])
        start = differs[-1] + 1 if differs.size else 0  # body[start:] has this period
        if body.size - start >= max(SHORTEST_LOOP, 3 * period):
            return int(start + KEPT_PERIODS * period)
    return body.size
