"""Is the output that of plain decoding? Every difference, with a verdict.

    python -m jetspec_jax.audit --prompts gsm8k.jsonl --limit 100 --max_new_tokens 256
    python -m jetspec_jax.audit --target DIR --head DIR --prompts FILE --dtype bfloat16 --json

Decodes a prompt file plainly and speculatively, in batches, and looks at the first token in which each pair of outputs
differs. Both decodings are then run once more, so that the logits compared are those of the very computations that
chose: one row after the cache of the plain run, and the node of the verified tree after that of the speculative run.

Verdict `tie` (rounding decided between two equally good tokens):
  float32    the gap between the two tokens in the plain run is below 1e-4 of the logits' standard deviation;
  16 bits    the gap is at most twice the largest difference between the two runs' logits there, and float32 agrees: the
             same weights cast up decode the prompt to the same tokens both ways (or part at a tie of their own), and
             the speculative logits are about as far from float32 as the plain ones. The last tells rounding from a
             fault that only shows in 16 bits: rounding spreads both runs about the float32 value alike.
Everything else is a `defect`. What follows a difference is not compared: the two texts are then different ones.

Prompt files are those of `decode.py --prompt_file` without options in their lines: the options given here hold for
every prompt. {"prompt_ids": [...]} lines need no tokenizer. Stop strings only cut an output, and are no option here.
Exit status: 0 no defect, 1 a defect or wrong files, 2 wrong options.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.audit")

import dataclasses
import json
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from jetspec_jax import baseline, command, speculate
from jetspec_jax.backends.xla import PLAIN_XLA
from jetspec_jax.config import MIN_TEMPERATURE, ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.engine import geometry
from jetspec_jax.evals import acceptance
from jetspec_jax.fields import Option
from jetspec_jax.files import inputs, pair
from jetspec_jax.files import prompts as prompt_files
from jetspec_jax.layers.numerics import narrow
from jetspec_jax.loop import decoder
from jetspec_jax.loop.state import State

TIE = 1e-4  # of the logits' standard deviation, float32
APART = 8.0  # how much farther from float32 than the plain run rounding may take the speculative one


@dataclasses.dataclass
class Divergence:
    """The first difference of one prompt. Logits in units of the choice: over the temperature where one is given."""

    prompt: int  # index
    position: int  # index into the new tokens
    plain_token: int | None  # None: that output had ended
    token: int | None
    margin: float = 0.0  # of the two best of the plain run
    gap: float = 0.0  # of the two tokens in the plain run
    std: float = 0.0  # of the plain run's logits
    difference: float = 0.0  # largest, between the two runs' logits
    verdict: str = "defect"
    reason: str = ""
    f32: dict[str, Any] | None = None  # the re-check in float32, where one was made


@narrow
def watched(
    static: decoder.Decoder, params: dict, state: State, where: Int[Array, " B"]
) -> tuple[State, Float[Array, "B V"]]:
    """Runs all rounds to the end, and returns the state and f32 logits: those that chose the token at the absolute
    position `where` of each row.

    Zeros for rows that no round chose it for, the first token's position among them (that is prefill's).
    """

    def body(carry):
        before, found = carry
        after, done = decoder.step_recorded(static, params, before)
        at = where - before.length
        hit = ~before.done & (at >= 0) & (at < done.accepted.count)
        node = jnp.take_along_axis(done.accepted.path, jnp.maximum(at, 0)[:, None], 1, mode="clip")
        logits = jnp.take_along_axis(done.target_logits, node[..., None], 1)[:, 0]
        return after, jnp.where(hit[:, None], logits, found)

    empty = jnp.zeros((state.tokens.shape[0], static.target.vocab_size))
    return jax.lax.while_loop(lambda carry: ~carry[0].done.all(), body, (state, empty))


@narrow
def audit(
    target,
    head,
    prompts: Any,
    tree: TreeConfig,
    sampling: SamplingConfig,
    batch: int = 32,
    recheck: bool = True,
) -> dict[str, Any]:
    """Decodes all prompts (token ids, as `inputs.rows` reads them) both ways and judges each difference.

    recheck: whether 16-bit ties are confirmed in float32, which takes the memory of the weights in float32.

    Returns a dict of plain values: counts, `divergences` (of `Divergence`), `settings`, seconds.
    """
    begin = time.perf_counter()
    prompts = inputs.rows(prompts)
    found: list[Divergence] = []
    kept: dict[int, tuple[list[int], np.ndarray, np.ndarray]] = {}  # shared tokens, both logits
    tokens = compared = 0
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    for first in range(0, len(order), batch):
        rows = order[first : first + batch]
        given = [prompts[i] for i in rows]
        plain, fast = (_decode(target, drafting, given, tree, sampling) for drafting in (None, head))
        parted = [baseline.parted(a, b) for a, b in zip(plain, fast, strict=True)]
        tokens += sum(map(len, plain))
        compared += sum(len(a) if at is None else at + 1 for a, at in zip(plain, parted, strict=True))
        if all(at is None for at in parted):
            continue
        again = [_logits_at(target, drafting, given, tree, sampling, parted) for drafting in (None, head)]
        for row, at in enumerate(parted):
            if at is None:
                continue
            pick = lambda ids, at=at: ids[at] if at < len(ids) else None
            this = Divergence(rows[row], at, pick(plain[row]), pick(fast[row]))
            repeats = all(
                new[row][: at + 1] == old[row][: at + 1] for (new, _), old in zip(again, (plain, fast), strict=True)
            )
            one_row, node = again[0][1][row], again[1][1][row]
            _judge(this, one_row, node, (target, given[row], plain[row][:at]), sampling, repeats)
            found.append(this)
            kept[this.prompt] = [*given[row], *plain[row][:at]], one_row, node
    ties = [d for d in found if d.verdict == "tie"]
    if recheck and ties and str(target.dtype) != "float32":
        _recheck(target, head, prompts, tree, sampling, batch, ties, kept)
    defects = sum(d.verdict == "defect" for d in found)
    return {
        "prompts": len(prompts),
        "equal": len(prompts) - len(found),
        "ties": len(found) - defects,
        "defects": defects,
        "tokens": tokens,  # of plain decoding
        "tokens_compared": compared,
        "divergences": [dataclasses.asdict(d) for d in sorted(found, key=lambda d: d.prompt)],
        "settings": dataclasses.asdict(tree)
        | dataclasses.asdict(sampling)
        | {
            "budget": tree.budget or geometry.default_budget(),
            "batch": batch,
            "dtype": str(target.dtype),
            "f32_recheck": recheck and str(target.dtype) != "float32",
            "device": jax.devices()[0].device_kind,
        },
        "seconds": time.perf_counter() - begin,
    }


def _decode(target, head, prompts, tree, sampling) -> list[list[int]]:
    return _logits_at(target, head, prompts, tree, sampling, [None] * len(prompts))[0]


def _logits_at(target, head, prompts, tree, sampling, at: Sequence[int | None]) -> tuple[list[list[int]], np.ndarray]:
    """New tokens of every prompt, and the f32 logits [B, V] that chose the new token `at` of each."""
    engine = speculate.start(target, head, [list(p) for p in prompts], tree, sampling)
    never = engine.decoder.capacity
    where = [never if i is None else len(p) + i for p, i in zip(prompts, at, strict=True)]
    where += [never] * (engine.state.tokens.shape[0] - len(prompts))
    logits = np.array(engine.run(watched, jnp.array(where, jnp.int32)))
    if 0 in at:  # chosen by prefill
        first = np.array([w == len(p) for w, p in zip(where, prompts, strict=False)])
        logits[: len(prompts)][first] = np.asarray(engine.first_logits())[: len(prompts)][first]
    results = engine.results()
    for row, result in enumerate(results):
        if result.error:
            raise speculate.DecodeError(f"prompt {row}: {result.error}")
    return [r.token_ids for r in results], logits


def _judge(
    d: Divergence,
    plain: np.ndarray,
    fast: np.ndarray,
    before: tuple[Any, Sequence[int], Sequence[int]],
    sampling: SamplingConfig,
    repeats: bool,
) -> None:
    """Fills in the figures and the verdict that one position in its own precision allows.

    before: the target, the prompt, and the new tokens that both outputs share.
    """
    if d.plain_token is None or d.token is None:
        d.reason = "one output ended where the other goes on"
        return
    heat = sampling.temperature if sampling.temperature >= MIN_TEMPERATURE else 1.0
    scores, others = (np.asarray(baseline.scores(*before, jnp.asarray(x), sampling)[1]) for x in (plain, fast))
    second, best = np.partition(scores, -2)[-2:]
    d.margin, d.std = float(best - second), float(plain.std())
    d.gap = float(scores[d.plain_token] - scores[d.token])
    d.difference = float(np.abs(plain - fast).max()) / heat
    chose = int(scores.argmax()), int(others.argmax())
    if not repeats or chose != (d.plain_token, d.token):
        d.reason = "a second run does not repeat the first"
    elif str(before[0].dtype) == "float32":
        d.verdict = "tie" if d.gap < TIE * d.std else "defect"
        d.reason = (
            f"gap {d.gap / d.std:.1e} of the logits' std, {'below' if d.verdict == 'tie' else 'not below'} {TIE:g}"
        )
    elif d.gap > 2 * d.difference:
        d.reason = "gap larger than twice the largest difference between the runs' logits"
    else:
        d.verdict, d.reason = "tie", "gap within twice the largest difference between the runs' logits"


def _recheck(  # noqa: PLR0913  # what `audit` was asked, and what it found
    target, head, prompts, tree, sampling, batch: int, ties: list[Divergence], kept
) -> None:
    """Turns ties into defects where float32 does not agree."""
    cast = lambda leaf: leaf.astype(jnp.float32) if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf
    wide = lambda x: dataclasses.replace(x, params=jax.tree.map(cast, x.params))
    plain = lambda x: (
        dataclasses.replace(x, backend=PLAIN_XLA) if "backend" in {f.name for f in dataclasses.fields(x)} else x
    )
    # In plain XLA too: a fault of a kernel must not be judged by that kernel.
    target = dataclasses.replace(wide(target), dtype="float32", model=plain(target.model))
    head = dataclasses.replace(wide(head), draft=plain(head.draft))
    report = audit(target, head, [prompts[d.prompt] for d in ties], tree, sampling, batch)
    parted = {ties[other["prompt"]].prompt: other for other in report["divergences"]}
    for first in range(0, len(ties), batch):
        some = ties[first : first + batch]
        exact = np.asarray(baseline.next_logits(target, [kept[d.prompt][0] for d in some]))
        for d, logits in zip(some, exact, strict=True):
            off = [float(np.abs(x - logits).max()) for x in kept[d.prompt][1:]]
            d.f32 = {
                "verdict": parted[d.prompt]["verdict"] if d.prompt in parted else "equal",
                "plain_error": off[0],
                "speculative_error": off[1],
            }
            if d.f32["verdict"] == "defect":
                d.verdict = "defect"
                d.reason = f"in float32 the outputs part too, at {parted[d.prompt]['position']}"
            elif off[1] > APART * off[0]:
                d.verdict = "defect"
                d.reason = f"the speculative logits are {off[1] / max(off[0], 1e-30):.0f} times as far from float32"
            else:
                d.reason += "; float32 agrees"


def text(report: dict[str, Any]) -> str:
    """Returns the report for people."""
    lines = [
        f"prompt {d['prompt']}, new token {d['position']}: plain {d['plain_token']}, speculative {d['token']}; "
        f"margin {d['margin']:.3g}, gap {d['gap']:.3g}, logits' std {d['std']:.3g}, runs differ by "
        f"{d['difference']:.3g}: {d['verdict'].upper()} ({d['reason']})"
        for d in report["divergences"]
    ]
    rate = report["ties"] / max(report["tokens_compared"], 1)
    return "\n".join(
        [
            *lines,
            f"{report['equal']} of {report['prompts']} outputs equal plain decoding; {report['ties']} part at a tie, "
            f"{report['defects']} at a defect; {report['tokens_compared']} tokens compared, {rate:.2%} ties "
            f"({report['settings']['dtype']}, {report['seconds']:.1f} s)",
        ]
    )


LINE = command.Line(
    __doc__,
    [
        command.PROMPTS,
        command.TARGET,
        command.HEAD,
        command.DTYPE,
        command.BACKEND,
        *command.TREE.values(),
        *command.sampling("stop", "include_stop_text", "logprobs"),
        command.THINKING,
        dataclasses.replace(command.LIMIT, default=100),
        dataclasses.replace(command.MAX_PROMPT_TOKENS, default=1024),
        command.BATCH,
        Option("f32", "flag", "Confirm 16-bit ties in float32.", True),
        command.JSON,
    ],
)


@command.tool("audit", "a smaller --batch, or --no_f32")
def main(argv: Sequence[str]) -> int:
    """Runs the command of the module's docstring, and returns its exit status."""
    args = LINE.parse(argv)
    tree, sampling = command.tree_of(args), command.sampling_of(args)
    target, head = command.pair_of(args)
    prompts, left = read(target, head, args)
    report = audit(target, head, prompts, tree, sampling, args.batch, args.f32) | {"left_out": left}
    print(json.dumps(report) if args.json else text(report))
    if left and not args.json:
        print(f"{left} prompts left out: longer than --max_prompt_tokens, or after the first --limit of their file")
    return 1 if report["defects"] else 0


def read(target, head, args) -> tuple[list[list[int]], int]:
    """Returns token ids of all files' prompts, in the thinking mode of the head unless another is asked for.

    Also how many prompts are left out, because they are too long or after the first `--limit` of their file.
    """
    mode = pair.thinking(target, head, args.thinking)
    files = [prompt_files.encode(target, path, mode) for path in args.prompts]
    ids = [row for rows in files for row in acceptance.short(rows, args.limit, args.max_prompt_tokens)]
    if not ids:
        raise ConfigError(f"--max_prompt_tokens={args.max_prompt_tokens}: no prompt of {args.prompts[0]} is that short")
    return ids, sum(map(len, files)) - len(ids)
