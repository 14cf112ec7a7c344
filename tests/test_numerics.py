"""The package's rules of precision. A CPU computes alike without some of them, so there the program is asked."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jetspec_jax.layers.numerics import einsum, rms_norm

SHAPES = (4, 8), (8, 3)


def products(function, dtype) -> list[str]:
    """The matrix products of a program, with the types of their operands."""
    text = str(jax.make_jaxpr(function)(*(jnp.zeros(s, dtype) for s in SHAPES)))
    types = dict(re.findall(r"(\w+):(\w+)\[", text))
    found = re.findall(r":(\w+)\[[^\]]*\] = dot_general\[(.*?)\] (\w+) (\w+)", text, re.DOTALL)
    return [f"{types[a]} {types[b]} {out} {'HIGHEST' in options}" for out, options, a, b in found]


@pytest.mark.parametrize("out", [None, jnp.float32])
def test_products(out):
    """A GPU would multiply f32 in TF32; the product itself returns the wide type, without a cast of its own."""
    product = lambda x, w: einsum("ab,bc->ac", x, w, out)
    assert products(product, jnp.float32) == ["f32 f32 f32 True"]
    assert products(product, jnp.bfloat16) == [f"bf16 bf16 {'f32' if out else 'bf16'} False"]


def test_gradient_products_stay_narrow():
    gradient = jax.grad(lambda x, w: einsum("ab,bc->ac", x, w, jnp.float32).sum(), (0, 1))
    assert set(products(gradient, jnp.bfloat16)) == {"bf16 bf16 bf16 False", "bf16 bf16 f32 False"}
    assert set(products(gradient, jnp.float32)) == {"f32 f32 f32 True"}


def test_rms_norm_rounds_before_it_scales():
    x, weight = (jnp.asarray(np.random.default_rng(i).standard_normal(64), jnp.bfloat16) for i in range(2))
    wide = x.astype(jnp.float32)
    normed = wide / jnp.sqrt((wide * wide).mean() + 1e-6)
    assert (rms_norm(x, weight, 1e-6) == normed.astype(jnp.bfloat16) * weight).all()
    assert (rms_norm(x, weight, 1e-6) != (normed * weight).astype(jnp.bfloat16)).any()
