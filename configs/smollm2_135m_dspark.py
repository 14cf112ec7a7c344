"""A DSpark head for the demo target, on the data of the demo head and with its layers.

    python train.py --config configs/smollm2_135m_dspark.py --workdir DIR --config.prompt_sets=FOLDER

FOLDER and the environment as in `smollm2_135m.py`, whose pool, own prompts and answers these are: DIR may begin as a
copy of that run's `pool*`, `own*` and `answers*`. From DSpark's paper and code: a block of 7 whose anchor drafts too, a
vanilla Markov head, a loss of 0.1 cross entropy, 0.9 |p - q|_1 and the confidence's cross entropy, slot k (from 0)
weighing exp(-k / 4). Ours: a rank of 64 where theirs is 256, for a hidden size of 576, and the optimiser, as for the
demo head, with which it is to be compared: 22.1 M parameters where that has 15.8 M, the 6.3 M more being the Markov
head. Held-out figures are those of chains (docs/training.md), so compare heads by
`python -m jetspec_jax.evals.acceptance` alone.

Not run: no GPU was at hand. Hardware: one NVIDIA H200; features take as much as the demo's. What it computes was tried
on two CPU cores in float32: the 24 prompts of `tiny_prompts.jsonl`, 40 new tokens, 60 steps of 2 sequences x 24 blocks,
loss 3.31 at step 10 and 2.57 at step 60; real decoding at budget 8 of four prompts that it was trained on gave out 1.33
tokens a round.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.family = "dspark"
    c.max_minutes = 8.7
    c.own_prompts = 15_000
    c.answer_batch = 1024
    c.trim_loops = True
    c.heldout = 256
    c.features = "memory"
    c.feature_batch = 64
    c.head_layers = 4
    c.block_size = 7
    c.mask_token_id = 16  # as the demo head's
    c.markov_rank = 64
    c.markov_head = "vanilla"
    c.forward_kl = 0.0
    c.cross_entropy = 0.1
    c.total_variation = 0.9
    c.confidence = 1.0
    c.gamma = 4.0
    c.steps = 18_000
    c.batch = 32
    c.anchors = 64
    c.loss_chunk = 7_680
    c.peak_lr = 1e-3
    c.eval_budgets = (2, 8, 64)  # a chain of 7 fills 8 nodes
    c.remat = False
    c.log_every = 100
    c.eval_every = 2_000
    c.save_every = 2_000
    c.license = "apache-2.0"
    return c
