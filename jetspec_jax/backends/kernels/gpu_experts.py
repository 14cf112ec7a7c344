"""A mixture of experts for few rows on NVIDIA GPUs: each chosen expert's weights are read once, the others' never.

Three to five launches. The router's product; `choose`, a program a row; `lists`, a program an expert, which writes down
the expert's rows (left out up to `TILE` rows: one tile of the matrix unit holds all of them, so nothing needs to be
gathered); gate and up with SwiGLU; down. A program of the last two is one expert and some columns of its weights, and
multiplies them by the expert's rows alone. How many those are is known on the device only, so a program holds a branch
a size of tile. Of a single row, where all experts are here, the programs of gate and up choose by themselves, which
costs less than a launch, and leave the choice to down. Nothing is sorted, nothing is added atomically: down leaves the
k-th experts of all rows as the k-th partial sum, and the next operation adds those up in order. Where a device has some
of the experts alone, only those are visited. The oracle is `moe.feed_forward`.

Pallas-Triton, for the reasons that `gpu_attention` gives: a row of a plain step or the four rows that an expert gets of
a tree fill at most a sixteenth of the tile that wgmma takes.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.backends.kernels import gpu_layer
from jetspec_jax.layers.numerics import einsum, power, precision

TILE = 16  # rows of the smallest tile
TILES = (16, 32, 64)
MOST = 256  # experts that a program compares pair by pair: the table of pairs lies in its registers


class Routed(NamedTuple):
    """Which experts rows are sent to.

    weight: [R * k] of each row's experts; None where gate and up choose.
    found: one array, the rows' experts [R * k]; two, what `lists` returns, of more than `TILE` rows; where `weight` is
      None one array, the router's logits [parts, 1, X].
    """

    weight: jax.Array | None
    found: tuple[jax.Array, ...]


class TopK(NamedTuple):
    """How rows choose.

    experts_per_token: k.
    normalize: whether a row's weights are made to sum to one.
    """

    experts_per_token: int
    normalize: bool


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


def supported(hidden: int, inner: int, experts: int) -> bool:
    """Whether experts of these sizes split into tiles, and are few enough to be ranked pair by pair."""
    return hidden % 16 == 0 and inner % 16 == 0 and experts <= MOST


def cuts(rows: int, hidden: int, inner: int, dtype=jnp.bfloat16) -> Cuts:
    """Returns the cut for `rows` rows of `hidden` numbers and experts of `inner`.

    Of those that `bench/moe.py --cuts` tried on an H200 in bfloat16, the best or near it.
    """
    divisor = lambda size, *sizes: next(s for s in (*sizes, 64, 32, 16) if size % s == 0)
    if jnp.dtype(dtype).itemsize > 2:  # no matrix unit: what a tile adds up is held by few registers
        return Cuts(Cut(divisor(inner, 32), divisor(hidden, 32)), Cut(divisor(hidden, 32), divisor(inner, 32)))
    if rows == 1:  # long steps, for a program's loop is all that keeps reads on their way
        gate_up = Cut(divisor(inner, 32), divisor(hidden, 128), 4, 3)
        return Cuts(gate_up, Cut(divisor(hidden, 128), divisor(inner, 64), 4, 6))
    gate_up = Cut(divisor(inner, 64), divisor(hidden, 32), 4, 3)
    return Cuts(gate_up, Cut(divisor(hidden, 128), divisor(inner, 64)))


@functools.partial(jax.jit, static_argnames=("top", "interpret", "cut"))
def mixture(  # noqa: PLR0913  # the weights of a layer, and what is static
    x: Float[Array, "R E"],
    router: Float[Array, "E X"],
    gate_up: Float[Array, "Y E 2 F"],
    down: Float[Array, "Y F E"],
    top: TopK,
    first: int | Int[Array, ""] = 0,
    interpret: bool = False,
    cut: Cuts | None = None,
) -> Float[Array, "k R E"]:
    """Returns the weighted results of every row's experts, the most probable first, in f32: partial sums.

    Args:
      x: normed rows.
      router: its probabilities are computed in f32.
      gate_up: gate and up of each expert side by side.
      down: of each expert.
      top: how rows choose.
      first: where only Y of all X experts are given, which is the first of them; what the others make is zero.
      interpret: runs without a GPU.
      cut: how the products are cut; None is the rule of `cuts`.
    """
    rows, hidden = x.shape
    experts, inner = down.shape[:2]
    cut = cut or cuts(rows, hidden, inner, x.dtype)
    routed, here = route(x, router, experts, top, first, interpret)
    weights = gate_up.reshape(experts, hidden, 2 * inner)
    wide, routed = gate_up_product(x, weights, routed, top, cut.gate_up, interpret)
    out = down_product(wide, down, routed, top, cut.down, interpret)
    return out if here is None else jnp.where(here.T[..., None], out, 0)


def route(
    x: Float[Array, "R E"], router: Float[Array, "E X"], experts: int, top: TopK,
    first: int | Int[Array, ""] = 0, interpret: bool = False,
) -> tuple[Routed, Bool[Array, "R k"] | None]:  # fmt: skip
    """Returns the experts of every row, and which are among the `experts` from `first` on; None: all are."""
    if gpu_layer.tileable(*router.shape):
        logits = gpu_layer.matmul(x, router, interpret)
    else:
        logits = einsum("re,ex->rx", x, router, jnp.float32)[None]
    every, here = experts == router.shape[1], None
    if len(x) == 1 and every:
        return Routed(None, (logits,)), None
    weight, expert = choose(logits, top, interpret)
    if not every:
        here = (expert >= first) & (expert < first + experts)
        expert = jnp.where(here, expert - first, -1)
    found = (expert.reshape(-1),) if len(x) <= TILE else lists(expert, experts, interpret)
    return Routed(weight.reshape(-1), found), here


def _logits(parts_ref, row) -> jax.Array:
    """A row's logits out of partial sums [parts, R, X], as many as a power of two, -inf after the end."""
    splits, _, experts = parts_ref.shape
    lane = jnp.arange(power(experts))
    logits = jnp.zeros(lane.shape, jnp.float32)
    for i in range(splits):
        logits += plgpu.load(parts_ref.at[jnp.int32(i), row, pl.ds(0, lane.size)], mask=lane < experts, other=0)
    return jnp.where(lane < experts, logits, -jnp.inf)


def _rank(logits) -> jax.Array:
    """Each expert's place: the most probable first, of equals the one of smaller id, those that are no number last.

    A row that is not finite has experts too, at a weight of NaN: it reads no memory that is not there, and concerns no
    other row. Sums go down the columns, which are a thread's own.
    """
    lane = jnp.arange(logits.size)
    logits = jnp.where(logits == logits, logits, -jnp.inf)
    other, mine = logits[:, None], logits[None]
    before = (other > mine) | ((other == mine) & (lane[:, None] < lane[None]))
    return before.astype(jnp.int32).sum(0)


def _odds(logits) -> jax.Array:
    odds = jnp.exp(logits - logits.max())
    return odds / odds.sum()


@functools.partial(jax.jit, static_argnames=("top", "interpret"))
def choose(
    parts: Float[Array, "parts R X"], top: TopK, interpret: bool = False
) -> tuple[Float[Array, "R k"], Int[Array, "R k"]]:
    """Returns weights and ids of every row's experts, out of partial sums of the router's logits.

    The most probable first, of equals the one of smaller id. A row that is not finite gets k experts that exist, at
    NaN.
    """
    rows, count = parts.shape[1], top.experts_per_token

    def kernel(parts_ref, weight_ref, expert_ref):
        row, place = pl.program_id(0), jnp.arange(power(count))
        logits = _logits(parts_ref, row)
        hit = _rank(logits)[:, None] == place[None]
        at_places = lambda x: jnp.where(hit, x[:, None], jnp.zeros_like(x)[:, None]).sum(0)
        weight = jnp.where(place < count, at_places(_odds(logits)), 0.0)
        weight = weight / weight.sum() if top.normalize else weight
        for ref, value in ((weight_ref, weight), (expert_ref, at_places(jnp.arange(logits.size)))):
            plgpu.store(ref.at[row, pl.ds(0, place.size)], value, mask=place < count)

    like = lambda dtype: jax.ShapeDtypeStruct((rows, count), dtype)
    return pl.pallas_call(
        kernel,
        grid=(rows,),
        out_shape=[like(jnp.float32), like(jnp.int32)],
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
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
      refs: `Routed.found`, which here is never logits.
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

    @pl.when((first == slot) & (expert >= 0) if by_row else first < none)
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
    """Slots of a grid: every expert where they have lists, else no more than the rows can choose."""
    return experts if rows > TILE else min(rows * count, experts)


def _choose_here(refs, slot, top: TopK, write: jax.Array, visit) -> None:
    """Calls `visit` with the one row and the slot-th of its experts, and notes that expert and its weight.

    Args:
      refs: the router's logits; results: experts [k] and their weights [k].
      slot: of the grid, a place among the row's experts.
      top: how rows choose.
      write: whether this program is the one that notes.
      visit: takes a `Group`.
    """
    logits_ref, expert_ref, weight_ref = refs
    logits = _logits(logits_ref, jnp.int32(0))
    rank, row = _rank(logits), jnp.arange(TILE)
    expert = jnp.where(rank == slot, jnp.arange(logits.size), 0).sum()
    visit(Group(expert, row, jnp.where(row == 0, slot, top.experts_per_token), row == 0))

    @pl.when(write)
    def _():
        odds = _odds(logits)
        mine = jnp.where(rank == slot, odds, 0.0).sum()
        expert_ref[slot] = expert
        weight_ref[slot] = mine / jnp.where(rank < top.experts_per_token, odds, 0.0).sum() if top.normalize else mine


def gate_up_product(
    x: Float[Array, "R E"], weights: Float[Array, "Y E _"], routed: Routed, top: TopK, cut: Cut,
    interpret: bool = False,
) -> tuple[Float[Array, "routed F"], Routed]:  # fmt: skip
    """Returns silu(x @ gate) * (x @ up) of every row for each of its experts in turn, and `routed`, filled in where
    these programs chose.

    Args:
      x: normed rows.
      weights: gate and, after it, up of each expert.
      routed: the rows' experts.
      top: how rows choose.
      cut: how the product is cut.
      interpret: runs without a GPU.
    """
    (rows, hidden), (experts, _, both), count = x.shape, weights.shape, top.experts_per_token
    wide, depth, warps, stages = cut
    inner, slots, chooses = both // 2, _slots(rows, count, experts), routed.weight is None

    def kernel(x_ref, w_ref, *refs):
        first, out_ref = pl.program_id(0) * wide, refs[len(routed.found)]

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

        if chooses:
            _choose_here((refs[0], *refs[2:]), pl.program_id(1), top, pl.program_id(0) == 0, visit)
        else:
            _visit(refs[: len(routed.found)], pl.program_id(1), (rows, count), slots < experts, visit)

    outputs = [jax.ShapeDtypeStruct((rows * count, inner), x.dtype)]
    if chooses:
        outputs += [jax.ShapeDtypeStruct((count,), dtype) for dtype in (jnp.int32, jnp.float32)]
    wide_rows, *chosen = pl.pallas_call(
        kernel,
        grid=(inner // wide, slots),  # programs of one expert side by side: together they read whole rows of it
        out_shape=outputs,
        compiler_params=plgpu.CompilerParams(num_warps=warps, num_stages=stages),
        interpret=interpret,
        name="experts_gate_up",
    )(x, weights, *routed.found)
    return wide_rows, Routed(chosen[1], (chosen[0],)) if chooses else routed


def down_product(
    x: Float[Array, "routed F"], weights: Float[Array, "Y F E"], routed: Routed, top: TopK, cut: Cut,
    interpret: bool = False,
) -> Float[Array, "k R E"]:  # fmt: skip
    """Returns x @ down of every routed row, times its weight, in f32.

    Args:
      x: the result of `gate_up_product`.
      weights: down of each expert.
      routed: the rows' experts, as `gate_up_product` returns them.
      top: how rows choose.
      cut: how the product is cut.
      interpret: runs without a GPU.
    """
    (experts, inner, hidden), count = weights.shape, top.experts_per_token
    rows, (wide, depth, warps, stages) = len(x) // count, cut
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
    )(x, weights, routed.weight, *routed.found)
    return out.reshape(count, rows, hidden)
