"""Budgets that follow cost in a server: the offline answers whatever the rule says, a draft that has missed nothing,
and what the host makes of reports that come late."""

import itertools
import time

import httpx
import jax.numpy as jnp
import numpy as np
import pytest
import served
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from served import DEPTH, NODES, SIZES, TARGET
from test_scheduler import ACTIONS, family, offline, played, run

from jetspec_jax import speculate
from jetspec_jax.config import SamplingConfig
from jetspec_jax.engine import compiles, costs, requests, tempo
from jetspec_jax.engine.costs import Table
from jetspec_jax.engine.rows import Row
from jetspec_jax.engine.slots import Plan, Slots, Trees
from jetspec_jax.engine.tempo import Tempo
from jetspec_jax.fields import ConfigError
from jetspec_jax.loop import pacing
from jetspec_jax.loop.pacing import Ladder, Next
from jetspec_jax.options import AUTO, TreeConfig
from jetspec_jax.serve.job import Job
from jetspec_jax.serve.scheduler import Scheduler


@pytest.fixture(scope="module")
def slots(tmp_path_factory):
    """Slots with every size, whatever the tiny pair's rounds cost, in a folder of this file's own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JETSPEC_CACHE", str(tmp_path_factory.mktemp("cache")))
        patch.setattr(Table, "winning", lambda self, depth, least=1: self.sizes)
        yield served.paced()
        assert costs.read(served.paced()._kit._about, f"slots, batch 2, capacity 256, {NODES} nodes", SIZES)


class Asked:
    """A request of `offline`, whose budget follows cost unless one is given."""

    def __init__(self, slots, number, budget=AUTO, stream=False):
        ids, option, self.plain, _ = offline()[number]
        self.updates, self.budget = [], budget
        row = Row(ids, requests.resolve(TARGET, option), budget, TARGET.tokenizer, stream)
        slots.check(row)
        self.job = Job(row, self.updates.append, stream, draw=True)

    def check(self):
        result, plain = self.updates[-1].result, self.plain
        for name in ("token_ids", "text", "finish_reason", "stopped_by", "new_tokens"):
            assert getattr(result, name) == getattr(plain, name), name
        assert sum(result.emitted) + 1 == max(result.new_tokens, 1)
        assert max(result.tree_sizes, default=1) <= (NODES if self.budget == AUTO else self.budget)
        if plain.logprobs is not None:
            tiny.close(result.logprobs, plain.logprobs, 1e-4)


def play(slots, actions, kept, moves, prune) -> None:
    """Runs a schedule while sizes change as `moves` says, or as the rule does where there are none."""
    offline()
    turn = itertools.cycle(moves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slots._kit, "_prune", prune)
        if moves:
            patch.setattr(Tempo, "nodes", lambda self, sizes: max(n for n in sizes if n <= next(turn)))
        budget = lambda number: 3 if number % 5 == 4 else 1 if number % 7 == 6 else AUTO
        ask, before = lambda number, stream: Asked(slots, number, budget(number), stream), compiles.count()
        asked = played(Scheduler(slots, 50, kept), actions, ask)
    assert compiles.count() == before
    for one in asked:
        whole = one.updates and one.updates[-1].result
        assert whole or one.job.cancelled
        if whole:
            one.check()


MOVES = st.lists(st.sampled_from(SIZES), max_size=6)
PRUNE = st.sampled_from([1e-6, 0.02, 0.3])


@settings(max_examples=8)
@given(ACTIONS, st.integers(0, 2), MOVES, PRUNE)
def test_every_answer_is_the_offline_answer_whatever_the_rule(slots, actions, kept, moves, prune):
    """Sizes in any order or by the rule, pruned or not, beside rows with budgets of their own."""
    play(slots, actions, kept, moves, prune)


@pytest.mark.slow
@settings(max_examples=400)
@given(ACTIONS, st.integers(0, 3), MOVES, PRUNE)
def test_many_schedules_whatever_the_rule(slots, actions, kept, moves, prune):
    play(slots, actions, kept, moves, prune)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dspark", "dflash"])
def test_every_family_is_served_whatever_the_size(name, monkeypatch, tmp_path):
    """Answers and next turns on kept rows are those of plain decoding while sizes change."""
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path))
    monkeypatch.setattr(Table, "winning", lambda self, depth, least=1: self.sizes)
    target, head = tiny.target("dense"), family(name)
    trees = Trees(speculate.ladder_of(head, TreeConfig(depth=3), SIZES))
    own = Slots(target, head, trees, Plan(256, (1, 2), NODES, (16,)), (frozenset({"temperature"}),))
    own.prepare()
    turn = itertools.cycle((1, 8, 8, 1, 1, 1, 1, 1, 4, 1, 8, 4, 4))
    monkeypatch.setattr(Tempo, "nodes", lambda self, sizes: max(n for n in sizes if n <= next(turn)))
    scheduler, before = Scheduler(own, 20, 3), compiles.count()

    def ask(prompts, options) -> list:
        told = [[] for _ in prompts]
        for ids, option, updates in zip(prompts, options, told, strict=True):
            scheduler.submit(Job(Row(ids, requests.resolve(target, option), AUTO), updates.append))
        run(scheduler)
        return [updates[-1].result for updates in told]

    options = [SamplingConfig(30 + 9 * i, temperature=float(i % 2), seed=i, eos=()) for i in range(4)]
    prompts = [[3 + i] * (1 + 5 * i) for i in range(4)]
    first = ask(prompts, options)
    later = [ids + result.token_ids + [1, 2] for ids, result in zip(prompts, first, strict=True)]
    found = [*first, *ask(later, options)]
    assert compiles.count() == before
    wanted = speculate.generate(target, None, prompts + later, None, options * 2)
    assert [result.token_ids for result in found] == [result.token_ids for result in wanted]
    assert {size for result in found for size in result.tree_sizes} == set(SIZES)
    assert max(result.acceptance_length for result in found) > 1


def drafts(scheduler, slots, ids, option) -> list:
    """The trees that a request sees, each block one round."""
    updates = []
    row = Row(ids, requests.resolve(TARGET, option), AUTO)
    slots.check(row)
    scheduler.submit(Job(row, updates.append, True, draw=True))
    run(scheduler)
    return [update.piece.draft for update in updates], updates[-1].result


@pytest.mark.parametrize("kept", [0, 2])
def test_a_head_that_paused_has_missed_nothing(slots, kept, monkeypatch):
    """100 tokens by plain steps, then trees: those of a slot that has read all of it; also in the next turn."""
    monkeypatch.setattr("jetspec_jax.serve.scheduler.BLOCK_SECONDS", 0.0)
    monkeypatch.setattr(slots._kit, "_prune", 1e-9)
    size = {"now": 1, "left": 1000}

    def nodes(self, sizes):
        size["left"] -= 1
        return size["now"] if size["left"] >= 0 else NODES

    monkeypatch.setattr(Tempo, "nodes", nodes)
    ids, sampled = [3, 1, 4, 1, 5], {"temperature": 1.0, "seed": 5, "eos": ()}
    size["left"] = 100
    scheduler = Scheduler(slots, 50, kept)
    trees, result = drafts(scheduler, slots, ids, SamplingConfig(140, **sampled))
    assert result.tree_sizes[:100] == [1] * 100 and set(result.tree_sizes[100:]) == {NODES}
    size["left"] = 0
    whole = ids + result.token_ids[:100]
    fresh, again = drafts(Scheduler(slots, 50, 0), slots, whole, SamplingConfig(40, **sampled))
    assert again.token_ids == result.token_ids[100:]
    later = [tree for tree in trees if tree and len(tree.tokens) == NODES]
    assert [tree.tokens for tree in later] == [tree.tokens for tree in fresh if tree and len(tree.tokens) == NODES]
    assert result.accept_lengths[100:] == again.accept_lengths
    size["left"] = 1000  # an answer of plain steps alone, and its next turn in trees
    other_ids = [2, 7, 1, 8]
    _, first = drafts(scheduler, slots, other_ids, SamplingConfig(40, **sampled))
    size["left"] = 0
    turn = other_ids + first.token_ids + [7, 8]
    kept_trees, one = drafts(scheduler, slots, turn, SamplingConfig(20, **sampled))
    fresh_trees, other = drafts(Scheduler(slots, 50, 0), slots, turn, SamplingConfig(20, **sampled))
    assert kept_trees == fresh_trees and one.token_ids == other.token_ids
    assert one.settings["reused"] == (len(turn) - 2 - DEPTH - 2 if kept else 0)


def test_what_pays_is_in_force(slots, monkeypatch):
    """Where trees cost what they cannot bring back, plain steps run but for looks; where they cost nothing, trees."""
    ids, option = [3, 1, 4], SamplingConfig(200, eos=())
    for cost, wanted in ((9.0, 1), (1e-3, NODES)):
        table = Table(SIZES, slots._kit._contexts, ((1.0, 1 + cost, 1 + 1.01 * cost),) * len(slots._kit._contexts))
        own = Tempo(slots.tempo.ladder, NODES)
        own.learn(1, table)
        monkeypatch.setattr(own.drift, "heed", lambda *rest: None)
        monkeypatch.setattr(slots._kit, "tempo", own)
        monkeypatch.setattr("jetspec_jax.serve.scheduler.BLOCK_SECONDS", 8.0)
        scheduler = Scheduler(slots, 50, 0)
        sizes = drafts(scheduler, slots, ids, option)[1].tree_sizes
        assert sizes[-20:].count(wanted) >= 18 and scheduler.nodes in (wanted, sizes[-1])
        if wanted == 1:
            assert sum(size > 1 for size in sizes) < 12


def test_budgets_of_rows(slots):
    with pytest.raises(ConfigError, match="budget=9: trees have 8 nodes"):
        slots.check(Row([1], requests.resolve(TARGET, SamplingConfig(4)), 9))
    assert slots.usual == AUTO


class TestTempo:
    """Reports come one block late."""

    TABLE = Table((1, 4, 8), (100, 400), ((1.0, 2.0, 3.0), (1.1, 2.1, 3.1)))

    def made(self) -> Tempo:
        made = Tempo(Ladder((1, 4, 8), 3), 8)
        made.learn(1, self.TABLE)
        made.learn(2, self.TABLE.of((1, 4)))
        return made

    def said(self, place, rounds=pacing.MANY, resting=False) -> Next:
        return Next(np.int32(place), np.int32(rounds), np.bool_(resting), np.array([1.0, 2.0, 3.0], np.float32))

    def test_a_look_that_is_on_its_way_is_not_ordered_again(self):
        made = self.made()
        made.hear(1, self.said(1, 1, resting=True), flying=1)
        assert made.nodes((1, 4, 8)) == 4 and made.rounds(4, 1, 99.0) == 1
        made.hear(1, self.said(1, 1, resting=True), flying=4)
        assert made.nodes((1, 4, 8)) == 1
        made.hear(4, self.said(2), flying=1)
        assert made.nodes((1, 4, 8)) == 8
        made.hear(8, self.said(0, 4), flying=8)  # plain steps, to time them
        assert made.nodes((1, 4, 8)) == 1 and made.rounds(1, 1, 99.0) == 4
        made.hear(8, self.said(0, 4), flying=1)
        assert made.nodes((1, 4, 8)) == 8

    def test_a_new_text_has_its_rounds_with_trees(self):
        made = self.made()
        made.hear(8, self.said(0, resting=True), flying=8)
        assert made.nodes((1, 4, 8)) == 1
        made.admitted(0.25)
        assert made.nodes((1, 4, 8)) == 1
        made.admitted(0.25)
        assert made.nodes((1, 4, 8)) == 8 and made.rounds(8, 1, 99.0) == 1  # another is on its way before it is heard
        made.hear(1, self.said(0, resting=True), flying=1)  # of the text before
        assert made.nodes((1, 4, 8)) == 8
        assert made.taken() == (0.5, 0.0) and made.taken() == (0.0, 0.0)
        made.hear(8, self.said(0, resting=True), flying=8)
        assert made.nodes((1, 4, 8)) == 1

    def test_a_batch_has_the_sizes_that_can_win(self):
        made = self.made()
        made.hear(8, self.said(2), flying=8)
        assert made.nodes((1, 4)) == 4 and made.sizes(2) == (1, 4)
        price = made.price(2, (1, 4))
        assert np.asarray(price.seconds).tolist()[0] == [1.0, 2.0, tempo.NEVER]
        found = pacing.choose(
            made.ladder, pacing.start(8), price, jnp.array([5]), jnp.array([0]), jnp.bool_(False), jnp.float32(0.0)
        )
        assert int(found.place) in (0, 1)
        with pytest.raises(ValueError, match="plain decoding"):
            Tempo(Ladder((4, 8), 3), 8)

    def test_blocks_are_timed_where_nothing_else_ran(self):
        made = self.made()
        made.hear(8, self.said(2), flying=8)
        made.timed(8, 2, None)
        assert made.drift.factor == {"plain": 1.0, "trees": 1.0} and made.taken()[1] == 6.0
        made.timed(8, 2, 12.0)
        assert made.drift.factor["trees"] > 1.1 and made.taken()[1] == 18.0
        assert made.plain(1) == pytest.approx(made.drift.factor["plain"])
        made.timed(1, 2, 2.0)
        assert made.taken()[1] == 0.0

    def test_rounds_of_a_block(self):
        made = self.made()
        assert made.rounds(8, 1, 0.1) == 1 and made.rounds(8, 1, 7.0) == 2
        made.hear(8, self.said(2), flying=8)
        assert made.rounds(8, 1, 99.0) == 4 and made.rounds(1, 1, 9.5) == 9


def test_metrics_say_what_is_in_force_and_what_plain_decoding_would_do(slots, monkeypatch):
    monkeypatch.setattr(slots.tempo.drift, "heed", lambda *rest: None)
    monkeypatch.setattr(slots.tempo.drift, "factor", {"plain": 2.0, "trees": 1.0})
    with served.running(own=slots) as server:
        body = {"prompt": [5, 6], "max_tokens": 40, "ignore_eos": True, "n": 2}
        found = httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["metrics"]
        assert server.metric("jetspec_budget_nodes") in SIZES
        text = server.service.metrics.text().decode().splitlines()
        rounds = {line.split()[0]: float(line.split()[1]) for line in text if "rounds_of_nodes_total{" in line}
        assert sum(rounds.values()) == server.metric("jetspec_rounds_total") > 0
        while slots.batch > 1:  # it shrinks when the answer has gone
            time.sleep(0.005)
        assert server.metric("jetspec_plain_tokens_per_second") == pytest.approx(1 / slots.tempo.plain(slots.batch))
    keys = [f"slots, batch {n}, capacity 256, {NODES} nodes" for n in (1, 2)]
    steps = [2 * row[0] for key in keys for row in costs.read(slots._kit._about, key, SIZES).seconds]
    rates = found["tokens_per_second"]
    assert rates["speculative"] > 0 and 0.99 / max(steps) <= rates["plain"] <= 1.01 / min(steps)
