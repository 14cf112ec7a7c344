"""Compiled programs of a process: one for each function, decoder and set of shapes, the most recent kept."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax

KEPT = 256  # programs of a process; each holds code on the device and no weights


class Compiled(NamedTuple):
    """A program, and the seconds it took to make (0 when it was there)."""

    run: Any  # jax.stages.Compiled
    seconds: float


_PROGRAMS: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()


def program(function: Callable, decoder: Hashable, *args, donate: tuple[int, ...] = ()) -> Compiled:
    """Returns the program that computes `function(decoder, *args)` for arguments of these shapes.

    Args:
      function: of the static decoder and of arrays. It is the key itself, so a function made anew is another one.
      decoder: static; equal ones share their programs.
      args: arrays or their shapes, in any pytree.
      donate: indices into `args` of what the program may overwrite.
    """
    leaves, structure = jax.tree.flatten(args)
    described = tuple((x.shape, x.dtype, getattr(x, "sharding", None)) for x in leaves)
    key = function, decoder, structure, described, donate
    if key in _PROGRAMS:
        _PROGRAMS.move_to_end(key)
        return Compiled(_PROGRAMS[key], 0.0)
    begin = time.perf_counter()
    bound = functools.wraps(function)(functools.partial(function, decoder))  # a name for profiles and tracebacks
    del bound.__wrapped__  # else jax would look for the decoder among the arguments
    _PROGRAMS[key] = jax.jit(bound, donate_argnums=donate).lower(*args).compile()
    while len(_PROGRAMS) > KEPT:
        _PROGRAMS.popitem(last=False)
    return Compiled(_PROGRAMS[key], time.perf_counter() - begin)
