"""A layer's matrix products by rows, weight layout and who computes them, each with the operation that reads it.

    python bench/products.py --shape qwen3-8b --rows 1 16 32 64 128 256
    python bench/products.py --shape qwen3-8b --rows 128 --tiles

`xla` and `xla [out, in]` are XLA's choice for the two layouts of a weight, `kernel` is ours with the tile that `Hopper`
would use; `--tiles` tries every other tile as well and prints the best. Copies of a weight are visited in turn, so that
all come from memory and not from the L2 cache. The floor is the time to read the weight once or to multiply by it,
whichever is longer; `error` is how far `kernel` is from `xla` (without a GPU the kernel is checked in the interpreter
and not timed). Prints a table, then one JSON line; exit status 1 where an error exceeds the bound of `exact.py`.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("products")

import concurrent.futures
import dataclasses
import functools
import itertools
import json
from collections.abc import Sequence

import exact
import jax
import jax.numpy as jnp
import shapes
import timing

from jetspec_jax import command
from jetspec_jax.backends.hopper import Hopper
from jetspec_jax.backends.kernels import gpu_layer
from jetspec_jax.backends.kernels.gpu_layer import Tile
from jetspec_jax.backends.xla import PLAIN_XLA
from jetspec_jax.fields import Option
from jetspec_jax.layers import rope
from jetspec_jax.layers.numerics import einsum

CACHED = 400e6  # bytes that the L2 cache cannot hold
NAMES = ("qkv", "out", "gate_up", "down")


LINE = command.Line(
    __doc__,
    [
        shapes.SHAPE,
        Option("rows", "whole", "Rows of the product.", (1, 16, 32, 64, 128, 256), low=1, many=True),
        Option("names", "choice", "Weights.", NAMES, choices=NAMES, many=True),
        Option("tiles", "flag", "Try every tile, not only the one of the rule.", False),
        dataclasses.replace(timing.REPEATS, default=3),
    ],
)


@command.tool("bench/products.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)

    gpu = jax.default_backend() == "gpu"
    config, _ = shapes.PAIRS[args.shape]
    limits = timing.machine()
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, bfloat16"
    print(f"{args.shape}; {device}; us of a product and what reads it", flush=True)
    found = []
    for name in args.names:
        layer = Product(name, config, gpu)
        for rows in args.rows:
            weight = layer.weights[0]
            floor = max(weight.nbytes / limits["bytes_per_second"], 2 * rows * weight.size / limits["flops_per_second"])
            row = {"name": name, "rows": rows, "floor_us": 1e6 * floor} | layer.measure(rows, args)
            print("  ".join(f"{k} {shown(k, v)}" for k, v in row.items()), flush=True)
            found.append(row)
    bound = exact.BOUNDS["bfloat16"]
    print(
        json.dumps(
            {"settings": command.settings(args), "device": device, "machine": limits, "bound": bound, "rows": found}
        )
    )
    return int(any(row.get("error", 0) > bound for row in found))


def shown(name: str, value) -> str:
    return f"{value:.1e}" if name == "error" else f"{value:.1f}" if isinstance(value, float) else f"{value}"


class Product:
    """One of a layer's weights, as many copies as exceed the cache, and its consumer."""

    def __init__(self, name: str, config, gpu: bool):
        c = self.config = config
        self.name, self.gpu, self.kernels = name, gpu, Hopper() if gpu else PLAIN_XLA
        self.sizes = {
            "qkv": (c.hidden_size, (c.num_heads + 2 * c.num_kv_heads) * c.head_dim),
            "out": (c.num_heads * c.head_dim, c.hidden_size),
            "gate_up": (c.hidden_size, 2 * c.intermediate_size),
            "down": (c.intermediate_size, c.hidden_size),
        }[name]
        copies = int(CACHED // (2 * self.sizes[0] * self.sizes[1])) + 1 if gpu else 2
        draw = jax.jit(lambda k: 0.02 * jax.random.normal(k, self.sizes, jnp.bfloat16))
        self.weights = [draw(k) for k in jax.random.split(jax.random.key(0), copies)]

    def measure(self, rows: int, args: command.Args) -> dict:
        c, inner = self.config, self.sizes[0]
        draw = lambda i, size: jax.random.normal(jax.random.key(i), (1, rows, size), jnp.bfloat16)
        x, stream = draw(1, inner), draw(2, c.hidden_size)
        norm, angles = jnp.ones(c.hidden_size, jnp.bfloat16), rope.angles(jnp.arange(rows)[None], c.head_dim, 1e4)
        shape = (c.num_heads // c.num_kv_heads + 2, c.head_dim)

        def read(backend, product):
            if self.name == "qkv":
                return backend.heads(product, shape, None, angles, 1e-6, x.dtype)
            return backend.add_norm(stream, product, norm, 1e-6)

        def glu(x, w, spec="bte,ef->btf"):
            gate, up = jnp.split(einsum(spec, x, w), 2, axis=-1)
            return jax.nn.silu(gate) * up

        def ours(x, w, cut=None):
            flat = x.reshape(rows, inner)
            if self.name == "gate_up":
                return gpu_layer.swiglu(flat, w.reshape(inner, 2, -1), not self.gpu, cut)
            return read(Hopper(), gpu_layer.matmul(flat, w, not self.gpu, cut)[:, None])

        if self.name == "gate_up":
            ways = {"xla": glu, "xla [out, in]": functools.partial(glu, spec="bte,fe->btf")}
        else:
            ways = {
                "xla": lambda x, w: read(self.kernels, einsum("bta,ao->bto", x, w)),
                "xla [out, in]": lambda x, w: read(self.kernels, einsum("bta,oa->bto", x, w)),
            }
        row = {}
        for way, function in ways.items():  # one by one: XLA times its own candidates while it compiles
            weights = [w.T for w in self.weights] if "[out" in way else self.weights
            row[way] = self.clock(self.program(function, x, weights), x, weights, args.repeats)
        if not gpu_layer.tileable(*self.sizes):
            return row
        row["error"] = exact.error(jax.jit(ours)(x, self.weights[0]), jax.jit(ways["xla"])(x, self.weights[0]))
        if not self.gpu:
            return row
        cuts = [None, *(tiles(rows, *self.sizes, self.name == "gate_up") if args.tiles else [])]
        with concurrent.futures.ThreadPoolExecutor() as pool:
            build = lambda cut: self.attempt(functools.partial(ours, cut=cut), x)
            programs = list(pool.map(build, cuts))
        times = {cut: self.clock(p, x, self.weights, args.repeats) for cut, p in zip(cuts, programs, strict=True) if p}
        row["kernel"] = times.pop(None)
        best = sorted((t, tuple(cut)) for cut, t in times.items())[:6]
        return row | ({"best tiles": [(round(t, 1), cut) for t, cut in best]} if best else {})

    def attempt(self, function, x):
        """The program, or None where a tile asks for more memory than a multiprocessor has."""
        try:
            return self.program(function, x, self.weights)
        except jax.errors.JaxRuntimeError:
            return None

    def program(self, function, x, weights):
        """`(n, x, weights)` visits every copy n times in one program."""
        one = jax.jit(function)
        empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, x, weights[0]))

        def many(n, x, weights):
            def body(_, carry):
                results = [one(carry[0], w) for w in weights]
                nudge = sum(jax.tree.leaves(r)[0].ravel()[0] for r in results) * 1e-30
                return carry[0] + nudge.astype(x.dtype), results

            return jax.lax.fori_loop(0, n, body, (x, [empty for _ in weights]))

        return jax.jit(many).lower(jnp.int32(1), x, weights).compile()

    def clock(self, program, x, weights, repeats: int) -> float:
        run = lambda n: program(jnp.int32(n), x, weights)
        return 1e6 * timing.per_step(run, 4, 20, repeats) / len(weights)


def tiles(rows: int, inner: int, columns: int, glu: bool) -> list[Tile]:
    """Tiles that may do, cut so that one or two waves of programs fill the multiprocessors."""
    found = []
    block = gpu_layer.tile(rows, inner, columns).rows
    for high, wide, (depth, stages), warps in itertools.product(
        sorted({block, min(64, block), min(128, gpu_layer.power(max(rows, 16)))}),
        (64, 128),
        ((64, 4), (64, 5), (128, 3), (128, 5)),
        (4, 8),
    ):
        fits = 2 * stages * depth * (high + wide * (1 + glu)) <= 220e3
        if inner % depth or columns % wide or not fits or (warps == 8) != (high * wide > 64 * 128):
            continue
        for parts in (1,) if glu else gpu_layer.PARTS:
            programs = columns // wide // (1 + glu) * -(-rows // high) * parts
            if (inner // depth) % parts == 0 and (glu or 90 <= programs <= 300):
                found.append(Tile(high, wide, depth, parts, warps, stages))
    return found
