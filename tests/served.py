"""Slots of a tiny pair with every program made, and a server over them on a port of its own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import socket
import threading
import time

import jax.numpy as jnp
import small

from jetspec_jax import speculate
from jetspec_jax.drafts import block
from jetspec_jax.engine.kit import SETS
from jetspec_jax.engine.slots import Plan, Slots, Trees
from jetspec_jax.files.pair import LoadedHead
from jetspec_jax.loop.tree import Rule
from jetspec_jax.options import TreeConfig

NODES, DEPTH = 8, 3
PLAN = Plan(256, (1, 2, 4), NODES, (4, 16))
TARGET = small.target()


def _head() -> LoadedHead:
    draft, shapes = block.build(small.HEAD, jnp.float32)
    return LoadedHead(draft, small.random_params(shapes, 1), small.HEAD)


HEAD = _head()


@functools.lru_cache(None)
def slots() -> Slots:
    """Slots of the small pair; one scheduler at a time may have them."""
    made = Slots(TARGET, HEAD, HEAD.draft.shaped(Rule(NODES), DEPTH), PLAN)
    made.prepare()
    return made


SIZES = (1, 4, NODES)


@functools.lru_cache(None)
def paced() -> Slots:
    """Slots whose trees are as large as pays, pruned where they are improbable; costs are measured anew."""
    trees = Trees(speculate.ladder_of(HEAD, TreeConfig(depth=DEPTH), SIZES), prune=0.02)
    made = Slots(TARGET, HEAD, trees, Plan(256, (1, 2), NODES, (16,)), SETS[1:])
    made.prepare()
    return made


class Running:
    """A server in a thread. lines: of its log."""

    def __init__(self, limits=None, own=None):
        import uvicorn

        from jetspec_jax.serve import app
        from jetspec_jax.serve.service import Limits, Service

        self.service, self.lines = Service("tiny", limits or Limits()), []
        self.service.open(TARGET, HEAD, own or slots())
        made = app.make(self.service, self.lines.append)
        config = uvicorn.Config(made, port=0, log_level="critical", lifespan="off", timeout_graceful_shutdown=1)
        self.server = uvicorn.Server(config)
        self.server.capture_signals = contextlib.nullcontext
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=lambda: self.loop.run_until_complete(self.server.serve()), daemon=True)
        self.thread.start()
        while not self.server.started:
            time.sleep(0.01)
        listener = self.server.servers[0].sockets[0]
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)  # else the system takes megabytes for a reader
        self.port = listener.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"

    def drain(self, seconds: float):
        """Begins to shut down; returns what is done when that is done."""
        return asyncio.run_coroutine_threadsafe(self.service.drain(seconds), self.loop)

    def metric(self, name: str) -> float:
        """One number of /metrics."""
        lines = self.service.metrics.text().decode().splitlines()
        return next(float(line.split()[-1]) for line in lines if line.startswith(f"{name} "))

    def quiet(self, seconds: float = 10.0) -> bool:
        """Waits until nothing runs; returns whether that came."""
        end = time.monotonic() + seconds
        while not self.service.scheduler.idle and time.monotonic() < end:
            time.sleep(0.005)
        return self.service.scheduler.idle

    def stop(self) -> None:
        """Ends it."""
        self.service.scheduler.stop()
        self.server.should_exit = True
        self.thread.join(5)
        assert not self.thread.is_alive()


@contextlib.contextmanager
def running(limits=None, own=None):
    """Yields a server, over slots of its own where they are given, and ends it."""
    server = Running(limits, own)
    try:
        yield server
    finally:
        server.stop()
