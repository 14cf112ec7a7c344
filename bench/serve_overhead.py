"""What the server adds to a round of `generate`, over HTTP, both in one run.

    python bench/serve_overhead.py --batch 1 8

The demo pair (or --target and --head) decodes copies of a prompt, as many as rows, greedily and with a fixed budget: by
`speculate.generate` in this process, and by `python -m jetspec_jax.serve` in another one, as streams that begin
together. Slots, budget and rows are the same. A round of `generate` takes its decode time over its rounds; one of the
server what `--max_new_tokens` take longer than `--short` tokens, over the rounds that those have more, so that prompt
and connection count on neither side. The two take turns, and the other one waits: `--repeats` of each prompt, of which
the median is taken. Prints a table, then one JSON line.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("serve_overhead")

import contextlib
import dataclasses
import http.client
import json
import re
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence

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
        Option("short", "whole", "Tokens of the answers that are taken off.", 32, low=2),
        dataclasses.replace(command.SAMPLING["max_new_tokens"], default=256, low=8),
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
    room = geometry.slots(max(map(len, prompts)) + args.max_new_tokens + head.draft.depth + 1)
    device = f"{jax.devices()[0].device_kind}, jax {jax.__version__}"
    print(f"budget {budget}, {room} slots, {args.max_new_tokens} tokens; {device}")
    print(f"{'rows':>5} {'generate, ms a round':>21} {'server, ms a round':>19} {'overhead':>9}  of each prompt")
    rows = []
    for batch in args.batch:
        ours, theirs = [], []
        with served(args, batch, budget, room) as port:
            for ids in prompts:
                turns = [(offline(args, target, head, ids, batch, budget), online(args, port, ids, batch))
                         for _ in range(args.repeats + 1)][1:]  # fmt: skip  # the first compiles
                ours.append(statistics.median(turn[0] for turn in turns))
                theirs.append(statistics.median(turn[1] for turn in turns))
        over = [b / a - 1 for a, b in zip(ours, theirs, strict=True)]
        row = {"batch": batch, "generate_ms": 1e3 * statistics.mean(ours), "server_ms": 1e3 * statistics.mean(theirs)}
        row |= {"overhead": row["server_ms"] / row["generate_ms"] - 1, "of_prompts": over}
        rows.append(row)
        print(
            f"{batch:>5} {row['generate_ms']:>21.2f} {row['server_ms']:>19.2f} {row['overhead']:>9.1%}  "
            + ", ".join(f"{x:.1%}" for x in over),
            flush=True,
        )
    print(
        json.dumps(
            {"settings": command.settings(args), "device": device, "budget": budget, "slots": room, "rows": rows}
        )
    )
    return 0


def offline(args: command.Args, target, head, ids: Sequence[int], batch: int, budget: int) -> float:
    """Seconds of a round of `generate`."""
    option = SamplingConfig(args.max_new_tokens, ignore_eos=True)
    results = speculate.generate(target, head, [list(ids)] * batch, TreeConfig(budget), option)
    return results[0].seconds["decode"] / results[0].rounds


def online(args: command.Args, port: int, ids: Sequence[int], batch: int) -> float:
    """Seconds of a round of the server."""
    short, long = (asked(port, ids, batch, tokens) for tokens in (args.short, args.max_new_tokens))
    return (long[0] - short[0]) / (long[1] - short[1])


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
def served(args: command.Args, batch: int, budget: int, room: int) -> Iterator[int]:
    """The port of a server that is ready; it ends with the block."""
    words = [sys.executable, "-m", "jetspec_jax.serve", "--port", "0", "--nolog", "--kept_prefixes", "1"]
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
        yield port
    finally:
        timer.cancel()
        server.terminate()
        server.wait()


if __name__ == "__main__":
    raise SystemExit(main())
