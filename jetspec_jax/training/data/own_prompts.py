"""User turns that the target writes itself: chat prompts where none under a free licence are at hand.

An instruction-tuned model that is given its chat template up to the place where the user speaks goes on as a user. What
it asks is sampled, and is the kind of thing that it has learnt to answer. In a run these prompts stand after the rows
and come on top of `max_prompts`, which limits the rows alone; they are compared with the benchmarks in `prompt_sets`,
where that is given.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from jetspec_jax.config import ConfigError
from jetspec_jax.evals import formats
from jetspec_jax.loop.state import STOP
from jetspec_jax.training.data import pool
from jetspec_jax.training.regenerate import Answerer

MARK = "\u2042"  # stands where the user speaks; no template has it
LONGEST = 128  # tokens of a turn
SHORTEST = 4  # words
DRAWS = 4  # tries for a prompt that is kept, on average, before we take what there is


def opening(target) -> list[int]:
    """Returns the chat template up to the user's first word."""
    if target.tokenizer is None or not target.tokenizer.has_chat_template:
        raise ConfigError(f"own_prompts: {target.source} has no chat template to speak through")
    text = target.tokenizer.render_chat([{"role": "user", "content": MARK}], answer_follows=False)
    return target.tokenizer.encode(text[: text.index(MARK)])


def write(
    target,
    count: int,
    temperature: float,
    seed: int,
    batch: int,
    forbidden: Callable[[str], bool] | None = None,
    log: Callable[[str], None] = lambda line: None,
) -> list[dict[str, Any]]:
    """Writes at most `count` rows {"id", "messages"}, all different; fewer where the target repeats itself.

    Turns that did not end by themselves, are shorter than a few words, or are `forbidden` (a benchmark's) are left out.
    """
    start = opening(target)
    answer = Answerer(target, batch, len(start) + LONGEST + 128)
    rows: list[dict[str, Any]] = []
    known: set[str] = set()
    for number in range(-(-DRAWS * count // batch)):
        seeds = (np.arange(batch, dtype=np.int64) + (number * batch + seed * 2_654_435_761) % 2**32) % 2**32
        found, reason = answer([start] * batch, seeds, LONGEST, temperature)
        for ids, how in zip(found, reason, strict=True):
            text = target.tokenizer.decode([int(i) for i in ids[len(start) : -1]]).strip()
            key = " ".join(pool.words(text))
            if (
                how == STOP
                and key.count(" ") >= SHORTEST - 1
                and key not in known
                and not (forbidden and forbidden(text))
            ):
                known.add(key)
                rows.append(formats.message(f"own/{len(rows)}", text))
            if len(rows) == count:
                return rows
        log(f"own prompts: {len(rows):,} of {count:,} after {(number + 1) * batch:,} draws")
    return rows
