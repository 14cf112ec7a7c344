"""Generation: prompts in, results out.

    result = generate(target, head, "What is 2 + 2?")
    for piece in stream(target, head, "What is 2 + 2?"):
        print(piece.text, end="")

`head=None` decodes plainly through the same code. For pipelines of your own, `Decoder`, `Request`, `State`, `prefill`,
`step` and `rounds` are the pure pieces, and `start` gives the engine that runs them.
"""

from __future__ import annotations

import dataclasses
import numbers
from collections.abc import Collection, Iterator, Sequence
from typing import Any, NamedTuple, overload

import jax

from jetspec_jax import fields
from jetspec_jax.engine import costs, geometry, pacing, requests
from jetspec_jax.engine.engine import Engine
from jetspec_jax.engine.geometry import DEFAULT_BUDGET, Geometry
from jetspec_jax.engine.pacing import Pacer
from jetspec_jax.engine.requests import check
from jetspec_jax.engine.rows import Result, Row
from jetspec_jax.files import inputs, pair
from jetspec_jax.files import mesh as on_mesh
from jetspec_jax.files.inputs import Prompt, prompt_ids
from jetspec_jax.files.pair import LoadedHead, LoadedTarget
from jetspec_jax.loop.contracts import Pausing
from jetspec_jax.loop.decoder import DEFAULT_CHUNK, Decoder, prefill, prefill_recorded, rounds, step, step_recorded
from jetspec_jax.loop.paused import Paused
from jetspec_jax.loop.plain import PLAIN
from jetspec_jax.loop.state import Request, Round, State
from jetspec_jax.loop.tree import Rule
from jetspec_jax.options import AUTO, ConfigError, SamplingConfig, TreeConfig

__all__ = [
    "DEFAULT_BUDGET", "DecodeError", "Decoder", "Engine", "Piece", "Prompt", "Request", "Result", "Round", "State",
    "check", "generate", "pieces", "prefill", "prefill_recorded", "prompt_ids", "rounds", "sound", "start", "step",
    "step_recorded", "stream",
]  # fmt: skip

STREAM_ROUNDS = 4  # rounds between two looks of a stream


class DecodeError(RuntimeError):
    """Decoding went wrong on the device; the message is one line for the user."""


class Piece(NamedTuple):
    """What a stream yields: new text, new ids, and with the last piece the whole result."""

    text: str
    token_ids: list[int]
    result: Result | None


# The options of a call are keywords of their own rather than an object: people write them by hand.
@overload
def generate(  # type: ignore[overload-overlap]  # a text is a sequence of texts too
    target: LoadedTarget, head: LoadedHead | None, prompts: str | Sequence[int], tree: TreeConfig | None = None,
    sampling: SamplingConfig | None = None, chat: bool | None = None, *, thinking: bool | None = None,
    prefill_chunk: int | None = None, mesh: Any = None,
) -> Result: ...  # fmt: skip
@overload
def generate(
    target: LoadedTarget, head: LoadedHead | None, prompts: Sequence[Prompt], tree: TreeConfig | None = None,
    sampling: SamplingConfig | Sequence[SamplingConfig] | None = None, chat: bool | None = None, *,
    thinking: bool | None = None, prefill_chunk: int | None = None, mesh: Any = None,
) -> list[Result]: ...  # fmt: skip
def generate(  # noqa: PLR0913  # the options of a call
    target: LoadedTarget, head: LoadedHead | None, prompts: Any, tree: TreeConfig | None = None,
    sampling: SamplingConfig | Sequence[SamplingConfig] | None = None, chat: bool | None = None, *,
    thinking: bool | None = None, prefill_chunk: int | None = None, mesh: Any = None,
):  # fmt: skip
    """Decodes one prompt or a batch of unequal ones to the end.

    Args:
      target: what `load_target` returns.
      head: what `load_head` returns, or None for plain decoding.
      prompts: text, token ids, what a tokenizer returns, or a list of these; one result for one prompt, a list for a
        list.
      tree: the candidate tree; its budget defaults to the device's.
      sampling: one for all prompts, or one each.
      chat: whether text goes through the chat template; None uses it where the tokenizer has one.
      thinking: whether a chat template that knows the switch leaves room for thinking; None is what the head was
        trained with, else off.
      prefill_chunk: prompt tokens read at a time; memory grows with it and not with the prompt. None is 512.
      mesh: devices to decode on, as of `load_target`, which reads weights right there; here they are moved, in every
        call. None is where the target lies.

    Returns:
      A `Result`, or a list of them. A row of a batch whose logits are not finite has `error` in its result, and its
      mates are not concerned.

    Raises:
      ConfigError: a prompt, option or length is wrong; nothing has been computed then.
      DecodeError: the target's logits are finite in no row.
    """
    listed, single = inputs.listed(prompts)
    engine = start(
        target, head, listed, tree, sampling, chat, thinking=thinking, prefill_chunk=prefill_chunk, mesh=mesh
    )
    results = engine.finish()
    if all(result.error for result in results):
        raise DecodeError(results[0].error)
    return results[0] if single else results


def stream(  # noqa: PLR0913  # the options of a call
    target: LoadedTarget, head: LoadedHead | None, prompt: Any, tree: TreeConfig | None = None,
    sampling: SamplingConfig | None = None, chat: bool | None = None, *, thinking: bool | None = None,
    prefill_chunk: int | None = None, mesh: Any = None,
) -> Iterator[Piece]:  # fmt: skip
    """Yields text as it comes; the pieces join to the text of `generate`. Never half a character.

    Arguments and errors are those of `generate`, for one prompt.
    """
    listed, single = inputs.listed(prompt)
    if not single:
        raise ConfigError(f"prompt: a list of {len(listed)} prompts; a stream decodes one, `generate` takes lists")
    engine = start(
        target, head, listed, tree, sampling, chat, watch=True, thinking=thinking, prefill_chunk=prefill_chunk,
        mesh=mesh,
    )  # fmt: skip
    for piece in pieces(engine):
        if piece.result and piece.result.error:
            raise DecodeError(piece.result.error)
        yield piece


def pieces(engine: Engine) -> Iterator[Piece]:
    """Yields what `stream` does of an engine's only row, which is watched; an error is in the last piece's result."""
    row, shown, seen = engine.rows[0], 0, 0
    while True:
        ids = engine.new_ids()[0]
        fresh, seen = ids[seen:], len(ids)
        result = engine.results()[0] if engine.over() else None
        whole = row.text.settled if row and row.text else ""
        yield Piece(whole[shown:], fresh, result)
        if result:
            return
        shown = len(whole)
        engine.advance(STREAM_ROUNDS)


def sound(results: Sequence[Result]) -> Sequence[Result]:
    """Returns the results of a measurement; raises DecodeError where a row ended with an error, and counts for none."""
    for number, result in enumerate(results, 1):
        if result.error:
            raise DecodeError(f"prompt {number} of {len(results)}: {result.error}")
    return results


def start(  # noqa: PLR0913  # the options of a call
    target: Any, head: Any, prompts: Any, tree: Any = None, sampling: Any = None, chat: bool | None = None, *,
    watch: bool = False, thinking: bool | None = None, prefill_chunk: Any = None, room: int = 0, mesh: Any = None,
) -> Engine:  # fmt: skip
    """Checks everything, prefills, and returns the engine with all prompts admitted.

    Args:
      target, head, prompts, tree, sampling, chat, thinking, prefill_chunk, mesh: as of `generate`; of any type, checked
        here.
      watch: whether the text of every row is kept up to date, as streaming needs it.
      room: tokens of the longest prompt of several calls, where one program is to serve them all; 0 is no other call.
    """
    prompts, _ = inputs.listed(prompts)
    if not hasattr(target, "model"):
        raise ConfigError(f"target={type(target).__name__}: give what load_target returns")
    if head is not None and not hasattr(head, "draft"):
        raise ConfigError(f"head={type(head).__name__}: give what load_head returns, or None for plain decoding")
    if not isinstance(tree, TreeConfig | None):
        raise ConfigError(f"tree={fields.shown(tree)}: give a TreeConfig, or None")
    options, chunk = _options(sampling, len(prompts)), _chunk(prefill_chunk)
    target = target if mesh is None else on_mesh.target_on(target, mesh)
    head = head if head is None else on_mesh.head_on(head, target)
    if head is not None:
        pair.fits(target, head)
    fields.switch("chat", chat)
    if chat and not any(isinstance(prompt, str) for prompt in prompts):
        raise ConfigError("chat=True: token ids are taken as they are; leave the option out")
    mode = pair.thinking(target, head, thinking) if pair.rendered(prompts, chat, thinking) else None
    ids = [prompt_ids(target, prompt, chat, mode) for prompt in prompts]
    for row, option in zip(ids, options, strict=True):
        check(target, row, option)
    options = [requests.resolve(target, option) for option in options]
    tree = tree or TreeConfig()
    longest = max(len(i) + o.max_new_tokens for i, o in zip(ids, options, strict=True))
    pair.note_length(head, longest, tree.window)

    usual = tree.budget or geometry.default_budget()
    budgets = [option.budget or usual for option in options]
    check_budgets(head, tree, budgets)
    if head is not None and AUTO in budgets:
        drafts = _ladder(head, tree, budgets)
    else:
        nodes = geometry.budget_nodes([1 if budget == AUTO else int(budget) for budget in budgets])
        drafts = {nodes: draft_of(head, tree, nodes)}
    draft = drafts[max(drafts)]
    sizes = Geometry.fit(ids, options, draft, chunk, geometry.groups(target.model))
    if room:
        wider = Geometry.fit([*ids, [0] * room], [*options, options[0]], draft, chunk)
        sizes = dataclasses.replace(wider, batch=sizes.batch)
    decoders = {
        n: Decoder(target.model, one, sizes.capacity, "logprobs" in sizes.options, chunk) for n, one in drafts.items()
    }
    said = _said(tree, draft) | {"batch": len(ids), "thinking": mode}
    pacer = None
    if len(drafts) > 1:
        least = geometry.budget_nodes([int(budget) for budget in budgets if budget != AUTO] or [1])
        pacer = Pacer(decoders, costs.described(target, head, draft), sizes, tree.rule, least)
        said |= {"budget_rule": tree.rule, "sizes": sorted(drafts)}
    engine = Engine(target, head if draft is not PLAIN else None, decoders[max(drafts)], sizes, said, pacer)
    budgets = [1] * len(ids) if draft is PLAIN else budgets
    rows = [Row(*row, target.tokenizer, watch) for row in zip(ids, options, budgets, strict=True)]
    engine.admit(rows, sizes.prompt if room else 0)
    return engine


def paces(head) -> bool:
    """Returns whether budgets can follow cost with a drafter: it knows probabilities, and can pause for plain steps."""
    return (
        head is not None
        and getattr(head.draft, "scored", False)
        and (not head.draft.taps or isinstance(head.draft, Pausing))
    )


def check_budgets(head, tree: TreeConfig, budgets: Sequence[int | str]) -> None:
    """Raises ConfigError where budgets, their rule and pruning cannot be had of a drafter, or mean nothing."""
    auto = AUTO in budgets
    if auto and jax.process_count() > 1:
        raise ConfigError("budget=auto: several processes measure different times; give a number")
    if tree.rule != TreeConfig.rule and not auto:
        raise ConfigError(f"budget_rule={tree.rule}: budgets are numbers, so nothing is chosen; give budget=auto")
    for name, asked in (("budget=auto", auto), (f"prune={tree.prune:g}", tree.prune > 0)):
        if asked and head is not None and not getattr(head.draft, "scored", False):
            raise ConfigError(
                f"{name}: {head.family or head.source} drafts without probabilities, by which it would be decided; "
                f"{'give a number' if auto else 'leave it out'}"
            )
    if auto and head is not None and head.draft.taps and not isinstance(head.draft, Pausing):
        raise ConfigError(f"budget=auto: {head.family or head.source} cannot pause for plain steps; give a number")


def _ladder(head, tree: TreeConfig, budgets: Sequence[int | str]) -> dict[int, Any]:
    """Returns the drafts of all sizes of trees among which is chosen, and under 1 the plain step."""
    fixed = [int(budget) for budget in budgets if budget != AUTO]
    sizes = {*pacing.SIZES[jax.default_backend()], *([geometry.budget_nodes(fixed)] if fixed else [])}
    return ladder_of(head, tree, sizes)


def ladder_of(head, tree: TreeConfig, sizes: Collection[int]) -> dict[int, Any]:
    """Returns the head's drafts for trees of several sizes, and under 1 the plain step that keeps its context.

    Args:
      head: what `load_head` returns.
      tree: their shape.
      sizes: nodes, powers of two.
    """
    trees = sorted({*sizes} - {1})
    if tree.width == 1:  # a chain has no more nodes than it is deep
        longest = min(tree.depth or head.draft.depth, head.draft.depth) + 1
        trees = [n for n in trees if n < longest] + [min(n for n in [*trees, longest] if n >= longest)]
    drafts = {n: draft_of(head, tree, n, trees[-1]) for n in trees}
    return {1: Paused(drafts[trees[-1]]), **drafts}


def _options(sampling, count: int) -> list[SamplingConfig]:
    """Returns one configuration for each prompt."""
    sampling = SamplingConfig() if sampling is None else sampling
    options = [sampling] * count if isinstance(sampling, SamplingConfig) else sampling
    if not isinstance(options, Sequence) or not all(isinstance(o, SamplingConfig) for o in options):
        raise ConfigError(
            f"sampling={fields.shown(sampling)}: give a SamplingConfig, or a list with one for each prompt"
        )
    if len(options) != count:
        raise ConfigError(f"sampling: {len(options)} configurations for {count} prompts; give one, or one each")
    return list(options)


def _chunk(given) -> int:
    chunk = DEFAULT_CHUNK if given is None else given
    if not isinstance(chunk, numbers.Integral) or isinstance(chunk, bool) or chunk < 1:
        raise ConfigError(
            f"prefill_chunk={fields.shown(chunk)}: give a whole number of tokens >= 1 (default {DEFAULT_CHUNK})"
        )
    return int(chunk)


def draft_of(head, tree: TreeConfig, nodes: int, grown: int = 0):
    """Returns the head's draft for trees of that many nodes; a tree of the root alone is plain decoding.

    Args:
      head: what `load_head` returns, or None.
      tree: its shape.
      nodes: a power of two.
      grown: nodes that are scored, if more.

    Raises:
      ConfigError: the head cannot draw such a tree.
    """
    if head is None:
        return PLAIN
    if (tree.depth or 0) > head.draft.depth:
        raise ConfigError(
            f"depth={tree.depth}: this head drafts at most {head.draft.depth} positions a round; give that or less"
        )
    if nodes == 1:
        return PLAIN
    rule = Rule(nodes, tree.builder, tree.width or 0, float(tree.sharpness), grown)
    draft = head.draft.shaped(rule, min(tree.depth or head.draft.depth, nodes - 1))
    if tree.scorer == "none" and hasattr(draft, "unscored"):
        draft = draft.unscored()
    if tree.window is None:
        return draft
    if not hasattr(draft, "windowed"):
        raise ConfigError(f"window={tree.window}: this drafter has no context to look back at; leave the option out")
    return draft.windowed(tree.window)


def _said(tree: TreeConfig, draft) -> dict[str, Any]:
    """Returns what results say of the tree."""
    rule = getattr(draft, "rule", None)
    return ({"prune": tree.prune} if tree.prune and draft is not PLAIN else {}) | {
        "tree": tree.builder,
        "width": max(min(rule.candidates if rule else draft.nodes, draft.nodes - 1), 1),
        "sharpness": 0.0 if draft is PLAIN else float(tree.sharpness),
    }
