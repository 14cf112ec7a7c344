"""One request and its answer over HTTP: whole or as a stream, and what happens when the caller leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from starlette.responses import JSONResponse

from jetspec_jax.engine.rows import Result
from jetspec_jax.serve import errors
from jetspec_jax.serve.answers import Form
from jetspec_jax.serve.bodies import dumps
from jetspec_jax.serve.job import Job, Update
from jetspec_jax.serve.service import Service

GONE = 499  # as nginx logs a caller that has left
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache"),
          (b"x-accel-buffering", b"no")]  # fmt: skip


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
        except OSError:  # the other side of a socket has closed
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

        async def event(value: Any, more: bool = True) -> None:
            text = value if isinstance(value, str) else dumps(value)
            await send({"type": "http.response.body", "body": f"data: {text}\n\n".encode(), "more_body": more})

        if self._form.asked.chat:
            for index in range(len(self._jobs)):
                await event(self._form.opening(index))
        while not all(self._results):
            index, update = await self._updates.get()
            if problem := self._heard(index, update):
                await event(problem)
                break
            assert update.piece is not None
            if chunk := self._form.chunk(index, update.piece, update.result):
                await event(chunk)
        results = [r for r in self._results if r]
        if len(results) == len(self._jobs) and self._form.asked.usage:
            await event(self._form.last(self._jobs, results))
        await event("[DONE]", more=False)

    def _heard(self, index: int, update: Update) -> dict[str, Any] | None:
        """Takes in an update; returns an error where the request cannot go on."""
        wrong = update.error or (update.result.error if update.result else None)
        if wrong:
            return errors.shape(500, wrong)
        if update.result:
            self._results[index] = update.result
            self._service.metrics.ended(self._jobs[index], update.result, self._form.depth)
        return None


async def _left(receive) -> None:
    """Returns when the caller has left."""
    while (await receive())["type"] != "http.disconnect":
        pass
