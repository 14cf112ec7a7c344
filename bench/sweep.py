"""Speed of plain and speculative decoding by budget and depth, both sides in one run.

    python bench/sweep.py --prompts gsm8k.jsonl --limit 16 --max_new_tokens 128
    python bench/sweep.py --prompts gsm8k.jsonl mbpp.jsonl --limit 64 --settings 16:15 64:15

Each prompt is decoded alone (batch 1), plainly and with every setting, round robin, after a warm-up that compiles.
Reported, pooled over the prompts of a file: time of a round (decode alone), tokens a second of decoding and end to end
(with reading the prompt), the speed-up over plain decoding end to end, and how many outputs were equal. Prints one
table a file, then one JSON line.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("sweep")

import dataclasses
import json
import pathlib
import re
import statistics
from collections.abc import Sequence

import jax
import timing

from jetspec_jax import baseline, command, speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.evals import acceptance
from jetspec_jax.fields import Option, shown

LINE = command.Line(
    __doc__,
    [
        command.PROMPTS,
        command.TARGET,
        command.HEAD,
        command.DTYPE,
        command.BACKEND,
        Option(
            "settings",
            "text",
            "Trees.",
            ("4:3", "8:3", "8:5", "8:7", "16:8", "16:15", "32:15"),
            many=True,
            metavar="BUDGET:DEPTH",
        ),
        command.TREE["scorer"],
        dataclasses.replace(command.LIMIT, default=16),
        dataclasses.replace(command.SAMPLING["max_new_tokens"], default=128, low=1),
        dataclasses.replace(timing.REPEATS, default=1),
    ],
)


@command.tool("bench/sweep.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)
    sampling = SamplingConfig(args.max_new_tokens)
    trees = {text: tree(text, args.scorer) for text in args.settings}
    target, head = command.pair_of(args)
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {target.dtype}"
    rows = []
    for path in args.prompts:
        prompts = acceptance.read(target, path, args.limit, 256)
        name = pathlib.Path(path).stem
        print(f"{name}: {len(prompts)} prompts x {args.max_new_tokens} tokens, batch 1, {device}")
        print(f"{'budget:depth':>12} {'ms/round':>9} {'tokens/round':>13} {'tokens/s':>9} {'end to end':>11}", end="")
        print(f"{'speed-up':>10}  equal", flush=True)
        for row in measure(target, head, prompts, sampling, trees, args.repeats):
            rows.append({"set": name, "prompts": len(prompts)} | row)
            line = "{setting:>12} {ms_per_round:9.2f} {tokens_per_round:13.2f} {tokens_per_second:9.1f}"
            print(line.format(**row), f"{row['end_to_end']:11.1f} {row['speedup']:9.2f}  {row['equal']}", flush=True)
    print(json.dumps({"settings": command.settings(args), "device": device, "rows": rows}))
    return 0


def tree(text: str, scorer: str) -> TreeConfig:
    """The tree of "BUDGET:DEPTH"; scorer: that of `TreeConfig`."""
    if not re.fullmatch("[0-9]{1,4}:[0-9]{1,4}", text):
        raise command.UsageError(f"--settings={shown(text)}: give BUDGET:DEPTH, e.g. 16:15")
    try:
        budget, depth = map(int, text.split(":"))
        return TreeConfig(budget, depth=depth, scorer=scorer)
    except ConfigError as error:
        raise command.UsageError(f"--settings={text}: {error}") from None


def measure(target, head, prompts, sampling: SamplingConfig, trees: dict, repeats: int) -> list[dict]:
    """One row a setting, plain decoding first."""

    def decode(setting, prompt):
        if setting == "plain":
            return baseline.generate(target, [prompt], sampling)[0]
        return speculate.generate(target, head, [prompt], trees[setting], sampling)[0]

    settings = ["plain", *trees]
    decoding, whole, tokens, rounds, equal = (dict.fromkeys(settings, 0) for _ in range(5))
    for prompt in prompts:
        first = {}
        for s in settings:
            runs = [decode(s, prompt)]
            if runs[0].seconds["compile"]:  # the first of its bucket: its program was new
                runs = [decode(s, prompt)]
            runs += [decode(s, prompt) for _ in range(repeats - 1)]
            first[s] = runs[0]
            decoding[s] += statistics.median(r.seconds["decode"] for r in runs)
            whole[s] += statistics.median(r.seconds["decode"] + r.seconds["prefill"] for r in runs)
            tokens[s] += runs[0].new_tokens
            rounds[s] += runs[0].rounds
            equal[s] += runs[0].token_ids == first["plain"].token_ids
    return [
        {
            "setting": s,
            "ms_per_round": 1e3 * decoding[s] / rounds[s],
            "tokens_per_round": (tokens[s] - len(prompts)) / rounds[s],
            "tokens_per_second": (tokens[s] - len(prompts)) / decoding[s],
            "end_to_end": tokens[s] / whole[s],
            "speedup": tokens[s] / whole[s] / (tokens["plain"] / whole["plain"]),
            "equal": equal[s],
        }
        for s in settings
    ]
