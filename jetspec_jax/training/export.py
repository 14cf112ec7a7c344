"""The trained head as a folder that any engine of the method reads, with a model card."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import ml_collections
import numpy as np

from jetspec_jax import __version__, checkpoint
from jetspec_jax.training import step
from jetspec_jax.training.code_prompts import LICENCES
from jetspec_jax.training.step import Recipe, TrainState

SHARD_BYTES = 11_000_000  # small enough to travel as single files

CARD = """---
license: apache-2.0
library_name: jetspec_jax
tags: [speculative-decoding, draft-head, {family}]
---

# Draft head for {target}

A {layers}-layer {family} head of {parameters:,} parameters (bfloat16), trained by `jetspec_jax` {version} on answers of
its target. It drafts {depth} tokens a round and changes no output: the target verifies every token.

    python decode.py --target TARGET --head THIS_FOLDER --prompt "What is 2 + 2?"

## Training

| | |
| --- | --- |
| steps | {step:,} of {steps:,} |
| rows x anchors a step | {batch} x {anchors}, blocks of {block_size} |
| loss | {loss}, temperature {temperature}, depth weight gamma {gamma:g} |
| optimiser | AdamW (0.9, 0.95), peak learning rate {peak_lr:g}, {warmup:.0%} warm-up, cosine to {final_lr:.0%} |
| hardware | {hardware}, {dtype}, jax {jax} |
| command | `python train.py --config configs/NAME.py --workdir DIR` with the values in `training.json` |

{figures}

Run length is a proxy: tokens of a chain that teacher forcing would accept, plus one, over uniformly drawn anchors.
Held-out prompts come from the same sources as the training prompts.

## Data

{prompts:,} prompts, {answers:,} answers, {tokens:,} answer tokens, all written by the target itself (at most
{max_new} tokens an answer; {ended:.0%} ended by themselves{samples}). {used:,} answers with {used_tokens:,}
answer tokens were trained on{trimmed}.

{sources}

Mathematics: train splits of GSM8K and MATH (MIT). Code: MBPP outside its test split (CC BY 4.0), and signatures with
docstrings of installed packages. Chat: written for this package. No benchmark row is among them, nor any prompt that
shares 16 words in a row with one. {licences}

## Limits

The head fits this target in this quantisation, the chat template with its default system prompt, and rows of at most
{width} tokens. It drafts English mathematics and Python well and open-ended chat less well.
"""


def write(
    folder: Path,
    target,
    recipe: Recipe,
    state: TrainState,
    scale: jax.Array,
    config: ml_collections.ConfigDict,
    answers: dict,
) -> None:
    """Folds the scale and saves bf16 weights, config.json, jetspec.json, training.json and README.md.

    target: what `load_target` returns. answers: the counts that their stage left.
    """
    params = step.fold(state.params, scale, "bfloat16")
    family = "jetspec" if recipe.head.causal else "dflash"
    at = int(state.step)
    metadata = {
        "family": family,
        "target": Path(target.source).name,
        "target_fingerprint": target.fingerprint,
        "thinking": None,  # the template's default was used
        "training_length": recipe.width,
        "training_steps": at,
    }
    checkpoint.save_head(folder, recipe.head, params, metadata, SHARD_BYTES)
    (folder / "training.json").write_text(json.dumps({"config": config.to_dict(), "answers": answers}, indent=1) + "\n")
    packages = sorted(s.removeprefix("code_") for s in answers["sources"] if s.startswith("code_"))
    licences = ", ".join(f"{name} ({LICENCES.get(name, 'see its distribution')})" for name in packages)
    card = CARD.format(
        target=Path(target.source).name,
        family=family,
        layers=recipe.head.num_layers,
        parameters=sum(x.size for x in jax.tree.leaves(params)),
        version=__version__,
        depth=recipe.head.depth,
        step=at,
        steps=recipe.steps,
        batch=config.batch,
        anchors=recipe.anchors,
        block_size=recipe.head.block_size,
        loss=recipe.loss,
        temperature=recipe.temperature,
        gamma=recipe.gamma,
        peak_lr=recipe.peak_lr,
        warmup=recipe.warmup,
        final_lr=recipe.final_lr,
        hardware=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        dtype=recipe.dtype,
        jax=jax.__version__,
        figures=_figures(folder.parent / "train" / "metrics.jsonl"),
        prompts=answers["prompts"],
        answers=answers["answers"],
        tokens=answers["tokens"],
        max_new=config.max_new_tokens,
        ended=answers["ended"],
        used=answers["used"]["answers"],
        used_tokens=answers["used"]["tokens"],
        trimmed=", after loops at their ends had been cut" if config.trim_loops else "",
        samples=f"; {config.samples} a prompt sampled at temperature {config.temperature}" if config.samples else "",
        sources=_sources(answers),
        licences=f"Licences of the packages: {licences}." if licences else "",
        width=recipe.width,
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _figures(path: Path) -> str:
    """A table of about eight moments of the run, from its metrics."""
    records = [json.loads(line) for line in path.read_text().splitlines()]
    records = list({r["step"]: r for r in records}.values())
    shown = [records[i] for i in np.unique(np.linspace(0, len(records) - 1, 8).round().astype(int))] if records else []
    heldout = {r["step"]: r["heldout_run_length"] for r in records if "heldout_run_length" in r}
    lines = ["| step | loss | run length | slot-1 hit | held-out run length |", "| --- | --- | --- | --- | --- |"]
    for r in shown:
        at = [s for s in heldout if s <= r["step"]]
        last = f"{heldout[max(at)]:.2f} (step {max(at)})" if at else ""
        lines.append(f"| {r['step']} | {r['loss']:.3f} | {r['run_length']:.2f} | {r['first_hit']:.2f} | {last} |")
    return "\n".join(lines)


def _sources(answers: dict) -> str:
    """Prompts and answer tokens by source."""
    lines = ["| source | prompts | answer tokens |", "| --- | --- | --- |"]
    lines += [f"| {name} | {n['prompts']:,} | {n['tokens']:,} |" for name, n in answers["sources"].items()]
    return "\n".join(lines)
