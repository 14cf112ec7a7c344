"""Generation: prompts in, results out, around the pure loop of `decoder.py`.

    result = generate(target, head, "What is 2 + 2?")
    for piece in stream(target, head, "What is 2 + 2?"):
        print(piece.text, end="")

`head=None` decodes plainly through the same code. For pipelines of your own, `Decoder`, `Request`, `State`, `prefill`,
`step` and `rounds` are the pure pieces.
"""

from __future__ import annotations

import dataclasses
import numbers
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.engine import requests
from jetspec_jax.engine.requests import check
from jetspec_jax.engine.stops import StopText
from jetspec_jax.files import pair
from jetspec_jax.files.prompts import prompt_ids
from jetspec_jax.loop.decoder import (
    DEFAULT_CHUNK,
    NONFINITE,
    RUNNING,
    STOP,
    TEXT,
    Decoder,
    Request,
    Round,
    State,
    prefill,
    rounds,
    step,
    traced_prefill,
    traced_step,
)

__all__ = [
    "DecodeError",
    "Decoder",
    "Piece",
    "Request",
    "Result",
    "Round",
    "State",
    "check",
    "generate",
    "prefill",
    "prompt_ids",
    "rounds",
    "start",
    "step",
    "stream",
    "traced_prefill",
    "traced_step",
]  # fmt: skip

# By measurement on the CPU (docs/measurements.md). On a GPU 16 won with the 135M demo target, which launches bound;
# with one that memory bounds a round of 64 takes 1.4 plain steps (docs/performance.md).
DEFAULT_BUDGET = {"cpu": 8, "gpu": 64, "tpu": 64}
STREAM_ROUNDS = 4  # rounds between two looks of a stream
STOP_ROUNDS = 8  # rounds between two looks for stop strings

Prompt = str | Sequence[int]


class DecodeError(RuntimeError):
    """Decoding went wrong on the device; the message is one line for the user."""


@dataclasses.dataclass
class Result:
    """One finished request. Field names are the keys of `decode.py --json`."""

    text: str
    token_ids: list[int]  # the end token included where one ended the row
    finish_reason: str  # "stop" or "length"
    stopped_by: str | int | None  # the stop string, end token or stop token; None at the limit
    prompt_tokens: int
    new_tokens: int
    rounds: int
    accept_lengths: list[int]  # per round, bonus included, as verified
    emitted: list[int]  # per round, tokens that reached the output
    acceptance_length: float  # mean of accept_lengths; 0 without rounds
    tree_sizes: list[int]
    seconds: dict[str, float]  # load, compile, prefill, decode; of the whole batch
    tokens_per_second: float  # of this row over the batch's decode time, the first token excluded
    settings: dict[str, Any]
    logprobs: list[float] | None  # of `token_ids` under the target's own distribution; None unless asked for

    def to_json(self) -> dict[str, Any]:
        """A dict of plain values."""
        return dataclasses.asdict(self)


class Piece(NamedTuple):
    """What a stream yields: new text, new ids, and with the last piece the whole result."""

    text: str
    token_ids: list[int]
    result: Result | None


def generate(
    target,
    head,
    prompts: Prompt | Sequence[Prompt],
    tree: TreeConfig | None = None,
    sampling: SamplingConfig | Sequence[SamplingConfig] | None = None,
    chat: bool | None = None,
    *,
    thinking: bool | None = None,
    prefill_chunk: int | None = None,
) -> Result | list[Result]:
    """Decodes one prompt or a batch of unequal ones to the end.

    Args:
      target: what `load_target` returns.
      head: what `load_head` returns, or None for plain decoding.
      prompts: text, token ids, or a list of either; one result for one prompt, a list for a list.
      tree: the candidate tree; its budget defaults to the device's.
      sampling: one for all prompts, or one each.
      chat: whether text goes through the chat template; None uses it where the tokenizer has one.
      thinking: whether a chat template that knows the switch leaves room for thinking; None is what the head was
        trained with, else off.
      prefill_chunk: prompt tokens read at a time; memory grows with it and not with the prompt. None is 512.

    Raises:
      ConfigError: a prompt, option or length is wrong; nothing has been computed then.
      DecodeError: the target's logits are not finite.
    """
    flight = start(target, head, prompts, tree, sampling, chat, thinking=thinking, prefill_chunk=prefill_chunk)
    while not flight.over():
        flight.advance(STOP_ROUNDS if any(flight.texts) else flight.decoder.capacity)
    results = flight.results()
    return results[0] if flight.single else results


def stream(
    target,
    head,
    prompt: Prompt,
    tree: TreeConfig | None = None,
    sampling: SamplingConfig | None = None,
    chat: bool | None = None,
    *,
    thinking: bool | None = None,
    prefill_chunk: int | None = None,
) -> Iterator[Piece]:
    """Yields text as it comes; the pieces join to the text of `generate`. Never half a character."""
    flight = start(
        target, head, [prompt], tree, sampling, chat, watch=True, thinking=thinking, prefill_chunk=prefill_chunk
    )
    text, shown, seen = flight.texts[0], 0, 0
    while True:
        ids = flight.new_ids()[0]
        fresh, seen = ids[seen:], len(ids)
        result = flight.results()[0] if flight.over() else None
        whole = text.settled if text else ""
        yield Piece(whole[shown:], fresh, result)
        if result:
            return
        shown = len(whole)
        flight.advance(STREAM_ROUNDS)


class Flight:
    """A batch on the device: its static decoder, its state, and the time it took. Made by `start`."""

    def __init__(
        self, target, head, ids, sampling, tree: TreeConfig, single: bool, watch: bool, chunk: int,
        thinking: bool | None,
    ):  # fmt: skip
        self.single, self._target, self._head, self._ids = single, target, head, ids
        usual = int(tree.budget or DEFAULT_BUDGET[jax.default_backend()])
        budgets = [o.budget or usual for o in sampling]
        budget = max(budgets)
        draft = None if head is None or budget == 1 else head.draft
        rows = requests.power(budget, 2) if draft else 1
        if head is not None and (tree.depth or 0) > head.draft.depth:
            raise ConfigError(
                f"depth={tree.depth}: this head drafts at most {head.draft.depth} positions a round; give that or less"
            )
        if draft:  # no path is longer than the tree has rows
            draft = dataclasses.replace(draft, depth=min(tree.depth or draft.depth, rows - 1))
        longest = max(len(i) + s.max_new_tokens for i, s in zip(ids, sampling, strict=True))
        spare = (draft.depth if draft else 0) + 1
        width = requests.power(max(map(len, ids)), 16)
        chunked = width > chunk
        capacity = _capacity((longest if chunked else max(longest, width)) + spare)
        if chunked:  # any number of chunks is one program
            width = capacity - spare
        sharpness = float(tree.sharpness) if draft else 0.0
        logprobs = any(o.logprobs for o in sampling)
        self.decoder = Decoder(
            target.model, draft, rows, capacity, tree.builder, tree.candidates, sharpness, logprobs, chunk
        )
        self._params = {"target": target.params, "draft": head.params if draft else None}
        self._settings = {
            "rows": rows,
            "tree": tree.builder,
            "width": min(tree.candidates, max(rows - 1, 1)),
            "depth": self.decoder.depth,
            "sharpness": self.decoder.sharpness,
            "batch": len(ids),
            "capacity": capacity,
            "prefill_chunk": chunk,
            "thinking": thinking,
            "dtype": str(target.dtype),
            "attention": target.model.ops.attention,
            "device": jax.devices()[0].device_kind,
        }
        self._sampling = sampling
        self._budgets = [b if draft else 1 for b in budgets]
        self.texts = [
            StopText(target.tokenizer, o.stop, o.include_stop_text, o.min_new_tokens)
            if target.tokenizer and (watch or o.stop)
            else None
            for o in sampling
        ]  # of rows whose text must be read while they run
        self.seconds = {"load": target.seconds + (head.seconds if head else 0.0), "compile": 0.0}

        self._request = request = requests.request(ids, sampling, budgets, width)
        program = self._compile(prefill, self._params, request)
        begin = time.perf_counter()
        self.state: State = jax.block_until_ready(program(self._params, request))
        self.seconds |= {"prefill": time.perf_counter() - begin, "decode": 0.0}
        self._read()

    def advance(self, n: int) -> None:
        """Runs at most n rounds in one launch."""
        args = self._params, self.state, jnp.int32(n)
        program = self._compile(rounds, *args)
        begin = time.perf_counter()
        self.state = jax.block_until_ready(program(*args))
        self.seconds["decode"] += time.perf_counter() - begin
        self._read()

    def trace(self) -> Round:
        """Runs one round and returns what it did, beside the state."""
        return self.run(traced_step)

    def run(self, function, *rest) -> Any:
        """Runs a program of (decoder, params, state, *rest) that returns (state, value); gives the value."""
        args = self._params, self.state, *rest
        program = self._compile(function, *args)
        begin = time.perf_counter()
        self.state, value = jax.block_until_ready(program(*args))
        self.seconds["decode"] += time.perf_counter() - begin
        self._read()
        return value

    def first_logits(self) -> jax.Array:
        """f32 logits [B, V] that chose the first token of every row, from a second prefill of the same prompts."""
        args = self._params, self._request
        return self._compile(traced_prefill, *args)(*args)[1]

    def new_ids(self) -> list[list[int]]:
        """Tokens committed behind each prompt so far, in one transfer: slicing on the device would compile."""
        s = self.state
        tokens, first, last = jax.device_get((s.tokens, s.prompt_length, s.length))
        return [tokens[row, first[row] : last[row]].tolist() for row in range(len(self._ids))]

    def over(self) -> bool:
        """Whether every row has ended."""
        return bool(jax.device_get(self.state.reason).all())  # RUNNING is 0

    def results(self) -> list[Result]:
        """One result for each prompt, once all rows have ended."""
        state = jax.device_get(self.state._replace(cache=(), draft=None))
        results = [self._result(state, row) for row in range(len(self._ids))]
        if self.decoder.draft:
            rounds = sum(r.rounds for r in results)
            committed = sum(sum(r.accept_lengths) for r in results)
            pair.note_acceptance(self._target, self._head, rounds, committed / max(rounds, 1))
        return results

    def _result(self, s: State, row: int) -> Result:
        if s.reason[row] == NONFINITE:
            where = f" of prompt {row}" if len(self._ids) > 1 else ""
            narrow = str(self._target.dtype) == "float16"
            raise DecodeError(
                f"the target's logits are not finite in {self._target.dtype} at position {s.length[row]}{where}; "
                + ("try bfloat16 or float32" if narrow else "its weights are damaged, or hold numbers that overflow")
            )
        ids = s.tokens[row, s.prompt_length[row] : s.length[row]].tolist()
        by_token, by_text, watched = bool(s.reason[row] == STOP), s.reason[row] == TEXT, self.texts[row]
        count = int(s.rounds[row])
        accepted = s.accept_lengths[row, :count].tolist()
        decode, options = self.seconds["decode"], self._sampling[row]
        text, logprobs = "", None
        if watched:
            text = watched.settled
        elif self._target.tokenizer:
            text = self._target.tokenizer.decode(self._shown(ids, row, by_token))
        if options.logprobs and s.logprobs is not None:
            logprobs = s.logprobs[row, s.prompt_length[row] : s.length[row]].tolist()
        return Result(
            text=text,
            token_ids=ids,
            finish_reason="stop" if by_token or by_text else "length",
            stopped_by=ids[-1] if by_token else watched.found if watched else None,
            prompt_tokens=len(self._ids[row]),
            new_tokens=len(ids),
            rounds=count,
            accept_lengths=accepted,
            emitted=s.emitted[row, :count].tolist(),
            acceptance_length=sum(accepted) / count if count else 0.0,
            tree_sizes=s.tree_sizes[row, :count].tolist(),
            seconds=dict(self.seconds),
            tokens_per_second=max(len(ids) - 1, 0) / decode if decode else 0.0,
            settings=self._settings | {"budget": self._budgets[row]} | _settings(options),
            logprobs=logprobs,
        )

    def _shown(self, ids: list[int], row: int, by_token: bool) -> list[int]:
        """The ids that make the text: without the end token, unless it is asked for."""
        return ids[:-1] if by_token and not self._sampling[row].include_stop_text else ids

    def _read(self) -> None:
        """Brings the texts up to date; ends the rows that have met a stop string at the token that completes it.

        What such a row has computed behind it is taken back: its length, its rounds, and what the last of them emitted.
        """
        if not any(self.texts):
            return
        ids, reasons = self.new_ids(), jax.device_get(self.state.reason)
        ended = {}
        for row, text in enumerate(self.texts):
            if text is None or text.over:
                continue
            text.push(self._shown(ids[row], row, bool(reasons[row] == STOP))[text.count :])
            if text.found is not None:
                ended[row] = text.count
            if reasons[row] != RUNNING:
                text.finish()
        if ended:
            self.state = _cut(self.state, ended)

    def _compile(self, function, *args):
        program, seconds = compiled(function, self.decoder, *args)
        self.seconds["compile"] += seconds
        return program


def start(
    target, head, prompts, tree=None, sampling=None, chat=None, *, watch=False, thinking=None, prefill_chunk=None
) -> Flight:
    """Checks everything, prefills, and returns the batch in flight; arguments as of `generate`.

    watch: keep the text of every row up to date, as streaming needs it.
    """
    if not isinstance(prompts, Iterable):
        raise ConfigError(f"prompts={prompts!r}: give text, token ids, or a list of either")
    prompts = prompts if isinstance(prompts, str) else list(prompts)
    single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], numbers.Integral))
    prompts = [prompts] if single else prompts
    if not prompts:
        raise ConfigError("prompts: the list is empty; give at least one prompt")
    if head is not None and not hasattr(head, "draft"):
        raise ConfigError(f"head={type(head).__name__}: give what load_head returns, or None for plain decoding")
    if not isinstance(tree, TreeConfig | None):
        raise ConfigError(f"tree={tree!r}: give a TreeConfig, or None")
    sampling = SamplingConfig() if sampling is None else sampling
    options = [sampling] * len(prompts) if isinstance(sampling, SamplingConfig) else sampling
    if not isinstance(options, Sequence) or not all(isinstance(o, SamplingConfig) for o in options):
        raise ConfigError(f"sampling={sampling!r}: give a SamplingConfig, or a list with one for each prompt")
    options = list(options)
    if len(options) != len(prompts):
        raise ConfigError(f"sampling: {len(options)} configurations for {len(prompts)} prompts; give one, or one each")
    chunk = DEFAULT_CHUNK if prefill_chunk is None else prefill_chunk
    if not isinstance(chunk, numbers.Integral) or isinstance(chunk, bool) or chunk < 1:
        raise ConfigError(f"prefill_chunk={chunk}: give a whole number of tokens >= 1 (default {DEFAULT_CHUNK})")
    if head is not None:
        pair.check(target, head)
    if chat and not any(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("chat=True: token ids are taken as they are; leave the option out")
    mode = pair.thinking(target, head, thinking) if pair.rendered(prompts, chat, thinking) else None
    ids = [prompt_ids(target, prompt, chat, mode) for prompt in prompts]
    for row, option in zip(ids, options, strict=True):
        check(target, row, option)
    options = [requests.resolve(target, option) for option in options]
    pair.note_length(head, max(len(i) + o.max_new_tokens for i, o in zip(ids, options, strict=True)))
    return Flight(target, head, ids, options, tree or TreeConfig(), single, watch, int(chunk), mode)


def _settings(option: SamplingConfig) -> dict[str, Any]:
    """What a result says of its options: temperature and seed, and whatever was set."""
    given = dataclasses.asdict(option)
    usual = {"temperature", "seed"}
    hidden = {"max_new_tokens", "eos", "budget"}
    return {k: v for k, v in given.items() if k in usual or (k not in hidden and v != getattr(SamplingConfig, k))}


def _cut(state: State, ended: dict[int, int]) -> State:
    """The state with some rows ended after that many new tokens, and the records of their rounds cut accordingly."""
    names = ("length", "reason", "rounds", "accept_lengths", "tree_sizes", "emitted")
    arrays: dict[str, Any] = {name: jax.device_get(getattr(state, name)).copy() for name in names}
    first = jax.device_get(state.prompt_length)
    for row, kept in ended.items():
        emitted = arrays["emitted"][row]
        total = 1 + emitted.cumsum()  # the first token is that of prefill
        count = int((total < kept).sum()) + 1 if kept > 1 else 0  # rounds that emitted something of what is kept
        if count:
            emitted[count - 1] -= total[count - 1] - kept
        for name in ("accept_lengths", "tree_sizes", "emitted"):
            arrays[name][row, count:] = 0
        arrays["rounds"][row], arrays["reason"][row] = count, TEXT
        arrays["length"][row] = first[row] + kept
    for name, value in arrays.items():
        arrays[name] = jnp.asarray(value)
    return state._replace(**arrays)


def _capacity(slots: int) -> int:
    """Cache slots in steps of 256, from 2048 on of 1024."""
    unit = 256 if slots <= 2048 else 1024
    return -(-slots // unit) * unit


_PROGRAMS: dict[Any, Any] = {}


def compiled(function, decoder: Decoder, *args) -> tuple[Any, float]:
    """The compiled program for these shapes, and the seconds it took to make (0 when it was there). Donates State."""
    leaves, structure = jax.tree.flatten(args)
    key = function.__name__, decoder, structure, tuple((x.shape, x.dtype, x.sharding) for x in leaves)
    if key in _PROGRAMS:
        return _PROGRAMS[key], 0.0
    begin = time.perf_counter()
    donate = () if function in (prefill, traced_prefill) else (1,)
    bound = lambda *rest: function(decoder, *rest)
    bound.__name__ = function.__name__
    _PROGRAMS[key] = jax.jit(bound, donate_argnums=donate).lower(*args).compile()
    return _PROGRAMS[key], time.perf_counter() - begin
