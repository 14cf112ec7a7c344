"""An EAGLE-3 head for the demo target, on the rows and steps of `smollm2_135m_long.py`.

    python train.py --config configs/smollm2_135m_eagle3.py --workdir DIR --config.prompt_sets=FOLDER

Commands and environment as there; DIR may begin as a copy of that run's `pool*`, `own*`, `answers*` and `dialogues`.
From EAGLE's code: seven steps of training-time test, each weighing 0.8 of the one before. Ours: forward KL, whose
gradient by the head is that of a cross entropy with the target's distribution; steps begin at 1,024 drawn places of a
sequence and not at every one, so that a step learns as many rows as the other families' do; the optimiser, as for the
others. The head looks back at everything, and has 15.7 M parameters where the JetSpec head has 15.8 M. Held-out figures
are those of chains (docs/training.md), so compare heads by `python -m jetspec_jax.evals.compare` alone.

Run in 255 s of training (two commands) on one NVIDIA H200 (bfloat16, jax 0.11.2), 40 ms a step.
"""

import runpy
from pathlib import Path

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    c = runpy.run_path(str(Path(__file__).with_name("smollm2_135m_long.py")))["get_config"]()
    for other in ("head_layers", "mask_token_id", "window", "gamma"):  # it has no such thing
        del c[other]
    c.family = "eagle3"
    c.draft_vocab = 18_432  # of 49,152
    c.unroll = 7
    c.unroll_decay = 0.8
    c.anchors = 1_024
    return c
