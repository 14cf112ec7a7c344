"""The whole path on a laptop: prompts, answers, features, training, evaluation, export, a real decode.

    python train.py --config configs/tiny_cpu.py --workdir DIR

Hardware: two CPU cores, 4 GB; the demo target (93 MB) is fetched on first use. A head of one layer sees two dozen short
answers for 60 steps: it shows that everything works, not what a head can do.

Run on two cores of an AMD EPYC that other work shared: 112 s of processor time, loss 16.0 to 6.2, acceptance length
1.24 (given out) at budget 8 in the real decode at the end.
"""

import pathlib

import ml_collections

PROMPTS = str(pathlib.Path(__file__).parent / "tiny_prompts.jsonl")


def get_config() -> ml_collections.ConfigDict:
    c = ml_collections.ConfigDict()
    c.data = PROMPTS
    c.max_prompt_tokens = 64
    c.max_new_tokens = 40
    c.answer_batch = 24
    c.sequence_length = 128
    c.heldout = 4
    c.features = "memory"
    c.feature_batch = 4
    c.head_layers = 1
    c.taps = 3
    c.block_size = 8
    c.mask_token_id = 16
    c.gamma = 7.0
    c.cross_entropy = 1.0
    c.forward_kl = 0.0
    c.steps = 60
    c.batch = 2
    c.anchors = 16
    c.loss_chunk = 256
    c.peak_lr = 2e-3
    c.log_every = 10
    c.eval_every = 30
    c.save_every = 30
    c.eval_sequences = 1
    c.eval_budgets = (4, 8, 16)
    c.eval_width = 8
    c.decode_prompts = PROMPTS
    c.decode_limit = 4
    c.decode_budget = 8
    return c
