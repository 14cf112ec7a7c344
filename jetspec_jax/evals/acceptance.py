"""Acceptance length of a head on prompt files, by real speculative decoding.

    python -m jetspec_jax.evals.acceptance --prompts gsm8k.jsonl mbpp.jsonl --budget 64

Each file is JSONL as `decode.py --prompt_file` reads it (`jetspec_jax.evals.formats` writes the usual sets). The first
`--limit` prompts of at most `--max_prompt_tokens` tokens are decoded in batches; rounds are pooled over prompts, and
the interval is a 95 % bootstrap over prompts. Prints a table, then one JSON line, which also has each prompt's length
and how often a round reached each drafted position.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.evals.acceptance")

import dataclasses
import itertools
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from jetspec_jax import baseline, command, speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.evals import summary
from jetspec_jax.fields import ConfigError, Option
from jetspec_jax.files import inputs, pair
from jetspec_jax.files import prompts as prompt_files


def measure(target, head, prompts: Any, tree: TreeConfig, sampling: SamplingConfig, batch: int) -> dict:
    """Decodes all prompts (token ids, as `inputs.rows` reads them); returns what `pooled` says of them.

    Prompts are sorted by length, so that a batch pads little; the batch does not change a row's tokens.
    """
    prompts = inputs.rows(prompts)
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    found: dict[int, speculate.Result] = {}
    begin = time.perf_counter()
    for first in range(0, len(order), batch):
        rows = order[first : first + batch]
        outputs = speculate.generate(target, head, [prompts[i] for i in rows], tree, sampling)
        assert isinstance(outputs, list)  # a list of prompts gives a list
        for row, result in zip(rows, outputs, strict=True):
            found[row] = result
    seconds = time.perf_counter() - begin
    return pooled(speculate.sound([found[i] for i in range(len(prompts))])) | {"seconds": seconds}


def pooled(results: Sequence[speculate.Result]) -> dict:
    """Returns what the rounds of all results say together, and each result's own length.

    acceptance_length: tokens that a round gave out, its bonus token included, over all rounds of all prompts; ends and
        limits cut them. interval_95 is its own.
    verified_per_round: the same before that cut, as the rounds verified them.
    accepted_per_round: drafted tokens that a round verified, without the bonus.
    stopped: answers that ended by themselves. stopped_length: acceptance length of these alone (None without any); what
        the limit cut often is a loop, which is easy to draft.
    reached: share of rounds that accepted at least 1, 2, ... drafted tokens; conditional: of those rounds that accepted
        the one before (None where no round did).
    """
    rounds = np.array([r.rounds for r in results])
    emitted = np.array([sum(r.emitted) for r in results])
    drafted = np.array([n - 1 for r in results for n in r.accept_lengths])
    count = [int((drafted >= k).sum()) for k in range(max(drafted.max(initial=0), 1) + 1)]
    total = max(int(rounds.sum()), 1)
    stopped = np.array([r.finish_reason == "stop" for r in results])
    return {
        "prompts": len(results),
        "rounds": int(rounds.sum()),
        "new_tokens": sum(r.new_tokens for r in results),
        "acceptance_length": float(emitted.sum() / total),
        "interval_95": list(summary.interval_95(emitted.tolist(), rounds.tolist())),
        "verified_per_round": sum(sum(r.accept_lengths) for r in results) / total,
        "accepted_per_round": float(drafted.sum() / total),
        "reached": [n / total for n in count[1:]],
        "conditional": [n / before if before else None for before, n in itertools.pairwise(count)],
        "acceptance_lengths": [r.acceptance_length for r in results],  # of each prompt
        "stopped": int(stopped.sum()),
        "stopped_length": float(emitted[stopped].sum() / rounds[stopped].sum()) if rounds[stopped].sum() else None,
        "token_ids": [r.token_ids for r in results],
    }


def differing(target, prompts, outputs, sampling: SamplingConfig, batch: int) -> dict:
    """Counts outputs equal to plain decoding; for the others, the largest margin (in std of the logits) at which the
    first difference lies. Under 1e-4 in f32 that is rounding; in 16 bits rounding reaches further."""
    margins = []
    for first in range(0, len(prompts), batch):
        rows = range(first, min(first + batch, len(prompts)))
        for row, plain in zip(rows, baseline.generate(target, [prompts[i] for i in rows], sampling), strict=True):
            found = baseline.first_difference(target, prompts[row], plain.token_ids, outputs[row], sampling)
            if found:
                margins.append(found.margin / found.std)
    return {
        "equal": len(prompts) - len(margins),
        "different": len(margins),
        "largest_margin": max(margins, default=0.0),
    }


def read(target, path: str, limit: int, max_prompt_tokens: int, thinking: bool | None = None) -> list[list[int]]:
    """Returns token ids of the first `limit` prompts that are short enough.

    Raises:
      ConfigError: no prompt of the file is.
    """
    ids = short(prompt_files.encode(target, path, thinking), limit, max_prompt_tokens)
    if not ids:
        raise ConfigError(f"{path}: no prompt of the file is short enough (max_prompt_tokens={max_prompt_tokens})")
    return ids


def short(prompts: list[list[int]], limit: int, most: int) -> list[list[int]]:
    """Returns the first `limit` prompts of at most `most` tokens."""
    return [ids for ids in prompts if len(ids) <= most][:limit]


def _several(option: Option) -> Option:
    """The option with a list of values, of which every combination is measured."""
    return dataclasses.replace(option, many=True, default=() if option.default is None else (option.default,))


LINE = command.Line(
    __doc__,
    [
        command.PROMPTS,
        command.TARGET,
        command.HEAD,
        command.DTYPE,
        command.BACKEND,
        dataclasses.replace(
            _several(command.TREE["budget"]), default=(64,), help="Tree nodes, root included, or auto."
        ),
        *(
            option
            for name, option in command.TREE.items()
            if name in ("width", "depth", "builder", "window", "scorer", "rule", "prune")
        ),
        _several(command.TREE["sharpness"]),
        _several(command.SAMPLING["temperature"]),
        *command.sampling("temperature", "stop", "include_stop_text", "logprobs"),
        command.THINKING,
        command.LIMIT,
        command.MAX_PROMPT_TOKENS,
        command.BATCH,
        Option("compare", "flag", "Also decode plainly and count differing outputs.", False),
    ],
)


@command.tool("acceptance", "a smaller --batch")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    settings = command.settings(args)
    combinations = list(itertools.product(args.budget, args.temperature, args.sharpness))
    configs = []
    for args.budget, args.temperature, args.sharpness in combinations:  # all are checked before anything is loaded
        configs.append((command.tree_of(args), command.sampling_of(args)))
    target, head = command.pair_of(args)
    thinking = pair.thinking(target, head, args.thinking)
    table = []
    for path in args.prompts:
        prompts = read(target, path, args.limit, args.max_prompt_tokens, thinking)
        for tree, sampling in configs:
            row: dict[str, Any] = {
                "set": pathlib.Path(path).stem,
                "budget": tree.budget,
                "temperature": sampling.temperature,
            }
            row |= {"sharpness": tree.sharpness} | measure(target, head, prompts, tree, sampling, args.batch)
            outputs = row.pop("token_ids")
            if args.compare:
                row["plain"] = differing(target, prompts, outputs, sampling, args.batch)
            table.append(row)
            low, high = row["interval_95"]
            alone = "" if row["stopped_length"] is None else f" (these alone {row['stopped_length']:.2f})"
            print(
                f"{row['set']:14} budget {row['budget']:4} T {row['temperature']:g} sharpness {row['sharpness']:g}  "
                f"acceptance length {row['acceptance_length']:.2f} ({low:.2f}-{high:.2f})  accepted drafts "
                f"{row['accepted_per_round']:.2f}, verified {row['verified_per_round']:.2f} a round  "
                f"{row['prompts']} prompts, {row['rounds']} rounds  {row['stopped']} ended by themselves"
                f"{alone}  {row.get('plain', '')}",
                flush=True,
            )
    print(json.dumps({"settings": settings | {"dtype": str(target.dtype), "thinking": thinking}, "table": table}))
    return 0
