"""Attention of one layer by who computes it, and how far each is from f32: rows over a committed prefix and a tree.

    python bench/attention.py --shape qwen3-8b --rows 1 16 64 128 256 --lengths 1024
    python bench/attention.py --shape qwen3-8b --rows 1 64 --lengths 1024 8192 32000 --slots 32768

Sixteen layers' worth of caches are visited in turn, so that keys and values come from memory and not from the L2 cache.
The floor is the time to read the committed keys and values once. The kernels' time means nothing without a GPU, their
error does. Prints a table, then one JSON line; exit status 1 where an error exceeds the bound of `exact.py`.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("attention")

import itertools
import json
from collections.abc import Sequence

import exact
import jax
import jax.numpy as jnp
import numpy as np
import shapes
import timing

from jetspec_jax import command
from jetspec_jax.backends.cudnn import CuDNN
from jetspec_jax.backends.hopper import Hopper
from jetspec_jax.backends.xla import PLAIN_XLA
from jetspec_jax.fields import Option
from jetspec_jax.layers import masks
from jetspec_jax.options import BACKENDS

CHOICES = BACKENDS[1:]
LINE = command.Line(
    __doc__,
    [
        shapes.SHAPE,
        Option("rows", "whole", "Rows of a tree.", (1, 16, 64, 128, 256), low=1, many=True),
        Option("lengths", "whole", "Committed tokens.", (1024,), low=1, many=True),
        Option("slots", "whole", "Cache slots.", 2048, low=1),
        Option("batch", "whole", "Rows of a batch.", 1, low=1),
        shapes.DTYPE,
        Option("choices", "choice", "Who computes it.", CHOICES, choices=CHOICES, many=True),
        timing.REPEATS,
    ],
)


@command.tool("bench/attention.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)

    config, _ = shapes.PAIRS[args.shape]
    kv_heads, dim, dtype = config.num_kv_heads, config.head_dim, jnp.dtype(args.dtype)
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.dtype}"
    gpu = jax.default_backend() == "gpu"
    layers = 16 if gpu else 2
    limits = timing.machine()
    print(f"{args.shape}, batch {args.batch}, {args.slots} slots; {device}; us a layer")
    print(f"{'rows':>6} {'length':>7} {'choice':>7} {'us':>9} {'floor us':>9} {'error':>9}", flush=True)
    found = []
    for rows, length in itertools.product(args.rows, args.lengths):
        key = iter(jax.random.split(jax.random.key(rows + length), 4 + 2 * layers))
        draw = lambda *shape, key=key: jax.random.normal(next(key), shape, dtype)
        q = draw(args.batch, rows, config.num_heads, dim)
        fresh = draw(args.batch, kv_heads, rows, dim), draw(args.batch, kv_heads, rows, dim)
        kv = lambda draw=draw: draw(args.batch, kv_heads, args.slots, dim)
        caches = tuple((kv(), kv()) for _ in range(layers))
        parents = np.maximum(np.arange(rows) // 2 - 1, -1)[None].repeat(args.batch, 0)
        mask = masks.ancestors(jnp.asarray(parents, jnp.int32), 15)
        lengths = jnp.full((args.batch,), length, jnp.int32)
        wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
        reference = PLAIN_XLA.attend(wide(q), wide(fresh), mask, wide(caches[0]), lengths)
        floor = 2 * args.batch * kv_heads * length * dim * dtype.itemsize / limits["bytes_per_second"]
        for choice in args.choices:
            if choice == "cudnn" and (dtype.itemsize != 2 or not gpu):
                continue
            how = {"xla": PLAIN_XLA, "cudnn": CuDNN(), "pallas": Hopper()}[choice]

            def step(q, fresh, mask, caches, lengths, how=how):
                for prefix in caches:
                    q = how.attend(q, fresh, mask, prefix, lengths)
                return q

            program, held = timing.looped(step, fresh, mask, caches, lengths), [jnp.copy(q)]

            def run(n, program=program, held=held):
                held[0] = program(n, held[0])
                return held[0]

            seconds = timing.per_step(run, 4, 20, args.repeats) / layers
            got = jax.jit(how.attend)(q, fresh, mask, caches[0], lengths)
            error = exact.error(got, reference)
            row = {
                "rows": rows,
                "length": length,
                "choice": choice,
                "us": 1e6 * seconds,
                "floor_us": 1e6 * floor,
                "error": error,
            }
            print(f"{rows:6} {length:7} {choice:>7} {row['us']:9.2f} {row['floor_us']:9.2f} {error:9.1e}", flush=True)
            found.append(row)
    bound = exact.BOUNDS[args.dtype]
    print(json.dumps({"settings": command.settings(args), "device": device, "bound": bound, "rows": found}))
    return int(any(row["error"] > bound for row in found))
