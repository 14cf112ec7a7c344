"""What a run learns from: the rows' own answers or the target's, as examples, some of them held out."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from jetspec_jax.config import ConfigError
from jetspec_jax.evals import formats
from jetspec_jax.files import load
from jetspec_jax.training import files, manifest, regenerate
from jetspec_jax.training.data import answers, examples, own_prompts, pool, rows, talks
from jetspec_jax.training.data.examples import Example
from jetspec_jax.training.settings import Settings

Log = Callable[[str], None]


class Examples(NamedTuple):
    """What is learnt, what is judged, and how many rows became what."""

    train: list[Example]
    heldout: list[Example]
    counts: dict[str, Any]


def source(config: Settings, workdir: Path, log: Log) -> Path:
    """Returns the rows to learn from; the demo's pool is built where none are given."""
    if config.data:
        return Path(config.data)
    path = workdir / "pool.jsonl"
    made = {name: getattr(config, name) for name in manifest.POOL}
    manifest.sign(path.with_suffix(".settings.json"), made, _fix(path), path.exists())
    if not path.exists():
        found, counts = pool.build(
            Path(config.prompt_sets),
            config.code_prompts,
            config.code_per_package,
            config.chat_prompts,
            config.documents,
        )
        files.write_json(path.with_suffix(".json"), counts)
        with files.whole(path) as unfinished:
            formats.write(unfinished, found)
    log(f"pool: {path}")
    return path


def gather(
    config: Settings, workdir: Path, target, read: Path, on_time: Callable[[], bool], log: Log
) -> Examples | None:
    """Returns the examples of a run; None when time ran out before all answers were there.

    Args:
      workdir: keeps the answers of the target, and the prompts that it wrote itself.
      target: what `load_target` returns.
      read: the rows.

    Raises:
      ConfigError: they give nothing to learn from, or `workdir` holds answers of other settings.
    """
    if config.answers == "corpus":
        known, report = examples.build(
            itertools.islice(rows.read(read), config.max_prompts or None), target.tokenizer, target.eos,
            config.sequence_length, config.thinking_switch, config.text_loss, config.drop_truncated,
            target.config.vocab_size,
        )  # fmt: skip
        for line in report.lines():
            log(line)
        counts: dict[str, Any] = {"input": report.read, "used": report.used, "dropped": dict(report.dropped)}
    else:
        answered = _answers(config, workdir, target, read, on_time, log)
        if answered is None:
            return None
        known, counts = answered
    train, heldout = _split(known, config, log)
    counts |= {
        "examples": len(train),
        "heldout": len(heldout),
        "longest": max(e.tokens.size for e in train),
        "sources": _sources(train),
    }
    return Examples(train, heldout, counts)


def _fix(output: Path) -> str:
    return f"remove {output} to make it anew, use a new --workdir, or the old value"


def _answers(
    config: Settings, workdir: Path, target, read: Path, on_time: Callable[[], bool], log: Log
) -> tuple[list[Example], dict[str, Any]] | None:
    """Examples of the target's answers and their counts; None when time ran out."""
    folder = workdir / "answers"
    begun = any(folder.glob("part-*.npz"))
    manifest.sign(folder / manifest.FILE, manifest.prompts(config), _fix(folder), begun)
    own = _own(config, workdir / "own.jsonl", target, log) if config.own_prompts else None

    def asked() -> Iterator[rows.Row]:
        yield from itertools.islice(rows.read(read), config.max_prompts or None)
        if own:
            yield from rows.read(own)

    found = regenerate.ask(target, asked(), config.max_prompt_tokens, config.thinking_switch)
    for why, n in found.skipped.most_common():
        log(f"prompts: {n:,} of {found.total:,} left out: {why}")
    complete = regenerate.regenerate(
        target,
        found.ids,
        folder,
        batch=config.answer_batch,
        max_prompt=config.max_prompt_tokens,
        max_new=config.max_new_tokens,
        samples=config.samples,
        temperature=config.temperature,
        save_batches=config.save_batches,
        head=load.load_head(config.answer_head, target) if config.answer_head else None,
        budget=config.answer_budget,
        on_time=on_time,
        log=log,
    )
    if not complete:
        return None
    known = answers.read(folder)
    counts = regenerate.counts(found, known)
    files.write_json(workdir / "answers.json", counts)
    log(f"answers: {json.dumps(counts)}")
    kept, dropped = answers.learnable(known, found.identities, config.trim_loops, config.drop_truncated)
    for why, n in dropped.most_common():
        log(f"answers: {n:,} left out: {why}")
    if not kept:
        why = f" ({', '.join(f'{n} {why}' for why, n in dropped.most_common())})"
        raise ConfigError(f"answers: none of {len(known.length)} can be learnt from{why}")
    if config.dialogues:
        held = _dialogues(config, workdir / "dialogues", target, found.ids, on_time, log)
        if held is None:
            return None
        kept += held
        counts["dialogues"] = len(held)
    longest = max(e.tokens.size for e in kept)
    if longest > config.sequence_length:
        raise ConfigError(
            f"--config.sequence_length={config.sequence_length}: an answer with its prompt has {longest} tokens; "
            "give at least max_prompt_tokens + max_new_tokens"
        )
    return kept, counts


def _dialogues(
    config: Settings, folder: Path, target, prompts: list[list[int]], on_time: Callable[[], bool], log: Log
) -> list[Example] | None:
    """Conversations that begin with the first prompts that leave room for more; None when time ran out."""
    plan = talks.Plan(
        config.sequence_length, config.max_new_tokens, config.samples, config.temperature, config.own_temperature,
        config.seed, config.answer_batch, config.trim_loops,
    )  # fmt: skip
    firsts = [ids for ids in prompts if len(ids) + 2 * config.max_new_tokens <= config.sequence_length]
    firsts = firsts[: config.dialogues]
    if len(firsts) < config.dialogues:
        log(f"dialogues: {len(firsts)} of {config.dialogues}: no more prompts leave room for a second answer")
    forbidden = pool.Forbidden(Path(config.prompt_sets)).matches if config.prompt_sets else None
    if not talks.write(target, firsts, folder, plan, forbidden, on_time, log):
        return None
    return talks.read(folder, plan)


def _own(config: Settings, path: Path, target, log: Log) -> Path:
    """Prompts that the target writes itself, kept off the benchmarks of `prompt_sets`."""
    benchmarks = pool.Forbidden(Path(config.prompt_sets)) if config.prompt_sets else None
    made = {name: getattr(config, name) for name in (*manifest.OWN, "seed")}
    if benchmarks:  # without benchmarks to compare with, prompts that were kept off some are as good
        made["benchmarks"] = benchmarks.digest
    else:
        log("own prompts: not compared with any benchmark, since --config.prompt_sets is not given")
        made |= {} if path.exists() else {"benchmarks": "none"}
    manifest.sign(path.with_suffix(".settings.json"), made, _fix(path), path.exists())
    if not path.exists():
        forbidden = benchmarks.matches if benchmarks else None
        written = own_prompts.write(
            target, config.own_prompts, config.own_temperature, config.seed, config.answer_batch, forbidden, log
        )
        with files.whole(path) as unfinished:
            formats.write(unfinished, written)
    return path


def _split(known: list[Example], config: Settings, log: Log) -> tuple[list[Example], list[Example]]:
    """Examples to train on and held-out ones; all answers to a prompt are on one side, sampled ones are not judged."""
    mark = answers.SAMPLE if config.answers == "target" else "\0"  # rows may be called anything

    def prompt(example: Example) -> str:
        return example.identity.partition(mark)[0]

    names = sorted(
        {prompt(e) for e in known}, key=lambda name: hashlib.sha256(name.encode("utf-8", "replace")).digest()
    )
    count = min(config.heldout, len(names) // 10)
    if count < config.heldout:
        log(f"data: {count} of {len(names)} prompts held out, not {config.heldout}: a tenth is the most (heldout)")
    heldout = set(names[:count])
    judged = [e for e in known if prompt(e) in heldout and mark not in e.identity]
    return [e for e in known if prompt(e) not in heldout], judged


def _sources(known: list[Example]) -> dict[str, dict[str, int]]:
    """Examples and supervised tokens by the first part of their ids, where ids have parts."""
    number: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for example in known:
        name = example.identity.rpartition("/")[0] or "data"
        number[name] += 1
        tokens[name] += int(example.learnt.sum())
    if len(number) > 200:  # ids with parts of another meaning
        return {"data": {"examples": number.total(), "tokens": tokens.total()}}
    return {name: {"examples": number[name], "tokens": tokens[name]} for name in sorted(number)}
