"""How parameters and batches lie on a mesh of devices: one table, by the name of a parameter.

The mesh has two axes. Batches are split over `data`, and so are the f32 parameters and the optimiser of what is trained
(FSDP). A frozen target is split over `model` (tensor parallel) and repeated over `data`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


class Rule(NamedTuple):
    """Which array axis is split over a mesh axis; negative ones count from the end."""

    model: int | None
    data: int | None


# Column-parallel products (qkv, gate_up) are split where heads or hidden units lie, row-parallel ones (out, down) where
# these are summed over. Counting from the right end makes one row fit a dense layer and stacked experts.
TABLE = {
    "embedding": Rule(0, 1),
    "lm_head": Rule(0, 1),
    "fc": Rule(None, 0),
    "qkv": Rule(1, 0),
    "out": Rule(0, -1),
    "gate_up": Rule(-1, 0),
    "down": Rule(-2, -1),
    "router": Rule(None, None),
    "w1": Rule(None, 1),  # a Markov head's tables
    "w2": Rule(None, 1),
}  # every other parameter is a norm's vector, or as small: repeated everywhere


def make_mesh(model: int = 1, devices: list | None = None) -> Mesh:
    """Returns a mesh of all devices as (data, model); `model` of them share one target."""
    devices = devices or jax.devices()
    if len(devices) % model:
        raise ValueError(f"model_parallel={model}: it must divide the number of devices, {len(devices)}")
    shape = len(devices) // model, model
    return Mesh(np.asarray(devices).reshape(shape), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


def frozen(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Shardings of a target's parameters."""
    return _by_name(tree, mesh, "model")


def trained(tree: Any, mesh: Mesh | AbstractMesh) -> Any:
    """Shardings of parameters in training, and of anything shaped like them: an optimiser's moments, a whole state."""
    return _by_name(tree, mesh, "data")


def split(mesh: Mesh, axis: int = 0) -> NamedSharding:
    """Returns the sharding of an array whose given axis counts sequences."""
    return NamedSharding(mesh, PartitionSpec(*[None] * axis, "data"))


def repeated(mesh: Mesh) -> NamedSharding:
    """Returns the sharding that puts the same array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def _by_name(tree: Any, mesh: Mesh | AbstractMesh, over: str) -> Any:
    def one(path, leaf):
        name = next((str(key.key) for key in reversed(path) if hasattr(key, "key")), "")
        axis = getattr(TABLE.get(name, Rule(None, None)), over)
        spec: list[str | None] = [None] * len(leaf.shape)
        # What does not divide evenly (four K/V heads over eight devices) is repeated.
        if axis is not None and leaf.shape and leaf.shape[axis] % mesh.shape[over] == 0:
            spec[axis] = over
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree_util.tree_map_with_path(one, tree)
