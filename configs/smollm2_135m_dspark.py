"""A DSpark head for the demo target, on the rows, steps and layers of `smollm2_135m_long.py`.

    python train.py --config configs/smollm2_135m_dspark.py --workdir DIR --config.prompt_sets=FOLDER

Commands and environment as there; DIR may begin as a copy of that run's `pool*`, `own*`, `answers*` and `dialogues`.
From DSpark's paper and code: a block of 7 whose anchor drafts too, a vanilla Markov head, a loss of 0.1 cross entropy,
0.9 |p - q|_1 and the confidence's cross entropy, slot k (from 0) weighing exp(-k / 4). Ours: a rank of 64 where theirs
is 256, for a hidden size of 576; 640 blocks a sequence, so that a step takes as long as with blocks of 16; the
optimiser, as for the others. It has 22.1 M parameters where the JetSpec head has 15.8 M, 6.3 M of them its Markov head.
Held-out figures are those of chains (docs/training.md), so compare heads by `jetspec_jax.evals.compare` alone.

Run in 311 s of training and a start of 50 s on one NVIDIA H200 (bfloat16, jax 0.11.2), 58 ms a step.
"""

import runpy
from pathlib import Path

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = runpy.run_path(str(Path(__file__).with_name("smollm2_135m_long.py")))["get_config"]()
    c.family = "dspark"
    c.block_size = 7
    c.markov_rank = 64
    c.markov_head = "vanilla"
    c.forward_kl = 0.0
    c.cross_entropy = 0.1
    c.total_variation = 0.9
    c.confidence = 1.0
    c.gamma = 4.0
    c.anchors = 640
    c.eval_budgets = (2, 8, 64)  # a chain of 7 fills 8 nodes
    return c
