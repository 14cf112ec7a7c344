"""Long prompts: time and memory of reading them, and whether both ways of decoding agree after them.

    python bench/long_context.py --shape qwen3-0.6b --prompts 1024 8192 32000 --dtype float32

Random weights, random prompts, `--new` tokens. Times are medians of `--repeats` runs after one that is not counted;
`plain` and `round` are the mean step of a run. `temp` is the temporary memory of the program that reads the prompt
(prompt and cache not counted); it should not grow with prompt x vocabulary. Prints a table, then one JSON line; exit
status 1 if any output differs in float32.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("long_context")

import dataclasses
import json
import statistics
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import shapes
import timing

from jetspec_jax import command
from jetspec_jax.engine.programs import program
from jetspec_jax.fields import Option
from jetspec_jax.loop import decoder
from jetspec_jax.loop.plain import PLAIN
from jetspec_jax.loop.processors import Sampling
from jetspec_jax.loop.state import Request
from jetspec_jax.loop.tree import Rule

LINE = command.Line(
    __doc__,
    [
        dataclasses.replace(shapes.SHAPE, default="qwen3-0.6b"),
        Option("prompts", "whole", "Lengths.", (1024, 8192, 32000), low=1, many=True),
        Option("new", "whole", "Tokens to decode.", 64, low=1),
        Option("budget", "whole", "Tree nodes.", 64, low=1),
        Option("chunk", "whole", "Prompt tokens read at a time.", decoder.DEFAULT_CHUNK, low=1),
        dataclasses.replace(shapes.DTYPE, default="float32"),
        command.BACKEND,
        dataclasses.replace(timing.REPEATS, default=3),
    ],
)


@command.tool("bench/long_context.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)

    pair = shapes.random_pair(args.shape, args.dtype, args.backend)
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.dtype}"
    print(f"{args.shape}, random weights, batch 1, chunks of {args.chunk}; {device}")
    print(f"{'prompt':>7} {'read ms':>8} {'temp MiB':>9} {'cache MiB':>10} {'plain ms':>9} {'round ms':>9}  equal")
    rows = [measure(args, pair, prompt) for prompt in args.prompts]
    print(json.dumps({"settings": command.settings(args), "device": device, "rows": rows}))
    return int(args.dtype == "float32" and not all(row["equal"] for row in rows))


def measure(args: command.Args, pair: shapes.Pair, prompt: int) -> dict:
    """One prompt, read and continued plainly and speculatively."""
    slots = -(-(prompt + args.new + pair.draft.depth + 1) // 256) * 256
    size = -(-prompt // args.chunk) * args.chunk
    slots = max(slots, size + pair.draft.depth + 1)
    row = lambda value, dtype=jnp.int32: jnp.full((1,), value, dtype)
    tokens = jax.random.randint(jax.random.key(prompt), (1, size), 0, pair.target.vocab_size)
    outputs, found = {}, {"prompt": prompt}
    draft = pair.draft.shaped(Rule(args.budget), min(pair.draft.depth, args.budget - 1))
    for name, static, params in (
        ("plain", decoder.Decoder(pair.target, PLAIN, slots, prefill_chunk=args.chunk), pair.plain),
        ("round", decoder.Decoder(pair.target, draft, slots, prefill_chunk=args.chunk), pair.params),
    ):
        request = Request(
            tokens, row(prompt), row(prompt + args.new), row(static.nodes), Sampling(None, row(0, jnp.uint32)),
            jnp.full((1, 8), -1, jnp.int32),
        )  # fmt: skip
        read, _ = program(decoder.prefill, static, params, request)
        state = read(params, request)
        found["temp_mib"] = read.memory_analysis().temp_size_in_bytes / 2**20
        found["cache_mib"] = sum(x.nbytes for x in jax.tree.leaves(state.cache)) / 2**20
        run, _ = program(decoder.rounds, static, params, state, jnp.int32(1), donate=(1,))
        times = []
        for _ in range(1 + args.repeats):
            del state  # one cache at a time
            begin = time.perf_counter()
            state = jax.block_until_ready(read(params, request))
            between = time.perf_counter()
            state = jax.block_until_ready(run(params, state, jnp.int32(args.new)))
            times.append((between - begin, (time.perf_counter() - between) / max(int(state.rounds[0]), 1)))
        found["read_ms"], found[f"{name}_ms"] = (1e3 * statistics.median(x) for x in zip(*times[1:], strict=True))
        outputs[name] = state.tokens[0, prompt : prompt + args.new].tolist()
    found["equal"] = outputs["plain"] == outputs["round"]
    line = "{prompt:7} {read_ms:8.1f} {temp_mib:9.1f} {cache_mib:10.1f} {plain_ms:9.2f} {round_ms:9.2f}"
    print(line.format(**found), f" {found['equal']}", flush=True)
    return found
