"""Work of somebody else's making under a limit of processor time, in whatever thread it runs.

A chat template is a program out of a file. Its sandbox keeps it from doing harm, but not from never ending.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TypeVar

from jetspec_jax.fields import ConfigError

T = TypeVar("T")


def run(work: Callable[[], T], seconds: float, file: str) -> T:
    """Returns `work()`, ended once this thread has computed for too long.

    Time is looked at where Python calls a function and at every line of code of the file named `file`; a single call
    into C is not interrupted. The thread's own processor time is meant, so a busy machine refuses nothing.

    Raises:
      ConfigError: it took longer than `seconds`.
    """
    end = time.thread_time() + seconds

    def look(frame, event, argument):
        if time.thread_time() > end:
            raise ConfigError(f"it computes for more than {seconds:g} seconds")
        return look if frame.f_code.co_filename == file else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        return work()
    finally:
        sys.settrace(before)
