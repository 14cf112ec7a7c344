"""An EAGLE-3 head for the demo target, on the data of the demo head and of its size (15.7 M, 15.8 M).

    python train.py --config configs/smollm2_135m_eagle3.py --workdir DIR --config.prompt_sets=FOLDER

FOLDER and the environment as in `smollm2_135m.py`, whose pool, own prompts and answers these are: DIR may begin as a
copy of that run's `pool*`, `own*` and `answers*`. From EAGLE's code: seven steps of training-time test, each weighing
0.8 of the one before. Ours: forward KL, whose gradient by the head is that of a cross entropy with the target's
distribution; steps begin at 128 drawn places of a sequence and not at every one; the optimiser, as for the demo head,
with which it is to be compared. Held-out figures are those of chains (docs/training.md), so compare heads by
`python -m jetspec_jax.evals.acceptance` alone.

Not run: no GPU was at hand. Hardware: one NVIDIA H200; features take 54 GiB where the demo's take 81. What it computes
was tried on two CPU cores: the 24 prompts of `tiny_prompts.jsonl`, 40 new tokens, 60 steps of 2 sequences x 24 places,
loss 8.1 at step 10 and 2.6 at step 60; real decoding at budget 8 of four prompts that it was trained on gave out 1.70
tokens a round.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.family = "eagle3"
    c.max_minutes = 8.7
    c.own_prompts = 15_000
    c.answer_batch = 1024
    c.trim_loops = True
    c.heldout = 256
    c.features = "memory"
    c.feature_batch = 64
    c.draft_vocab = 18_432  # of 49,152
    c.unroll = 7
    c.unroll_decay = 0.8
    c.steps = 18_000
    c.batch = 32
    c.anchors = 128
    c.loss_chunk = 7_680
    c.peak_lr = 1e-3
    c.remat = False
    c.log_every = 100
    c.eval_every = 2_000
    c.save_every = 2_000
    c.license = "apache-2.0"
    return c
