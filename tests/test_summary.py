"""Figures of a comparison by hand, those of several files together, their tables and pictures."""

import dataclasses
import xml.etree.ElementTree as ET

import pytest
from compared import BASE, PLAIN, SETTINGS, TREE, of, tree

from jetspec_jax.evals import chart, ledger, summary, tables
from jetspec_jax.evals.drafters import Cell


class TestFigures:
    def test_known_rounds(self):
        """FC-49: rounds that accept 0, 2 and 5 of 5 drafts."""
        (_, group) = of(BASE, tree([0, 2, 5], 2.0)).groups
        f = group.figures
        assert f.acceptance == f.acceptance_mean == pytest.approx(10 / 3)
        assert f.reached == pytest.approx([2 / 3, 2 / 3, 1 / 3, 1 / 3, 1 / 3])
        assert f.conditional == pytest.approx([2 / 3, 1, 1 / 2, 1, 1])
        assert f.kept == (7, 2) and f.round_seconds == pytest.approx(2 / 3) and f.step_seconds == 1
        assert f.speedup == f.speedup_mean == pytest.approx(5) and f.efficiency == pytest.approx(1.5)
        assert f.tokens_per_second == 5

    def test_the_interval_holds_what_draws_of_prompts_give(self):
        """Two prompts of 3 and 9 tokens in 3 and 1 rounds: of draws of two a quarter is 1, a half 3, a quarter 9."""
        assert summary.interval_95([3, 9], [3, 1]) == (1.0, 9.0)
        low, high = summary.interval_95([20] * 50 + [40] * 50, [10] * 100)
        assert 2.7 < low < 2.85 and 3.15 < high < 3.3  # 3 within 1.96 * 1 / sqrt(100)

    def test_two_prompts_pooled_and_each(self):
        """FC-50. Prompt 1: four tokens in two rounds of three seconds; plain decoding takes a second a token."""
        other = dataclasses.replace(BASE, prompt=1, new_tokens=5, decode=4.0, rounds=4)
        f = of(BASE, other, tree([0, 2, 5], 2.0), tree([1, 1], 6.0, prompt=1)).groups[1].figures
        assert f.acceptance == pytest.approx(14 / 5) and f.acceptance_mean == pytest.approx((10 / 3 + 2) / 2)
        assert f.speedup == pytest.approx(1 / (8 / 14)) and f.speedup_mean == pytest.approx((5 + 4 / 6) / 2)
        assert f.tokens_per_second == pytest.approx(14 / 8)

    def test_what_one_side_lacks_is_in_no_ratio(self):
        f = of(BASE, tree([0, 2, 5], 2.0), tree([1, 1], 600.0, prompt=1)).groups[1].figures
        assert f.speedup == f.speedup_mean == pytest.approx(5) and f.prompts == 2
        assert of(tree([1], 1.0)).groups[1].figures.speedup is None
        empty = tree([], 0.0, prompt=1, new_tokens=0)  # a limit of no token
        assert of(BASE, tree([0, 2, 5], 2.0), empty).groups[1].figures.tokens_per_second == 5
        one = tree([], 0.0, new_tokens=1)  # the token that comes with the prompt
        f = of(dataclasses.replace(BASE, new_tokens=1, rounds=0, emitted=(), accept_lengths=(), decode=0.0), one)
        assert f.groups[1].figures.speedup is None and f.groups[1].figures.acceptance is None

    def test_a_tree_stands_beside_its_own_chain(self):
        """The longest of at most as many nodes. Tokens a second: 5 over 2.5 on one prompt, 1 over 2 on the other."""
        short, long, other = (Cell(d, d, "chain", n) for d, n in (("jetspec", 4), ("jetspec", 6), ("ngram", 8)))
        assert summary.chain_of(TREE, [PLAIN, short, long, other, TREE]) == long
        equal = Cell("jetspec", "jetspec", "chain", 8)  # as many nodes as the tree, as most have
        assert summary.chain_of(TREE, [short, equal, equal._replace(nodes=9)]) == equal
        assert summary.chain_of(long, [long]) is None and summary.chain_of(TREE, [other]) is None
        chains = [tree([0, 2, 5], 4.0, shape="chain", nodes=6), tree([1, 1], 2.0, shape="chain", nodes=6, prompt=1)]
        cells = [list(PLAIN), list(TREE), list(long)]
        rows = [BASE, tree([0, 2, 5], 2.0), tree([1, 1], 4.0, prompt=1), *chains]
        found = of(*rows, cells=cells).groups
        assert found[1].figures.over_chain == (pytest.approx(1.0), 1, 2) and found[2].figures.over_chain is None
        found = of(*rows[:2], chains[0], cells=cells).groups
        assert found[1].figures.over_chain == (pytest.approx(2.0), 1, 1)

    def test_each_temperature_is_beside_its_own_plain_decoding_and_chain(self):
        """Plain decoding takes a second a token at temperature 0 and two at 1, where the chain is as slow as that."""
        long = Cell("jetspec", "jetspec", "chain", 6)
        hot = {"temperature": 1.0}
        rows = [
            BASE, tree([0, 2, 5], 2.0), tree([0, 2, 5], 4.0, shape="chain", nodes=6),
            dataclasses.replace(BASE, decode=20.0, **hot), tree([0, 2, 5], 2.0, **hot),
            tree([0, 2, 5], 20.0, shape="chain", nodes=6, **hot),
        ]  # fmt: skip
        found = of(*rows, cells=[list(PLAIN), list(TREE), list(long)], sampling={"temperature": [0.0, 1.0]})
        for groups in (found.groups, found.totals, found.lengths["<= 256"]):
            told = [(g.temperature, g.figures.speedup, g.figures.over_chain) for g in groups if g.cell == TREE]
            assert told == [(0.0, 5.0, (2.0, 1, 1)), (1.0, 10.0, (10.0, 1, 1))]

    def test_what_the_limit_cut_is_not_given_out(self):
        f = of(BASE, tree([0, 2, 5], 2.0, emitted=(1, 3, 2))).groups[1].figures
        assert f.acceptance == 2 and f.kept == (7, 2)

    def test_verdicts_margins_losses_and_scores(self):
        lost = {"nothing": 1, "no candidate": 2, "not in the tree": 0, "parent wrong": 0}
        right, wrong = {"verdict": "right"}, {"verdict": "wrong"}
        other = dataclasses.replace(BASE, prompt=1, score=right)
        found = of(
            dataclasses.replace(BASE, score=right), other,
            tree([0], 1.0, lost=lost, verdict="differs", margin=0.25, score=right),
            tree([0], 1.0, prompt=1, lost=lost, verdict="tie", margin=1e-6, score=wrong),
        )  # fmt: skip
        f = found.groups[1].figures
        assert f.margin == 0.25 and f.verdicts == {"differs": 1, "tie": 1} and f.lost["no candidate"] == 4
        assert (f.scores, f.score_differs) == ({"right": 1, "wrong": 1}, 1)
        assert tables.verdicts(f) == "1 tie, 1 differs (margin up to 2.5e-01 std)"
        erred = tree([0], 1.0, verdict="differs", margin=-0.5), tree([0], 1.0, prompt=1, verdict="tie", margin=1e-6)
        assert of(BASE, other, *erred).groups[1].figures.margin == -0.5  # a tie's is none of a difference
        assert tables._kinds(f) == ["33.3%", "66.7%", "0.0%", "0.0%"]
        f = of(BASE, tree([0], 1.0, lost=lost), tree([0], 1.0, prompt=1)).groups[1].figures
        assert f.lost is None  # one of them does not say

    def test_bins_of_prompt_lengths(self):
        assert [summary.bin_of(n) for n in (1, 256, 257, 4096, 4097)] == [
            "<= 256", "<= 256", "257-512", "2049-4096", "> 4096",
        ]  # fmt: skip
        long = dataclasses.replace(BASE, prompt=1, prompt_tokens=300)
        found = of(BASE, long, tree([0, 2, 5], 2.0))
        assert list(found.lengths) == ["<= 256", "257-512"]
        assert [g.figures and g.figures.prompts for g in found.lengths["257-512"]] == [1, None]
        found = of(BASE, dataclasses.replace(BASE, set="b"), sets={"a": [1, ""], "b": [1, ""]})
        assert [(g.wanted, g.figures and g.figures.prompts) for g in found.lengths["<= 256"]] == [(2, 2), (2, None)]


class TestJoined:
    def test_sets_temperatures_and_starts_of_all_files(self):
        """One file has temperature 1 alone, the other 0 in two starts; sets keep their order, colder ones first."""
        sets, two = {"b": [1, ""], "a": [1, ""]}, Cell("ngram", "ngram", "tree", 8)
        hot = [dataclasses.replace(r, temperature=1.0, peak_bytes=3) for r in (BASE, tree([1], 1.0))]
        cold = [dataclasses.replace(BASE, set="b", session=2), tree([2], 1.0, drafter="ngram", method="ngram")]
        first = of(*hot, sets=sets, sampling={"temperature": [1.0]})
        other = of(*cold, sets=sets, cells=[list(PLAIN), list(two)])
        found = summary.joined([first, other])
        assert (found.sessions, found.peak_bytes) == (3, 3)
        assert found.settings["sampling"]["temperature"] == [0.0, 1.0]
        assert [(g.temperature, g.set, str(g.cell)) for g in found.groups if g.figures] == [
            (0.0, "b", "plain decoding"), (0.0, "a", "ngram tree 8"), (1.0, "a", "plain decoding"),
            (1.0, "a", "jetspec tree 8"),
        ]  # fmt: skip
        assert summary.joined([other, first]).peak_bytes == 3

    def test_acceptance_by_prompt_length_of_all_files(self):
        """Two prompts of each length in one file, one of the long ones in the other; a bin alone is no table."""
        rows = [tree([0, 2, 5], 2.0), tree([1, 1], 2.0, prompt=1)]
        long = [dataclasses.replace(r, prompt=r.prompt + 2, prompt_tokens=300) for r in (BASE, *rows)]
        other = Cell("ngram", "ngram", "tree", 8)
        mine = [dataclasses.replace(r, drafter="ngram", method="ngram") for r in (long[1], *rows)]
        sets = {"a": [4, ""]}
        one, two = of(BASE, *rows, *long, sets=sets), of(BASE, *mine, sets=sets, cells=[list(PLAIN), list(other)])
        found = summary.joined([one, two])
        assert [str(g.cell) for g in found.lengths["257-512"]] == ["plain decoding", "jetspec tree 8", "ngram tree 8"]
        text = tables.overview(found)
        assert "| cell | <= 256 (2 prompts) | 257-512 (2 prompts) |" in text
        assert "| jetspec tree 8 | 2.80 [2.00, 3.33] | 2.80 [2.00, 3.33] |" in text
        assert "| ngram tree 8 | 2.80 [2.00, 3.33] | (3.33) [3.33, 3.33] |" in text
        assert "by prompt tokens" not in tables.overview(of(BASE, *rows))


def test_an_absent_cell_is_said():
    text = tables.markdown(ledger.Run(SETTINGS, [BASE]))
    assert "| a | 0 | jetspec tree 8 | absent (0 of 2) | - |" in text
    assert "| a | 0 | plain decoding | 1 of 2 | 1.00 |" in text
    assert "No prompt has 257-512" in text


def boxes(svg: str) -> list[float]:
    """Heights of the bars of a panel."""
    root = ET.fromstring(f"<g>{svg}</g>")
    return [float(box.get("height")) for box in root.iter("rect") if box.find("title") is not None]


class TestCharts:
    def test_bars_are_as_high_as_their_values(self):
        side = chart.bars("t", ["a", "b"], [chart.Bars("x", [1.0, 2.0]), chart.Bars("y", [None, 4.0])])
        high = boxes(side)
        assert [h / high[-1] for h in high] == pytest.approx([0.25, 0.5, 1], abs=0.01) and ">-</text>" in side
        stacked = boxes(chart.bars("t", ["a"], [chart.Bars("x", [1.0]), chart.Bars("y", [3.0])], stacked=True))
        assert stacked[1] / stacked[0] == pytest.approx(3, abs=0.05)

    def test_points_lie_where_their_values_are(self):
        svg = chart.curves("t & u", [chart.Curve("<x>", [(1, 0.0), (2, 1.0), (4, 2.0)])], log=True)
        root = ET.fromstring(f"<g>{svg}</g>")
        points = [tuple(map(float, p.split(","))) for p in root.find("polyline").get("points").split()]
        (a, low), (b, middle), (c, high) = points
        assert b - a == pytest.approx(c - b, abs=0.2) and low - middle == pytest.approx(middle - high, abs=0.2)
        assert low > high
        assert "nothing measured" in chart.curves("t", [chart.Curve("x", [])])

    def test_a_picture_of_a_comparison_with_gaps(self):
        ET.fromstring(chart.comparison(of(BASE)))
        ET.fromstring(chart.comparison(of(BASE, tree([0, 2, 5], 2.0))))
