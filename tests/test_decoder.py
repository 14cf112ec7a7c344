"""What holds after every round: caches, draft context, node logits, records, and rows that have ended."""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jetspec_jax import speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.layers import masks
from jetspec_jax.loop.decoder import Decoder
from jetspec_jax.loop.plain import PLAIN
from jetspec_jax.loop.state import LENGTH, NONFINITE, RUNNING, STOP

CAPACITY, DEPTH, ROWS = 48, 4, 32  # width 2: the whole tree has 31 nodes, so every forced path is in it
PROMPTS = [[1], [2, 3], [4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3, 2]]
LIMITS = [35, 20, 7, 1]
# Ranks of the right tokens, by the length of the row; -1 withholds one.
BRANCHES = [[1, 0, 1, 1], [0, 1, 1, -1], [1, 1, 1, 1], [-1, 0, 0, 0], [0, 1, -1, 0], [1, -1, 0, 0], [0, 1, 0, 1]]
KINDS = [("dense", True), ("moe", False)]
STUB = tiny.hash_target()
STUB_TREE = tiny.loop(STUB.model, tiny.CoachedDraft(DEPTH, tiny.VOCAB), ROWS, CAPACITY, "accum_logp", 2)


@functools.partial(jax.jit, static_argnums=(0, 1))
def plain_run(model, taps, params, tokens):
    """Logits, K/V and taps of one forward over whole rows."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    out = model.forward(params, tokens, positions, masks.causal(tokens.shape[1]), taps=taps)
    return model.logits(params, out.hidden), out.fresh, out.taps


@functools.partial(jax.jit, static_argnums=0)
def whole_context(draft, params, features):
    """Draft K/V of whole rows, recomputed at once."""
    empty = draft.init(params, features.shape[0], CAPACITY)
    return draft.extend(params, empty, tiny.seen(features, 0), tiny.NO_ENDS).context


def history(loaded, static, draft_params, asked, most=40):
    """States after prefill and after every round, and what the rounds did, on the host."""
    params = {"target": loaded.params, "draft": draft_params}
    states, done = [tiny.prefill(static, params, asked)], []
    while not bool(jax.device_get(states[-1].reason != RUNNING).all()):
        state, what = tiny.step_recorded(static, params, states[-1])
        states.append(state)
        done.append(what)
        assert len(done) < most
    return jax.device_get(states), jax.device_get(done)


@functools.lru_cache(None)
def real_history(kind, causal):
    loaded, head = tiny.target(kind), tiny.head(causal)
    asked = tiny.request(PROMPTS, LIMITS, temperature=[0.0, 1.0, 0.0, 0.0], seed=3, budget=[32, 32, 9, 4])
    end = tiny.outputs(tiny.plain(loaded, asked))[1][6]
    asked = asked._replace(eos=asked.eos.at[1, 0].set(end))  # the second row ends before its limit
    answers = tiny.plain(loaded, asked)
    static = tiny.loop(loaded.model, tiny.CoachedDraft(DEPTH, tiny.VOCAB, head.draft), ROWS, CAPACITY, "best_first", 2)
    states, done = history(loaded, static, tiny.coached(answers.tokens, BRANCHES, head.params), asked)
    assert tiny.outputs(states[-1]) == tiny.outputs(answers)
    return loaded, head, states, done


@pytest.mark.parametrize("kind, causal", KINDS)
def test_cache_is_that_of_a_plain_run(kind, causal):
    """FC-20, FC-21: slots 0..length-2 of every row, after every round, hold the K/V of the committed tokens."""
    loaded, head, states, _ = real_history(kind, causal)
    lengths = [state.length.tolist() for state in states]
    assert any(b - a > 3 for x, y in itertools.pairwise(lengths) for a, b in zip(x, y, strict=True))
    for state in states:
        _, fresh, features = jax.device_get(plain_run(loaded.model, tiny.TAPS, loaded.params, state.tokens))
        context = jax.device_get(whole_context(head.draft, head.params, features))
        for row, length in enumerate(state.length):
            past = length - 1
            for pair, wanted in zip(state.cache, fresh, strict=True):
                for x, y in zip(pair, wanted, strict=True):
                    tiny.close(x[row, :, :past], y[row, :, :past])
            # The draft has projected or still keeps pending the features of the very same positions.
            seen, waiting = int(state.draft.length[row]), int(state.draft.count[row])
            assert seen + waiting == past
            tiny.close(state.draft.pending[row, :waiting], features[row, seen:past])
            for pair, wanted in zip(state.draft.context, context, strict=True):
                for x, y in zip(pair, wanted, strict=True):
                    tiny.close(x[row, :, :seen], y[row, :, :seen])


@pytest.mark.parametrize("kind, causal", KINDS)
def test_node_logits_are_those_of_their_own_path(kind, causal):
    """FC-19: a plain forward over prefix + path, for every node of the first, a middle and the last round."""
    loaded, _, states, done = real_history(kind, causal)
    for i in (0, len(done) // 2, len(done) - 1):
        tree, sequences, spots = done[i].tree, [], []
        for row in range(4):
            past = int(states[i].length[row]) - 1
            for node in range(ROWS):
                path, up = [], node if node < tree.size[row] else 0
                while up >= 0:
                    path, up = [int(tree.tokens[row, up]), *path], int(tree.parents[row, up])
                line = [*states[i].tokens[row, :past].tolist(), *path]
                sequences.append(line + [0] * (CAPACITY - len(line)))
                spots.append(len(line) - 1)
        logits, _, _ = plain_run(loaded.model, (), loaded.params, jnp.array(sequences))
        wanted = np.asarray(logits)[np.arange(len(spots)), spots].reshape(4, ROWS, -1)
        for row in range(4):
            size = tree.size[row]
            tiny.close(done[i].target_logits[row, :size], wanted[row, :size])


@pytest.mark.parametrize("kind, causal", KINDS)
def test_records_and_rows_that_have_ended(kind, causal):
    """One record a round while a row runs; a row that has ended keeps its tokens, length, reason and records."""
    _, _, states, done = real_history(kind, causal)
    assert states[0].reason.tolist() == [RUNNING, RUNNING, RUNNING, LENGTH]  # one new token needs no round
    for before, after, what in zip(states, states[1:], done, strict=False):
        for row in range(4):
            n, count = int(before.rounds[row]), int(before.length[row])
            if before.reason[row] != RUNNING:
                for name in ("length", "reason", "rounds", "accept_lengths", "tree_sizes", "emitted"):
                    assert (getattr(before, name)[row] == getattr(after, name)[row]).all()
            else:
                assert after.rounds[row] == n + 1
                assert after.accept_lengths[row, n] == what.accepted.count[row]
                assert after.tree_sizes[row, n] == what.tree.size[row] <= before.budget[row]
                gained = int(after.length[row]) - count
                assert 1 <= gained == after.emitted[row, n] <= what.accepted.count[row]
                committed = after.tokens[row, count : count + gained]
                assert (committed == what.accepted.tokens[row, :gained]).all()
            assert (after.tokens[row, :count] == before.tokens[row, :count]).all()
    last = states[-1]
    wanted = [len(p) + n for p, n in zip(PROMPTS, LIMITS, strict=True)]
    assert last.reason.tolist() == [LENGTH, STOP, LENGTH, LENGTH] and last.length[1] < wanted.pop(1)
    assert np.delete(last.length, 1).tolist() == wanted


def test_stub_cache_holds_the_committed_tokens():
    """Exactly: keys are tokens and values positions, through forced branches (FC-20) and wrong drafts (FC-21)."""
    asked = tiny.request(PROMPTS, LIMITS)
    answers = tiny.plain(STUB, asked)
    lengths = {}
    for name, rank in {"branches": BRANCHES, "wrong": [[-1] * 4], "perfect": [[0] * 4], "ones": [[1] * 4]}.items():
        states, done = history(STUB, STUB_TREE, tiny.coached(answers.tokens, rank), asked)
        assert tiny.outputs(states[-1]) == tiny.outputs(answers)
        for state in states:
            keys, values = (x[:, 0, :, 0] for x in state.cache[0])
            for row, length in enumerate(state.length):
                assert keys[row, : length - 1].tolist() == state.tokens[row, : length - 1].tolist()
                assert values[row, : length - 1].tolist() == list(range(length - 1))
        lengths[name] = [x.accepted.count[0].item() for x in done]
        if name == "ones":  # the second sibling at every depth: never two neighbours in the order of nodes
            path = done[0].accepted.path[0].tolist()
            assert path[0] == 0 and all(b > a + 1 for a, b in itertools.pairwise(path))
    assert set(lengths["perfect"]) == set(lengths["ones"]) == {DEPTH + 1}
    assert set(lengths["wrong"]) == {1}
    assert len(set(lengths["branches"])) > 1


def spoiled(value, at: int, prompt):
    """The stub target with a broken table row: the logits after `at` new tokens of the prompt's plain output."""
    free = tiny.outputs(tiny.plain(STUB, tiny.request([prompt] * 4, 30)))[0]
    row = tiny.path_logits(STUB, [[*prompt, *free[:at]]])[0, -1]
    hit = (STUB.params["table"] == row).all(1)
    assert hit.sum() == 1
    table = jnp.where(hit[:, None] & (jnp.arange(tiny.VOCAB) % 5 == 0), value, STUB.params["table"])
    return free, STUB.params | {"table": table}


@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("at", [0, 1, 3])
def test_non_finite_logits_end_the_row(value, at):
    """At the first token, at the root of a tree and inside an accepted path; other rows go on."""
    prompt = [1, 2]
    free, params = spoiled(value, at, prompt)
    asked = tiny.request([prompt, [7], [8], [9]], [30, 30, 30, 0], temperature=[0, 0, 1.0, 0])
    plain = tiny.decode(Decoder(STUB.model, PLAIN, CAPACITY), {"target": params, "draft": None}, asked)
    draft = tiny.coached([[*prompt, *free, *[0] * 9]], [0] * 4)
    state = tiny.decode(STUB_TREE, {"target": params, "draft": draft}, asked)
    assert plain.reason[0] == state.reason[0] == NONFINITE
    new = tiny.outputs(state)[0]
    assert new == free[: len(new)] and len(new) <= at
    assert state.reason[3] == LENGTH and (state.reason[1:] == plain.reason[1:]).all()
    assert tiny.outputs(state)[1:] == tiny.outputs(plain)[1:] or NONFINITE in plain.reason[1:]


def test_an_end_before_the_broken_logits_is_an_end():
    prompt = [1, 2]
    free, params = spoiled(np.nan, 3, prompt)
    asked = tiny.request([prompt] * 4, 30, eos=[free[2]])
    state = tiny.decode(STUB_TREE, {"target": params, "draft": tiny.coached([[*prompt, *free]], [0] * 4)}, asked)
    assert state.reason.tolist() == [STOP] * 4 and tiny.outputs(state)[0][-1] == free[2]


def test_generate_says_that_logits_are_broken():
    _, params = spoiled(np.nan, 1, [1, 2])
    broken = tiny.Loaded(STUB.model, params, STUB.config, STUB.dtype)
    head = tiny.LoadedHead(tiny.TableDraft(2), {"logits": jnp.zeros((2, tiny.VOCAB))})
    for drafting in (None, head):
        with pytest.raises(speculate.DecodeError, match="not finite in float32 at position 3"):
            speculate.generate(broken, drafting, [1, 2], TreeConfig(budget=4), SamplingConfig(9))
    with pytest.raises(speculate.DecodeError, match="not finite in float32 at position 3"):
        list(speculate.stream(broken, None, [1, 2], None, SamplingConfig(9)))


def test_a_broken_branch_costs_no_output():
    """The embedding of a token that plain decoding never meets is NaN, and the draft proposes it in every round."""
    loaded = tiny.target("dense")
    asked = tiny.request(PROMPTS, LIMITS)
    answers = tiny.plain(loaded, asked)
    unused = next(t for t in range(1, tiny.VOCAB) if not (answers.tokens == t).any())
    params = loaded.params | {"embedding": loaded.params["embedding"].at[unused].set(jnp.nan)}
    static = tiny.loop(loaded.model, tiny.TableDraft(DEPTH), 8, CAPACITY, "best_first", 2)
    logits = jnp.zeros((DEPTH, tiny.VOCAB)).at[:, unused].set(5.0)
    state = tiny.decode(static, {"target": params, "draft": {"logits": logits}}, asked)
    assert tiny.outputs(state) == tiny.outputs(answers)


@dataclasses.dataclass(frozen=True)
class Spy(tiny.TableDraft):
    """Keeps what it is shown, by position: how often, and the token after it."""

    def init(self, params, batch, capacity):
        return jnp.zeros((batch, capacity, 2), jnp.int32)

    def extend(self, params, state, seen, ends):
        rows = seen.count.shape[0], DEPTH + 1 if seen.path else 4
        at = seen.start[:, None] + jnp.arange(rows[1])
        there = jnp.arange(rows[1]) < seen.count[:, None]
        after = jnp.take_along_axis(seen.tokens, jnp.minimum(at + 1, CAPACITY - 1), 1)
        put = jax.vmap(lambda s, i, x: s.at[i].set(x, mode="drop"))
        return put(state, jnp.where(there, at, CAPACITY), jnp.stack([jnp.ones_like(after), after], -1))


@pytest.mark.parametrize("slots", [4, 12])
def test_a_draft_sees_every_committed_row_and_the_token_after_it(slots):
    """Prompts read whole and in pieces; the successor of a prompt's last row is committed after the prompt was read."""
    static = tiny.loop(STUB.model, Spy(DEPTH), 8, CAPACITY, "best_first", 2, prefill_chunk=4)
    asked = tiny.request([[1, 2, 3][: min(3, slots)], [5, 6, 7, 8][:slots]], 9, slots=slots, eos=())
    params = {"target": STUB.params, "draft": {"logits": jnp.zeros((DEPTH, tiny.VOCAB))}}
    state = tiny.rounds(static, params, tiny.prefill(static, params, asked), 3)
    for row in range(2):
        length, prompt = int(state.length[row]), int(state.prompt_length[row])
        shown, after = np.asarray(state.draft[row]).T
        assert shown.tolist() == [1] * (length - 1) + [0] * (CAPACITY - length + 1)
        known = [i for i in range(length - 1) if i != prompt - 1]
        assert after[known].tolist() == np.asarray(state.tokens[row])[1:length][known].tolist()
