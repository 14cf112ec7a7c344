"""Keeps the pages that a program has used, for the next one.

A launch on a CPU takes its scratch memory from the system and gives it back: tens of megabytes whose pages are cleared
and mapped anew each time. For a block of one round that is a fifth of its time (docs/serving.md). The arenas that glibc
gives to threads are small and give their pages back whatever they are told, so there is to be but one.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

TRIM_THRESHOLD, MMAP_MAX, ARENA_MAX = -1, -4, -8  # of glibc's mallopt
KEEP = ((ARENA_MAX, 1), (MMAP_MAX, 0), (TRIM_THRESHOLD, 2**31 - 1))


def keep_pages() -> bool:
    """Tells the C library to keep freed memory; returns whether it does (glibc alone knows how).

    Threads that are there already keep their arenas, so it is called before jax makes its own.
    """
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return sum(mallopt(name, value) for name, value in KEEP) == len(KEEP)  # each, whatever the others say
    return False
