"""A small ablation: losses, mask and depth weighting, and whose answers are learnt, on equal data and steps.

    python -m jetspec_jax.training.pool --data FOLDER --out pool.jsonl --code 0 --chat 0 --answers
    python -m jetspec_jax.training.study --config configs/smollm2_135m.py --data pool.jsonl --workdir DIR \\
        --prompts gsm8k.jsonl math500.jsonl --steps 1500 --max_minutes 8

Every variant is a training run of its own under DIR, with the same prompts, sequences and seed, measured by real greedy
decoding of the prompt files. Prompts without an answer of their origin are left out, so that both kinds of answers
belong to the same prompts. The same command again goes on; DIR/study.md holds the table of what is done so far.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jetspec_jax import demo, load, pairing
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.evals import acceptance
from jetspec_jax.training import examples, loop, options, pipeline, rows, settings
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


def run(
    base: Settings,
    workdir: Path,
    prompts: list[Path],
    limit: int,
    on_time: Callable[[], bool],
    left: Callable,
    log: Log,
) -> bool:
    """Runs the variants that have no result yet; True when all have. left: minutes of this command, 0 for no end."""
    shared = workdir / "shared"
    shared.mkdir(parents=True, exist_ok=True)
    data = shared / "rows.jsonl"
    if not data.exists():
        _answered(Path(base.data), data)
    base = dataclasses.replace(base, data=str(data), own_prompts=0, samples=0, export="last", decode_prompts="")
    answering = dataclasses.replace(base, until="answers", max_minutes=left())
    if not pipeline.run(answering, shared, log):
        return False
    for number, (name, (change, _)) in enumerate(VARIANTS.items()):
        folder = workdir / f"variant-{number}"
        result = folder / "result.json"
        if result.exists():
            continue
        if not on_time():
            return False
        log(f"study: {name}")
        folder.mkdir(exist_ok=True)
        link = folder / "answers"
        if change.get("answers") != "corpus" and not link.exists():
            link.symlink_to((shared / "answers").resolve(), target_is_directory=True)
        config = dataclasses.replace(base, **change, max_minutes=left())
        if not pipeline.run(config, folder, log):
            return False
        measured = _measure(config, folder / "head", prompts, limit)
        result.write_text(json.dumps({"variant": name, "measured": measured}, indent=1) + "\n")
        (workdir / "study.md").write_text(table(workdir, base), encoding="utf-8")
    return True


def _answered(source: Path, out: Path) -> None:
    """The rows that have an answer of their own."""
    kept = []
    for row in rows.read(source):
        try:
            if examples.conversation(row.value)[-1]["role"] == "assistant":
                kept.append(json.dumps(row.value | {"id": row.identity}, ensure_ascii=False) + "\n")
        except examples.Unusable:
            continue
    if not kept:
        raise ConfigError(
            f"{source}: no row has an answer; make it with `python -m jetspec_jax.training.pool --answers`"
        )
    out.write_text("".join(kept), encoding="utf-8")


def _measure(config: Settings, folder: Path, prompts: list[Path], limit: int) -> dict[str, dict[str, float]]:
    """Acceptance length by prompt file and budget."""
    target = load.load_target(config.target or demo.fetch_target(), config.dtype or None)
    head = load.load_head(folder, target)
    found: dict[str, dict[str, float]] = {}
    for path in prompts:
        ids = acceptance.read(target, str(path), limit, config.max_prompt_tokens, pairing.thinking(target, head, None))
        if not ids:
            raise ConfigError(f"{path}: no prompt is short enough")
        sampling = SamplingConfig(config.max_new_tokens)
        for budget in BUDGETS:
            got = acceptance.measure(target, head, ids, TreeConfig(budget), sampling, min(64, len(ids)))
            found.setdefault(path.stem, {})[str(budget)] = got["acceptance_length"]
    return found


def table(workdir: Path, config: Settings) -> str:
    """The results so far, as Markdown; ratios are to the first variant."""
    results = []
    for number in range(len(VARIANTS)):
        path = workdir / f"variant-{number}" / "result.json"
        results.append(json.loads(path.read_text())["measured"] if path.exists() else None)
    done = [r for r in results if r]
    sets = list(done[0]) if done else []
    columns = [(s, b) for s in sets for b in done[0][s]]
    head = ["variant", *(f"{s}, budget {b}" for s, b in columns), "paper: ratio to the first"]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for (name, (_, paper)), result in zip(VARIANTS.items(), results, strict=True):
        cells = ["" for _ in columns]
        if result:
            first = results[0] or result
            cells = [f"{result[s][b]:.2f} ({result[s][b] / first[s][b]:.2f})" for s, b in columns]
        lines.append("| " + " | ".join([name, *cells, paper]) + " |")
    note = (
        f"Acceptance length, greedy decoding, best-first tree, in brackets over the first variant's. {config.steps:,} "
        f"steps of {config.batch} sequences x {config.anchors} anchors, peak learning rate {config.peak_lr:g}, seed "
        f"{config.seed}, one run each."
    )
    return "\n".join([note, "", *lines, ""])


def main(argv: list[str]) -> int:
    """The command of the module's docstring; the exit status."""
    parser = argparse.ArgumentParser(prog="study", description=__doc__.split("\n")[0])
    parser.add_argument("--config", required=True, type=Path, help="configuration of every variant")
    parser.add_argument("--data", required=True, type=Path, help="rows with answers of their own")
    parser.add_argument("--workdir", required=True, type=Path)
    parser.add_argument("--prompts", required=True, nargs="+", type=Path, help="prompt files to decode")
    parser.add_argument("--limit", type=int, default=64, help="prompts of each file")
    parser.add_argument("--steps", type=int, default=1_500)
    parser.add_argument("--target", default="", help="default: the configuration's")
    parser.add_argument("--max_minutes", type=float, default=0.0, help="stop then; the same command goes on")
    given = parser.parse_args(argv)
    begin = time.monotonic()
    minutes = lambda: (time.monotonic() - begin) / 60
    on_time = lambda: not given.max_minutes or minutes() < given.max_minutes
    left = lambda: max(given.max_minutes - minutes(), 0.01) if given.max_minutes else 0.0
    say = lambda line: print(line, file=sys.stderr, flush=True)
    try:
        values = options.load(given.config)
        for name in ("prompt_sets", "own_prompts", "epochs"):
            values.pop(name, None)
        values |= {"data": str(given.data), "steps": given.steps, "eval_every": given.steps}
        values |= {"target": given.target} if given.target else {}
        base = settings.make(values, f"--config={given.config}")
        base.check_files()
        for path in given.prompts:
            if not path.is_file():
                raise ConfigError(f"--prompts={path}: no such file")
        done = run(base, given.workdir, given.prompts, given.limit, on_time, left, say)
        (given.workdir / "study.md").write_text(table(given.workdir, base), encoding="utf-8")
    except (ConfigError, loop.TrainingError, OSError) as error:
        say(f"study: {error}")
        return 1
    print((given.workdir / "study.md").read_text(), end="")
    say("study: done" if done else "study: time is up; the same command goes on")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
