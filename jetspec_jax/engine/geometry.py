"""All static sizes of a batch, rounded here and nowhere else: each combination of them is a program of its own."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from jetspec_jax.layers.numerics import power
from jetspec_jax.loop.contracts import Draft
from jetspec_jax.options import MIN_TEMPERATURE, SamplingConfig

# Nodes of a round, by measurement: on the CPU in docs/measurements.md, on one H200 in docs/performance.md. There 64 was
# the fastest on five of seven prompt sets with the 135M demo target and 16 on two, and a round of 64 at the shape of an
# 8B target takes 1.4 plain steps.
DEFAULT_BUDGET = {"cpu": 8, "gpu": 64, "tpu": 64}
MAX_ENDS = 8  # end tokens of a row, unless it gives more


class Words(NamedTuple):
    """Sizes of what a row lists; 0 where no row lists any."""

    bias: int = 0  # biased tokens
    bad: int = 0  # bad words
    tokens: int = 0  # of a bad word


NO_WORDS = Words()


@dataclasses.dataclass(frozen=True)
class Geometry:
    """What makes a program, beside the model: the sizes of a batch, and which options it can serve.

    batch: rows B, a power of two or the next multiple of the groups of devices. capacity: cache slots S. nodes: tree
    nodes T. prompt: prompt slots P.
    ends: end tokens of a row. options: fields of `Sampling` that are there, and `logprobs`.
    """

    batch: int
    capacity: int
    nodes: int
    prompt: int
    ends: int = MAX_ENDS
    words: Words = NO_WORDS
    options: frozenset[str] = frozenset()

    @classmethod
    def fit(
        cls, prompts: Sequence[Sequence[int]], options: Sequence[SamplingConfig], draft: Draft, chunk: int,
        groups: int = 1,
    ) -> Geometry:  # fmt: skip
        """Returns the sizes that hold these requests.

        Args:
          prompts: token ids of each.
          options: resolved options of each.
          draft: what will draft for them.
          chunk: prompt tokens that are read at a time.
          groups: of devices, among which the rows are dealt out.
        """
        spare = draft.depth + 1  # a commit writes so many slots at once
        longest = max(len(ids) + option.max_new_tokens for ids, option in zip(prompts, options, strict=True))
        prompt = power(max(map(len, prompts)), 16)
        chunked = prompt > chunk
        capacity = slots((longest if chunked else max(longest, prompt)) + spare)
        bad = [word for option in options for word in option.bad_words]
        return cls(
            batch=rows(len(prompts), groups),
            capacity=capacity,
            nodes=draft.nodes,
            prompt=capacity - spare if chunked else prompt,  # any number of chunks is one program
            ends=power(max(len(ends(option)) for option in options), MAX_ENDS),
            words=Words(
                bias=listed(len(option.logit_bias) for option in options),
                bad=listed(len(option.bad_words) for option in options),
                tokens=power(max(map(len, bad))) if bad else 0,
            ),
            options=frozenset().union(*(used(option) for option in options)),
        )

    def holds(self, other: Geometry) -> bool:
        """Whether a batch of this geometry can serve what needs the other, the number of its rows aside."""
        sizes = [
            (self.capacity, other.capacity),
            (self.nodes, other.nodes),
            (self.ends, other.ends),
            *zip(self.words, other.words, strict=True),
        ]
        return all(own >= needed for own, needed in sizes) and self.options >= other.options


def rows(count: int, groups: int = 1) -> int:
    """Returns the rows of a batch that holds so many, and that so many groups of devices share evenly."""
    return -(-power(count) // groups) * groups


def groups(target: Any) -> int:
    """Returns among how many groups of devices a target's rows are dealt out."""
    return getattr(target.backend, "groups", 1)


def budget_nodes(budgets: Sequence[int]) -> int:
    """Returns the tree nodes that rows of these budgets need."""
    return power(max(budgets))


def ends(option: SamplingConfig) -> list[int]:
    """Returns the tokens that end a request of resolved options."""
    return [*(option.eos or ()), *option.stop_token_ids]


def used(option: SamplingConfig) -> frozenset[str]:
    """Returns the fields of `Sampling` that a request needs, and `logprobs`."""

    def differs(name: str) -> bool:
        return getattr(option, name) != getattr(SamplingConfig, name)

    names = {name for name in ("top_k", "top_p", "min_p", "bad_words", "logprobs") if differs(name)}
    if option.temperature >= MIN_TEMPERATURE:
        names.add("temperature")
    if any(differs(f"{name}_penalty") for name in ("repetition", "presence", "frequency")):
        names.add("penalties")
    if option.logit_bias:
        names.add("bias")
    if option.min_new_tokens:
        names.add("min_length")
    return frozenset(names)


def slots(count: int) -> int:
    """Returns cache slots in steps of 256, from 2048 on of 1024."""
    unit = 256 if count <= 2048 else 1024
    return -(-count // unit) * unit


def listed(counts) -> int:
    """Returns room for the longest of some lists, 0 where all are empty."""
    most = max(counts)
    return power(most, 4) if most else 0


def default_budget() -> int:
    """Returns the nodes of a round where nobody says."""
    return DEFAULT_BUDGET[jax.default_backend()]
