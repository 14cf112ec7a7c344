"""A program of the loop on a mesh of devices: each runs it with its rows of the batch and its part of the weights.

How an argument lies on the devices, it says itself; what the host made is dealt out by rows. How a result lies is read
off: what is smaller on a device than in the program for one device is a part, along `data` in its first axis (rows) and
along `model` in another (kv heads of a cache, tokens of logits).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from jetspec_jax.backends.mesh import Sharded
from jetspec_jax.layers import vocabulary
from jetspec_jax.loop.decoder import insert
from jetspec_jax.loop.pacing import Belief
from jetspec_jax.models.sharding import AnyMesh


class Spread(NamedTuple):
    """A program on a mesh: a function, and how its arguments and its result lie, as shapes with shardings."""

    function: Callable
    args: Any
    result: Any


def backend_of(static: Any) -> Sharded | None:
    """Returns the mesh backend of a decoder, or of what holds one; None for one device."""
    decoder = getattr(static, "decoder", static)
    backend = getattr(getattr(decoder, "target", None), "backend", None)
    return backend if isinstance(backend, Sharded) else None


def layout(args: Any, mesh: AnyMesh) -> Any:
    """Returns how arguments lie on a mesh: as they do, else by rows; a belief is no row's own."""

    def one(x) -> Any:
        if isinstance(x, Belief):
            return jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec()), x)
        own = getattr(x, "sharding", None)
        if isinstance(own, NamedSharding) and own.mesh.shape_tuple == mesh.shape_tuple:
            axes = [*own.spec]
            while axes and axes[-1] is None:
                axes.pop()
        else:
            axes = ["data"] if np.ndim(x) else []
        return NamedSharding(mesh, PartitionSpec(*axes))

    return jax.tree.map(one, args, is_leaf=lambda x: isinstance(x, Belief))


def spread(function: Callable, static: Hashable, backend: Sharded, args: tuple) -> Spread:
    """Returns `function(static, *args)` as a program of all devices of the mesh.

    Args:
      function: of the static decoder and of arrays.
      static: the decoder.
      backend: of its target.
      args: arrays or their shapes, in any pytree.
    """
    mesh, lies = backend.mesh, layout(args, backend.mesh)
    into = jax.tree.map(lambda x: x.spec, lies)
    local = functools.partial(LOCAL.get(function, function), static)
    whole = jax.eval_shape(functools.partial(function, static), *args)
    parts: list[Any] = []

    def run(*mine):
        with vocabulary.split(backend.vocabulary):
            return local(*mine)

    def shapes(*mine):
        parts.append(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), run(*mine)))
        return ()

    map_over = functools.partial(jax.shard_map, mesh=mesh, in_specs=into, check_vma=False)
    jax.eval_shape(map_over(shapes, out_specs=()), *args)
    out = jax.tree.map(lambda x, part: _spec(x.shape, part.shape, mesh), whole, parts[0])

    def together(*mine):
        return jax.tree.map(lambda x, spec: x if "data" in spec else _agreed(x, mesh), run(*mine), out)

    result = jax.tree.map(lambda x, spec: _placed(x, NamedSharding(mesh, spec)), whole, out)
    return Spread(map_over(together, out_specs=out), jax.tree.map(_placed, args, lies), result)


def _placed(x: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def put(x: Any, where: NamedSharding) -> jax.Array:
    """Returns an argument as it lies on the mesh; what lies so already is returned as it is."""
    if getattr(x, "sharding", None) == where:
        return x
    if not isinstance(x, jax.Array) or (x.is_fully_addressable and not where.is_fully_addressable):
        own = np.asarray(x)  # the same on every host
        return jax.make_array_from_callback(own.shape, where, lambda index: own[index])
    return jax.device_put(x, where)


def agreed(number: int) -> int:
    """Returns the number of the first process, in all of them."""
    if jax.process_count() == 1:
        return number
    return int(multihost_utils.broadcast_one_to_all(np.int32(number)))


def any_of(here: bool) -> bool:
    """Returns whether something is so in any process."""
    if jax.process_count() == 1:
        return here
    return bool(multihost_utils.process_allgather(np.bool_(here)).any())


def meet(place: str) -> None:
    """Waits for all processes to come to a place: what the first one has written is there then."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(place)


def fetch(tree: Any) -> Any:
    """Returns arrays on the host; what other hosts have parts of is gathered first."""

    def one(x):
        if isinstance(x, jax.Array) and not (x.is_fully_addressable or x.is_fully_replicated):
            return multihost_utils.process_allgather(x, tiled=True)
        return x

    return jax.device_get(jax.tree.map(one, tree))


def _spec(whole: tuple[int, ...], part: tuple[int, ...], mesh: AnyMesh) -> PartitionSpec:
    """Returns along which axes a result is a part."""
    rows = len(whole) > 0 and mesh.shape["data"] > 1 and whole[0] == part[0] * mesh.shape["data"]
    axes = ["data" if rows else None] if whole else []
    axes += ["model" if a != b else None for a, b in zip(whole[1:], part[1:], strict=True)]
    while axes and axes[-1] is None:
        axes.pop()
    return PartitionSpec(*axes)


def _agreed(x: jax.Array, mesh: AnyMesh) -> jax.Array:
    """Returns what is no row's own, for all rows: the mean of numbers, and the largest of whole ones."""
    if mesh.shape["data"] == 1:
        return x
    if jnp.issubdtype(x.dtype, jnp.inexact):
        return jax.lax.pmean(x, "data")
    return jax.lax.pmax(x, "data")


def _insert(decoder, state, slot, fresh):
    """Inserts on the devices that have the slot. Every group of devices has read the row: it is the first of each."""
    rows = state.length.shape[0]
    at = slot - jax.lax.axis_index("data") * rows
    here, at = (at >= 0) & (at < rows), jnp.clip(at, 0, rows - 1)

    def one(old, new):
        kept = jax.lax.dynamic_slice_in_dim(old, at, 1, 0)
        return jnp.where(here, new[:1].astype(old.dtype), kept)

    return insert(decoder, state, at, jax.tree.map(one, state, fresh))


LOCAL: dict[Callable, Callable] = {insert: _insert}  # what is another function on the rows of a device
