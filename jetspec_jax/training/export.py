"""The trained head as a folder that any engine of the method reads, with a model card."""

from __future__ import annotations

import dataclasses
import json
import shlex
import sys
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from jetspec_jax import __version__
from jetspec_jax.files import checkpoint, scorer_file
from jetspec_jax.training import files, journal, plot
from jetspec_jax.training.data.code_prompts import LICENCES
from jetspec_jax.training.recipe import Recipe
from jetspec_jax.training.settings import Settings

SHARD_BYTES = 11_000_000  # small enough to travel as single files
SHOWN = 8  # moments of the run in its table
# Of the sources of the pool, by the beginning of their names.
DATA = {
    "gsm8k": "GSM8K, train split: MIT",
    "math": "MATH, train split: MIT",
    "mbpp": "MBPP, outside its test split: CC-BY-4.0",
    "chat": "templates of jetspec_jax: Apache-2.0",
    "code": "signatures and docstrings of installed packages, see below",
    "document": "source files and docstrings of installed packages, see below",
    "own": "written by the target itself",
    "talk": "conversations of the target with itself, which begin with prompts of the others",
}

CARD = """---
library_name: jetspec_jax
license: {license}
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
{special}
| thinking switch | {thinking} |
| longest row in training | {longest} tokens |

## Acceptance

{acceptance}

## Training

| | |
| --- | --- |
| steps | {step:,} of {steps:,} |
| sequences x anchors a step | {batch} x {anchors}, sequences of {length} tokens, documents packed and kept apart |
| loss | {loss}, temperature {temperature:g} |
| optimiser | AdamW ({beta1:g}, {beta2:g}), weight decay {decay:g}, gradient norm clipped to {clip:g} |
| learning rate | peak {peak_lr:g}, {warmup:.0%} warm-up, cosine to {final_lr:.0%} |
| seed | {seed} |
| hardware | {hardware}, {dtype}, jax {jax} |
| command | {command} |

{figures}

Run length is a proxy: tokens of a chain that teacher forcing would accept, plus one, over uniformly drawn anchors.
Held-out acceptance lengths come from {judged} on held-out prompts of the same sources, at the budgets
named, without a decode loop; each stands at the step whose parameters it was made with.

![curves](curves.svg)

## Data

{data}

{sources}

## Limits

The head fits this target in this form, its chat template with the thinking switch above, and rows of at most {longest}
tokens. Elsewhere it is slower, never wrong.
"""

CHAINS = "chains of the head's best tokens (its trees in decoding accept more)"


class Trained(NamedTuple):
    """What a run came to."""

    params: dict  # f32, in the coordinates of scaled features
    scale: jax.Array
    step: int  # updates that made the parameters
    at: int  # updates that the run has made so far


def write(
    folder: Path, target, recipe: Recipe, trained: Trained, config: Settings, counts: dict[str, Any],
    measured: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Folds the scale and saves bf16 weights, config.json, jetspec.json, training.json, curves.svg and README.md.

    Args:
      folder: of the head; the run's metrics lie in `train` beside it.
      target: what `load_target` returns.
      counts: of the data, as the pipeline gathers them.
      measured: of real decoding with these weights, as the pipeline keeps it; None where there was none.
    """
    finished = recipe.learns.fold(trained.params, trained.scale, "bfloat16")
    metadata = {
        "family": config.family_name,
        "target": Path(target.source).name,
        "target_fingerprint": target.fingerprint,
        "thinking": config.thinking_switch,
        "training_length": counts["longest"],
        # No distance between rows is longer in what was learnt.
        "context_window": min(recipe.window or counts["longest"], counts["longest"]),
        "training_steps": trained.step,
    }
    beside = finished.pop("scorer", None)
    checkpoint.save_head(folder, recipe.head, finished, metadata, SHARD_BYTES)
    if beside is not None:
        scorer_file.save(folder, beside)
    values = {"config": dataclasses.asdict(config), "data": counts}
    files.write(folder / "training.json", json.dumps(values, indent=1) + "\n")
    records = journal.read(folder.parent / "train")
    files.write(folder / "curves.svg", plot.curves(records))
    size = sum(x.size for x in jax.tree.leaves(finished))
    card = _card(target, recipe, trained, config, counts, records, measured, size)
    files.write(folder / "README.md", card)


def _card(  # noqa: PLR0913  # what a card tells
    target, recipe: Recipe, trained: Trained, config: Settings, counts: dict[str, Any], records: list[dict[str, Any]],
    measured: dict[str, Any] | None, parameters: int,
) -> str:  # fmt: skip
    """The text of the model card."""
    head = recipe.head
    steps = f"**Unfinished: the run is at step {trained.at:,} of {recipe.steps:,}.**"
    return CARD.format(
        license=config.license or "unknown",
        target=Path(target.source).name,
        fingerprint=target.fingerprint,
        family=config.family_name,
        layers=head.num_layers,
        parameters=parameters,
        version=__version__,
        depth=head.depth,
        taps=", ".join(map(str, head.tap_layers)),
        target_layers=target.config.num_layers,
        special="\n".join(f"| {name} | {text} |" for name, text in recipe.learns.describe(recipe).items()),
        thinking={None: "the template's default", True: "on", False: "off"}[config.thinking_switch],
        unfinished="" if trained.at == recipe.steps else f"\n\n{steps}",
        longest=counts["longest"],
        acceptance=_acceptance(measured),
        length=config.sequence_length,
        step=trained.step,
        steps=recipe.steps,
        batch=config.batch,
        anchors=recipe.anchors,
        loss=recipe.mix,
        temperature=recipe.mix.temperature,
        beta1=recipe.beta1,
        beta2=recipe.beta2,
        decay=recipe.weight_decay,
        peak_lr=recipe.peak_lr,
        warmup=recipe.warmup,
        final_lr=recipe.final_lr,
        clip=recipe.clip,
        seed=recipe.seed,
        hardware=hardware(),
        dtype=recipe.dtype,
        jax=jax.__version__,
        command=_command(),
        figures=_figures(records, trained.step),
        judged=CHAINS if recipe.learns.by_path(head) else "real best-first trees",
        data=_data(config, counts),
        sources=_sources(counts),
    )


def hardware() -> str:
    """Returns the devices of this process, for people."""
    return f"{jax.device_count()} x {jax.devices()[0].device_kind}"


def _command() -> str:
    name = Path(sys.argv[0]).name
    if name == "train.py" or name.startswith("jetspec-"):
        start = ["python", name] if name.endswith(".py") else [name]
        return f"`{shlex.join([*start, *sys.argv[1:]])}`, all values in `training.json`"
    return "called from Python, with the values in `training.json`"


def _acceptance(measured: dict[str, Any] | None) -> str:
    """Figures of real decoding with the weights of this folder."""
    if measured is None:
        return (
            "Not measured by real decoding. `python -m jetspec_jax.evals.acceptance --target TARGET --head THIS_FOLDER "
            "--prompts FILE` does it."
        )
    low, high = measured["interval_95"]
    return (
        f"Real speculative decoding of {measured['prompts']} prompts of `{measured['set']}`, greedy, budget "
        f"{measured['budget']}, at most {measured['max_new_tokens']} new tokens, {measured['hardware']}: acceptance "
        f"length {measured['acceptance_length']:.2f}, bonus token included (95 % bootstrap interval over prompts "
        f"{low:.2f}-{high:.2f}), {measured['rounds']:,} rounds. Made by the training command's `decode_prompts`."
    )


def _figures(records: list[dict[str, Any]], exported: int) -> str:
    """A table of some moments of the run, the exported one among them; evaluations stand at their own steps."""
    judged = [r for r in records if "heldout" in r]
    among = judged or records
    chosen = {int(i) for i in np.linspace(0, len(among) - 1, SHOWN).round()} if among else set()
    shown = [r for i, r in enumerate(among) if i in chosen or r["step"] == exported]
    budgets = list(judged[0]["heldout"]["acceptance"]) if judged else []
    head = ["step", "loss", "run length", "slot-1 hit", *(f"held-out, budget {b}" for b in budgets)]
    lines = ["| " + " | ".join(head) + " |", "| --- " * len(head) + "|"]
    for r in shown:
        name = f"**{r['step']:,} (this head)**" if r["step"] == exported else f"{r['step']:,}"
        made = [f"{r[key]:.{digits}f}" if key in r else "" for key, digits in FIGURES]
        tau = r.get("heldout", {}).get("acceptance", {})
        values = [name, *made, *(f"{tau[b]:.2f}" if b in tau else "" for b in budgets)]
        lines.append("| " + " | ".join(values) + " |")
    if not any(r["step"] == exported for r in judged):
        lines += ["", f"Step {exported:,}, the one of this head, was not evaluated on held-out prompts."]
    return "\n".join(lines)


FIGURES = ("loss", 3), ("run_length", 2), ("first_hit", 2)


def _data(config: Settings, counts: dict[str, Any]) -> str:
    """What was learnt from, in words."""
    kept = f"{counts['examples']:,} examples with {counts['tokens']:,} supervised tokens were trained on, "
    kept += f"{counts['heldout']:,} held out."
    if config.answers == "corpus":
        dropped = sum(counts["dropped"].values())
        return f"{counts['input']:,} rows with their own answers; {dropped:,} gave nothing to learn from. {kept}"
    sampled = f", and {counts['sampled']:,} sampled at temperature {config.temperature:g}" if counts["sampled"] else ""
    trimmed = " Loops at the ends of answers were cut." if config.trim_loops else ""
    trimmed += " Answers that the limit cut were left out." if config.drop_truncated else ""
    return (
        f"{counts['input']:,} prompts, of which {counts['skipped']:,} were left out; {counts['answered']:,} greedy "
        f"answers{sampled}, all written by the target itself (at most {config.max_new_tokens} tokens; "
        f"{counts['truncated']:,} greedy ones were cut there). {kept}{trimmed}"
    )


def _sources(counts: dict[str, Any]) -> str:
    """Examples and supervised tokens by source, with the licences of what was asked."""
    lines = ["| source | examples | supervised tokens | origin of the prompts |", "| --- | --- | --- | --- |"]
    for name, n in counts["sources"].items():
        origin = DATA.get(name.partition("_")[0], "rows of the run's `data`")
        lines.append(f"| {name} | {n['examples']:,} | {n['tokens']:,} | {origin} |")
    read = {s.partition("_")[2] for s in counts["sources"] if s.startswith(("code_", "document_"))}
    packages = sorted(read & set(LICENCES))
    if packages:
        named = ", ".join(f"{name} ({LICENCES[name]})" for name in packages)
        lines += ["", f"Prompts from source and docstrings of installed packages: {named}."]
    return "\n".join(lines)
