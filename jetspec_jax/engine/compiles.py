"""How many programs XLA has made for this process, the small ones of single operations among them."""

from __future__ import annotations

import jax

EVENT = "/jax/core/compile/backend_compile_duration"  # of every compilation, whether or not a file had the result
_COUNTED = [0]


def _count(event: str, duration_secs: float, **rest: str | int) -> None:
    if event == EVENT:
        _COUNTED[0] += 1


jax.monitoring.register_event_duration_secs_listener(_count)


def count() -> int:
    """Returns how many there have been since this module was imported."""
    return _COUNTED[0]
