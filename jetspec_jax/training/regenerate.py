"""Answers of the target to prompts: what the head learns to draft.

    python -m jetspec_jax.training.regenerate --prompts rows.jsonl --out DIR [--target T] [--head H] [--nothinking]

A head trained on anybody else's text drafts that text; the published ablation shows it far weaker. Prompts are sorted
by length and decoded in batches, speculatively where a head is given (the same answers sooner, in 16 bits but for
ties), and saved every few batches; the same command again goes on after what is saved. When all are there,
DIR/answers.jsonl holds a conversation a row, with `finish_reason` "length" where the limit cut an answer, and the
counts are printed as JSON: input = answered + errors + skipped.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.training.regenerate")

import collections
import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from jetspec_jax import command, speculate
from jetspec_jax.config import ConfigError
from jetspec_jax.engine import requests
from jetspec_jax.engine.geometry import Geometry
from jetspec_jax.engine.programs import program
from jetspec_jax.fields import Option
from jetspec_jax.files import demo, load, pair
from jetspec_jax.layers.numerics import power
from jetspec_jax.loop.decoder import prefill, rounds
from jetspec_jax.loop.plain import PLAIN
from jetspec_jax.loop.state import NONFINITE, STOP
from jetspec_jax.loop.tree import Rule
from jetspec_jax.options import SamplingConfig
from jetspec_jax.training import files, manifest
from jetspec_jax.training.data import answers as store
from jetspec_jax.training.data import rows, turns
from jetspec_jax.training.data.answers import Answers

BLOCK = 64  # rounds of one launch: between two, a signal is answered
LEAST = 512  # positions of the shortest cache
WIDE = 1024  # positions up to which a batch is decoded whole
PROMPT_STEP = 128  # padded prompt widths are multiples of this: one prefill program each
MANIFEST = "manifest.json"


class Prompts(NamedTuple):
    """What is asked, and what is not, by reason."""

    identities: list[str]
    messages: list[list[dict[str, str]]]
    ids: list[list[int]]  # through the chat template
    skipped: collections.Counter[str]

    @property
    def total(self) -> int:
        """Rows of the input."""
        return len(self.ids) + self.skipped.total()


def ask(target, source, longest: int, thinking: bool | None, limit: int = 0) -> Prompts:
    """Prompts from rows of a data set; an answer at the end of a row is left out.

    source: an iterable of `rows.Row`. longest: tokens of a prompt. limit: rows that are read, 0 for all.
    """
    if target.tokenizer is None or not target.tokenizer.has_chat_template:
        raise ConfigError(f"prompts: {target.source} has no chat template to ask through")
    found = Prompts([], [], [], collections.Counter())
    known: set[str] = set()
    for number, row in enumerate(source):
        if limit and number == limit:
            break
        try:
            if row.identity in known:
                raise turns.Unusable("the id of an earlier row")
            messages = turns.question(row.value)
            ids = target.tokenizer.encode_chat(messages, thinking)
            if max(ids, default=0) >= target.model.vocab_size:
                raise turns.Unusable(turns.BEYOND)
            if len(ids) > longest:
                raise turns.Unusable(f"a prompt of more than {longest} tokens")
        except (turns.Unusable, ConfigError) as reason:
            found.skipped[str(reason)] += 1
            continue
        known.add(row.identity)
        found.identities.append(row.identity)
        found.messages.append(messages)
        found.ids.append(ids)
    if not found.ids:
        raise ConfigError(f"prompts: none of {found.total} rows can be asked ({dict(found.skipped)})")
    return found


class Answerer:
    """Decodes batches of rows of at most `capacity` positions; with a head, trees of `budget` nodes.

    Batches of short rows have a shorter cache: `LEAST` positions, twice as many, and so on, a program each. From `WIDE`
    positions on they have fewer rows at a time, so that the cache grows no further.
    """

    def __init__(self, target, batch: int, capacity: int, head=None, budget: int = 1):
        self.target, self.batch, self.capacity, self.budget = target, batch, capacity, budget if head else 1
        self._draft = head.draft.shaped(Rule(budget), min(head.draft.depth, budget - 1)) if self.budget > 1 else PLAIN
        self._params = {"target": target.params, "draft": head.params if self._draft is not PLAIN else None}

    def __call__(
        self, prompts: Sequence[Sequence[int]], seeds: np.ndarray, max_new: int, temperature: float
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Returns token ids of prompt and answer of at most `batch` prompts, and how each ended (`STOP`, ...)."""
        longest = max(map(len, prompts))
        room = min(power(longest + max_new, LEAST), self.capacity)
        rows = max(1, min(self.batch, self.batch * WIDE // power(room)))
        found, reasons = [], []
        for first in range(0, len(prompts), rows):
            piece = slice(first, first + rows)
            answered, why = self._answer(prompts[piece], seeds[piece], (max_new, temperature), longest, (rows, room))
            found += answered
            reasons.append(why)
        return found, np.concatenate(reasons)

    def _answer(
        self, prompts, seeds: np.ndarray, how: tuple[int, float], longest: int, sizes: tuple[int, int]
    ) -> tuple[list[np.ndarray], np.ndarray]:
        """Answers prompts of at most `longest` tokens together; missing rows end before their first round.

        how: most new tokens, and the temperature; sizes: rows and positions of the cache.
        """
        count, (rows, room), (max_new, temperature) = len(prompts), sizes, how
        decoder = speculate.Decoder(self.target.model, self._draft, room + self._draft.depth + 1)
        options = [SamplingConfig(max_new, temperature, int(seed), eos=self.target.eos) for seed in seeds.tolist()]
        fitted = Geometry.fit(prompts, options, self._draft, room)
        # What is read in chunks is one program, whatever its length.
        width = room if longest > decoder.prefill_chunk else -(-longest // PROMPT_STEP) * PROMPT_STEP
        shape = dataclasses.replace(fitted, batch=rows, capacity=decoder.capacity, prompt=min(width, room))
        request = requests.arrays(prompts, options, [self.budget] * count, shape)
        state = program(prefill, decoder, self._params, request).run(self._params, request)
        block = jnp.int32(BLOCK)
        while not bool(state.done.all()):
            args = self._params, state, block
            state = program(rounds, decoder, *args, donate=(1,)).run(*args)
        tokens, length, reason = (np.asarray(x)[:count] for x in (state.tokens, state.length, state.reason))
        return [row[:n] for row, n in zip(tokens, length, strict=True)], reason


def regenerate(  # noqa: PLR0913  # keys of the configuration
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
    head=None,
    budget: int = 32,
    on_time: Callable[[], bool] = lambda: True,
    log: Callable[[str], None] = lambda line: None,
) -> bool:
    """Writes one greedy and `samples` sampled answers a prompt to `folder`, each exactly once.

    target: what `load_target` returns; head: what `load_head` returns, or None. on_time: asked before every batch.
    Returns whether all are there; False when time ran out, and the same call later finishes.

    Raises:
      ConfigError: the folder holds answers to other prompts, of another target, or made with other numbers; or a
        prompt with its answer may be longer than the target's context.
    """
    lengths = np.array([len(p) for p in prompts])
    _fit(lengths, max_prompt, max_new, target.config.context_length)
    order = np.argsort(lengths, kind="stable")
    # Greedy answers first: with little time left they are the more useful half.
    jobs = [
        (sample, order[first : first + batch]) for sample in range(1 + samples) for first in range(0, order.size, batch)
    ]
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps([list(map(int, p)) for p in prompts]).encode()
    made = {
        "target_fingerprint": target.fingerprint,
        "prompts": hashlib.sha256(text).hexdigest()[:16],
        "batch": batch,
        "max_new": max_new,
        "temperature": temperature if samples else 0.0,
    }
    if not manifest.sign(folder / MANIFEST, made, "remove the folder", any(folder.glob("part-*.npz"))):
        raise ConfigError(f"{folder}: its answers come from another version of this package; remove the folder")
    done = _finished(store.read(folder), jobs, folder)
    if done == len(jobs):
        return True
    answer = Answerer(target, batch, -(-max_prompt // PROMPT_STEP) * PROMPT_STEP + max_new, head, budget)
    part, begin, tokens = len(list(folder.glob("part-*.npz"))), time.perf_counter(), 0
    pending: list[Answers] = []
    kind = np.uint16 if target.model.vocab_size <= 2**16 else np.uint32
    for number in range(done, len(jobs)):
        if not on_time():
            break
        sample, index = jobs[number]
        seeds = (index * 1_000_003 + sample) % 2**32  # of a prompt and not of a batch
        found, reason = answer([prompts[i] for i in index], seeds, max_new, temperature if sample else 0.0)
        length = np.array([row.size for row in found], np.int32)
        pending.append(
            store.join(
                [row.astype(kind) for row in found],
                prompt=index.astype(np.int32),
                sample=np.full(index.size, sample, np.int32),
                prompt_length=lengths[index].astype(np.int32),
                length=length,
                ended=reason == STOP,
                failed=reason == NONFINITE,
            )
        )
        tokens += int((length - lengths[index]).sum())
        spent = time.perf_counter() - begin
        log(f"answers: batch {number + 1}/{len(jobs)}, {tokens:,} tokens, {tokens / spent:,.0f} tokens/s")
        if len(pending) == save_batches:
            store.write(folder, part, store.concatenate(pending))
            part, pending = part + 1, []
        done = number + 1
    if pending:
        store.write(folder, part, store.concatenate(pending))
    return done == len(jobs)


def _fit(lengths: np.ndarray, max_prompt: int, max_new: int, context: int) -> None:
    """Raises ConfigError where a prompt with its answer is longer than the target's context."""
    least, most = lengths.min(), lengths.max()
    if least < 1 or most > max_prompt:
        raise ValueError(f"prompts of {least}..{most} tokens; 1..{max_prompt} are expected")
    if most + max_new > context:
        raise ConfigError(
            f"max_new_tokens={max_new}: with a prompt of {most} tokens that is {most + max_new}, and the target's "
            f"context is {context}; give at most {context - most}"
        )


def counts(prompts: Prompts, known: Answers) -> dict[str, Any]:
    """Counts what became of the input; input = answered + errors + skipped, all in rows."""
    greedy = known.sample == 0
    return {
        "input": prompts.total,
        "answered": int((greedy & ~known.failed).sum()),
        "errors": int((greedy & known.failed).sum()),
        "skipped": prompts.skipped.total(),
        "skipped_by_reason": dict(prompts.skipped),
        "truncated": int((greedy & ~known.ended & ~known.failed).sum()),
        "sampled": int((~greedy).sum()),
        "tokens": int((known.length - known.prompt_length).sum()),
    }


def _finished(known: Answers, jobs, folder: Path) -> int:
    """Number of jobs whose answers are in the folder; they must be the first ones, row for row."""
    if not len(known.prompt):
        return 0
    ends = np.cumsum([len(index) for _, index in jobs])
    expected = np.concatenate([index for _, index in jobs])[: len(known.prompt)]
    if not np.array_equal(known.prompt, expected) or len(known.prompt) not in ends:
        raise ConfigError(
            f"{folder}: a part of its answers is missing or was made with other numbers; remove the folder"
        )
    return int(np.searchsorted(ends, len(known.prompt))) + 1


def write_rows(path: Path, target, prompts: Prompts, known: Answers, drop_truncated: bool = False) -> None:
    """Writes the answers as conversations, one JSON object a line, in the order of the prompts.

    Failed ones are left out; drop_truncated leaves out those that the limit cut as well.
    """
    lines, offset = [], known.offset
    for i in np.lexsort((known.sample, known.prompt)):
        if known.failed[i] or (drop_truncated and not known.ended[i]):
            continue
        begin = offset[i]
        ids = known.tokens[begin + known.prompt_length[i] : begin + known.length[i]]
        ended = bool(known.ended[i])
        text = target.tokenizer.decode([int(t) for t in (ids[:-1] if ended else ids)])
        number, sample = int(known.prompt[i]), int(known.sample[i])
        row = {
            "id": prompts.identities[number] + (f"{store.SAMPLE}{sample}" if sample else ""),
            "messages": [*prompts.messages[number], {"role": "assistant", "content": text}],
            "finish_reason": "stop" if ended else "length",
            "prompt_tokens": int(known.prompt_length[i]),
            "new_tokens": len(ids),
        }
        lines.append(json.dumps(row, ensure_ascii=False) + "\n")
    files.write(path, "".join(lines))


LINE = command.Line(
    __doc__,
    [
        Option(
            "prompts", "text", "Rows: .jsonl, .parquet, a folder, or a dataset on disk.", required=True, metavar="FILE"
        ),
        Option("out", "text", "Folder of the answers.", required=True, metavar="DIR"),
        command.TARGET,
        command.DTYPE,
        command.BACKEND,
        dataclasses.replace(command.HEAD, help="A head that makes it faster: a folder or a hub id."),
        dataclasses.replace(command.TREE["budget"], default=32, help="Tree nodes with --head.", choices=()),
        command.THINKING,
        dataclasses.replace(command.MAX_PROMPT_TOKENS, help="Longer prompts are not asked."),
        dataclasses.replace(command.SAMPLING["max_new_tokens"], low=1),
        Option("samples", "whole", "Sampled answers beside the greedy one.", 0),
        Option("temperature", "number", "Of those.", 0.8, low=0, high=10, above=True),
        dataclasses.replace(command.BATCH, default=64),
        Option("save_batches", "whole", "Batches in one file of answers.", 1, low=1),
        Option("limit", "whole", "Rows that are read.", 0, off="0 is all"),
        Option("drop_truncated", "flag", "Leave out answers that the limit cut.", False),
    ],
)


@command.tool("regenerate", "a smaller --batch", "; the same command goes on")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    target = load.load_target(args.target or demo.fetch_target(), args.dtype, args.backend)
    head = load.load_head(args.head, target) if args.head else None
    thinking = pair.thinking(target, head, args.thinking)
    prompts = ask(target, rows.read(args.prompts), args.max_prompt_tokens, thinking, args.limit)
    out = Path(args.out)
    regenerate(
        target,
        prompts.ids,
        out,
        batch=args.batch,
        max_prompt=args.max_prompt_tokens,
        max_new=args.max_new_tokens,
        samples=args.samples,
        temperature=args.temperature,
        save_batches=args.save_batches,
        head=head,
        budget=args.budget,
        log=lambda line: print(line, file=sys.stderr, flush=True),
    )
    known = store.read(out)
    write_rows(out / "answers.jsonl", target, prompts, known, args.drop_truncated)
    print(json.dumps(counts(prompts, known)))
    return 0
