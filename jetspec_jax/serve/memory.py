"""Keeps the pages that a program has used, for the next one.

A launch on a CPU takes its scratch memory from the system and gives it back: tens of megabytes whose pages are cleared
and mapped anew each time. For a block of one round that is a fifth of its time (docs/serving.md).
"""

from __future__ import annotations

import contextlib
import ctypes
import sys

TRIM_THRESHOLD, MMAP_MAX = -1, -4  # of glibc's mallopt


def keep_pages() -> bool:
    """Tells the C library to keep freed memory; returns whether it does (glibc alone knows how)."""
    if not sys.platform.startswith("linux"):
        return False
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(MMAP_MAX, 0)) and bool(mallopt(TRIM_THRESHOLD, 2**31 - 1))
    return False
