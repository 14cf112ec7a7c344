"""How parameters and batches lie on a mesh of devices: one table, by the name of a parameter.

A mesh has the axes `data`, `model` and, where it is asked for, `expert`. Rows of a batch are dealt out over `data`. A
frozen target is split over `model` and repeated over `data`; its experts are split over `expert`, or over `model` where
there is no such axis. What is trained is split over `data`, with its optimiser (FSDP).

Decoding says itself what each device does with its part (`backends/mesh.py`), so there a layer's attention is split by
whole kv heads or not at all, and stacked experts by whole experts where their number divides. Training leaves it to
XLA, which splits every expert's features.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from jetspec_jax.config import ModelConfig, Sizes
from jetspec_jax.fields import ConfigError, shown
from jetspec_jax.options import AXES, mesh_axes

AnyMesh = Mesh | AbstractMesh
Part = tuple[slice, ...]  # with start and stop, for each axis


class Rule(NamedTuple):
    """Which array axis is split over a mesh axis; negative ones count from the end."""

    model: int | None
    data: int | None
    expert: int | None = None  # of stacked experts, which have an axis more than a dense layer


# Column-parallel products (qkv, gate_up) are split where heads or hidden units lie, row-parallel ones (out, down) where
# these are summed over. Counting from the right end makes one row fit a dense layer and stacked experts.
TABLE = {
    "embedding": Rule(0, 1),
    "lm_head": Rule(0, 1),
    "fc": Rule(None, 0),
    "qkv": Rule(1, 0),
    "out": Rule(0, -1),
    "gate_up": Rule(-1, 0, 0),
    "down": Rule(-2, -1, 0),
    "router": Rule(None, None),
    "w1": Rule(None, 1),  # a Markov head's tables
    "w2": Rule(None, 1),
}  # every other parameter is a norm's vector, or as small: repeated everywhere
NO_RULE = Rule(None, None)
STACKED = {"gate_up": 4, "down": 3}  # axes of experts side by side

# Bytes that splitting a layer must spare each device, else a head is repeated on all. Two sums over the devices a layer
# cost 20 us over NCCL on two H200 (0.73 ms for 72, docs/devices.md; 30 us in an earlier run), and in 30 us one of them
# reads as much.
WORTH = 128 << 20


def make_mesh(model: int = 1, devices: list | None = None) -> Mesh:
    """Returns a mesh of all devices as (data, model); `model` of them share one target."""
    devices = devices or jax.devices()
    if len(devices) % model:
        raise ValueError(f"model_parallel={model}: it must divide the number of devices, {len(devices)}")
    return _made({"data": len(devices) // model, "model": model}, devices)


def mesh_of(given: str | Mapping[str, int] | Mesh) -> Mesh:
    """Returns the mesh that is asked for; of more devices than it has, it takes the first.

    Args:
      given: "data=2,model=4", the same as a dict, or a mesh of these axes.

    Raises:
      ConfigError: it cannot be read, or there are too few devices.
    """
    if isinstance(given, Mesh):
        if set(given.axis_names) - set(AXES) or not {"data", "model"} <= set(given.axis_names):
            raise ConfigError(
                f"mesh: its axes are {', '.join(map(str, given.axis_names))}; name them {', '.join(AXES)}"
            )
        return given
    if isinstance(given, Mapping):
        given = ",".join(f"{name}={size}" for name, size in given.items())
    axes, devices, named = mesh_axes(given), jax.devices(), f"mesh={shown(given)[1:-1]}"
    count = math.prod(axes.values())
    if count > len(devices):
        raise ConfigError(f"{named}: it has {count} devices, and there are {len(devices)}; make it smaller")
    if count < len(devices) and jax.process_count() > 1:
        raise ConfigError(
            f"{named}: it has {count} devices, and {jax.process_count()} processes have {len(devices)}; use all of them"
        )
    return _made(axes, devices[:count])


def _made(axes: Mapping[str, int], devices: list) -> Mesh:
    types = (AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=types, devices=devices)


def check(config: ModelConfig, mesh: AnyMesh) -> None:
    """Raises ConfigError where a mesh cannot split what most of a target's weights are."""
    model, experts = mesh.shape["model"], mesh.shape[expert_axis(mesh)]
    named = ",".join(f"{name}={size}" for name, size in mesh.shape.items())
    moe = config.moe
    dense = moe is None or len(moe.sparse_layers) < config.num_layers
    if dense and config.intermediate_size % model:
        raise ConfigError(
            f"mesh={named}: {config.intermediate_size} features of a layer do not split over model={model}"
        )
    if moe is None and "expert" in mesh.shape:
        raise ConfigError(f"mesh={named}: this target has no experts; leave the axis expert out")
    if moe is not None and moe.num_experts % experts and moe.intermediate_size % model:
        raise ConfigError(
            f"mesh={named}: neither {moe.num_experts} experts nor their {moe.intermediate_size} features split over it"
        )


def expert_axis(mesh: AnyMesh) -> str:
    """Returns the axis over which experts lie."""
    return "expert" if "expert" in mesh.shape else "model"


def frozen(tree: Any, mesh: AnyMesh) -> Any:
    """Shardings of a target's parameters in training."""
    return _by_axis(tree, mesh, "model")


def trained(tree: Any, mesh: AnyMesh) -> Any:
    """Shardings of parameters in training, and of anything shaped like them: an optimiser's moments, a whole state."""
    return _by_axis(tree, mesh, "data")


def decoding(tree: Any, mesh: AnyMesh, config: Sizes) -> Any:
    """Shardings of a target's parameters in decoding, or of a head's that is split like it."""
    model, over = mesh.shape["model"], expert_axis(mesh)
    whole = {"qkv", "out"} if config.num_kv_heads % model else set()

    def spec(name: str, shape: tuple[int, ...]) -> list[str | None]:
        rule, axes = TABLE.get(name, NO_RULE), _none(shape)
        if rule.expert is not None and len(shape) == STACKED[name] and not shape[rule.expert] % mesh.shape[over]:
            axes[rule.expert] = over
        if rule.model is not None and name not in whole and "model" not in axes and not shape[rule.model] % model:
            axes[rule.model] = "model"
        return axes

    return _by_name(tree, mesh, spec)


def drafting(tree: Any, mesh: AnyMesh, config: Any) -> Any:
    """Shardings of a head's parameters: split like a target's where that pays, else repeated on every device.

    What a head has a row a token of stays whole: of that, a device reads its own part. So does the scorer beside it.

    config: of its family; None where it has no layers.
    """
    count = mesh.shape["model"]
    layers = getattr(config, "num_layers", 1)
    size = sum(math.prod(x.shape) * np.dtype(x.dtype).itemsize for x in jax.tree.leaves(tree))
    if config is None or count == 1 or size / layers * (count - 1) / count < WORTH:
        return _by_name(tree, mesh, lambda name, shape: _none(shape))

    def one(path, where: NamedSharding) -> NamedSharding:
        names = [str(getattr(key, "key", "")) for key in path]
        return repeated(mesh) if names[0] in ("embedding", "lm_head", "scorer") else where

    return jax.tree_util.tree_map_with_path(one, decoding(tree, mesh, config))


def placed(shape: tuple[int, ...], where: NamedSharding, read: Callable[[Part], np.ndarray]) -> jax.Array:
    """Returns an array whose parts are read one at a time, each once, and put on the devices that hold it.

    Args:
      shape: of the whole array.
      where: it lies.
      read: returns a part of it, on the host.
    """
    holders = collections.defaultdict(list)
    for device, index in where.addressable_devices_indices_map(shape).items():
        part = tuple(slice(*cut.indices(size)[:2]) for cut, size in zip(index or (), shape, strict=True))
        holders[tuple((cut.start, cut.stop) for cut in part)].append((device, part))
    parts = []
    for same in holders.values():
        own = read(same[0][1])
        parts += [jax.device_put(own, device) for device, _ in same]
        jax.block_until_ready(parts)  # so that the host holds one part at a time
    return jax.make_array_from_single_device_arrays(shape, where, parts)


def split(mesh: AnyMesh, axis: int = 0) -> NamedSharding:
    """Returns the sharding of an array whose given axis counts sequences."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))


def repeated(mesh: AnyMesh) -> NamedSharding:
    """Returns the sharding that puts the same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def _by_axis(tree: Any, mesh: AnyMesh, over: str) -> Any:
    def spec(name: str, shape: tuple[int, ...]) -> list[str | None]:
        axis, axes = getattr(TABLE.get(name, NO_RULE), over), _none(shape)
        # What does not divide evenly (four K/V heads over eight devices) is repeated.
        if axis is not None and shape and shape[axis] % mesh.shape[over] == 0:
            axes[axis] = over
        return axes

    return _by_name(tree, mesh, spec)


def _by_name(tree: Any, mesh: AnyMesh, spec: Callable[[str, tuple[int, ...]], list[str | None]]) -> Any:
    def one(path, leaf):
        return NamedSharding(mesh, PartitionSpec(*spec(_name(path), leaf.shape)))

    return jax.tree_util.tree_map_with_path(one, tree)


def _name(path) -> str:
    return next((str(key.key) for key in reversed(path) if hasattr(key, "key") and isinstance(key.key, str)), "")


def _none(shape: tuple[int, ...]) -> list[str | None]:
    return [None] * len(shape)
