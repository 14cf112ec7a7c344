"""Where the time of a profiler trace goes: device time by kernel.

    python bench/decode_latency.py --shape qwen3-8b --budgets 64 --profile /tmp/trace
    python bench/kernels.py /tmp/trace/1024-2048/64 --steps 8

The folder is DIR/LENGTH-SLOTS/BUDGET of `--profile DIR`, budget 1 the plain step.
"""

from __future__ import annotations

if __name__ == "__main__":  # before the slow imports
    from jetspec_jax import outcome

    outcome.start("kernels")

import collections
import pathlib
import re
from collections.abc import Sequence

import jax

from jetspec_jax import command
from jetspec_jax.fields import ConfigError, Option

LINE = command.Line(
    __doc__,
    [
        Option("steps", "whole", "Steps in the trace.", 8, low=1),
        Option("top", "whole", "Kernels that are shown.", 30, low=1),
    ],
    [Option("folder", "text", "Folder of one trace.", required=True, metavar="FOLDER")],
)


@command.tool("bench/kernels.py")
def main(argv: Sequence[str]) -> int:
    """The command of the module's docstring; the exit status."""
    args = LINE.parse(argv)
    traces = sorted(pathlib.Path(args.folder).rglob("*.xplane.pb"))
    if len(traces) != 1:
        raise ConfigError(f"{args.folder}: {len(traces)} traces (*.xplane.pb) in it; give the folder of one")
    total: dict[str, float] = collections.Counter()
    count: dict[str, int] = collections.Counter()
    for plane in jax.profiler.ProfileData.from_file(str(traces[0])).planes:
        if not plane.name.startswith("/device:"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue
            for event in line.events:
                name = re.sub(r"_\d+$", "", event.name)
                total[name] += event.duration_ns
                count[name] += 1
    busy = sum(total.values()) / args.steps
    print(f"{busy / 1e6:.3f} ms of kernels and {sum(count.values()) / args.steps:.0f} launches a step")
    for name, spent in sorted(total.items(), key=lambda x: -x[1])[: args.top]:
        print(f"{spent / args.steps / 1e3:9.1f} us {count[name] / args.steps:7.1f} x  {name[:150]}")
    return 0
