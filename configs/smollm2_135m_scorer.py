"""A scorer beside the demo head, which stays as it is: what a node's token makes of its children (`drafts/scorer.py`).

    python train.py --config configs/smollm2_135m_scorer.py --workdir DIR --config.prompt_sets=FOLDER

Commands, environment and data as in `smollm2_135m_stage2.py`, whose head the package has. The control of
docs/branching.md is the same command with --config.scorer_parents=others. Run beside it on one NVIDIA H200, in 219 s,
with XLA_PYTHON_CLIENT_MEM_FRACTION=0.45 each, so that 60 % of the rows had room for their features.
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
