"""Time from draft logits to a tree and its ancestor mask, by budget, rule and who builds it.

    python bench/tree_build.py --vocab 151936 --budgets 16 64 128 256

Random logits. `top-k` is the candidates alone. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import json

import jax
import jax.numpy as jnp
import timing

from jetspec_jax import masks, ops, tree


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
        row = {
            "budget": budget,
            "top-k": timed(args, logits, lambda x, b=budget: tree.candidates(x, min(64, b - 1))[1]),
        }
        for builder, kernels in (("best_first", False), ("best_first", True), ("accum_logp", False)):
            if kernels and not gpu:
                continue  # the interpreter's time means nothing
            width = 64 if builder == "best_first" else 7

            def build(x, builder=builder, width=width, budget=budget, kernels=kernels):
                zero = jnp.zeros((args.batch,), jnp.int32)
                how = ops.Ops("pallas" if kernels else "xla")
                built = tree.build(builder, width, budget, x, zero, zero + budget, how.grow)
                return built.tokens + masks.ancestors(built.parents, args.depth).sum(-1)

            row[f"{builder}{' kernel' if kernels else ''}"] = timed(args, logits, build)
        print("  ".join(f"{name} {value:8.1f}" for name, value in row.items()), flush=True)
        found.append(row)
    print(json.dumps({"settings": vars(args), "device": device, "rows": found}))


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
