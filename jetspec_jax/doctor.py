"""Do this target and this head belong together? And if drafts are refused, why?

    python -m jetspec_jax.doctor TARGET HEAD
    python -m jetspec_jax.doctor TARGET HEAD --prompts FILE --json

Compares the two configurations, jetspec.json and the tensors' shapes, lets the pair decode some prompts, and looks
whether the head would draft the target's answers better under another order of taps, another mask id, the other block
mask or the target's RoPE. A wrong pair never gives a wrong token, it only drafts in vain, so nothing else tells.

Exit status: 0 they belong together, 1 they do not (or files are wrong), 2 wrong options.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.doctor")

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from jetspec_jax import command, speculate
from jetspec_jax.config import ConfigError, HeadConfig, SamplingConfig, TreeConfig
from jetspec_jax.drafts import families
from jetspec_jax.evals import probe
from jetspec_jax.fields import Option
from jetspec_jax.files import checkpoint, load, pair
from jetspec_jax.files import prompts as prompt_files
from jetspec_jax.files import text as files_text

BUDGET = 16
POOR = 1.5  # tokens a round at that budget; heads that fit commit two and more even in open chat
TEXTS = (
    "Natalia sold 48 clips in April and half as many in May. How many clips did she sell altogether?",
    "Write a Python function that checks whether a number is prime.",
    "Explain in three sentences why the sky is blue.",
    "Compute the sum of the first ten positive integers. Show your steps.",
)


@dataclasses.dataclass
class Finding:
    """One thing that was looked at."""

    check: str
    status: str  # "ok", "note" (may cost acceptance) or "wrong"
    detail: str


def compare(target, config: Any, metadata: dict[str, Any]) -> list[Finding]:
    """Compares what the configurations and jetspec.json say about each other; computes nothing."""
    found: list[Finding] = []
    say = lambda check, status, detail: found.append(Finding(check, status, detail))
    apart = config.differing(target.config)
    for name, ours, theirs in apart:
        say("sizes", "wrong", f"{name} is {ours} in the head, {theirs} in the target: trained for another target")
    if not apart:
        say(
            "sizes", "ok", f"hidden {config.hidden_size}, {config.num_target_layers} layers, {config.vocab_size} tokens"
        )
    taps, usual = config.tap_layers, config.usual_taps
    why = "" if taps == tuple(sorted(taps)) else "; not in ascending order"
    why += "" if sorted(taps) == sorted(usual) else f"; the usual formula gives {list(usual)}"
    say("taps", "note" if why else "ok", f"outputs of layers {list(taps)}{why}")
    if isinstance(config, HeadConfig):
        say("mask id", *_mask(target, config))
        say("block", "ok", f"{'causal' if config.causal else 'bidirectional'}, {config.block_size} slots")
    ropes = [(c.rope_theta, c.rope_scaling) for c in (config, target.config)]
    same = ropes[0] == ropes[1]
    head, own = (f"theta {t:g}, {s.kind if s else 'unscaled'}" for t, s in ropes)
    say("rope", "ok" if same else "note", head if same else f"head: {head}; target: {own}")
    say("thinking", *_thinking(target, metadata))
    length = metadata.get("training_length")
    text = f"trained on rows of {length} tokens" if length else "jetspec.json does not tell"
    say("trained length", "ok", f"{text}; max positions {config.max_positions}, context {target.config.context_length}")
    stored = metadata.get("target_fingerprint")
    if stored is None:
        say("fingerprint", "ok", "jetspec.json tells none, as published heads do not")
    elif stored == target.fingerprint:
        say("fingerprint", "ok", stored)
    else:
        say("fingerprint", "note", f"trained for files with {stored}, these have {target.fingerprint}")
    for line in pair.oddities(config, metadata).values():
        say("jetspec.json", "note", line)
    return found


def _mask(target, config: HeadConfig) -> tuple[str, str]:
    mask, tokenizer = config.mask_token_id, target.tokenizer
    if mask in target.eos:
        return "note", f"{mask} is an end token of the target; a mask is an embedding row that no text uses"
    if tokenizer is not None and tokenizer.decode([mask]).strip("\ufffd"):
        return "note", f"{mask} is {tokenizer.decode([mask])!r}, which text uses; a mask is an embedding row of its own"
    return "ok", f"{mask}, of {config.vocab_size} rows"


def _thinking(target, metadata: dict[str, Any]) -> tuple[str, str]:
    said = metadata.get("thinking")
    trained = ("with" if said else "without") if isinstance(said, bool) else None
    if target.tokenizer is None or not target.tokenizer.knows_thinking:
        return ("note" if trained == "with" else "ok"), "the target's template has no switch for it"
    if trained is None:
        return "ok", "jetspec.json does not tell how the head was trained; decoding is without unless asked for"
    return "ok", f"trained {trained} thinking, and decoded so unless asked otherwise"


def measure(
    target, head, prompts: list[list[int]], new: int, text: bool = True
) -> tuple[list[Finding], dict[str, Any]]:
    """Decodes the prompts, and tries the other configurations on the answers; findings and figures.

    text: whether the prompts mean anything. Drafts of made-up ids may fail in a right pair.
    """
    results = speculate.generate(target, head, prompts, TreeConfig(BUDGET), SamplingConfig(new))
    assert isinstance(results, list)  # a list of prompts gives a list
    speculate.sound(results)
    rounds = sum(r.rounds for r in results)
    length = sum(sum(r.emitted) for r in results) / max(rounds, 1)
    figures = {"acceptance_length": length, "rounds": rounds, "budget": BUDGET}
    findings = []
    found = probe.texts(target, prompts, [r.token_ids for r in results], head.draft.depth)
    if found is not None and isinstance(head.config, HeadConfig):
        findings = _others(target, head, found, figures)
    if rounds < 8:
        findings.append(Finding("acceptance", "note", f"only {rounds} rounds: the answers are too short to tell"))
    elif length >= POOR:
        findings.append(Finding("acceptance", "ok", f"{length:.2f} tokens a round at budget {BUDGET}, {rounds} rounds"))
    elif not text:
        line = f"{length:.2f} tokens a round, but the prompts are made-up ids: give --prompts with text or its ids"
        findings.append(Finding("acceptance", "note", line))
    else:
        why = "" if findings else f"; {_unexplained(target, head)}"
        findings.append(Finding("acceptance", "wrong", f"{length:.2f} tokens a round at budget {BUDGET}{why}"))
    return findings, figures


def _others(target, head, found: probe.Texts, figures: dict[str, Any]) -> list[Finding]:
    """The one other configuration that clearly drafts better, if there is one."""
    own, later = probe.runs(target, head, found, head.config)
    figures["chain_run"] = float(own.mean())
    words = target.tokenizer.size if target.tokenizer else None
    best: tuple[float, probe.Variant] | None = None
    for variant in probe.variants(head.config, target.config, words):
        run = probe.runs(target, head, found, variant.config)[0]
        if _better(run, own) and (best is None or run.mean() > best[0]):
            best = float(run.mean()), variant
    if best is not None:
        length, variant = best
        other = list(variant.other) if isinstance(variant.other, tuple) else variant.other
        figures["better"] = {"key": variant.key, "given": variant.given, "other": other, "chain_run": length}
        line = f"{variant.given} is given, and with {other} chains run {length:.2f} tokens, not {own.mean():.2f}"
        return [Finding(variant.key, "wrong", f"likely cause: {line}")]
    if _better(later, own):
        line = (
            f"slot k predicts one position later (chains run {later.mean():.2f} tokens so, {own.mean():.2f} in place)"
        )
        return [
            Finding("draft shift", "wrong", f"likely cause: a shifted head: {line}; only in-place heads are supported")
        ]
    return []


def _better(run: np.ndarray, own: np.ndarray) -> bool:
    """By a tenth and more, and by three standard errors of the paired difference."""
    gain = run - own
    return bool(run.mean() > 1.1 * own.mean() and gain.mean() > 3 * gain.std() / np.sqrt(gain.size))


def _unexplained(target, head) -> str:
    stored = head.metadata.get("target_fingerprint")
    if stored not in (None, target.fingerprint):
        return "likely cause: trained for another target (the fingerprints differ)"
    if not isinstance(head.config, HeadConfig):
        return "likely cause: trained for another target of these sizes, or on other tapped layers"
    return (
        "no other taps, mask id, block mask or RoPE drafts better; likely cause: trained for another target of these "
        "sizes (base or instruct, another release), on other text, or not enough"
    )


def read(target, mode: bool | None, path: str | None) -> list[list[int]]:
    """Prompts of the probe: a file's first eight, our four, or some ids where there is no tokenizer."""
    if path is not None:
        return prompt_files.encode(target, pathlib.Path(path), mode)[:8]
    if target.tokenizer is not None:
        return [speculate.prompt_ids(target, line, thinking=mode) for line in TEXTS]
    vocab = target.config.vocab_size
    return [[1 + (i * 37 + j * 11) % (vocab - 1) for j in range(4)] for i in range(8)]


def examine(
    source: str, head_source: str, dtype: str | None, prompts: str | None, new: int, backend: str = "auto"
) -> dict[str, Any]:
    """Returns everything about a pair: `belong`, `findings`, `figures`.

    Raises:
      ConfigError: the target or a file cannot be read.
    """
    target = load.load_target(source, dtype, backend)
    path = load.find(head_source)
    where = path / "config.json"
    findings: list[Finding] = []
    figures: dict[str, Any] = {}
    try:
        warnings: list[str] = []
        raw = files_text.read_json(where)
        family = families.of_config(raw, str(where))
        assert family.config is not None  # it has files
        config = family.config(raw, str(where), warnings.append, target.config)
        meta = path / checkpoint.HEAD_META
        findings += compare(target, config, files_text.read_json(meta) if meta.is_file() else {})
        findings += [Finding("config", "note", line) for line in warnings]
        head = load.load_head(head_source, target)
    except ConfigError as error:
        if not any(f.status == "wrong" for f in findings):
            findings.append(Finding("head", "wrong", str(error)))
    else:
        mode = pair.thinking(target, head, None)
        text = prompts is not None or target.tokenizer is not None
        measured, figures = measure(target, head, read(target, mode, prompts), new, text)
        findings += measured
    return {
        "belong": not any(f.status == "wrong" for f in findings),
        "findings": [dataclasses.asdict(f) for f in findings],
        "figures": figures,
        "settings": {"target": source, "head": head_source, "dtype": target.dtype, "prompts": prompts},
    }


def text(report: dict[str, Any]) -> str:
    """Returns the report for people."""
    lines = [f"{f['status']:5}  {f['check']:15} {f['detail']}" for f in report["findings"]]
    verdict = "They belong together." if report["belong"] else "They do not belong together as they are."
    return "\n".join([*lines, verdict])


LINE = command.Line(
    __doc__,
    [
        command.DTYPE,
        command.BACKEND,
        Option("prompts", "text", "JSONL prompt file; the first 8 prompts are decoded.", metavar="FILE"),
        Option("max_new_tokens", "whole", "New tokens a prompt.", 96, low=1),
        command.JSON,
    ],
    [
        Option("target", "text", "A folder, a .gguf file or a hub id.", required=True),
        Option("head", "text", "A folder or a hub id.", required=True),
    ],
)


@command.tool("doctor", "a smaller --max_new_tokens")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    report = examine(args.target, args.head, args.dtype, args.prompts, args.max_new_tokens, args.backend)
    print(json.dumps(report, default=str) if args.json else text(report))
    return 0 if report["belong"] else 1
