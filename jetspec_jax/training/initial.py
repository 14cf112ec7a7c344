"""What training starts from: parameters where a family has no better ones, and whether a given head fits."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

NORM_SHARE = 0.3  # of the target's final norm, where the head's starts: first logits are flatter than the target's


def draw(shapes: dict, key: jax.Array) -> dict:
    """Returns f32 matrices from N(0, 0.02) and vectors of one, in these shapes."""
    leaves, structure = jax.tree.flatten(shapes)
    drawn = [
        0.02 * jax.random.normal(k, leaf.shape) if len(leaf.shape) > 1 else jnp.ones(leaf.shape)
        for k, leaf in zip(jax.random.split(key, len(leaves)), leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, drawn)


def differing(config: Any, found: Any, free: str) -> tuple[str, Any, Any] | None:
    """Returns the first field in which a head to go on from differs: name, its value, this run's.

    free: a field that may differ, beside the dtype and the most positions.
    """
    for field in dataclasses.fields(config):
        old, new = getattr(found, field.name), getattr(config, field.name)
        if old != new and field.name not in ("dtype", "max_positions", free):
            return field.name, old, new
    return None


def norm(target_params: dict) -> dict[str, Float[Array, " E"]]:
    """Returns the norm before a head's logits."""
    return {"norm": NORM_SHARE * target_params["norm"].astype(jnp.float32)}
