"""Conversations of rows, and where in the chat template's rendering the assistant's own text stands.

Nothing is searched for: an answer such as "im" or "end" stands in the template's marks too. A turn begins where the
template opens one for the target, and ends where the same conversation with a mark in the place of the turn goes on
after the mark.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

MARK = "\u2042"  # stands for a turn; repeated until no text of the conversation has it
ROLES = ("system", "user", "assistant", "tool")
# What a turn of the assistant may hold beside its content. It must be in the text that is learnt, else the target is
# taught to say something else than the row does.
BESIDE = ("tool_calls", "function_call", "reasoning_content", "reasoning", "thinking", "refusal")

Message = dict[str, Any]
Conversation = list[Message]
Render = Callable[[Conversation, bool], str]  # messages and whether the assistant's turn is opened at the end


class Unusable(Exception):
    """A row gives nothing to learn from; the text is the reason under which it is counted."""


BEYOND = "a token beyond the target's vocabulary"  # of a tokenizer that knows more than the model


class Piece(NamedTuple):
    """A part of a rendered row, tokenised apart from the others."""

    text: str
    said: bool  # by the assistant
    closing: str = ""  # what `text` begins with where it follows an answer: the marks that end the assistant's turn


def conversation(value: Any) -> Conversation:
    """Returns the messages of a {"messages"} or {"prompt", "response"} row, content as text.

    Raises:
      Unusable: they are no conversation that a template could show.
    """
    if not isinstance(value, dict):
        raise Unusable("not a JSON object")
    messages = value.get("messages")
    if messages is None and value.get("prompt") is not None:
        pair = (("user", value["prompt"]), ("assistant", value.get("response")))
        messages = [{"role": role, "content": text} for role, text in pair if role == "user" or text is not None]
    if messages is None:
        raise Unusable("neither messages, prompt and response, nor text")
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise Unusable("messages is no list")
    if not messages:
        raise Unusable("no messages")
    if value.get("tools"):
        raise Unusable("tools beside the messages, which are not rendered")
    found = [_message(message) for message in messages]
    spoken = [m["role"] for m in found if m["role"] != "system"]
    if any(m["role"] == "system" for m in found[1:]):
        raise Unusable("a system message after the first")
    if not spoken:
        raise Unusable("a system message alone")
    if spoken[0] != "user":
        raise Unusable("the assistant speaks first" if spoken[0] == "assistant" else "a tool speaks first")
    if any(a == b != "tool" for a, b in itertools.pairwise(spoken)):
        raise Unusable("two turns of one speaker in a row")
    return found


def _message(message: Any) -> Message:
    if not isinstance(message, dict) or message.get("role") not in ROLES:
        raise Unusable(f"a role other than {', '.join(ROLES[:-1])} and {ROLES[-1]}")
    content = message.get("content")
    if isinstance(content, list | tuple):
        content = "".join(_part(part) for part in content)
    called = message["role"] == "assistant" and (message.get("tool_calls") or message.get("function_call"))
    if content is None and called:
        content = ""
    if not isinstance(content, str) or not (content.strip() or called):
        raise Unusable("a message without content")
    kept = {key: x for key, x in message.items() if x is not None}  # columns that another row of the table needs
    return kept | {"content": content}


def _part(part: Any) -> str:
    if isinstance(part, str):
        return part
    kind = part.get("type", "text") if isinstance(part, dict) else type(part).__name__
    if kind != "text" or not isinstance(part.get("text"), str):
        raise Unusable(f"a part of a message that is no text but {str(kind)[:40]!r}")
    return part["text"]


def question(value: Any) -> Conversation:
    """Returns the conversation up to where the assistant's last turn begins: what the target is asked.

    Raises:
      Unusable: the row asks for no answer.
    """
    if plain(value):
        raise Unusable("plain text, which asks for no answer")
    found = conversation(value)
    return found[:-1] if found[-1]["role"] == "assistant" else found


def plain(value: Any) -> bool:
    """Whether a row is text alone. A column that another row of the table needs may be there, and empty."""
    given = {name for name, content in value.items() if content is not None} if isinstance(value, dict) else set()
    return "text" in given and not {"messages", "prompt"} & given


def pieces(messages: Conversation, render: Render) -> Iterator[Piece]:
    """Yields the rendered conversation up to its last answer, cut into what the assistant said and what it did not.

    Raises:
      Unusable: there is no answer, or the template shows one in a form that cannot be learnt.
    """
    while messages and messages[-1]["role"] != "assistant":
        messages = messages[:-1]
    if not messages:
        raise Unusable("no assistant turn")
    whole = render(messages, False)
    mark = MARK
    while mark in whole:
        mark += MARK
    at, closing = 0, ""
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        _shown(messages, i, whole, render)
        start, stop, ends = _span(messages, i, whole, mark, render)
        if not at <= start <= stop:
            raise Unusable("an answer that the chat template does not show in its place")
        yield Piece(whole[at:start], False, closing)
        yield Piece(whole[start:stop], True)
        at, closing = stop, ends
    yield Piece(whole[at:], False, closing)


def _span(messages: Conversation, i: int, whole: str, mark: str, render: Render) -> tuple[int, int, str]:
    """Where turn i stands in `whole`, and the marks that end it."""
    stand_in = {"role": "assistant", "content": mark}
    marked = render([*messages[:i], stand_in, *messages[i + 1 :]], False)
    alone = render([*messages[:i], stand_in], False)
    if marked.count(mark) != 1 or alone.count(mark) != 1:
        raise Unusable("an answer that the chat template does not show as it is")
    before, _, after = marked.partition(mark)
    if not whole.endswith(after):
        raise Unusable("an answer that changes how the chat template shows what follows")
    # Where the template writes this turn after the same marks that open one for the target, it begins there; earlier
    # turns may be written otherwise, and begin where the mark did.
    starts = [len(x) for x in (render(messages[:i], True), before) if whole.startswith(x)]
    if not starts:
        raise Unusable("an answer that the chat template shows in another mode of thinking")
    ends = alone.partition(mark)[2]
    while not after.startswith(ends):  # what only the last turn of a conversation has
        ends = ends[:-1]
    return starts[0], len(whole) - len(after), ends


def _shown(messages: Conversation, i: int, whole: str, render: Render) -> None:
    """Refuses a turn whose other parts than its content leave no trace in the rendering."""
    for key in BESIDE:
        thought = "reason" in key or key == "thinking"  # earlier ones are left out, in decoding too
        if not messages[i].get(key) or (thought and i != len(messages) - 1):
            continue
        without = {k: v for k, v in messages[i].items() if k != key}
        try:
            same = render([*messages[:i], without, *messages[i + 1 :]], False) == whole
        except Exception:  # a turn that is nothing else may be refused
            same = False
        if same:
            raise Unusable(f"{key} that the chat template does not show")
