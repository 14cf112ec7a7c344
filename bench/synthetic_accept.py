"""Speed against acceptance: a target and a draft that follow a script, at the cost of the real ones.

    python bench/synthetic_accept.py --shape qwen3-8b --budgets 64 128 --accept 2 4 7 10
    python bench/synthetic_accept.py --shape qwen3-8b --budgets 64 --accept 7 --temperature 1 --top_p 0.95

Target and head run whole, with random weights; then the script's token gets a bonus that no noise reaches. The draft's
bonus goes to the right token for as many positions as a round shall accept, and to a wrong one after. So acceptance is
known and every operation is paid for, also those whose cost depends on it: with options (--top_p and the like) the rows
that the accepted path visits are processed. Prints a table, then one JSON line.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("synthetic_accept")

import json
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import shapes
import timing

from jetspec_jax import command
from jetspec_jax.drafts import synthetic
from jetspec_jax.drafts.synthetic import SyntheticConfig
from jetspec_jax.engine.programs import program
from jetspec_jax.fields import Option
from jetspec_jax.loop import decoder
from jetspec_jax.loop.processors import Sampling
from jetspec_jax.loop.tree import Rule

LINE = command.Line(
    __doc__,
    [
        shapes.SHAPE,
        Option("budgets", "whole", "Tree nodes.", (64, 128, 256), low=2, many=True),
        Option("accept", "whole", "Tokens a round, bonus included.", (1, 4, 7, 10), low=1, many=True),
        Option("batch", "whole", "Rows of a batch.", 1, low=1),
        Option("length", "whole", "Committed tokens at the start.", 1024, low=1),
        Option("slots", "whole", "Cache slots.", 4096, low=1),
        *(command.SAMPLING[name] for name in ("temperature", "top_p", "top_k")),
        shapes.DTYPE,
        command.BACKEND,
        Option("steps", "whole", "Steps of a long call.", 48, low=4),
        timing.REPEATS,
    ],
)


@command.tool("bench/synthetic_accept.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)

    pair = shapes.random_pair(args.shape, args.dtype, args.backend)
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}, {args.dtype}"
    options = f"temperature {args.temperature:g}, top_p {args.top_p:g}, top_k {args.top_k}"
    print(f"{args.shape}, random weights, batch {args.batch}, from {args.length} tokens on, {options}; {device}")
    print(f"{'budget':>7} {'tokens/round':>13} {'ms/round':>9} {'tokens/s a row':>15}", flush=True)
    rows = [measure(args, pair, budget, accept) for budget in args.budgets for accept in args.accept]
    print(json.dumps({"settings": command.settings(args), "device": device, "rows": rows}))
    return 0


def measure(args: command.Args, pair: shapes.Pair, budget: int, accept: int) -> dict:
    """One setting; the acceptance is read from the records and not assumed."""
    own = pair.draft.shaped(Rule(budget), min(pair.draft.depth, budget - 1))
    config = SyntheticConfig(float(accept), pair.target.vocab_size, own.depth)
    target, weights = synthetic.scripted(pair.target, pair.params["target"], pair.target.config.hidden_size)
    draft, head = synthetic.build(config, inner=own, inner_params=pair.params["draft"])
    static = decoder.Decoder(target, draft.shaped(own.rule, own.depth), args.slots)
    params = {"target": weights, "draft": head}
    plain = decoder.Decoder(pair.target, own, args.slots)
    state = shapes.state_at(plain, pair.params, args.length, args.batch, budget)
    row = lambda value, dtype: jnp.full((args.batch,), value, dtype)
    sampling = Sampling(
        row(args.temperature, jnp.float32) if args.temperature else None, row(0, jnp.uint32),
        row(args.top_k, jnp.int32) if args.top_k else None, row(args.top_p, jnp.float32) if args.top_p < 1 else None,
    )  # fmt: skip
    held = [state._replace(sampling=sampling)]
    compiled, _ = program(decoder.rounds, static, params, held[0], jnp.int32(1), donate=(1,))

    def run(n: int):
        held[0] = compiled(params, shapes.at_length(held[0], args.length), jnp.int32(n))
        return held[0].length

    steps = min(args.steps, (args.slots - args.length - draft.depth - 1) // accept)
    seconds = timing.per_step(run, steps // 4, steps, args.repeats)
    found = float(jax.device_get(held[0].accept_lengths[:, :steps]).mean())
    rate = found / seconds
    print(f"{budget:7} {found:13.2f} {1e3 * seconds:9.3f} {rate:15.1f}", flush=True)
    return {"budget": budget, "tokens_per_round": found, "ms_per_round": 1e3 * seconds, "tokens_per_second": rate}
