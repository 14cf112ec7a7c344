"""Cold and warm start: from weights on the device to the first token and to the first round, in fresh processes.

    python bench/start_up.py --shape qwen3-8b --budget 64

The same program is run twice as a child with the same compilation cache, which is empty the first time. Tracing,
compiling or finding the compiled program, loading it and running it all count; starting Python and drawing the random
weights do not. `peak` is all device memory that the process has held at once, `held` that of weights and state. Prints
a table, then one JSON line.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("start_up")

import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import shapes

from jetspec_jax import command
from jetspec_jax.engine.programs import program
from jetspec_jax.fields import ConfigError, Option
from jetspec_jax.loop import decoder
from jetspec_jax.loop.processors import Sampling
from jetspec_jax.loop.state import Request
from jetspec_jax.loop.tree import Rule

LINE = command.Line(
    __doc__,
    [
        shapes.SHAPE,
        Option("budget", "whole", "Tree nodes.", 64, low=1),
        Option("prompt", "whole", "Prompt tokens.", 1024, low=1),
        Option("slots", "whole", "Cache slots.", 2048, low=1),
        shapes.DTYPE,
        Option("child", "flag", "Only measure this process; the command itself gives it.", False),
    ],
)


@command.tool("bench/start_up.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)
    if args.child:
        print(json.dumps(child(args)))
        return 0
    found = {}
    print(f"{args.shape}, random weights, {args.dtype}, prompt of {args.prompt}, budget {args.budget}; seconds")
    with tempfile.TemporaryDirectory() as folder:
        for name in ("cold", "warm"):
            words = [sys.executable, __file__, "--child", *argv]
            done = subprocess.run(words, env=environment(folder), capture_output=True, text=True)
            if done.returncode:
                raise ConfigError(done.stderr.strip().splitlines()[-1])
            found[name] = json.loads(done.stdout.splitlines()[-1])
            print(f"{name}: ", "  ".join(f"{k} {v:.2f}" for k, v in found[name].items() if k != "device"), flush=True)
    print(json.dumps({"settings": command.settings(args), **found}))
    return 0


def environment(folder: str) -> dict[str, str]:
    import os

    return os.environ | {"JAX_COMPILATION_CACHE_DIR": folder}


def child(args: command.Args) -> dict:
    """The times of one process."""
    pair = shapes.random_pair(args.shape, args.dtype)
    draft = pair.draft.shaped(Rule(args.budget), min(pair.draft.depth, args.budget - 1))
    static = decoder.Decoder(pair.target, draft, args.slots)
    row = lambda value, dtype=jnp.int32: jnp.full((1,), value, dtype)
    request = Request(
        tokens=jax.random.randint(jax.random.key(1), (1, args.prompt), 0, pair.target.vocab_size),
        prompt_length=row(args.prompt), limit=row(args.slots), budget=row(args.budget),
        sampling=Sampling(None, row(0, jnp.uint32)), eos=jnp.full((1, 8), -1, jnp.int32),
    )  # fmt: skip
    jax.block_until_ready(request)
    begin = time.perf_counter()
    first, compiled = program(decoder.prefill, static, pair.params, request)
    state = jax.block_until_ready(first(pair.params, request))
    token = time.perf_counter() - begin
    second, more = program(decoder.rounds, static, pair.params, state, jnp.int32(1), donate=(1,))
    state = jax.block_until_ready(second(pair.params, state, jnp.int32(1)))
    seconds = time.perf_counter() - begin
    held = sum(x.nbytes for x in jax.tree.leaves((pair.params, state)))
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use", 0)
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    return {
        "to first token": token, "of it tracing and compiling": compiled,
        "to first round": seconds, "of it tracing and compiling too": compiled + more,
        "held GiB": held / 2**30, "peak GiB": peak / 2**30, "device": device,
    }  # fmt: skip
