"""Targets and heads on a mesh of devices."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jetspec_jax.backends.mesh import Sharded
from jetspec_jax.backends.xla import XLA
from jetspec_jax.config import ConfigError, ModelConfig
from jetspec_jax.files.pair import LoadedHead, LoadedTarget
from jetspec_jax.models import sharding
from jetspec_jax.models.sharding import AnyMesh


def backend(inner: XLA, mesh: AnyMesh, config: ModelConfig) -> Sharded:
    """Returns the backend of a mesh.

    Args:
      inner: what computes a device's part.
      mesh: the devices.
      config: of the target.

    Raises:
      ConfigError: the mesh cannot split it.
    """
    sharding.check(config, mesh)
    vocabulary = "model" if config.vocab_size % mesh.shape["model"] == 0 else None
    return Sharded(inner, mesh, sharding.expert_axis(mesh), vocabulary)


def target_on(target: LoadedTarget, given: Any) -> LoadedTarget:
    """Returns a target on a mesh; one that lies there is returned as it is.

    Args:
      target: what `load_target` returns.
      given: as of `sharding.mesh_of`.

    Raises:
      ConfigError: there is no such mesh, it cannot split the target, or the target lies on another.
    """
    mesh, own = sharding.mesh_of(given), target.model.backend
    if isinstance(own, Sharded):
        if own.mesh == mesh:
            return target
        raise ConfigError("mesh: the target was loaded for another; load it for this one, or leave it out")
    if not dataclasses.is_dataclass(target.model) or not isinstance(own, XLA):
        raise ConfigError("mesh: this target is none of load_target's; leave the mesh out")
    model = dataclasses.replace(target.model, backend=backend(own, mesh, target.config))  # type: ignore[type-var,call-arg]
    lies = sharding.decoding(target.params, mesh, target.config)
    return dataclasses.replace(target, model=model, params=_moved(target.params, lies))


def for_training(target: LoadedTarget) -> LoadedTarget:
    """Returns a target of a mesh as training has it: split by XLA, which may cut experts but no group of rows."""
    own: Any = target.model.backend
    model = dataclasses.replace(target.model, backend=own.inner)  # type: ignore[type-var,call-arg]

    def moved(x: jax.Array, where: NamedSharding) -> jax.Array:
        if x.sharding == where:
            return x
        there = jax.block_until_ready(jax.device_put(x, where))
        x.delete()  # so that no more than one is there twice
        return there

    params = jax.tree.map(moved, target.params, sharding.frozen(target.params, own.mesh))
    return dataclasses.replace(target, model=model, params=params)


def head_on(head: LoadedHead, target: LoadedTarget) -> LoadedHead:
    """Returns a head where its target lies; one that lies there is returned as it is."""
    own: Any = target.model.backend
    if not isinstance(own, Sharded) or all(_lies_on(x, own.mesh) for x in jax.tree.leaves(head.params)):
        return head
    lies = sharding.drafting(head.params, own.mesh, head.config)
    draft: Any = head.draft
    if hasattr(draft, "backend"):
        draft = dataclasses.replace(draft, backend=own)
    return dataclasses.replace(head, draft=draft, params=_moved(head.params, lies))


def _lies_on(x: Any, mesh: AnyMesh) -> bool:
    where = getattr(x, "sharding", None)
    return isinstance(where, NamedSharding) and where.mesh == mesh


def _moved(params: Any, lies: Any) -> Any:
    """Returns parameters as they are to lie."""

    def one(x, where: NamedSharding) -> jax.Array:
        if where.is_fully_addressable:
            return jax.device_put(x, where)
        return sharding.placed(x.shape, where, lambda part: np.asarray(x[part]))

    return jax.tree.map(one, params, lies)
