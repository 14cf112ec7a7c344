"""What the requests of a comparison say together: figures of each cell, and of each cell by prompt length.

Every ratio is of requests that both sides have: a prompt that plain decoding or the drafter lacks is left out of it.
Decode time is that after the first token, which comes with the prompt; so tokens are counted without it too.
"""

from __future__ import annotations

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from jetspec_jax.evals.drafters import NO_DRAFT, Cell
from jetspec_jax.evals.ledger import Request, Run, parted
from jetspec_jax.fields import ConfigError, shown

BINS = (256, 512, 1024, 2048, 4096)
TOTAL = "all sets"


class Figures(NamedTuple):
    """Figures of some requests of one cell. None where nothing was there to compute one from."""

    prompts: int
    rounds: int
    depth: int
    speedup: float | None  # decode time per token of plain decoding over that here, both pooled over prompts
    speedup_mean: float | None  # the mean over prompts of the same ratio
    tokens_per_second: float | None  # of decoding, pooled
    acceptance: float | None  # tokens a round gave out, pooled over rounds
    acceptance_mean: float | None  # the mean over prompts
    interval_95: tuple[float, float] | None  # of acceptance, over prompts
    reached: list[float]  # share of all rounds that accepted at least 1, 2, ... drafted tokens
    conditional: list[float | None]  # of those rounds that accepted the one before; None where no round did
    kept: tuple[int, int]  # drafted tokens that were accepted; and rounds that ended before the last drafted depth
    prefill: float  # seconds, all requests
    decode: float
    round_seconds: float | None  # decode time of a round
    step_seconds: float | None  # decode time of a plain step, of the same prompts
    efficiency: float | None  # speedup over acceptance
    over_chain: tuple[float, int, int] | None  # of a tree: times as fast as its own chain; prompts faster, of how many
    verdicts: Mapping[str, int]
    margin: float | None  # the largest at which an output differs
    lost: Mapping[str, int] | None  # rounds by what they lost
    scores: Mapping[str, int]  # answers by what they are worth; empty without gold answers
    score_differs: int  # answers that are worth another than plain decoding's


class Group(NamedTuple):
    """A cell under the same conditions. figures: None where no request of it is there."""

    set: str
    temperature: float
    cell: Cell
    wanted: int  # requests that the comparison asks for
    figures: Figures | None


class Summary(NamedTuple):
    """All groups of a comparison, in its order."""

    settings: dict[str, Any]
    groups: list[Group]
    lengths: dict[str, list[Group]]  # the same over all sets, by the name of a bin of prompt lengths
    sessions: int
    peak_bytes: int | None
    totals: list[Group]  # over all sets


SAME = ("target_fingerprint", "dtype", "backend", "sets", "sampling", "limit", "max_prompt_tokens", "device", "jax")


def of(run: Run) -> Summary:
    """Returns the figures of a comparison.

    Raises:
      ConfigError: its settings do not say which cells it has.
    """
    sets, temperatures, cells = grid(run.settings)
    plain = _by(run.requests, NO_DRAFT.cell)
    chains = {cell: _by(run.requests, chain_of(cell, cells)) for cell in cells}

    def every(name: str, wanted: int, rows: Sequence[Request]) -> list[Group]:
        """A group for each temperature and cell of these requests."""
        found = []
        for temperature, cell in itertools.product(temperatures, cells):
            own = [r for r in rows if (r.temperature, r.cell) == (temperature, cell)]
            found.append(Group(name, temperature, cell, wanted, figures(own, plain, chains[cell]) if own else None))
        return found

    groups: list[Group] = []
    lengths: dict[str, list[Group]] = {}
    for name, wanted in sets.items():
        groups += every(name, wanted, [r for r in run.requests if r.set == name])
    counted = Counter(bin_of(n) for n in {(r.set, r.prompt): r.prompt_tokens for r in run.requests}.values())
    for label in filter(counted.get, BIN_NAMES):
        rows = [r for r in run.requests if bin_of(r.prompt_tokens) == label]
        lengths[label] = every(TOTAL, counted[label], rows)
    totals = every(TOTAL, sum(sets.values()), run.requests)
    told = [r.peak_bytes for r in run.requests if r.peak_bytes is not None]
    sessions = len({r.session for r in run.requests})
    return Summary(run.settings, groups, lengths, sessions, max(told, default=None), totals)


def joined(found: Sequence[Summary]) -> Summary:
    """Returns comparisons of one target over the same prompts as one; each keeps the plain decoding of its own run.

    Raises:
      ConfigError: they differ in what their figures depend on, or a cell is in two of them.
    """
    first = found[0]
    for other in found[1:]:
        for name in SAME:
            own, its = _said(first, name), _said(other, name)
            if own != its:
                where, a, b = parted(name, own, its)
                raise ConfigError(
                    f"files of different {where}, {shown(a)} and {shown(b)}; give those of one comparison"
                )
    seen: dict[tuple[str, float, Cell], Group] = {}
    for one in found:
        for group in one.groups:
            key = group.set, group.temperature, group.cell
            if key in seen and group.cell.shape != "plain":
                raise ConfigError(f"{group.cell} of {group.set} is in two files; give one of them")
            seen.setdefault(key, group)
    every = sorted(seen.values(), key=lambda g: (g.temperature, list(first.settings["sets"]).index(g.set)))
    totals = _first_of(one.totals for one in found)
    lengths = {}
    for label in (name for name in BIN_NAMES if any(name in one.lengths for one in found)):
        some = _first_of(one.lengths.get(label, []) for one in found)
        most = max(group.wanted for group in some)  # a file knows the lengths of those prompts alone that it decoded
        lengths[label] = [group._replace(wanted=most) for group in some]
    heats = sorted({float(t) for one in found for t in one.settings["sampling"]["temperature"]})
    settings = first.settings | {"sampling": {**first.settings["sampling"], "temperature": heats}}
    told = [one.peak_bytes for one in found if one.peak_bytes is not None]
    return Summary(
        settings, every, lengths, sum(one.sessions for one in found), max(told, default=None), totals,
    )  # fmt: skip


def _first_of(found: Iterable[Sequence[Group]]) -> list[Group]:
    """Returns the groups of several comparisons, plain decoding once for each temperature: that of the first."""
    kept: dict[tuple[float, Cell], Group] = {}
    for group in itertools.chain.from_iterable(found):
        kept.setdefault((group.temperature, group.cell), group)
    return list(kept.values())


def _said(found: Summary, name: str) -> Any:
    """Returns a setting; of the options of requests, all but the temperatures, of which each file may have its own."""
    value = found.settings.get(name)
    if name == "sampling" and isinstance(value, dict):
        return {k: v for k, v in value.items() if k != "temperature"}
    return value


def grid(settings: Mapping[str, Any]) -> tuple[dict[str, int], list[float], list[Cell]]:
    """Returns the prompts of each set, the temperatures, and the cells that a comparison asks for."""
    try:
        sets = {str(name): int(value[0]) for name, value in settings["sets"].items()}
        temperatures = [float(t) for t in settings["sampling"]["temperature"]]
        return sets, temperatures, [Cell(str(a), str(b), str(c), int(d)) for a, b, c, d in settings["cells"]]
    except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
        raise ConfigError(f"settings of the comparison: sets, sampling and cells are needed ({error!r})") from None


BIN_NAMES = [f"<= {BINS[0]}", *(f"{a + 1}-{b}" for a, b in itertools.pairwise(BINS)), f"> {BINS[-1]}"]


def bin_of(tokens: int) -> str:
    """Returns the name of the bin that a prompt of so many tokens belongs to."""
    return BIN_NAMES[sum(tokens > most for most in BINS)]


def depths(accepted: Sequence[int], depth: int) -> tuple[list[float], list[float | None]]:
    """Returns shares of rounds by accepted drafted tokens, for each of the drafted depths.

    The first are those of all rounds that accepted at least 1, 2, ...; the second those of the rounds that accepted the
    one before, None where no round did.
    """
    count = [sum(n >= k for n in accepted) for k in range(depth + 1)]
    before = itertools.pairwise(count)
    return [n / max(count[0], 1) for n in count[1:]], [_ratio(after, first) for first, after in before]


def interval_95(emitted: Sequence[int], rounds: Sequence[int]) -> tuple[float, float]:
    """Returns the 95 % interval of the pooled acceptance length, a bootstrap over prompts.

    Args:
      emitted: tokens that the rounds of each prompt gave out.
      rounds: of each prompt.
    """
    draws = np.random.default_rng(0).integers(0, len(rounds), (2000, len(rounds)))
    spread = np.array(emitted)[draws].sum(1) / np.maximum(np.array(rounds)[draws].sum(1), 1)
    low, high = np.percentile(spread, (2.5, 97.5))
    return float(low), float(high)


def chain_of(cell: Cell, cells: Iterable[Cell]) -> Cell | None:
    """Returns the chain beside a tree: the same drafter's longest of at most as many nodes; None for other cells."""
    chains = [c for c in cells if c.drafter == cell.drafter and c.shape == "chain" and c.nodes <= cell.nodes]
    return max(chains, key=lambda c: c.nodes, default=None) if cell.shape == "tree" else None


Others = Mapping[tuple[str, int, float], Request]  # by set, prompt and temperature


def _by(requests: Iterable[Request], cell: Cell | None) -> Others:
    return {(r.set, r.prompt, r.temperature): r for r in requests if r.cell == cell}


def _paired(rows: Iterable[Request], others: Others) -> list[tuple[Request, Request]]:
    """Requests of both sides for the same prompts, where both decoded something after the first token."""
    both = [(r, others.get((r.set, r.prompt, r.temperature))) for r in rows]
    return [(r, o) for r, o in both if o is not None and min(_pace(r), _pace(o)) > 0]


def _faster(both: Sequence[tuple[Request, Request]]) -> float | None:
    """How many times as fast the first ones decode a token, pooled."""
    pooled = lambda some: _ratio(sum(r.decode for r in some), sum(r.new_tokens - 1 for r in some))
    return _ratio(pooled([o for _, o in both]), pooled([r for r, _ in both]))


def _over(both: Sequence[tuple[Request, Request]]) -> tuple[float, int, int] | None:
    faster = _faster(both)
    return None if faster is None else (faster, sum(_pace(r) < _pace(o) for r, o in both), len(both))


def figures(rows: Sequence[Request], plain: Others, chain: Others) -> Figures:
    """Returns the figures of one cell's requests.

    Args:
      rows: the requests.
      plain: those of plain decoding.
      chain: those of the chain beside a tree; empty for other cells.
    """
    beside = [plain.get((r.set, r.prompt, r.temperature)) for r in rows]
    both = _paired(rows, plain)
    speedup = _faster(both)
    drafted = [n - 1 for r in rows for n in r.accept_lengths]
    emitted, rounds = sum(sum(r.emitted) for r in rows), sum(r.rounds for r in rows)
    depth = max(r.depth for r in rows)
    reached, conditional = depths(drafted, depth)
    acceptance = _ratio(emitted, rounds)
    margins = [r.margin for r in rows if r.verdict == "differs" and r.margin is not None]
    decode = sum(r.decode for r in rows)
    seconds = [(r.decode, r.new_tokens - 1) for r in rows]
    worth = lambda r: (r.score or {}).get("verdict")
    return Figures(
        prompts=len(rows),
        rounds=rounds,
        depth=depth,
        speedup=speedup,
        speedup_mean=_mean(_pace(p) / _pace(r) for r, p in both),
        tokens_per_second=_ratio(sum(n for _, n in seconds if n > 0), decode),
        acceptance=acceptance,
        interval_95=interval_95([sum(r.emitted) for r in rows], [r.rounds for r in rows]) if rounds else None,
        acceptance_mean=_mean(sum(r.emitted) / r.rounds for r in rows if r.rounds),
        reached=reached,
        conditional=conditional,
        kept=(sum(drafted), sum(n < r.depth for r in rows for n in (a - 1 for a in r.accept_lengths))),
        prefill=sum(r.prefill for r in rows),
        decode=decode,
        round_seconds=_ratio(decode, rounds),
        step_seconds=_ratio(sum(p.decode for _, p in both), sum(p.rounds for _, p in both)),
        efficiency=_ratio(speedup, acceptance),
        over_chain=_over(_paired(rows, chain)),
        verdicts=Counter(r.verdict for r in rows),
        margin=max(margins, default=None),
        lost=_lost(rows),
        scores=Counter(str(worth(r)) for r in rows if r.score),
        score_differs=sum(
            worth(r) != worth(p) for r, p in zip(rows, beside, strict=True) if r.score and p is not None and p.score
        ),
    )


def _pace(request: Request) -> float:
    """Seconds of decoding a token; 0 where nothing was decoded after the prompt."""
    return request.decode / (request.new_tokens - 1) if request.new_tokens > 1 else 0.0


def _lost(rows: Sequence[Request]) -> dict[str, int] | None:
    """Rounds of all requests by what they lost; None where one of them does not say."""
    total: Counter[str] = Counter()
    for row in rows:
        if row.lost is None:
            return None
        total.update({name: int(count) for name, count in row.lost.items()})
    return dict(total)


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None


def _mean(values: Iterable[float]) -> float | None:
    found = list(values)
    return statistics.fmean(found) if found else None
