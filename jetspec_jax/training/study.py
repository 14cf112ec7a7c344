"""A small ablation: losses, mask and depth weighting, and whose answers are learnt, on equal data and steps.

    python -m jetspec_jax.training.data.pool --data FOLDER --out pool.jsonl --code 0 --chat 0 --answers
    python -m jetspec_jax.training.study --config configs/smollm2_135m.py --data pool.jsonl --workdir DIR \\
        --prompts gsm8k.jsonl math500.jsonl --steps 1500 --max_minutes 8

Every variant is a training run of its own under DIR, measured by real greedy decoding of the prompt files. Equal in
all: the prompts and which of them are held out, by id; at most max_prompt_tokens of a prompt and max_new_tokens of an
answer; steps, sequences a step, anchors a sequence, seed. A row is in no variant where its prompt or its own answer is
longer, where it has no answer or several, or where the target's answer gives nothing to learn from. Not equal: the
lengths of answers, so the number of tokens and of packed sequences; the target's answers are cut at the limit (and by
trim_loops where they repeat themselves), the corpus' are all whole.

The same command again goes on, in the middle of measuring too; another one in the same DIR is refused. DIR/study.md
holds the table of what is done so far. `--variants 0 2` takes rows of that table alone: once the first command has
DIR/shared/corpus.jsonl, others may do other rows in the same DIR at the same time. A row that is being done is refused.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.training.study")

import dataclasses
import hashlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jetspec_jax import command
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.evals import acceptance
from jetspec_jax.fields import Option
from jetspec_jax.files import demo, load, pair
from jetspec_jax.training import files, manifest, options, pipeline, regenerate, settings
from jetspec_jax.training.data import answers as answer_store
from jetspec_jax.training.data import examples, rows, turns
from jetspec_jax.training.settings import Settings

Log = Callable[[str], None]
KL, CE, REVERSE = (dict(zip(("forward_kl", "cross_entropy", "reverse_kl"), x, strict=True)) for x in
                   ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)))  # fmt: skip
# Name: settings, and the paper's acceptance length over that of its first row's kind (P-T4, P-T6 at budget 64, P-T7).
VARIANTS: dict[str, tuple[dict[str, Any], str]] = {
    "forward KL, causal, gamma 0": (KL | {"causal": True, "gamma": 0.0}, "1 (reference)"),
    "cross entropy, causal, gamma 0": (CE | {"causal": True, "gamma": 0.0}, "1.00 (MATH-500)"),
    "reverse KL, causal, gamma 0": (REVERSE | {"causal": True, "gamma": 0.0}, "0.66 (MATH-500)"),
    "forward KL, causal, gamma 7": (KL | {"causal": True, "gamma": 7.0}, "1.02 (MATH-500)"),
    "forward KL, bidirectional, gamma 0": (KL | {"causal": False, "gamma": 0.0}, "0.66 (MATH-500)"),
    "forward KL, bidirectional, gamma 7": (KL | {"causal": False, "gamma": 7.0}, "0.99 (MATH-500)"),
    "corpus answers, forward KL, causal, gamma 0": (
        KL | {"causal": True, "gamma": 0.0, "answers": "corpus"},
        "0.42 (GSM8K; cross entropy there)",
    ),
}
BUDGETS = (16, 64, 256)
# Settings that may change between two commands: they move no figure but by rounding, and a full device may need others.
FREE = manifest.ROUNDING | manifest.WATCHING


def run(  # noqa: PLR0913  # options of the command
    base: Settings,
    workdir: Path,
    prompts: list[Path],
    limit: int,
    on_time: Callable[[], bool],
    left: Callable,
    log: Log,
    numbers: list[int] | None = None,
) -> bool:
    """Does what has no result yet, of the variants with these numbers or of all; True when those are done.

    left: minutes of this command, 0 for no end.

    Raises:
      ConfigError: the folder belongs to a study with other settings, data, prompts or target.
    """
    shared = workdir / "shared"
    shared.mkdir(parents=True, exist_ok=True)
    data, corpus = shared / "rows.jsonl", shared / "corpus.jsonl"
    target = load.load_target(base.target or demo.fetch_target(), base.dtype or None)
    begun = data.exists() or any(workdir.glob("variant-*"))
    plan, fix = _plan(base, prompts, limit, target.fingerprint), "use a new --workdir"
    if not manifest.sign(workdir / "study.json", plan, fix, begun, "--"):
        raise ConfigError(f"--workdir={workdir}: its study does not say its settings; {fix}")
    if not data.exists():
        _select(target, base, data)
    del target  # the stages load their own
    base = dataclasses.replace(
        base, data=str(data), max_prompts=0, own_prompts=0, answers="target", samples=0, until="export", export="last",
        decode_prompts="", total_variation=0.0,
    )  # fmt: skip
    if not corpus.exists():
        answering = dataclasses.replace(base, until="answers", max_minutes=left())
        if not pipeline.run(answering, shared, log):
            return False
        _learnt(data, shared / "answers", base, corpus)
    for number, (name, (change, _)) in enumerate(VARIANTS.items()):
        if numbers and number not in numbers:
            continue
        folder = workdir / f"variant-{number}"
        with files.alone(folder, ".study-lock"):
            if not _variant(base, folder, corpus, name, change, prompts, limit, on_time, left, log):
                return False
        files.write(workdir / "study.md", table(workdir, base))
    return True


def _variant(  # noqa: PLR0913  # what `run` was asked
    base: Settings, folder: Path, corpus: Path, name: str, change: dict[str, Any], prompts: list[Path], limit: int,
    on_time: Callable[[], bool], left: Callable, log: Log,
) -> bool:  # fmt: skip
    """Trains and measures one row of the table, as far as time allows; True when it is done."""
    if not (folder / "result.json").exists():
        if not on_time():
            return False
        log(f"study: {name}")
        config = dataclasses.replace(base, **change, max_minutes=left())
        if config.answers == "corpus":
            config = dataclasses.replace(config, data=str(corpus))
        elif not (folder / "answers").exists():
            answers = corpus.parent / "answers"
            (folder / "answers").symlink_to(answers.resolve(), target_is_directory=True)
        if not pipeline.run(config, folder, log):
            return False
        _keep(folder, name, {})  # from here on the head is not trained again
    return _measure(base, folder, name, prompts, limit, on_time, log)


def _plan(config: Settings, prompts: list[Path], limit: int, fingerprint: str) -> dict[str, Any]:
    """What the figures depend on; files by their content, so that they may move."""
    lines = (json.dumps(row.value, sort_keys=True, default=str) for row in rows.read(config.data))
    made = {"steps": config.steps} | {k: v for k, v in dataclasses.asdict(config).items() if k not in FREE}
    made |= {"target": fingerprint, "data": _digest("\n".join(lines)), "limit": limit, "budgets": BUDGETS}
    made |= {"variants": _digest(json.dumps(VARIANTS))}
    read = {path.stem: _digest(path.read_text(encoding="utf-8", errors="replace")) for path in prompts}
    return made | {"prompts": [f"{name}:{digest}" for name, digest in read.items()]}


def _select(target, config: Settings, out: Path) -> None:
    """Writes the first `max_prompts` rows that every variant can learn: both kinds of answers to the same prompts."""
    given: dict[str, rows.Row] = {}
    for row in rows.read(config.data):
        try:
            said = [turn["role"] for turn in turns.conversation(row.value)]
        except turns.Unusable:
            continue
        if said[-1] == "assistant" and said.count("assistant") == 1:
            given.setdefault(row.identity, row)
    if not given:
        raise ConfigError(
            f"--data={config.data}: no row has an answer; make the file with "
            "`python -m jetspec_jax.training.data.pool --answers`"
        )
    thinking = pair.thinking(target, None, config.thinking_switch)
    asked = set(regenerate.ask(target, given.values(), config.max_prompt_tokens, thinking).identities)
    known, _ = examples.build(given.values(), target.tokenizer, target.eos, 2**31, thinking, config.text_loss)
    fits = lambda e: e.learnt.sum() <= config.max_new_tokens and e.tokens.size <= config.sequence_length
    kept = [given[e.identity] for e in known if e.identity in asked and fits(e)]
    if not kept:
        raise ConfigError(
            f"--data={config.data}: no row has a prompt of at most {config.max_prompt_tokens} tokens and an answer of "
            f"at most {config.max_new_tokens}; raise max_prompt_tokens or max_new_tokens in --config"
        )
    _write(out, kept[: config.max_prompts or None])


def _learnt(data: Path, answers: Path, config: Settings, out: Path) -> None:
    """Writes the rows whose prompts the other variants learn too: those with an answer of the target to learn from."""
    asked = list(rows.read(data))
    known = answer_store.read(answers)
    learnable = answer_store.learnable(known, [row.identity for row in asked], config.trim_loops, config.drop_truncated)
    kept = {e.identity for e in learnable[0]}
    _write(out, [row for row in asked if row.identity in kept])


def _measure(
    config: Settings, folder: Path, name: str, prompts: list[Path], limit: int, on_time: Callable[[], bool], log: Log
) -> bool:
    """Adds acceptance lengths by prompt file and budget to the variant's result, each as it comes; True when all are
    there."""
    measured = json.loads((folder / "result.json").read_text(encoding="utf-8"))["measured"]
    missing = [(path, b) for path in prompts for b in BUDGETS if str(b) not in measured.get(path.stem, {})]
    if not missing:
        return True
    if not on_time():
        return False
    target = load.load_target(config.target or demo.fetch_target(), config.dtype or None)
    head = load.load_head(folder / "head", target)
    mode = pair.thinking(target, head, None)
    sampling = SamplingConfig(config.max_new_tokens)
    for path, budget in missing:
        if not on_time():
            return False
        ids = acceptance.read(target, str(path), limit, config.max_prompt_tokens, mode)
        got = acceptance.measure(target, head, ids, TreeConfig(budget), sampling, min(64, len(ids)))
        measured.setdefault(path.stem, {})[str(budget)] = got["acceptance_length"]
        _keep(folder, name, measured)
        log(f"study: {name}: {got['acceptance_length']:.2f} on {path.stem} at budget {budget}")
    return True


def _keep(folder: Path, name: str, measured: dict[str, dict[str, float]]) -> None:
    files.write_json(folder / "result.json", {"variant": name, "measured": measured})


def _write(path: Path, kept: list[rows.Row]) -> None:
    lines = (json.dumps(row.value | {"id": row.identity}, ensure_ascii=False) + "\n" for row in kept)
    files.write(path, "".join(lines))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()[:16]


def table(workdir: Path, config: Settings) -> str:
    """Returns the results so far, as Markdown; ratios are to the first variant."""
    results = []
    for number in range(len(VARIANTS)):
        path = workdir / f"variant-{number}" / "result.json"
        measured = json.loads(path.read_text(encoding="utf-8"))["measured"] if path.exists() else {}
        results.append({(s, b): value for s, found in measured.items() for b, value in found.items()})
    columns = list(dict.fromkeys(column for result in results for column in result))
    head = ["variant", *(f"{s}, budget {b}" for s, b in columns), "paper: ratio to the first"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for (name, (_, paper)), result in zip(VARIANTS.items(), results, strict=True):
        ratio = lambda c, of=result: f" ({of[c] / results[0][c]:.2f})" if results[0].get(c) else ""
        cells = [f"{result[c]:.2f}{ratio(c)}" if c in result else "" for c in columns]
        lines.append("| " + " | ".join([name, *cells, paper]) + " |")
    note = (
        f"Acceptance length, greedy decoding, best-first tree, in brackets over the first variant's. {config.steps:,} "
        f"steps of {config.batch} sequences x {config.anchors} anchors, peak learning rate {config.peak_lr:g}, seed "
        f"{config.seed}, one run each."
    )
    return "\n".join([note, "", *lines, ""])


LINE = command.Line(
    __doc__,
    [
        Option("config", "text", "Configuration of every variant.", required=True, metavar="FILE"),
        Option("data", "text", "Rows with answers of their own.", required=True, metavar="FILE"),
        Option("workdir", "text", "Folder of everything that the study leaves.", required=True, metavar="DIR"),
        command.PROMPTS,
        dataclasses.replace(command.LIMIT, default=64),
        Option("steps", "whole", "Steps of every variant.", 1_500, low=1),
        Option(
            "variants", "whole", "Rows of the table, from 0. Default: all.", many=True, metavar="ROW"
        ),
        dataclasses.replace(command.TARGET, help="Target. Default: the configuration's."),
        Option("max_minutes", "number", "Stop then; the same command goes on.", 0.0, low=0, off="0 is no end"),
    ],
)  # fmt: skip


@command.tool("study", "smaller loss_chunk or feature_batch, or remat=true, in --config", "; the same command goes on")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    for row in args.variants or []:
        if row >= len(VARIANTS):
            raise command.UsageError(f"--variants={row}: the table has the rows 0..{len(VARIANTS) - 1}")
    begin = time.monotonic()
    minutes = lambda: (time.monotonic() - begin) / 60
    on_time = lambda: not args.max_minutes or minutes() < args.max_minutes
    left = lambda: max(args.max_minutes - minutes(), 0.01) if args.max_minutes else 0.0
    say = lambda line: print(line, file=sys.stderr, flush=True)
    config, workdir, prompts = options.find(args.config), Path(args.workdir), [Path(path) for path in args.prompts]
    values = options.load(config)
    for name in ("prompt_sets", "own_prompts", "epochs"):
        values.pop(name, None)
    values |= {"data": args.data, "steps": args.steps, "eval_every": args.steps}
    values |= {"target": args.target} if args.target else {}
    base = settings.make(values, f"--config={config}")
    base.check_files()
    for path in prompts:
        if not path.is_file():
            raise ConfigError(f"--prompts={path}: no such file")
    names = [path.stem for path in prompts]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"--prompts: {names.count(name)} files are called {name}; the table needs other names")
    done = run(base, workdir, prompts, args.limit, on_time, left, say, args.variants)
    files.write(workdir / "study.md", table(workdir, base))
    print((workdir / "study.md").read_text(), end="")
    say("study: done" if done else "study: time is up; the same command goes on")
    return 0
