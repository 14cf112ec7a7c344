"""The demo head, second stage: the head of `smollm2_135m.py` goes on with the long rows of `smollm2_135m_long.py`.

    python train.py --config configs/smollm2_135m_stage2.py --workdir DIR --config.prompt_sets=FOLDER \
        --config.init_head=FIRST/head

Commands, environment and data as in `smollm2_135m_long.py`; DIR may begin as a copy of that run's `pool*`, `own*`,
`answers*` and `dialogues`. The first stage knows short rows well and nothing beyond 512 tokens, and looks back at 512
from here on. Run in 633 s of one NVIDIA H200 with other programs on it (52.8 ms a step alone), after 50 s with the
features; step 7,500 was the best of the evaluations and is the head in the package.
"""

import runpy
from pathlib import Path

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = runpy.run_path(str(Path(__file__).with_name("smollm2_135m_long.py")))["get_config"]()
    c.steps = 10_000
    c.peak_lr = 5e-4  # half of the first stage's: what it learnt is to stay
    return c
