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
same shape, they are that run's: its times less what the experts that it touched take at its plain read, and as much
for the experts of the model. What is left of a round is interpolated between its budgets, and below the smallest it is
that one's.

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
from typing import Any, NamedTuple

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
USUAL = 4.6  # TB that the device of docs/performance.md reads in a second

SHAPE = Option("shape", "choice", "Shape of target and head.", "qwen3-30b-a3b", choices=MIXTURES)
SKEW = Option("skew", "number", "Standard deviation of the experts' biases, of the skewed router.", 0.5, low=0)
CORRELATION = Option("correlation", "number", "Of a node's noise with its parent's.", 0.7, low=0, high=1)
RATE = Option(
    "rate", "number", "TB that the device reads in a second. Default: 4.6, or the measured run's.", low=0, above=True
)
MEASURED = Option("measured", "text", "Output of bench/decode_latency.py.", metavar="FILE")
LINE = command.Line(
    __doc__,
    [
        SHAPE,
        Option("budgets", "whole", "Tree nodes of a round. Default: to 256, or as measured.", (), low=2, many=True),
        Option("hits", "number", "Hit rates of the draft.", RATES, low=0, high=0.99, above=True, many=True),
        SKEW,
        CORRELATION,
        Option("layers", "whole", "Routers that are drawn.", 200, low=1),
        RATE,
        MEASURED,
    ],
)


class Router(NamedTuple):
    """How alike the experts of a tree's nodes are."""

    skew: float = 0.0  # standard deviation of the experts' biases, beside noise of unit variance
    correlation: float = 0.0  # of a node's noise with its parent's
    share: float = 0.0  # of that noise's variance that nodes of the same token at the same depth have in common


@command.tool("bench/experts.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)
    config, _ = shapes.PAIRS[args.shape]
    cost = Cost(args.shape, args.rate, args.measured)
    budgets = sorted(args.budgets) or [budget for budget in BUDGETS if budget <= cost.largest]
    cost.check("budgets", budgets[-1])
    routers = {"even": Router(), "skewed": Router(args.skew, args.correlation)}
    trees = {hit: grown(hit, budgets, cost.depth) for hit in args.hits}
    middle, _ = trees[min(args.hits, key=lambda hit: abs(hit - 0.7))]
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
    grow = jax.jit(tree.grow, static_argnums=(0, 2))  # as a single program it is compiled sooner
    tokens, parents, _, _ = jax.device_get(grow("best_first", tree.Candidates(token, rows), max(budgets)))
    odds = np.ones(max(budgets))
    for node in range(1, max(budgets)):
        odds[node] = odds[parents[0, node]] * hit * (1 - hit) ** tokens[0, node]
    return parents[0], odds


def experts(parents, budgets, moe: MoEConfig, router: Router, layers: int) -> dict[int, float]:
    """Mean number of experts that the first nodes of a tree touch in a layer, by how many nodes they are."""
    hit = routed(parents, np.arange(len(parents)), moe, router, layers, np.random.default_rng(0))
    every = np.logical_or.accumulate(hit).sum(-1).mean(-1)
    return {budget: float(every[budget - 1]) for budget in (1, *budgets)}


def routed(parents, same, moe: MoEConfig, router: Router, layers: int, draw: np.random.Generator) -> np.ndarray:
    """Which experts each node of a tree touches, drawn: [nodes, layers, X] of bool.

    Args:
      parents: of the nodes; parents come first.
      same: a number for each node, the same for nodes that stand for the same token at the same depth.
      moe: how many experts there are, and how many a node has.
      router: how alike they are.
      layers: each has a router of its own.
      draw: the source of chance.
    """
    normal = lambda *shape: draw.standard_normal((*shape, layers, moe.num_experts), np.float32)
    noise = normal(len(parents))
    for node in range(1, len(parents)):
        noise[node] *= math.sqrt(1 - router.correlation**2)
        noise[node] += router.correlation * noise[parents[node]]
    if router.share:
        noise = math.sqrt(1 - router.share) * noise + math.sqrt(router.share) * normal(max(same) + 1)[same]
    logits = router.skew * normal() + noise
    chosen = np.argpartition(-logits, moe.experts_per_token - 1)[..., : moe.experts_per_token]
    hit = np.zeros(logits.shape, bool)
    np.put_along_axis(hit, chosen, True, -1)
    return hit


class Cost:
    """Time of a round by its nodes and the experts that they touch in a layer.

    largest: nodes up to which it is known. depth: longest path of the shape's head. expert: milliseconds that one more
    expert in every layer takes.
    """

    def __init__(self, shape: str, rate: float | None, file: str | None):
        """Makes that of a shape.

        Args:
          shape: of `MIXTURES`.
          rate: TB that the device reads in a second; None is that of the file, or a usual one.
          file: output of bench/decode_latency.py, whose times then count; None is floors.
        """
        config, head = shapes.PAIRS[shape]
        weights = lambda build, config: build(config, jnp.bfloat16)[1]
        size = lambda tree: sum(2 * math.prod(x.shape) for x in jax.tree.leaves(tree))
        target = weights(qwen3.build, config)
        table = size(target.get("lm_head", target["embedding"]))
        layers = [target["layers"][i] for i in config.moe.sparse_layers]
        experts = sum(size([layer["gate_up"], layer["down"]]) for layer in layers)
        rest = size(target["layers"]) + table - experts
        self.depth, self.largest, self.file = head.block_size - 1, BUDGETS[-1], file
        rows, its_rate = measured(file, shape) if file else ({}, USUAL)
        each = 1e-9 / (rate or its_rate)  # milliseconds a byte
        self.expert = each * experts / config.moe.num_experts
        if rows:
            left = {n: row["ms"] - self.expert * np.mean(row["experts_by_layer"]) for n, row in sorted(rows.items())}
            self._plain, self.largest = left.pop(1), max(left)
        else:
            self._plain = each * rest
            left = {2: each * (rest + size(weights(block.build, head)) + table)}
        self._nodes, self._left = list(left), list(left.values())

    def check(self, option: str, nodes: int) -> None:
        """Refuses nodes of an option that are more than have been measured."""
        if self.file and nodes > self.largest:
            raise ConfigError(f"{option}={nodes}: {self.file} has rounds of at most {self.largest} nodes; give fewer")

    def round(self, nodes, experts):
        """Milliseconds of rounds, of numbers or of arrays."""
        return np.interp(nodes, self._nodes, self._left) + self.expert * experts

    def plain(self, experts: float) -> float:
        """Milliseconds of a plain step."""
        return self._plain + self.expert * experts

    def ms(self, budget: int, experts: float) -> float:
        """Milliseconds of a round; a budget of 1 is a plain step."""
        return self.plain(experts) if budget == 1 else float(self.round(budget, experts))


def measured(file: str, shape: str) -> tuple[dict[int, dict[str, Any]], float]:
    """Rows of a bench/decode_latency.py by their budgets, a plain step among them, and the TB a second of its read."""
    try:
        found = json.loads(text.read(pathlib.Path(file)).splitlines()[-1])
        rows = {row["budget"]: row for row in found["rows"] if row.get("experts_by_layer")}
        rate = found["machine"]["bytes_per_second"] / 1e12
        wrong = found["settings"]["shape"] != shape or 1 not in rows or len(rows) < 2
    except (ValueError, LookupError, TypeError):
        wrong = True
    if wrong:
        raise ConfigError(f"measured={file}: its last line is not that of bench/decode_latency.py --shape {shape}")
    return rows, rate
