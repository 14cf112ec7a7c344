"""A scorer beside the demo head, which stays as it is: what a node's token makes of its children (`drafts/scorer.py`).

    python train.py --config configs/smollm2_135m_scorer.py --workdir DIR --config.prompt_sets=FOLDER

The scorer that the package has beside its head, of the pool of `smollm2_135m_long.py` and short rows. The control of
docs/branching.md is the same command with --config.scorer_parents=others. Run on one NVIDIA H200 with
XLA_PYTHON_CLIENT_MEM_FRACTION=0.26 and another training on it: 130 s of answers (2.2 M tokens), then 45 s to the first
step and 115 s of training, which by itself takes 16.7 ms a step; with --config.scorer_parents=drafted 305 s.
"""

import runpy
from pathlib import Path

import ml_collections

from jetspec_jax.files import demo


def get_config() -> ml_collections.ConfigDict:
    c = runpy.run_path(str(Path(__file__).with_name("smollm2_135m_long.py")))["get_config"]()
    c.init_head = str(demo.head_folder())
    c.frozen_head = True
    c.scorer_rank = 128
    c.scorer_width = 384
    c.own_prompts = 0
    c.max_prompts = 5_500
    c.max_prompt_tokens = 640
    c.dialogues = 0
    c.sequence_length = 1_024
    c.feature_batch = 32
    c.batch = 16
    c.anchors = 64
    c.eval_sequences = 0
    c.steps = 2_500
    return c
