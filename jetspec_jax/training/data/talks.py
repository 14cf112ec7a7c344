"""Conversations in which the target writes both sides: long rows with many turns, where no free ones are at hand.

A conversation begins with a prompt that is asked anyhow. The target answers; then it is given its chat template up to
the place where the user speaks again, and goes on as a user; and so on until a row is full. Everything is kept as the
tokens that were written, so a row is what decoding such a conversation would read, and only the assistant's turns are
learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from jetspec_jax.config import ConfigError
from jetspec_jax.loop.state import STOP
from jetspec_jax.training import files, manifest
from jetspec_jax.training.data.answers import SAMPLE, before_loop
from jetspec_jax.training.data.examples import Example
from jetspec_jax.training.data.own_prompts import LONGEST as LONGEST_TURN
from jetspec_jax.training.data.own_prompts import MARK
from jetspec_jax.training.regenerate import PROMPT_STEP, Answerer

# Prompts, seeds, most new tokens and temperature to the rows with their answers, and how each ended: an `Answerer`.
Answer = Callable[[Sequence[Sequence[int]], np.ndarray, int, float], tuple[list[np.ndarray], np.ndarray]]
LEAST_TURNS = 2  # answers of a row that is kept
NAME = "talk"


class Plan(NamedTuple):
    """What conversations are made with.

    longest: tokens of a row. max_new: of an answer. temperature: of sampled answers, of which there are `samples` for
    each greedy conversation. own_temperature: of the user's turns. batch: conversations that are held side by side.
    trim_loops: whether an answer that the limit cut loses the repetition that it ends with.
    """

    longest: int
    max_new: int
    samples: int
    temperature: float
    own_temperature: float
    seed: int
    batch: int
    trim_loops: bool = False


class Talk:
    """One conversation while it is held."""

    def __init__(self, ids: Sequence[int]):
        self.ids, self.learnt = list(map(int, ids)), [False] * len(ids)
        self.answers, self.over = 0, False

    def say(self, ids: Sequence[int], learnt: bool) -> None:
        """Appends tokens."""
        self.ids += map(int, ids)
        self.learnt += [learnt] * len(ids)


def glue(target) -> tuple[list[int], list[int]]:
    """Returns what stands between an answer and the user's next word, and between that turn and the next answer.

    Without the end token that a turn ends with: the target writes it itself.
    """
    tokenizer = target.tokenizer
    said = [{"role": "user", "content": "U"}, {"role": "assistant", "content": MARK}, {"role": "user", "content": MARK}]
    text = tokenizer.render_chat(said, None, True)
    parts = text.split(MARK)
    if len(parts) != 3:
        raise ConfigError("dialogues: the chat template does not show a conversation as it is; leave the option out")
    between, after = (tokenizer.encode(part) for part in parts[1:])
    for part in (between, after):
        if not part or part[0] not in target.eos:
            raise ConfigError("dialogues: the chat template ends a turn without an end token; leave the option out")
    return between[1:], after[1:]


def write(
    target,
    firsts: Sequence[Sequence[int]],
    folder: Path,
    plan: Plan,
    forbidden: Callable[[str], bool] | None = None,
    on_time: Callable[[], bool] = lambda: True,
    log: Callable[[str], None] = lambda line: None,
) -> bool:
    """Holds one conversation for each first prompt, and writes them to `folder`, batch by batch.

    Args:
      target: what `load_target` returns.
      firsts: token ids of the first turns, the template's opening of the answer included.
      folder: of the parts; the same call goes on after those that are there.
      plan: what conversations are made with.
      forbidden: says of a user's turn that it must not be asked (a benchmark's); the conversation ends before it.
      on_time: asked before every batch.
      log: takes a line for people.

    Returns:
      Whether all are there; False when time ran out.

    Raises:
      ConfigError: the folder holds other conversations, or the template cannot show any.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made = {"target_fingerprint": target.fingerprint, "count": len(firsts), **plan._asdict()}
    manifest.sign(folder / manifest.FILE, made, f"remove {folder} to make it anew", any(folder.glob("part-*.npz")))
    answer = Answerer(target, plan.batch, -(-plan.longest // PROMPT_STEP) * PROMPT_STEP + plan.max_new)
    total = -(-len(firsts) // plan.batch)
    for number in range(total):
        path = folder / f"part-{number:05d}.npz"
        if path.exists():
            continue
        if not on_time():
            return False
        start = number * plan.batch
        talks = [Talk(ids) for ids in firsts[start : start + plan.batch]]
        _hold(target, talks, start, plan, answer, forbidden)
        _save(path, talks)
        tokens = sum(len(t.ids) for t in talks)
        log(f"dialogues: batch {number + 1}/{total}, {tokens:,} tokens, {sum(t.answers for t in talks):,} answers")
    return True


def read(folder: Path, plan: Plan) -> list[Example]:
    """Reads the conversations of a folder that are worth learning from; sampled ones are named so.

    Raises:
      ConfigError: a part is damaged.
    """
    found = []
    for path in sorted(folder.glob("part-*.npz")):
        try:
            with np.load(path) as stored:
                tokens, learnt, length, answers = (stored[k] for k in ("tokens", "learnt", "length", "answers"))
        except Exception as error:  # whatever a damaged file provokes
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise ConfigError(f"{path}: not a whole file of conversations ({reason}); remove it") from None
        ends = np.cumsum(length)
        first = int(path.stem.removeprefix("part-")) * plan.batch
        for i, (end, size, turns) in enumerate(zip(ends, length, answers, strict=True)):
            if turns >= LEAST_TURNS:
                row = slice(end - size, end)
                found.append(Example(_name(first + i, plan), tokens[row].astype(np.int32), learnt[row].astype(bool)))
    return found


def _hold(target, talks: list[Talk], start: int, plan: Plan, answer: Answer, forbidden) -> None:
    """Runs conversations turn by turn until each is full, or has said something that did not end."""
    between, after = glue(target)
    stage = 0
    while True:
        open_ = [i for i, t in enumerate(talks) if not t.over and len(t.ids) + plan.max_new <= plan.longest]
        if not open_:
            return
        for greedy in (True, False):
            chosen = [i for i in open_ if _greedy(start + i, plan) == greedy]
            heat = 0.0 if greedy else plan.temperature
            for i, ids, ended in _turn(answer, talks, chosen, (start, stage), plan.max_new, heat, plan.seed):
                kept = len(ids) if ended or not plan.trim_loops else before_loop(np.array(ids))
                talks[i].say(ids[:kept], True)
                talks[i].answers += 1
                talks[i].over = not ended
        goes_on = [i for i in open_ if not talks[i].over]
        room = LONGEST_TURN + len(between) + len(after) + plan.max_new
        goes_on = [i for i in goes_on if len(talks[i].ids) + room <= plan.longest]
        for i in set(open_) - set(goes_on):
            talks[i].over = True
        for i in goes_on:
            talks[i].say(between, False)
        asked = _turn(answer, talks, goes_on, (start, stage + 1), LONGEST_TURN, plan.own_temperature, plan.seed)
        for i, ids, ended in asked:
            talks[i].say([*ids, *after], False)
            talks[i].over = not ended or bool(forbidden and forbidden(target.tokenizer.decode(ids[:-1])))
        for i in goes_on:
            if talks[i].over:  # what follows the last answer is not learnt
                last = max(at for at, said in enumerate(talks[i].learnt) if said) + 1
                talks[i].ids, talks[i].learnt = talks[i].ids[:last], talks[i].learnt[:last]
        stage += 2


def _turn(answer: Answer, talks, chosen: list[int], where: tuple[int, int], most: int, heat: float, seed: int):
    """Yields the place of each chosen conversation, the tokens of its next turn, and whether that ended by itself."""
    if not chosen:
        return
    start, stage = where
    seeds = np.array([((start + i) * 1_000_003 + stage * 7_919 + seed * 2_654_435_761) % 2**32 for i in chosen])
    prompts = [talks[i].ids for i in chosen]
    found, reason = answer(prompts, seeds, most, heat)
    for i, row, why in zip(chosen, found, reason, strict=True):
        yield i, row[len(talks[i].ids) :].tolist(), why == STOP


def _greedy(number: int, plan: Plan) -> bool:
    return number % (plan.samples + 1) == 0


def _name(number: int, plan: Plan) -> str:
    """Returns the identity of a conversation; those with sampled answers are told from the others as answers are."""
    return f"{NAME}/{number}" + ("" if _greedy(number, plan) else f"{SAMPLE}1")


def _save(path: Path, talks: Sequence[Talk]) -> None:
    arrays: dict[str, Any] = {
        "tokens": np.concatenate([np.array(t.ids, np.uint32) for t in talks]),
        "learnt": np.concatenate([np.array(t.learnt, np.uint8) for t in talks]),
        "length": np.array([len(t.ids) for t in talks], np.int32),
        "answers": np.array([t.answers for t in talks], np.int32),
    }
    with files.whole(path) as unfinished:
        np.savez_compressed(unfinished, **arrays)
