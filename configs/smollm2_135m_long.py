"""A JetSpec head for the demo target on rows of up to 4,096 tokens: the rows of the comparison in docs/results.md.

    python train.py --config configs/smollm2_135m_long.py --workdir DIR --config.prompt_sets=FOLDER

FOLDER is that of `smollm2_135m.py`, whose settings hold where this file has none. The rows: prompts of its pool, of
which every fifteenth is about a source file or documentation, prompts that the target writes, each with a greedy answer
and one sampled at temperature 1, and conversations in which the target writes both sides. Blocks look back at 512
tokens, in training as in decoding. The command stops itself after 8.7 minutes and is given again until it says "export"
without "unfinished". Set XLA_PYTHON_CLIENT_MEM_FRACTION=0.95. The other families' configurations begin with this one,
so that the comparison is of families and not of data.

Run in two commands of one NVIDIA H200, with the pool (a minute on a CPU) made before and the conversations written on
another H200 at the same time: 222 s for 3,813 prompts of the target's own and 7.0 M tokens of answers, 349 s for 496
conversations of 330,000 tokens (of 1,536; most end with a first answer that does not), then twice a start of 50 s with
the features, and 305 s of training, 52.8 ms a step. With all of a row as context instead of the window a step takes
78.5 ms, and 33.9 with rows of 512 tokens.

A smoke run: --config.max_prompts=64 --config.own_prompts=0 --config.dialogues=8 --config.steps=20
"""

import runpy
from pathlib import Path

import ml_collections


def get_config() -> ml_collections.ConfigDict:
    """Ours throughout: the paper has no target this small."""
    c = runpy.run_path(str(Path(__file__).with_name("smollm2_135m.py")))["get_config"]()
    c.documents = 2_000
    c.own_prompts = 4_000
    c.max_prompts = 13_000
    c.max_prompt_tokens = 3_584
    c.samples = 1
    c.temperature = 1.0
    c.dialogues = 1_536
    c.answer_batch = 512
    c.sequence_length = 4_096
    c.feature_batch = 8
    c.window = 512
    c.steps = 5_000
    c.batch = 4
    c.anchors = 512
    c.eval_every = 2_500
    c.save_every = 2_500
    return c
