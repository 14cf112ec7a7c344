"""A JetSpec head for Qwen3-8B, by the paper where it says how.

    python train.py --config configs/qwen3_8b.py --workdir DIR --config.target=PATH --config.data=prompts.jsonl

From the paper: 5 layers, block 16, causal, forward KL at T = 1, uniform depth weights, learning rate 3e-4, two
sequences a device on 8 devices, answers written by the target with thinking off, 800,000 prompts (NVIDIA's
Nemotron-Post-Training-Dataset-v2 and CodeAlpaca). Six epochs are read off the name of a published checkpoint. Ours,
since the paper is silent (most of it as NVIDIA's recipe has it): AdamW (0.9, 0.95), clip 1, 4 % warm-up and cosine to
10 %, 256 anchors, sequences of 3,072 tokens, at most 2,048 new tokens.

Not run: no weights of this target were at hand. Hardware: 8 GPUs of 80 GB or more; on one, add --config.accumulate=8.
At random weights `bench/train_step.py` measures the step. Expected at budget 128, from the paper: acceptance length
8.05 on GSM8K, 9.95 on MATH-500, 5.52 on MT-Bench.
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
    c.head_layers = 5
    c.tap_layers = (1, 9, 17, 25, 33)
    c.mask_token_id = 151_669
    c.epochs = 6.0
    c.batch = 16
    c.anchors = 256
    c.loss_chunk = 2_048
    c.peak_lr = 3e-4
    c.eval_every = 2_000
    c.save_every = 1_000
    return c
