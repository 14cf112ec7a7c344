"""Bodies of requests: OpenAI's keys and ours, read into prompts and options.

A key whose value is null counts as absent. One that is not known, or asks for what this server cannot do, is refused by
its name; nothing that a caller asks for is ignored.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import secrets
from collections.abc import Callable, Mapping
from typing import Any

from jetspec_jax.engine.kit import TOP
from jetspec_jax.fields import MOST, ConfigError, Fields, shown, table, whole
from jetspec_jax.files import conversation, pair, text
from jetspec_jax.files.inputs import prompt_ids
from jetspec_jax.options import SamplingConfig
from jetspec_jax.serve.errors import ApiError

MOST_CHOICES = 128
MOST_STOPS = 16
SEEDS = 2**32
# Keys that become options of a request, and the options.
OPTIONS = {
    "temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p",
    "presence_penalty": "presence_penalty", "frequency_penalty": "frequency_penalty",
    "repetition_penalty": "repetition_penalty", "logit_bias": "logit_bias", "bad_words": "bad_words", "stop": "stop",
    "stop_token_ids": "stop_token_ids", "ignore_eos": "ignore_eos", "min_tokens": "min_new_tokens",
    "include_stop_str_in_output": "include_stop_text", "budget": "budget", "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
}  # fmt: skip
KNOWN = table(SamplingConfig)
SHARED = {"model", "stream", "stream_options", "n", "seed", "logprobs", "return_tree", *OPTIONS}
CHAT = SHARED | {"messages", "top_logprobs", "thinking", "chat_template_kwargs"}
COMPLETION = SHARED - {"max_completion_tokens"} | {"prompt"}
# Keys that change nothing here, with the values that ask for nothing; None is any value.
HARMLESS: dict[str, tuple[Any, ...] | None] = {
    "user": None, "metadata": None, "safety_identifier": None, "prompt_cache_key": None, "store": (False,),
    "service_tier": ("auto", "default"), "response_format": ({"type": "text"},), "tools": ([],), "functions": ([],),
    "tool_choice": ("none", "auto"), "function_call": ("none", "auto"), "modalities": (["text"],), "echo": (False,),
    "suffix": ("",), "best_of": (1,), "use_beam_search": (False,), "parallel_tool_calls": (True, False),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Asked:
    """What a body asks for.

    prompts: token ids of each. option: resolved by nobody yet; its seed is that of choice 0. choices: of each prompt.
    usage: whether a stream ends with its usage. top: most probable tokens beside each, None where no log-probabilities
    are asked for. draw: whether a stream has the tree of the last round. drawn_seed: whether the seed is ours.
    """

    prompts: list[list[int]]
    option: SamplingConfig
    choices: int
    stream: bool
    usage: bool
    top: int | None
    draw: bool
    chat: bool


def parse(data: bytes) -> Mapping[str, Any]:
    """Returns the JSON object of a body."""
    try:
        raw = text.parse(data.decode("utf-8-sig"), "body")
    except UnicodeDecodeError as error:
        raise ApiError(400, f"body: not UTF-8 text ({error.reason} at byte {error.start})") from None
    except ConfigError as error:
        raise ApiError(400, str(error)) from None
    if not isinstance(raw, dict):
        raise ApiError(400, f"body is {shown(raw)}; a JSON object is needed")
    return {key: value for key, value in raw.items() if value is not None}


def model_of(raw: Mapping[str, Any], name: str) -> None:
    """Raises ApiError where a body names another model than this server has."""
    given = raw.get("model", name)
    if given != name:
        raise ApiError(404, f"model={shown(given)}: no such model; this server has {name}", "model", "model_not_found")


def read_chat(raw: Mapping[str, Any], target, head, room: int) -> Asked:
    """Returns what a body of /v1/chat/completions asks for; `room` tokens fit into a slot."""
    _known(raw, CHAT)
    fields = Fields(raw, "request")
    kwargs = _read("chat_template_kwargs", lambda: Fields(raw.get("chat_template_kwargs", {}), "chat_template_kwargs"))
    for key in kwargs.raw.keys() - {"enable_thinking"}:
        message = f"chat_template_kwargs: {shown(key)} is not known; only enable_thinking is"
        raise ApiError(400, message, "chat_template_kwargs")
    asked = None
    for key, where in (("enable_thinking", kwargs), ("thinking", fields)):
        if where.has(key):
            asked = _read(key, functools.partial(where.flag, key))
    mode = _read("thinking", lambda: pair.thinking(target, head, asked))
    if "messages" not in raw:
        raise ApiError(400, "messages is missing; give a list of {role, content}", "messages")
    messages = _read("messages", lambda: conversation.checked(_roles(raw["messages"])))
    ids = _read("messages", lambda: target.encode_messages(messages, None, mode))
    top = _read("logprobs", lambda: fields.flag("logprobs"))
    count = _read("top_logprobs", lambda: fields.whole("top_logprobs", 0, TOP, 0))
    if count and not top:
        raise ApiError(400, f"top_logprobs={count}: it needs logprobs=true; add it", "top_logprobs")
    usual = max(room - len(ids), 1)
    return _asked(raw, [ids], count if top else None, usual, chat=True)


def read_completion(raw: Mapping[str, Any], target, room: int) -> Asked:
    """Returns what a body of /v1/completions asks for."""
    _known(raw, COMPLETION)
    if "prompt" not in raw:
        raise ApiError(400, "prompt is missing; give text, token ids, or a list of either", "prompt")
    given = raw["prompt"]
    several = isinstance(given, list) and not all(map(whole, given))
    prompts = given if several else [given]
    if not given or len(prompts) > MOST_CHOICES:
        raise ApiError(400, f"prompt: {len(prompts) if given else 0} prompts; give 1..{MOST_CHOICES}", "prompt")
    if not all(isinstance(prompt, str | list) for prompt in prompts):
        raise ApiError(400, "prompt: give text, token ids, or a list of either", "prompt")
    encode = lambda prompt: functools.partial(prompt_ids, target, prompt, False)
    ids = [_read("prompt", encode(prompt)) for prompt in prompts]
    top = None
    if "logprobs" in raw:
        top = _read("logprobs", lambda: Fields(raw, "request").whole("logprobs", 0, TOP))
    return _asked(raw, ids, top, 16, chat=False)


def _asked(raw: Mapping[str, Any], prompts: list[list[int]], top: int | None, usual: int, chat: bool) -> Asked:
    fields = Fields(raw, "request")
    if "max_tokens" in raw and "max_completion_tokens" in raw:
        raise ApiError(400, "max_tokens and max_completion_tokens together; give one of them", "max_tokens")
    stream = _read("stream", lambda: fields.flag("stream"))
    options = _read("stream_options", lambda: Fields(raw.get("stream_options", {}), "stream_options"))
    if "stream_options" in raw and not stream:
        raise ApiError(400, "stream_options: it needs stream=true; add it, or leave the options out", "stream_options")
    for key in options.raw.keys() - {"include_usage", "include_obfuscation"}:
        raise ApiError(400, f"stream_options: {shown(key)} is not known; only include_usage is", "stream_options")
    if options.raw.get("include_obfuscation"):
        raise ApiError(400, "stream_options: include_obfuscation is not supported; leave it out", "stream_options")
    usage = _read("stream_options", lambda: options.flag("include_usage"))
    draw = _read("return_tree", lambda: fields.flag("return_tree"))
    if draw and not stream:
        raise ApiError(400, "return_tree: it needs stream=true; add it, or leave it out", "return_tree")
    choices = _read("n", lambda: fields.whole("n", 1, MOST_CHOICES, 1))
    seed = _seed(raw, SEEDS - choices)  # choice i has seed + i
    option = _sampling(raw, {"temperature": 1.0, "max_new_tokens": usual, "seed": seed, "logprobs": top is not None})
    return Asked(prompts, option, choices, stream, usage, top, draw, chat)


def _seed(raw: Mapping[str, Any], last: int) -> int:
    """Returns the seed that is given, or draws one."""
    given = raw.get("seed")
    if given is None:
        return secrets.randbelow(last + 1)
    if not whole(given) or not 0 <= given <= last:
        raise ApiError(400, f"seed={shown(given)}: give a whole number in 0..{last}", "seed")
    return int(given)


def _sampling(raw: Mapping[str, Any], usual: dict[str, Any]) -> SamplingConfig:
    """Returns the options of a body; each is checked by itself first, so that an error names its key."""
    found = dict(usual)
    for key, name in OPTIONS.items():
        if key not in raw:
            continue
        value = raw[key]
        value = 0 if key == "top_k" and value == -1 else value  # as other servers say "all"
        alone = {"max_new_tokens": MOST} if name == "min_new_tokens" else {}  # the two are compared later
        try:
            if KNOWN[name].kind in ("whole", "number", "flag"):
                KNOWN[name].check(value)
            SamplingConfig(**alone | {name: value})
        except (ConfigError, TypeError) as error:
            raise ApiError(400, str(error).replace(f"{name}=", f"{key}=", 1), key) from None
        found[name] = value
    stops = found.get("stop", ())
    if not isinstance(stops, str) and len(stops) > MOST_STOPS:
        raise ApiError(400, f"stop: {len(stops)} texts; give at most {MOST_STOPS}", "stop")
    try:
        return SamplingConfig(**found)
    except ConfigError as error:  # two contradict each other
        raise ApiError(400, str(error).replace("_new_tokens", "_tokens")) from None


def _known(raw: Mapping[str, Any], known: set[str]) -> None:
    for key, value in raw.items():
        if key in known:
            continue
        if key not in HARMLESS:
            raise ApiError(400, f"{shown(key)[1:-1]}: no such option here; leave it out", key[:60])
        values = HARMLESS[key]
        if values is not None and value not in values:
            raise ApiError(400, f"{key}={shown(value)}: this server cannot do that; leave it out", key)


def _read(key: str, read: Callable[[], Any]) -> Any:
    """Returns what `read` does; its errors are those of a key."""
    try:
        return read()
    except ConfigError as error:
        raise ApiError(400, str(error), key) from None


def _roles(messages: Any) -> Any:
    """Returns messages with `developer` under its old name, which templates know."""
    if not isinstance(messages, list):
        return messages
    old = lambda m: m | {"role": "system"} if isinstance(m, dict) and m.get("role") == "developer" else m
    return [old(message) for message in messages]


def dumps(value: Any) -> str:
    """Returns JSON in one line, of ASCII alone."""
    return json.dumps(value, separators=(",", ":"), allow_nan=False)
