"""What a caller may choose: the candidate tree, and how the next token is chosen and when to stop.

Every option is written down once, as a field of `TreeConfig` or `SamplingConfig` with an `Option` beside it: its
meaning, its range and its default. Flags of the commands (`command.py`), keys of prompt rows, checks and the table in
docs/options.md are made of these. Both classes check themselves when they are made, so that a wrong value is refused
with one line that names the option, the value and the valid range, before any array is touched.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jetspec_jax.fields import ConfigError, option, shown, table, whole

TREE_BUILDERS = ("best_first", "accum_logp")
AUTO = "auto"  # a budget that follows what rounds cost and bring
BUDGET_RULES = ("best", "caddtree", "cast")
DTYPES = ("float32", "bfloat16", "float16")  # that weights may have
BACKENDS = ("auto", "xla", "cudnn", "pallas")  # that may compute a layer
AXES = ("data", "model", "expert")  # of a mesh of devices: rows of a batch, parts of a layer, experts
MIN_TEMPERATURE = 1e-4  # anything colder is greedy
MAX_BUDGET = 1024  # a tree's mask and search grow with its square
SHARPNESS = 1.2  # by measurement on the demo pair (docs/measurements.md), together with loop.choice.NOISE_SHARE


def mesh_axes(given: str) -> dict[str, int]:
    """Returns the sizes of a mesh's axes, out of "data=2,model=4"; `data` and `model` are 1 where they are not named.

    Raises:
      ConfigError: it cannot be read, or an axis is unknown or named twice.
    """
    found: dict[str, int] = {}
    for word in given.split(",") if isinstance(given, str) else [""]:
        name, _, size = (part.strip() for part in word.partition("="))
        if name not in AXES or name in found or not (size.isdecimal() and 1 <= len(size) < 8 and int(size)):
            known = ", ".join(f"{axis}=N" for axis in AXES)
            raise ConfigError(
                f"mesh={shown(given)}: {shown(word)} is none of {known}, each at most once; give e.g. data=2,model=4"
            )
        found[name] = int(size)
    return {axis: found.get(axis, 1) for axis in AXES if axis in found or axis != "expert"}


def _check_table(config) -> None:
    """Checks every value, and makes Python's own of numbers of other kinds (numpy's): results are written as JSON."""
    for name, described in table(type(config)).items():
        value = getattr(config, name)
        if value is not None or described.default is not None:
            described.check(value)
        if not isinstance(value, int | float | str) and described.kind in ("whole", "number") and value is not None:
            object.__setattr__(config, name, int(value) if described.kind == "whole" else float(value))


@dataclasses.dataclass(frozen=True)
class TreeConfig:
    """The candidate tree of a round.

    Sampled requests: the noise that will decide the target's choice is known before it is made, so candidates are
    ranked by `sharpness * (draft logits + 0.85 * temperature * noise)`; 0 ranks them by the draft logits alone. It
    decides how much of the output a round guesses, and never what the output is.

    Raises:
      ConfigError: a value is outside its range.
    """

    budget: int | str | None = option(
        "whole", None,
        "Tree nodes verified a round, root included; 1 is plain decoding; auto: as many as pay best, by what rounds "
        "bring and what they cost here (measured at the first start, and kept). Default: 8 on a CPU, else 64.",
        low=1, high=MAX_BUDGET, choices=(AUTO,),
    )  # fmt: skip
    width: int | None = option(
        "whole", None,
        "Candidates a depth (best_first, default 64) or children a node (accum_logp, default 7; eagle3, 10; pctree, "
        "4).",
        low=1, high=MAX_BUDGET,
    )  # fmt: skip
    depth: int | None = option(
        "whole", None, "Longest drafted path. Default: all that the head drafts.", low=1, high=MAX_BUDGET
    )
    builder: str = option(
        "choice", "best_first",
        "best_first: the most probable nodes; accum_logp: whole sibling groups, as the published engine builds them.",
        name="tree", choices=TREE_BUILDERS,
    )  # fmt: skip
    window: int | None = option(
        "whole", None,
        "Committed tokens, the last ones, that a head looks back at; 0 is all. Changes the speed and never the output. "
        "Default: as the head's jetspec.json says, else all.",
    )  # fmt: skip
    sharpness: float = option(
        "number", SHARPNESS,
        "How far sampled drafts trust the known noise. Changes the speed and never the output.",
        high=100.0, off="0 leaves the noise out",
    )  # fmt: skip
    scorer: str = option(
        "choice", "own",
        "own: the scorer that a head may have beside it tells siblings' children apart; none: a depth's nodes share a "
        "row.", choices=("own", "none"),
    )  # fmt: skip
    rule: str = option(
        "choice", "best",
        "How auto chooses. best: the most tokens a second of all sizes; caddtree, cast: the rules of these papers, "
        "which stop at the first node or size that does not pay.",
        name="budget_rule", choices=BUDGET_RULES,
    )  # fmt: skip
    prune: float = option(
        "number", 0.0,
        "Nodes whose path the draft takes to be less probable are not verified. Changes the speed, never the output.",
        high=1.0, off="0 verifies all",
    )  # fmt: skip

    def __post_init__(self):
        _check_table(self)
        if self.prune and self.builder != "best_first" and self.width != 1:
            raise ConfigError(
                f"prune={self.prune:g} contradicts tree={self.builder}, whose nodes are not in the order of their "
                "probabilities; use best_first"
            )


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How the next token is chosen and when to stop; one rule for plain and speculative decoding.

    The options act in this order, which is that of transformers: logit_bias, repetition_penalty, presence_penalty and
    frequency_penalty, bad_words, min_new_tokens, temperature, top_k, top_p, min_p. What each means stands beside it.
    In Python `logit_bias` is a mapping or pairs, and `bad_words` may also hold sequences of token ids; the same letters
    made of other tokens are not noticed. `eos` None takes the target's own end tokens. `budget` is for requests that
    differ from their batch mates.

    Raises:
      ConfigError: a value is outside its range, or contradicts another.
    """

    max_new_tokens: int = option("whole", 256, "Most tokens to generate.")
    temperature: float = option("number", 0.0, "Divides the logits before a token is drawn.", high=1e30,
                                 off="0 is greedy")  # fmt: skip
    seed: int = option(
        "whole", 0, "Seed of sampling; in f32 a seed gives the same tokens with any method and budget.", high=2**32 - 1
    )
    eos: Sequence[int] | None = None
    top_k: int = option("whole", 0, "Sample among the k largest logits, and what equals the k-th.", off="0 keeps all")
    top_p: float = option(
        "number", 1.0, "Sample among the fewest tokens that have this probability together.",
        high=1.0, above=True, off="1 keeps all",
    )  # fmt: skip
    min_p: float = option(
        "number", 0.0, "Sample among tokens of at least this share of the largest probability.",
        high=1.0, off="0 keeps all",
    )  # fmt: skip
    repetition_penalty: float = option(
        "number", 1.0, "Divides positive and multiplies negative logits of tokens in prompt or output.",
        high=1e6, above=True, off="1 is off",
    )  # fmt: skip
    presence_penalty: float = option(
        "number", 0.0, "Taken from the logits of tokens in the output, once.", low=-1e6, high=1e6, off="0 is off"
    )
    frequency_penalty: float = option(
        "number", 0.0, "Taken from the logits of tokens in the output, once for each time.",
        low=-1e6, high=1e6, off="0 is off",
    )  # fmt: skip
    logit_bias: Mapping[int, float] | Mapping[str, float] | Sequence[tuple[int, float]] = option(
        "bias", (), "Added to the logits of some tokens: TOKEN_ID:NUMBER,... e.g. 5:1.5,7:-100."
    )  # kept as sorted pairs
    bad_words: Sequence[str | Sequence[int]] = option(
        "texts", (), "A text whose tokens the output will not contain in a row, alone or after a space; repeatable."
    )
    min_new_tokens: int = option("whole", 0, "No end token, stop token or stop string before this many tokens.")
    stop: str | Sequence[str] = option("texts", (), "A text that ends the output; repeatable.")
    stop_token_ids: Sequence[int] = option("ids", (), "Token ids that end the output, beside the target's own: 1,2,3.")
    ignore_eos: bool = option("flag", False, "Go on after the target's own end tokens.")
    include_stop_text: bool = option("flag", False, "Keep the text of the stop string or stop token in the text.")
    logprobs: bool = option(
        "flag", False,
        "With --json: log-probability of each new token under the target's own distribution (temperature 1, before any "
        "other option).",
    )  # fmt: skip
    budget: int | str | None = option(
        "whole", None, "Tree nodes of this request's rounds, or auto. Default: the command's.", low=1, high=MAX_BUDGET,
        choices=(AUTO,),
    )  # fmt: skip

    def __post_init__(self):
        _check_table(self)
        if self.min_new_tokens > self.max_new_tokens:
            raise ConfigError(
                f"min_new_tokens={self.min_new_tokens} contradicts max_new_tokens={self.max_new_tokens}; "
                "give at most as many"
            )
        if self.eos is not None and not _ids(self.eos):
            raise ConfigError(f"eos={shown(self.eos)}: give a tuple of token ids, or None for the target's own")
        if self.ignore_eos and self.eos:
            raise ConfigError(f"ignore_eos contradicts eos={shown(self.eos)}; leave one of them out")
        if not _ids(self.stop_token_ids):
            raise ConfigError(f"stop_token_ids={shown(self.stop_token_ids)}: give a list of token ids")
        put = lambda name, value: object.__setattr__(self, name, value)  # frozen, and hashable from here on
        put("eos", None if self.eos is None else tuple(map(int, self.eos)))
        put("stop", self._stop())
        put("stop_token_ids", tuple(map(int, self.stop_token_ids)))
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
        try:  # the keys of a JSON object are text
            pairs: list[Any] = list(items) if isinstance(items, Iterable) else [items]
            found = {int(token): float(value) for token, value in pairs if not isinstance(token, float | bool)}
        except (TypeError, ValueError, OverflowError):
            pairs, found = [None], {}
        if len(found) != len(pairs) or not all(map(math.isfinite, found.values())):
            raise ConfigError(f"logit_bias={shown(given)}: give {{token id: finite number}}, each token once")
        return tuple(sorted(found.items()))

    def _bad_words(self) -> tuple[str | tuple[int, ...], ...]:
        given = self.bad_words
        if isinstance(given, tuple | list) and all((isinstance(w, str) or _ids(w)) and w for w in given):
            _check_text("bad_words", given)
            return tuple(w if isinstance(w, str) else tuple(map(int, w)) for w in given)
        raise ConfigError(f"bad_words={shown(given)}: give a list of texts or of sequences of token ids, none empty")


def _ids(value: Any) -> bool:
    return isinstance(value, tuple | list) and all(map(whole, value))


def _check_text(name: str, values: Iterable[Any]) -> None:
    for text in values:
        if isinstance(text, str) and any("\ud800" <= c <= "\udfff" for c in text):
            raise ConfigError(f"{name}={shown(text)}: not Unicode text (half a surrogate pair, or bytes not in UTF-8)")
