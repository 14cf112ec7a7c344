"""Prompt files: one parser of a row for everything that reads one, and how a row becomes token ids.

A file is JSONL. A row is one of {"prompt": text}, {"messages": [...]} and {"prompt_ids": [...]}, with an `id` if it
likes, `thinking` (true or false: the mode that the chat template renders it in), and, where the reader allows them,
options of `SamplingConfig` of its own.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.fields import ConfigError, Fields, shown
from jetspec_jax.files import conversation, text
from jetspec_jax.files.inputs import prompt_ids
from jetspec_jax.options import SamplingConfig

KINDS = ("prompt", "messages", "prompt_ids")
OPTIONS = tuple(field.name for field in dataclasses.fields(SamplingConfig))
SHAPES = "prompt must be text, messages a list of {role, content}, prompt_ids a list of ids"


@dataclasses.dataclass(frozen=True)
class PromptRow:
    """One row of a prompt file.

    where: file and line, for messages. prompt: text, messages, or token ids. thinking: the row's own mode, None where
    it names none. options: of `SamplingConfig`, as the row gives them.
    """

    where: str
    prompt: str | list[dict[str, Any]] | list[int]
    id: Any = None
    thinking: bool | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def rendered(self) -> bool:
        """Whether a chat template may be used: ids are taken as they are."""
        return isinstance(self.prompt, str) or isinstance(self.prompt[0], dict)

    def mode(self, usual: bool | None) -> bool | None:
        """Returns the thinking mode: the row's own, else `usual`; None for ids."""
        return (usual if self.thinking is None else self.thinking) if self.rendered else None

    def encode(self, target, thinking: bool | None = None, chat: bool | None = None) -> list[int]:
        """Returns the token ids of the prompt.

        Args:
          target: what `load_target` returns; ids need no tokenizer.
          thinking: the mode of rows that name none; None is off where the template knows it.
          chat: whether text goes through the chat template; None uses it where there is one.

        Raises:
          ConfigError: the target cannot render or encode it; the line begins with file and line.
        """
        try:
            if chat is False and self.thinking is not None:
                raise ConfigError(f"thinking={self.thinking}: the chat template is left out; leave one of them out")
            if isinstance(self.prompt, list) and self.rendered:
                return target.encode_messages(self.prompt, chat, self.mode(thinking))
            return prompt_ids(target, self.prompt, chat, self.mode(thinking))
        except ConfigError as error:
            raise ConfigError(f"{self.where}: {error}") from None

    def sampling(self, base: SamplingConfig) -> SamplingConfig:
        """Returns `base` with the row's own options."""
        try:
            return dataclasses.replace(base, **self.options)
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"{self.where}: {error}") from None


def read(path: str | Path, options: Collection[str] = ()) -> list[PromptRow]:
    """Returns the rows of a prompt file, all checked.

    Args:
      options: names of `SamplingConfig` that a row may give; any other is refused.

    Raises:
      ConfigError: there is no row, or a row is none of the three kinds; the line names file, line, key and value.
    """
    path = Path(os.path.expanduser(path))  # pathlib's own raises where there is no such home
    rows = [_row(value, f"{path}:{number}", options) for number, value in text.json_lines(path)]
    if not rows:
        raise ConfigError(f"{path}: no prompt in it")
    return rows


def encode(target, path: str | Path, thinking: bool | None = None) -> list[list[int]]:
    """Returns the token ids of all rows of a file whose rows have no options; arguments as of `PromptRow.encode`."""
    return [row.encode(target, thinking) for row in read(path)]


def _row(raw: Any, where: str, options: Collection[str]) -> PromptRow:
    fields = Fields(raw, where)
    given = [key for key in KINDS if key in fields.raw]
    if len(given) != 1:
        raise ConfigError(f'{where}: give one of {{"prompt": "..."}}, {{"messages": [...]}}, {{"prompt_ids": [...]}}')
    known = (*KINDS, "id", "thinking", *options)
    for key in sorted(fields.raw.keys() - set(known)):
        if key in OPTIONS and not options:
            raise ConfigError(
                f"{where}: {key}: options of a line are for decode.py; here all prompts have the command's own; "
                "take it out"
            )
        raise ConfigError(f"{where}: unknown key {shown(key)}; known are {', '.join(known)}")
    kind = given[0]
    if kind == "prompt_ids" and fields.has("thinking"):
        raise ConfigError(f"{where}: thinking with prompt_ids: token ids are taken as they are; leave it out")
    try:
        json.dumps(fields.raw.get("id"), allow_nan=False)
    except (ValueError, RecursionError):
        raise fields.wrong("id", "it could not be written as JSON again; give a text or a number") from None
    return PromptRow(
        where,
        _prompt(fields, kind),
        fields.raw.get("id"),
        fields.flag("thinking") if fields.has("thinking") else None,
        {name: fields.raw[name] for name in options if name in fields.raw},
    )


def _prompt(fields: Fields, kind: str) -> str | list[dict[str, Any]] | list[int]:
    value = fields.raw[kind]
    if not isinstance(value, str if kind == "prompt" else list):
        raise fields.wrong(kind, SHAPES)
    if not value:
        raise fields.wrong(kind, "it is empty; give at least one character, message or id")
    if kind == "prompt":
        return value
    if kind == "prompt_ids":
        try:
            return list(fields.wholes(kind))
        except ConfigError as error:
            raise ConfigError(f"{error} ({SHAPES})") from None
    try:
        return conversation.checked(value)
    except ConfigError as error:
        raise ConfigError(f"{fields.where}: {error}") from None
