"""Time of plain steps and rounds on several devices, beside one; random weights of a real shape.

    python bench/devices.py --shape qwen3-8b --meshes one model=2                     a layer split over two
    python bench/devices.py --shape qwen3-30b-a3b --meshes one model=2                experts split over two
    python bench/devices.py --shape qwen3-32b --meshes model=2                        more than 80 GB hold
    python bench/devices.py --shape qwen3-0.6b --dtype float32 --meshes one model=2 data=2 --tokens 128    equal?
    python bench/devices.py --shape qwen3-8b --batch 32 --meshes one data=2           32 rows a device: throughput
    XLA_FLAGS=--xla_force_host_platform_device_count=8 python bench/devices.py --shape tiny --dtype float32 \\
        --meshes one data=2,model=2 data=2,model=4                                    a smoke run for a CPU

`--batch` is of each group of devices, so that `data=2` has twice the rows of `one`. `ms` is the time of one step inside
the compiled loop (median of differences between a long and a short call); `rows/s` are rows times rounds a second, and
`x one` is their ratio to the first mesh's; `GiB` are the weights on one device. `sums` is the time of what a plain step
sums over the devices of `model`, alone: two sums a layer of one row of activations for each row of a group; those over
`expert` are not timed. With `--tokens` each mesh also decodes: in float32 the tokens are those of the first one. In 16
bits near-ties may part; `margin` is the gap between the two best tokens where a text parts from the first mesh's, in
standard deviations of the logits, the largest of all texts. Prints a table, then one JSON line.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("devices")

import functools
import itertools
import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import shapes
import timing
from jax.sharding import PartitionSpec

from jetspec_jax import SamplingConfig, TreeConfig, baseline, command, speculate
from jetspec_jax.engine.programs import program
from jetspec_jax.fields import Option
from jetspec_jax.files.pair import LoadedHead, LoadedTarget
from jetspec_jax.loop import decoder, tree
from jetspec_jax.loop.plain import PLAIN
from jetspec_jax.models import sharding

LINE = command.Line(
    __doc__,
    [
        shapes.SHAPE,
        Option("meshes", "text", "What runs: `one` device, or a mesh.", ("one", "model=2"), many=True, metavar="MESH"),
        Option("budgets", "whole", "Tree nodes of a round; 1 is the plain step.", (1, 64), low=1, many=True),
        Option("batch", "whole", "Rows of each group of devices.", (1,), low=1, many=True),
        Option("length", "whole", "Committed tokens.", 1024, low=32),
        Option("slots", "whole", "Cache slots.", 2048, low=64),
        shapes.DTYPE,
        command.BACKEND,
        Option(
            "tokens",
            "whole",
            "Also decode so many tokens of eight prompts, and compare with the first mesh's.",
            0,
            low=0,
        ),
        Option("steps", "whole", "Steps of a long call.", 64, low=4),
        timing.REPEATS,
    ],
)


@command.tool("bench/devices.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)
    if args.length >= args.slots:
        raise command.UsageError(f"--length={args.length}: --slots={args.slots} must hold more")
    for name in args.meshes:
        command.check_mesh(None if name == "one" else name)
    device = f"{jax.device_count()} x {jax.devices()[0].device_kind}, jax {jax.__version__}, {args.dtype}"
    print(f"{args.shape}, random weights, {args.length} of {args.slots}; {device}")
    print(f"{'mesh':>24} {'':>24} {'ms':>9} {'rows/s':>10} {'x one':>6} {'sums ms':>8} {'GiB':>7} {'compile s':>10}")
    rows: list[dict] = []
    texts: dict[int, list] = {}
    for name in args.meshes:
        mesh = None if name == "one" else sharding.mesh_of(name)
        pair = shapes.random_pair(args.shape, args.dtype, args.backend, mesh=mesh)
        split = mesh is not None and mesh.shape["model"] > 1
        summed = {batch: 1e3 * sums(args, mesh, batch) if split else 0.0 for batch in args.batch}
        for batch, budget in itertools.product(args.batch, args.budgets):
            spent = summed[batch]
            row = {"mesh": name, "batch": batch, "budget": budget, "sums_ms": spent}
            row |= measure(args, pair, mesh, batch, budget)
            rows.append(row)
            same = [r for r in rows if "ms" in r and (r["batch"], r["budget"]) == (batch, budget)]
            row["times_one"] = row["rows_per_second"] / same[0]["rows_per_second"]
            what = f"{batch} x " + ("plain step" if budget == 1 else f"round {budget}")
            print(
                f"{name:>24} {what:>24} {row['ms']:9.3f} {row['rows_per_second']:10.1f} {row['times_one']:6.2f} "
                f"{spent:8.3f} {row['gib']:7.2f} {row['compile_seconds']:10.1f}",
                flush=True,
            )
        for budget in args.budgets if args.tokens else ():
            target, found = decoded(args, pair, budget)
            rows.append({"mesh": name, "budget": budget} | parted(target, texts.setdefault(budget, found), found))
            print(
                f"{name:>24} budget {budget}: {args.tokens} tokens, first differences at {rows[-1]['parted']}, "
                f"margin {rows[-1]['margin']:.1e}",
                flush=True,
            )
        del pair
    print(json.dumps({"settings": command.settings(args), "device": device, "rows": rows}))
    return 0


def measure(args: command.Args, pair: shapes.Pair, mesh, batch: int, budget: int) -> dict:
    """Plain step (budget 1) or round."""
    rows = batch * (1 if mesh is None else mesh.shape["data"])
    draft = PLAIN if budget == 1 else pair.draft.shaped(tree.Rule(budget), min(pair.draft.depth, budget - 1))
    static, params = decoder.Decoder(pair.target, draft, args.slots), pair.plain if budget == 1 else pair.params
    held = [shapes.state_at(static, params, args.length, rows, budget)]
    run, seconds = program(decoder.rounds, static, params, held[0], jnp.int32(1), donate=(1,))

    def steps(n: int):
        held[0] = run(params, shapes.at_length(held[0], args.length), jnp.int32(n))
        return held[0].length

    spent = timing.per_step(steps, args.steps // 4, args.steps, args.repeats)
    mine = sum(x.addressable_shards[0].data.nbytes for x in jax.tree.leaves(params))
    return {
        "ms": 1e3 * spent, "rows_per_second": rows / spent, "gib": mine / 2**30, "compile_seconds": seconds,
    }  # fmt: skip


def prompts(vocabulary: int) -> list[list[int]]:
    return [[(7 * i + 31 * j) % vocabulary for j in range(9 + i)] for i in range(8)]


def decoded(args: command.Args, pair: shapes.Pair, budget: int) -> tuple[LoadedTarget, list[list[int]]]:
    """Tokens that follow eight prompts, and the target that decides them."""
    config = pair.target.config
    target = LoadedTarget(pair.target, pair.params["target"], config, args.dtype, (), args.shape, "", 0.0, lambda: None)
    head = LoadedHead(pair.draft, pair.params["draft"], pair.draft.config)
    tree, option = TreeConfig(budget), SamplingConfig(args.tokens, eos=())
    results = speculate.generate(target, head, prompts(config.vocab_size), tree, option)
    return target, [result.token_ids for result in results]


def parted(target: LoadedTarget, one: list[list[int]], other: list[list[int]]) -> dict:
    """The first token in which each pair of texts differs (null where they are equal), and the largest margin there."""
    option, asked = SamplingConfig(len(one[0]), eos=()), prompts(target.model.config.vocab_size)
    found = [baseline.first_difference(target, *texts, option) for texts in zip(asked, one, other, strict=True)]
    margins = [difference.margin / difference.std for difference in found if difference]
    return {"parted": [difference and difference.position for difference in found], "margin": max(margins, default=0.0)}


def sums(args: command.Args, mesh, batch: int) -> float:
    """Seconds of the sums of one plain step: two a layer, each of a row of activations for every row of a group."""
    config, _ = shapes.PAIRS[args.shape]
    x = jnp.ones((batch, config.hidden_size), args.dtype)

    @functools.partial(
        jax.shard_map, mesh=mesh, in_specs=(PartitionSpec(),) * 2, out_specs=PartitionSpec(), check_vma=False
    )
    def run(n, x):
        def one(_, x):
            for _ in range(2 * config.num_layers):
                x = jax.lax.psum(x, "model") * jnp.asarray(1 / mesh.shape["model"], x.dtype)
            return x

        return jax.lax.fori_loop(0, n, one, x)

    compiled = jax.jit(run)
    return timing.per_step(lambda n: compiled(jnp.int32(n), x), args.steps // 4, args.steps, args.repeats)
