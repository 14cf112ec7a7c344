"""Speed of budgets that follow cost beside plain decoding and fixed budgets, all in one run.

    python bench/auto_budget.py --prompts gsm8k.jsonl mt_bench.jsonl --limit 8 --max_new_tokens 128

Each prompt is decoded alone (batch 1) with every setting in turn, `--repeats` times, the settings in another order each
time; a turn that compiled or measured does not count. Seconds of a prompt are the median of its turns, so that other
work on the machine falls on all settings alike. Reported, pooled over the prompts of a file: tokens a second of
decoding (what choosing costs included) and of the whole call (with its start and the prompt), both over plain decoding;
the median over turns of a turn's own decoding speed over that of plain decoding beside it, in which other work counts
least; tokens a round, how often rounds of each size were run, and how many outputs were equal to plain decoding. Prints
one table a file, then one JSON line.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("auto_budget")

import collections
import dataclasses
import json
import pathlib
import statistics
import time
from collections.abc import Sequence
from typing import Any

import jax
import timing

from jetspec_jax import command, speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.evals import acceptance
from jetspec_jax.fields import Option
from jetspec_jax.options import AUTO

LINE = command.Line(
    __doc__,
    [
        command.PROMPTS,
        command.TARGET,
        command.HEAD,
        command.DTYPE,
        command.BACKEND,
        Option("budgets", "whole", "Fixed budgets beside plain decoding and auto.", (4, 8, 16), low=2, many=True),
        command.TREE["rule"],
        dataclasses.replace(command.LIMIT, default=8),
        dataclasses.replace(command.SAMPLING["max_new_tokens"], default=128, low=2),
        command.SAMPLING["temperature"],
        dataclasses.replace(timing.REPEATS, default=3),
    ],
)


@command.tool("bench/auto_budget.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)
    sampling = SamplingConfig(args.max_new_tokens, temperature=args.temperature)
    trees = {str(budget): TreeConfig(budget) for budget in args.budgets}
    trees |= {AUTO: TreeConfig(AUTO, rule=args.budget_rule)}
    target, head = command.pair_of(args)
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {target.dtype}"
    rows = []
    for path in args.prompts:
        prompts, name = acceptance.read(target, path, args.limit, 256), pathlib.Path(path).stem
        print(
            f"{name}: {len(prompts)} prompts x {args.max_new_tokens} tokens, batch 1, T {args.temperature:g}, {device}"
        )
        titles = f"{'budget':>7} {'tokens/s':>9} {'over plain':>11} {'whole call':>11} {'turn by turn':>13}"
        print(f"{titles} {'tokens/round':>13} equal  sizes")
        for row in measure(target, head, prompts, sampling, trees, args.repeats):
            rows.append({"set": name, "prompts": len(prompts)} | row)
            line = "{budget:>7} {tokens_per_second:9.1f} {over_plain:11.3f} {whole_over_plain:11.3f}"
            line += " {turn_by_turn:13.3f} {tokens_per_round:13.2f}"
            sizes = ", ".join(f"{size} x {count}" for size, count in row["sizes"].items())
            print(line.format(**row), f"{row['equal']:5}  {sizes}", flush=True)
    print(json.dumps({"settings": command.settings(args), "device": device, "rows": rows}))
    return 0


def measure(target, head, prompts, sampling: SamplingConfig, trees: dict[str, TreeConfig], repeats: int) -> list[dict]:
    """One row a setting, plain decoding first."""
    settings: dict[str, TreeConfig | None] = {"plain": None, **trees}
    total: dict[str, Any] = {name: collections.Counter() for name in settings}
    ratios: dict[str, list[float]] = {name: [] for name in settings}
    for prompt in prompts:
        turns: dict[str, list] = {name: [] for name in settings}
        for turn in range(repeats):
            names = list(settings)
            for name in names[turn % len(names) :] + names[: turn % len(names)]:
                turns[name].append(timed(target, head if settings[name] else None, prompt, settings[name], sampling))
        plain = turns["plain"][0][0].token_ids
        for name, runs in turns.items():
            beside = zip(turns["plain"], runs, strict=True)
            ratios[name] += [one[0].seconds["decode"] / other[0].seconds["decode"] for one, other in beside]
            total[name] += collections.Counter(
                tokens=runs[0][0].new_tokens - 1,
                decode=statistics.median(result.seconds["decode"] for result, _ in runs),
                whole=statistics.median(seconds for _, seconds in runs),
                equal=all(result.token_ids == plain for result, _ in runs),
                rounds=statistics.mean(result.rounds for result, _ in runs),
            )
            for size, count in collections.Counter(n for result, _ in runs for n in result.tree_sizes).items():
                total[name][size] += count
    rate = {name: (sums["tokens"] / sums["decode"], sums["tokens"] / sums["whole"]) for name, sums in total.items()}
    return [
        {
            "budget": name,
            "tokens_per_second": rate[name][0],
            "over_plain": rate[name][0] / rate["plain"][0],
            "whole_over_plain": rate[name][1] / rate["plain"][1],
            "turn_by_turn": statistics.median(ratios[name]),
            "tokens_per_round": sums["tokens"] / sums["rounds"],
            "equal": int(sums["equal"]),
            "sizes": {size: sums[size] for size in sorted(key for key in sums if isinstance(key, int))},
        }
        for name, sums in total.items()
    ]


def timed(target, head, prompt, tree: TreeConfig | None, sampling: SamplingConfig):
    """A result, and the seconds of the whole call; of a second call where the first had to compile."""
    while True:
        begin = time.perf_counter()
        (result,) = speculate.sound(speculate.generate(target, head, [prompt], tree, sampling))
        if not result.seconds["compile"]:
            return result, time.perf_counter() - begin


if __name__ == "__main__":
    raise SystemExit(main())
