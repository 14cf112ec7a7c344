"""What tests of kernels share: inputs, how near a result must be, and lowering for a GPU without one."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny


def near(actual, wanted, dtype, times=1):
    """f32 to rounding, `times` as much where sums are long; 16 bits to a few units in the last place of the largest."""
    bound = times * 2e-5 if dtype == jnp.float32 else 1.6e-2
    for a, w in zip(jax.tree.leaves(actual), jax.tree.leaves(wanted), strict=True):
        tiny.close(a.astype(jnp.float32), w.astype(jnp.float32), bound)


def normal(seed, dtype):
    draw = np.random.default_rng(seed)
    return lambda *shape: jnp.asarray(draw.standard_normal(shape), dtype)


def cuda_text(function, *shapes) -> str:
    """The program lowered for an H200, none being needed; every Triton module in it is verified."""
    device = jax.sharding.AbstractDevice(device_kind="NVIDIA H200", num_cores=None, platform="cuda")
    mesh = jax.sharding.AbstractMesh((1,), ("x",), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(function).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()


def verify(monkeypatch) -> list:
    """Makes lowering verify its Triton modules, which a GPU's compiler would be the first to refuse, and count them."""
    registration = pytest.importorskip("jax._src.pallas.triton.pallas_call_registration")
    lower, seen = registration.lowering.lower_jaxpr_to_triton_module, []

    def checked(*args, **options):
        result = lower(*args, **options)
        seen.append(result.module.operation.verify())
        return result

    monkeypatch.setattr(registration.lowering, "lower_jaxpr_to_triton_module", checked)
    return seen
