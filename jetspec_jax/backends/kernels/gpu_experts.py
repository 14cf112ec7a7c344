"""A mixture of experts for few rows on NVIDIA GPUs: each chosen expert's weights are read once, the others' never.

Four or five launches. The router's product; `choose`, a program a row; `lists`, a program an expert, which writes down
the expert's rows (left out up to `TILE` rows: one tile of the matrix unit holds all of them, so nothing needs to be
gathered); gate and up with SwiGLU; down. A program of the last two is one expert and some columns of its weights, and
multiplies them by the expert's rows alone. How many those are is known on the device only, so a program holds a branch
a size of tile. Nothing is sorted, nothing is added atomically: down leaves the k-th experts of all rows as the k-th
partial sum, and the next operation adds those up in order. The oracle is `moe.feed_forward`.

Pallas-Triton, for the reasons that `gpu_attention` gives: a row of a plain step or the four rows that an expert gets of
a tree fill a sixteenth of the tile that wgmma takes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int

from jetspec_jax.backends.kernels import gpu_layer
from jetspec_jax.layers.numerics import einsum, power, precision

TILE = 16  # rows of the smallest tile
TILES = (16, 32, 64)


# The rows' experts [R * k]; or, of more than `TILE` rows, the result of `lists`.
Found = tuple[jax.Array, ...]


class Cut(NamedTuple):
    """One program's share of an expert: columns of its result, depth of a step of the sum."""

    columns: int
    depth: int
    warps: int = 4
    stages: int = 4


class Cuts(NamedTuple):
    """How the two products are cut."""

    gate_up: Cut
    down: Cut


def supported(hidden: int, inner: int) -> bool:
    """Whether experts of these sizes split into tiles."""
    return hidden % 16 == 0 and inner % 16 == 0


def cuts(rows: int, hidden: int, inner: int, dtype=jnp.bfloat16) -> Cuts:
    """Returns the cut for `rows` rows of `hidden` numbers and experts of `inner`."""
    divisor = lambda size, *sizes: next(s for s in (*sizes, 64, 32, 16) if size % s == 0)
    if jnp.dtype(dtype).itemsize > 2:  # no matrix unit: what a tile adds up is held by few registers
        return Cuts(Cut(divisor(inner, 32), divisor(hidden, 32)), Cut(divisor(hidden, 32), divisor(inner, 32)))
    # One row has eight experts: narrow shares, so that every multiprocessor reads.
    few = rows == 1
    gate_up = Cut(divisor(inner, 32 if few else 64), divisor(hidden, 128 if few else 64))
    return Cuts(gate_up, Cut(divisor(hidden, 64 if few else 128), divisor(inner, 128 if few else 64)))


@functools.partial(jax.jit, static_argnames=("count", "normalize", "interpret", "cut"))
def mixture(  # noqa: PLR0913  # the weights of a layer, and what is static
    x: Float[Array, "R E"],
    router: Float[Array, "E X"],
    gate_up: Float[Array, "X E 2 F"],
    down: Float[Array, "X F E"],
    count: int,
    normalize: bool,
    interpret: bool = False,
    cut: Cuts | None = None,
) -> Float[Array, "k R E"]:
    """Returns the weighed results of every row's `count` experts, the most probable first, in f32: partial sums.

    Args:
      x: normed rows.
      router: its probabilities are computed in f32.
      gate_up: gate and up of each expert side by side.
      down: of each expert.
      count: experts that a row is sent to.
      normalize: whether their weights are made to sum to one.
      interpret: runs without a GPU.
      cut: how the products are cut; None is the rule of `cuts`.
    """
    rows, hidden = x.shape
    experts, inner = down.shape[:2]
    cut = cut or cuts(rows, hidden, inner, x.dtype)
    weight, found = route(x, router, count, normalize, interpret)
    wide = gate_up_product(x, gate_up.reshape(experts, hidden, 2 * inner), found, count, cut.gate_up, interpret)
    return down_product(wide, down, weight, found, cut.down, interpret)


def route(
    x: Float[Array, "R E"], router: Float[Array, "E X"], count: int, normalize: bool, interpret: bool = False
) -> tuple[Float[Array, "R k"], Found]:
    """Returns weights of every row's experts, and which they are."""
    experts = router.shape[1]
    if gpu_layer.tileable(*router.shape):
        logits = gpu_layer.matmul(x, router, interpret)
    else:
        logits = einsum("re,ex->rx", x, router, jnp.float32)[None]
    weight, expert = choose(logits, count, normalize, interpret)
    return weight, (expert.reshape(-1),) if len(x) <= TILE else lists(expert, experts, interpret)


@functools.partial(jax.jit, static_argnames=("count", "normalize", "interpret"))
def choose(
    parts: Float[Array, "parts R X"], count: int, normalize: bool, interpret: bool = False
) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """Returns weights and ids of every row's experts, out of partial sums of the router's logits.

    The most probable first, of equals the one of smaller id. A row that is not finite has experts too, at a weight of
    NaN: it reads no memory that is not there, and concerns no other row.
    """
    splits, rows, experts = parts.shape
    wide = power(experts)

    def kernel(parts_ref, weight_ref, expert_ref):
        row, lane = pl.program_id(0), jnp.arange(wide)
        live = lane < experts
        logits = jnp.zeros((wide,), jnp.float32)
        for i in range(splits):
            logits += plgpu.load(parts_ref.at[jnp.int32(i), row, pl.ds(0, wide)], mask=live, other=0)
        logits = jnp.where(live, logits, -jnp.inf)
        odds = jnp.exp(logits - logits.max())
        odds = odds / odds.sum()
        left = jnp.where(live, jnp.where(odds == odds, odds, -1.0), -2.0)
        weights = []
        for i in range(count):
            best = left.max()
            at = jnp.where(left == best, lane, wide).min()
            left = jnp.where(lane == at, -3.0, left)
            expert_ref[row, i] = at
            weights.append(jnp.where(best < 0, jnp.nan, best))
        total = sum(weights) if normalize else jnp.float32(1)
        for i, one in enumerate(weights):
            weight_ref[row, i] = one / total

    like = lambda dtype: jax.ShapeDtypeStruct((rows, count), dtype)
    return pl.pallas_call(
        kernel,
        grid=(rows,),
        out_shape=[like(jnp.float32), like(jnp.int32)],
        compiler_params=plgpu.CompilerParams(num_warps=1, num_stages=1),
        interpret=interpret,
        name="choose_experts",
    )(parts)


@functools.partial(jax.jit, static_argnames=("experts", "interpret"))
def lists(
    expert: Int[Array, "R k"], experts: int, interpret: bool = False
) -> tuple[Int[Array, "X routed"], Int[Array, " X"]]:
    """Returns which routed rows (row * k + place among the row's experts) each expert has, in order, and how many.

    Places of a list after its end are not written.
    """
    routed = expert.size
    wide = power(routed)

    def kernel(expert_ref, list_ref, count_ref):
        mine, lane = pl.program_id(0), jnp.arange(wide)
        found = plgpu.load(expert_ref.at[pl.ds(0, wide)], mask=lane < routed, other=-1)
        hit = (found == mine).astype(jnp.int32)
        before = jnp.cumsum(hit) - hit
        total = hit.sum()
        # The others have places of their own after them, at which nothing is stored.
        place = jnp.where(hit > 0, before, total + lane - before)
        plgpu.store(list_ref.at[mine * wide + place], lane, mask=hit > 0)
        count_ref[mine] = total

    found, total = pl.pallas_call(
        kernel,
        grid=(experts,),
        out_shape=[jax.ShapeDtypeStruct((n,), jnp.int32) for n in (experts * wide, experts)],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="list_rows",
    )(expert.reshape(-1))
    return found.reshape(experts, wide)[:, :routed], total


class Group(NamedTuple):
    """What a program multiplies: an expert, and a tile of rows."""

    expert: jax.Array
    row: jax.Array  # [M] of x
    routed: jax.Array  # [M] row * k + place among the row's experts
    live: jax.Array  # [M] the others of the tile are not the expert's; they stand after the end of all arrays


def _visit(refs, slot, size: tuple[int, int], by_row: bool, visit) -> None:
    """Calls `visit` with every tile of rows of a slot's expert. A slot without one ends after a look.

    Args:
      refs: the rows' experts [R * k]; or the lists of the experts [X, routed] and how long they are [X].
      slot: of the grid.
      size: rows, and experts a row.
      by_row: the slot is a routed row, and the first one of an expert visits it; otherwise the slot is an expert.
      visit: takes a `Group`.
    """
    rows, count = size
    if len(refs) == 2:
        _visit_list(refs, slot, rows, count, visit)
        return
    row, place = jnp.arange(TILE), jnp.arange(power(count))[None]
    expert = refs[0][slot] if by_row else slot
    routed = row[:, None] * count + place
    known = (row < rows)[:, None] & (place < count)
    hit = known & (plgpu.load(refs[0].at[routed], mask=known, other=-1) == expert)
    none = rows * count
    mine = jnp.where(hit, routed, none).min(1)
    first = mine.min()

    @pl.when(first == slot if by_row else first < none)
    def _():
        visit(Group(expert, row, mine, mine < none))


def _visit_list(refs, expert, rows: int, count: int, visit) -> None:
    """`_visit` of a list: the smallest tile that holds it, or several of the largest."""
    list_ref, count_ref = refs
    total = count_ref[expert]

    def tile(size, first):
        at = first + jnp.arange(size)
        routed = plgpu.load(list_ref.at[expert, pl.ds(first, size)], mask=at < total, other=rows * count)
        visit(Group(expert, routed // count, routed, at < total))

    sizes = [size for size in TILES if size < 2 * rows]
    for low, size in zip((0, *sizes), sizes[:-1], strict=False):
        pl.when((total > low) & (total <= size))(functools.partial(tile, size, 0))
    low, size = (0, *sizes)[-2], sizes[-1]

    @pl.when(total > low)
    def _():
        jax.lax.fori_loop(0, (total + size - 1) // size, lambda i, _: tile(size, i * size), None)


def _rows(ref, row, columns, live):
    """Loads columns of some rows; zeros of those that are not live."""
    return plgpu.load(_at(ref, row, columns), mask=jnp.broadcast_to(live[:, None], (row.size, columns.size)), other=0)


def _store(ref, row, columns, value, live):
    plgpu.store(_at(ref, row, columns), value, mask=jnp.broadcast_to(live[:, None], value.shape))


def _at(ref, row, columns):
    spread = lambda x: jnp.broadcast_to(x, (row.size, columns.size))
    return ref.at[spread(row[:, None]), spread(columns[None])]


def _dot(x, w):
    return jnp.dot(x, w, precision=precision(x.dtype), preferred_element_type=jnp.float32)


def _slots(rows: int, count: int, experts: int) -> int:
    """Slots of a grid: as many experts as the rows can choose."""
    return min(rows * count, experts)


def gate_up_product(
    x: Float[Array, "R E"], weights: Float[Array, "X E _"], found: Found, count: int, cut: Cut, interpret: bool = False
) -> Float[Array, "routed F"]:
    """Returns silu(x @ gate) * (x @ up) of every row for each of its `count` experts in turn.

    Args:
      x: normed rows.
      weights: gate and, after it, up of each expert.
      found: the rows' experts.
      count: experts a row.
      cut: how the product is cut.
      interpret: runs without a GPU.
    """
    (rows, hidden), (experts, _, both) = x.shape, weights.shape
    wide, depth, warps, stages = cut
    inner, slots = both // 2, _slots(rows, count, experts)

    def kernel(x_ref, w_ref, *refs):
        first, out_ref = pl.program_id(0) * wide, refs[-1]

        def visit(group):
            def body(i, sums):
                left = _rows(x_ref, group.row, i * depth + jnp.arange(depth), group.live)
                at = pl.ds(i * depth, depth)
                gate, up = (w_ref[group.expert, at, pl.ds(j * inner + first, wide)] for j in range(2))
                return sums[0] + _dot(left, gate), sums[1] + _dot(left, up)

            zero = jnp.zeros((group.row.size, wide), jnp.float32)
            gate, up = jax.lax.fori_loop(0, hidden // depth, body, (zero, zero))
            # Rounded where the XLA path rounds: after each product.
            gate, up = (y.astype(out_ref.dtype).astype(jnp.float32) for y in (gate, up))
            out = (gate * jax.nn.sigmoid(gate)).astype(out_ref.dtype) * up.astype(out_ref.dtype)
            _store(out_ref, group.routed, first + jnp.arange(wide), out, group.live)

        _visit(refs[:-1], pl.program_id(1), (rows, count), slots < experts, visit)

    return pl.pallas_call(
        kernel,
        grid=(inner // wide, slots),  # programs of one expert side by side: together they read whole rows of it
        out_shape=jax.ShapeDtypeStruct((rows * count, inner), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="experts_gate_up",
    )(x, weights, *found)


def down_product(
    x: Float[Array, "routed F"], weights: Float[Array, "X F E"], weight: Float[Array, "R k"], found: Found, cut: Cut,
    interpret: bool = False,
) -> Float[Array, "k R E"]:  # fmt: skip
    """Returns x @ down of every routed row, times its weight, in f32.

    Args:
      x: the result of `gate_up_product`.
      weights: down of each expert.
      weight: of the rows' experts.
      found: which they are.
      cut: how the product is cut.
      interpret: runs without a GPU.
    """
    (rows, count), (experts, inner, hidden) = weight.shape, weights.shape
    wide, depth, warps, stages = cut
    slots = _slots(rows, count, experts)

    def kernel(x_ref, w_ref, weight_ref, *refs):
        first, out_ref = pl.program_id(0) * wide, refs[-1]

        def visit(group):
            def body(i, total):
                left = _rows(x_ref, group.routed, i * depth + jnp.arange(depth), group.live)
                return total + _dot(left, w_ref[group.expert, pl.ds(i * depth, depth), pl.ds(first, wide)])

            total = jnp.zeros((group.row.size, wide), jnp.float32)
            total = jax.lax.fori_loop(0, inner // depth, body, total)
            scale = plgpu.load(weight_ref.at[group.routed], mask=group.live, other=0)
            place = jnp.where(group.live, group.routed % count * rows + group.row, rows * count)
            _store(out_ref, place, first + jnp.arange(wide), total * scale[:, None], group.live)

        _visit(refs[:-1], pl.program_id(1), (rows, count), slots < experts, visit)

    out = pl.pallas_call(
        kernel,
        grid=(hidden // wide, slots),
        out_shape=jax.ShapeDtypeStruct((count * rows, hidden), jnp.float32),
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="experts_down",
    )(x, weights, weight.reshape(-1), *found)
    return out.reshape(count, rows, hidden)
