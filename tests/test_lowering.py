"""What decodes and trains is lowered for a TPU on a CPU: on one device and on a mesh, dense and with experts."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import pytest
import small
import tiny
from jax.sharding import AbstractMesh, AxisType

from jetspec_jax.backends.mesh import Sharded
from jetspec_jax.backends.tpu import TPU
from jetspec_jax.config import MoEConfig
from jetspec_jax.drafts import block
from jetspec_jax.engine import spread
from jetspec_jax.loop import decoder as loop
from jetspec_jax.loop.tree import Rule
from jetspec_jax.models import qwen3, sharding
from jetspec_jax.training import step
from jetspec_jax.training.data import packing

MESH = AbstractMesh((2, 4), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
SIZES = {"vocab_size": 256, "num_heads": 8, "num_kv_heads": 4, "head_dim": 128, "intermediate_size": 32}


def lowered(function, *args) -> str:
    return jax.jit(function).trace(*args).lower(lowering_platforms=("tpu",)).as_text()


def placed(x, where):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where)


def pair(kind: str, mesh: AbstractMesh | None):
    """A decoder whose heads are as wide as the attention kernel takes them, and its parameters as shapes."""
    moe = MoEConfig(8, 2, 16, True, (1,)) if kind == "moe" else None
    config = tiny.model_config(kind, moe=moe, **SIZES)
    backend = TPU() if mesh is None else Sharded(TPU(), mesh)
    model, shapes = qwen3.build(config, jnp.bfloat16, backend)
    headed = tiny.head_config(True, mask_token_id=255, **SIZES)
    draft, drafted = block.build(headed, jnp.bfloat16, backend=backend, rule=Rule(8))
    if mesh is not None:
        shapes = jax.tree.map(placed, shapes, sharding.decoding(shapes, mesh, config))
        drafted = jax.tree.map(placed, drafted, sharding.decoding(drafted, mesh, headed))
    return loop.Decoder(model, draft, 256), {"target": shapes, "draft": drafted}


# The first layer of the second kind is dense, so that the other kind proves little more.
KINDS = pytest.mark.parametrize("kind", [pytest.param("dense", marks=pytest.mark.slow), "moe"])
MESHES = pytest.mark.parametrize(
    "mesh", [pytest.param(None, id="one", marks=pytest.mark.slow), pytest.param(MESH, id="mesh")]
)


@KINDS
@MESHES
def test_prefill_and_rounds(kind, mesh):
    static, params = pair(kind, mesh)
    args = params, jax.eval_shape(lambda: tiny.request([[1, 2, 3], [4, 5]], 8))
    for function in (loop.prefill, loop.rounds):
        made = functools.partial(function, static)
        if mesh is None:
            state = jax.eval_shape(made, *args)
        else:
            made, args, state = spread.spread(function, static, static.target.backend, args)
        text = lowered(made, *args)
        assert function is loop.prefill or "tpu_custom_call" in text  # the kernel, on each device's heads
        assert ("all_reduce" in text) == (mesh is not None) and "callback" not in text
        args = params, state, jnp.int32(4)


@KINDS
@MESHES
def test_a_training_step(kind, mesh):
    moe = MoEConfig(4, 2, 12, True, (1,)) if kind == "moe" else None
    config = dataclasses.replace(small.MODEL, moe=moe, model_type="qwen3_moe" if moe else "qwen3")
    model, shapes = qwen3.build(config, jnp.float32)
    recipe = small.recipe(target=model)
    state = jax.eval_shape(functools.partial(step.init, recipe), shapes)
    packed = packing.pack(small.random_examples(12), small.WIDTH)
    batch = jax.eval_shape(lambda: small.batch(packed, range(4)))
    if mesh is not None:
        shapes = jax.tree.map(placed, shapes, sharding.frozen(shapes, mesh))
        state = jax.tree.map(placed, state, sharding.trained(state, mesh))
        batch = jax.tree.map(lambda x: placed(x, sharding.split(mesh, 1)), batch)
    scale = jax.ShapeDtypeStruct((32,), jnp.float32)
    text = lowered(functools.partial(step.update, recipe), shapes, scale, state, batch)
    assert ('"data"' in text) == ('"model"' in text) == (mesh is not None)  # how arrays lie, for XLA's partitioner
