"""Does a tree of a mixture gain where nodes are taken by probability over price, not by probability? Needs no device.

    python bench/prices.py --shape qwen3-30b-a3b --measured decode_latency.json

A node's price is what the round costs more with it: the experts that it touches and no node before it does, and its
part of the rest. Costs and routers are those of bench/experts.py (floors, or with `--measured` a run's times); `tokens`
is a third router, `skewed` and with `--share` of the noise common to the nodes of one token at one depth, which under
another parent then add few experts. Drafts are right as often as they say: a depth's best candidate with a probability
that is drawn for each round and depth (beta, mean `--hits`, `--concentration` the sum of its parameters), the others
falling geometrically.

Two rules take nodes by probability over price. `depth` has a curve: what a node adds by how many are in, times what
nodes of its depth add more or less than others; means over all best-first trees. `ideal` knows of this
very tree how many experts each node would add to those that are in, a mean over `--known` routers: no curve can tell
more. What trees cost is counted with other routers, as many as the shape has layers. All orders are cut

* fixed: after the number of nodes that is best for all rounds;
* first: where tokens over time first fall (CaDDTree's rule, `loop/budgets.tree_size`);
* best: where they are most of all;
* rate: where a round's tokens, less its time at the rate of all rounds, are most; no cut can be expected to give more.

Cuts know the mean experts of trees by their nodes; `ideal`'s know what this tree is expected to touch. Prints a table
(tokens a second and mean nodes by probability; what the rules gain with the same cut, and `ideal`, cut at its best,
over the fixed budget by probability; per cent, with half of what holds 95 % of resampled rounds), then one JSON line.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("prices")

import json
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import experts
import jax
import jax.numpy as jnp
import numpy as np
import shapes
from experts import Cost, Router

from jetspec_jax import command
from jetspec_jax.fields import Option
from jetspec_jax.loop import budgets, tree

CUTS = ("fixed", "first", "best", "rate")
RULES = ("depth", "ideal")
LINE = command.Line(
    __doc__,
    [
        experts.SHAPE,
        Option("hits", "number", "Mean hit rates.", (0.6, 0.7, 0.8, 0.9), low=0.1, high=0.95, many=True),
        Option("concentration", "number", "Of hit rates about their mean.", 3.0, low=0, above=True),
        experts.SKEW,
        experts.CORRELATION,
        Option("share", "number", "Of a node's noise that is its token's, of the router `tokens`.", 0.8, low=0, high=1),
        Option("nodes", "whole", "Of the largest tree.", 128, low=2),
        Option("rounds", "whole", "That are drawn for each hit rate.", 24, low=2),
        Option("known", "whole", "Routers out of which prices are known.", 96, low=1),
        experts.RATE,
        experts.MEASURED,
    ],
)


class Drafts(NamedTuple):
    """What R rounds could verify: the P most probable nodes of each, best first."""

    parents: np.ndarray  # [R, P]; parents come first, -1 for the root
    depths: np.ndarray  # [R, P]
    odds: np.ndarray  # [R, P] probabilities of paths, 1 for the root
    same: np.ndarray  # [R, P] a number for each token of each depth


class Grown(NamedTuple):
    """A tree in the order of its nodes, T of them."""

    tokens: np.ndarray  # [T] that a round of the first n nodes gives out
    expected: np.ndarray  # [T] experts that they are expected to touch in a layer
    touched: np.ndarray  # [T] experts that they do


@command.tool("bench/prices.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)
    config, _ = shapes.PAIRS[args.shape]
    cost = Cost(args.shape, args.rate, args.measured)
    cost.check("nodes", args.nodes)
    routers = {
        "even": Router(),
        "skewed": Router(args.skew, args.correlation),
        "tokens": Router(args.skew, args.correlation, args.share),
    }
    plain = 1e3 / cost.plain(config.moe.experts_per_token)
    titles = " | ".join(f"{cut} | {' | '.join(RULES)}" for cut in CUTS)
    print(f"| router, hit rate (plain {plain:.0f}) | {titles} | over fixed |")
    print("| --- |" + " --- |" * (len(CUTS) * (1 + len(RULES)) + 1), flush=True)
    rows = []
    drafts = {hit: drafted(hit, args, cost.depth) for hit in args.hits}
    for name, router in routers.items():
        for hit in args.hits:
            trees = grown(drafts[hit], config.moe, router, args, cost)
            row = {"router": name, "hit": hit, "plain": plain} | compared(trees, cost, args.nodes)
            rows.append(row)
            print(shown(row), flush=True)
    print(json.dumps({"settings": command.settings(args), "rows": rows}))
    return 0


def drafted(hit: float, args: command.Args, depth: int) -> Drafts:
    """Rounds' drafts: the nodes of best-first trees half as large again; others are too improbable to pay."""
    draw, width, nodes = np.random.default_rng(0), experts.WIDTH, args.nodes + args.nodes // 2
    best = draw.beta(hit * args.concentration, (1 - hit) * args.concentration, (args.rounds, depth, 1)).clip(0.01, 0.99)
    logp = np.log(best) + np.log1p(-best) * np.arange(width)
    token = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), logp.shape)
    candidates = tree.Candidates(token, jnp.asarray(logp[:, :, None], jnp.float32))
    grow = jax.jit(tree.grow, static_argnums=(0, 2))
    tokens, parents, depths, _ = jax.device_get(grow("best_first", candidates, nodes))
    odds, each = np.ones(parents.shape), np.arange(args.rounds)
    for node in range(1, nodes):
        own = logp[each, depths[:, node] - 1, tokens[:, node]]
        odds[:, node] = odds[each, parents[:, node]] * np.exp(own)
    return Drafts(parents, depths, odds, np.where(depths > 0, (depths - 1) * width + tokens + 1, 0))


def grown(drafts: Drafts, moe, router: Router, args: command.Args, cost: Cost) -> dict[str, list[Grown]]:
    """A tree of each round, by the order of their nodes."""
    draw, layers = np.random.default_rng(1), args.known + len(moe.sparse_layers)
    number = lambda same: np.unique(same, return_inverse=True)[1]
    hits = [
        experts.routed(parents, number(same), moe, router, layers, draw)
        for parents, same in zip(drafts.parents, drafts.same, strict=True)
    ]
    rest = cost.round(np.arange(1, args.nodes + 1), 0.0)

    def ordered(at: int, order: np.ndarray) -> Grown:
        count = np.logical_or.accumulate(hits[at][order]).sum(-1)
        return Grown(drafts.odds[at][order].cumsum(), count[:, : args.known].mean(-1), count[:, args.known :].mean(-1))

    def by_price(at: int, adds) -> Grown:
        return ordered(at, priced(drafts.parents[at], drafts.odds[at], rest, cost.expert, adds))

    rounds = range(len(hits))
    usual = [ordered(at, np.arange(args.nodes)) for at in rounds]
    curve, level = curves(np.array([one.expected for one in usual]), drafts.depths[:, : args.nodes])
    by_depth = [by_price(at, lambda order, own=level[drafts.depths[at]]: curve[len(order)] * own) for at in rounds]
    known = lambda trees: [one._replace(expected=curve.cumsum()) for one in trees]
    ideal = [by_price(at, Left(hits[at][:, : args.known]).adds) for at in rounds]
    return {"probability": known(usual), "depth": known(by_depth), "ideal": ideal}


def curves(expected: np.ndarray, depths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Experts that a node adds by how many are in, means over trees [T], and times what by its depth.

    expected: [R, T] that the first nodes of trees touch. depths: [R, T].
    """
    adds = np.diff(expected, axis=1, prepend=0.0)
    curve = adds.mean(0)
    usual = np.broadcast_to(curve, depths.shape)
    total = lambda of: np.bincount(depths.ravel(), of.ravel(), minlength=64)  # deeper than any tree
    return curve, np.divide(total(adds), total(usual), out=np.ones(64), where=total(usual) > 0)


class Left:
    """The experts that no node of a tree has touched yet."""

    def __init__(self, hit: np.ndarray):
        """Starts with all of them; `hit` [P, L, X] are those that nodes touch."""
        self.layers, self.hit = hit.shape[1], hit.reshape(len(hit), -1)
        self.by_expert = np.ascontiguousarray(self.hit.T)
        self.left = np.ones(self.hit.shape[1], bool)
        self.each = self.hit.sum(1)

    def adds(self, order: list[int]) -> np.ndarray:
        """Returns how many of them each node would touch in a layer; after each node that `order` has more, once."""
        new = self.hit[order[-1]] & self.left
        self.left &= ~new
        self.each = self.each - self.by_expert[new].sum(0)
        return self.each / self.layers


def priced(parents, odds, rest: np.ndarray, expert: float, adds: Callable[[list[int]], np.ndarray]) -> np.ndarray:
    """The order in which nodes come by probability over price, as many as `rest` has; a node's parent is always in.

    Args:
      parents: [P].
      odds: [P].
      rest: [T] milliseconds of a round of 1, 2, ... nodes, without experts.
      expert: milliseconds of an expert more in every layer.
      adds: of the nodes that are in, in order; the experts of a layer that each node would add.
    """
    open_, order = np.zeros(len(parents), bool), [0]
    for more in np.diff(rest):
        open_[order[-1]] = False
        open_ |= parents == order[-1]
        price = np.maximum(more + expert * adds(order), 1e-9)  # of those that cost nothing the most probable
        order.append(int(np.where(open_, odds / price, -1.0).argmax()))
    return np.array(order)


def compared(trees: dict[str, list[Grown]], cost: Cost, nodes: int) -> dict[str, Any]:
    """Tokens a second and mean nodes by order and cut, and what rules gain."""
    found = {order: played(rounds, cost, nodes) for order, rounds in trees.items()}
    speed = lambda sums: float(1e3 * sums[:, 0].sum() / sums[:, 1].sum())
    usual = found["probability"]
    gains = {rule: {cut: gain(found[rule][cut][0], usual[cut][0]) for cut in CUTS} for rule in RULES}
    over = {order: gain(cuts["best"][0], usual["fixed"][0]) for order, cuts in found.items()}
    cells = {
        order: {cut: {"tokens_per_second": speed(sums), "nodes": size} for cut, (sums, size) in cuts.items()}
        for order, cuts in found.items()
    }
    return {"orders": cells, "gains": gains, "best_over_fixed": over}


def played(trees: list[Grown], cost: Cost, nodes: int) -> dict[str, tuple[np.ndarray, float]]:
    """Tokens and milliseconds of each round [R, 2], and mean nodes, by how trees are cut."""
    sizes = np.arange(1, nodes + 1)
    tokens = np.array([one.tokens for one in trees])
    said = np.array([cost.round(sizes, one.expected) for one in trees])
    took = np.array([cost.round(sizes, one.touched) for one in trees])
    rate, last = 0.0, -1.0
    while rate > last:  # Dinkelbach's: the rate rises until it is that of its own cut
        last, at = rate, (tokens - rate * said).argmax(1)
        rate = np.take_along_axis(tokens, at[:, None], 1).sum() / np.take_along_axis(said, at[:, None], 1).sum()
    steps = sorted({n for n in (*range(2, 9), *range(10, 33, 2), *range(36, nodes, 4), nodes) if n <= nodes})
    fixed = max(steps, key=lambda n: tokens[:, n - 1].sum() / took[:, n - 1].sum())
    falls = lambda one, ms: int(budgets.tree_size(jnp.diff(one), jnp.float32(0), jnp.asarray(ms)))
    first = [falls(one, ms) for one, ms in zip(tokens, said, strict=True)]
    ends = {
        "fixed": np.full(len(trees), fixed - 1), "first": np.array(first), "best": (tokens / said).argmax(1), "rate": at
    }  # fmt: skip
    sums = lambda at: np.stack([np.take_along_axis(x, at[:, None], 1)[:, 0] for x in (tokens, took)], 1)
    return {cut: (sums(at), float(at.mean() + 1)) for cut, at in ends.items()}


def gain(one: np.ndarray, other: np.ndarray) -> tuple[float, float, float]:
    """How much faster one is than the other, in per cent, and where 95 % of it lie if rounds are drawn again."""
    draws = np.random.default_rng(2).integers(0, len(one), (1000, len(one)))
    over = lambda pick: np.divide(*(x[..., 0] / x[..., 1] for x in (one[pick].sum(-2), other[pick].sum(-2))))
    low, high = np.quantile(over(draws), (0.025, 0.975))
    return tuple(float(100 * (x - 1)) for x in (over(np.arange(len(one))), low, high))  # type: ignore[return-value]


def shown(row: dict[str, Any]) -> str:
    """A row of the table."""
    percent = lambda mean, low, high: f"{mean:+.1f} ± {(high - low) / 2:.1f}"
    cells = []
    for cut in CUTS:
        usual = row["orders"]["probability"][cut]
        cells.append(f"{usual['tokens_per_second']:.0f} ({usual['nodes']:.0f})")
        cells += [percent(*row["gains"][rule][cut]) for rule in RULES]
    over = percent(*row["best_over_fixed"]["ideal"])
    return f"| {row['router']}, {row['hit']:g} | " + " | ".join([*cells, over]) + " |"
