"""The ceiling of a chain's speed-up: against sums, at its limits, and fitted to figures that are known."""

import itertools
import xml.etree.ElementTree as ET
from fractions import Fraction

import pytest
from compared import BASE, of, tree
from hypothesis import given
from hypothesis import strategies as st

from jetspec_jax.evals import ceiling
from jetspec_jax.evals.drafters import Cell
from jetspec_jax.evals.summary import Group

CHANCES = st.floats(0, 1) | st.floats(1 - 2e-4, 1) | st.sampled_from([0.0, 1.0, 1 - 1e-4, 1 - 1.0001e-4])


def by_hand(a: float, n: int) -> float:
    """Exact sum of a^k."""
    return float(sum(Fraction(a) ** k for k in range(n + 1)))


@given(CHANCES, st.integers(0, 40))
def test_tokens_are_the_sum(a, n):
    assert ceiling.tokens(a, n) == pytest.approx(by_hand(a, n), rel=1e-7)


def test_tokens_are_the_mean_over_all_outcomes():
    """Each guess is right or wrong: 2^n outcomes with their probabilities, and the run of right ones at the start."""
    for a, n in itertools.product((0.0, 0.3, 0.85, 1.0), range(7)):
        mean = 0.0
        for outcome in itertools.product((True, False), repeat=n):
            chance = 1.0
            for right in outcome:
                chance *= a if right else 1 - a
            mean += chance * (1 + len(list(itertools.takewhile(bool, outcome))))
        assert ceiling.tokens(a, n) == pytest.approx(mean)


def test_limits():
    assert ceiling.speedup(0.9, 0.05, 0) == ceiling.speedup(0.9, 0.05, 0, one_pass=True) == 1
    assert ceiling.speedup(1.0, 0.0, 15) == 16 and ceiling.speedup(1.0, 0.1, 10) == pytest.approx(11 / 2)
    assert ceiling.speedup(0.0, 0.1, 10) == pytest.approx(1 / 2)
    assert ceiling.speedup(0.9, 0.5, 10, one_pass=True) == pytest.approx(by_hand(0.9, 10) / 1.5)


def test_a_dear_draft_has_a_best_length_and_a_cheap_one_climbs():
    dear = [ceiling.speedup(0.95, 0.05, n) for n in range(65)]
    cheap = [ceiling.speedup(0.95, 0.0005, n) for n in range(65)]
    best = dear.index(max(dear))
    assert 5 < best < 30 and dear[64] < dear[best] and cheap == sorted(cheap) and 18 < cheap[64] < 20


def group(n, accepted, decode, method="jetspec", step=1.0):
    """A chain of n guesses whose rounds kept so many, beside plain decoding at `step` seconds."""
    request = tree(accepted, decode, depth=n, shape="chain", nodes=n + 1, drafter=method, method=method)
    plain = BASE.__class__(**vars(BASE) | {"decode": step * BASE.rounds})
    cell = Cell(method, method, "chain", n + 1)
    found = of(plain, request, cells=[list(BASE.cell), list(cell)])
    return Group("a", 0.0, cell, 1, found.groups[1].figures)


@pytest.mark.parametrize("method, one_pass", [("jetspec", True), ("eagle3", False), ("ngram", True)])
def test_a_fit_finds_what_figures_were_made_of(method, one_pass):
    """Rounds of 2 and of 4 guesses at a = 3/4: of 4 tries 3 are right; each costs 1 + c, or 1 + N c, plain steps."""
    c, groups = 0.3, []
    for n, accepted in ((2, [0, 2, 2, 2] * 4 + [1] * 4), (4, [4, 4, 4, 0, 1, 2])):
        cost = 1 + c * (1 if one_pass else n)
        groups.append(group(n, accepted, cost * len(accepted) * 0.5, method, step=0.5))
    right = sum([0, 2, 2, 2] * 4 + [1] * 4) + 15
    tried = right + 4 + 4 + 3
    found = ceiling.fit(groups)
    assert found.one_pass == one_pass and found.a == pytest.approx(right / tried) and found.c == pytest.approx(c)


def test_c_is_the_least_squares_over_budgets_and_never_below_nothing():
    groups = [group(n, [n], cost, "eagle3") for n, cost in ((1, 1.2), (3, 1.3))]
    assert ceiling.fit(groups).c == pytest.approx((1 * 0.2 + 3 * 0.3) / 10)
    assert ceiling.fit([group(2, [2], 0.5)]).c == 0
    empty = ceiling.fit([Group("a", 0.0, Cell("x", "jetspec", "chain", 3), 1, None)])
    assert (empty.a, empty.c) == (None, None) and "| absent |" in ceiling.predicted([empty])


def test_predicted_stands_beside_measured():
    (found,) = [ceiling.fit([group(2, [2, 0], 3.0)])]
    line = ceiling.predicted([found]).splitlines()[-1]
    assert found.a == pytest.approx(2 / 3) and found.c == pytest.approx(0.5)
    told = (1 + 2 / 3 + 4 / 9) / 1.5
    measured = 1 / (3.0 / 4)
    wanted = f"2 | 0.667 | 0.500 | one pass | 1.50 | {told:.2f} | {measured:.2f} | {measured / told:.2f} |"
    assert line == f"| a | 0 | jetspec chain 3 | {wanted}"


def test_a_fit_for_each_set_or_one_for_all():
    """Set a keeps 1 of 2 guesses and set b both of 2: 1 of 2 tries and 2 of 2 are right, 3 of 4 together."""
    cell = Cell("jetspec", "jetspec", "chain", 3)
    chain = lambda name, kept: tree(kept, 2.0, set=name, depth=2, shape="chain", nodes=3)
    rows = [BASE, BASE.__class__(**vars(BASE) | {"set": "b"}), chain("a", [1]), chain("b", [2])]
    found = of(*rows, sets={"a": [1, ""], "b": [1, ""]}, cells=[list(BASE.cell), list(cell)])
    assert [(one.groups[0].set, one.a) for one in ceiling.fits(found)] == [("a", 0.5), ("b", 1.0)]
    assert [(one.groups[0].set, one.a) for one in ceiling.fits(found, pooled=True)] == [("all sets", 0.75)]


def test_the_command(capsys, tmp_path):
    assert ceiling.main(["--a", "0.9", "--n", "0", "8", "1", "--svg", str(tmp_path / "c.svg")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| a | c | N = 0 | N = 1 | N = 8 | best N of these |"
    assert lines[2].startswith("| 0.9 | 0.05 | 1.00 | 1.81 |") and lines[3].startswith("| 0.9 | 0.0005 | 1.00 | 1.90 |")
    assert len(ET.parse(tmp_path / "c.svg").getroot().findall(".//{*}polyline")) == 2
    assert ceiling.main(["--rows", "x", "--a", "0.5"]) == 2 and "--a with --rows" in capsys.readouterr().err
    assert ceiling.main(["--rows", str(tmp_path / "none")]) == 1 and "no such file" in capsys.readouterr().err
    assert ceiling.main(["--a", "1.5"]) == 2
