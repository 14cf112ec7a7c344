"""Runs a program that nobody has read, with limits: its own process group, folder, CPU seconds and memory.

This bounds accidents, endless loops and hunger for memory; it is no wall against malice. The network is cut off where
the kernel lets a user do so, and files outside the folder can be read and, with the user's rights, written.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

SECONDS, MEMORY = 10, 1 << 30
WALL = 3.0  # how much longer than its CPU seconds a program may take, as a factor
SHOWN = 200  # characters of a reason

# Runs in the child: limits first, then the program; the word is written when the program came to its end by itself.
BOOT = """
import ctypes, os, resource, sys
path, word, out, seconds, memory = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5])
for name, most in (("CPU", seconds), ("AS", memory), ("FSIZE", 1 << 24), ("CORE", 0), ("NOFILE", 64)):
    kind = getattr(resource, "RLIMIT_" + name)
    hard = resource.getrlimit(kind)[1]
    most = most if hard == resource.RLIM_INFINITY else min(most, hard)
    resource.setrlimit(kind, (most, most))
try:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(1, 9)  # PR_SET_PDEATHSIG: it dies with whoever started it
    libc.unshare(0x10000000 | 0x40000000)  # CLONE_NEWUSER | CLONE_NEWNET: no network, where that is allowed
except (OSError, AttributeError):
    pass
sys.argv = [path]
source = open(path, encoding="utf-8").read()
exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})
os.write(out, word.encode())
"""


class Outcome(NamedTuple):
    """What came of a program. why: one line; empty where it came to its end."""

    passed: bool
    why: str


def run(program: str, seconds: int = SECONDS, memory: int = MEMORY) -> Outcome:
    """Runs a Python program; it passes when it comes to its end without an exception, and does not end itself.

    Args:
      program: its source.
      seconds: of CPU that it may take; three times as many may pass.
      memory: bytes of address space.
    """
    word = secrets.token_hex(16)
    with (
        tempfile.TemporaryDirectory(prefix="jetspec-run-") as folder,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as said,
    ):
        path = Path(folder) / "program.py"
        path.write_text(program, encoding="utf-8", errors="replace")
        command = [sys.executable, "-I", "-c", BOOT, str(path), word, str(out.fileno()), str(seconds), str(memory)]
        child = subprocess.Popen(
            command, cwd=folder, env={"PATH": os.defpath, "HOME": folder, "TMPDIR": folder}, stderr=said,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, pass_fds=(out.fileno(),), start_new_session=True,
        )  # fmt: skip
        late = False
        try:
            child.wait(WALL * seconds)
        except subprocess.TimeoutExpired:
            late = True
        finally:  # whatever it has started, and the program itself where we are interrupted
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        out.seek(0)
        said.seek(0, os.SEEK_END)
        said.seek(max(said.tell() - 4096, 0))
        lines = said.read().decode("utf-8", "replace").strip().splitlines()
        ended = out.read().decode("utf-8", "replace") == word
    if late:
        return Outcome(False, f"no end within {WALL * seconds:g} seconds")
    if child.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
        return Outcome(False, f"killed at its limit of {seconds} seconds of CPU, or of memory")
    if child.returncode == 0 and ended:
        return Outcome(True, "")
    if child.returncode == 0:
        return Outcome(False, "it ended before its tests did")
    return Outcome(False, (lines[-1] if lines else f"status {child.returncode}")[:SHOWN])
