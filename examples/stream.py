"""Prints an answer while it is made; the pieces join to the text of `generate`, and none is half a character.

    python examples/stream.py [--target DIR --head DIR]

Each piece brings new text and new token ids; the last one brings the whole result too.
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

for piece in speculate.stream(target, head, "Write a short poem.", TreeConfig(budget=8), SamplingConfig(64)):
    print(piece.text, end="", flush=True)
    result = piece.result
print(f"\n{result.new_tokens} tokens, {result.tokens_per_second:.1f} a second")
