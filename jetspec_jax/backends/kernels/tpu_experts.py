"""A mixture of experts for few rows on TPUs: one kernel, which reads chosen experts' weights once and no others'.

The grid goes through the chosen experts and, within one, through blocks of its features; which experts these are is
known before the kernel starts, so the pipeline copies a block while the one before it is multiplied. A core runs its
programs one after another: they add to one f32 sum of all rows in VMEM, in a fixed order. Every expert is multiplied by
all rows and the result masked, since the matrix unit takes 128 rows in the time of one; nothing is sorted or gathered.
Slots after the last chosen expert name its last block again, which is not copied again. The oracle is
`moe.feed_forward`.

VMEM at the sizes of Qwen3-30B-A3B and 256 rows: 3 MiB of weights (two blocks on their way), 2 MiB of rows, 4 MiB of
results, and as much again for what is on its way through the units. The default limit is 16 MiB.

Gate and up lie in turn along the sublanes, as XLA stores them: merged, they would be copied, all experts of them.

No TPU has run this. The interpreter proves the numbers, and the TPU compiler takes it. Sizes are reasoned, not
measured.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float

from jetspec_jax.layers import moe
from jetspec_jax.layers.numerics import precision

LANES = 128
BLOCK = 3 * 2**19  # bytes of weights that one program multiplies, at most


def supported(hidden: int, inner: int) -> bool:
    """Whether experts of these sizes divide into whole tiles."""
    return hidden % LANES == 0 and inner % LANES == 0


def mixture(
    x: Float[Array, "R E"],
    router: Float[Array, "E X"],
    gate_up: Float[Array, "X E 2 F"],
    down: Float[Array, "X F E"],
    count: int,
    normalize: bool,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "R E"]:
    """Returns what the rows' experts make of them; arguments of `moe.feed_forward`, and `interpret` without a TPU."""
    rows, hidden = x.shape
    experts, inner = down.shape[:2]
    size = 3 * hidden * x.dtype.itemsize
    wide = next(w for w in range(min(inner, max(LANES, BLOCK // size)), 0, -LANES) if inner % w == 0 and w % LANES == 0)
    blocks, slots = inner // wide, min(rows * count, experts)

    weight, expert = moe.choose(x, router, count, normalize)
    known = expert[..., None] == jnp.arange(experts)  # [R, k, X]
    weights = jnp.where(known, weight[..., None], 0).sum(1)
    touched = known.any((0, 1))
    total = touched.sum().astype(jnp.int32)
    order = jnp.argsort(~touched, stable=True).astype(jnp.int32)
    order = order[jnp.minimum(jnp.arange(slots), total - 1)]

    def block(slot, at, order_ref, total_ref):
        return order_ref[slot], jnp.where(slot < total_ref[0], at, blocks - 1)

    def front(slot, at, *refs):
        chosen, at = block(slot, at, *refs)
        return chosen, 0, 0, at

    def back(slot, at, *refs):
        chosen, at = block(slot, at, *refs)
        return chosen, at, 0

    whole = lambda *_: (0, 0)
    return pl.pallas_call(
        _kernel,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(slots, blocks),
            in_specs=[
                pl.BlockSpec((rows, hidden), whole),
                pl.BlockSpec((rows, experts), whole),
                pl.BlockSpec((1, hidden, 2, wide), front),
                pl.BlockSpec((None, wide, hidden), back),
            ],
            out_specs=pl.BlockSpec((rows, hidden), whole),
            scratch_shapes=[pltpu.VMEM((rows, hidden), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        interpret=interpret,
        name="experts",
    )(order, total[None], x, weights, gate_up, down)


def _kernel(order_ref, total_ref, x_ref, weight_ref, front_ref, down_ref, out_ref, sum_ref):  # noqa: PLR0913
    slot, at = pl.program_id(0), pl.program_id(1)
    dtype = x_ref.dtype

    def product(a, w):
        return jnp.dot(a, w, precision=precision(dtype), preferred_element_type=jnp.float32)

    @pl.when((slot == 0) & (at == 0))
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(slot < total_ref[0])
    def _():
        # Rounded where the XLA path rounds: after each product.
        gate, up = (product(x_ref[...], w).astype(dtype).astype(jnp.float32) for w in _halves(front_ref))
        wide = (gate * jax.nn.sigmoid(gate)).astype(dtype).astype(jnp.float32) * up
        lane = jax.lax.broadcasted_iota(jnp.int32, weight_ref.shape, 1)
        own = jnp.where(lane == order_ref[slot], weight_ref[...], 0).sum(1, keepdims=True)
        # A row that another expert would take to infinity is not its concern.
        sum_ref[...] += jnp.where(own != 0, product(wide.astype(dtype), down_ref[...]) * own, 0)

    @pl.when((slot == pl.num_programs(0) - 1) & (at == pl.num_programs(1) - 1))
    def _():
        out_ref[...] = sum_ref[...].astype(dtype)


def _halves(front_ref):
    """Gate and up [E, F] of a block [1, E, 2, F]; in bf16 they are the halves of words, and nothing need be moved."""
    if front_ref.dtype != jnp.bfloat16:
        return front_ref[0, :, 0], front_ref[0, :, 1]
    word = front_ref.bitcast(jnp.int32)[0, :, 0]
    wide = lambda bits: jax.lax.bitcast_convert_type(bits, jnp.float32).astype(jnp.bfloat16)
    return wide(word << 16), wide(word & jnp.int32(-65536))
