"""The demo head: JetSpec for SmolLM2-135M-Instruct (4-bit GGUF, dequantised), trained on its own answers.

    python train.py --config configs/demo.py --workdir DIR --config.data=FOLDER

FOLDER holds gsm8k/, math_train/, mbpp/ and the benchmarks as jsonl. Hardware: one NVIDIA H200 (any GPU with 90 GB for
the cached features; fewer prompts need less). Set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.

Run on one H200 (jax 0.11.2): 28,391 prompts of which 27,711 were short enough, 5.40 M answer tokens in 83 s, 12,000
steps of 47.4 ms, 13 minutes of device time in all. The command was stopped after 8.7 minutes (--config.max_minutes) and
given again. The pool was built from the packages installed on another machine; the model card in
`jetspec_jax/assets/demo_head` lists its sources and the acceptance lengths: 5.99 on GSM8K at budget 64.

A 1-minute smoke run: --config.max_prompts=2048 --config.steps=200 --config.log_every=20
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Every key can be overridden: --config.KEY=VALUE."""
    c = ml_collections.ConfigDict()
    c.seed = 0
    c.max_minutes = 0.0  # of this command; saves and stops then, the same command goes on; 0 is no limit
    c.until = "export"  # last stage to run: pool, answers, export

    c.target = ""  # folder, GGUF file or hub id; "" is the demo's target
    c.dtype = ""  # "" is the target's default: float32 on a CPU, bfloat16 on a GPU

    c.data = ""  # folder of prompt sets, to build the pool from
    c.pool = ""  # a finished pool file instead
    c.max_prompts = 0  # the first ones of the pool; 0 is all
    c.code_prompts = 11_000
    c.code_per_package = 600
    c.chat_prompts = 2_500

    c.max_prompt_tokens = 256  # longer prompts are left out
    c.max_new_tokens = 256
    c.samples = 0  # sampled answers a prompt, beside the greedy one
    c.temperature = 0.8  # of those
    c.answer_batch = 1024
    c.save_batches = 8  # batches in one file of answers
    c.trim_loops = True  # cut answers that end by repeating themselves
    c.heldout_prompts = 256  # never trained on; run length is measured on their answers
    c.feature_batch = 64

    c.head_layers = 4  # the other sizes are the target's
    c.taps = 5
    c.block_size = 16
    c.mask_token_id = 16  # <empty_output>: one of the untrained rows of this vocabulary
    c.causal = True

    c.steps = 12_000
    c.batch = 32  # rows
    c.anchors = 64  # a row
    c.gamma = 7.0  # depth weight exp(-(k - 1) / gamma); 0 is uniform
    c.loss = "forward_kl"  # or cross_entropy
    c.loss_temperature = 1.0
    c.loss_chunk = 7_680  # rows whose f32 logits exist at a time
    c.peak_lr = 1e-3
    c.warmup = 0.04  # share of the steps
    c.final_lr = 0.1  # share of the peak, at the end of the cosine
    c.weight_decay = 0.0
    c.clip = 1.0
    c.log_every = 50
    c.eval_every = 500
    c.save_every = 2_000
    return c
