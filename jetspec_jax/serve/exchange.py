"""One request and its answer over HTTP: whole or as a stream, and what happens when the caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any

from starlette.responses import JSONResponse

from jetspec_jax.engine.rows import Result
from jetspec_jax.serve import errors
from jetspec_jax.serve.answers import Form
from jetspec_jax.serve.bodies import dumps
from jetspec_jax.serve.job import Job, Update, joined
from jetspec_jax.serve.service import Service

GONE = 499  # as nginx logs a caller that has left
STALLED_SECONDS = 60.0  # for a piece of an answer to go out; a caller who reads nothing for so long has left
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
          (b"x-accel-buffering", b"no")]  # fmt: skip


class Stalled(Exception):
    """Nobody reads what is sent."""


class Exchange:
    """An answer as an ASGI application. All jobs are in the queue; they are cancelled where the caller leaves.

    status: what is logged, 499 where nobody was there any more.
    """

    def __init__(self, service: Service, form: Form, jobs: Sequence[Job], updates: asyncio.Queue[tuple[int, Update]]):
        self._service, self._form, self._jobs, self._updates = service, form, jobs, updates
        self._results: list[Result | None] = [None] * len(jobs)
        self._gone = False

    async def __call__(self, scope, receive, send) -> None:
        answering = asyncio.ensure_future(
            self._stream(send) if self._form.asked.stream else self._whole(scope, receive, send)
        )
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await asyncio.wait({answering, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if not answering.done():
                scope["jetspec"]["status"] = GONE
            else:
                answering.result()
        except (OSError, Stalled):  # the other side of a socket has closed, or might as well have
            scope["jetspec"]["status"] = GONE
        finally:
            for task in (answering, leaving):
                task.cancel()
            scheduler = self._service.scheduler
            for job in self._jobs:
                if not job.over and scheduler:
                    scheduler.cancel(job)
            scope["jetspec"]["tokens"] = (len(self._form.asked.prompts[0]), sum(len(job.log.ids) for job in self._jobs))

    async def _whole(self, scope, receive, send) -> None:
        while not all(self._results):
            index, update = await self._updates.get()
            if problem := self._heard(index, update):
                await JSONResponse(problem, 500)(scope, receive, send)
                return
        await JSONResponse(self._form.whole(self._jobs, [r for r in self._results if r]))(scope, receive, send)

    async def _stream(self, send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})

        async def events(values: Sequence[Any], more: bool = True) -> None:
            said = (value if isinstance(value, str) else dumps(value) for value in values)
            body = "".join(f"data: {text}\n\n" for text in said).encode()
            await _sent(send({"type": "http.response.body", "body": body, "more_body": more}))

        if self._form.asked.chat:
            await events([self._form.opening(index) for index in range(len(self._jobs))])
        while not all(self._results):
            found: list[dict[str, Any]] = []
            for index, update in self._together(await self._updates.get()):
                if problem := self._heard(index, update):
                    await events([*found, problem, "[DONE]"], more=False)
                    return
                assert update.piece is not None
                if chunk := self._form.chunk(index, update.piece, update.result):
                    found.append(chunk)
            if found:
                await events(found)
        results = [r for r in self._results if r]
        usage = [self._form.last(self._jobs, results)] if self._form.asked.usage else []
        await events([*usage, "[DONE]"], more=False)

    def _together(self, first: tuple[int, Update]) -> list[tuple[int, Update]]:
        """Returns an update and all that wait behind it, those of a choice as one: a slow reader gets larger pieces."""
        found: dict[int, Update] = {}
        waiting = [first]
        while not self._updates.empty():
            waiting.append(self._updates.get_nowait())
        for index, update in waiting:
            old = found.get(index)
            if old and old.piece and update.piece:
                update = update._replace(piece=joined(old.piece, update.piece))
            found[index] = update
        return list(found.items())

    def _heard(self, index: int, update: Update) -> dict[str, Any] | None:
        """Takes in an update; returns an error where the request cannot go on."""
        wrong = update.error or (update.result.error if update.result else None)
        if wrong:
            return errors.shape(500, wrong)
        if update.result:
            self._results[index] = update.result
            self._service.metrics.ended(self._jobs[index], update.result, self._form.depth)
        return None


async def _sent(sending: Awaitable[None]) -> None:
    """Waits until something has gone out; raises Stalled where nobody takes it."""
    try:
        async with asyncio.timeout(STALLED_SECONDS):
            await sending
    except TimeoutError:
        raise Stalled from None


async def _left(receive) -> None:
    """Returns when the caller has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
