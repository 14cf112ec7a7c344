"""Decodes a prompt from Python, through the draft head and plainly: the same tokens, in fewer runs of the target.

    python examples/decode.py
    python examples/decode.py --target Qwen/Qwen3-8B --head JetSpec/jetspec-qwen3-8b --prompt "Name three rivers."

Without --target and --head it takes the demo pair; its target (93 MB) is fetched on first use.
"""

import argparse

from jetspec_jax import SamplingConfig, TreeConfig, baseline, load_head, load_target, speculate
from jetspec_jax.files import demo

parser = argparse.ArgumentParser()
parser.add_argument("--target", help="a folder, a .gguf file or a hub id")
parser.add_argument("--head", help="a folder or a hub id")
parser.add_argument("--prompt", default="Write a Python function is_prime(n).")
args = parser.parse_args()

target = load_target(args.target or demo.fetch_target())
head = load_head(args.head or demo.head_folder(), target)
sampling = SamplingConfig(max_new_tokens=64)

result = speculate.generate(target, head, args.prompt, TreeConfig(budget=8), sampling)
plain = baseline.generate(target, args.prompt, sampling)

print(result.text)
print(f"{result.new_tokens} tokens in {result.rounds} rounds: {result.acceptance_length:.2f} tokens a round")
print(f"verified a round: {result.accept_lengths}; given out: {result.emitted}")
print(f"plain decoding: {'the same tokens' if plain.token_ids == result.token_ids else 'other tokens'}")
