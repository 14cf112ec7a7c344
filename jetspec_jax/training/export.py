"""The trained head as a folder that any engine of the method reads, with a model card."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jetspec_jax import __version__
from jetspec_jax.files import checkpoint
from jetspec_jax.training import journal
from jetspec_jax.training.data.code_prompts import LICENCES
from jetspec_jax.training.recipe import Recipe
from jetspec_jax.training.settings import Settings

SHARD_BYTES = 11_000_000  # small enough to travel as single files

CARD = """---
library_name: jetspec_jax
tags: [speculative-decoding, draft-head, {family}]
---

# Draft head for {target}{unfinished}

A {layers}-layer {family} head of {parameters:,} parameters (bfloat16), trained by `jetspec_jax` {version}. It drafts
{depth} tokens a round and changes no output: the target verifies every token.

    python decode.py --target TARGET --head THIS_FOLDER --prompt "What is 2 + 2?"

| | |
| --- | --- |
| target | {target}, fingerprint {fingerprint}: another file, dtype or quantisation is another target |
| tapped layers | {taps} (0-based, outputs) of {target_layers} |
| block | {block_size} slots, {mask}, mask token {mask_token} |
| thinking switch | {thinking} |
| longest row in training | {longest} tokens |

## Training

| | |
| --- | --- |
| steps | {step:,} of {steps:,} |
| sequences x anchors a step | {batch} x {anchors}, sequences of {length} tokens, documents packed and kept apart |
| loss | {loss}, temperature {temperature:g}, depth weight gamma {gamma:g} |
| optimiser | AdamW ({beta1:g}, {beta2:g}), weight decay {decay:g}, gradient norm clipped to {clip:g} |
| learning rate | peak {peak_lr:g}, {warmup:.0%} warm-up, cosine to {final_lr:.0%} |
| seed | {seed} |
| hardware | {hardware}, {dtype}, jax {jax} |
| command | `python train.py --config configs/NAME.py --workdir DIR` with the values in `training.json` |

{figures}

Run length is a proxy: tokens of a chain that teacher forcing would accept, plus one, over uniformly drawn anchors.
Held-out acceptance lengths come from real best-first trees on held-out prompts of the same sources, at the budgets
named, without a decode loop.

## Data

{data}

{sources}

## Limits

The head fits this target in this form, its chat template with the thinking switch above, and rows of at most {longest}
tokens. Elsewhere it is slower, never wrong.
"""


def write(
    folder: Path,
    target,
    recipe: Recipe,
    params: dict,
    saved: int,
    at: int,
    scale: jax.Array,
    config: Settings,
    counts: dict[str, Any],
) -> None:
    """Folds the scale and saves bf16 weights, config.json, jetspec.json, training.json and README.md.

    target: what `load_target` returns. params: f32, in the coordinates of scaled features, after `saved` updates. at:
    updates that the run has made so far. counts: of the data, as the pipeline gathers them.
    """
    finished = recipe.learns.fold(params, scale, "bfloat16")
    head, name = recipe.head, Path(target.source).name
    family = "jetspec" if head.causal else "dflash"
    metadata = {
        "family": family,
        "target": name,
        "target_fingerprint": target.fingerprint,
        "thinking": config.thinking_switch,
        "training_length": counts["longest"],
        "training_steps": saved,
    }
    checkpoint.save_head(folder, head, finished, metadata, SHARD_BYTES)
    values = {"config": dataclasses.asdict(config), "data": counts}
    (folder / "training.json").write_text(json.dumps(values, indent=1) + "\n")
    card = CARD.format(
        target=name,
        fingerprint=target.fingerprint,
        family=family,
        layers=head.num_layers,
        parameters=sum(x.size for x in jax.tree.leaves(finished)),
        version=__version__,
        depth=head.depth,
        taps=", ".join(map(str, head.tap_layers)),
        target_layers=head.num_target_layers,
        block_size=head.block_size,
        mask="causal" if head.causal else "bidirectional",
        mask_token=head.mask_token_id,
        thinking={None: "the template's default", True: "on", False: "off"}[config.thinking_switch],
        unfinished="" if at == recipe.steps else f"\n\n**Unfinished: the run is at step {at:,} of {recipe.steps:,}.**",
        longest=counts["longest"],
        length=config.sequence_length,
        step=saved,
        steps=recipe.steps,
        batch=config.batch,
        anchors=recipe.anchors,
        loss=recipe.mix,
        temperature=recipe.mix.temperature,
        gamma=recipe.gamma,
        beta1=recipe.beta1,
        beta2=recipe.beta2,
        decay=recipe.weight_decay,
        peak_lr=recipe.peak_lr,
        warmup=recipe.warmup,
        final_lr=recipe.final_lr,
        clip=recipe.clip,
        seed=recipe.seed,
        hardware=f"{jax.device_count()} x {jax.devices()[0].device_kind}",
        dtype=recipe.dtype,
        jax=jax.__version__,
        figures=_figures(folder.parent / "train"),
        data=_data(config, counts),
        sources=_sources(counts),
    )
    (folder / "README.md").write_text(card, encoding="utf-8")


def _figures(folder: Path) -> str:
    """A table of about eight moments of the run, from its metrics."""
    records = journal.read(folder)
    shown = [records[i] for i in np.unique(np.linspace(0, len(records) - 1, 8).round().astype(int))] if records else []
    judged = {r["step"]: r["heldout"]["acceptance"] for r in records if "heldout" in r}
    budgets = list(next(iter(judged.values()), ()))
    head = ["step", "loss", "run length", "slot-1 hit", *(f"held-out, budget {b}" for b in budgets)]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for r in shown:
        before = [s for s in judged if s <= r["step"]]
        cells = [f"{judged[max(before)][b]:.2f}" if before else "" for b in budgets]
        values = [str(r["step"]), f"{r['loss']:.3f}", f"{r['run_length']:.2f}", f"{r['first_hit']:.2f}", *cells]
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines)


def _data(config: Settings, counts: dict[str, Any]) -> str:
    """What was learnt from, in words."""
    kept = f"{counts['examples']:,} examples with {counts['tokens']:,} supervised tokens were trained on, "
    kept += f"{counts['heldout']:,} held out."
    if config.answers == "corpus":
        dropped = sum(counts["dropped"].values())
        return f"{counts['input']:,} rows with their own answers; {dropped:,} gave nothing to learn from. {kept}"
    sampled = f", and {counts['sampled']:,} sampled at temperature {config.temperature:g}" if counts["sampled"] else ""
    trimmed = " Loops at the ends of answers were cut." if config.trim_loops else ""
    return (
        f"{counts['input']:,} prompts, of which {counts['skipped']:,} were left out; {counts['answered']:,} greedy "
        f"answers{sampled}, all written by the target itself (at most {config.max_new_tokens} tokens; "
        f"{counts['truncated']:,} greedy ones were cut there). {kept}{trimmed}"
    )


def _sources(counts: dict[str, Any]) -> str:
    """Examples and supervised tokens by source, and the licences of packages whose signatures were asked about."""
    lines = ["| source | examples | supervised tokens |", "| --- | --- | --- |"]
    lines += [f"| {name} | {n['examples']:,} | {n['tokens']:,} |" for name, n in counts["sources"].items()]
    packages = sorted({s.removeprefix("code_") for s in counts["sources"] if s.startswith("code_")} & set(LICENCES))
    if packages:
        named = ", ".join(f"{name} ({LICENCES[name]})" for name in packages)
        lines += ["", f"Prompts from signatures and docstrings of installed packages: {named}."]
    return "\n".join(lines)
