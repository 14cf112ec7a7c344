"""Compares drafters on one target: trees, the same drafter's chain beside each, and plain decoding, in one run.

    python -m jetspec_jax.evals.compare --prompts gsm8k.jsonl mbpp.jsonl --out run.jsonl \\
        --drafters jetspec=HEAD dflash=HEAD2 ngram --budgets 16 64 --temperatures 0 1
    python -m jetspec_jax.evals.compare --table run.jsonl --svg run.svg
    python -m jetspec_jax.evals.compare --table run.jsonl other.jsonl --overview
    python -m jetspec_jax.evals.compare --table run.jsonl --against other.jsonl

Each prompt is decoded alone (batch 1), plainly and with every drafter and budget, round robin, after a warm-up that
compiles; time that compiles never counts. Every request is a line of --out, flushed. The same command goes on where it
stopped: what is there is not decoded again, and a setting that has changed is refused by name. At the end, and with
--table from files alone, the tables are printed as Markdown. Rounds are recorded in a second decode that is not timed,
to say what each of them lost (--nolost leaves that out). Where FILE.gold.jsonl lies beside FILE.jsonl (of
`jetspec_jax.evals.formats`), answers are scored; programs are run for that with --run_code alone.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.evals.compare")

import dataclasses
import hashlib
import pathlib
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jetspec_jax import baseline, command, speculate
from jetspec_jax.command import UsageError
from jetspec_jax.engine import geometry
from jetspec_jax.evals import against, chart, drafters, ledger, lost, scorers, summary, tables
from jetspec_jax.evals.drafters import Entry
from jetspec_jax.evals.ledger import Key, Ledger, Request
from jetspec_jax.fields import ConfigError, Option
from jetspec_jax.files import checkpoint, demo, load, pair, scorer_file
from jetspec_jax.files import prompts as prompt_files
from jetspec_jax.options import AUTO, SamplingConfig

TIE = 1e-4  # of the logits' standard deviation: rounding of float32


class Prompt(NamedTuple):
    """A prompt of a set. place: its place among those that are short enough. gold: what its answer is judged by."""

    place: int
    id: Any
    ids: list[int]
    gold: Mapping[str, Any] | None


class Set(NamedTuple):
    """The prompts of a file. digest: of what is decoded and judged."""

    name: str
    prompts: list[Prompt]
    digest: str

    @property
    def room(self) -> int:
        """Tokens of its longest prompt: all of a set are decoded by the programs that this one needs."""
        return max(len(prompt.ids) for prompt in self.prompts)


class Task(NamedTuple):
    """What all requests share."""

    target: Any
    entries: list[Entry]
    sets: list[Set]
    samplings: list[SamplingConfig]  # one a temperature
    repeats: int
    lost: bool
    run_code: bool

    def wanted(self) -> Iterable[Key]:
        """Yields what is to be decoded, in order."""
        for part in self.sets:
            for sampling in self.samplings:
                for prompt in part.prompts:
                    for entry in self.entries:
                        yield Key(part.name, prompt.place, sampling.temperature, entry.cell)


def decode(target, entry: Entry, ids: list[int], sampling: SamplingConfig, room: int = 0) -> speculate.Result:
    """Decodes one prompt, once more where a program had to be compiled on the way; room: of its set."""
    for _ in range(2):
        engine = speculate.start(target, entry.head, [ids], entry.tree, sampling, room=room)
        (result,) = speculate.sound(engine.finish())
        if not result.seconds["compile"]:
            break
    return result


def warm(target, entries: Sequence[Entry], ids: list[int], sampling: SamplingConfig, room: int = 0) -> None:
    """Compiles what every entry runs for a prompt, and runs one round of it; room: of its set."""
    for entry in entries:
        engine = speculate.start(target, entry.head, [ids], entry.tree, sampling, room=room)
        if not engine.over():
            engine.advance(1)


def work(task: Task, book: Ledger, say=lambda line: None) -> None:
    """Decodes what the ledger has not; `say` is told of the progress after every prompt."""
    total = sum(book.get(key) is None for key in task.wanted())
    done, begin = 0, time.monotonic()
    first: tuple[int, float] | None = None  # what the first prompt took, with its compiling, tells little of the others
    for part in task.sets:
        for sampling in task.samplings:
            warmed = False
            for prompt in part.prompts:
                key = lambda entry: Key(part.name, prompt.place, sampling.temperature, entry.cell)  # noqa: B023
                pending = [entry for entry in task.entries if book.get(key(entry)) is None]
                if not pending:
                    continue
                if not warmed:
                    warm(task.target, pending, prompt.ids, sampling, part.room)
                    warmed = True
                _prompt(task, book, pending, part, prompt, sampling)
                done, spent = done + len(pending), time.monotonic() - begin
                rate = spent / done if first is None else (spent - first[1]) / (done - first[0])
                first = first or (done, spent)
                say(
                    f"{part.name} T {sampling.temperature:g} prompt {prompt.place + 1} of {len(part.prompts)}: "
                    f"{done} of {total} requests, {_clock(spent)} spent, about {_clock(rate * (total - done))} left"
                )


def _clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _prompt(
    task: Task, book: Ledger, pending: Sequence[Entry], part: Set, prompt: Prompt, sampling: SamplingConfig
) -> None:
    """Decodes one prompt with all entries in turn, as often as is asked for; writes each down after its last turn."""
    runs: dict[Any, list[speculate.Result]] = {entry.cell: [] for entry in pending}
    for turn in range(task.repeats):
        for entry in pending:
            runs[entry.cell].append(decode(task.target, entry, prompt.ids, sampling, part.room))
            if turn + 1 == task.repeats:
                key = Key(part.name, prompt.place, sampling.temperature, entry.cell)
                plain = book.get(key._replace(cell=drafters.NO_DRAFT.cell))  # None for plain decoding itself
                parts = None
                if task.lost and entry.tree is not None and entry.tree.budget != AUTO:
                    parts = lost.split(task.target, entry.head, prompt.ids, entry.tree, sampling, part.room)
                where, asked = (book.session, key), (entry, prompt, sampling)
                book.add(_request(task.target, task.run_code, where, asked, runs[entry.cell], plain, parts))


def _request(  # what was decoded, and what came of it
    target, run_code: bool, where: tuple[int, Key], asked: tuple[Entry, Prompt, SamplingConfig],
    runs: Sequence[speculate.Result], plain: Request | None, parts: dict[str, int] | None,
) -> Request:  # fmt: skip
    (session, key), (entry, prompt, sampling) = where, asked
    first = runs[0]
    median = lambda part: statistics.median(run.seconds[part] for run in runs)
    found: dict[str, Any] = {"verdict": "plain", "parted_at": None, "margin": None}
    if plain is not None:
        found = judged(target, prompt.ids, plain.token_ids, first.token_ids, sampling)
    ended = first.finish_reason != "length"
    score = scorers.score(prompt.gold, first.text, run_code, ended) if prompt.gold else None
    return Request(
        session=session, set=key.set, prompt=prompt.place, id=prompt.id, prompt_tokens=len(prompt.ids),
        temperature=sampling.temperature, drafter=entry.cell.drafter, method=entry.cell.method, shape=entry.cell.shape,
        nodes=entry.cell.nodes, depth=first.settings["depth"], new_tokens=first.new_tokens, rounds=first.rounds,
        finish_reason=first.finish_reason, prefill=median("prefill"), decode=median("decode"),
        accept_lengths=tuple(first.accept_lengths), emitted=tuple(first.emitted), peak_bytes=_peak(), lost=parts,
        score=score, token_ids=tuple(first.token_ids), text=first.text, **found,
    )  # fmt: skip


def judged(target, ids, plain: Sequence[int], other: Sequence[int], sampling: SamplingConfig) -> dict[str, Any]:
    """Returns the verdict about an output beside plain decoding's, and where and by what margin they part."""
    found = baseline.first_difference(target, ids, list(plain), list(other), sampling)
    if found is None:
        return {"verdict": "equal", "parted_at": None, "margin": None}
    margin = found.margin / max(found.std, 1e-30)
    return {"verdict": "tie" if 0 <= margin < TIE else "differs", "parted_at": found.position, "margin": margin}


def _peak() -> int | None:
    told = jax.local_devices()[0].memory_stats()
    return int(told["peak_bytes_in_use"]) if told and "peak_bytes_in_use" in told else None


def read(target, args, thinking: bool | None) -> list[Set]:
    """Returns the prompts of all files that are short enough, the first `limit` of each, with gold answers."""
    sets = []
    for path in args.prompts:
        found: list[Prompt] = []
        gold = scorers.beside(path)
        for row in prompt_files.read(path):
            if len(found) == args.limit:
                break
            ids = row.encode(target, thinking)
            if len(ids) <= args.max_prompt_tokens:
                found.append(Prompt(len(found), row.id, ids, gold.get(str(row.id))))
        if not found:
            raise ConfigError(f"{path}: no prompt has at most --max_prompt_tokens={args.max_prompt_tokens} tokens")
        digest = hashlib.sha256(repr(found).encode()).hexdigest()[:16]
        sets.append(Set(pathlib.Path(path).stem, found, digest))
    return sets


def settings(args, target, loaded, task: Task) -> dict[str, Any]:
    """Returns what makes two runs the same comparison, and what a table needs to know of cells that are absent."""
    heads = {one.label: _fingerprint(head) for one, head in loaded}
    first = dataclasses.asdict(task.samplings[0]) | {"temperature": [s.temperature for s in task.samplings]}
    usual = dataclasses.asdict(SamplingConfig())
    changed = {k: v for k, v in first.items() if k in ("max_new_tokens", "temperature") or v != usual[k]}
    return {
        "target": target.source, "target_fingerprint": target.fingerprint, "dtype": str(target.dtype),
        "backend": target.model.backend.name, "heads": heads, "cells": [list(e.cell) for e in task.entries],
        "sampling": changed, "limit": args.limit, "max_prompt_tokens": args.max_prompt_tokens,
        "sets": {part.name: [len(part.prompts), part.digest] for part in task.sets}, "repeats": args.repeats,
        "lost": args.lost, "run_code": args.run_code, "device": jax.devices()[0].device_kind, "jax": jax.__version__,
    }  # fmt: skip


def _fingerprint(head) -> str:
    """Tells heads apart: by their weights, their scorer's, and what jetspec.json changes about drafting with them."""
    folder = pathlib.Path(head.source)
    if not folder.is_dir():
        return head.source
    weights = checkpoint.fingerprint(checkpoint.Folder(folder).files)
    beside = folder / scorer_file.FOLDER
    own = beside.is_dir() and not getattr(head.draft, "alone", False)
    scored = checkpoint.fingerprint(checkpoint.Folder(beside).files) if own else ""
    said = getattr(head.draft, "temperature", ()), getattr(head.draft, "window", 0), scored
    return f"{weights}-{hashlib.sha256(repr(said).encode()).hexdigest()[:8]}" if any(said) else weights


LINE = command.Line(
    __doc__,
    [
        dataclasses.replace(command.PROMPTS, required=False),
        Option("out", "text", "File of the requests; it is gone on with where it is there.", metavar="FILE.jsonl"),
        Option("table", "text", "Print the tables of these files, and decode nothing.", many=True, default=(),
               metavar="FILE.jsonl"),
        Option("overview", "flag", "With --table: tables of all sets beside each other, for each temperature; several "
               "files of one target and the same prompts and options are one comparison.", False),
        Option("against", "text", "With --table: these comparisons against this other one, cell by cell, over the "
               "prompts that both have; several, of as many seeds, also together.", metavar="FILE.jsonl"),
        Option("svg", "text", "Also draw the figures into this file; of one comparison.", metavar="FILE.svg"),
        command.TARGET,
        Option("drafters", "text", f"Drafters, METHOD or METHOD=HEAD_FOLDER of {', '.join(drafters.METHODS)}; plain "
               "decoding is always there. A head may be left out with the demo target.", ("jetspec", "ngram"),
               many=True, metavar="METHOD[=HEAD]"),
        Option("budgets", "whole", "Nodes of the trees; auto: what pays best. Default: 8 on a CPU, else 64.", (), low=2,
               high=drafters.methods.MAX_BUDGET, many=True, choices=(AUTO,)),
        command.TREE["scorer"],
        Option("temperatures", "number", "Temperatures.", (0.0,), high=1e30, many=True),
        *command.sampling("temperature", "logprobs"),
        command.DTYPE,
        command.BACKEND,
        command.THINKING,
        dataclasses.replace(command.LIMIT, default=16),
        dataclasses.replace(command.MAX_PROMPT_TOKENS, default=4096),
        Option("repeats", "whole", "Turns of every request; times are medians.", 1, low=1, high=1000),
        Option("lost", "flag", "Record rounds once more, untimed, to say what each lost.", True),
        Option("run_code", "flag", "Run the programs that the model wrote, to score them. UNSAFE: see scorers.py.",
               False),
    ],
)  # fmt: skip


@command.tool("compare", "a smaller --budgets or --max_new_tokens", "; the same command goes on")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    if bool(args.table) == bool(args.prompts):
        raise UsageError("give either --prompts and --out, or --table")
    if args.overview and not args.table:
        raise UsageError("--overview: it is of files; give them with --table")
    if args.table and (more := sorted(args.given - {"table", "overview", "against", "svg"})):
        raise UsageError(f"--{more[0]} with --table: nothing is decoded; leave it out")
    if args.against and (not args.table or args.overview or args.svg):
        raise UsageError("--against: it is for files; give them with --table, and nothing else")
    if args.svg and len(args.table) > 1 and not args.overview:
        raise UsageError(
            f"--svg with {len(args.table)} files: it draws one comparison; give one --table, or --overview"
        )
    command.writable("svg", args.svg)  # before the work, which may take hours
    if args.against:
        if len(set(args.table)) < len(args.table):
            raise UsageError(f"--table: {' '.join(args.table)}: one is there twice")
        stems = [pathlib.Path(path).stem for path in args.table]
        names = stems if len(set(stems)) == len(stems) else args.table
        runs = {name: ledger.read(path) for name, path in zip(names, args.table, strict=True)}
        print(against.markdown(runs, ledger.read(args.against)))
        return 0
    if args.table and args.overview:
        found = summary.joined([summary.of(ledger.read(path)) for path in args.table])
        print(tables.overview(found))
        if args.svg:
            pathlib.Path(args.svg).write_text(chart.overview(found), encoding="utf-8")
        return 0
    if args.table:
        _show([ledger.read(path) for path in args.table], args.svg)
        return 0
    if not args.out:
        raise UsageError("--out is missing: name the file of the requests")
    for name in ("prompts", "budgets", "temperatures"):
        given = [pathlib.Path(v).stem if name == "prompts" else v for v in getattr(args, name)]
        if len(set(given)) < len(given):
            raise UsageError(f"--{name}: {' '.join(map(str, given))}: one is there twice (of files, names tell them)")
    _run(args)
    _show([ledger.read(args.out)], args.svg)
    return 0


def _run(args: command.Args) -> None:
    named = drafters.parse(args.drafters)
    samplings = []
    for temperature in args.temperatures:
        args.temperature = temperature
        samplings.append(command.sampling_of(args))
    target = load.load_target(args.target or demo.fetch_target(), args.dtype, args.backend)
    loaded = drafters.load(named, target, args.target is None, args.scorer)
    entries = drafters.entries(loaded, args.budgets or [geometry.default_budget()])
    heads = [head for _, head in loaded if pair.metadata(head)]
    sets = read(target, args, pair.thinking(target, heads[0] if heads else None, args.thinking))
    for part in sets:
        for prompt in part.prompts:
            try:
                speculate.check(target, prompt.ids, samplings[0])
            except ConfigError as error:
                raise ConfigError(f"{part.name}, prompt {prompt.place + 1}: {error}") from None
    task = Task(target, entries, sets, samplings, args.repeats, args.lost, args.run_code)
    say = lambda line: print(line, file=sys.stderr, flush=True)
    if args.run_code:
        say(scorers.LOUD)
    with ledger.opened(args.out, settings(args, target, loaded, task)) as book:
        if book.requests:
            say(f"{args.out}: {len(book.requests)} requests are there; going on")
        work(task, book, say)


def _show(runs: Sequence[ledger.Run], svg: str | None) -> None:
    for run in runs:
        print(tables.markdown(run))
    if svg:
        pathlib.Path(svg).write_text(chart.comparison(summary.of(runs[0])), encoding="utf-8")
