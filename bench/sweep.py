"""Speed of plain and speculative decoding by budget and depth, both sides in one run.

    python bench/sweep.py --prompts gsm8k.jsonl --limit 16 --max_new_tokens 128

Each prompt is decoded alone (batch 1), plainly and with every setting, round robin, after a warm-up that compiles.
Reported are decode seconds pooled over prompts, the speed-up over plain decoding, and whether all tokens were equal.
Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys

import jax

from jetspec_jax import baseline, demo, load, speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.evals import acceptance


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", required=True, metavar="FILE", help="JSONL prompt file")
    parser.add_argument("--target", help="default: the demo target")
    parser.add_argument("--head", help="default: the demo head")
    parser.add_argument("--dtype", choices=["float32", "bfloat16"])
    parser.add_argument(
        "--settings", nargs="+", default=["4:3", "8:3", "8:5", "8:7", "16:8", "16:15", "32:15"],
        metavar="BUDGET:DEPTH",
    )  # fmt: skip
    parser.add_argument("--limit", type=int, default=16)
    parser.add_argument("--max_new_tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=1, help="the median over repeats of each prompt is taken")
    args = parser.parse_args()

    try:
        run(args)
    except (ConfigError, OSError, ValueError) as error:
        sys.exit(f"sweep: {error}")


def run(args: argparse.Namespace) -> None:
    """Measures and prints."""
    target = load.load_target(args.target or demo.fetch_target(), args.dtype)
    head = load.load_head(args.head or demo.head_folder(), target)
    prompts = acceptance.read(target, args.prompts, args.limit, 256)
    sampling = SamplingConfig(args.max_new_tokens)
    trees = {s: TreeConfig(int(s.split(":")[0]), depth=int(s.split(":")[1])) for s in args.settings}
    for prompt in (min(prompts, key=len), max(prompts, key=len)):  # compiles every bucket
        baseline.generate(target, [prompt], sampling)
        for tree in trees.values():
            speculate.generate(target, head, [prompt], tree, sampling)

    seconds = dict.fromkeys(("plain", *trees), 0.0)
    tokens, rounds, equal = dict.fromkeys(seconds, 0), dict.fromkeys(seconds, 0), dict.fromkeys(seconds, True)
    for prompt in prompts:
        runs = {s: [] for s in seconds}
        for _ in range(args.repeats):
            runs["plain"] += baseline.generate(target, [prompt], sampling)
            for s, tree in trees.items():
                runs[s] += speculate.generate(target, head, [prompt], tree, sampling)
        for s, results in runs.items():
            seconds[s] += statistics.median(r.seconds["decode"] for r in results)
            tokens[s] += results[0].new_tokens - 1
            rounds[s] += results[0].rounds
            equal[s] &= results[0].token_ids == runs["plain"][0].token_ids

    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {target.dtype}"
    print(f"{len(prompts)} prompts x {args.max_new_tokens} tokens, batch 1, {device}")
    print(f"{'budget:depth':>12} {'ms/round':>9} {'tokens/round':>13} {'tokens/s':>9} {'speed-up':>9}  equal")
    rows = []
    for s in seconds:
        rate = tokens[s] / seconds[s]
        row = {
            "setting": s,
            "ms_per_round": 1e3 * seconds[s] / rounds[s],
            "tokens_per_round": tokens[s] / rounds[s],
            "tokens_per_second": rate,
            "speedup": rate / (tokens["plain"] / seconds["plain"]),
            "equal": equal[s],
        }
        rows.append(row)
        line = "{setting:>12} {ms_per_round:9.1f} {tokens_per_round:13.2f} {tokens_per_second:9.1f} {speedup:9.2f}"
        print(line.format(**row), f" {row['equal']}")
    print(json.dumps({"settings": vars(args), "device": device, "rows": rows}))


if __name__ == "__main__":
    main()
