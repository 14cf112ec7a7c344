"""Work of somebody else's making under a limit of processor time, in whatever thread it runs.

A chat template is a program out of a file. Its sandbox keeps it from doing harm, but not from never ending.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Collection
from typing import TypeVar

from jetspec_jax.fields import ConfigError

T = TypeVar("T")


class _Late(BaseException):
    """Time is up. No Exception: jinja swallows those where it folds constants, and the tracing has ended then."""


def run(work: Callable[[], T], seconds: float, files: Collection[str]) -> T:
    """Returns `work()`, ended once this thread has computed for too long.

    Time is looked at where Python calls a function and at every line of code of the named files, whose loops may call
    none; a single call into C is not interrupted. The thread's own processor time is meant, so a busy machine refuses
    nothing.

    Raises:
      ConfigError: it took longer than `seconds`.
    """
    end = time.thread_time() + seconds

    def look(frame, event, argument):
        if time.thread_time() > end:
            raise _Late()
        return look if frame.f_code.co_filename in files else None

    before = sys.gettrace()
    sys.settrace(look)
    try:
        return work()
    except _Late:
        raise ConfigError(f"it computes for more than {seconds:g} seconds") from None
    finally:
        sys.settrace(before)
