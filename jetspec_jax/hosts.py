"""Several processes that are one run: a process a host, started with the same words.

    decode.py ... --mesh data=2,model=8 --coordinator HOST:PORT --processes 2 --process 0     and 1 on the other host
    decode.py ... --mesh data=2,model=8 --coordinator auto                                    a TPU slice, Slurm, ...

`jax.distributed` connects them. Every process does the same work with its own devices; the first one alone prints, but
each says its own errors.
"""

from __future__ import annotations

import os
import sys

from jetspec_jax import outcome
from jetspec_jax.command import Args, UsageError
from jetspec_jax.fields import Option, shown

AUTO = "auto"
OPTIONS = [
    Option(
        "coordinator", "text",
        "Address HOST:PORT of the first of several processes; auto: as the cluster's environment says it (TPU slices, "
        "Slurm, Open MPI). Default: there is one process.",
        metavar="HOST:PORT",
    ),
    Option("processes", "whole", "How many there are; with --coordinator HOST:PORT.", low=1),
    Option("process", "whole", "Which one this is, from 0; with --coordinator HOST:PORT.", low=0),
]  # fmt: skip


def check(args: Args) -> None:
    """Raises UsageError where the options of `OPTIONS` contradict each other."""
    number, count = args.process, args.processes
    numbered = [name for name in ("processes", "process") if getattr(args, name) is not None]
    if args.coordinator in (None, AUTO):
        if numbered:
            why = "without --coordinator" if args.coordinator is None else "with --coordinator auto"
            raise UsageError(f"--{numbered[0]} {why}: give --coordinator HOST:PORT, or leave it out")
        return
    host, _, port = args.coordinator.rpartition(":")
    if not host or not port.isdecimal():
        raise UsageError(f"--coordinator={shown(args.coordinator)}: give HOST:PORT, or auto")
    if len(numbered) < 2:
        raise UsageError("--coordinator without --processes and --process: say how many there are, and which this is")
    if number >= count:
        raise UsageError(f"--process={number}: with --processes={count} they are 0..{count - 1}")


def join(args: Args) -> None:
    """Connects this process with the others, before jax looks for devices; nothing where there is one process.

    Raises:
      UsageError: they cannot be connected.
    """
    if args.coordinator is None:
        return
    import jax

    own = [os.dup(stream) for stream in (1, 2)]
    os.dup2(2, 1)  # what libraries print of connections is no output of the command
    sys.stdout = os.fdopen(own[0], "w", buffering=1, encoding="utf-8")
    given = (None, None, None) if args.coordinator == AUTO else (args.coordinator, args.processes, args.process)
    try:
        jax.distributed.initialize(*given)
    except (RuntimeError, ValueError) as error:
        why = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
        raise UsageError(f"--coordinator={args.coordinator}: the processes cannot be connected ({why})") from None
    if jax.process_index():
        outcome.name_errors(os.fdopen(own[1], "w", buffering=1), f"process {jax.process_index()}")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in (1, 2, sys.stdout.fileno()):
            os.dup2(nowhere, stream)
