"""A JetSpec head for the demo target on rows of up to 4,096 tokens. Not run yet: sizes and times below are reasoned.

    python train.py --config configs/smollm2_135m_long.py --workdir DIR --config.prompt_sets=FOLDER

FOLDER is that of `smollm2_135m.py`, whose settings these are but for the rows: fewer short ones, 1,500 prompts about
source files and documentation, and 1,500 conversations in which the target writes both sides. About 12 M tokens, whose
features (6.9 KB each) fit one NVIDIA H200. The command stops itself after 8.7 minutes and is given again until it says
"export" without "unfinished". Set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95.

A smoke run: --config.max_prompts=64 --config.own_prompts=0 --config.dialogues=8 --config.steps=20
"""

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """The short rows of the other configuration stay the larger part: people's prompts are short too."""
    c = ml_collections.ConfigDict()
    c.max_minutes = 8.7
    c.documents = 1_500
    c.own_prompts = 5_000
    c.max_prompts = 18_000
    c.max_prompt_tokens = 3_584
    c.dialogues = 1_500
    c.answer_batch = 512
    c.trim_loops = True
    c.sequence_length = 4_096
    c.heldout = 256
    c.features = "memory"
    c.feature_batch = 8
    c.head_layers = 4
    c.mask_token_id = 16  # <empty_output>: one of the untrained rows of this vocabulary
    c.steps = 18_000
    c.batch = 4
    c.anchors = 512
    c.gamma = 7.0
    c.loss_chunk = 7_680
    c.peak_lr = 1e-3
    c.remat = False
    c.log_every = 100
    c.eval_every = 2_000
    c.save_every = 2_000
    c.license = "apache-2.0"
    return c
