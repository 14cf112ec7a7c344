"""Messages of a conversation, checked once for everything that renders them.

A message is {"role": text, "content": text}. Content may come as a list of text parts, which are joined, and a turn of
the assistant may hold tool calls beside its content or instead of it. Other keys go to the chat template as they are.
"""

from __future__ import annotations

from typing import Any

from jetspec_jax.fields import ConfigError, Fields, shown

CALLS = ("tool_calls", "function_call")  # under its new and its old name


def checked(messages: Any) -> list[dict[str, Any]]:
    """Returns the messages with content as text, in their order.

    Raises:
      ConfigError: they are no list of messages, or one of them holds what is no text; the line says which and what.
    """
    if not isinstance(messages, list | tuple) or not messages:
        raise ConfigError(f"messages is {shown(messages)}; a list of {{role, content}} is needed")
    return [_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _message(message: Any, where: str) -> dict[str, Any]:
    fields = Fields(message, where)
    fields.text("role")
    content = fields.raw.get("content")
    fields.tables("tool_calls")
    if isinstance(content, list | tuple):
        content = "".join(_part(part, f"{where}: content[{i}]") for i, part in enumerate(content))
    elif content is None and any(fields.raw.get(key) for key in CALLS):
        content = ""
    elif not isinstance(content, str):
        raise fields.wrong("content", "text, or a list of text parts, is needed")
    return dict(fields.raw) | {"content": content}


def _part(part: Any, where: str) -> str:
    if isinstance(part, str):
        return part
    fields = Fields(part, where)
    kind = fields.text("type", "text")
    if kind != "text":
        raise ConfigError(f"{where} is of type {shown(kind)}; only parts of type 'text' can be read")
    return fields.text("text")
