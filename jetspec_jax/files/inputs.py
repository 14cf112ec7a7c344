"""Prompts as a caller gives them, and their token ids."""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from typing import Any

from jetspec_jax.fields import ConfigError, shown, switch, whole
from jetspec_jax.files import pair

Prompt = str | Sequence[int]
WANTED = "give text, token ids, or a list of either (messages: target.encode_messages)"


def listed(prompts: Any) -> tuple[list[Prompt], bool]:
    """Returns prompts as a list, and whether it was one prompt alone.

    What a tokenizer returns is read by its `input_ids`, without what its attention mask hides. Iterables of other kinds
    are refused: a mapping or a set would be taken for a list of prompts.

    Raises:
      ConfigError: these are no prompts, or none.
    """
    if isinstance(prompts, Mapping) or hasattr(prompts, "input_ids"):
        prompts = _from_tokenizer(prompts)
    if isinstance(prompts, str):
        return [prompts], True
    prompts = _plain(prompts)
    if not isinstance(prompts, list | tuple):
        raise ConfigError(f"prompts={shown(prompts)}: {WANTED}")
    if not prompts:
        raise ConfigError("prompts: the list is empty; give at least one prompt")
    if all(whole(item) for item in prompts):
        return [[int(i) for i in prompts]], True
    return [_one(prompt) for prompt in prompts], False


def rows(prompts: Any) -> list[list[int]]:
    """Returns the token ids of several prompts, as `listed` reads them; one prompt alone is a list of one.

    Raises:
      ConfigError: one of them is text, which only a target can encode.
    """
    found = listed(prompts)[0]
    for prompt in found:
        if isinstance(prompt, str):
            raise ConfigError(f"prompts: {shown(prompt)} is text; give token ids (speculate.prompt_ids makes them)")
    return [list(prompt) for prompt in found if not isinstance(prompt, str)]


def _one(prompt: Any) -> Prompt:
    """Returns one prompt of a list: text, or ids as Python numbers."""
    if isinstance(prompt, Mapping) or hasattr(prompt, "input_ids"):
        prompt = _from_tokenizer(prompt)
    prompt = prompt if isinstance(prompt, str) else _plain(prompt)
    if isinstance(prompt, str):
        return prompt
    if not isinstance(prompt, list | tuple) or not all(whole(i) for i in prompt):
        raise ConfigError(f"prompts: {shown(prompt)} is no prompt; {WANTED}")
    return [int(i) for i in prompt]


def _from_tokenizer(encoded: Any) -> Any:
    """Returns the ids of a tokenizer's output, one list or several, without padding."""
    if not (isinstance(encoded, Mapping) and "input_ids" in encoded):
        if not hasattr(encoded, "input_ids"):
            keys = ", ".join(map(shown, list(encoded)[:3]))
            raise ConfigError(f"prompts: a mapping with {keys or 'nothing in it'} is no prompt; {WANTED}")
        encoded = {"input_ids": encoded.input_ids, "attention_mask": getattr(encoded, "attention_mask", None)}
    ids, mask = _plain(encoded["input_ids"]), encoded.get("attention_mask")
    mask = None if mask is None else _plain(mask)
    if not isinstance(ids, list | tuple):
        raise ConfigError(f"prompts: input_ids is {shown(ids)}; {WANTED}")
    if mask is None:
        return ids
    several = bool(ids) and isinstance(ids[0], list | tuple)
    if not several:
        return _seen(ids, mask)
    if not isinstance(mask, list | tuple) or len(mask) != len(ids):
        raise ConfigError(f"prompts: attention_mask is {shown(mask)} for {len(ids)} prompts; give one row for each")
    return [_seen(*pair) for pair in zip(ids, mask, strict=True)]


def _seen(ids: Any, mask: Any) -> list[Any]:
    """Returns the ids of one prompt that its mask shows."""
    if not isinstance(ids, list | tuple) or not isinstance(mask, list | tuple) or len(ids) != len(mask):
        raise ConfigError(
            f"prompts: attention_mask is {shown(mask)} for input_ids {shown(ids)}; give a number for each id"
        )
    return [i for i, seen in zip(ids, mask, strict=True) if seen]


def _plain(value: Any) -> Any:
    """Returns arrays (of numpy, jax, torch) as lists; everything else as it is."""
    return value.tolist() if hasattr(value, "tolist") and hasattr(value, "shape") else value


def prompt_ids(target, prompt: Any, chat: bool | None = None, thinking: bool | None = None) -> list[int]:
    """Returns token ids of a prompt: ids as they are, text through the chat template unless `chat` is False.

    Args:
      target: what `load_target` returns.
      prompt: text or ids.
      chat: whether text goes through the chat template; None uses it where there is one.
      thinking: None is off where the template knows the switch.
    """
    switch("chat", chat)
    if not isinstance(prompt, str):
        found = listed([prompt] if isinstance(prompt, numbers.Integral) else prompt)
        if not found[1] or isinstance(found[0][0], str):
            raise ConfigError(f"prompt={shown(prompt)}: {WANTED}")
        return list(found[0][0])
    if target.tokenizer is None:
        raise ConfigError(f"prompt: {target.source} has no tokenizer; give token ids")
    if not prompt:
        raise ConfigError("prompt='': the prompt is empty; give at least one character")
    if chat and not target.tokenizer.has_chat_template:
        raise ConfigError(f"chat: {target.source} has no chat template; leave it out")
    if chat is False or not target.tokenizer.has_chat_template:
        return target.tokenizer.encode(prompt, begin=True)
    mode = pair.thinking(target, None, thinking)
    return target.tokenizer.encode_chat([{"role": "user", "content": prompt}], mode)
