"""Decodes unequal prompts as one batch, each with options of its own; a row's output does not depend on its mates.

    python examples/batch.py [--target DIR --head DIR]

Options are those of docs/options.md. The first row is greedy, the second is sampled with a penalty, the third ends at
a stop string, and the fourth gets a smaller tree than the others.
"""

import argparse

from jetspec_jax import SamplingConfig, TreeConfig, load_head, load_target, speculate
from jetspec_jax.files import demo

parser = argparse.ArgumentParser()
parser.add_argument("--target", help="a folder, a .gguf file or a hub id; default: the demo's")
parser.add_argument("--head", help="a folder or a hub id; default: the demo's")
args = parser.parse_args()

target = load_target(args.target or demo.fetch_target())
head = load_head(args.head or demo.head_folder(), target)

rows = [
    ("What is 2 + 2?", SamplingConfig(max_new_tokens=32)),
    ("Tell me a story of a cat.", SamplingConfig(32, temperature=0.8, seed=7, top_p=0.95, repetition_penalty=1.1)),
    ("Name a river and a mountain.", SamplingConfig(32, stop=[".", ","], include_stop_text=True)),
    ("Count to ten.", SamplingConfig(24, budget=4)),
]
results = speculate.generate(
    target, head, [prompt for prompt, _ in rows], TreeConfig(budget=8), [sampling for _, sampling in rows]
)
for (prompt, _), result in zip(rows, results, strict=True):
    ended = f"{result.finish_reason}{'' if result.stopped_by is None else f' by {result.stopped_by!r}'}"
    print(f"{prompt} -> {result.text!r}")
    print(f"  {result.new_tokens} tokens, {result.acceptance_length:.2f} a round, {ended}")
