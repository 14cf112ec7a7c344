"""Calibration: the fit on made-up rounds, what is measured in real ones, and its way into a head and its tree."""

import dataclasses
import errno
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny

from jetspec_jax import speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.drafts import block, scorer
from jetspec_jax.evals import calibrate, trace
from jetspec_jax.evals.calibrate import GRID, NEUTRAL, Rounds
from jetspec_jax.files import checkpoint, load, pair
from jetspec_jax.loop import tree as trees
from jetspec_jax.loop.choice import choose
from jetspec_jax.loop.contracts import Ends
from jetspec_jax.loop.processors import Past, Sampling

TARGET = pathlib.Path(__file__).parent / "fixtures" / "peer_parity" / "dense_causal" / "target"
PROMPT = [3, 1, 4, 1, 5]


def test_the_error_is_that_of_bins_counted_one_by_one():
    draw = np.random.default_rng(0)
    said, happened = draw.random(200), draw.random(200) < 0.4
    said[:3] = 0.0, 1.0, 1 / 3
    total = 0.0
    for low in np.arange(15) / 15:
        inside = [i for i, s in enumerate(said) if low <= s < low + 1 / 15 or (s == 1.0 and low > 13.5 / 15)]
        if inside:
            gap = np.mean([said[i] for i in inside]) - np.mean([happened[i] for i in inside])
            total += abs(gap) * len(inside) / len(said)
    assert calibrate.error(said, happened) == pytest.approx(total)


def made_up(count: int, seed: int, wrong: tuple[float, ...]) -> Rounds:
    """A draft whose logit for its token is `wrong` times what it should be at each depth."""
    draw = np.random.default_rng(seed)
    logit = draw.normal(1.5, 1.5, (count, len(wrong)))
    right = draw.random(logit.shape) < 1 / (1 + np.exp(-logit))
    said = 1 / (1 + np.exp(-np.array(wrong)[:, None] * logit[..., None] / GRID))
    return Rounds(said, np.cumprod(right, 1).sum(1))


def test_calibration_lowers_the_error_on_rounds_that_it_has_not_seen():
    wrong = (2.0, 0.6, 1.5)
    chosen = calibrate.fit(made_up(6000, 0, wrong))
    assert GRID[chosen] == pytest.approx(np.array(wrong), rel=0.2)
    fresh = made_up(6000, 1, wrong)
    before, after = (calibrate.errors(fresh, places) for places in ([NEUTRAL] * 3, chosen))
    assert sum(after) < sum(before) / 2 and max(after) < 0.02
    found = calibrate.calibrate([made_up(3000, s, wrong) for s in range(4)], "made up")
    assert found["ece_after"] < found["ece_before"] / 2 and found["fitted_on"] == "made up"


def test_the_first_of_two_prompts_is_fitted_on_and_the_second_tells_the_errors():
    wrong, right = made_up(2000, 0, (2.0, 2.0)), made_up(2000, 1, (1.0, 1.0))
    found = calibrate.calibrate([wrong, right], "made up")
    chosen = calibrate.fit(wrong)
    assert found["temperature"] == pytest.approx(GRID[chosen], abs=1e-6) and min(found["temperature"]) > 1.5
    told = [np.mean(calibrate.errors(right, places)) for places in ([NEUTRAL] * 2, chosen)]
    assert [found["ece_before"], found["ece_after"]] == pytest.approx(told) and told[1] > 2 * told[0]


def test_what_is_right_stays_and_what_is_unknown_is_left_alone():
    rounds = made_up(6000, 2, (1.0, 1.0))
    assert GRID[calibrate.fit(rounds)] == pytest.approx(np.ones(2), rel=0.15)
    never = Rounds(np.zeros((5, 2, len(GRID))), np.zeros(5, int))
    assert calibrate.fit(never) == [NEUTRAL, NEUTRAL]


@pytest.mark.parametrize("counts", [(600,), (499, 600), (600, 499), (), (250, 300, 249, 300)])
def test_temperatures_of_a_few_rounds_are_refused(counts):
    rounds = [made_up(n, seed, (1.0, 1.0)) for seed, n in enumerate(counts)]
    fitted, judged = sum(counts[::2]), sum(counts[1::2])
    said = f"prompts: too few rounds, {fitted} to fit on and {judged} to judge by; at least 500 of each are needed"
    with pytest.raises(ConfigError, match=said + ".* raise --limit or --max_new_tokens"):
        calibrate.calibrate(rounds, "a few")
    enough = [*rounds, *(made_up(500, 9, (1.0, 1.0)) for _ in range(2))]
    assert len(calibrate.calibrate(enough, "enough")["temperature"]) == 2


def test_block_heads_are_measured_in_the_rounds_of_a_chain():
    target, head = tiny.target("dense"), tiny.head(True)
    own = dataclasses.replace(head, draft=head.draft.calibrated((3.0,) * 4))  # measured without what it has
    (found,) = calibrate.measure(target, own, [PROMPT], 12, 1)
    chain = TreeConfig(5, width=1, builder="accum_logp")
    rounds, _ = trace.record(target, head, PROMPT, chain, SamplingConfig(12))
    assert found.accepted.tolist() == [len(done.accepted) - 1 for done in rounds]
    for trust, done in zip(found.trust, rounds, strict=True):
        for d, token in enumerate(done.tokens[1:]):
            for place in (0, NEUTRAL, -1):
                share = oracles.softmax(np.asarray(done.draft_logits[d], np.float64) / GRID[place])[token]
                assert trust[d, place] == pytest.approx(share, rel=1e-4)


def test_scored_heads_are_measured_in_the_rows_after_the_token_before():
    target, head = tiny.target("dense"), tiny.scored()
    (found,) = calibrate.measure(target, head, [PROMPT], 12, 1)
    chain = TreeConfig(5, width=1, builder="accum_logp")
    engine = speculate.start(target, head, [PROMPT], chain, SamplingConfig(12))
    moved = []
    for trust in found.trust:
        tree = jax.tree.map(lambda x: np.asarray(x[0]), engine.record().tree)
        candidates, bias = tree.pairs
        for d, token in enumerate(tree.tokens[1:5]):
            row = tree.logits[d].astype(np.float64)
            if d:
                (above,) = np.flatnonzero(candidates[d - 1] == tree.tokens[d])
                row[candidates[d]] += bias[d, above]
            for place in (0, NEUTRAL, -1):
                assert trust[d, place] == pytest.approx(oracles.softmax(row / GRID[place])[token], rel=1e-4)
            moved.append(abs(trust[d, NEUTRAL] - oracles.softmax(tree.logits[d])[token]))
    assert engine.over() and max(moved) > 0.05


def test_rows_that_end_early_are_measured_up_to_their_end():
    """Each says in a batch what it says alone; one whose first token ends it says nothing, and is not counted."""
    target, head, prompts = tiny.target("dense"), tiny.head(True), [PROMPT, [7, 8]]
    long, short = speculate.generate(target, None, prompts, None, SamplingConfig(12))
    at = next(i for i, token in enumerate(short.token_ids) if i > 1 and token not in long.token_ids)
    ending = dataclasses.replace(target, eos=(short.token_ids[at],))
    together = calibrate.measure(ending, head, prompts, 12, 2)
    for one, prompt in zip(together, prompts, strict=True):
        (alone,) = calibrate.measure(ending, head, [prompt], 12, 1)
        assert one.accepted.tolist() == alone.accepted.tolist()
        np.testing.assert_allclose(one.trust, alone.trust, rtol=1e-4)
    assert len(together[1].accepted) < len(together[0].accepted)
    first = dataclasses.replace(target, eos=(short.token_ids[0],))
    assert calibrate.measure(first, head, prompts[1:], 12, 1) == []


@pytest.mark.slow  # that of blocks is in the default run
def test_dspark_heads_are_measured_by_their_confidence():
    target, head = tiny.target("dense"), tiny.dspark()
    (found, _) = calibrate.measure(target, head, [PROMPT, [7, 8]], 12, 2)
    first = speculate.generate(target, None, PROMPT, None, SamplingConfig(1)).token_ids
    at = jnp.arange(len(PROMPT))[None]
    mask = jnp.tril(jnp.ones((1, len(PROMPT), len(PROMPT)), bool))
    taps = target.model.forward(target.params, jnp.array([PROMPT]), at, mask, taps=head.draft.taps).taps
    slots = jnp.array(first + [head.config.mask_token_id] * 3)
    hidden = oracles.head_hidden(head.config, head.params, target.model.embed(target.params, slots), taps[0])
    base = np.asarray(target.model.logits(target.params, jnp.asarray(hidden, jnp.float32)), np.float64)
    p = jax.tree.map(lambda x: np.asarray(x, np.float64), head.params)
    path = list(first)
    for slot in range(4):
        trusted = np.concatenate([hidden[slot], p["markov"]["w1"][path[-1]]]) @ p["confidence"]["proj"][0]
        said = 1 / (1 + np.exp(-(trusted + p["confidence"]["bias"][0]) / GRID))
        assert found.trust[0, slot] == pytest.approx(said, rel=1e-4)
        path.append(int(oracles.dspark_logits(head.config, head.params, hidden, base, path).argmax()))


def test_heads_without_a_probability_to_correct_are_refused():
    with pytest.raises(ConfigError, match="the family of tiny head is eagle3; give a jetspec"):
        calibrate.measure(tiny.target("dense"), tiny.eagle3(), [PROMPT], 12, 1)
    silent = tiny.dspark(confidence=False, confidence_markov=False)
    with pytest.raises(ConfigError, match="no confidence head"):
        calibrate.measure(tiny.target("dense"), silent, [PROMPT], 12, 1)


def test_a_block_ranks_by_what_is_left_after_the_division():
    loaded, temperature = tiny.head(False), (0.5, 3.0, 1.0, 2.0)
    length = jnp.array([5, 5])
    past = Past(jnp.tile(jnp.array(PROMPT), (2, 1)), length, length, jnp.full((2, 1), -1))
    choice = choose(Sampling(None, jnp.zeros(2, jnp.uint32)), past, length < 0, 3, tiny.VOCAB)
    table = jnp.asarray(np.random.default_rng(3).standard_normal((tiny.VOCAB, 16)), jnp.float32)
    ends = Ends(lambda tokens: table[tokens], lambda hidden: hidden @ table.T)
    draft = loaded.draft.shaped(tiny.EIGHT, 3)

    @jax.jit
    def run(params):
        state = draft.init(params, 2, 16)
        drafts = draft, draft.calibrated(temperature)
        grown = [d.propose(params, state, choice, length, ends)[0] for d in drafts]
        return draft.logits(params, state, choice.anchor, length, ends)[0], *grown

    logits, plain, tree = run(loaded.params)
    wanted = trees.build(tiny.EIGHT, logits / jnp.array(temperature[:3])[:, None], choice.anchor, length)
    for field in ("tokens", "parents", "depths", "size"):
        np.testing.assert_array_equal(getattr(tree, field), getattr(wanted, field))
    assert (tree.tokens != plain.tokens).any() and draft.calibrated(temperature).calibrated(()) == draft


def test_a_calibration_that_cannot_be_written_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    (tmp_path / "jetspec.json").write_text('{"thinking": false}')
    (tmp_path / "jetspec.json").chmod(0o640)

    def full(self, *_, **__):
        self.touch()
        raise OSError(errno.ENOSPC, "No space left on device")  # as writing raises it: without a name

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left") as error:
        patch.setattr(pathlib.Path, "write_text", full)
        calibrate.write(tmp_path, {"version": 1})
    assert error.value.filename == str(tmp_path / "jetspec.json")
    assert [p.name for p in tmp_path.iterdir()] == ["jetspec.json"]
    assert json.loads((tmp_path / "jetspec.json").read_text()) == {"thinking": False}
    calibrate.write(tmp_path, {"version": 1})
    assert json.loads((tmp_path / "jetspec.json").read_text()) == {"thinking": False, "calibration": {"version": 1}}
    assert (tmp_path / "jetspec.json").stat().st_mode & 0o777 == 0o640


def test_what_a_scorer_adds_is_divided_too():
    config, temperature = tiny.head_config(False, scorer_rank=4), (0.5, 3.0, 1.0, 2.0)
    draft, shapes = block.build(config, jnp.float32)
    params = tiny.random_like(shapes, 1)
    length = jnp.array([5, 5])
    past = Past(jnp.tile(jnp.array(PROMPT), (2, 1)), length, length, jnp.full((2, 1), -1))
    choice = choose(Sampling(None, jnp.zeros(2, jnp.uint32)), past, length < 0, 4, tiny.VOCAB)
    table = jnp.asarray(np.random.default_rng(3).standard_normal((tiny.VOCAB, 16)), jnp.float32)
    ends = Ends(lambda tokens: table[tokens], lambda hidden: hidden @ table.T)
    draft = draft.shaped(trees.Rule(32), 4)

    @jax.jit
    def run(params):
        state = draft.init(params, 2, 16)
        tree = draft.calibrated(temperature).propose(params, state, choice, length + 30, ends)[0]
        hidden, _ = draft.hidden(params, state, choice.anchor, length, ends)
        over = jnp.array(temperature)[:, None]

        def wanted(share):
            found = trees.candidates(draft.rule, ends.logits(hidden) / over)
            bias = scorer.bias(params["scorer"], hidden, found.token, ends.embed(found.token)) / share
            return trees.drawn(draft.rule, trees.conditioned(found, bias), choice.anchor, length + 30)

        return tree, wanted(over[..., None]), wanted(1.0)

    tree, wanted, other = run(params)
    for field in ("tokens", "parents", "depths", "size"):
        np.testing.assert_array_equal(getattr(tree, field), getattr(wanted, field))
    assert (wanted.tokens != other.tokens).any()


@pytest.mark.slow  # its parts are tested above
def test_the_command_writes_what_loading_reads(tmp_path, capsys):
    target = load.load_target(TARGET)
    t = target.config
    config = dataclasses.replace(
        tiny.head_config(True), vocab_size=t.vocab_size, hidden_size=t.hidden_size, num_target_layers=t.num_layers,
        mask_token_id=t.vocab_size - 1, tap_layers=(0, t.num_layers - 1),
    )  # fmt: skip
    folder = tmp_path / "head"
    checkpoint.save_head(folder, config, tiny.random_like(block.build(config, jnp.float32)[1], 3), {"thinking": False})
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt_ids": [i, 7 * i % 64]}) + "\n" for i in range(64)))
    command = [f"--target={TARGET}", f"--head={folder}", f"--prompts={prompts}", "--max_new_tokens=64"]
    assert calibrate.main([*command, "--limit=2"]) == 1
    assert "too few rounds" in capsys.readouterr().err
    assert calibrate.main([*command, "--nowrite"]) == 0
    assert json.loads((folder / "jetspec.json").read_text()) == {"thinking": False}
    assert calibrate.main(command) == 0
    first, second = map(json.loads, capsys.readouterr().out.splitlines())
    assert first == second and first["version"] == 1 and len(first["temperature"]) == 4
    assert "prompts.jsonl: 64 prompts" in first["fitted_on"] and "greedy" in first["fitted_on"]
    assert json.loads((folder / "jetspec.json").read_text()) == {"thinking": False, "calibration": first}
    head = load.load_head(folder, target)
    assert head.draft.temperature == tuple(first["temperature"]) and capsys.readouterr().err == ""
    option = SamplingConfig(16, temperature=0.8, ignore_eos=True)
    fast = speculate.generate(target, head, [1, 2, 3], TreeConfig(8), option)
    assert fast.token_ids == speculate.generate(target, None, [1, 2, 3], None, option).token_ids
    (folder / "jetspec.json").write_text(json.dumps({"calibration": first | {"temperature": [1.0]}}))
    assert load.load_head(folder, target).draft.temperature == ()
    assert "calibration.temperature is [1.0]; 4 numbers are needed" in capsys.readouterr().err
    assert calibrate.main([*command[:1], "--head=owner/name", *command[2:]]) == 1
    assert "only a folder can be written" in capsys.readouterr().err


GOOD = {"version": 1, "temperature": [1.0, 2.0, 0.5, 1.5], "fitted_on": "x", "ece_before": 0.2, "ece_after": 0.1}


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2}, {"version": None}, {"temperature": [1.0, 2.0, 0.0, 1.0]}, {"temperature": [1.0] * 5},
        {"temperature": [1.0, True, 1.0, 1.0]}, {"temperature": [1.0, float("nan"), 1.0, 1.0]}, {"temperature": 2.0},
        {"temperature": None}, {"fitted_on": 3}, {"ece_after": 1.5}, {"ece_before": "low"},
    ],
)  # fmt: skip
def test_nonsense_is_odd(change):
    config = tiny.head_config(True)
    assert not pair.oddities(config, {"calibration": GOOD}) and not pair.oddities(config, {"calibration": None})
    lines = pair.oddities(config, {"calibration": GOOD | change})
    assert lines.keys() == {"calibration"} and next(iter(change)) in lines["calibration"]


def test_a_calibration_of_a_head_that_has_no_use_for_one_is_odd():
    lines = pair.oddities(tiny.eagle3().config, {"calibration": GOOD})
    assert "only heads that draft a block" in lines["calibration"]
    assert not pair.oddities(tiny.dspark().config, {"calibration": GOOD})
