"""Audits a pair: does it belong together, and is its output that of plain decoding?

    python examples/audit_pair.py [--target DIR --head DIR]

`jetspec-doctor TARGET HEAD` and `jetspec-audit --prompts FILE` say more; this is the same from Python. A head that
does not fit costs speed and never a token, so it takes both looks to trust a pair.
"""

import argparse

from jetspec_jax import SamplingConfig, TreeConfig, audit, doctor, load_head, load_target, speculate
from jetspec_jax.files import demo

parser = argparse.ArgumentParser()
parser.add_argument("--target", help="a folder, a .gguf file or a hub id; default: the demo's")
parser.add_argument("--head", help="a folder or a hub id; default: the demo's")
args = parser.parse_args()

target = load_target(args.target or demo.fetch_target())
head = load_head(args.head or demo.head_folder(), target)

for finding in doctor.compare(target, head.config, head.metadata):  # what the files say of each other
    print(f"{finding.status:6} {finding.check}: {finding.detail}")

prompts = [speculate.prompt_ids(target, text) for text in ("What is 2 + 2?", "Name a river and a mountain.")]
report = audit.audit(target, head, prompts, TreeConfig(budget=8), SamplingConfig(max_new_tokens=32))
print(audit.text(report))  # every difference with a verdict, and the counts
raise SystemExit(1 if report["defects"] else 0)
