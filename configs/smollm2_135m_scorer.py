"""A scorer beside the demo head, which stays as it is: what a node's token makes of its children (`drafts/scorer.py`).

    python train.py --config configs/smollm2_135m_scorer.py --workdir DIR --config.prompt_sets=FOLDER

Commands and environment as in `smollm2_135m_stage2.py`, whose head the package has; the data too, but for the
conversations. The control of docs/branching.md is the same command with --config.scorer_parents=others.
"""

import runpy
from pathlib import Path

import ml_collections

from jetspec_jax.files import demo


def get_config() -> ml_collections.ConfigDict:
    c = runpy.run_path(str(Path(__file__).with_name("smollm2_135m_long.py")))["get_config"]()
    c.init_head = str(demo.head_folder())
    c.frozen_head = True
    c.dialogues = 0
    c.scorer_rank = 128
    c.scorer_width = 384
    c.steps = 3_000
    c.eval_every = 1_500
    c.save_every = 3_000
    return c
