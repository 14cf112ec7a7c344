"""Where the time of a profiler trace goes: device time by kernel.

    python bench/decode_latency.py --shape qwen3-8b --budgets 64 --profile /tmp/trace
    python bench/kernels.py /tmp/trace/1024-2048/64 --steps 8

The folder is DIR/LENGTH-SLOTS/BUDGET of `--profile DIR`, budget 1 the plain step.
"""

from __future__ import annotations

import argparse
import collections
import pathlib
import re
import sys

import jax


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=pathlib.Path)
    parser.add_argument("--steps", type=int, default=8, help="steps in the trace")
    parser.add_argument("--top", type=int, default=30)
    args = parser.parse_args()
    traces = sorted(args.folder.rglob("*.xplane.pb"))
    if len(traces) != 1:
        sys.exit(f"kernels: {len(traces)} traces (*.xplane.pb) in {args.folder}; give the folder of one")
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


if __name__ == "__main__":
    main()
