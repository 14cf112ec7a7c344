"""The interface as an OpenAPI document, made of the tables that requests are read by."""

from __future__ import annotations

from typing import Any

from jetspec_jax import __version__
from jetspec_jax.engine.kit import TOP
from jetspec_jax.fields import MOST
from jetspec_jax.options import AUTO
from jetspec_jax.serve import bodies

ERRORS = {
    400: "The request is wrong; the error says where.",
    401: "The API key is missing or wrong.",
    404: "No such path or model.",
    405: "The method is not for this path.",
    408: "The body did not come in time.",
    413: "The body is too large.",
    429: "The queue is full; Retry-After says when to try again.",
    500: "The server could not go on.",
    503: "The server loads, shuts down, or has failed.",
}
TEXT, FLAG, OBJECT = {"type": "string"}, {"type": "boolean"}, {"type": "object"}
IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
STOPS = {"type": "array", "items": TEXT | {"minLength": 1}, "maxItems": bodies.MOST_STOPS}
# What an option's own table does not say of its key.
FORMS: dict[str, dict[str, Any]] = {
    "stop": {"oneOf": [TEXT | {"minLength": 1}, STOPS]},
    "bad_words": {"type": "array", "items": {"oneOf": [TEXT | {"minLength": 1}, IDS]}},
    "stop_token_ids": IDS | {"minItems": 0},
    "logit_bias": {"type": "object", "additionalProperties": {"type": "number"}},
    "top_k": {"type": "integer", "minimum": -1},
    "seed": {"type": "integer", "minimum": 0, "maximum": bodies.SEEDS - 1},
    "n": {"type": "integer", "minimum": 1, "maximum": bodies.MOST_CHOICES},
    "top_logprobs": {"type": "integer", "minimum": 0, "maximum": TOP},
    "stream": FLAG, "return_tree": FLAG, "thinking": FLAG, "model": TEXT,
    "stream_options": {
        "type": "object", "additionalProperties": False,
        "properties": {"include_usage": FLAG, "include_obfuscation": {"const": False}},
    },
    "chat_template_kwargs": {"type": "object", "additionalProperties": False, "properties": {"enable_thinking": FLAG}},
    "messages": {
        "type": "array", "minItems": 1,
        "items": {
            "type": "object", "required": ["role", "content"],
            "properties": {
                "role": TEXT,
                "content": {"oneOf": [TEXT, {"type": "array", "items": {"$ref": "#/components/schemas/Part"}}]},
            },
        },
    },
    "prompt": {"oneOf": [TEXT, IDS, {"type": "array", "items": {"oneOf": [TEXT, IDS]}, "minItems": 1}]},
}  # fmt: skip


def document(title: str) -> dict[str, Any]:
    """Returns the document. title: the model's name."""
    answer = {"type": "object", "required": ["id", "object", "choices"], "properties": {"id": TEXT, "object": TEXT}}
    part = {"type": "object", "required": ["type", "text"], "properties": {"type": {"const": "text"}, "text": TEXT}}
    error = {"type": "object", "required": ["message", "type", "param", "code"], "properties": {"message": TEXT}}
    schemas = {
        "Chat": _body(bodies.CHAT | {"messages"}, "messages", {"logprobs": FLAG}),
        "Completion": _body(
            bodies.COMPLETION, "prompt", {"logprobs": {"type": "integer", "minimum": 0, "maximum": TOP}}
        ),
        "Answer": answer,
        "Part": part,
        "Error": {"type": "object", "required": ["error"], "properties": {"error": error}},
    }
    paths: dict[str, Any] = {
        "/v1/chat/completions": {"post": _asks("chat", "Chat")},
        "/v1/completions": {"post": _asks("complete", "Completion")},
        "/v1/models": {"get": _gives("models", "The one model.", "application/json")},
        "/v1/models/{name}": {
            "get": _gives("model", "That model.", "application/json", 404)
            | {"parameters": [{"name": "name", "in": "path", "required": True, "schema": TEXT | {"minLength": 1}}]}
        },
        "/health": {"get": _gives("health", "It is alive.", "application/json", open_=True)},
        "/health/ready": {"get": _gives("ready", "It takes requests.", "application/json", open_=True)},
        "/metrics": {"get": _gives("metrics", "Counters for Prometheus.", "text/plain", open_=True)},
        "/version": {"get": _gives("version", "Of the package.", "application/json", open_=True)},
        "/openapi.json": {"get": _gives("openapi", "This document.", "application/json", open_=True)},
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": f"jetspec_jax: {title}", "version": __version__},
        "paths": paths,
        "components": {"schemas": schemas, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _body(keys: set[str], needed: str, own: dict[str, Any]) -> dict[str, Any]:
    found = {key: _form(key, own) for key in sorted(keys)}
    for key, values in bodies.HARMLESS.items():
        found[key] = {} if values is None else {"enum": [*values, None]}
    return {"type": "object", "required": [needed], "properties": found, "additionalProperties": False}


def _form(key: str, own: dict[str, Any]) -> dict[str, Any]:
    """Returns the schema of a key; null counts as absent."""
    made = own.get(key) or FORMS.get(key)
    if made is None:
        option = bodies.KNOWN[bodies.OPTIONS[key]]
        if option.kind == "flag":
            made = FLAG
        else:
            kind = "integer" if option.kind == "whole" else "number"
            low = "exclusiveMinimum" if option.above else "minimum"
            most = MOST if option.high is None and kind == "integer" else option.high
            made = {"type": kind, low: option.low or 0} | ({} if most is None else {"maximum": most})
            if AUTO in (option.choices or ()):
                made = {"oneOf": [made, {"const": AUTO}]}
    return made if key in ("messages", "prompt") else {"anyOf": [made, {"type": "null"}]}


def _asks(name: str, schema: str) -> dict[str, Any]:
    body = {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}}}
    made = _gives(name, "The answer, or a stream of events.", "application/json", 400, 404, 408, 413, 429, 500)
    content = made["responses"]["200"]["content"]
    content["application/json"] = {"schema": {"$ref": "#/components/schemas/Answer"}}
    content["text/event-stream"] = {"schema": TEXT}
    return made | {"requestBody": {"required": True, "content": body}}


def _gives(name: str, what: str, kind: str, *errors: int, open_: bool = False) -> dict[str, Any]:
    """Returns an operation.

    Args:
      name: of it.
      what: is given.
      kind: of its body.
      errors: that it may answer with, beside 503 and what a key asks for.
      open_: whether it asks for no key.
    """
    shape = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    codes = sorted({*errors, 503} | (set() if open_ else {401}))
    responses: dict[str, Any] = {str(code): {"description": ERRORS[code], "content": shape} for code in codes}
    responses["200"] = {"description": what, "content": {kind: {}}}
    return {"operationId": name, "responses": responses} | ({} if open_ else {"security": [{"key": []}, {}]})
