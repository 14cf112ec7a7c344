"""Ratios of one comparison against another: by hand, and what is no pair."""

import dataclasses
import json
import shutil

import numpy as np
import pytest
from compared import BASE, PLAIN, SETTINGS, tree

from jetspec_jax.config import ConfigError
from jetspec_jax.evals import against, compare, ledger

SETS = SETTINGS | {"sets": {"a": [2, ""], "b": [1, ""]}}
B = {"set": "b", "prompt": 0}


def run(*requests, **settings):
    return ledger.Run(SETS | settings, list(requests))


def test_ratios_are_of_prompts_that_both_have():
    """Set a has a second prompt on one side alone, which counts nowhere."""
    own = run(BASE, tree([4, 2], 2.0), tree([5], 9.0, prompt=1), tree([1, 1, 1], 3.0, **B))
    other = run(BASE, tree([1, 1], 2.0), tree([0, 0, 0], 1.5, **B))
    (found,) = against.of(own, other)
    assert found.cell == tree([1], 1).cell and found.prompts == 2
    assert found.by_set == pytest.approx({"a": 4 / 2, "b": 2 / 1, "all sets": (14 / 5) / (7 / 5)})
    assert found.faster == pytest.approx((3.5 / 7) / (5.0 / 14))
    assert found.interval == pytest.approx((2, 2))


def test_prompts_are_drawn_in_pairs():
    """The ratio of every prompt is 2, of prompts as unlike as they may be; drawn apart they would spread."""
    lengths = [1, 2, 9]
    row = lambda n, i: tree([n - 1] * 4, 1.0, prompt=i)
    own = run(*(row(2 * n, i) for i, n in enumerate(lengths)), sets={"a": [3, ""]})
    other = run(*(row(n, i) for i, n in enumerate(lengths)), sets={"a": [3, ""]})
    (found,) = against.of(own, other)
    np.testing.assert_allclose(found.interval, (2, 2))
    noisy = run(row(1, 0), row(4, 1), row(9, 2), sets={"a": [3, ""]})
    low, high = against.of(noisy, other)[0].interval
    assert low < 14 / 12 < high
    # Of three prompts 1 draw in 27 is all the first, or all the last: within 95 %, and outside of 90.
    plain, other = run(*(row(n, i) for i, n in enumerate((1, 4, 10)))), run(*(row(1, i) for i in range(3)))
    np.testing.assert_allclose(against.of(plain, other)[0].interval, (1, 10))


def test_a_prompt_that_ends_without_a_round_is_no_pair():
    """On either side: its first token ended it."""
    own, other = run(tree([2], 1.0), tree([], 0.0, prompt=1)), run(tree([1], 1.0), tree([1], 1.0, prompt=1))
    for one, against_it, ratio in ((own, other, 3 / 2), (other, own, 2 / 3)):
        (found,) = against.of(one, against_it)
        assert found.prompts == 1 and found.by_set["all sets"] == pytest.approx(ratio)


def cells(*requests):
    """Settings with the cells of these requests."""
    return {"cells": [list(PLAIN), *(list(r.cell) for r in requests)]}


def test_labels_may_differ_and_shapes_may_not():
    other = dataclasses.replace(tree([1], 1.0), drafter="jetspec=bare")
    assert len(against.of(run(tree([2], 1.0)), run(other, **cells(other)))) == 1
    for change in ({"nodes": 9}, {"shape": "chain"}, {"method": "ddtree"}, {"temperature": 1.0}, {"prompt": 1}):
        other = tree([1], 1.0, **change)
        with pytest.raises(ConfigError, match="no drafted request in common"):
            against.of(run(tree([2], 1.0)), run(other, **cells(other)))


def test_of_several_like_cells_the_one_of_the_same_name_is_meant():
    own, mates = tree([3], 1.0), [dataclasses.replace(tree([n], 1.0), drafter=f"jetspec={n}") for n in (1, 0)]
    named = run(*mates, own, **cells(*mates, own))
    assert against.of(run(own), named)[0].by_set["a"] == pytest.approx(1)
    with pytest.raises(ConfigError, match="jetspec tree 8 could be jetspec=1 tree 8 and jetspec=0 tree 8"):
        against.of(run(own), run(*mates, **cells(*mates)))


def test_seeds_together_are_drawn_by_prompt():
    """Both seeds of a prompt come and go together: the ratio of every prompt is 3, whichever are drawn."""
    other = run(*(tree([n - 1] * 2, 2.0, prompt=i) for i, n in enumerate((1, 4))))
    seeds = [run(*(tree([k * n - 1] * 2, k * 1.0, prompt=i) for i, n in enumerate((1, 4)))) for k in (2, 4)]
    seeds[1].requests.append(tree([7], 1.0, **B))  # of one seed alone
    (found,) = against.of(against.together(seeds), other)
    assert found.prompts == 2 and found.by_set["a"] == pytest.approx(3)
    assert found.interval == pytest.approx((3, 3))
    assert found.faster == pytest.approx((4 / 10) / (12 / 60))
    with pytest.raises(ConfigError, match="--table: files of different dtype"):
        against.together([seeds[0], run(dtype="float32")])


def test_what_is_no_pair_is_refused():
    one = run(tree([2], 1.0))
    with pytest.raises(ConfigError, match="different dtype"):
        against.of(one, run(tree([1], 1.0), dtype="float32"))


def test_the_table_and_its_command(tmp_path, capsys):
    for name, accepted in (("one", [3]), ("two", [1])):
        book = [{"kind": ledger.KIND, "settings": SETS}, dataclasses.asdict(tree(accepted, 1.0))]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in book))
    words = ["--table", str(tmp_path / "one.jsonl"), "--against", str(tmp_path / "two.jsonl")]
    assert compare.main(words) == 0
    row = capsys.readouterr().out.splitlines()[2]
    assert row == "| jetspec tree 8 | 0 | 1 | 2.00 | - | 2.00 [2.00, 2.00] | 2.00 |"
    (tmp_path / "more").mkdir()
    again = shutil.copy(words[1], tmp_path / "more" / "one.jsonl")
    assert compare.main([words[0], words[1], str(again), *words[2:]]) == 0  # files of one name
    assert str(again) in (said := capsys.readouterr().out) and "all files" in said
    assert compare.main([words[0], words[1], *words[1:]]) == 2 and "is there twice" in capsys.readouterr().err
    assert compare.main([words[0], words[1], words[3], *words[2:]]) == 0
    assert [line.split(" | ")[::7] for line in capsys.readouterr().out.splitlines()[2:5]] == [
        ["| one", "2.00 |"], ["| two", "1.00 |"], ["| all files", "1.50 |"],
    ]  # fmt: skip
    assert compare.main([*words, "--overview"]) == 2 and "nothing else" in capsys.readouterr().err
