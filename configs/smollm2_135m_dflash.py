"""A DFlash head for the demo target, on the rows, steps and layers of `smollm2_135m_long.py`.

    python train.py --config configs/smollm2_135m_dflash.py --workdir DIR --config.prompt_sets=FOLDER

Commands and environment as there; DIR may begin as a copy of that run's `pool*`, `own*`, `answers*` and `dialogues`.
From DFlash's recipe: every slot of a block sees the whole block, and the loss is the cross entropy of the text, slot k
weighing exp(-(k - 1) / 7). Its chain and DDTree's trees are drafted by this one head.

Run in 250 s of training and a start of 40 s on one NVIDIA H200 (bfloat16, jax 0.11.2), 46 ms a step.
"""

import runpy
from pathlib import Path

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = runpy.run_path(str(Path(__file__).with_name("smollm2_135m_long.py")))["get_config"]()
    c.causal = False
    c.forward_kl = 0.0
    c.cross_entropy = 1.0
    return c
