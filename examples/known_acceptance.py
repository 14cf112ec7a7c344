"""Decodes with a drafter of known acceptance, to see what a round costs before there is a head that good.

    python examples/known_acceptance.py [--target DIR] [--acceptance 3.5]

The target runs whole and then chooses what a script says; the drafter knows the script, and is right for as many
positions as its acceptance asks. So the time is real and the text says nothing.
"""

import argparse
import dataclasses

from jetspec_jax import SamplingConfig, TreeConfig, load_drafter, load_target, speculate
from jetspec_jax.drafts import synthetic
from jetspec_jax.files import demo

parser = argparse.ArgumentParser()
parser.add_argument("--target", help="a folder, a .gguf file or a hub id; default: the demo's")
parser.add_argument("--acceptance", type=float, default=3.5, help="tokens a round, bonus included")
args = parser.parse_args()

target = load_target(args.target or demo.fetch_target())
model, params = synthetic.scripted(target.model, target.params, target.config.hidden_size)
target = dataclasses.replace(target, model=model, params=params)
config = synthetic.SyntheticConfig(args.acceptance, target.config.vocab_size, depth=7)
drafter = load_drafter("synthetic", target, config)

result = speculate.generate(target, drafter, [1, 2, 3], TreeConfig(budget=8), SamplingConfig(200, ignore_eos=True))
print(f"{result.acceptance_length:.2f} tokens a round, {result.tokens_per_second:.1f} a second")
