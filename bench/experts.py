"""How many experts a tree touches, what that makes a round cost, and which budget pays at which acceptance. No device.

    python bench/experts.py --shape qwen3-30b-a3b
    python bench/experts.py --shape qwen3-30b-a3b --measured decode_latency.json

A model and not a measurement of a trained router. Trees: best-first ones of a draft whose r-th candidate at every depth
is right with probability h (1 - h)^r, h the hit rate; a round gives out one token and, for each node, the probability
of its path. Routers, of which every layer is drawn anew: `even`, every node's experts are drawn alike; `skewed`, the
logits of a node's router are a bias of each expert (normal, standard deviation `--skew`) and noise of unit variance
whose correlation with the parent's is `--correlation`.

Times are floors: the bytes that a round reads (attention, router, lm_head, the touched experts; the draft head, and the
lm_head once more) at `--rate`. With `--measured`, a file whose last line is that of bench/decode_latency.py with the
same shape, they are its times at its budgets, less what experts that a router does not touch would have cost.

Prints Markdown tables for docs/performance.md; a budget in bold is the one with the most tokens a second.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("experts")

import json
import math
import pathlib
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
import shapes

from jetspec_jax import command
from jetspec_jax.config import MoEConfig
from jetspec_jax.drafts import block
from jetspec_jax.fields import ConfigError, Option
from jetspec_jax.files import text
from jetspec_jax.loop import tree
from jetspec_jax.models import qwen3

MIXTURES = tuple(name for name, (config, _) in shapes.PAIRS.items() if config.moe)
BUDGETS = (2, 4, 8, 16, 32, 64, 128, 256)
RATES = (0.5, 0.6, 0.7, 0.8, 0.9)
WIDTH = 32  # candidates of a depth

LINE = command.Line(
    __doc__,
    [
        Option("shape", "choice", "Shape of target and head.", "qwen3-30b-a3b", choices=MIXTURES),
        Option("budgets", "whole", "Tree nodes of a round.", BUDGETS, low=2, many=True),
        Option("hits", "number", "Hit rates of the draft.", RATES, low=0, high=0.99, above=True, many=True),
        Option("skew", "number", "Standard deviation of the experts' biases, of the skewed router.", 0.5, low=0),
        Option("correlation", "number", "Of a node's noise with its parent's.", 0.5, low=0, high=1),
        Option("layers", "whole", "Routers that are drawn.", 200, low=1),
        Option("rate", "number", "Bytes a second that a device reads, in TB.", 4.6, low=0, above=True),
        Option("measured", "text", "Output of bench/decode_latency.py.", metavar="FILE"),
    ],
)


@command.tool("bench/experts.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)
    config, _ = shapes.PAIRS[args.shape]
    budgets = sorted(args.budgets)
    cost = Cost(args.shape, args.rate, measured(args.measured, args.shape))
    lacking = [budget for budget in budgets if cost.rows and budget not in cost.rows]
    if lacking:
        raise ConfigError(
            f"budgets={lacking[0]}: {args.measured} has no such round; choose among {sorted(cost.rows)[1:]}"
        )
    routers = {"even": (0.0, 0.0), "skewed": (args.skew, args.correlation)}
    trees = {hit: grown(hit, budgets, cost.depth) for hit in args.hits}
    middle = trees[min(args.hits, key=lambda hit: abs(hit - 0.7))]
    touched = {name: experts(middle, budgets, config.moe, router, args.layers) for name, router in routers.items()}

    print("| nodes | " + " | ".join(f"experts a layer, {n} | ms | tokens that pay" for n in routers) + " |")
    print("| --- |" + " --- | --- | --- |" * len(routers))
    for budget in (1, *budgets):
        name = budget if budget > 1 else "plain step"
        times = [(found[budget], cost.ms(budget, found[budget]), cost.ms(1, found[1])) for found in touched.values()]
        cells = [f"{count:.1f} | {ms:.2f} | {ms / plain:.2f}" for count, ms, plain in times]
        print(f"| {name} | " + " | ".join(cells) + " |")
    for name, found in touched.items():
        print(f"\n| tokens a second, {name} (tokens a round) | plain | " + " | ".join(map(str, budgets)) + " |")
        print("| --- | --- |" + " --- |" * len(budgets))
        plain = 1e3 / cost.ms(1, found[1])
        for hit, (_, odds) in trees.items():
            tokens = {budget: odds[:budget].sum() for budget in budgets}  # the root's is the round's own token
            speed = {budget: 1e3 * tokens[budget] / cost.ms(budget, found[budget]) for budget in budgets}
            best = max(speed, key=lambda budget: speed[budget])
            mark = {budget: "**" if budget == best and speed[best] > plain else "" for budget in budgets}
            cells = [f"{mark[b]}{speed[b]:.0f}{mark[b]} ({tokens[b]:.2f})" for b in budgets]
            print(f"| hit rate {hit:g} | {plain:.0f} | " + " | ".join(cells) + " |")
    return 0


def grown(hit: float, budgets: Sequence[int], depth: int) -> tuple[np.ndarray, np.ndarray]:
    """Parents of a tree's nodes, in the order in which they are taken, and the probabilities of their paths."""
    logp = math.log(hit) + math.log1p(-hit) * jnp.arange(WIDTH, dtype=jnp.float32)
    rows = jnp.broadcast_to(logp, (1, depth, 1, WIDTH))
    token = jnp.broadcast_to(jnp.arange(WIDTH, dtype=jnp.int32), (1, depth, WIDTH))
    tokens, parents, _, _ = jax.device_get(tree.grow("best_first", tree.Candidates(token, rows), max(budgets)))
    odds = np.ones(max(budgets))
    for node in range(1, max(budgets)):
        odds[node] = odds[parents[0, node]] * hit * (1 - hit) ** tokens[0, node]
    return parents[0], odds


def experts(grown, budgets, moe: MoEConfig, router: tuple[float, float], layers: int) -> dict[int, float]:
    """Mean number of experts that the first nodes of a tree touch in a layer, by how many nodes they are."""
    (parents, _), (skew, correlation) = grown, router
    draw = np.random.default_rng(0)
    noise = draw.standard_normal((len(parents), layers, moe.num_experts))
    for node in range(1, len(parents)):
        noise[node] = math.sqrt(correlation) * noise[parents[node]] + math.sqrt(1 - correlation) * noise[node]
    logits = skew * draw.standard_normal((layers, moe.num_experts)) + noise
    chosen = np.argpartition(-logits, moe.experts_per_token - 1)[..., : moe.experts_per_token]
    hit = np.zeros(logits.shape, bool)
    np.put_along_axis(hit, chosen, True, -1)
    every = np.logical_or.accumulate(hit).sum(-1).mean(-1)
    return {budget: float(every[budget - 1]) for budget in (1, *budgets)}


class Cost:
    """Time of a round by its nodes and the experts that they touch in a layer."""

    def __init__(self, shape: str, rate: float, rows: dict[int, dict] | None):
        config, head = shapes.PAIRS[shape]
        weights = lambda build, config: build(config, jnp.bfloat16)[1]
        size = lambda tree: sum(2 * math.prod(x.shape) for x in jax.tree.leaves(tree))
        target = weights(qwen3.build, config)
        table = size(target.get("lm_head", target["embedding"]))
        layers = [target["layers"][i] for i in config.moe.sparse_layers]
        self.expert = sum(size([layer["gate_up"], layer["down"]]) for layer in layers) / config.moe.num_experts
        self.rest = size(target["layers"]) + table - self.expert * config.moe.num_experts
        self.head = size(weights(block.build, head)) + table
        self.rate, self.rows, self.depth = rate * 1e12, rows, head.block_size - 1

    def ms(self, budget: int, experts: float) -> float:
        """Milliseconds of a round; a budget of 1 is a plain step."""
        if self.rows:
            row = self.rows[budget]
            return row["ms"] - 1e3 * (np.mean(row["experts_by_layer"]) - experts) * self.expert / self.rate
        return 1e3 * (self.rest + experts * self.expert + (self.head if budget > 1 else 0)) / self.rate


def measured(file: str | None, shape: str) -> dict[int, dict] | None:
    """Rows of a bench/decode_latency.py by their budgets."""
    if file is None:
        return None
    try:
        found = json.loads(text.read(pathlib.Path(file)).splitlines()[-1])
        rows = {row["budget"]: row for row in found["rows"] if row.get("experts_by_layer")}
        wrong = found["settings"]["shape"] != shape or 1 not in rows
    except (ValueError, LookupError, TypeError):
        wrong = True
    if wrong:
        raise ConfigError(f"measured={file}: its last line is not that of bench/decode_latency.py --shape {shape}")
    return rows
