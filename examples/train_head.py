"""Trains a tiny head for a tiny random target and decodes with it: what training is, in seconds on a CPU.

    python examples/train_head.py [--steps 80]

Real runs are made by `train.py` out of a configuration (`configs/tiny_cpu.py` is the whole path on the demo target):
it adds rows and chat templates, checkpoints, evaluation and export. The three steps below are what it is about: the
target's own answers, updates of the head, and decoding with it.
"""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax import SamplingConfig, TreeConfig, baseline, speculate
from jetspec_jax.config import HeadConfig, ModelConfig
from jetspec_jax.drafts import block
from jetspec_jax.files.pair import LoadedHead, LoadedTarget
from jetspec_jax.models import qwen3
from jetspec_jax.training import features, step
from jetspec_jax.training.data import packing
from jetspec_jax.training.data.batches import Batches
from jetspec_jax.training.data.examples import Example
from jetspec_jax.training.recipe import Recipe

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=80)
args = parser.parse_args()

sizes = {
    "vocab_size": 48, "hidden_size": 16, "num_heads": 2, "num_kv_heads": 1, "head_dim": 8, "intermediate_size": 24,
    "norm_eps": 1e-6, "rope_theta": 1e4, "max_positions": 512,
}  # fmt: skip
config = ModelConfig("qwen3", num_layers=2, tie_embeddings=True, qk_norm=True, **sizes)
head_config = HeadConfig(
    num_layers=1, num_target_layers=2, block_size=4, mask_token_id=0, tap_layers=(0, 1), causal=True, **sizes
)
model, shapes = qwen3.build(config, jnp.float32)
draw = np.random.default_rng(0)
weights = jax.tree.map(lambda x: jnp.float32((x.ndim == 1) + 0.3 * draw.standard_normal(x.shape)), shapes)
target = LoadedTarget(model, weights, config, "float32", (), "", "", 0.0, lambda: None)

# 1. The target answers prompts; the head will learn these answers, and not the prompts.
prompts = [draw.integers(1, 48, 4).tolist() for _ in range(32)]
answers = baseline.generate(target, prompts, SamplingConfig(20))
rows = [[*prompt, *answer.token_ids] for prompt, answer in zip(prompts, answers, strict=True)]
learnt = np.arange(24) >= 4
packed = packing.pack([Example(str(i), np.array(row, np.int32), learnt) for i, row in enumerate(rows)], 24)

# 2. Updates: the target runs, blocks are drawn, the head drafts them, and the loss compares the two.
recipe = Recipe(model, head_config, "float32", anchors=8, steps=args.steps, peak_lr=1e-2, gamma=7.0, loss_chunk=128)
scale = features.scale(target, packed, head_config.tap_layers, sequences=8, batch=8, attention="xla")
state, update = step.init(recipe, target.params), jax.jit(step.update, static_argnums=0)
batches = Batches(packed, batch=8, accumulate=1, seed=0)
for number in range(args.steps):
    state, metrics = update(recipe, target.params, scale, state, batches[number])
    if number % 20 == 0 or number == args.steps - 1:
        print(f"step {number + 1}: loss {metrics.loss:.3f}, run length {metrics.run_length:.2f}")

# 3. The finished head decodes prompts that it has not seen.
draft, _ = block.build(head_config, jnp.float32)
params = recipe.learns.fold(state.params, scale, "float32")
head = LoadedHead(draft, params, head_config)
unseen = [draw.integers(1, 48, 4).tolist() for _ in range(8)]
results = speculate.generate(target, head, unseen, TreeConfig(budget=8), SamplingConfig(20))
rounds = sum(result.rounds for result in results)
print(f"decoding: {sum(sum(result.emitted) for result in results) / rounds:.2f} tokens a round")
