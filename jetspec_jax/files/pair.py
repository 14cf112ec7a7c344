"""Whether a head belongs to a target, and what of its training matters to a request.

Nothing here can change an output, for the target decides every token; a wrong pair only drafts in vain. So what cannot
be right is refused, and what may cost acceptance is said once on stderr.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jetspec_jax.config import ConfigError

FAMILIES = {"jetspec": True, "dflash": False}  # whether the block of the family is causal
MANY, HARDLY = 32, 1.1  # rounds, and tokens a round (one is the target's own), from which drafts are called useless
_SAID: set[str] = set()


def check(target, head) -> None:
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
    """Whether prompts are rendered with room for thinking; None where the template has no such switch.

    asked: what the user says. None is what the head was trained with (`thinking` in its jetspec.json), else off:
    published heads were trained on answers without thinking, while Qwen3's template left alone turns it on.

    Raises:
      ConfigError: asked for, and the template has no switch.
    """
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


def note_length(head, longest: int) -> None:
    """Says once that a request goes beyond the rows that the head was trained on."""
    trained, config = metadata(head).get("training_length"), getattr(head, "config", None)
    if isinstance(trained, int) and longest > trained:
        said = f"trained on rows of {trained} tokens"
    elif config is not None and longest > config.max_positions:
        said = f"made for {config.max_positions} positions"
    else:
        return
    warn(
        f"{head.source}: {said}, and a request may reach {longest}; beyond, drafts may be accepted less often "
        "(the output stays exact)"
    )


def note_acceptance(target, head, rounds: int, length: float) -> None:
    """Says once that next to no draft was accepted in many rounds."""
    if rounds >= MANY and length < HARDLY:
        warn(
            f"{head.source}: {rounds} rounds committed {length:.2f} tokens each, so next to no draft was accepted; "
            "likely causes: trained for another target, other taps or mask id, text unlike its training, a high "
            f"temperature; `python -m jetspec_jax.doctor {target.source} {head.source}` looks for them"
        )


def oddities(config, found: dict) -> list[str]:
    """What is odd about a head's jetspec.json, beside its configuration; one line each."""
    lines, family = [], found.get("family")
    if family is not None and not (isinstance(family, str) and family in FAMILIES):
        lines.append(f"family is {family!r}; known are {', '.join(FAMILIES)}, and it is run as one of these")
    elif family is not None and FAMILIES[family] != config.causal:
        lines.append(f"family is {family!r}, but config.json says that the block is {_block(config.causal)}")
    if found.get("thinking") is not None and not isinstance(found["thinking"], bool):
        lines.append(f"thinking is {found['thinking']!r}; true, false or null is understood")
    length = found.get("training_length")
    if length is not None and (not isinstance(length, int) or isinstance(length, bool) or length < config.block_size):
        lines.append(f"training_length is {length!r}; a number of tokens of at least a block is understood")
    return lines


def metadata(head) -> dict:
    """A head's jetspec.json; {} for plain decoding and for heads of others."""
    return getattr(head, "metadata", None) or {}


def warn(line: str) -> None:
    """One line on stderr, the first time."""
    if line not in _SAID:
        _SAID.add(line)
        print(f"warning: {line}", file=sys.stderr, flush=True)


def rendered(prompts: Sequence, chat: bool | None, asked: bool | None) -> bool:
    """Whether any prompt goes through a template.

    Raises:
      ConfigError: a thinking mode is asked for, and no prompt is rendered, so it would be ignored.
    """
    texts = chat is not False and any(isinstance(prompt, str) for prompt in prompts)
    if asked is not None and not texts:
        why = "the chat template is left out" if chat is False else "token ids are taken as they are"
        raise ConfigError(f"thinking={asked}: {why}; leave the option out")
    return texts


def _block(causal: bool) -> str:
    return "causal" if causal else "bidirectional"
