"""Time of a plain step and of a speculative round, beside what the memory allows; random weights of a real shape.

    python bench/decode_latency.py --shape qwen3-8b
    python bench/decode_latency.py --shape qwen3-8b --batch 8 --budgets 16 --parts
    python bench/decode_latency.py --shape qwen3-8b --budgets 1 --contexts 1024:2048 1024:32768 32000:32768

Every figure is the time of one step inside the compiled loop (median of differences between a long and a short call,
after warm-up), at each of `--contexts` committed tokens of cache slots. Two floors stand beside it, each with the ratio
of the time to it: `read` is the time to read the weights and the committed K/V once (a round: the lm_head twice) at the
rate of a plain read in this very run, `product` the time to compute the products of all rows (weights, lm_head,
scores and values over the committed K/V; a round's head included) at the rate of a large square product of the same
dtype. Of a mixture those experts are read that the rows of a step chose, counted layer by layer over `--counted` steps
of this very state (`experts`, their mean; with `--counted 0` as many as the rows can choose). `over` is the temporary
memory of the loop beyond the tree's K/V and the larger of the target's and the draft's f32 logits, which are not alive
together: the draft's end with the tree. Prints a table, then one JSON line.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("decode_latency")

import json
import re
from collections.abc import Sequence

import anchor
import jax
import jax.numpy as jnp
import shapes
import timing
import touched

from jetspec_jax import command
from jetspec_jax.engine.programs import program
from jetspec_jax.fields import Option, shown
from jetspec_jax.layers import masks
from jetspec_jax.loop import decoder, tree
from jetspec_jax.loop.plain import PLAIN
from jetspec_jax.training import flops

LINE = command.Line(
    __doc__,
    [
        shapes.SHAPE,
        Option(
            "budgets",
            "whole",
            "Tree nodes of a round; 0 or 1 is only the plain step.",
            (64, 128, 256),
            low=0,
            many=True,
        ),
        Option("batch", "whole", "Rows of a batch.", 1, low=1),
        Option(
            "contexts", "text", "Committed tokens and cache slots.", ("1024:2048",), many=True, metavar="LENGTH:SLOTS"
        ),
        shapes.DTYPE,
        command.BACKEND,
        Option(
            "scorer",
            "text",
            "Rank and SwiGLU width of a scorer beside the head; neither --parts nor the floor of products has it.",
            "0:0",
            metavar="RANK:WIDTH",
        ),
        Option("steps", "whole", "Steps of a long call.", 64, low=4),
        timing.REPEATS,
        Option("counted", "whole", "Steps over which experts are counted.", 4, low=0),
        Option("parts", "flag", "Also time draft, tree and verification alone.", False),
        Option("anchor", "flag", "Also time transformers' generate on the same weights.", False),
        Option("profile", "text", "Write a profiler trace of a few steps of each.", metavar="DIR"),
    ],
)


@command.tool("bench/decode_latency.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)
    contexts = [sizes(text) for text in args.contexts]
    scorer = scorer_sizes(args.scorer)

    limits = timing.machine(args.dtype)  # before the weights: its arrays need the room
    pair = shapes.random_pair(args.shape, args.dtype, args.backend, scorer)
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.dtype}"
    print(
        f"{args.shape}, random weights, batch {args.batch}, attention {pair.target.backend.name}; {device}",
        flush=True,
    )
    reads, products = limits["bytes_per_second"] / 1e12, limits["flops_per_second"] / 1e12
    weights = size(pair.params) / 2**30
    print(f"plain read {reads:.3f} TB/s, matrix product {products:.4g} TFLOP/s; weights {weights:.2f} GiB")
    floors = f"{'read ms':>8} {'ratio':>6} {'product ms':>11} {'ratio':>6}"
    last = f"{'experts':>8}" if pair.target.config.moe and args.counted else ""
    titles = f"{'ms':>8} {floors} {'compile s':>10} {'temp MiB':>9} {'over':>6} {last}"
    print(f"{'committed':>14} {'':>12} {titles}")
    rows = []
    for args.length, args.slots in contexts:
        rows += [measure(args, pair, budget, limits) for budget in [1, *(b for b in args.budgets if b > 1)]]
    if args.anchor:
        seconds = anchor.per_token(pair, args.length, args.steps)
        print(f"transformers, static cache, compiled: {1e3 * seconds:.2f} ms a plain token")
        rows.append({"anchor": "transformers", "length": args.length, "ms": 1e3 * seconds})
    print(json.dumps({"settings": command.settings(args), "device": device, "machine": limits, "rows": rows}))
    return 0


def sizes(text: str) -> tuple[int, int]:
    """Committed tokens and cache slots of "LENGTH:SLOTS"."""
    found = re.fullmatch("([0-9]{1,9}):([0-9]{1,9})", text)
    if not found or not 0 < int(found[1]) < int(found[2]):
        raise command.UsageError(f"--contexts={shown(text)}: give LENGTH:SLOTS, the second the larger, e.g. 1024:2048")
    return int(found[1]), int(found[2])


def scorer_sizes(text: str) -> tuple[int, int]:
    """Rank and width of "RANK:WIDTH"."""
    found = re.fullmatch("([0-9]{1,5}):([0-9]{1,5})", text)
    if not found or (found[2] != "0" and found[1] == "0"):
        raise command.UsageError(f"--scorer={shown(text)}: give RANK:WIDTH, e.g. 256:1024; 256:0 has no SwiGLU")
    return int(found[1]), int(found[2])


def measure(args: command.Args, pair: shapes.Pair, budget: int, limits: dict) -> dict:
    """Plain step (budget 1) or round."""
    if budget == 1:
        static, params = decoder.Decoder(pair.target, PLAIN, args.slots), pair.plain
    else:
        draft = pair.draft.shaped(tree.Rule(budget), min(pair.draft.depth, budget - 1))
        static, params = decoder.Decoder(pair.target, draft, args.slots), pair.params
    held = [shapes.state_at(static, params, args.length, args.batch, budget)]
    compiled, seconds = program(decoder.rounds, static, params, held[0], jnp.int32(1), donate=(1,))

    def run(n: int):
        held[0] = compiled(params, shapes.at_length(held[0], args.length), jnp.int32(n))
        return held[0].length

    counted = []
    if args.counted and pair.target.config.moe:
        counted = touched.by_layer(static, params, held[0], args.counted)
    step = timing.per_step(run, args.steps // 4, args.steps, args.repeats)
    kv = size((held[0].cache, held[0].draft.context if budget > 1 else ())) * args.length / args.slots
    work = weight_bytes(pair, args.batch * budget, budget > 1, counted) + kv
    products = product_flop(pair, static, args.batch, args.length)
    read, product = work / limits["bytes_per_second"], products / limits["flops_per_second"]
    temp = compiled.memory_analysis().temp_size_in_bytes / 2**20
    row = {
        "length": args.length, "slots": args.slots, "budget": budget, "ms": 1e3 * step,
        "read_floor_ms": 1e3 * read, "read_ratio": step / read,
        "product_floor_ms": 1e3 * product, "product_ratio": step / product,
        "bytes": work, "flop": products, "compile_seconds": seconds,
        "temp_mib": temp, "over_mib": temp - expected_mib(pair, args.batch, budget), "experts_by_layer": counted,
    }  # fmt: skip
    name = "plain step" if budget == 1 else f"round {budget}"
    times = f"{row['ms']:8.3f} {1e3 * read:8.3f} {step / read:6.2f} {1e3 * product:11.3f} {step / product:6.2f}"
    at = f"{args.length} of {args.slots}"
    experts = f"{sum(counted) / len(counted):8.1f}" if counted else ""
    print(f"{at:>14} {name:>12} {times} {seconds:10.1f} {temp:9.1f} {row['over_mib']:6.1f} {experts}", flush=True)
    if args.profile:
        with jax.profiler.trace(f"{args.profile}/{args.length}-{args.slots}/{budget}"):
            jax.block_until_ready(run(8))
    if args.parts and budget > 1:
        row["parts_ms"] = parts(args, pair, static, held[0], budget)
        print(" " * 12, "  ".join(f"{k} {v:.3f}" for k, v in row["parts_ms"].items()), flush=True)
    return row


def parts(args, pair, static, state, budget: int) -> dict[str, float]:
    """Draft, tree and verification alone, each in a loop of its own (about 0.015 ms of every figure is the loop)."""
    target, draft, batch = static.target, static.draft, args.batch
    weights = pair.params
    length = jnp.full((batch,), args.length, jnp.int32)
    key = jax.random.key(3)

    def propose(carry, weights):
        tokens, held = carry
        anchor = tokens[:, args.length - 1]
        logits, new = draft.logits(weights["draft"], held, anchor, length, static.ends(weights))
        tokens = tokens.at[:, args.length - 1].set(jnp.argmax(logits[:, -1], -1).astype(jnp.int32))
        return tokens, new._replace(length=held.length, count=held.count)

    def grow(carry):
        logits, anchor = carry
        built = tree.build(draft.rule, logits, anchor, whole, target.backend.grow)
        anchor = built.tokens.sum(1) % 7
        return logits + anchor[:, None, None] * 1e-6, anchor

    whole = jnp.full((batch,), budget, jnp.int32)
    logits = jax.random.normal(key, (batch, static.depth, target.vocab_size))
    built = tree.build(draft.rule, logits, jnp.zeros((batch,), jnp.int32), whole)
    seen = masks.ancestors(built.parents, static.depth)

    def verify(tokens, weights, cache):
        out = target.forward(weights, tokens, length[:, None] - 1 + built.depths, seen, cache, length - 1, draft.taps)
        return jnp.argmax(target.logits(weights, out.hidden), -1).astype(jnp.int32)

    def timed(step, carry, *constants):
        program, held = timing.looped(step, *constants), [carry]

        def run(n):
            held[0] = program(n, held[0])
            return jax.tree.leaves(held[0])[0]

        return 1e3 * timing.per_step(run, args.steps // 4, args.steps, args.repeats)

    copy = lambda x: jax.tree.map(jnp.copy, x)
    return {
        "draft": timed(propose, copy((state.tokens, state.draft)), weights),
        "tree": timed(grow, (logits, jnp.zeros((batch,), jnp.int32))),
        "verify": timed(verify, jnp.copy(built.tokens), weights["target"], copy(state.cache)),
    }


def expected_mib(pair: shapes.Pair, batch: int, budget: int) -> float:
    """The tree's keys and values, and f32 logits of the target or the draft: what a round holds by its nature."""
    c = pair.target.config
    logits = 4 * c.vocab_size * max(budget, min(pair.draft.depth, budget - 1))
    kv = 2 * c.num_layers * c.num_kv_heads * c.head_dim * budget * pair.params["target"]["embedding"].dtype.itemsize
    return batch * (logits + kv) / 2**20


def size(tree) -> int:
    return sum(x.nbytes for x in jax.tree.leaves(tree))


def weight_bytes(pair: shapes.Pair, rows: int, drafting: bool, counted: Sequence[float] = ()) -> int:
    """Weights that a step of `rows` rows reads; drafting reads the head, and the target's lm_head once more.

    counted: experts that were read in each sparse layer; without them, as many as the rows can choose.
    """
    params, moe = pair.params["target"], pair.target.config.moe
    table = params.get("lm_head", params["embedding"])
    read = size(params["layers"]) + params["norm"].nbytes + table.nbytes  # an untied embedding is only looked up
    if moe:
        most = min(moe.num_experts, rows * moe.experts_per_token)
        for i, found in zip(moe.sparse_layers, counted or [most] * len(moe.sparse_layers), strict=True):
            experts = size([params["layers"][i][name] for name in ("gate_up", "down")])
            read -= round(experts * (1 - found / moe.num_experts))
    return read + (size(pair.params["draft"]) + table.nbytes if drafting else 0)


def product_flop(pair: shapes.Pair, static: decoder.Decoder, batch: int, length: int) -> int:
    """FLOP of a step's products; the tree's and the block's attention to themselves is left out."""
    c, draft = pair.target.config, static.draft

    def layers(config, rows):
        attended = 2 * length * config.num_heads * config.head_dim * config.num_layers
        return 2 * rows * (flops.row_parameters(config) + attended)

    logits = static.nodes + static.depth
    total = 2 * batch * logits * c.vocab_size * c.hidden_size + layers(c, batch * static.nodes)
    if static.depth:
        h, fresh = draft.config, batch * (draft.depth + 1)  # the rows of a round, of which the head keeps K/V
        keys_values = 2 * h.num_layers * h.hidden_size * h.num_kv_heads * h.head_dim
        total += layers(h, batch * draft.slots) + 2 * fresh * (pair.params["draft"]["fc"].size + keys_values)
    return total
