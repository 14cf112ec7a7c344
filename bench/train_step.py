"""Time, memory and FLOP utilisation of a training step at the sizes of a real target, with random weights.

    python bench/train_step.py                        Qwen3-8B: sequences of 3,072, 256 anchors, two at a time
    python bench/train_step.py --size tiny --steps 2  a smoke run for a CPU

The step is the online one of `configs/qwen3_8b.py`: target forward, head forward and backward, chunked forward KL over
the whole vocabulary, AdamW on f32 masters. Utilisation = counted operations of a step / (its seconds x the rate of an
8192 x 8192 bfloat16 product in the same process); what is counted stands in `jetspec_jax/training/flops.py`. Parts are
timed alone, so their sum is not exactly the step. Prints a table, then one JSON line.
"""

from __future__ import annotations

import argparse
import functools
import json
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jetspec_jax.config import ModelConfig
from jetspec_jax.models import qwen3
from jetspec_jax.training import anchors as anchor_rules
from jetspec_jax.training import flops, losses, options, pipeline, settings, step, teacher
from jetspec_jax.training.batches import Batch

CONFIG = Path(__file__).parent.parent / "configs" / "qwen3_8b.py"
SIZES = {
    "qwen3_8b": {
        "vocab_size": 151_936, "hidden_size": 4_096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12_288,
    },
    "tiny": {
        "vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 128,
    },
}  # fmt: skip


def random_params(shapes, seed: int):
    """Drawn on the device, a parameter at a time: matrices N(0, 0.02), norms one."""
    draw = jax.jit(lambda key, shape, dtype: 0.02 * jax.random.normal(key, shape, dtype), static_argnums=(1, 2))
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    make = lambda k, x: draw(k, x.shape, x.dtype) if len(x.shape) > 1 else jnp.ones(x.shape, x.dtype)
    return jax.tree.unflatten(structure, [make(k, x) for k, x in zip(keys, leaves, strict=True)])


def seconds(run, repeats: int) -> float:
    """Mean of `repeats` calls behind one that compiles."""
    jax.block_until_ready(run())
    begin = time.perf_counter()
    for _ in range(repeats):
        out = run()
    jax.block_until_ready(out)
    return (time.perf_counter() - begin) / repeats


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=SIZES, default="qwen3_8b")
    parser.add_argument("--sequence", type=int)
    parser.add_argument("--anchors", type=int)
    parser.add_argument("--micro_batch", type=int, default=2)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--attention", choices=["auto", "xla", "cudnn"], default="auto")
    parser.add_argument("--loss_chunk", type=int, default=2_048)
    parser.add_argument("--noremat", action="store_true", help="keep what is inside the head's layers")
    parser.add_argument("--parts", action="store_true", help="also time the parts alone (three more compilations)")
    args = parser.parse_args()
    tiny = args.size == "tiny"
    args.sequence = args.sequence or (64 if tiny else 3_072)
    args.anchors = args.anchors or (8 if tiny else 256)

    raw = SIZES[args.size] | {"model_type": "qwen3", "rms_norm_eps": 1e-6, "rope_theta": 1e6}
    target_config = ModelConfig.from_hf(raw | {"max_position_embeddings": 40_960, "tie_word_embeddings": False})
    values = options.load(CONFIG) | {
        "sequence_length": args.sequence, "anchors": args.anchors, "loss_chunk": args.loss_chunk,
        "batch": args.micro_batch, "remat": not args.noremat, "epochs": 0.0, "steps": 1_000, "data": "-",
    }  # fmt: skip
    if tiny:
        values |= {"tap_layers": (0, 1), "mask_token_id": 511, "head_layers": 1, "dtype": "float32"}
    config = settings.make(values, str(CONFIG))
    dtype = config.dtype
    model, shapes = qwen3.build(target_config, jnp.dtype(dtype))
    params = random_params(shapes, 0)
    head = config.head_config(target_config, ())
    attention = teacher.kernel(args.attention, dtype)

    class Target:  # what the recipe reads of a loaded target
        pass

    Target.model, Target.dtype = model, dtype
    recipe = pipeline.make_recipe(config, Target, head, config.steps, attention)
    shape = 1, args.micro_batch, args.sequence
    draw = np.random.default_rng(0)
    at = np.broadcast_to(np.arange(args.sequence, dtype=np.int32), shape)
    batch = Batch(
        jnp.asarray(draw.integers(0, target_config.vocab_size - 1_000 * (not tiny) - 1, shape, np.int32)),
        jnp.ones(shape, jnp.int32),
        jnp.asarray(at),
        jnp.asarray(at >= args.sequence // 8),
        jnp.zeros(shape[:2], jnp.int32),
    )
    scale = jnp.ones(len(head.tap_layers) * head.hidden_size)
    rate = flops.matrix_rate(dtype)

    parts = {}
    part = jax.tree.map(lambda x: x[0], batch)
    run_target = jax.jit(
        lambda p: teacher.run(model, p, part.tokens, part.document, part.position, head.tap_layers, attention)
    )
    work = flops.parts(recipe, target_config, args.micro_batch, args.sequence, online=True)
    if args.parts:
        parts["target forward"] = seconds(lambda: run_target(params), args.steps)
        found = run_target(params)
        keys = jax.random.split(jax.random.key(0), args.micro_batch)
        anchors = anchor_rules.sample(keys, anchor_rules.candidates(part.learnt, part.document), args.anchors)
        start = jax.jit(lambda norm: step.init(recipe, norm))(params["norm"]).params

        @jax.jit
        def head_alone(head_params, params, found):
            block = step.blocks(recipe, params, part, anchors)
            drafted = lambda p: step.drafted(recipe, step.fold(p, scale, dtype), block, part, found, anchors)
            hidden, pullback = jax.vjp(drafted, head_params)
            return pullback(hidden)[0]

        parts["head forward and backward"] = seconds(lambda: head_alone(start, params, found), args.steps)
        rows = args.anchors * head.depth
        slots = losses.Rows(
            draft=jnp.ones((args.micro_batch, rows, head.hidden_size), dtype),
            teacher=jnp.ones((args.micro_batch, rows, head.hidden_size), dtype),
            label=jnp.zeros((args.micro_batch, rows), jnp.int32),
            weight=jnp.ones((args.micro_batch, rows)),
        )
        loss = jax.jit(losses.distill, static_argnums=(2, 3))
        table = step.unembedding(params)
        parts["lm_head and loss"] = seconds(lambda: loss(table, slots, recipe.mix, recipe.loss_chunk), args.steps)

        @functools.partial(jax.jit, donate_argnums=(0, 1))
        def adamw(head_params, moments):
            change, moments = recipe.optimizer.update(head_params, moments, head_params)
            return optax.apply_updates(head_params, change), moments

        held = [(start, jax.jit(recipe.optimizer.init)(start))]

        def optimise():
            held[0] = adamw(*held[0])
            return held[0]

        parts["AdamW"] = seconds(optimise, args.steps)
        del held, start, found, slots

    state = jax.jit(lambda norm: step.init(recipe, norm))(params["norm"])
    update = jax.jit(step.update, static_argnums=0, donate_argnums=3)
    compiled = update.lower(recipe, params, scale, state, batch).compile()
    memory = compiled.memory_analysis()
    holder = [state]
    del state

    def whole():
        holder[0], metrics = update(recipe, params, scale, holder[0], batch)
        return metrics

    time_step = seconds(whole, args.steps)
    total = sum(work.values())
    device = jax.devices()[0]
    peak = (device.memory_stats() or {}).get("peak_bytes_in_use", 0)
    utilisation = total / time_step / rate

    print(f"{device.device_kind}, {dtype}, attention {attention}, {args.micro_batch} x {args.sequence}, "
          f"{args.anchors} anchors, random weights")  # fmt: skip
    print(f"matrix rate {rate / 1e12:.1f} TFLOP/s; a step {total / 1e12:.1f} TFLOP")
    for name, value in work.items():
        print(f"  {name:28} {value / 1e12:8.2f} TFLOP")
    for name, value in parts.items():
        print(f"  {name:28} {1e3 * value:8.1f} ms alone")
    print(f"step {1e3 * time_step:.1f} ms, model FLOP utilisation {utilisation:.1%}")
    print(f"peak {peak / 2**30:.1f} GiB; temporaries of the step {memory.temp_size_in_bytes / 2**30:.1f} GiB")
    print(json.dumps({
        "device": device.device_kind, "settings": vars(args), "attention": attention, "ms_step": 1e3 * time_step,
        "ms_parts": {k: 1e3 * v for k, v in parts.items()}, "flop": work, "matrix_rate": rate,
        "utilisation": utilisation, "peak_bytes": peak, "temporary_bytes": memory.temp_size_in_bytes,
        "loss": float(whole().loss),
    }))  # fmt: skip


if __name__ == "__main__":
    main()
