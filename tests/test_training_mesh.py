"""Eight simulated devices: the same numbers as one, and checkpoints that move between them."""

import os
import pathlib
import subprocess
import sys

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec
from small import MODEL, target

from jetspec_jax.models import sharding

ROOT = pathlib.Path(__file__).parent.parent
SCRIPT = """
import pathlib, sys
sys.path.insert(0, "tests")
import jax, jax.numpy as jnp, numpy as np, dataclasses
from small import HEAD, WIDTH, random_examples, recipe, target
from jetspec_jax.models import sharding
from jetspec_jax.training import features, loop, step
from jetspec_jax.training.data import packing
from jetspec_jax.training.data.batches import Batches
from jetspec_jax.training import journal
from jetspec_jax.training.checkpoints import Checkpoints

assert jax.device_count() == 8
folder = pathlib.Path(sys.argv[1])
packed = packing.pack(random_examples(60), WIDTH)
data = Batches(packed, 8, 1, 0)
r = recipe(steps=6)
plan = loop.Plan(log_every=1, eval_every=100, save_every=3)

def train(name, model, count, steps=6, stored=False):
    mesh = sharding.make_mesh(model, jax.devices()[:count])
    t = target()
    t = dataclasses.replace(t, params=jax.device_put(t.params, sharding.frozen(t.params, mesh)))
    left = iter(range(steps))
    more = lambda: next(left, None) is not None
    split = sharding.split(mesh)
    place = lambda shape, dtype: jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=split)()
    put = lambda x: jax.device_put(x, split)
    kept = features.resident(t, packed, r.head.tap_layers, 8, "xla", place, put) if stored else None
    return loop.train(r, loop.Given(t, jnp.ones(32), data, kept), folder / name, plan, mesh, on_time=more)

one = train("one", 1, 1)
many = train("many", 2, 8, 3)
fc = many.state.params["fc"]
assert fc.sharding.spec[0] == "data" and fc.addressable_shards[0].data.shape == (8, 16), fc.sharding
moved = train("many", 1, 1)  # the other half on one device
assert moved.state.params["fc"].sharding.num_devices == 1 and int(moved.state.step) == 6
losses = lambda name: [x["loss"] for x in journal.read(folder / name)]
np.testing.assert_allclose(losses("one"), losses("many"), rtol=1e-5)
train("stored", 2, 8, 2, stored=True)  # features of all sequences split over the devices
np.testing.assert_allclose(losses("one")[:2], losses("stored"), rtol=1e-5)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), one.state.params, moved.state.params)

# Values that were saved on eight devices, on other meshes: bit for bit.
def restored(mesh):
    like = jax.eval_shape(lambda: many.state)
    place = lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s)
    like = jax.tree.map(place, like, sharding.trained(like, mesh))
    with Checkpoints(folder / "many") as checkpoints:
        return checkpoints.restore(like, 3)[0]

for model, count in ((4, 8), (1, 2)):
    found = restored(sharding.make_mesh(model, jax.devices()[:count]))
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(many.state))
print("same")
"""


TABLE_OF_ITS_OWN = """
import pathlib, sys
sys.path.insert(0, "tests")
import jax, jax.numpy as jnp, numpy as np, dataclasses
from small import EAGLE, WIDTH, eagle_recipe, random_examples, target
from jetspec_jax.models import sharding
from jetspec_jax.training import journal, loop
from jetspec_jax.training.data import packing
from jetspec_jax.training.data.batches import Batches

folder = pathlib.Path(sys.argv[1])
packed = packing.pack(random_examples(60), WIDTH)
r = eagle_recipe(steps=3)
decided = r.learns.decide(EAGLE, packed)

def train(name, model, count):
    mesh = sharding.make_mesh(model, jax.devices()[:count])
    t = target()
    t = dataclasses.replace(t, params=jax.device_put(t.params, sharding.frozen(t.params, mesh)))
    given = loop.Given(t, jnp.ones(32), Batches(packed, 8, 1, 0), decided=decided)
    return loop.train(r, given, folder / name, loop.Plan(1, 100, 100), mesh).state.params

one, many = train("one", 1, 1), train("many", 2, 8)
assert many["lm_head"].sharding.spec[1] == "data", many["lm_head"].sharding
losses = lambda name: [x["loss"] for x in journal.read(folder / name)]
np.testing.assert_allclose(losses("one"), losses("many"), rtol=1e-5)
jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), one, many)
print("same")
"""


MARKOV_TABLES = (
    TABLE_OF_ITS_OWN.replace("EAGLE", "DSPARK")
    .replace("eagle_recipe", "dspark_recipe")
    .replace('many["lm_head"]', 'many["markov"]["w2"]')
)


@pytest.mark.parametrize(
    "script",
    [SCRIPT, *(pytest.param(script, marks=pytest.mark.slow) for script in (TABLE_OF_ITS_OWN, MARKOV_TABLES))],
    ids=["blocks", "own", "markov"],
)
def test_eight_devices_give_the_losses_of_one(tmp_path, script):
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    env = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    got = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    assert got.returncode == 0 and got.stdout.endswith("same\n"), got.stderr[-3000:]


def test_the_table_splits_what_divides_and_repeats_the_rest():
    mesh = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    frozen = sharding.frozen(target().params, mesh)
    layer = frozen["layers"][0]
    assert frozen["embedding"].spec == PartitionSpec("model", None)
    assert layer["down"].spec == PartitionSpec("model", None) and layer["gate_up"].spec[-1] == "model"
    assert layer["out"].spec == PartitionSpec("model", None) and "model" not in layer["input_norm"].spec
    trained = sharding.trained({"fc": jax.ShapeDtypeStruct((32, 16), "float32"), "step": np.int32(0)}, mesh)
    assert trained["fc"].spec == PartitionSpec("data", None) and trained["step"].spec == PartitionSpec()
    odd = sharding.frozen({"embedding": jax.ShapeDtypeStruct((49, 16), "float32")}, mesh)
    assert odd["embedding"].spec == PartitionSpec(None, None)
    # Shapes with an axis for heads, for gate and up, and for experts, by the same table.
    shapes = {"qkv": (16, 2, 4, 8), "gate_up": (16, 2, 24), "down": (8, 24, 16)}
    specs = sharding.frozen({n: jax.ShapeDtypeStruct(s, "float32") for n, s in shapes.items()}, mesh)
    assert [x.spec.index("model") for x in specs.values()] == [1, 2, 1]
    with pytest.raises(ValueError, match="must divide the number of devices"):
        sharding.make_mesh(3, jax.devices()[:1])
    assert isinstance(sharding.make_mesh(1, jax.devices()[:1]), Mesh) and MODEL.num_kv_heads == 1
