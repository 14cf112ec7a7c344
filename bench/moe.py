"""A layer's mixture of experts by rows: XLA's ragged products and the kernels, each with what reads the result.

    python bench/moe.py --shape qwen3-30b-a3b --rows 1 8 16 64 128 256
    python bench/moe.py --shape qwen3-30b-a3b --rows 1 64 --cuts

`ragged` is plain XLA (what prompts and training use), `kernel` the kernels with the cut of the rule, each with the add
and norm after it; below it are its pieces: `route` (router, choice, lists), `gate_up`, `down`. `--cuts` tries every
other cut of the two products as well, after all rows have their first figures, and prints the best. Times are of one
layer, in a loop that visits `--layers` layers with weights and routing of their own: together they are many times the
L2 cache. The floor is the time to read the experts that the rows of that layer really chose, once, or to multiply by
them, whichever is longer. `error` is how far `kernel` is from `ragged` (without a GPU the kernel is checked in the
interpreter and not timed).

Prints a line a result, then one JSON line. Each result is also written to moe.jsonl in the folder `OUT` of the
environment as soon as it is there. Nothing new is begun after `--seconds`. Exit status 1 where an error exceeds the
bound of `exact.py`.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("moe")

import concurrent.futures
import functools
import itertools
import json
import os
import pathlib
import time
from collections.abc import Callable, Sequence

import exact
import jax
import jax.numpy as jnp
import shapes
import timing

from jetspec_jax import command
from jetspec_jax.backends.hopper import Hopper
from jetspec_jax.backends.kernels import gpu_experts
from jetspec_jax.backends.kernels.gpu_experts import Cut, Cuts, TopK
from jetspec_jax.backends.xla import PLAIN_XLA
from jetspec_jax.fields import Option
from jetspec_jax.layers import moe

MIXTURES = tuple(name for name, (config, _) in shapes.PAIRS.items() if config.moe)
SHARED = 200 * 1024  # bytes of a multiprocessor's shared memory that a program may ask for
WAYS = ("ragged", "kernel")

LINE = command.Line(
    __doc__,
    [
        Option("shape", "choice", "Shape of the target.", "qwen3-30b-a3b", choices=MIXTURES),
        Option("rows", "whole", "Rows of the product.", (1, 8, 16, 64, 128, 256), low=1, many=True),
        Option("ways", "choice", "What computes it.", WAYS, choices=WAYS, many=True),
        Option("cuts", "flag", "Try every cut, not only the one of the rule.", False),
        Option("layers", "whole", "Layers with weights of their own.", 4, low=1),
        Option("repeats", "whole", "Measurements, of which the median is taken.", 3, low=1),
        Option("seconds", "number", "Begin nothing new after this time.", 140.0, low=0),
        shapes.DTYPE,
    ],
)


@command.tool("bench/moe.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)
    begin = time.perf_counter()
    limits = timing.machine(args.dtype)
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.dtype}"
    print(f"{args.shape}, random weights; {device}; us of a layer's mixture and what reads it", flush=True)
    log = Log(begin + args.seconds)
    bench = Mixture(args, limits)
    pool = concurrent.futures.ThreadPoolExecutor()
    try:
        # Ours are compiled side by side. XLA times its own candidates while it compiles: those one by one.
        ready = {rows: bench.prepare(rows, pool) for rows in args.rows}
        cuts = [(rows, piece) for rows in args.rows for piece in ("gate_up", "down")] if args.cuts and bench.gpu else []
        tried = {key: bench.attempts(*key, pool) for key in cuts}
        # A compiler at work on the host, and what it times on the device, would be in the figures.
        concurrent.futures.wait([future for made in (*ready.values(), *tried.values()) for future in made.values()])
        for rows in args.rows:
            if log.open():
                log.add(bench.measure(rows, ready[rows]))
        for rows, piece in cuts:
            if log.open():
                log.add(bench.search(rows, piece, tried[rows, piece]))
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
    bound = exact.BOUNDS[args.dtype]
    found = {"settings": command.settings(args), "device": device, "machine": limits, "bound": bound, "rows": log.rows}
    print(json.dumps(found | {"complete": not log.late}))
    return int(any(row.get("error", 0) > bound for row in log.rows))


class Log:
    """Results, written down as they come."""

    def __init__(self, end: float):
        self.end, self.late, self.rows = end, False, []
        folder = os.environ.get("OUT")
        self.path = pathlib.Path(folder, "moe.jsonl") if folder else None

    def open(self) -> bool:
        """Whether there is time for another result."""
        self.late |= time.perf_counter() > self.end
        return not self.late

    def add(self, row: dict) -> None:
        self.rows.append(row)
        print("  ".join(f"{name} {shown(name, value)}" for name, value in row.items()), flush=True)
        if self.path:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")


def shown(name: str, value) -> str:
    return f"{value:.1e}" if name == "error" else f"{value:.1f}" if isinstance(value, float) else f"{value}"


class Mixture:
    """Layers of a mixture, and the ways to compute them."""

    def __init__(self, args: command.Args, limits: dict):
        self.args, self.limits, self.gpu = args, limits, jax.default_backend() == "gpu"
        config = shapes.PAIRS[args.shape][0]
        self.moe, self.hidden = config.moe, config.hidden_size
        self.top = TopK(config.moe.experts_per_token, config.moe.normalize_top_k)
        experts, inner = self.moe.num_experts, self.moe.intermediate_size
        like = lambda *sizes: jax.ShapeDtypeStruct(sizes, args.dtype)
        # The router in the layout of a layer, and as many experts; `shapes.drawn` has the gain of a network.
        one = {"router": like(self.hidden, experts), "gate_up": like(experts, self.hidden, 2, inner),
               "down": like(experts, inner, self.hidden)}  # fmt: skip
        self.layers = shapes.drawn([one] * args.layers)
        self.norm = jnp.ones(self.hidden, args.dtype)

    def inputs(self, rows: int) -> tuple[jax.Array, jax.Array]:
        """Normed rows and the stream beside them, [1, R, E]."""
        draw = lambda i: jax.random.normal(jax.random.key(i), (1, rows, self.hidden), self.args.dtype)
        return draw(rows), draw(rows + 1)

    def ours(self, x, layer, cut: Cuts | None = None) -> jax.Array:
        flat, weights = x.reshape(-1, self.hidden), (layer["router"], layer["gate_up"], layer["down"])
        interpret = jax.default_backend() != "gpu"
        return gpu_experts.mixture(flat, *weights, self.top, interpret=interpret, cut=cut)[:, None]

    def ragged(self, x, layer) -> jax.Array:
        m = self.moe
        weights = layer["router"], layer["gate_up"], layer["down"]
        return PLAIN_XLA.mixture(x, *weights, m.experts_per_token, m.normalize_top_k)

    def prepare(self, rows: int, pool) -> dict:
        """Programs of the kernels and of their pieces, being made."""
        if not self.gpu or "kernel" not in self.args.ways:
            return {}
        stream = self.inputs(rows)[1]
        whole = lambda x, layer: Hopper().add_norm(stream, self.ours(x, layer), self.norm, 1e-6)
        made = {name: pool.submit(self.built, rows, name) for name in ("route", "gate_up", "down")}
        return {"kernel": pool.submit(self.program, whole, self.inputs(rows)[0], self.layers)} | made

    def built(self, rows: int, name: str, cut: Cut | None = None):
        """A piece's program with its constants."""
        x, _ = self.inputs(rows)
        function, constants = self.piece(name, x, cut)
        return self.program(function, x, constants)

    def measure(self, rows: int, ready: dict) -> dict:
        """Both ways, the pieces of the second, the floor and the error."""
        args, (x, stream) = self.args, self.inputs(rows)
        row = {"rows": rows} | self.floor(x)
        if set(WAYS) <= set(args.ways):
            wanted = jax.jit(self.ragged)(x, self.layers[0])
            row["error"] = exact.error(jax.jit(self.ours)(x, self.layers[0]).sum(0).astype(x.dtype), wanted)
        if not self.gpu:
            return row
        if "ragged" in args.ways:
            theirs = lambda x, layer: Hopper().add_norm(stream, self.ragged(x, layer), self.norm, 1e-6)
            row["ragged"] = self.clock(self.program(theirs, x, self.layers), x)
        for name, program in ready.items():
            row[name] = self.clock(program.result(), x)
        return row | {f"{name}_ratio": row[name] / row["floor"] for name in args.ways}

    def floor(self, x) -> dict:
        """Experts that the rows choose in a layer, and the time that these allow, in microseconds."""
        m, rows = self.moe, x.shape[1]
        touched = sum(touches(x[0], layer["router"], m.experts_per_token) for layer in self.layers) / len(self.layers)
        one = 3 * self.hidden * m.intermediate_size
        work = (touched * one + self.hidden * m.num_experts) * x.dtype.itemsize
        product = 2 * rows * (m.experts_per_token * one + self.hidden * m.num_experts)
        read, multiplied = work / self.limits["bytes_per_second"], product / self.limits["flops_per_second"]
        return {"experts": touched, "floor": 1e6 * max(read, multiplied)}

    def piece(self, name: str, x, cut: Cut | None = None) -> tuple[Callable, list]:
        """One part of the kernels, and for each layer what comes to it from the part before."""
        m, rows = self.moe, x.shape[1]
        experts, inner, top = m.num_experts, m.intermediate_size, self.top
        usual, here = gpu_experts.cuts(rows, self.hidden, inner, x.dtype), jax.default_backend() != "gpu"

        def route(x, layer):
            return gpu_experts.route(x[0], layer["router"], experts, top, interpret=here)[0]

        def gate_up(x, given):
            layer, routed = given
            weights = layer["gate_up"].reshape(experts, self.hidden, 2 * inner)
            return gpu_experts.gate_up_product(x[0], weights, routed, top, cut or usual.gate_up, here)

        def down(x, given):
            layer, _, (wide, routed) = given
            _, wide = jax.lax.optimization_barrier((x, wide))  # or it would be computed once, before the loop
            return gpu_experts.down_product(wide, layer["down"], routed, top, cut or usual.down, here)

        if name == "route":
            return route, self.layers
        before = [(layer, jax.jit(route)(x, layer)) for layer in self.layers]
        if name == "gate_up":
            return gate_up, before
        plain = functools.partial(jax.jit(lambda x, given: self.piece("gate_up", x)[0](x, given)), x)
        return down, [(*given, plain(given)) for given in before]

    def attempts(self, rows: int, name: str, pool) -> dict:
        """Programs of every cut of a product, being made."""
        size = jnp.dtype(self.args.dtype).itemsize
        cuts = candidates(rows, self.hidden, self.moe.intermediate_size, name, size)
        return {cut: pool.submit(self.built, rows, name, cut) for cut in cuts}

    def search(self, rows: int, name: str, tried: dict) -> dict:
        """Times of every cut of a product, the best six of them."""
        x, timed = self.inputs(rows)[0], []
        for cut, program in tried.items():
            try:
                timed.append((round(self.clock(program.result(), x), 1), tuple(cut)))
            except jax.errors.JaxRuntimeError:  # more memory than a multiprocessor has
                continue
        return {"rows": rows, "piece": name, "refused": len(tried) - len(timed), "best": sorted(timed)[:6]}

    def program(self, function, x, constants) -> Callable:
        """`(n, x)` visits every layer n times in one program."""
        one = jax.jit(function)
        empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, x, constants[0]))

        def many(n, x, constants):
            def body(_, carry):
                results = [one(carry[0], given) for given in constants]
                nudge = sum(jax.tree.leaves(r)[0].ravel()[0].astype(jnp.float32) for r in results) * 1e-30
                return carry[0] + nudge.astype(x.dtype), results

            return jax.lax.fori_loop(0, n, body, (x, [empty for _ in constants]))

        compiled = jax.jit(many).lower(jnp.int32(1), x, constants).compile()
        return lambda n, x: compiled(n, x, constants)

    def clock(self, program, x) -> float:
        run = lambda n: program(jnp.int32(n), x)
        return 1e6 * timing.per_step(run, 4, 20, self.args.repeats) / len(self.layers)


@functools.partial(jax.jit, static_argnums=2)
def _experts(x, router, count):
    return moe.choose(x, router, count, False)[1]


def touches(x, router, count: int) -> int:
    """How many experts the rows [R, E] choose."""
    return len(set(_experts(x, router, count).ravel().tolist()))


def candidates(rows: int, hidden: int, inner: int, name: str, size: int):
    """Cuts that may do: some columns in a step of some depth, as many steps on their way as memory holds."""
    sum_, width, products = (hidden, inner, 2) if name == "gate_up" else (inner, hidden, 1)
    tile = min(64, max(16, 1 << (rows - 1).bit_length())) if rows > gpu_experts.TILE else gpu_experts.TILE
    for columns, depth, (warps, stages) in itertools.product(
        (16, 32, 64, 128), (32, 64, 128, 256), ((4, 3), (4, 4), (4, 6), (8, 4))
    ):
        step = size * depth * (columns * products + tile)
        whole = sum_ % depth == 0 and width % columns == 0
        shares = 8 * 1024 * size // 2 <= depth * columns * products * size <= 64 * 1024
        many = columns * products > 128  # more than the registers of four warps hold beside the rest
        if whole and shares and step * stages <= SHARED and (warps == 8 or not many):
            yield Cut(columns, depth, warps, stages)
