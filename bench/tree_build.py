"""Time from draft logits to a tree and its ancestor mask, by budget, rule and who builds it.

    python bench/tree_build.py --vocab 151936 --budgets 16 64 128 256

Random logits. `top-k` is the candidates alone, tokens and log-probabilities. `equal`: the kernel's trees are those of
`tree.grow`, node for node (without a GPU the kernel is checked in the interpreter and not timed). Prints a table, then
one JSON line; exit status 1 if any tree differs.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("tree_build")

import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import timing

from jetspec_jax import command
from jetspec_jax.backends.hopper import Hopper
from jetspec_jax.backends.xla import PLAIN_XLA, XLA
from jetspec_jax.fields import Option
from jetspec_jax.layers import masks
from jetspec_jax.loop import tree

LINE = command.Line(
    __doc__,
    [
        Option("vocab", "whole", "Tokens of the vocabulary.", 151936, low=2),
        Option("depth", "whole", "Drafted positions.", 15, low=1),
        Option("budgets", "whole", "Tree nodes.", (16, 64, 128, 256), low=2, many=True),
        Option("batch", "whole", "Rows of a batch.", 1, low=1),
        timing.REPEATS,
    ],
)


@command.tool("bench/tree_build.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)

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
    print(json.dumps({"settings": command.settings(args), "device": device, "rows": found}))
    return int(not all(row["equal"] for row in found))


def grown(logits, budget: int, how: XLA, builder: str = "best_first", width: int = 64) -> tree.Tree:
    zero = jnp.zeros(len(logits), jnp.int32)
    return tree.build(tree.Rule(budget, builder, width), logits, zero, zero + budget, how.grow)


def timed(args: command.Args, logits, function) -> float:
    """Microseconds; each step's logits depend on the tree before, by less than anything could notice."""

    def step(x):
        return x + function(x).sum() * 1e-30

    program, held = timing.looped(step), [jnp.copy(logits)]

    def run(n):
        held[0] = program(n, held[0])
        return held[0]

    return 1e6 * timing.per_step(run, 8, 40, args.repeats)
