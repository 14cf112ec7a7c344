"""What training computes of padding may be NaN, as with a padding token whose embedding is; it reaches nothing.

The same of decoding is in test_lossless.py, and of attention alone in the tests of attention and of the kernels.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import small
from flax import nnx

from jetspec_jax.drafts import block
from jetspec_jax.training import teacher
from jetspec_jax.training.anchors import Anchors
from jetspec_jax.training.objectives.block import forward

DOCUMENT = jnp.array([[1] * 7 + [2] * 5, [1] * 4 + [0] * 8])  # 0 is padding
POSITION = jnp.array([[*range(7), *range(5)], [*range(4), *[0] * 8]])
REAL = DOCUMENT > 0


def test_the_teacher():
    loaded = small.target()
    tokens = jnp.where(REAL, 5 + POSITION, 0)
    run = jax.jit(lambda params: teacher.run(loaded.model, params, tokens, DOCUMENT, POSITION, (0, 1)))
    broken = loaded.params | {"embedding": loaded.params["embedding"].at[0].set(jnp.nan)}
    for clean, other in zip(run(loaded.params), run(broken), strict=True):
        assert (clean == other)[REAL].all() and jnp.isfinite(other).all()


@pytest.mark.parametrize("remat", [False, True])
def test_the_head_and_its_gradient(remat):
    draft, shapes = block.build(small.HEAD, jnp.float32)
    params = small.random_params(shapes, 3)
    anchors = Anchors(jnp.array([[3, 9], [2, 0]]), jnp.array([[True, True], [True, False]]))
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((2, 2, small.HEAD.block_size, 16)), jnp.float32)
    features = jnp.asarray(np.random.default_rng(1).standard_normal((2, 12, 32)), jnp.float32)

    @jax.jit
    def loss(params, features):
        head = nnx.merge(draft.graphdef, nnx.State(params))
        return forward(head, rows, anchors, features, DOCUMENT, POSITION, remat=remat).sum()

    ask = functools.partial(jax.value_and_grad(loss), params)
    clean, broken = ask(features), ask(jnp.where(REAL[..., None], features, jnp.nan))
    assert all((a == b).all() for a, b in zip(jax.tree.leaves(clean), jax.tree.leaves(broken), strict=True))
    assert np.abs(clean[1]["fc"]).max() > 0
    assert jnp.isnan(ask(features.at[0, 1].set(jnp.nan))[0])  # what a block sees does tell
