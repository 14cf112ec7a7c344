"""What a server has: the pair and its scheduler once they are there, limits, counters, and whether it shuts down."""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import time
from collections.abc import Mapping
from typing import Any

from jetspec_jax import __version__
from jetspec_jax.engine import compiles, requests
from jetspec_jax.engine.rows import Row
from jetspec_jax.engine.slots import Slots
from jetspec_jax.fields import ConfigError
from jetspec_jax.serve import bodies
from jetspec_jax.serve.bodies import Asked
from jetspec_jax.serve.errors import ApiError
from jetspec_jax.serve.job import Job
from jetspec_jax.serve.metrics import Metrics
from jetspec_jax.serve.scheduler import Closed, Full, Scheduler


@dataclasses.dataclass(frozen=True)
class Limits:
    """What a server takes.

    waiting: requests in the queue. body: bytes. kept: rows kept after their end. key: that callers must know, "" for
    none.
    """

    waiting: int = 64
    body: int = 1 << 20
    kept: int = 4
    key: str = ""


class Service:
    """One model behind an address. It answers before it is ready, and says so.

    target, head, scheduler: None until they are there. exchanges: answers that are being given.
    """

    def __init__(self, name: str, limits: Limits):
        """name: of the model, as callers give it."""
        self.name, self.limits = name, limits
        self.metrics = Metrics()
        self.target: Any = None
        self.head: Any = None
        self.scheduler: Scheduler | None = None
        self.exchanges = 0
        self.draining = False
        self.born = int(time.time())
        self._compiled = 0
        # Chat templates and tokenizers compute for a while, and one thread alone may use a tokenizer's settings.
        self._readers = concurrent.futures.ThreadPoolExecutor(1, "reader")

    def open(self, target, head, slots: Slots) -> None:
        """Begins to serve: slots are prepared, and nothing is compiled from here on."""
        self.target, self.head = target, head
        if target.tokenizer is not None:
            target.tokenizer.encode("ready", begin=True)
        scheduler = Scheduler(slots, self.limits.waiting, self.limits.kept, self.metrics.event)
        tempo = slots.tempo
        plain = lambda: 1 / tempo.plain(slots.batch) if tempo else 0.0
        self.metrics.watch(
            [
                ("queue_size", "Requests that wait for a slot.", lambda: scheduler.waiting),
                ("slots_used", "Rows that run.", lambda: scheduler.running),
                ("slots", "Rows that can run.", lambda: slots.plan.rows),
                ("batch_rows", "Rows of the batch now.", lambda: slots.batch),
                ("budget_nodes", "Tree nodes of a round in force; 1 is plain decoding.", lambda: scheduler.nodes),
                ("plain_tokens_per_second", "Of a row by plain steps, as costs were measured; 0: not known.", plain),
                ("compiles_since_ready", "Programs made while serving; 0.", lambda: self.compiles),
            ]
        )
        self._compiled = compiles.count()
        scheduler.start()
        self.scheduler = scheduler

    @property
    def compiles(self) -> int:
        """Programs that were made since the server was ready."""
        return compiles.count() - self._compiled

    @property
    def ready(self) -> bool:
        """Whether requests are taken."""
        return self.scheduler is not None and not (self.draining or self.scheduler.failed)

    @property
    def fingerprint(self) -> str:
        """What an answer says of the system that made it: equal ones give equal answers to equal seeds."""
        return f"jetspec-{__version__}-{str(self.target.fingerprint)[:12]}-{self.target.dtype}"

    def running(self) -> Scheduler:
        """Returns the scheduler; raises ApiError where nothing is taken now."""
        scheduler = self.scheduler
        if scheduler is None:
            raise ApiError(503, "the model is being loaded and compiled; /health/ready says when", wait=5)
        if scheduler.failed:
            raise ApiError(503, f"the device has failed: {scheduler.failed}")
        if self.draining:
            raise ApiError(503, "the server is shutting down", wait=5)
        return scheduler

    async def read(self, chat: bool, raw: Mapping[str, Any]) -> Asked:
        """Returns what a body asks for; templates and tokenizers run in a thread of their own."""
        room = self.running().slots.room
        bodies.model_of(raw, self.name)
        read = (
            (lambda: bodies.read_chat(raw, self.target, self.head, room))
            if chat
            else (lambda: bodies.read_completion(raw, self.target, room))
        )
        return await asyncio.get_running_loop().run_in_executor(self._readers, read)

    def submit(self, asked: Asked, updates: asyncio.Queue) -> list[Job]:
        """Puts all choices of all prompts into the queue; `updates` gets pairs of choice and update.

        Raises:
          ApiError: they fit neither target nor slots, or there is no room in the queue.
        """
        scheduler, loop = self.running(), asyncio.get_running_loop()
        count, most = len(asked.prompts) * asked.choices, self.limits.waiting
        if count > most:
            said = f"n={asked.choices}: {count} answers at once, and the queue of this server has room for {most}"
            raise ApiError(400, said, "n")
        slots = scheduler.slots
        jobs: list[Job] = []

        def tell(index: int):
            def told(update) -> None:
                if not loop.is_closed():
                    loop.call_soon_threadsafe(updates.put_nowait, (index, update))

            return told

        for ids in asked.prompts:
            for choice in range(asked.choices):
                option = dataclasses.replace(asked.option, seed=asked.option.seed + choice)
                try:
                    requests.check(self.target, ids, dataclasses.replace(option, max_new_tokens=0, min_new_tokens=0))
                    option = requests.resolve(self.target, option)
                    budget = option.budget or slots.usual
                    row = Row(ids, option, budget, self.target.tokenizer, asked.stream)
                    slots.check(row)
                except ConfigError as error:
                    said = str(error).replace("max_new_tokens", "max_tokens")
                    raise ApiError(400, said, said.split("=")[0].split(":")[0]) from None
                jobs.append(Job(row, tell(len(jobs)), asked.stream, asked.draw))
        try:
            scheduler.submit(*jobs)
        except Full as error:
            raise ApiError(429, f"{error}; try again", code="queue_full", wait=1) from None
        except Closed as error:
            raise ApiError(503, str(error), wait=5) from None
        return jobs

    async def drain(self, seconds: float) -> None:
        """Takes no more requests, lets those that were taken end for so many seconds, and ends the rest."""
        self.draining = True
        end = time.monotonic() + seconds
        scheduler = self.scheduler
        if scheduler:
            scheduler.close()
            while time.monotonic() < end and not scheduler.idle:
                await asyncio.sleep(0.02)
            await asyncio.get_running_loop().run_in_executor(None, scheduler.stop)
        last = max(end, time.monotonic() + 0.5)  # what has ended must still reach its caller
        while self.exchanges and time.monotonic() < last:
            await asyncio.sleep(0.02)
        self._readers.shutdown(wait=False)
