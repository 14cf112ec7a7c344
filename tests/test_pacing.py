"""Which size pays best, against the rule written out in Python; and how plain decoding ends again."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jetspec_jax.loop import budgets, pacing
from jetspec_jax.loop.pacing import Belief, Ladder, Price

SIZES = (1, 4, 8, 16)
LADDER = Ladder(SIZES, 7)
RUNNING, ENDED = 0, 2
choose = functools.partial(jax.jit, static_argnums=0)(pacing.choose)
faded = jax.jit(pacing.faded)


def floats(values):
    return jnp.array(list(values), jnp.float32)


def belief(path, kept=(), promised=(), tested=9.0, rested=0.0, weight=1.0):
    """What rounds have said; nodes beyond those that are named have nothing."""
    full = lambda values: floats([*values, *[0.0] * (SIZES[-1] - 1 - len(values))])
    scalar = jnp.float32
    return Belief(scalar(weight), full(path), full(promised), full(kept), scalar(tested), scalar(rested))


def decide(ladder, said, seconds, resting=False, length=(100,), reason=(RUNNING,), contexts=(100,), worked=0.0):
    """(nodes, rounds) of the next block."""
    table = floats(np.ravel(seconds)).reshape(len(contexts), -1)
    price = Price(floats(contexts), table / 2, jnp.full(table.shape[1], 2.0))
    rows = lambda x: jnp.array(x, jnp.int32)
    found = choose(ladder, said, price, rows(length), rows(reason), jnp.bool_(resting), jnp.float32(worked))
    assert bool(found.resting) == (ladder.sizes[int(found.place)] == 1 and not worked) or int(found.rounds) < 3
    return ladder.sizes[int(found.place)], int(found.rounds)


def tokens_by_hand(ladder, path, kept, promised, weight):
    """E of every size: what the draft says, times how right it was between each two sizes."""
    total = (sum(kept) + 8) / (sum(promised) + 8)
    p = []
    for i in range(ladder.sizes[-1] - 1):
        low = max(s for s in (1, *ladder.trees) if s - 1 <= i)
        high = min(s for s in ladder.trees if s - 1 > i)
        own = range(low - 1, high - 1)
        trust = (sum(kept[j] for j in own) + 4 * total) / (sum(promised[j] for j in own) + 4)
        p.append(min(path[i] / weight * trust, 1.0))
    return [min(1 + sum(p[: n - 1]), n, ladder.depth + 1) for n in ladder.sizes], p


chances = st.lists(st.floats(0.0, 1.0), min_size=15, max_size=15).map(lambda x: sorted(x, reverse=True))
costs = st.lists(st.floats(1.0, 10.0), min_size=4, max_size=4)


@given(chances, chances, chances, costs, st.floats(0.5, 20.0), st.booleans())
def test_the_best_ratio_of_all_sizes_wins(path, kept, promised, seconds, weight, resting):
    path = [weight * p for p in path]
    said = belief(path, kept, promised, weight=weight)
    tokens, _ = tokens_by_hand(LADDER, path, kept, promised, weight)
    np.testing.assert_allclose(pacing.expected(LADDER, said), tokens, rtol=1e-4)
    rates = [t / c for t, c in zip(tokens, seconds, strict=True)]
    best = max(range(1, 4), key=lambda i: rates[i])
    bar = rates[0] * (1.02 if resting else 1.0)
    if any(
        abs(a / b - 1) < 1e-3 for a, b in ((rates[best], bar), *((rates[best], r) for r in rates if r != rates[best]))
    ):
        return  # rounding decides
    nodes, rounds = decide(LADDER, said, seconds, resting)
    if rates[best] > bar:
        assert (nodes, rounds) == (SIZES[best], pacing.MANY)
    else:
        loss = min(c - t * seconds[0] for t, c in zip(tokens[1:], seconds[1:], strict=True))
        every = min(max(math.ceil(loss / (0.005 * seconds[0])), 8), 4096)
        assert nodes == 1 and abs(rounds - every) <= 1 + every // 1000


def test_a_small_tree_is_not_the_end_where_a_larger_one_pays():
    """Costs are steps: 8 nodes cost what 4 do, so the argmax goes past a size that does not pay."""
    said = belief([0.2, 0.2, 0.2, 0.9, 0.9, 0.9, 0.9])
    assert decide(LADDER, said, [1.0, 2.0, 2.0, 9.0])[0] == 8


def test_the_cost_is_that_of_the_rows_that_run():
    """Trees are dear in long contexts here. The row that has ended is long, and does not count."""
    said = belief([0.9] * 15)
    seconds = [[1.0, 1.1, 1.2, 1.3], [1.0, 9.0, 9.0, 9.0]]
    case = {"contexts": (100, 1000), "seconds": seconds}
    assert decide(LADDER, said, length=(100, 1000), reason=(RUNNING, ENDED), **case)[0] == 16
    assert decide(LADDER, said, length=(100, 1000), reason=(ENDED, RUNNING), **case)[0] == 1
    # In the middle they cost half as much more: 1 against 8 tokens in about 5.
    assert decide(LADDER, said, length=(550,), reason=(RUNNING,), **case)[0] == 16


@given(chances, costs.map(sorted), st.sampled_from(["caddtree", "cast"]))
def test_the_other_rules_choose_the_tree_and_plain_decoding_beats_it_where_it_pays_more(path, seconds, rule):
    ladder = dataclasses.replace(LADDER, rule=rule)
    said = belief(path)
    tokens, p = tokens_by_hand(ladder, path, [0] * 15, [0] * 15, 1.0)
    if rule == "cast":
        grid = tuple(n - 1 for n in ladder.trees)
        wanted = 1 + int(budgets.grid_size(floats(p), jnp.int32(1), grid, floats(seconds[1:])))
    else:
        line = lambda n: float(np.interp(n, SIZES[1:], seconds[1:]))
        slope = (seconds[2] - seconds[1]) / 4
        verify = [line(n) if n >= 4 else max(seconds[1] - slope * (4 - n), 0.0) for n in range(1, 17)]
        wanted = 1 + int(budgets.tree_size(floats(p), jnp.float32(0), floats(verify)))
    wanted = min(n for n in ladder.trees if n >= wanted)
    rate = tokens[SIZES.index(wanted)] / seconds[SIZES.index(wanted)]
    if abs(rate * seconds[0] - 1) < 1e-3:
        return
    nodes, _ = decide(ladder, said, seconds)
    assert nodes == (wanted if rate > 1 / seconds[0] else 1)


def test_trees_alone_where_a_row_needs_them():
    """A row with a budget of its own leaves no plain step to choose."""
    ladder = Ladder((8, 16), 7)
    assert decide(ladder, belief([0.0] * 15), [5.0, 9.0]) == (8, pacing.MANY)


@pytest.mark.parametrize("chance, wanted", [(0.01, 1), (0.15, 1), (0.22, 2), (0.3, 2)])
def test_a_new_text_has_rounds_of_its_own_before_it_is_decoded_plainly(chance, wanted):
    """Of the tree that loses least, one at a time: two where the first nearly pays, one where it loses 0.4 steps."""
    seconds, said = [1.0, 2.0, 2.5, 3.0], belief([chance] * 3)
    assert (2 - (1 + 3 * chance) >= 0.4) == (wanted == 1)
    for tested in (0.0, 0.5, 1.0, 2.0):
        nodes, rounds = decide(LADDER, said._replace(tested=jnp.float32(tested)), seconds)
        assert (nodes, rounds) == (4, 1) if tested < wanted else nodes == 1


@pytest.mark.parametrize("chance", [0.0, 0.1, 0.25, 0.32])
def test_looking_whether_trees_pay_again_costs_less_than_a_hundredth(chance):
    """Ten thousand tokens of text in which they do not, at costs of a CPU; a probe accepts what was promised."""
    seconds, path = [1.0, 2.0, 2.4, 3.3], [chance] * 3
    said, spent, tokens, resting, probes = belief(path), 0.0, 0.0, True, 0
    while tokens < 10_000:
        nodes, rounds = decide(LADDER, said, seconds, resting)
        resting = nodes == 1
        if resting:
            said = faded(said, jnp.float32(rounds), jnp.float32(rounds))
            spent, tokens = spent + rounds, tokens + rounds
            continue
        assert (nodes, rounds) == (4, 1)
        gain = 1 + 3 * chance
        said = faded(said, jnp.float32(gain), jnp.float32(0))
        said = said._replace(
            weight=said.weight + 1, path=said.path + belief(path).path, tested=said.tested + 1, rested=jnp.float32(0)
        )
        spent, tokens, probes = spent + seconds[1], tokens + gain, probes + 1
    assert probes >= 20 and spent / tokens < 1.01


def test_a_text_that_becomes_predictable_ends_plain_decoding():
    """After far below break-even, two probes that find it so are enough."""
    said = belief([0.02] * 15, weight=1.0)
    seconds = [1.0, 2.0, 2.4, 3.3]
    nodes, rounds = decide(LADDER, said, seconds, True)
    assert nodes == 1
    for _ in range(2):
        _, rounds = decide(LADDER, said, seconds, True)
        said = faded(said, jnp.float32(rounds), jnp.float32(rounds))
        assert decide(LADDER, said, seconds, True) == (4, 1)
        good = belief([0.9] * 15).path
        said = said._replace(weight=said.weight + 1, path=said.path + good, rested=jnp.float32(0))
    assert decide(LADDER, said, seconds, True)[0] > 1


def test_a_head_that_is_too_sure_of_itself_is_corrected():
    """It promises all and keeps a tenth: trees would pay by its word, and do not."""
    seconds = [1.0, 2.0, 2.4, 3.3]
    sure = [1.0] * 7
    assert decide(LADDER, belief(sure), seconds)[0] > 1
    promised = [30.0] * 7
    assert decide(LADDER, belief(sure, [3.0] * 7, promised), seconds)[0] == 1
    # Only nodes from the fourth on were promised too much: the smallest tree is left.
    assert decide(LADDER, belief(sure, [30.0] * 3 + [0.0] * 4, promised), seconds)[0] == 4


def test_a_new_row_takes_its_share_of_the_belief():
    old = belief([8.0] * 15, [3.0], [4.0], weight=10.0)
    ladder = functools.partial(pacing.renewed, LADDER)
    whole, half = ladder(old, jnp.float32(1.0)), ladder(old, jnp.float32(0.5))
    assert (float(whole.weight), float(whole.tested)) == (0.5, 0.0)
    assert (float(half.weight), float(half.tested)) == (5.25, 4.5)
    much = ladder(old._replace(promised=16 * old.promised, kept=16 * old.kept), jnp.float32(1.0))
    assert float(whole.promised.sum()) == 4 and float(much.promised.sum()) == 32 and float(much.kept.sum()) == 24
    for new in (whole, half):  # what is believed is the same, how firmly is not
        np.testing.assert_allclose(pacing.expected(LADDER, new), pacing.expected(LADDER, old), rtol=1e-5)


def test_plain_steps_are_timed_between_trees_by_the_same_account():
    """Far above break-even rarely: four steps that lose 0.5 each are 2.0, half a percent of 400; near it often."""
    seconds, said = [1.0, 2.0, 3.0, 5.0], belief([1.0] * 3)  # 4 tokens in 2 seconds
    assert decide(LADDER, said, seconds, worked=399.0) == (4, pacing.MANY)
    assert decide(LADDER, said, seconds, worked=401.0) == (1, 4)
    near = belief([0.35] * 3)  # 2.05 in 2
    assert decide(LADDER, near, seconds, worked=31.0) == (4, pacing.MANY)
    assert decide(LADDER, near, seconds, worked=33.0) == (1, 4)


@pytest.mark.parametrize("sizes", [(1,), (4, 2), (0, 4), (2, 2)])
def test_wrong_ladders_are_refused(sizes):
    with pytest.raises(ValueError, match="ascending numbers of nodes"):
        Ladder(sizes, 3)
    with pytest.raises(ValueError, match="use best, caddtree, cast"):
        Ladder((1, 2), 3, "worst")
