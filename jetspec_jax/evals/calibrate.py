"""How far a head's trust in its drafts is right, and temperatures that make it so.

    python -m jetspec_jax.evals.calibrate --target T --head H --prompts FILE

Decodes the first `--limit` prompts greedily with chains, and sets what the head said beside what happened: at each
position of a chain the probability of the drafted token (a JetSpec or DFlash head; where a scorer lies beside it, after
the token before) or the confidence (a DSpark head), and whether it was accepted with all before it. One temperature a
position is then fitted on every other prompt by sequential temperature scaling (arXiv 2607.05147): from left to right,
the one of a grid under which the running product is best calibrated. The other prompts say what that is worth: the
expected calibration error before and after, a mean over positions.

Writes them into the head's jetspec.json as `calibration`, unless `--nowrite`. A block head then divides the logits of
each depth by them before it ranks its candidates; a DSpark head its confidence. They decide what a round guesses, and
never what the output is. Prints one JSON object.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.evals.calibrate")

import dataclasses
import json
import os
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax import command, speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.drafts.block import BlockDraft
from jetspec_jax.drafts.dspark import DSparkDraft
from jetspec_jax.evals import acceptance
from jetspec_jax.fields import Option
from jetspec_jax.files import checkpoint, load, output, pair, text
from jetspec_jax.layers.numerics import narrow
from jetspec_jax.loop import tree as trees
from jetspec_jax.loop.decoder import Decoder, step_recorded
from jetspec_jax.loop.state import State

GRID = np.geomspace(0.25, 4.0, 41)  # steps of 7 %; 1 is in the middle
NEUTRAL = len(GRID) // 2
BINS = 15
# Rounds of each half. A made-up head with an error of 0.03 had 0.04 after a fit on 100 rounds, 0.03 after 300 and 0.02
# after 500: with fewer a calibration is as bad as none or worse, and its own figures cannot tell.
LEAST = 500


class Rounds(NamedTuple):
    """What a head said in N rounds, and what happened."""

    trust: np.ndarray  # [N, D, G] probability of each drafted token, if all before it are right, at each of GRID
    accepted: np.ndarray  # [N] drafted tokens that were

    def survived(self) -> np.ndarray:
        """Returns [N, D], whether a round accepted each token and all before it."""
        return np.arange(self.trust.shape[1]) < self.accepted[:, None]

    def select(self, rows: np.ndarray) -> Rounds:
        """Returns some of the rounds."""
        return Rounds(self.trust[rows], self.accepted[rows])


def error(said: np.ndarray, happened: np.ndarray) -> float:
    """Returns the expected calibration error: over bins of what was said, how far its mean is from the share that
    happened, weighted by how often it was said."""
    bins = np.minimum((said * BINS).astype(int), BINS - 1)
    gap = np.bincount(bins, said, BINS) - np.bincount(bins, happened, BINS)
    return float(np.abs(gap).sum() / len(said))


def errors(rounds: Rounds, chosen: Sequence[int]) -> list[float]:
    """Returns the error of the running product at each depth, under the chosen places of GRID."""
    said = np.cumprod(rounds.trust[:, np.arange(len(chosen)), list(chosen)], axis=1)
    return [error(said[:, d], happened) for d, happened in enumerate(rounds.survived().T)]


def fit(rounds: Rounds) -> list[int]:
    """Returns the place in GRID of each depth's temperature: sequential temperature scaling.

    Of equally good ones the nearest to 1 is taken: at depths that no chain reaches, nothing is known.
    """
    above, chosen = np.ones(len(rounds.accepted)), []
    nearest = sorted(range(len(GRID)), key=lambda g: abs(g - NEUTRAL))
    for d, happened in enumerate(rounds.survived().T):
        best = min(nearest, key=lambda g: error(above * rounds.trust[:, d, g], happened))
        above = above * rounds.trust[:, d, best]
        chosen.append(best)
    return chosen


@narrow
def scored(decoder: Decoder, params: dict, state: State) -> tuple[State, tuple[jax.Array, jax.Array, jax.Array]]:
    """Runs one round with chains; also its trust [B, D, G], its accepted tokens [B] and which rows it was for [B]."""
    draft, grid = decoder.draft, jnp.asarray(GRID, jnp.float32)
    after, done = step_recorded(decoder, params, state)
    tokens = done.tree.tokens[:, : draft.depth + 1]
    if isinstance(draft, DSparkDraft):
        ends = decoder.ends(params)
        hidden, _ = draft.hidden(params["draft"], state.draft, tokens[:, 0], state.length, ends)
        trust = jax.nn.sigmoid(draft.confidence(params["draft"], hidden, tokens[:, :-1])[..., None] / grid)
    else:
        each = lambda t: trees.foretold(done.tree, t)[:, 1 : draft.depth + 1]
        trust = jnp.exp(jnp.moveaxis(jax.lax.map(each, grid), 0, -1))
    return after, (trust, done.accepted.count - 1, ~state.done)


def measure(target, head, prompts: Sequence[Sequence[int]], new: int, batch: int) -> list[Rounds]:
    """Decodes prompts (token ids) greedily with uncalibrated chains; returns the rounds of each.

    Raises:
      ConfigError: the head's family has no probability of a position that a temperature could correct.
    """
    if not isinstance(head.draft, BlockDraft):
        raise ConfigError(f"head: the family of {head.source} is {head.family}; give a jetspec, dflash or dspark head")
    if isinstance(head.draft, DSparkDraft) and not head.config.confidence:
        raise ConfigError(f"head: {head.source} has no confidence head, so there is nothing to calibrate")
    head = dataclasses.replace(head, draft=head.draft.calibrated(()))
    chain = TreeConfig(head.draft.depth + 1, width=1, builder="accum_logp")
    found: list[Rounds] = []
    for first in range(0, len(prompts), batch):
        rows = prompts[first : first + batch]
        engine = speculate.start(target, head, list(rows), chain, SamplingConfig(new))
        values = []
        while not engine.over():
            values.append(jax.device_get(engine.run(scored)))
        if not values:  # every answer ended with its first token
            continue
        trust, accepted, ran = (np.stack(x, 1) for x in zip(*values, strict=True))
        found += [Rounds(trust[i][ran[i]], accepted[i][ran[i]]) for i in range(len(rows))]
    return found


def calibrate(rounds: Sequence[Rounds], fitted_on: str) -> dict[str, Any]:
    """Fits on the rounds of every other prompt, and says what the rest makes of it: a head's `calibration`.

    Raises:
      ConfigError: one of the halves has too few rounds. Whoever loads the head uses what is written and would see no
        warning, so it is refused.
    """
    counts = [sum(len(one.accepted) for one in half) for half in (rounds[::2], rounds[1::2])]
    if min(counts) < LEAST:
        raise ConfigError(
            f"prompts: too few rounds, {counts[0]} to fit on and {counts[1]} to judge by; at least {LEAST} of each are "
            "needed: give more prompts, or raise --limit or --max_new_tokens"
        )
    halves = [Rounds(*(np.concatenate(x) for x in zip(*half, strict=True))) for half in (rounds[::2], rounds[1::2])]
    chosen = fit(halves[0])
    before, after = (errors(halves[1], places) for places in ([NEUTRAL] * len(chosen), chosen))
    return {
        "version": 1,
        "temperature": [round(float(GRID[g]), 6) for g in chosen],
        "fitted_on": fitted_on,
        "ece_before": float(np.mean(before)),
        "ece_after": float(np.mean(after)),
    }


def write(folder: pathlib.Path, calibration: dict[str, Any]) -> None:
    """Puts a calibration into a head's jetspec.json; whatever else is in it stays, and a crash leaves the old file."""
    path = folder / checkpoint.HEAD_META
    meta = dict(text.read_json(path)) if path.is_file() else {}
    content = json.dumps(meta | {"calibration": calibration}, indent=2, sort_keys=True) + "\n"
    with output.whole(path) as unfinished:
        unfinished.write_text(content, encoding="utf-8")
        os.chmod(unfinished, (path if path.is_file() else folder / "config.json").stat().st_mode & 0o777)


LINE = command.Line(
    __doc__,
    [
        command.PROMPTS,
        dataclasses.replace(command.TARGET, required=True, help="A folder, a .gguf file or a hub id."),
        dataclasses.replace(command.HEAD, required=True, help="A folder; its jetspec.json is written."),
        command.DTYPE,
        command.BACKEND,
        command.THINKING,
        command.LIMIT,
        command.MAX_PROMPT_TOKENS,
        command.BATCH,
        dataclasses.replace(command.SAMPLING["max_new_tokens"], low=2),
        Option("write", "flag", "Write what was found into the head's jetspec.json.", True),
    ],
)


@command.tool("calibrate", "a smaller --batch")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    folder = pathlib.Path(args.head).expanduser()
    if args.write and not folder.is_dir():
        raise ConfigError(f"head={args.head}: no such folder, and only a folder can be written; or use --nowrite")
    target = load.load_target(args.target, args.dtype, args.backend)
    head = load.load_head(args.head, target)
    thinking = pair.thinking(target, head, args.thinking)
    prompts = [
        ids
        for path in args.prompts
        for ids in acceptance.read(target, path, args.limit, args.max_prompt_tokens, thinking)
    ]
    rounds = measure(target, head, prompts, args.max_new_tokens, args.batch)
    names = ", ".join(pathlib.Path(path).name for path in args.prompts)
    count = sum(len(one.accepted) for one in rounds)
    scorer = ", with its scorer" if getattr(head.config, "scorer_rank", 0) else ""
    found = calibrate(rounds, f"{names}: {len(prompts)} prompts, {count} rounds, greedy, {target.dtype}{scorer}")
    if args.write:
        write(folder, found)
    print(json.dumps(found))
    return 0
