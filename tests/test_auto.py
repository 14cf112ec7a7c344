"""Budgets that follow cost: the same tokens while the size moves, a draft that has missed nothing, nothing compiled
later, and costs that are measured once."""

import functools
import json
import pathlib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

import decode
from jetspec_jax import speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.engine import costs, pacing
from jetspec_jax.engine.costs import Table
from jetspec_jax.engine.rows import Row
from jetspec_jax.evals import acceptance, compare
from jetspec_jax.files.pair import LoadedHead
from jetspec_jax.loop import paced as loops
from jetspec_jax.loop import pacing as rule
from jetspec_jax.loop.decoder import Decoder
from jetspec_jax.loop.paused import Paused
from jetspec_jax.loop.tree import Rule

SIZES = (1, 4, 8)
TARGET = tiny.target("dense")
HEADS = {"causal": tiny.head(True), "bidirectional": tiny.head(False), "eagle3": tiny.eagle3(), "dspark": tiny.dspark()}
COMPILED: list[str] = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, seconds, **_: COMPILED.append(event) if event.endswith("backend_compile_duration") else None
)


@pytest.fixture(autouse=True)
def small(monkeypatch, tmp_path_factory):
    """Few sizes, quickly measured, kept in a folder of this file's own; nothing is known of earlier tests' texts."""
    monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path_factory.getbasetemp() / "auto"))
    monkeypatch.setitem(pacing.SIZES, "cpu", SIZES)
    monkeypatch.setattr(costs, "PASSES", 1)
    monkeypatch.setattr(pacing, "WATCHED_SECONDS", 0.0)
    monkeypatch.setattr(pacing, "_BELIEFS", pacing._BELIEFS.__class__())
    monkeypatch.setattr(Table, "winning", lambda self, depth, least=1: tuple(n for n in self.sizes if n >= least))


paced = functools.partial(jax.jit, static_argnums=0)(loops.paced)
recorded = functools.partial(jax.jit, static_argnums=0)(loops.paced_recorded)


def ladder(head, capacity):
    """The programs of a head's sizes; the longest path is shorter in the small ones."""
    draft = lambda n: head.draft.shaped(Rule(n, grown=16), min(head.draft.depth, n - 1))
    drafts = {1: Paused(draft(16)), 3: draft(3), 16: draft(16)}
    return {n: loops.Pace(Decoder(TARGET.model, one, capacity), 16, draft(16).depth) for n, one in drafts.items()}


@pytest.mark.parametrize(
    "name", ["causal", *(pytest.param(n, marks=pytest.mark.slow) for n in ("eagle3", "dspark", "bidirectional"))]
)
def test_a_draft_that_paused_has_missed_nothing(name):
    """Trees, plain steps, small trees, a hundred plain steps: then trees as after a prompt of all that is committed."""
    head = HEADS[name]
    programs = ladder(head, 160)
    params = {"target": TARGET.params, "draft": head.params}
    budget = pacing.UNBOUND
    state = tiny.prefill(programs[16].decoder, params, tiny.request([[3, 1, 4], [1, 5, 9, 2, 6, 5]], 140, budget))
    said = rule.start(16)
    for size, n in ((16, 1), (1, 5), (3, 2), (1, 100), (3, 1), (1, 3)):
        state, said, ran = paced(programs[size], params, state, said, jnp.int32(n))
        assert int(ran) == n
    assert float(said.rested) == 3 and float(said.tested) == 4
    lengths = [len(new) for new in tiny.outputs(state)]
    assert min(lengths) >= 112 and state.tree_sizes[0, :9].tolist() == [16, 1, 1, 1, 1, 1, 3, 3, 1]

    whole = [row[: n - 1].tolist() for row, n in zip(state.tokens, state.length, strict=True)]
    fresh = tiny.prefill(programs[16].decoder, params, tiny.request(whole, 20, budget, slots=128))
    assert fresh.length.tolist() == state.length.tolist()
    state = state._replace(limit=fresh.limit)
    for _ in range(3):
        (state, (said, got)), (fresh, wanted) = (
            recorded(programs[16], params, state, said),
            tiny.step_recorded(programs[16].decoder, params, fresh),
        )
        for field in ("tokens", "parents", "size"):
            assert getattr(got.tree, field).tolist() == getattr(wanted.tree, field).tolist()
        tiny.close(jnp.exp(got.tree.scores.node), jnp.exp(wanted.tree.scores.node), 1e-3)
        assert got.accepted.count.tolist() == wanted.accepted.count.tolist()


def waits(state) -> tuple[int, int]:
    """Rows that the draft has taken in, and those that wait."""
    return int(state.draft.length[0]), int(state.draft.count[0])


def test_rows_wait_until_there_is_no_room():
    """Taking them in reads the head's weights: blocks of few rounds do it only where they have to."""
    head = HEADS["causal"]
    programs, params = ladder(head, 64), {"target": TARGET.params, "draft": head.params}
    room = programs[16].depth + 1
    state = tiny.prefill(programs[16].decoder, params, tiny.request([[3, 1, 4]], 40, pacing.UNBOUND))
    said, (inside, waiting) = rule.start(16), waits(state)
    for step in range(3 * room):
        if step % 2:
            state, (said, _) = recorded(programs[1], params, state, said)
        else:
            state, said, _ = paced(programs[1], params, state, said, jnp.int32(1))
        inside, waiting = (inside + room, 1) if waiting == room else (inside, waiting + 1)
        assert waits(state) == (inside, waiting)

    few = programs[3].decoder.depth + 1
    for count in range(1, room + 1):
        held = state._replace(draft=state.draft._replace(count=jnp.full(1, count)))
        narrow = loops.narrowed(programs[3], params, held)
        assert waits(narrow) == ((inside, count) if count <= few else (inside + count, 0))
        assert narrow.draft.pending.shape[1] == few


def test_what_a_round_says_of_itself():
    """Against a count by hand: of the rows that run, each up to its own budget and to its least probability."""
    head = HEADS["causal"]
    pace = ladder(head, 64)[16]
    params = {"target": TARGET.params, "draft": head.params}
    budget = [pacing.UNBOUND, 5, pacing.UNBOUND, pacing.UNBOUND]
    state = tiny.prefill(pace.decoder, params, tiny.request([[3, 1], [1, 5], [9], [2, 6]], [20, 20, 0, 20], budget))
    least = jnp.array([0.0, 0.0, 0.0, 0.05], jnp.float32)
    state, start = state._replace(least=least), rule.start(16)
    _, (said, done) = recorded(pace, params, state, start)
    tree, accepted = done.tree, done.accepted
    rows = [0, 1, 3]  # the third ended before it began
    tokens = float(np.mean([accepted.count[row] for row in rows]))
    near, far = np.exp(-tokens / 64), np.exp(-tokens / 256)
    p = np.exp(np.asarray(tree.scores.node)[:, 1:])
    assert tree.size.tolist()[:2] == [16, 5] and 1 < int(tree.size[3]) < 16
    p[1, 4:], p[3] = 0, np.where(p[3] >= 0.05, p[3], 0)
    kept = np.zeros((4, 15))
    for row in rows:
        for node in accepted.path[row, 1 : int(accepted.count[row])].tolist():
            kept[row, node - 1] = 1
    np.testing.assert_allclose(said.path, np.asarray(start.path) * near + p[rows].mean(0), rtol=1e-5)
    np.testing.assert_allclose(said.promised, np.asarray(start.promised) * far + p[rows].mean(0), rtol=1e-5)
    np.testing.assert_allclose(said.kept, kept[rows].mean(0), rtol=1e-5)
    assert float(said.weight) == pytest.approx(0.5 * near + 1) and (said.tested, said.rested) == (1, 0)


def test_a_small_program_foresees_deeper_paths():
    """It drafts two positions of four; its best path goes on as it ended, in order among its nodes."""
    pace = ladder(HEADS["causal"], 64)[3]
    spine, path = jnp.log(jnp.array([[0.8, 0.4]])), jnp.array([[0.8, 0.4, 0.15, *[0.01] * 12]])
    got = loops._prolonged(pace, spine, path)
    np.testing.assert_allclose(got, [[0.8, 0.4, 0.2, 0.15, 0.1, *[0.01] * 10]], rtol=1e-5)
    broken = loops._prolonged(pace, jnp.full((1, 2), -jnp.inf), jnp.zeros((1, 15)))
    assert broken.tolist() == [[0.0] * 15]


token = st.integers(0, tiny.VOCAB - 1)
ALL = {
    "temperature": 0.9,
    "top_k": 12,
    "repetition_penalty": 1.2,
    "min_new_tokens": 4,
    "eos": (4,),
    "max_new_tokens": 20,
}


@st.composite
def chosen(draw) -> dict:
    """Options of a row, of those that `ALL` uses."""
    some = lambda values, usual: draw(st.one_of(st.just(usual), values))
    return {
        "max_new_tokens": draw(st.integers(4, 40)),
        "temperature": some(st.sampled_from([0.3, 1.0, 3.0]), 0.0),
        "seed": draw(st.integers(0, 2**32 - 1)),
        "eos": tuple(some(st.lists(token, max_size=2), ())),
        "top_k": some(st.integers(1, 40), 0),
        "repetition_penalty": some(st.floats(0.6, 3.0), 1.0),
        "min_new_tokens": draw(st.integers(0, 4)),
        "budget": draw(st.sampled_from([None, None, "auto", 1])),
    }


def coached(plain, prompts, rank, coach) -> LoadedHead:
    """The causal head; coached, it is right at some depths of some rounds."""
    head = HEADS["causal"]
    tokens = np.zeros((4, 256), np.int32)
    for row, (ids, result) in enumerate(zip(prompts, plain, strict=True)):
        whole = [*ids, *result.token_ids]
        tokens[row, : len(whole)] = whole
    draft = tiny.CoachedDraft(4, tiny.VOCAB, head.draft)
    return tiny.LoadedHead(draft, tiny.coached(tokens, rank, head.params, coach))


@settings(derandomize=True, max_examples=8)  # rounding at a near-tie may part the two, so the examples are fixed
@given(
    prompts=st.lists(st.lists(token, min_size=1, max_size=8), min_size=3, max_size=3),
    options=st.lists(chosen(), min_size=3, max_size=3),
    moves=st.lists(st.tuples(st.sampled_from(SIZES), st.integers(1, 5)), min_size=1, max_size=8),
    rank=st.lists(st.lists(st.integers(-1, 1), min_size=4, max_size=4), min_size=3, max_size=3),
    coach=st.booleans(),
)
def test_the_tokens_are_those_of_plain_decoding_while_the_size_moves(prompts, options, moves, rank, coach):
    """Any sizes in any order; nothing is compiled once the engine has its rows."""
    prompts, options = [*prompts, [1, 2, 1]], [SamplingConfig(**given) for given in (*options, ALL)]
    plain = speculate.generate(TARGET, None, prompts, None, options)
    head = coached(plain, prompts, rank, coach)
    engine = speculate.start(TARGET, head, prompts, TreeConfig("auto"), options)
    before, ran, turn = len(COMPILED), [], iter(moves * 100)

    def look(state, ran=0):
        engine.pacer._next = next(turn)
        return int(ran)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine.pacer, "_look", look)
        look(None)
        while not engine.over():
            ran.append(engine.pacer.bucket)
            engine.advance(engine.pace())
    assert len(COMPILED) == before
    results = engine.results()
    assert [r.token_ids for r in results] == [r.token_ids for r in plain]
    for result, option in zip(results, options, strict=True):
        assert result.settings["budget"] == (option.budget or "auto")
        assert sum(result.emitted) + 1 == result.new_tokens
        assert set(result.tree_sizes) <= {1} if option.budget == 1 else set(result.tree_sizes) <= {*ran}


def test_the_whole_way(monkeypatch):
    """A head that is always right gets its largest tree, one that never is a few small ones; both are remembered."""
    prompt, option = [[3, 1, 4]], SamplingConfig(60, eos=())
    monkeypatch.setattr(costs, "measure", lambda run, sizes, at: Table(SIZES, (100,), ((1e-3, 1.5e-3, 1.6e-3),)))
    monkeypatch.setattr(costs, "read", lambda *_: None)
    monkeypatch.setattr(pacing, "HEED", (0.0, 0.0))  # what the machine takes is not what is tested
    plain = speculate.generate(TARGET, None, prompt, None, option)
    draft = tiny.CoachedDraft(4, tiny.VOCAB, HEADS["causal"].draft)
    tokens = np.zeros((1, 256), np.int32)
    tokens[0, :63] = [*prompt[0], *plain[0].token_ids]
    decode = lambda rank: speculate.generate(
        TARGET,
        tiny.LoadedHead(draft, tiny.coached(tokens, rank, HEADS["causal"].params)),
        prompt,
        TreeConfig("auto"),
        option,
    )[0]
    right = decode([0, 0, 0, 0])
    pacing._BELIEFS.clear()
    wrong = decode([-1, -1, -1, -1])
    assert right.token_ids == wrong.token_ids == plain[0].token_ids
    assert right.tree_sizes[2:] == [8] * (right.rounds - 2) and right.rounds < 20
    trees = [n for n in wrong.tree_sizes if n > 1]
    assert len(trees) < 12 and wrong.tree_sizes[-20:].count(1) >= 18
    again = decode([-1, -1, -1, -1])  # the second such text has its two rounds, and no more than one to look
    assert len([n for n in again.tree_sizes if n > 1]) <= 3
    assert list(speculate.stream(TARGET, HEADS["causal"], prompt[0], TreeConfig("auto"), option))[
        -1
    ].result.token_ids == (plain[0].token_ids)


@pytest.mark.slow  # a server's rows come later in test_tempo.py
def test_rows_that_come_later_and_a_call_for_servers():
    """`following` is what the next block will be; a new row gives the text its rounds again."""
    option = SamplingConfig(30, eos=())
    engine = speculate.start(TARGET, HEADS["causal"], [[3, 1, 4], [1, 5]], TreeConfig("auto"), option)
    engine.advance(99)
    engine.advance(99)
    tested = float(engine.pacer._belief.tested)
    engine.release(1)
    assert engine.pacer.following(engine.state) in SIZES and engine.pacer.bucket == engine.pacer.following(engine.state)
    assert engine.admit([Row([2, 7], engine.rows[0].option, "auto")]) == [1]
    assert float(engine.pacer._belief.tested) == pytest.approx(tested / 2)
    got = [r.token_ids for r in engine.finish()]
    assert got == [r.token_ids for r in speculate.generate(TARGET, None, [[3, 1, 4], [2, 7]], None, option)]


def test_a_row_with_a_budget_of_its_own_has_it():
    """Its size is the least, and nothing smaller is compiled."""
    options = [SamplingConfig(12, eos=(), budget=6), SamplingConfig(12, eos=())]
    engine = speculate.start(TARGET, HEADS["causal"], [[3, 1, 4], [1, 5]], TreeConfig("auto"), options)
    assert engine.pacer.ladder.sizes == (8,)
    fixed, free = engine.finish()
    assert set(fixed.tree_sizes) == {6} and set(free.tree_sizes) == {8}


@pytest.mark.slow  # in a server, in the default run: test_tempo.py
def test_pruned_trees_give_the_same_tokens():
    option = SamplingConfig(20, temperature=1.0, seed=3, eos=())
    prompts = [[3, 1, 4], [1, 5]]
    plain = speculate.generate(TARGET, None, prompts, None, option)
    whole, pruned = (
        speculate.generate(TARGET, HEADS["causal"], prompts, TreeConfig(8, prune=least), option) for least in (0.0, 0.1)
    )
    assert [r.token_ids for r in whole] == [r.token_ids for r in pruned] == [r.token_ids for r in plain]
    assert all(set(r.tree_sizes) == {8} for r in whole)
    assert min(min(r.tree_sizes) for r in pruned) < 8 and pruned[0].settings["prune"] == 0.1


NGRAM = LoadedHead(tiny.TableDraft(3), {}, source="a table")


@pytest.mark.parametrize(
    "tree, head, line",
    [
        (TreeConfig("auto"), NGRAM, "budget=auto: a table drafts without probabilities"),
        (TreeConfig(8, prune=0.1), NGRAM, "prune=0.1: a table drafts without probabilities"),
        (TreeConfig(8, rule="cast"), HEADS["causal"], "budget_rule=cast: budgets are numbers"),
    ],
)
def test_what_cannot_be_had_is_refused(tree, head, line):
    with pytest.raises(ConfigError, match=line):
        speculate.generate(TARGET, head, [1, 2], tree)


@pytest.mark.parametrize("change", [{"budget": "some"}, {"budget": 0}, {"rule": "worst"}, {"prune": 1.5}])
def test_wrong_values_are_refused(change):
    name = {"rule": "budget_rule"}.get(next(iter(change)), next(iter(change)))
    with pytest.raises(ConfigError, match=f"^{name}="):
        TreeConfig(**change)
    if "budget" in change:
        with pytest.raises(ConfigError, match="or auto"):
            SamplingConfig(**change)


def test_pruning_contradicts_an_order_that_is_not_of_probability():
    with pytest.raises(ConfigError, match=r"prune=0\.1 contradicts tree=accum_logp"):
        TreeConfig(prune=0.1, builder="accum_logp")
    TreeConfig(prune=0.1, builder="accum_logp", width=1)  # a chain has one order


PAIR = pathlib.Path(__file__).parent / "fixtures" / "peer_parity" / "dense_trained"


def command(capsys, *words) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of decode.py with the small pair."""
    given = "--target", PAIR / "target", "--head", PAIR / "head", "--max_new_tokens=24", "--ignore_eos", *words
    return decode.main(list(map(str, given))), *capsys.readouterr()


@pytest.mark.slow  # the whole way is tested above, without the command
def test_the_command(capsys, tmp_path):
    """A row's own budget, the sizes that were in force, and the same tokens."""
    rows = tmp_path / "p.jsonl"
    rows.write_text('{"prompt_ids": [11, 12, 17]}\n{"prompt_ids": [49], "budget": 3}\n')
    status, out, _ = command(capsys, "--prompt_file", rows, "--budget=auto", "--json", "--compare")
    auto, fixed = map(json.loads, out.splitlines())
    assert status == 0 and auto["compare"]["equal"] and fixed["compare"]["equal"]
    assert auto["settings"]["budget"] == "auto" and set(auto["tree_sizes"]) <= set(SIZES)
    assert fixed["settings"]["budget"] == 3 and set(fixed["tree_sizes"]) == {3}
    one = "--prompt_ids=11,12,17", "--budget=auto"
    status = decode.main(["--target", str(PAIR / "target"), *one, "--method=ngram"])
    assert status == 1 and "budget=auto: ngram drafts without probabilities" in capsys.readouterr().err


@pytest.mark.slow
def test_a_drawn_round_is_of_the_size_in_force(capsys):
    one = "--prompt_ids=11,12,17", "--budget=auto"
    status, _, err = command(capsys, *one, "--show_tree", "--prune=0.01", "--budget_rule=cast")
    assert status == 0 and "nodes a round: " in err and "round 1" in err


@pytest.mark.slow
def test_a_comparison_has_auto_beside_the_others(tmp_path, capsys):
    prompts = tmp_path / "some.jsonl"
    prompts.write_text('{"prompt_ids": [11, 12, 17]}\n')
    words = [
        "--prompts", str(prompts), "--out", str(tmp_path / "run.jsonl"), "--target", str(PAIR / "target"),
        "--drafters", f"jetspec={PAIR / 'head'}", "--budgets", "4", "auto", "--max_new_tokens", "12",
    ]  # fmt: skip
    assert compare.main([*words, "--svg", str(tmp_path / "run.svg")]) == 0
    told = capsys.readouterr().out
    assert "jetspec auto" in told and "jetspec tree 4" in told and "differs" not in told
    table = acceptance.LINE.parse(["--prompts", str(prompts), "--budget", "4", "auto"]).budget
    assert table == [4, "auto"]


class TestCosts:
    ABOUT: ClassVar = {"device": "a", "depth": 3}
    TABLE = Table((1, 4, 8), (100, 400), ((1.0, 1.5, 2.5), (1.1, 1.6, 2.75)))

    @pytest.fixture(autouse=True)
    def folder(self, monkeypatch, tmp_path, small):
        monkeypatch.undo()
        monkeypatch.setenv("JETSPEC_CACHE", str(tmp_path))
        return tmp_path

    def test_a_table_comes_back(self, folder):
        costs.keep(self.ABOUT, "b1", self.TABLE)
        costs.keep(self.ABOUT, "b2", self.TABLE._replace(contexts=(7, 9)))
        assert costs.read(self.ABOUT, "b1", (1, 8)) == Table((1, 8), (100, 400), ((1.0, 2.5), (1.1, 2.75)))
        assert costs.read(self.ABOUT, "b2", self.TABLE.sizes) == self.TABLE._replace(contexts=(7, 9))
        for about, key, sizes in ((self.ABOUT, "b3", (1,)), (self.ABOUT, "b1", (1, 16)), ({"device": "b"}, "b1", (1,))):
            assert costs.read(about, key, sizes) is None
        assert len(list(folder.rglob("*"))) == 2  # the folder and one file

    @pytest.mark.parametrize(
        "damage",
        [
            lambda file: file[:-9], lambda file: b"", lambda file: b"\xff" + file, lambda file: b"[]",
            lambda file: file.replace(b'"version": 1', b'"version": 2'), lambda file: file.replace(b"1.5", b"-1.5"),
            lambda file: file.replace(b"1.5", b"NaN"), lambda file: file.replace(b"1.5", b'"x"'),
            lambda file: file.replace(b"[1, 4, 8]", b"[4, 1, 8]"), lambda file: file.replace(b", 2.5]", b"]"),
            lambda file: file.replace(b'"device": "a"', b'"device": "c"'), lambda file: b"[" * 100_000,
        ],
    )  # fmt: skip
    def test_a_damaged_file_is_measured_anew(self, folder, damage):
        costs.keep(self.ABOUT, "b1", self.TABLE)
        (path,) = folder.rglob("*.json")
        path.write_bytes(damage(path.read_bytes()))
        assert costs.read(self.ABOUT, "b1", (1,)) is None
        costs.keep(self.ABOUT, "b1", self.TABLE)
        assert costs.read(self.ABOUT, "b1", self.TABLE.sizes) == self.TABLE

    def test_a_file_is_whole_or_as_it_was(self, folder, monkeypatch):
        costs.keep(self.ABOUT, "b1", self.TABLE)

        def broken(value, file):
            file.write("{")
            raise KeyboardInterrupt

        monkeypatch.setattr(json, "dump", broken)
        with pytest.raises(KeyboardInterrupt):
            costs.keep(self.ABOUT, "b2", self.TABLE)
        assert costs.read(self.ABOUT, "b1", self.TABLE.sizes) == self.TABLE and len(list(folder.rglob("*"))) == 2

    def test_a_folder_that_cannot_be_written_costs_a_measurement_each_time(self, folder, monkeypatch):
        (folder / "file").write_text("")
        monkeypatch.setenv("JETSPEC_CACHE", str(folder / "file"))
        costs.keep(self.ABOUT, "b1", self.TABLE)
        assert costs.read(self.ABOUT, "b1", (1,)) is None

    def test_what_can_win(self):
        """A size that costs no less than a larger one cannot, nor one that plain decoding always beats."""
        table = Table((1, 4, 8, 16, 32), (10,), ((1.0, 2.0, 2.0, 3.9, 4.1),))
        assert table.winning(7) == (1, 8, 16, 32)
        assert table.winning(3) == (1, 8, 16)  # 32 nodes commit four tokens at most
        assert table.winning(7, least=16) == (16, 32)
        assert Table((1, 4), (10,), ((1.0, 9.0),)).winning(7) == (1, 4)  # some tree is always there to ask
        assert Table((1, 4), (10, 20), ((1.0, 9.0), (1.0, 3.0))).winning(7) == (1, 4)

    def test_contexts_are_within_the_cache(self):
        for capacity in (64, 256, 512, 1024, 4096, 40960):
            found = costs.contexts(capacity, 80)
            assert list(found) == sorted(set(found)) and found[0] >= 1 and found[-1] <= max(capacity - 80, 1)
        assert costs.contexts(256, 80) == (88,) and costs.contexts(4096, 96) == (256, 1024, 4000)

    def test_other_work_on_the_machine_slows_all_sizes_alike(self):
        """A pass that takes thrice as long counts by its shares."""
        slow = iter([1.0] * 3 + [3.0] * 3 + [1.0] * 9)
        table = costs.measure(lambda size, context: next(slow) * size, (1, 2, 4), (50,))
        np.testing.assert_allclose(table.seconds, [[1.0, 2.0, 4.0]])

    def test_they_are_measured_once(self, monkeypatch):
        """The second start reads them; what was measured is of every size, and positive."""
        monkeypatch.setitem(pacing.SIZES, "cpu", SIZES)
        monkeypatch.setattr(costs, "PASSES", 1)
        measured, measure = [], costs.measure
        monkeypatch.setattr(costs, "measure", lambda *args: (measured.append(measure(*args)), measured[-1])[1])
        decode = lambda: speculate.generate(
            TARGET, HEADS["causal"], [3, 1, 4], TreeConfig("auto"), SamplingConfig(9, eos=())
        )
        assert decode().seconds["compile"] > 0 and decode().seconds["compile"] == 0
        (table,) = measured
        assert table.sizes == SIZES and all(0 < second < 10 for row in table.seconds for second in row)


def test_the_machine_as_it_is_now_is_heeded(monkeypatch):
    """Blocks that take twice as long as the table says move the factor of their kind there, short ones hardly."""
    engine = speculate.start(TARGET, HEADS["causal"], [[3, 1, 4]], TreeConfig("auto"), SamplingConfig(9, eos=()))
    pacer = engine.pacer
    pacer._drift.factor = {"plain": 1.0, "trees": 1.0}
    moved = lambda plain, trees: {"plain": pytest.approx(2**plain), "trees": pytest.approx(2**trees)}
    pacer._timed(8, 1, 6.0, 3.0)
    assert pacer._drift.factor == moved(0.08, 0.1) and pacer._worked == 6.0
    pacer._timed(4, 9, 36.0, 2.0)
    assert pacer._drift.factor == moved(0.4, 0.5) and pacer._worked == 42.0
    pacer._timed(1, 2, 90.0, 1.0)  # whatever held it up, it counts for twice as long
    assert pacer._drift.factor == moved(0.6, 0.66) and pacer._worked == 0.0
    pacer._timed(1, 1, 2e-3, 1e-3)  # most of it is the launch
    assert pacer._drift.factor == moved(0.604, 0.6632)


def test_what_slows_one_kind_of_round_is_learnt():
    """Plain steps take twice as long as the table says, trees as long; though plain is seen more, factors part so."""
    engine = speculate.start(TARGET, HEADS["causal"], [[3, 1, 4]], TreeConfig("auto"), SamplingConfig(9, eos=()))
    pacer = engine.pacer
    pacer._drift.factor = {"plain": 1.0, "trees": 1.0}
    for _ in range(100):
        for _ in range(5):
            pacer._timed(1, 30, 60.0, pacer._drift.factor["plain"])
        pacer._timed(8, 1, 1.0, pacer._drift.factor["trees"])
    assert pacer._drift.factor["plain"] / pacer._drift.factor["trees"] == pytest.approx(2.0, rel=0.1)
