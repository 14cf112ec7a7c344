"""Compiled programs of a process: one for each function, decoder and set of shapes, the most recent kept."""

from __future__ import annotations

import collections
import functools
import time
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax

from jetspec_jax.engine import spread

KEPT = 256  # programs of a process; each holds code on the device and no weights


class Compiled(NamedTuple):
    """A program, and the seconds it took to make (0 when it was there)."""

    run: Any  # jax.stages.Compiled, or what gives it arguments that lie as it takes them
    seconds: float


_PROGRAMS: collections.OrderedDict[Hashable, Any] = collections.OrderedDict()


def program(function: Callable, decoder: Hashable, *args, donate: tuple[int, ...] = ()) -> Compiled:
    """Returns the program that computes `function(decoder, *args)` for arguments of these shapes.

    Args:
      function: of the static decoder and of arrays. It is the key itself, so a function made anew is another one.
      decoder: static; equal ones share their programs. One whose target has a mesh makes a program of all its devices.
      args: arrays or their shapes, in any pytree.
      donate: indices into `args` of what the program may overwrite.
    """
    leaves, structure = jax.tree.flatten(args)
    backend = spread.backend_of(decoder)
    lie = [getattr(x, "sharding", None) for x in leaves]
    lie = lie if backend is None else jax.tree.leaves(spread.layout(args, backend.mesh))
    described = tuple((x.shape, x.dtype, where) for x, where in zip(leaves, lie, strict=True))
    key = function, decoder, structure, described, donate
    if key in _PROGRAMS:
        _PROGRAMS.move_to_end(key)
        return Compiled(_PROGRAMS[key], 0.0)
    begin = time.perf_counter()
    if backend is None:
        _PROGRAMS[key] = _named(function, functools.partial(function, decoder), donate).lower(*args).compile()
    else:
        made = spread.spread(function, decoder, backend, args)
        run = _named(function, made.function, donate).lower(*made.args).compile()
        _PROGRAMS[key] = functools.partial(_placed, run, jax.tree.map(lambda x: x.sharding, made.args))
    while len(_PROGRAMS) > KEPT:
        _PROGRAMS.popitem(last=False)
    return Compiled(_PROGRAMS[key], time.perf_counter() - begin)


def _named(function: Callable, bound: Callable, donate: tuple[int, ...]) -> Any:
    """Returns the jitted function, with a name for profiles and tracebacks."""
    bound = functools.wraps(function)(functools.partial(bound))
    del bound.__wrapped__  # else jax would look for the decoder among the arguments
    return jax.jit(bound, donate_argnums=donate)


def _placed(run: Any, layout: Any, *args: Any) -> Any:
    return run(*jax.tree.map(spread.put, args, layout))
