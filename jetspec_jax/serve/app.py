"""The HTTP interface: OpenAI's paths, health, metrics, what describes them, and a page, as an ASGI application."""

from __future__ import annotations

import asyncio
import hmac
import re
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from jetspec_jax import __version__, outcome
from jetspec_jax.serve import bodies, errors, openapi
from jetspec_jax.serve.answers import Form
from jetspec_jax.serve.errors import ApiError
from jetspec_jax.serve.exchange import GONE, Exchange
from jetspec_jax.serve.service import Service

PAGE = Path(__file__).parent.parent / "assets" / "serve" / "index.html"
BODY_SECONDS = 30.0  # for a body to come
NAME = re.compile("[A-Za-z0-9._-]{1,64}")  # of a request, as callers may give it


def make(service: Service, say: Callable[[str], None] | None = None) -> Any:
    """Returns the application of a service. say: gets one line for each answer, without prompts; None says nothing."""

    async def chat(request: Request) -> Any:
        return await _answer(service, request, chat=True)

    async def completion(request: Request) -> Any:
        return await _answer(service, request, chat=False)

    async def models(request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [_model(service)]})

    async def model(request: Request) -> Response:
        bodies.model_of({"model": request.path_params["name"]}, service.name)
        return JSONResponse(_model(service))

    async def health(request: Request) -> Response:
        scheduler = service.scheduler
        if scheduler and scheduler.failed:
            raise ApiError(503, f"the device has failed: {scheduler.failed}")
        return JSONResponse({"status": "ok"})

    async def ready(request: Request) -> Response:
        service.running()
        return JSONResponse({"status": "ready"})

    async def metrics(request: Request) -> Response:
        return Response(service.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def version(request: Request) -> Response:
        return JSONResponse({"version": __version__})

    async def described(request: Request) -> Response:
        return JSONResponse(openapi.document(service.name))

    async def page(request: Request) -> Response:
        return FileResponse(PAGE, media_type="text/html; charset=utf-8")

    routes = [
        Route("/v1/chat/completions", chat, methods=["POST"]),
        Route("/v1/completions", completion, methods=["POST"]),
        Route("/v1/models", models),
        Route("/v1/models/{name:path}", model),
        Route("/health", health),
        Route("/health/ready", ready),
        Route("/metrics", metrics),
        Route("/version", version),
        Route("/openapi.json", described),
        Route("/", page),
    ]
    handlers: Any = {ApiError: _api_error, HTTPException: _http_error, Exception: _own_error}
    return Door(Starlette(routes=routes, exception_handlers=handlers), service, say)


async def _answer(service: Service, request: Request, chat: bool) -> Any:
    service.running()
    raw = bodies.parse(await _body(request, service.limits.body))
    asked = await service.read(chat, raw)
    updates: asyncio.Queue = asyncio.Queue()
    jobs = service.submit(asked, updates)
    prefix = "chatcmpl" if chat else "cmpl"
    name, depth = f"{prefix}-{request.scope['jetspec']['name']}", service.running().slots.depth
    form = Form(asked, name, service.name, service.fingerprint, service.target.tokenizer, depth)
    return Exchange(service, form, jobs, updates)


async def _body(request: Request, most: int) -> bytes:
    """Returns the body of a request, at most so many bytes."""
    too_large = ApiError(413, f"body: more than {most} bytes, which this server does not take", code="body_too_large")
    length = request.headers.get("content-length", "0")
    if not length.isascii() or not length.isdecimal() or int(length[:20]) > most:
        raise too_large
    data = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for piece in request.stream():
                data += piece
                if len(data) > most:
                    raise too_large
    except TimeoutError:
        raise ApiError(408, f"body: it did not come within {BODY_SECONDS:g} seconds") from None
    return bytes(data)


def _model(service: Service) -> dict[str, Any]:
    room = {"max_model_len": service.scheduler.slots.room} if service.scheduler else {}
    return {"id": service.name, "object": "model", "created": service.born, "owned_by": "jetspec_jax"} | room


async def _api_error(request: Request, error: Any) -> Response:
    return JSONResponse(error.body(), error.status, error.headers())


async def _own_error(request: Request, error: Any) -> Response:
    """An error of ours; `Door` says which, once it has been sent."""
    return JSONResponse(errors.shape(500, "this is an error of the server"), 500)


async def _http_error(request: Request, error: Any) -> Response:
    said = {404: "no such path", 405: f"{request.method} is not for this path"}.get(error.status_code, error.detail)
    return JSONResponse(
        errors.shape(error.status_code, f"{request.url.path}: {said}"), error.status_code, error.headers
    )


class Door:
    """What every request passes: its name, the key, the counters, a line in the log, and an answer whatever breaks."""

    def __init__(self, inner: Any, service: Service, say: Callable[[str], None] | None):
        self._inner, self._service, self._say = inner, service, say
        self._paths = {route.path for route in inner.routes}

    async def __call__(self, scope, receive, send) -> None:
        if scope["type"] != "http":
            return
        headers = {key.lower(): value.decode("latin-1") for key, value in scope["headers"]}
        given = headers.get(b"x-request-id", "")
        name = given if NAME.fullmatch(given) else uuid.uuid4().hex
        seen: dict[str, Any] = {"name": name, "status": 0, "tokens": None}
        scope["jetspec"] = seen
        begun, begin = False, time.perf_counter()

        async def answer(message) -> None:
            nonlocal begun
            if message["type"] == "http.response.start":
                begun = True
                seen["status"] = seen["status"] or message["status"]
                message["headers"] = [*message.get("headers", []), (b"x-request-id", name.encode())]
            await send(message)

        self._service.exchanges += 1
        try:
            if not self._known(scope["path"], headers.get(b"authorization", "")):
                error = ApiError(401, "the API key is missing or wrong; send it as Authorization: Bearer KEY")
                refusal = JSONResponse(error.body(), 401, {"WWW-Authenticate": "Bearer"})
                await refusal(scope, receive, answer)
            else:
                await self._inner(scope, receive, answer)
        except ClientDisconnect:
            seen["status"] = GONE
        except Exception as error:  # ours: said in one line, and the server lives
            print(f"{name}: {outcome.line(error)}", file=sys.stderr, flush=True)
            if not begun:
                await JSONResponse(errors.shape(500, "this is an error of the server"), 500)(scope, receive, answer)
        finally:
            self._service.exchanges -= 1
            path = scope["path"] if scope["path"] in self._paths else "other"
            self._service.metrics.answers.labels(path, str(seen["status"])).inc()
            if self._say and path.startswith("/v1/"):
                tokens = seen["tokens"] and f" {seen['tokens'][0]} prompt tokens, {seen['tokens'][1]} new"
                spent = time.perf_counter() - begin
                self._say(f"{name} {scope['method']} {path} {seen['status']}{tokens or ''} {spent:.3f} s")

    def _known(self, path: str, given: str) -> bool:
        """Whether a caller may have this path."""
        key = self._service.limits.key
        right = hmac.compare_digest(given.encode(), f"Bearer {key}".encode())
        return not key or right or not path.startswith("/v1/")
