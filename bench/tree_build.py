"""Time from draft logits to a tree and its ancestor mask, by budget, rule and who builds it.

    python bench/tree_build.py --vocab 151936 --budgets 16 64 128 256

Random logits. `top-k` is the candidates alone, tokens and log-probabilities. `equal`: the kernel's trees are those of
`tree.grow`, node for node (without a GPU the kernel is checked in the interpreter and not timed). Prints a table, then
one JSON line; exit status 1 if any tree differs.
"""

from __future__ import annotations

import argparse
import json
import sys

import jax
import jax.numpy as jnp
import timing

from jetspec_jax.backends.hopper import Hopper
from jetspec_jax.backends.xla import PLAIN_XLA, XLA
from jetspec_jax.layers import masks
from jetspec_jax.loop import tree


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--vocab", type=int, default=151936)
    parser.add_argument("--depth", type=int, default=15)
    parser.add_argument("--budgets", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()

    gpu = jax.default_backend() == "gpu"
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    print(f"batch {args.batch}, {args.depth} x {args.vocab} logits; {device}; us")
    logits = 3 * jax.random.normal(jax.random.key(0), (args.batch, args.depth, args.vocab))
    found = []
    for budget in args.budgets:
        # Their sum reads both: XLA drops what nothing reads.
        both = lambda x, budget=budget: sum(x.reshape(-1) for x in tree.candidates(tree.Rule(budget), x))
        row = {"budget": budget, "top-k": timed(args, logits, both)}
        for builder, kernels in (("best_first", False), ("best_first", True), ("accum_logp", False)):
            if kernels and not gpu:
                continue  # the interpreter's time means nothing
            width = 64 if builder == "best_first" else 7

            def build(x, builder=builder, width=width, budget=budget, kernels=kernels):
                built = grown(x, budget, Hopper() if kernels else PLAIN_XLA, builder, width)
                return built.tokens + masks.ancestors(built.parents, args.depth).sum(-1)

            row[f"{builder}{' kernel' if kernels else ''}"] = timed(args, logits, build)
        trees = [jax.jit(grown, static_argnums=(1, 2))(logits, budget, how) for how in (Hopper(), PLAIN_XLA)]
        times = "  ".join(f"{name} {value:8.1f}" for name, value in row.items())
        row["equal"] = all(bool((a == b).all()) for a, b in zip(*(t[:4] for t in trees), strict=True))
        print(f"{times}  equal {row['equal']}", flush=True)
        found.append(row)
    print(json.dumps({"settings": vars(args), "device": device, "rows": found}))
    sys.exit(not all(row["equal"] for row in found))


def grown(logits, budget: int, how: XLA, builder: str = "best_first", width: int = 64) -> tree.Tree:
    zero = jnp.zeros(len(logits), jnp.int32)
    return tree.build(tree.Rule(budget, builder, width), logits, zero, zero + budget, how.grow)


def timed(args: argparse.Namespace, logits, function) -> float:
    """Microseconds; each step's logits depend on the tree before, by less than anything could notice."""

    def step(x):
        return x + function(x).sum() * 1e-30

    program, held = timing.looped(step), [jnp.copy(logits)]

    def run(n):
        held[0] = program(n, held[0])
        return held[0]

    return 1e6 * timing.per_step(run, 8, 40, args.repeats)


if __name__ == "__main__":
    main()
