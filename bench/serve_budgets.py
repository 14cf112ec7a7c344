"""Tokens a second by clients, for plain decoding, fixed budgets, and budgets that follow cost: all in one run.

    python bench/serve_budgets.py --prompts gsm8k.jsonl mt_bench.jsonl --minutes 8 --out demo.jsonl
    python bench/serve_budgets.py --shape qwen3-8b --minutes 12 --out 8b.jsonl
    python bench/serve_budgets.py --shape qwen3-8b --lengths 64:4.77 128:5.52 256:5.94 --minutes 12 --out 8b_chat.jsonl

The server's scheduler runs without HTTP: `--clients` ask again as soon as they have their answers, greedy,
`--max_new_tokens` each. The demo pair (or --target and --head) answers real prompts. With `--shape` the pair has random
weights of that shape, and a synthetic drafter decides what is accepted at the cost of the real one: at every depth the
right token is among its candidates with probabilities that fall as a power of their rank, fitted so that trees of so
many nodes accept `--lengths` tokens a round (the default is published for Qwen3-8B on MATH-500). What was fitted and
what trees really accepted stand in every line. A line is written as soon as its level has been measured; after
`--minutes` nothing new is begun, and what is missing is named. Prints a table, then one JSON line.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("serve_budgets")

import dataclasses
import heapq
import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import shapes

from jetspec_jax import command, methods, speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.drafts import synthetic
from jetspec_jax.drafts.synthetic import SyntheticConfig
from jetspec_jax.engine import geometry, requests, tempo
from jetspec_jax.engine.rows import Row
from jetspec_jax.engine.slots import Plan, Slots, Trees
from jetspec_jax.evals import acceptance
from jetspec_jax.fields import ConfigError, Option
from jetspec_jax.files import cache_folder
from jetspec_jax.files.pair import LoadedHead, LoadedTarget
from jetspec_jax.options import AUTO
from jetspec_jax.serve.job import Job
from jetspec_jax.serve.scheduler import Scheduler

DEPTH, RANKS = 15, 16
LINE = command.Line(
    __doc__,
    [
        dataclasses.replace(shapes.SHAPE, default=None),
        command.TARGET,
        command.HEAD,
        dataclasses.replace(command.PROMPTS, required=False),
        Option("budgets", "whole", "1 is plain decoding.", (1, 16, 64, 256, AUTO), low=1, many=True, choices=(AUTO,)),
        Option("clients", "whole", "Callers of a closed loop, a level each.", (1, 2, 4, 8, 16, 32), low=1, many=True),
        Option("answers", "whole", "Of each client and level.", 2, low=1),
        Option("lengths", "texts", "NODES:TOKENS of the synthetic drafter.", ("64:7.42", "128:9.95", "256:10.76"),
               many=True),
        Option("prompt", "whole", "Tokens of a random prompt.", 256, low=1),
        dataclasses.replace(command.SAMPLING["max_new_tokens"], default=128, low=2),
        Option("context", "whole", "Cache slots of a row.", 1024, low=64),
        Option("sizes", "whole", "Nodes among which auto chooses. Default: the server's.", (), low=1, many=True),
        Option("minutes", "number", "After which nothing new is begun.", 8.0, above=True),
        Option("out", "text", "A JSONL file, a line a level.", metavar="FILE"),
        command.DTYPE,
        command.BACKEND,
    ],
)  # fmt: skip


@command.tool("bench/serve_budgets.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    end = time.monotonic()
    args = LINE.parse(argv)
    end += 60 * args.minutes
    said: dict[str, Any] = {"device": f"{jax.devices()[0].device_kind}, jax {jax.__version__}"}
    if args.shape:
        target, head, prompts, more = made(args)
        said |= more
    else:
        target, head = command.pair_of(args)
        if not args.prompts:
            raise ConfigError("prompts: the demo pair answers real ones; name files, or give --shape")
        sets = [acceptance.read(target, path, 256, args.context // 2) for path in args.prompts]
        prompts = [row for rows in zip(*sets, strict=False) for row in rows]  # in turn: half of each
    rows, missing = [], []
    with open(args.out or "/dev/null", "w", encoding="utf-8") as file:
        for budget in args.budgets:
            slots = None
            for clients in sorted(args.clients):
                name = f"{budget} x {clients}"
                if time.monotonic() > end:
                    missing.append(name)
                    continue
                begin = time.monotonic()
                slots = slots or prepared(args, target, head, budget)
                row = said | {"budget": budget, "clients": clients, "ready": time.monotonic() - begin}
                row |= level(slots, prompts, args, clients, end)
                rows.append(row)
                print(json.dumps(row), file=file, flush=True)
    print(table(rows))
    print(json.dumps({"settings": command.settings(args), **said, "rows": rows, "missing": missing}))
    return 0


def made(args: command.Args) -> tuple[LoadedTarget, LoadedHead, list[list[int]], dict[str, Any]]:
    """A pair of a shape whose acceptance is known, prompts for it, and what was fitted."""
    dtype = args.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    cache_folder.keep_programs()  # hundreds of them, of sizes that do not change
    pair = shapes.random_pair(args.shape, dtype, args.backend)
    wanted = {}
    for text in args.lengths:
        nodes, _, tokens = text.partition(":")
        try:
            wanted[int(nodes)] = float(tokens)
        except ValueError:
            raise ConfigError(f"lengths={text}: give NODES:TOKENS, as 64:7.42") from None
    ranks = fitted(wanted)
    config = SyntheticConfig(1.0, pair.target.vocab_size, DEPTH, ranks=ranks)
    model, weights = synthetic.scripted(pair.target, pair.params["target"], pair.target.config.hidden_size)
    draft, params = synthetic.build(config, inner=pair.draft, inner_params=pair.params["draft"])
    shape = dataclasses.replace(pair.target.config, vocab_size=pair.target.vocab_size)
    target = LoadedTarget(model, weights, shape, dtype, (), args.shape, "", 0.0, lambda: None)
    draw = np.random.default_rng(0)
    prompts = [draw.integers(0, pair.target.vocab_size, args.prompt).tolist() for _ in range(64)]
    nodes = sorted({16, 64, 128, 256, *wanted})
    more = {"shape": args.shape, "published": wanted, "fitted": {n: round(expected(ranks, n), 2) for n in nodes}}
    return target, LoadedHead(draft, params, source="synthetic"), prompts, more


def fitted(wanted: dict[int, float]) -> tuple[float, ...]:
    """Probabilities of ranks under which trees accept what is wanted, as nearly as a power law can."""

    def law(first: float, power: float) -> tuple[float, ...]:
        tail = np.arange(1, RANKS) ** -power
        rest = (1 - first) * tail / tail.sum() * 0.98
        return tuple(np.sort(np.append(first, rest))[::-1].tolist())

    laws = [law(first, power) for first in np.linspace(0.2, 0.95, 26) for power in (0.5, 1.0, 1.5, 2.0, 3.0)]
    wrong = lambda ranks: sum((np.log(expected(ranks, n)) - np.log(tokens)) ** 2 for n, tokens in wanted.items())
    return min(laws, key=wrong)


def expected(ranks: Sequence[float], nodes: int) -> float:
    """Tokens a round of the most probable tree of so many nodes, bonus included."""
    heap, total = [(-1.0, 0, 0)], 0.0  # probability of a path, its depth, the rank of its last node
    for _ in range(nodes):
        if not heap:
            break
        minus, depth, rank = heapq.heappop(heap)
        total -= minus
        if depth and rank + 1 < len(ranks):
            heapq.heappush(heap, (minus * ranks[rank + 1] / ranks[rank], depth, rank + 1))
        if depth < DEPTH:
            heapq.heappush(heap, (minus * ranks[0], depth + 1, 0))
    return total


def prepared(args: command.Args, target, head, budget) -> Slots:
    """Slots of a budget, for greedy rows."""
    tree = TreeConfig()
    if head.family:
        tree = methods.tree(methods.usual(head, True), tree, head)
    if budget == AUTO:
        trees = Trees(speculate.ladder_of(head, tree, args.sizes or tempo.SIZES[jax.default_backend()]))
    else:
        draft = speculate.draft_of(head, tree, geometry.budget_nodes([budget]))
        trees = Trees({draft.nodes: draft})
    batches = tuple(1 << i for i in range((max(args.clients) - 1).bit_length() + 1))
    capacity = geometry.slots(args.context)
    plan = Plan(capacity, batches, trees.largest.nodes, (min(256, capacity),))
    slots = Slots(target, head if plan.nodes > 1 else None, trees, plan, (frozenset(),))
    slots.prepare()
    return slots


def level(slots: Slots, prompts, args: command.Args, clients: int, end: float) -> dict[str, Any]:
    """What so many clients get; a first answer each does not count, and the last ones are cut where time is up."""
    scheduler, done = Scheduler(slots, 4 * clients, 0), []
    option = requests.resolve(slots.target, SamplingConfig(args.max_new_tokens, ignore_eos=True))
    sizes: dict[int, int] = {}
    asked = 0

    def ask() -> None:
        nonlocal asked
        row = Row(prompts[asked % len(prompts)], option, slots.usual)
        slots.check(row)
        asked += 1
        scheduler.submit(Job(row, told))

    def told(update) -> None:
        if update.result:
            done.append(update.result)

    def run(answers: int) -> float:
        begin, first, heard = time.perf_counter(), len(done), len(done)
        for _ in range(min(clients, answers)):
            ask()
        left = answers - min(clients, answers)
        while len(done) < first + answers and scheduler._turn():
            while heard < len(done):
                heard += 1
                if left and time.monotonic() < end:
                    left -= 1
                    ask()
        return time.perf_counter() - begin

    run(clients)
    done.clear()
    seconds = run(clients * args.answers)
    for result in done:
        for size in result.tree_sizes:
            sizes[size] = sizes.get(size, 0) + 1
    emitted = [count for result in done for count in result.emitted]
    tokens = sum(result.new_tokens for result in done)
    return {
        "answers": len(done), "tokens": tokens, "seconds": seconds, "tokens_per_second": tokens / seconds,
        "tokens_per_round": sum(emitted) / max(len(emitted), 1), "sizes": dict(sorted(sizes.items())),
        "complete": len(done) == clients * args.answers, "programs": slots.compiled,
    }  # fmt: skip


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Tokens a second, a row a budget and a column for each number of clients."""
    clients = sorted({row["clients"] for row in rows})
    found = {(row["budget"], row["clients"]): row for row in rows}
    lines = ["| budget | " + " | ".join(f"{n} clients" for n in clients) + " |", "| --- " * (len(clients) + 1) + "|"]
    for budget in dict.fromkeys(row["budget"] for row in rows):
        cells = [found.get((budget, n)) for n in clients]
        said = [f"{cell['tokens_per_second']:.0f} ({cell['tokens_per_round']:.2f})" if cell else "-" for cell in cells]
        lines.append(f"| {'plain' if budget == 1 else budget} | {' | '.join(said)} |")
    return "\n".join(lines) + "\ntokens a second of all rows together (tokens a round of a row)"


if __name__ == "__main__":
    raise SystemExit(main())
