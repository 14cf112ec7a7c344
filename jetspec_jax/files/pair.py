"""Targets and heads as they are loaded, whether they fit, and what of a head's training matters to a request.

Nothing here can change an output, for the target decides every token; a wrong pair only drafts in vain. So what cannot
be right is refused, and what may cost acceptance is said once on stderr.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Hashable, Sequence
from typing import Any

import jax

from jetspec_jax.config import HeadConfig, ModelConfig
from jetspec_jax.drafts import families
from jetspec_jax.fields import ConfigError, Fields, shown, switch
from jetspec_jax.files import tokenizer
from jetspec_jax.loop.contracts import Draft, Target

MANY, HARDLY = 32, 1.1  # rounds, and tokens a round (one is the target's own), from which drafts are called useless
TEMPERATURES = 0.01, 100.0  # of a calibration; one beyond makes a depth certain, or a guess among all tokens
_SAID: set[Hashable] = set()


@dataclasses.dataclass(frozen=True)
class LoadedTarget:
    """A frozen target: pure functions, parameters, and what belongs to its files."""

    model: Target
    params: dict[str, Any]
    config: ModelConfig
    dtype: str
    eos: tuple[int, ...]  # every end token that the files name
    source: str
    fingerprint: str
    seconds: float  # that loading took
    _tokenizer: Any = dataclasses.field(repr=False, compare=False)

    @property
    def mesh(self) -> jax.sharding.Mesh | None:
        """The devices that share the work; None is one device."""
        return getattr(self.model.backend, "mesh", None)

    @functools.cached_property
    def tokenizer(self) -> tokenizer.Tokenizer | None:
        """Returns the tokenizer, read when it is first needed; None for a checkpoint without one."""
        return self._tokenizer()

    def encode_messages(
        self, messages: Sequence[dict[str, Any]], chat: bool | None = None, thinking: bool | None = None
    ) -> list[int]:
        """Returns the token ids of a conversation, which needs a chat template.

        thinking: None is off where the template knows the switch.
        """
        switch("chat", chat)
        if self.tokenizer is None:
            raise ConfigError(f"messages: {self.source} has no tokenizer; give token ids (--prompt_ids 1,2,3)")
        if chat is False or not self.tokenizer.has_chat_template:
            why = "it is to be left out" if chat is False else f"{self.source} has none"
            raise ConfigError(f"messages: they need a chat template, and {why}; give a prompt instead")
        return self.tokenizer.encode_chat(messages, _mode(self, thinking))


@dataclasses.dataclass(frozen=True)
class LoadedHead:
    """A draft head for one target."""

    draft: Draft
    params: dict[str, Any]
    config: Any = None  # of its family
    source: str = "own drafter"
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)  # jetspec.json, {} for heads of others
    seconds: float = 0.0  # that loading took
    target_fingerprint: str = ""  # of the target that it was loaded for
    family: str = ""  # name of its row in `drafts.families`


def fits(target, head) -> None:
    """Raises ConfigError where a loaded head is used with another target than it was loaded for."""
    made_for, given = (getattr(x, name, None) for x, name in ((head, "target_fingerprint"), (target, "fingerprint")))
    if made_for and given and made_for != given:
        raise ConfigError(
            f"head: {head.source} was loaded for another target than {target.source}; "
            "load it again: load_head(source, target)"
        )
    config = getattr(head, "config", None)
    for name, ours, theirs in config.differing(target.config) if config else ():
        raise ConfigError(f"head: {name} of {head.source} is {ours}, of {target.source} {theirs}; load the right one")


def thinking(target, head, asked: bool | None) -> bool | None:
    """Returns whether prompts are rendered with room for thinking; None where the template has no such switch.

    asked: what the user says. None is what the head was trained with (`thinking` in its jetspec.json), else off:
    published heads were trained on answers without thinking, while Qwen3's template left alone turns it on.

    Raises:
      ConfigError: asked for, and the template has no switch.
    """
    switch("thinking", asked)
    tokenizer = target.tokenizer
    if tokenizer is None or not tokenizer.knows_thinking:
        if asked is not None:
            what = "has no chat template with a thinking switch"
            raise ConfigError(f"thinking={asked}: {target.source} {what}; leave the option out")
        return None
    trained = metadata(head).get("thinking")
    if asked is None:
        return trained is True
    if trained in (True, False) and trained != asked:
        mode = "with" if trained else "without"
        warn(f"{head.source}: trained {mode} thinking, used the other way; expect shorter acceptance, not other tokens")
    return asked


def _mode(target, asked: bool | None) -> bool | None:
    """`thinking` for a target alone; a method's argument of that name hides it."""
    return thinking(target, None, asked)


def note_length(head, longest: int, window: int | None = None) -> None:
    """Says once that a request goes beyond the rows that the head was trained on.

    window: that is asked for; None is the head's own.
    """
    trained, config = metadata(head).get("training_length"), getattr(head, "config", None)
    window = getattr(getattr(head, "draft", None), "window", 0) if window is None else window
    if isinstance(trained, int) and longest > trained and not 0 < window <= trained:
        said = f"trained on rows of {trained} tokens"
    elif config is not None and longest > config.max_positions:
        said = f"made for {config.max_positions} positions"
    else:
        return
    warn(
        f"{head.source}: {said}, and a request may reach {longest}; beyond, drafts may be accepted less often "
        "(the output stays exact)",
        about=("length", head.source),
    )


def note_acceptance(target, head, rounds: int, length: float) -> None:
    """Says once that next to no draft was accepted in many rounds."""
    if rounds >= MANY and length < HARDLY:
        warn(
            f"{head.source}: {rounds} rounds committed {length:.2f} tokens each, so next to no draft was accepted; "
            "likely causes: trained for another target, other taps or mask id, text unlike its training, a high "
            f"temperature; `python -m jetspec_jax.doctor {target.source} {head.source}` looks for them",
            about=("acceptance", target.source, head.source),
        )


def oddities(config, found: dict[str, Any]) -> dict[str, str]:
    """Returns what is odd about a head's jetspec.json, beside its configuration: one line for each such key."""
    own, said, fields = families.of_config(config.to_hf(), "config.json").name, found.get("family"), Fields(found, "")
    lines: dict[str, str] = {}
    if said is not None and families.named(said) is None:
        known = ", ".join(row.name for row in families.FAMILIES if row.reads)
        lines["family"] = f"family is {shown(said)}; known are {known}, and it is run as {own}"
    elif said not in (None, own):
        lines["family"] = f"family is {shown(said)}, but config.json is that of a {own} head"
    for key, read in (
        ("thinking", lambda: fields.flag("thinking")),
        ("target_fingerprint", lambda: fields.text("target_fingerprint", "")),
        ("training_length", lambda: fields.whole("training_length", config.depth + 1, default=config.depth + 1)),
        ("context_window", lambda: fields.whole("context_window", 0, default=0)),
        ("calibration", lambda: temperatures(config, fields)),
    ):
        try:
            read()
        except ConfigError as error:
            lines[key] = str(error).removeprefix(": ")
    return lines


def temperatures(config, fields: Fields) -> tuple[float, ...]:
    """Returns the temperatures of a head's jetspec.json, one for each position of its block; () where it has none.

    Raises:
      ConfigError: they cannot be meant, or are for a family that has no use for them.
    """
    if not fields.has("calibration"):
        return ()
    table = fields.table("calibration")
    if not isinstance(config, HeadConfig):
        raise fields.wrong("calibration", "only heads that draft a block have one")
    table.whole("version", 1, 1)
    found = table.reals("temperature", *TEMPERATURES)
    if len(found) != config.depth:
        raise table.wrong("temperature", f"{config.depth} numbers are needed, one for each drafted position")
    table.text("fitted_on", "")
    for key in ("ece_before", "ece_after"):
        table.real(key, 0, 1, 0.0)
    return found


def metadata(head) -> dict:
    """Returns a head's jetspec.json; {} for plain decoding and for heads of others."""
    return getattr(head, "metadata", None) or {}


def warn(line: str, about: Hashable = None) -> None:
    """Says one line on stderr, the first time that it is about this; by itself a line is about itself."""
    about = line if about is None else about
    if about not in _SAID:
        _SAID.add(about)
        print(f"warning: {line}", file=sys.stderr, flush=True)


def rendered(prompts: Sequence, chat: bool | None, asked: bool | None) -> bool:
    """Returns whether any prompt goes through a template.

    Raises:
      ConfigError: a thinking mode is asked for, and no prompt is rendered, so it would be ignored.
    """
    texts = chat is not False and any(isinstance(prompt, str) for prompt in prompts)
    if asked is not None and not texts:
        why = "the chat template is left out" if chat is False else "token ids are taken as they are"
        raise ConfigError(f"thinking={asked}: {why}; leave the option out")
    return texts
