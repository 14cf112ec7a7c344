"""Serves a target and its draft head behind OpenAI's interface.

    python -m jetspec_jax.serve                                  the demo pair on 127.0.0.1:8000
    python -m jetspec_jax.serve --target DIR --head DIR --batch 16 --context 8192 --host 0.0.0.0 --api_key KEY

/v1/chat/completions, /v1/completions, /v1/models, /health, /health/ready, /metrics, and a page at /. Each answer is
the one that decoding alone would give with its seed, whoever else is served. It answers at once, and is ready when
everything is compiled (some minutes the first time; later starts find the programs on disk). SIGTERM lets what was
accepted end, for --drain_seconds at most, and exits with status 0.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import pathlib
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

from jetspec_jax import command, methods, outcome
from jetspec_jax.command import TREE, Option, UsageError
from jetspec_jax.fields import ConfigError
from jetspec_jax.methods import METHODS

BUDGET = dataclasses.replace(
    TREE["budget"],
    help="Tree nodes verified a round, root included; 1 is plain decoding; auto: as many as pay best now, by what "
    "rounds bring and what they cost here (measured at the first start, and kept). Default: auto; of a drafter without "
    "probabilities 8 on a CPU, else 64.",
)
TREES = [BUDGET if option.name == "budget" else option for option in TREE.values()]
LINE = command.Line(
    __doc__,
    [
        Option("host", "text", "Address to listen at; 0.0.0.0 is every one of this machine.", "127.0.0.1"),
        Option("port", "whole", "Port; 0 takes a free one and says which.", 8000, high=65535),
        command.TARGET,
        command.HEAD,
        Option("method", "choice", "As of decode.py. Default: the head's family.", choices=tuple(METHODS)),
        Option("model_name", "text", "What callers name the model. Default: the target's name."),
        Option(
            "batch", "whole", "Rows that run together, a power of two. Default: 4 on a CPU, else 32.", low=1, high=256
        ),
        Option(
            "context", "whole",
            "Cache slots of a row, which hold its prompt, its answer and one tree. Default: 1024 on a CPU, else 4096.",
            low=256,
        ),
        *TREES,
        Option(
            "prefill_chunk", "whole",
            "Prompt tokens read between two blocks of rounds: more are read faster, and their mates wait longer. "
            "Default: 64 on a CPU, else 512.", low=1,
        ),
        Option("queue", "whole", "Requests that may wait for a slot; one more is answered with 429.", 64, low=1),
        Option("kept_prefixes", "whole", "Rows kept after their end, for the next turn of a conversation.", 4),
        Option("max_body_bytes", "whole", "Largest body.", 1 << 20, low=1024),
        Option("api_key", "text", "That callers must send. Default: the environment's JETSPEC_API_KEY, else none."),
        Option("drain_seconds", "number", "That SIGTERM gives to what was accepted.", 10.0, high=86400.0),
        Option("log", "flag", "One line an answer on stderr; never a prompt.", True),
        command.DTYPE,
        command.BACKEND,
    ],
)  # fmt: skip


@command.tool("serve", "end other programs, or take a smaller --batch, --context or --budget")
def main(argv: Sequence[str]) -> int:
    """Parses, listens, loads, serves; returns the exit status."""
    args = LINE.parse(argv)
    _check(args)
    _installed()
    from jetspec_jax.serve.service import Limits, Service

    key = args.api_key or os.environ.get("JETSPEC_API_KEY", "")
    name = args.model_name or (pathlib.Path(args.target).name if args.target else "smollm2-135m-instruct")
    service = Service(name, Limits(args.queue, args.max_body_bytes, args.kept_prefixes, key))
    try:
        listener = socket.create_server((args.host, args.port), reuse_port=False)
    except OSError as error:
        raise ConfigError(
            f"port={args.port}: {args.host} cannot be listened at ({error.strerror}); choose others"
        ) from None
    _say(f"listening on http://{args.host}:{listener.getsockname()[1]}, loading {args.target or 'the demo pair'}")
    return asyncio.run(_serve(args, service, listener))


def _check(args: command.Args) -> None:
    """Raises UsageError where options contradict each other."""
    headless = args.method is not None and not METHODS[args.method].head
    for name, other in (("head", "target"), ("target", "head")):
        if getattr(args, name) and not getattr(args, other) and not headless:
            raise UsageError(f"--{name} without --{other}: name both, or neither for the demo pair")
    for name in METHODS[args.method].refused if args.method else ():
        if name in args.given:
            raise UsageError(f"--{name} contradicts --method {args.method}; leave one of them out")
    if args.batch is not None and args.batch & (args.batch - 1):
        raise UsageError(f"--batch={args.batch}: give a power of two")


def _installed() -> None:
    """Raises ConfigError where the packages of the extra are not there."""
    for name in ("starlette", "uvicorn", "prometheus_client"):
        try:
            __import__(name)
        except ImportError:
            raise ConfigError(f"{name} is not installed; pip install 'jetspec_jax[serve]'") from None


async def _serve(args: command.Args, service: Any, listener: socket.socket) -> int:
    """Serves until a signal comes or loading fails; returns the exit status."""
    import uvicorn

    from jetspec_jax.serve import app, memory

    class Server(uvicorn.Server):
        """Signals are ours to answer."""

        @contextlib.contextmanager
        def capture_signals(self):
            yield

    memory.keep_pages()
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    signal.signal(signal.SIGTERM, lambda *_: loop.call_soon_threadsafe(ended.set))
    failure: list[BaseException] = []

    def load() -> None:
        try:
            _load(args, service)
        except BaseException as error:
            failure.append(error)
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

    loading = threading.Thread(target=load, name="loading", daemon=True)
    loading.start()
    made = app.make(service, _say if args.log else None)
    config = uvicorn.Config(
        made, log_level="critical", access_log=False, lifespan="off", ws="none", timeout_graceful_shutdown=2,
        server_header=False,
    )  # fmt: skip
    server = Server(config)
    serving = asyncio.ensure_future(server.serve(sockets=[listener]))
    watching = asyncio.ensure_future(_watch(service, ended))
    await asyncio.wait({serving, asyncio.ensure_future(ended.wait())}, return_when=asyncio.FIRST_COMPLETED)
    watching.cancel()
    failed = failure or (service.scheduler and service.scheduler.failed)
    _say("ending" if failed else f"draining for at most {args.drain_seconds:g} s")
    await service.drain(0 if failed else args.drain_seconds)
    server.should_exit = True
    await serving
    if failure:
        raise failure[0]
    if failed:
        raise ConfigError(f"the device has failed: {failed}")
    if loading.is_alive():  # XLA compiles in it, and does not take being ended
        _say("ended while compiling")
        os._exit(0)
    _say("ended")
    return 0


async def _watch(service: Any, ended: asyncio.Event) -> None:
    """Ends the server once the device has failed."""
    while not (service.scheduler and service.scheduler.failed):
        await asyncio.sleep(0.5)
    ended.set()


def _load(args: command.Args, service: Any) -> None:
    """Loads the pair and compiles everything."""
    import jax

    from jetspec_jax.engine import geometry
    from jetspec_jax.engine.slots import Plan, Slots
    from jetspec_jax.files import demo, load

    begin = time.perf_counter()
    target = load.load_target(args.target or demo.fetch_target(), args.dtype, args.backend)
    tree, head = command.tree_of(args), None
    if args.method and not METHODS[args.method].head:
        drafter = METHODS[args.method].drafter
        head = load.load_drafter(drafter, target) if drafter else None
    else:
        head = load.load_head(args.head or demo.head_folder(), target)
        tree = methods.tree(
            args.method or methods.usual(head, bool({"budget", "width", "tree"} & args.given)), tree, head
        )
    cpu = jax.default_backend() == "cpu"
    trees = _trees(tree, head)
    nodes, depth = trees.largest.nodes, trees.largest.depth
    most = target.config.context_length + depth + 1
    capacity = geometry.slots(min(args.context or (1024 if cpu else 4096), most))
    chunk = min(args.prefill_chunk or (64 if cpu else 512), capacity)
    batches = tuple(1 << i for i in range((args.batch or (4 if cpu else 32)).bit_length()))
    plan = Plan(capacity, batches, nodes, tuple(sorted({min(16 if cpu else 64, chunk), chunk})))
    slots = Slots(target, head if nodes > 1 else None, trees, plan)
    slots.prepare(_say if sys.stderr.isatty() else lambda line: None)
    service.open(target, head, slots)
    _say(f"ready after {time.perf_counter() - begin:.0f} s: {slots.compiled} programs, {slots.room} tokens a slot")


def _trees(tree: Any, head: Any) -> Any:
    """Returns what rows are drafted for: trees of all sizes that may pay, or of the one that is asked for."""
    import jax

    from jetspec_jax import speculate
    from jetspec_jax.engine import geometry, tempo
    from jetspec_jax.engine.slots import Trees
    from jetspec_jax.options import AUTO

    budget = tree.budget or (AUTO if speculate.paces(head) else geometry.default_budget())
    speculate.check_budgets(head, tree, [budget])
    if head is not None and budget == AUTO:
        return Trees(speculate.ladder_of(head, tree, tempo.SIZES[jax.default_backend()]), tree.rule, tree.prune)
    draft = speculate.draft_of(head, tree, 1 if budget == AUTO else geometry.budget_nodes([int(budget)]))
    return Trees({draft.nodes: draft}, prune=tree.prune)


def _say(line: str) -> None:
    print(outcome.cut(line), file=sys.stderr, flush=True)
