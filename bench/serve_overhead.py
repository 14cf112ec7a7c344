"""What the server adds to a round of `generate`, over HTTP, both in one run.

    python bench/serve_overhead.py --batch 1 8

The demo pair (or --target and --head) decodes copies of a prompt, as many as rows, greedily and with a fixed budget: by
`speculate.generate` in this process, and by `python -m jetspec_jax.serve` in another one, as streams that begin
together. Slots, budget and rows are the same. A round's time is that of an answer of `--max_new_tokens` less that of
one of `--short` tokens, over the rounds between them, so prompt and connection cancel: on the clock, and in processor
time of all threads, which other work disturbs least. The two take turns, and the other one waits: `--repeats` of each
prompt, of which the median is taken. Prints a table, then one JSON line.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("serve_overhead")

import contextlib
import dataclasses
import functools
import http.client
import json
import os
import pathlib
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import jax
import timing

from jetspec_jax import command, speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.engine import geometry
from jetspec_jax.evals.serve_bench import USUAL
from jetspec_jax.fields import ConfigError, Option

LINE = command.Line(
    __doc__,
    [
        Option("batch", "whole", "Rows that run together, a power of two.", (1, 8), low=1, many=True),
        Option("budget", "whole", "Tree nodes of a round. Default: 8 on a CPU, else 64.", low=2),
        Option("prompts", "whole", "How many of our own prompts are asked.", 3, low=1, high=len(USUAL)),
        Option("short", "whole", "Tokens of the answers that are taken off.", 64, low=2),
        dataclasses.replace(command.SAMPLING["max_new_tokens"], default=192, low=8),
        dataclasses.replace(timing.REPEATS, default=3),
        command.TARGET,
        command.HEAD,
        command.DTYPE,
        command.BACKEND,
    ],
)
READY = 900  # seconds within which a server has compiled


@command.tool("bench/serve_overhead.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)
    if args.short >= args.max_new_tokens:
        raise command.UsageError(f"--short={args.short}: give less than --max_new_tokens={args.max_new_tokens}")
    target, head = command.pair_of(args)
    budget = args.budget or geometry.DEFAULT_BUDGET[jax.default_backend()]
    prompts = [target.tokenizer.encode(text) for text in USUAL[: args.prompts]]
    room, least = (
        geometry.slots(max(map(len, prompts)) + tokens + head.draft.depth + 1)
        for tokens in (args.max_new_tokens, args.short)
    )
    if least < room:
        raise command.UsageError(f"--short={args.short}: it has {least} slots, the others {room}; give more")
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    print(f"budget {budget}, {room} slots, {args.max_new_tokens} tokens; {device}; ms of a round")
    print(f"{'rows':>5} {'':>15} {'generate':>9} {'server':>9} {'overhead':>9}  of each prompt")
    rows = []
    for batch in args.batch:
        found = []
        with served(args, batch, budget, room) as (port, process):
            for ids in prompts:
                here = functools.partial(offline, target, head, ids, batch, budget)
                there = functools.partial(online, port, process, ids, batch)
                for tokens in (args.short, args.max_new_tokens):
                    here(tokens)  # it compiles
                turns = [[a_round(args, way) for way in (here, there)] for _ in range(args.repeats)]
                found.append(
                    [[statistics.median(x) for x in zip(*way, strict=True)] for way in zip(*turns, strict=True)]
                )
        row: dict = {"batch": batch}
        for i, clock in enumerate(("wall", "processor time")):
            ours, theirs = ([1e3 * one[way][i] for one in found] for way in range(2))
            over = [b / a - 1 for a, b in zip(ours, theirs, strict=True)]
            row[clock] = {
                "generate_ms": statistics.mean(ours), "server_ms": statistics.mean(theirs),
                "overhead": sum(theirs) / sum(ours) - 1, "of_prompts": over,
            }  # fmt: skip
            print(
                f"{batch:>5} {clock:>15} {row[clock]['generate_ms']:>9.2f} {row[clock]['server_ms']:>9.2f} "
                f"{row[clock]['overhead']:>9.1%}  " + ", ".join(f"{x:.1%}" for x in over),
                flush=True,
            )
        rows.append(row)
    said = {"settings": command.settings(args), "device": device, "budget": budget, "slots": room, "rows": rows}
    print(json.dumps(said))
    return 0


class Spent(NamedTuple):
    """What answers took: seconds on the clock and of processors, and their rounds."""

    wall: float
    processor: float
    rounds: int


def a_round(args: command.Args, way: Callable[[int], Spent]) -> tuple[float, float]:
    """Seconds of a round, on the clock and of processors."""
    short, long = way(args.short), way(args.max_new_tokens)
    rounds = long.rounds - short.rounds
    return (long.wall - short.wall) / rounds, (long.processor - short.processor) / rounds


def offline(target, head, ids: Sequence[int], batch: int, budget: int, tokens: int) -> Spent:
    """Equal answers of `generate`."""
    option, begin, spent = SamplingConfig(tokens, ignore_eos=True), time.perf_counter(), time.process_time()
    results = speculate.generate(target, head, [list(ids)] * batch, TreeConfig(budget), option)
    return Spent(time.perf_counter() - begin, time.process_time() - spent, results[0].rounds)


def online(port: int, process: int, ids: Sequence[int], batch: int, tokens: int) -> Spent:
    """Equal answers of the server."""
    begin = processor_time(process)
    wall, rounds = asked(port, ids, batch, tokens)
    return Spent(wall, processor_time(process) - begin, rounds)


def processor_time(process: int) -> float:
    """Seconds that all threads of a process have had, as Linux tells them."""
    words = pathlib.Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")


def asked(port: int, ids: Sequence[int], batch: int, tokens: int) -> tuple[float, int]:
    """Seconds until the last of `batch` equal answers has ended, and their rounds."""
    body = {
        "prompt": list(ids), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
        "stream_options": {"include_usage": True}, "seed": 0,
    }  # fmt: skip
    rounds: list[int] = []

    def call() -> None:
        line = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
        line.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        said = line.getresponse().read().decode()
        line.close()
        counts = re.findall(r'"num_spec_steps": ?(\d+)', said)
        rounds.extend(int(count) for count in counts[-1:])

    threads = [threading.Thread(target=call, daemon=True) for _ in range(batch)]
    begin = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if len(rounds) < batch:
        raise ConfigError(f"the server answered {len(rounds)} of {batch} requests; its own lines say why")
    return time.perf_counter() - begin, max(rounds)


@contextlib.contextmanager
def served(args: command.Args, batch: int, budget: int, room: int) -> Iterator[tuple[int, int]]:
    """The port and the process of a server that is ready; it ends with the block."""
    words = [sys.executable, "-m", "jetspec_jax.serve", "--port", "0", "--nolog", "--kept_prefixes", "0"]
    words += ["--batch", str(batch), "--budget", str(budget), "--context", str(room)]
    for name in ("target", "head", "dtype", "backend"):
        words += [f"--{name}", getattr(args, name)] if getattr(args, name) else []
    server = subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    timer = threading.Timer(READY, server.kill)
    timer.start()
    try:
        port, last = 0, ""
        for last in server.stderr or ():
            port = int(found[1]) if (found := re.search(r"listening on http://[^:]+:(\d+)", last)) else port
            if "ready after" in last:
                break
        else:
            raise ConfigError(f"the server ended before it was ready: {last.strip()}")
        threading.Thread(target=lambda: [*server.stderr], daemon=True).start()  # so that it is never held up
        yield port, server.pid
    finally:
        timer.cancel()
        server.terminate()
        server.wait()


if __name__ == "__main__":
    raise SystemExit(main())
