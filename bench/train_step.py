"""Time, memory and FLOP utilisation of a training step at the shape of a real target, with random weights.

    python bench/train_step.py
    python bench/train_step.py --mesh data=2 --micro_batch 4                            two devices, the same rows each
    python bench/train_step.py --shape tiny --dtype float32 --sequence 64 --anchors 8      a smoke run for a CPU

The step is the online one of `configs/qwen3_8b.py`: target forward, head forward and backward, chunked forward KL over
the whole vocabulary, AdamW on f32 masters. Times are medians of (time of 1 + `--steps` calls - time of one call) /
`--steps`. Utilisation = counted operations of a step / (its seconds x the rate of a large square product of the same
dtype in the same process); what is counted stands in `jetspec_jax/training/flops.py`. `peak` is all device memory held
at once up to the end of the timed steps: weights, state and the step. Parts are timed alone and after that, so their
sum is not exactly the step. Prints a table, then one JSON line.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("train_step")

import dataclasses
import functools
import json
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import shapes
import timing

from jetspec_jax import command
from jetspec_jax.fields import Option
from jetspec_jax.models import qwen3, sharding
from jetspec_jax.training import flops, losses, options, settings, step, teacher
from jetspec_jax.training import recipe as recipes
from jetspec_jax.training.data.batches import Batch
from jetspec_jax.training.objectives import block as learns

CONFIG = Path(__file__).parent.parent / "configs" / "qwen3_8b.py"


LINE = command.Line(
    __doc__,
    [
        shapes.SHAPE,
        shapes.DTYPE,
        command.MESH,
        Option("sequence", "whole", "Tokens of a sequence.", 3072, low=16),
        Option("anchors", "whole", "Blocks of a sequence.", 256, low=1),
        Option("micro_batch", "whole", "Sequences of a step.", 2, low=1),
        Option("steps", "whole", "Steps of a long call.", 4, low=1),
        dataclasses.replace(timing.REPEATS, default=3),
        Option("attention", "choice", "What computes it.", "auto", choices=("auto", "xla", "cudnn")),
        Option("loss_chunk", "whole", "Rows whose f32 logits exist at a time.", 2048, low=1),
        Option("remat", "flag", "Recompute what is inside the head's layers instead of keeping it.", True),
        Option("parts", "flag", "Also time the parts alone (four more compilations).", False),
    ],
)


@command.tool("bench/train_step.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)

    target, head = shapes.PAIRS[args.shape]
    attention = teacher.kernel(args.attention, args.dtype)
    values = options.load(CONFIG) | {
        "sequence_length": args.sequence, "anchors": args.anchors, "loss_chunk": args.loss_chunk,
        "batch": args.micro_batch, "remat": args.remat, "epochs": 0.0, "steps": 1_000, "data": "-",
    }  # fmt: skip
    config = settings.make(values, str(CONFIG))
    model, weights = qwen3.build(target, jnp.dtype(args.dtype))
    recipe = recipes.make(config, model, args.dtype, head, config.steps, attention)
    mesh = sharding.mesh_of(args.mesh or "data=1")
    params = shapes.drawn(weights, sharding.frozen(weights, mesh))
    batch = random_batch((1, args.micro_batch, args.sequence), target.vocab_size)
    batch = jax.device_put(batch, sharding.split(mesh, 1))
    scale = jax.device_put(jnp.ones(len(head.tap_layers) * head.hidden_size), sharding.repeated(mesh))

    first = lambda target: step.init(recipe, target)
    lies = sharding.trained(jax.eval_shape(first, params), mesh)
    state = jax.jit(first, out_shardings=lies)(params)
    out = lies, sharding.repeated(mesh)
    update = jax.jit(step.update, static_argnums=0, donate_argnums=3, out_shardings=out)
    compiled = update.lower(recipe, params, scale, state, batch).compile()
    temporary = compiled.memory_analysis().temp_size_in_bytes
    held = [state, None]
    del state

    def whole():
        held[:] = compiled(params, scale, held[0], batch)
        return held[1]

    time_step = seconds(whole, args)
    loss = float(held[1].loss)
    device = jax.devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    times = parts(args, recipe, params, scale, held.pop(0), batch) if args.parts else {}
    work = flops.parts(recipe, target, args.micro_batch, args.sequence, online=True)
    total, rate = sum(work.values()), flops.matrix_rate(args.dtype) * mesh.size
    utilisation = total / time_step / rate

    print(f"{args.shape}, random weights, {args.micro_batch} x {args.sequence}, {args.anchors} anchors, attention "
          f"{attention}; {device.device_kind}, jax {jax.__version__}, {args.dtype}")  # fmt: skip
    print(f"matrix rate {rate / 1e12:.4g} TFLOP/s; a step {total / 1e12:.4g} TFLOP")
    for name, value in work.items():
        print(f"  {name:28} {value / 1e12:8.2f} TFLOP")
    for name, value in times.items():
        print(f"  {name:28} {1e3 * value:8.1f} ms alone")
    print(f"step {1e3 * time_step:.1f} ms, model FLOP utilisation {utilisation:.1%}")
    print(f"peak {peak / 2**30:.1f} GiB; temporaries of the step {temporary / 2**30:.1f} GiB")
    print(json.dumps({
        "device": device.device_kind, "settings": command.settings(args), "attention": attention,
        "ms_step": 1e3 * time_step, "ms_parts": {k: 1e3 * v for k, v in times.items()}, "flop": work,
        "matrix_rate": rate, "utilisation": utilisation, "peak_bytes": peak, "temporary_bytes": temporary, "loss": loss,
    }))  # fmt: skip
    return 0


def seconds(call, args: command.Args) -> float:
    """Returns the seconds of one call, after one that compiles."""

    def run(n: int):
        for _ in range(n):
            out = call()
        return out

    return timing.per_step(run, 1, 1 + args.steps, args.repeats)


def random_batch(shape: tuple[int, int, int], vocab: int) -> Batch:
    """Sequences of one document each, of which all but the first eighth is learnt."""
    at = np.broadcast_to(np.arange(shape[-1], dtype=np.int32), shape)
    tokens = np.random.default_rng(0).integers(0, vocab, shape, np.int32)
    learnt = jnp.asarray(at >= shape[-1] // 8)
    return Batch(
        jnp.asarray(tokens), jnp.ones(shape, jnp.int32), jnp.asarray(at), learnt, jnp.zeros(shape[:2], jnp.int32)
    )


def parts(args: command.Args, recipe: recipes.Recipe, params, scale, state, batch: Batch) -> dict[str, float]:
    """Seconds of the parts alone; takes the state."""
    head, dtype, times = recipe.head, recipe.dtype, {}
    part = jax.tree.map(lambda x: x[0], batch)

    @jax.jit
    def target_alone(p):
        return teacher.run(
            recipe.target, p, part.tokens, part.document, part.position, head.tap_layers, recipe.attention
        )

    times["target forward"] = seconds(lambda: target_alone(params), args)
    found = target_alone(params)
    keys = jax.random.split(jax.random.key(0), args.micro_batch)

    @jax.jit
    def head_alone(head_params, params, found):
        asked = learns.draw(recipe, params, part, keys)
        drafted = lambda p: learns.hidden(recipe, learns.fold(p, scale, dtype), part, found, asked)
        hidden, pullback = jax.vjp(drafted, head_params)
        return pullback(hidden)[0]

    times["head forward and backward"] = seconds(lambda found=found: head_alone(state.params, params, found), args)
    del found
    rows, table = args.anchors * head.depth, teacher.unembedding(params)
    drafted = losses.Logits((losses.Term(jnp.ones((args.micro_batch, rows, head.hidden_size), dtype), table),))
    slots = losses.Rows(
        teacher=jnp.ones((args.micro_batch, rows, head.hidden_size), dtype),
        label=jnp.zeros((args.micro_batch, rows), jnp.int32),
        weight=jnp.ones((args.micro_batch, rows)),
    )
    loss = jax.jit(losses.distill, static_argnums=(3, 4))
    times["lm_head and loss"] = seconds(lambda: loss(table, drafted, slots, recipe.mix, recipe.loss_chunk), args)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def adamw(head_params, moments):
        change, moments = recipe.optimizer.update(head_params, moments, head_params)
        return optax.apply_updates(head_params, change), moments

    held = [(state.params, state.optimizer)]

    def optimise():
        held[0] = adamw(*held[0])
        return held[0]

    times["AdamW"] = seconds(optimise, args)
    return times
