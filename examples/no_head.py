"""Drafts without a head, by prompt lookup: what followed the last tokens where they stood before.

    python examples/no_head.py [--target DIR]

It needs no training and fits every target. It helps where an answer repeats its prompt or itself, and little elsewhere.
"""

import argparse

from jetspec_jax import SamplingConfig, TreeConfig, load_drafter, load_target, speculate
from jetspec_jax.files import demo

parser = argparse.ArgumentParser()
parser.add_argument("--target", help="a folder, a .gguf file or a hub id; default: the demo's")
args = parser.parse_args()

target = load_target(args.target or demo.fetch_target())
drafter = load_drafter("ngram", target)

prompts = ["Repeat this line five times: the cat sat on the mat.", "What is 2 + 2?"]
for result in speculate.generate(target, drafter, prompts, TreeConfig(budget=8), SamplingConfig(64)):
    print(f"{result.acceptance_length:.2f} tokens a round: {result.text!r}")
