"""Requests that come and go over the slots of a running batch: each answer is the offline answer with its seed."""

import dataclasses
import functools
import pathlib
import queue
import random
import threading
import time

import jax
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from served import DEPTH, HEAD, NODES, TARGET, slots

from jetspec_jax import speculate
from jetspec_jax.engine import compiles, requests
from jetspec_jax.engine.prefixes import Prefixes
from jetspec_jax.engine.rows import Row, cut_rounds
from jetspec_jax.engine.slots import Plan, Slots
from jetspec_jax.fields import ConfigError
from jetspec_jax.files import load
from jetspec_jax.loop.plain import PLAIN
from jetspec_jax.loop.tree import Rule
from jetspec_jax.options import SamplingConfig, TreeConfig
from jetspec_jax.serve import scheduler as scheduling
from jetspec_jax.serve.job import Job
from jetspec_jax.serve.scheduler import Closed, Full, Scheduler

EVERY = {
    "temperature": 0.9, "seed": 3, "top_k": 12, "top_p": 0.95, "min_p": 0.01, "repetition_penalty": 1.1,
    "presence_penalty": 0.2, "frequency_penalty": 0.1, "logit_bias": {5: 0.5}, "bad_words": [[7, 8]],
    "min_new_tokens": 3, "logprobs": True,
}  # fmt: skip
ASKED = [
    ([4, 5, 6], SamplingConfig(24)),
    ([9] * 19, SamplingConfig(13)),
    (list(range(4, 40)), SamplingConfig(30, temperature=1.0, seed=7)),
    ([11, 30], SamplingConfig(1, temperature=0.8, seed=1)),
    ([8, 2, 40, 41, 3], SamplingConfig(21, **EVERY)),
    ([6] * 60 + [7], SamplingConfig(0)),
    ([12, 13, 14, 15, 16], SamplingConfig(40, ignore_eos=True)),
    ([20, 21], SamplingConfig(33, temperature=1.0, seed=4, ignore_eos=True)),
    ([4 + i * i % 40 for i in range(243)], SamplingConfig(3, ignore_eos=True)),  # its next turn fills a slot
    ([*range(4, 30), 40, 5, 6], SamplingConfig(20)),
]


@functools.lru_cache(None)
def offline() -> list[tuple[list[int], SamplingConfig, speculate.Result, speculate.Result]]:
    """Requests with their plain and their speculative answers; the last ones go on where the first ended."""
    asked = [(ids, option) for ids, option in ASKED]
    made = []
    for _ in range(2):
        prompts, options = ([one[i] for one in asked] for i in (0, 1))
        plain = speculate.generate(TARGET, None, prompts, None, options)
        drafted = speculate.generate(TARGET, HEAD, prompts, TreeConfig(NODES), options)
        made += zip(prompts, options, plain, drafted, strict=True)
        asked = [
            (ids + result.token_ids + [4, 22, 9], option) for (ids, option), result in zip(asked, plain, strict=True)
        ]
    return made


class Asked:
    """One request of `offline` in a scheduler's hands."""

    def __init__(self, number: int, stream: bool = False, **options):
        ids, option, self.plain, self.drafted = offline()[number]
        self.updates = []
        row = Row(
            ids, requests.resolve(TARGET, dataclasses.replace(option, **options)), NODES, TARGET.tokenizer, stream
        )
        slots().check(row)
        self.job = Job(row, self.updates.append, stream, draw=True)

    @property
    def drafts(self):
        """The trees that its owner has seen."""
        return [update.piece.draft for update in self.updates]

    @property
    def result(self):
        return self.updates[-1].result

    def check(self):
        """The answer is the offline answer, and its pieces join to it."""
        result, plain = self.result, self.plain
        for name in ("token_ids", "text", "finish_reason", "stopped_by", "new_tokens", "prompt_tokens"):
            assert getattr(result, name) == getattr(plain, name), name
        assert result.accept_lengths == self.drafted.accept_lengths and result.emitted == self.drafted.emitted
        assert (result.logprobs is None) == (plain.logprobs is None)
        if plain.logprobs is not None:
            tiny.close(result.logprobs, plain.logprobs, 1e-4)
        pieces = [update.piece for update in self.updates]
        assert [i for piece in pieces for i in piece.ids] == plain.token_ids
        if self.job.stream:
            assert "".join(piece.text for piece in pieces) == plain.text


def run(scheduler: Scheduler) -> None:
    """Takes turns until nothing is left to do."""
    turns = 0
    while scheduler._turn():
        turns += 1
        assert turns < 2000
    assert scheduler.idle and len(scheduler._table) == 1


def played(scheduler: Scheduler, actions, ask) -> list:
    """Does what a schedule says, takes turns until all is done, and returns who asked. ask: makes one of a number."""
    asked = []
    for name, number, stream in actions:
        if name == "ask":
            asked.append(ask(number, stream))
            scheduler.submit(asked[-1].job)
        elif name == "turn":
            for _ in range(number):
                scheduler._turn()
        elif asked:
            scheduler.cancel(asked[number % len(asked)].job)
    run(scheduler)
    return asked


ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("ask"), st.integers(0, 2 * len(ASKED) - 1), st.booleans()),
        st.tuples(st.just("turn"), st.integers(1, 6), st.just(False)),
        st.tuples(st.just("cancel"), st.integers(0, 20), st.just(False)),
    ),
    max_size=24,
)


def play(actions, kept) -> int:
    """Runs a schedule; returns how many answers came of it."""
    slots(), offline()  # what they compile is not counted
    before = compiles.count()
    asked = played(Scheduler(slots(), 50, kept), actions, Asked)
    assert compiles.count() == before
    whole = [one for one in asked if one.updates and one.result]
    assert all(one in whole or one.job.cancelled for one in asked)
    for one in whole:
        one.check()
    return len(whole)


@settings(max_examples=5)
@given(ACTIONS, st.integers(0, 3))
def test_every_answer_is_the_offline_answer(actions, kept):
    """Whatever the batch mates, the order of arrival, cancellations, and what was kept of earlier rows."""
    play(actions, kept)


@pytest.fixture
def single(monkeypatch):
    """Blocks of one round, however fast they are."""
    monkeypatch.setattr(scheduling, "BLOCK_SECONDS", 0.0)


def answered(scheduler: Scheduler, number: int) -> Asked:
    """One request, asked and answered by itself."""
    asked = Asked(number, stream=True)
    scheduler.submit(asked.job)
    run(scheduler)
    asked.check()
    return asked


@pytest.mark.parametrize("number", [0, 2, 4, 6, 7, 8])
def test_the_next_turn_begins_where_the_last_one_ended(number, single):
    """Its first rows are not read again, and its trees are those of a fresh start: the head's context was kept too."""
    kept, fresh = Scheduler(slots(), 50, 2), Scheduler(slots(), 50, 0)
    again = number + len(ASKED)
    assert answered(kept, number).job.reused == answered(fresh, again).job.reused == 0
    turn = answered(kept, again)
    known = len(offline()[number][0]) + offline()[number][2].new_tokens
    assert turn.job.reused == (max(known - DEPTH - 2, 0) if known - DEPTH - 2 >= 16 else 0)
    assert turn.drafts == answered(fresh, again).drafts
    other = answered(kept, again)  # all of it is there now, and it is not used up
    assert other.job.reused > turn.job.reused and answered(kept, again).drafts == turn.drafts == other.drafts


def test_blocks_are_short_while_somebody_waits(monkeypatch):
    """A tenth of a second of rounds for those who run alone; one round a piece of a prompt where a slot is free."""
    scheduler, lengths = Scheduler(slots(), 50, 0), []
    launch = slots().launch

    def counted(nodes, rounds, *rest):
        lengths.append(rounds)
        return launch(nodes, 1, *rest)

    monkeypatch.setattr(slots(), "launch", counted)
    monkeypatch.setattr(Scheduler, "_hear", lambda self, flight: None)  # no row ends, and the pace is what is said
    scheduler._pace = 0.01
    jobs = [Asked(6).job for _ in range(6)]
    scheduler.submit(jobs[0])
    while not scheduler.running:
        scheduler._turn()
    for _ in range(3):
        scheduler._turn()
    assert lengths[-3:] == [10, 10, 10]
    scheduler.submit(*jobs[1:])
    while scheduler.running < 4:
        scheduler._turn()
        assert lengths[-1] == (1 if scheduler.running < 4 else 2)
    for _ in range(3):
        scheduler._turn()
    assert lengths[-3:] == [2, 2, 2]
    for job in jobs[4:]:
        scheduler.cancel(job)
    scheduler._turn()
    assert lengths[-1] == 10
    for job in jobs[1:]:
        scheduler.cancel(job)
    scheduler._turn()
    long = Asked(8).job  # 243 tokens, sixteen at a time: its pieces take turns with those who run
    scheduler.submit(long)
    del lengths[:]
    while scheduler.running < 2:
        scheduler._turn()
    assert lengths[:12] == [2] * 12 and lengths[14] == 1
    for job in (jobs[0], long):
        scheduler.cancel(job)
    run(scheduler)


def test_only_blocks_that_had_the_device_to_themselves_tell_the_pace():
    scheduler = Scheduler(slots(), 50, 0)
    scheduler.submit(Asked(6).job)
    while not scheduler._flight:
        scheduler._turn()
    scheduler._heard = 1.0  # a block that seems to have taken very long
    for alone in (False, True):
        flight = scheduler._flight._replace(alone=alone)
        scheduler._hear(flight)
        assert (scheduler._pace > 0) is alone
        scheduler._heard = 1.0
        scheduler._flight = scheduler._launch()
    run(scheduler)


def test_what_two_texts_have_in_common_is_read_once(single):
    kept, fresh = Scheduler(slots(), 50, 2), Scheduler(slots(), 50, 0)
    answered(kept, 2)
    branch = answered(kept, 9)
    assert branch.job.reused == 25 and branch.drafts == answered(fresh, 9).drafts
    assert answered(kept, 2 + len(ASKED)).job.reused > 36  # what was shared is whole


def test_a_slot_is_free_at_the_next_block_and_taken_at_once(single):
    scheduler = Scheduler(slots(), 50, 0)
    asked = [Asked(6) for _ in range(6)]
    scheduler.submit(*(one.job for one in asked))
    while scheduler.running < 4 or not scheduler._read:
        scheduler._turn()
    scheduler.cancel(asked[1].job)
    scheduler._turn()
    assert scheduler._table.index(asked[4].job) == 1 and asked[1].updates == []
    scheduler.cancel(asked[4].job)
    scheduler.cancel(asked[5].job)
    scheduler._turn()
    scheduler._turn()
    reasons = slots()._state.reason.tolist()
    assert [bool(reason) for reason in reasons] == [job is None for job in scheduler._table]
    run(scheduler)
    for one in (asked[0], asked[2], asked[3]):
        one.check()
    assert all(slots()._state.reason) and scheduler.waiting == 0


def test_stop_strings_end_a_row_inside_a_round():
    ids, option, plain, _ = offline()[7]
    assert plain.new_tokens == 33
    stop = plain.text[11:13]
    wanted = speculate.generate(TARGET, None, ids, None, dataclasses.replace(option, stop=[stop]))
    scheduler, asked = Scheduler(slots(), 50, 1), [Asked(7, stream, stop=(stop,)) for stream in (False, True)]
    mate = Asked(2)
    scheduler.submit(*(one.job for one in (*asked, mate)))
    run(scheduler)
    mate.check()
    for one in asked:
        for name in ("token_ids", "text", "finish_reason", "stopped_by"):
            assert getattr(one.result, name) == getattr(wanted, name)
        assert sum(one.result.emitted) + 1 == one.result.new_tokens
        assert "".join(update.piece.text for update in one.updates) == (wanted.text)
    assert answered(scheduler, 7 + len(ASKED)).job.reused < len(ids) + wanted.new_tokens


def test_a_full_queue_says_so_at_once_and_takes_all_or_none():
    scheduler = Scheduler(slots(), 3, 0)
    scheduler.submit(Asked(0).job, Asked(1).job)
    with pytest.raises(Full, match="2 requests wait already, and the queue has room for 3"):
        scheduler.submit(Asked(0).job, Asked(1).job)
    scheduler.submit(Asked(3).job)
    run(scheduler)
    scheduler.close()
    with pytest.raises(Closed, match="shutting down"):
        scheduler.submit(Asked(0).job)


def test_fifty_who_leave_free_their_slots():
    """Half of them do not stream; those who stay have their answers."""
    scheduler = Scheduler(slots(), 100, 2)
    asked = [Asked(i % 8, stream=i % 2 == 0, ignore_eos=True, max_new_tokens=60) for i in range(50)]
    stays = [Asked(i) for i in (0, 2, 7)]
    for i, one in enumerate(asked):
        scheduler.submit(one.job)
        scheduler._turn()
        if i in (0, 16, 32):
            scheduler.submit(stays[i // 16].job)
        scheduler.cancel(one.job)
    turns = 0
    while not all(one.job.over for one in asked):
        scheduler._turn()
        turns += 1
    assert turns <= 2
    run(scheduler)
    assert [bool(one.updates and one.result) for one in stays] == [True] * 3
    for one in stays:
        one.check()


def test_the_thread_ends_with_every_job_told():
    """What runs when the scheduler is stopped hears of it; what it can still finish, it finishes."""
    scheduler, heard = Scheduler(slots(), 50, 1), queue.Queue()
    scheduler.start()
    done = Asked(2)
    scheduler.submit(done.job)
    while not done.updates:
        time.sleep(0.01)
    done.check()
    endless = Asked(6, max_new_tokens=200)
    endless.job.tell = heard.put
    endless.job.stream = True
    scheduler.submit(endless.job)
    assert heard.get(timeout=20).piece
    scheduler.stop()
    updates = []
    while not updates or updates[-1].error is None:
        updates.append(heard.get(timeout=5))
    assert "shutting down" in updates[-1].error and not scheduler._thread.is_alive()
    assert threading.active_count() < 20


def test_a_device_that_fails_is_told_to_everybody(monkeypatch):
    scheduler, one, other = Scheduler(slots(), 50, 0), Asked(0), Asked(1)
    monkeypatch.setattr(Slots, "launch", lambda *rest: 1 / 0)
    scheduler.submit(one.job, other.job)
    scheduler._run()
    assert "ZeroDivisionError" in scheduler.failed
    assert [x.updates[-1].error for x in (one, other)] == [scheduler.failed] * 2
    with pytest.raises(Closed, match="ZeroDivisionError"):
        scheduler.submit(one.job)


@pytest.mark.parametrize(
    ("option", "wanted"),
    [
        (
            {"max_new_tokens": 250},
            "max_new_tokens=250: with a prompt of 3 tokens that is 253, and a slot has 252; give at",
        ),
        ({"logit_bias": dict.fromkeys(range(400), 1.0)}, "logit_bias has 400"),
        ({"bad_words": [[i] for i in range(17)]}, "bad_words has 17"),
        ({"bad_words": [[1] * 9]}, "bad_words: one has 9"),
        ({"stop_token_ids": list(range(16))}, "stop_token_ids has 17"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_does_not_fit_a_slot_is_refused_by_name(option, wanted):
    with pytest.raises(ConfigError, match=wanted):
        slots().check(Row([1, 2, 3], requests.resolve(TARGET, SamplingConfig(**{"max_new_tokens": 4} | option)), NODES))
    with pytest.raises(ConfigError, match="budget=9: trees have 8 nodes"):
        slots().check(Row([1], requests.resolve(TARGET, SamplingConfig(4)), 9))
    with pytest.raises(ConfigError, match="budget=auto: trees have 8 nodes here; give a number"):
        slots().check(Row([1], requests.resolve(TARGET, SamplingConfig(4)), "auto"))
    assert slots().usual == NODES


def test_plans_that_cannot_be_meant():
    for batches, chunks in (((2, 4), (4,)), ((), (4,)), ((1, 2), ()), ((1,), (8, 4)), ((1,), (300,))):
        with pytest.raises(ValueError, match=r"batches=|chunks="):
            Plan(256, batches, 8, chunks)


def test_kept_rows_are_the_latest_and_none_is_there_twice():
    kept = Prefixes(2)
    for ids in ([1, 2], [1, 2, 3], [7], [8, 9]):
        kept.add(ids, tuple(ids))
    assert kept.longest([1, 2, 3]) == (None, 0) and len(kept) == 2
    found, shared = kept.longest([7, 8])
    assert found.state == (7,) and shared == 1
    kept.add([5], None)  # [8, 9] is the least recently used now
    assert kept.longest([8, 9])[1] == 0 and kept.longest([7])[1] == 1
    kept.drop(found)
    assert kept.longest([7])[1] == 0 and len(kept) == 1
    none = Prefixes(0)
    none.add([1], None)
    assert none.longest([1]) == (None, 0)


@given(st.lists(st.integers(1, 4), max_size=8), st.integers(1, 40))
def test_rounds_are_cut_where_the_text_is(emitted, kept):
    """Against giving tokens out one by one."""
    kept = min(kept, 1 + sum(emitted))
    owners = [i for i, count in enumerate(emitted) for _ in range(count)][: kept - 1]
    assert cut_rounds(emitted, kept) == [owners.count(i) for i in range(max(owners, default=-1) + 1)]


@pytest.mark.slow
@settings(max_examples=400)
@given(ACTIONS, st.integers(0, 4))
def test_many_schedules(actions, kept):
    play(actions, kept)


@pytest.mark.slow
def test_ten_thousand_requests_and_memory_stays_flat():
    """Requests that come and go at random; buffers on the device and pages of the process do not grow."""
    draw, pages = random.Random(0), lambda: int(pathlib.Path("/proc/self/statm").read_text().split()[1])
    scheduler, arrays, held = Scheduler(slots(), 64, 3), [], []
    for turn in range(10):
        asked = []
        for _ in range(1000):
            asked.append(Asked(draw.randrange(2 * len(ASKED)), draw.random() < 0.5))
            scheduler.submit(asked[-1].job)
            if draw.random() < 0.2:
                scheduler.cancel(draw.choice(asked[-8:]).job)
            while scheduler.waiting > 16:
                scheduler._turn()
        run(scheduler)
        for one in asked:
            assert one.job.cancelled or one.result, turn
            if one.updates and one.result:
                one.check()
        arrays.append(len(jax.live_arrays()))
        held.append(pages())
    assert max(arrays[1:]) <= arrays[0] + 40 and held[-1] < 1.1 * held[2]


def family(name: str):
    """A drafter, and the number of its drafted positions."""
    if name == "ngram":
        return load.load_drafter("ngram", tiny.target("dense"))
    return {"eagle3": tiny.eagle3, "dspark": tiny.dspark, "dflash": lambda: tiny.head(False)}[name]()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eagle3", "dspark", "dflash", "ngram", "plain"])
def test_every_family_is_served(name, single):
    """Answers, their rounds, and the trees of a next turn that begins on a kept row."""
    target = tiny.target("dense")
    head = None if name == "plain" else family(name)
    draft = PLAIN if head is None else head.draft.shaped(Rule(8), 3)
    own = Slots(target, head, draft, Plan(256, (1, 2, 4), draft.nodes, (4, 16)))
    own.prepare()
    before = compiles.count()

    def ask(scheduler, ids, option):
        updates = []
        scheduler.submit(Job(Row(ids, requests.resolve(target, option), draft.nodes), updates.append, True, draw=True))
        return updates

    def finish(scheduler):
        while scheduler._turn():
            pass

    options = [SamplingConfig(20 + i, temperature=float(i % 2), seed=i, eos=()) for i in range(6)]
    prompts = [[3 + i] * (1 + 5 * i) for i in range(6)]
    scheduler = Scheduler(own, 20, 3)
    found = [ask(scheduler, *both) for both in zip(prompts, options, strict=True)]
    finish(scheduler)
    answers = [updates[-1].result for updates in found]
    later = [ids + result.token_ids + [1, 2] for ids, result in zip(prompts, answers, strict=True)]
    for ids, option in zip(later, options, strict=True):  # each right after the turn before it
        kept, fresh = Scheduler(own, 20, 3), Scheduler(own, 20, 0)
        ask(kept, ids[: -2 - option.max_new_tokens], option)
        finish(kept)
        again, anew = ask(kept, ids, option), ask(fresh, ids, option)
        finish(kept)
        assert again[-1].result.settings["reused"] > 0
        finish(fresh)
        assert [u.piece.draft for u in again] == [u.piece.draft for u in anew]
        answers.append(again[-1].result)
    assert compiles.count() == before
    wanted = speculate.generate(target, None, prompts + later, None, options * 2)
    assert [result.token_ids for result in answers] == [result.token_ids for result in wanted]
    if head is not None:
        drafted = speculate.generate(target, head, prompts + later, TreeConfig(8, depth=3), options * 2)
        assert [result.accept_lengths for result in answers] == [result.accept_lengths for result in drafted]
