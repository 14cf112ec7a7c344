"""Load on a server: how long callers wait, and how many tokens they all get.

    python -m jetspec_jax.serve --port 8000
    python -m jetspec_jax.evals.serve_bench --url http://127.0.0.1:8000 --clients 1 2 4 8 --out load.jsonl

Closed loop: each of `--clients` asks again as soon as it has its answer. `--rate` adds a level for each number of
requests a second, which come by a Poisson process whatever the answers take. Every level asks for the same answers
(`--requests` of them, greedy unless `--temperature`), as streams. TTFT is the time to the first piece of text; the time
per token is that of the answer after its first piece, over its tokens after the first, so that pieces of several tokens
count as many. Prints a table; `--out` gets a line for each answer and one for each level.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("jetspec_jax.evals.serve_bench")

import dataclasses
import http.client
import json
import queue
import random
import statistics
import threading
import time
import urllib.parse
from collections.abc import Callable, Sequence
from typing import Any

from jetspec_jax import command
from jetspec_jax.fields import ConfigError, Option
from jetspec_jax.files import prompts as prompt_files

USUAL = (
    "Write a short story about a river.", "How does a bicycle stay upright?", "List ten animals and where they live.",
    "Natalia sold 48 clips in April and half as many in May. How many did she sell in both months?",
    "Write a Python function that tells whether a number is prime.", "What is the capital of France, and why?",
    "Explain photosynthesis to a child.", "A train goes 60 miles an hour for 3 hours. How far does it go?",
)  # fmt: skip
LINE = command.Line(
    __doc__,
    [
        Option("url", "text", "Of the server.", "http://127.0.0.1:8000"),
        Option(
            "clients", "whole", "Callers of a closed loop, a level each.", (1, 2, 4, 8), low=1, high=1024, many=True
        ),
        Option("rate", "number", "Requests a second of a Poisson process, a level each.", (), above=True, many=True),
        Option("requests", "whole", "Of each level.", 32, low=1),
        Option("max_new_tokens", "whole", "Of each answer; it goes on after an end token.", 128, low=2),
        Option("temperature", "number", "Of each answer.", 0.0),
        Option("seed", "whole", "Of the first answer and of the arrivals.", 0),
        Option("prompts", "text", "Prompt files with prompts or messages. Default: eight of our own.", many=True,
               metavar="FILE"),
        Option("api_key", "text", "Of the server."),
        Option("out", "text", "A JSONL file for every answer and every level.", metavar="FILE"),
    ],
)  # fmt: skip


@dataclasses.dataclass
class Call:
    """One answer as its caller saw it; times in seconds. error: a line where there is none."""

    begin: float
    first: float = 0.0
    end: float = 0.0
    tokens: int = 0
    rounds: int = 0
    accepted: int = 0
    error: str = ""

    def report(self) -> dict[str, Any]:
        """Returns it as a line of the file."""
        own = {"ttft": self.first - self.begin, "seconds": self.end - self.begin, "tokens": self.tokens}
        each = (self.end - self.first) / max(self.tokens - 1, 1)
        return own | {"per_token": each, "rounds": self.rounds, "accepted": self.accepted, "error": self.error}


@command.tool("serve_bench")
def main(argv: Sequence[str]) -> int:
    """Runs every level; returns the exit status."""
    args = LINE.parse(argv)
    ask = Asker(args)
    levels = [("clients", n, lambda n=n: closed(ask, args.requests, n)) for n in args.clients]
    levels += [("rate", r, lambda r=r: poisson(ask, args.requests, r, args.seed)) for r in args.rate]
    rows = []
    with open(args.out or "/dev/null", "w", encoding="utf-8") as file:
        for kind, load, run in levels:
            begin = time.perf_counter()
            calls = run()
            row = summary(calls, time.perf_counter() - begin) | {kind: load, "budget": ask.budget()}
            for call in calls:
                print(json.dumps(call.report() | {kind: load}), file=file)
            print(json.dumps(row), file=file, flush=True)
            rows.append(row)
    print(table(rows))
    print(json.dumps({"levels": rows}))
    return 1 if any(row["errors"] for row in rows) else 0


class Asker:
    """Calls a server, with the prompts in turn."""

    def __init__(self, args: command.Args):
        self._args = args
        where = urllib.parse.urlsplit(args.url)
        if where.scheme != "http" or not where.hostname:
            raise ConfigError(f"url={args.url}: give http://HOST:PORT")
        self._place = where.hostname, where.port or 80
        self._headers = {"Content-Type": "application/json"}
        if args.api_key:
            self._headers["Authorization"] = f"Bearer {args.api_key}"
        self._prompts = [[{"role": "user", "content": text}] for text in USUAL]
        if args.prompts:
            found = [row.prompt for path in args.prompts for row in prompt_files.read(path)]
            texts = lambda p: [{"role": "user", "content": p}] if isinstance(p, str) else p
            if any(isinstance(p[0], int) for p in found):
                raise ConfigError("prompts: a row of token ids; the chat interface takes texts and messages")
            self._prompts = [texts(p) for p in found]
        try:
            self.get("/health/ready")
        except (OSError, http.client.HTTPException) as error:
            raise ConfigError(f"url={args.url}: no server answers there ({error}); start one") from None

    def get(self, path: str) -> str:
        """Returns what a path says; raises ConfigError where that is an error."""
        line = http.client.HTTPConnection(*self._place, timeout=30)
        line.request("GET", path, headers=self._headers)
        answer = line.getresponse()
        said = answer.read().decode()
        if answer.status != 200:
            raise ConfigError(f"url={self._args.url}: {path} answers {answer.status}: {said[:200]}")
        return said

    def budget(self) -> float:
        """Returns the tree nodes of a round in force."""
        for line in self.get("/metrics").splitlines():
            if line.startswith("jetspec_budget_nodes "):
                return float(line.split()[-1])
        return 0.0

    def __call__(self, number: int) -> Call:
        """Asks for one answer, and reads it to its end."""
        args, call = self._args, Call(time.perf_counter())
        body = {
            "messages": self._prompts[number % len(self._prompts)],
            "max_tokens": args.max_new_tokens, "temperature": args.temperature, "seed": args.seed + number,
            "ignore_eos": True, "stream": True, "stream_options": {"include_usage": True},
        }  # fmt: skip
        line = http.client.HTTPConnection(*self._place, timeout=600)
        try:
            line.request("POST", "/v1/chat/completions", json.dumps(body), self._headers)
            answer = line.getresponse()
            if answer.status != 200:
                call.error = f"{answer.status}: {answer.read().decode()[:200]}"
            while not call.error and (data := answer.readline()):
                _heard(call, data.decode().strip())
        except (OSError, http.client.HTTPException) as error:
            call.error = str(error) or type(error).__name__
        finally:
            line.close()
        call.end = time.perf_counter()
        call.error = call.error or ("" if call.tokens else "the answer ended before its usage")
        return call


def _heard(call: Call, line: str) -> None:
    """Takes in one line of a stream."""
    if not line.startswith("data: ") or line == "data: [DONE]":
        return
    event = json.loads(line.removeprefix("data: "))
    if "error" in event:
        call.error = event["error"]["message"]
    elif event["choices"] and event["choices"][0]["delta"].get("content") and not call.first:
        call.first = time.perf_counter()
    elif event.get("usage"):
        found = event.get("metrics", {}).get("speculative_decoding", {})
        call.tokens = event["usage"]["completion_tokens"]
        call.rounds, call.accepted = found.get("num_spec_steps", 0), found.get("num_accepted_draft_tokens", 0)


def closed(ask: Callable[[int], Call], requests: int, clients: int) -> list[Call]:
    """Returns the answers to so many requests, by clients that ask again when they have theirs."""
    left: queue.SimpleQueue[int] = queue.SimpleQueue()
    for number in range(requests):
        left.put(number)

    def work() -> None:
        while True:
            try:
                number = left.get_nowait()
            except queue.Empty:
                return
            calls[number] = ask(number)

    calls: dict[int, Call] = {}
    _run([work] * min(clients, requests))
    return [calls[number] for number in sorted(calls)]


def poisson(ask: Callable[[int], Call], requests: int, rate: float, seed: int) -> list[Call]:
    """Returns the answers to requests that come at random, `rate` a second."""
    draw, calls = random.Random(seed), {}

    def call(number: int) -> None:
        calls[number] = ask(number)

    threads = []
    for number in range(requests):
        threads.append(threading.Thread(target=call, args=(number,), daemon=True))
        threads[-1].start()
        time.sleep(draw.expovariate(rate))
    for thread in threads:
        thread.join()
    return [calls[number] for number in sorted(calls)]


def _run(works: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=work, daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def summary(calls: Sequence[Call], seconds: float) -> dict[str, Any]:
    """Returns what a level's answers say together; medians and 95th percentiles over answers."""
    right = [call for call in calls if not call.error]
    reports = [call.report() for call in right]
    rounds = sum(call.rounds for call in right)
    found: dict[str, Any] = {
        "requests": len(calls),
        "errors": len(calls) - len(right),
        "seconds": seconds,
        "tokens_per_second": sum(call.tokens for call in right) / seconds,
        "acceptance_length": 1 + sum(call.accepted for call in right) / rounds if rounds else 0.0,
    }
    for name in ("ttft", "per_token"):
        values = sorted(report[name] for report in reports)
        found[f"{name}_median"] = statistics.median(values) if values else 0.0
        found[f"{name}_95"] = values[min(len(values) * 95 // 100, len(values) - 1)] if values else 0.0
    return found


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns the levels as a table for people."""
    head = "| load | answers | errors | tokens/s | TTFT s (95 %) | ms a token (95 %) | tokens a round | budget |"
    lines = [head, "| --- " * 8 + "|"]
    for row in rows:
        load = f"{row['clients']} clients" if "clients" in row else f"{row['rate']:g} a second"
        cells = [
            load, row["requests"], row["errors"], f"{row['tokens_per_second']:.1f}",
            f"{row['ttft_median']:.2f} ({row['ttft_95']:.2f})",
            f"{1e3 * row['per_token_median']:.1f} ({1e3 * row['per_token_95']:.1f})",
            f"{row['acceptance_length']:.2f}", f"{row['budget']:g}",
        ]  # fmt: skip
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)
