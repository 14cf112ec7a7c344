"""What a caller may choose: the candidate tree, and how the next token is chosen and when to stop.

Both classes check themselves when they are made, so that a wrong value is refused with one line that names the option,
the value and the valid range, before any array is touched.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jetspec_jax.fields import ConfigError, real, shown, whole

TREE_BUILDERS = ("best_first", "accum_logp")
DTYPES = ("float32", "bfloat16", "float16")  # that weights may have
MIN_TEMPERATURE = 1e-4  # anything colder is greedy
MAX_BUDGET = 1024  # a tree's mask and search grow with its square
SHARPNESS = 0.85  # by measurement on the demo pair (docs/measurements.md), together with sampling.NOISE_SHARE


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """The candidate tree of a round.

    budget: rows that the target verifies, the root included; 1 is plain decoding. None lets the device decide.
    width: candidates for each depth (`best_first`, default 64) or children of a node (`accum_logp`, default 7).
    depth: longest drafted path; None is the head's block without the anchor.
    builder: `best_first` (the `budget` most probable nodes) or `accum_logp` (whole sibling groups, as the published
        engine builds them).
    sharpness: of a sampled request's candidates. The noise that will decide the target's choice is known before it is
        made, so candidates are ranked by `sharpness * (draft logits / temperature + 0.7 * noise)`; 0 ranks them by the
        draft logits alone. It decides how much of the output a round guesses, and never what the output is.
    """

    budget: int | None = None
    width: int | None = None
    depth: int | None = None
    builder: str = "best_first"
    sharpness: float = SHARPNESS

    def __post_init__(self):
        if self.builder not in TREE_BUILDERS:
            raise ConfigError(f"tree={shown(self.builder)}: choose one of {', '.join(TREE_BUILDERS)}")
        for name in ("budget", "width", "depth"):
            _check_budget(name, getattr(self, name))
        _check_real(self, "sharpness", 0, 100, "(0 ranks without the noise)")

    @property
    def candidates(self) -> int:
        """`width`, or its builder's default."""
        return self.width or (64 if self.builder == "best_first" else 7)


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen and when to stop; one rule for plain and speculative decoding.

    The options act in this order, which is that of transformers: logit_bias, repetition_penalty, presence_penalty and
    frequency_penalty, bad_words, min_new_tokens, temperature, top_k, top_p, min_p.

    max_new_tokens: most tokens to generate.
    temperature: 0 (and anything under 1e-4) is greedy.
    seed: with a position it fixes the noise of that position, so the output does not depend on batch or budget.
    eos: end-token ids; None takes the target's own.
    top_k: keep the k largest logits, and all that equal the k-th; 0 keeps all.
    top_p: keep the fewest tokens, largest first, that together have this probability, and all that equal the last of
        them; 1 keeps all.
    min_p: keep tokens of at least this share of the largest probability; 0 keeps all.
    repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
    presence_penalty: taken from the logits of tokens in the output, once.
    frequency_penalty: the same, once for each time.
    logit_bias: {token id: number added to its logit}.
    bad_words: sequences of token ids that the output will not contain, or texts: they stand for their tokens at the
        start of a line and behind a space. The same letters made of other tokens are not noticed.
    min_new_tokens: no end token, stop token or stop string before this many tokens.
    stop: texts that end the output.
    stop_token_ids: end tokens beside `eos`.
    ignore_eos: only stop_token_ids, stop and max_new_tokens end the output.
    include_stop_text: whether the text keeps the stop string or the text of the end token; ids always keep it.
    logprobs: report the log-probability of each new token under the target's own distribution (temperature 1, before
        any other option).
    budget: tree nodes of this request's rounds where they differ from its batch mates'; None takes the tree's.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    seed: int = 0
    eos: Sequence[int] | None = None
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]] = ()  # kept as sorted pairs
    bad_words: Sequence[str | Sequence[int]] = ()
    min_new_tokens: int = 0
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    include_stop_text: bool = False
    logprobs: bool = False
    budget: int | None = None

    def __post_init__(self):
        for name in ("max_new_tokens", "min_new_tokens", "top_k"):
            value = getattr(self, name)
            if not whole(value) or not 0 <= value < 2**31:
                off = " (0 keeps all)" if name == "top_k" else ""
                raise ConfigError(f"{name}={shown(value)}: give a whole number >= 0{off}")
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens={self.min_new_tokens} contradicts max_new_tokens={self.max_new_tokens}; "
                "give at most as many"
            )
        if not real(self.temperature) or not 0 <= self.temperature <= 1e30:
            raise ConfigError(f"temperature={shown(self.temperature)}: give a finite number >= 0 (0 is greedy)")
        if not whole(self.seed) or not 0 <= self.seed < 2**32:
            raise ConfigError(f"seed={shown(self.seed)}: give a whole number in 0..{2**32 - 1}")
        if not real(self.top_p) or not 0 < self.top_p <= 1:
            raise ConfigError(f"top_p={shown(self.top_p)}: give a number in (0, 1] (1 keeps all)")
        _check_real(self, "min_p", 0, 1, "(0 keeps all)")
        if not real(self.repetition_penalty) or not 0 < self.repetition_penalty <= 1e6:
            value = shown(self.repetition_penalty)
            raise ConfigError(f"repetition_penalty={value}: give a number in (0, 1e6] (1 is off)")
        _check_real(self, "presence_penalty", -1e6, 1e6, "(0 is off)")
        _check_real(self, "frequency_penalty", -1e6, 1e6, "(0 is off)")
        for name in ("ignore_eos", "include_stop_text", "logprobs"):
            if not isinstance(getattr(self, name), bool):
                raise ConfigError(f"{name}={shown(getattr(self, name))}: give true or false")
        if self.eos is not None and not _ids(self.eos):
            raise ConfigError(f"eos={shown(self.eos)}: give a tuple of token ids, or None for the target's own")
        if self.ignore_eos and self.eos:
            raise ConfigError(f"ignore_eos contradicts eos={self.eos}; leave one of them out")
        if not _ids(self.stop_token_ids):
            raise ConfigError(f"stop_token_ids={shown(self.stop_token_ids)}: give a list of token ids")
        _check_budget("budget", self.budget)
        put = lambda name, value: object.__setattr__(self, name, value)  # frozen, and hashable from here on
        put("eos", None if self.eos is None else tuple(self.eos))
        put("stop", self._stop())
        put("stop_token_ids", tuple(self.stop_token_ids))
        put("logit_bias", self._logit_bias())
        put("bad_words", self._bad_words())

    def _stop(self) -> tuple[str, ...]:
        given = (self.stop,) if isinstance(self.stop, str) else self.stop
        if not isinstance(given, tuple | list) or not all(isinstance(s, str) and s for s in given):
            raise ConfigError(f"stop={shown(self.stop)}: give a text of at least one character, or a list of them")
        _check_text("stop", given)
        return tuple(given)

    def _logit_bias(self) -> tuple[tuple[int, float], ...]:
        given = self.logit_bias
        items = given.items() if isinstance(given, Mapping) else given
        pairs: list[Any] = list(items) if isinstance(items, Iterable) else [items]
        try:  # the keys of a JSON object are text
            found = {int(token): float(value) for token, value in pairs if not isinstance(token, float | bool)}
        except (TypeError, ValueError, OverflowError):
            found = {}
        if len(found) != len(pairs) or not all(map(math.isfinite, found.values())):
            raise ConfigError(f"logit_bias={shown(given)}: give {{token id: finite number}}, each token once")
        return tuple(sorted(found.items()))

    def _bad_words(self) -> tuple[str | tuple[int, ...], ...]:
        given = self.bad_words
        if isinstance(given, tuple | list) and all((isinstance(w, str) or _ids(w)) and w for w in given):
            _check_text("bad_words", given)
            return tuple(w if isinstance(w, str) else tuple(w) for w in given)
        need = "give a list of texts or of sequences of token ids, none of them empty"
        raise ConfigError(f"bad_words={shown(given)}: {need}")


def _ids(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(map(whole, value))


def _check_text(name: str, values: Iterable[Any]) -> None:
    for text in values:
        if isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
            why = "not Unicode text (half a surrogate pair, or bytes that are not UTF-8)"
            raise ConfigError(f"{name}={shown(text)}: {why}")


def _check_real(config, name: str, low: float, high: float, hint: str) -> None:
    value = getattr(config, name)
    if not real(value) or not low <= value <= high:
        raise ConfigError(f"{name}={shown(value)}: give a number in {low:g}..{high:g} {hint}")


def _check_budget(name: str, value: Any) -> None:
    if value is not None and not (whole(value) and 1 <= value <= MAX_BUDGET):
        raise ConfigError(f"{name}={shown(value)}: give a whole number in 1..{MAX_BUDGET}")
