"""A JetSpec head for Qwen3-30B-A3B (mixture of experts), by the paper where it says how.

    python train.py --config configs/qwen3_30b_a3b.py --workdir DIR --config.target=PATH --config.data=prompts.jsonl

From the paper and its published head: 8 layers over 5 taps, block 16, causal, cross entropy on the target's answers
(SFT, 800,000 prompts), learning rate 3e-4. Ours, since the paper is silent: everything that `qwen3_8b.py` calls ours,
and the target split over two devices.

Not run: no weights of this target were at hand. Hardware: 8 GPUs of 80 GB or more. Expected at budget 256, from the
paper: acceptance length 8.18 on GSM8K, 10.65 on MATH-500, 5.59 on MT-Bench.
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.dtype = "bfloat16"
    c.thinking = "off"
    c.max_prompt_tokens = 1_024
    c.max_new_tokens = 2_048
    c.answer_batch = 64
    c.sequence_length = 3_072
    c.heldout = 256
    c.features = "online"
    c.feature_batch = 2
    c.head_layers = 8
    c.tap_layers = (1, 12, 23, 34, 45)
    c.mask_token_id = 151_669
    c.forward_kl = 0.0
    c.cross_entropy = 1.0
    c.epochs = 6.0
    c.batch = 16
    c.anchors = 256
    c.loss_chunk = 2_048
    c.peak_lr = 3e-4
    c.model_parallel = 2
    c.eval_every = 2_000
    c.save_every = 1_000
    return c
