"""The tokens of speculative decoding are the tokens of plain decoding, whatever drafts, builds and batches them."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax import baseline, speculate
from jetspec_jax.backends.hopper import Hopper
from jetspec_jax.backends.kernels import tpu_attention
from jetspec_jax.backends.tpu import TPU
from jetspec_jax.backends.xla import PLAIN_XLA
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.drafts import block
from jetspec_jax.engine import requests as engine_requests
from jetspec_jax.files import load
from jetspec_jax.loop import decoder
from jetspec_jax.loop.state import LENGTH, NONFINITE, STOP
from jetspec_jax.models import qwen3

CAPACITY, DEPTH, BATCH = 48, 4, 4
STUB = tiny.hash_target()
# Stub drafts over the exact stub target: T, W, builder; a chain, a full tree, and the wide ones.
STUB_TREES = [(64, 64, "best_first"), (64, 7, "accum_logp"), (32, 2, "best_first"), (6, 1, "best_first")]
# Real heads over real targets: every pair of target and block mask, the builders in turn.
PAIRS = [
    ("dense", True, 64, "best_first"),
    ("dense", False, 16, "accum_logp"),
    ("moe", True, 16, "accum_logp"),
    ("moe", False, 32, "best_first"),
    ("llama", True, 16, "best_first"),
    ("llama", False, 16, "accum_logp"),
]


@st.composite
def requests(draw):
    """A batch of unequal prompts with limits, budgets, seeds and temperatures of their own."""
    token = st.integers(0, tiny.VOCAB - 1)
    each = lambda values: draw(st.lists(values, min_size=BATCH, max_size=BATCH))
    return tiny.request(
        each(st.lists(token, min_size=1, max_size=8)),
        new=each(st.integers(0, CAPACITY - 8 - DEPTH - 1)),
        budget=each(st.integers(1, 64)),
        temperature=each(st.sampled_from([0.0, 0.0, 1e-6, 0.7, 1.0, 3.0])),
        seed=each(st.integers(0, 2**32 - 1)),
        eos=draw(st.lists(token, max_size=3)),
    )


def ranks(count=3, low=-1, high=2):
    """Where the right token stands in each depth, for rounds in turn."""
    return st.lists(st.lists(st.integers(low, high), min_size=6, max_size=6), min_size=count, max_size=count)


def equal(state, wanted) -> None:
    """Same tokens, same ends."""
    assert tiny.outputs(state) == tiny.outputs(wanted)
    assert state.reason.tolist() == wanted.reason.tolist()
    accounts(state)


def accounts(state) -> None:
    """Records add up: 1 from prefill and what each round emitted are the new tokens (FC-11)."""
    for row, new in enumerate(tiny.outputs(state)):
        count = int(state.rounds[row])
        emitted, accepted, sizes = (np.asarray(x[row]) for x in (state.emitted, state.accept_lengths, state.tree_sizes))
        assert emitted[:count].sum() + min(len(new), 1) == len(new)
        assert (emitted[:count] >= 1).all() and (emitted <= accepted).all()
        assert (accepted[:count] <= sizes[:count]).all() and (sizes <= max(int(state.budget[row]), 1)).all()
        assert not accepted[count:].any() and not sizes[count:].any() and not emitted[count:].any()


def cut(tokens, eos) -> list[int]:
    """The oracle for end tokens: everything up to the first."""
    at = next((i + 1 for i, t in enumerate(tokens) if t in eos), len(tokens))
    return tokens[:at]


@pytest.mark.parametrize("rows, width, builder", STUB_TREES)
@settings(max_examples=15)
@given(asked=requests(), rank=ranks(), wrong=st.booleans())
def test_stub_drafts(rows, width, builder, asked, rank, wrong):
    """Right tokens on the spine, on branches, nowhere: the stub target's arithmetic leaves no room for rounding."""
    wanted = tiny.plain(STUB, asked)
    static = tiny.loop(STUB.model, tiny.CoachedDraft(DEPTH, tiny.VOCAB), rows, CAPACITY, builder, width)
    draft = tiny.coached(wanted.tokens, np.full((1, 6), -1) if wrong else rank)
    state = tiny.decode(static, {"target": STUB.params, "draft": draft}, asked)
    equal(state, wanted)
    if wrong:
        assert state.accept_lengths.max() <= 1


@pytest.mark.parametrize("kind, causal, rows, builder", PAIRS)
@settings(derandomize=True, max_examples=12)  # rounding at a near-tie may part the two, so the examples are fixed
@given(asked=requests(), rank=ranks(high=1), coach=st.booleans())
def test_real_models(kind, causal, rows, builder, asked, rank, coach):
    """A random head, and the same head coached to be accepted often; T = 0 and T > 0, budgets 1 to 64."""
    loaded, head = tiny.target(kind), tiny.head(causal)
    wanted = tiny.plain(loaded, asked)
    static = real(kind, causal, rows, builder)
    draft = tiny.coached(wanted.tokens, rank, head.params, coach)
    equal(tiny.decode(static, {"target": loaded.params, "draft": draft}, asked), wanted)


@functools.lru_cache(None)
def real(kind, causal, rows, builder):
    draft = tiny.CoachedDraft(DEPTH, tiny.VOCAB, tiny.head(causal).draft)
    return tiny.loop(tiny.target(kind).model, draft, rows, CAPACITY, builder, 2 if rows == 32 else 8)


PERFECT = tiny.loop(STUB.model, tiny.CoachedDraft(DEPTH, tiny.VOCAB), 6, CAPACITY, "best_first", 1)
PROMPTS = [[1], [2, 3], [4, 5, 6, 7, 8], [9, 8, 7, 6, 5, 4, 3, 2]]


def perfect(asked, answers):
    return tiny.decode(PERFECT, {"target": STUB.params, "draft": tiny.coached(answers.tokens, [0] * 6)}, asked)


@pytest.mark.parametrize("new", [0, 1, 2, 3, 5, 7, 11, 35])
def test_exact_limits(new):
    """FC-08, FC-09: that many ids with a drafter that always offers more; 35 fills the cache to its last slot."""
    assert max(map(len, PROMPTS)) + 35 + DEPTH + 1 == CAPACITY
    long = tiny.plain(STUB, tiny.request(PROMPTS, 35))
    state = perfect(tiny.request(PROMPTS, new), long)
    assert tiny.outputs(state) == [x[:new] for x in tiny.outputs(long)]
    assert state.reason.tolist() == [LENGTH] * BATCH
    rounds = -(-max(new - 1, 0) // (DEPTH + 1))
    assert state.rounds.tolist() == [rounds] * BATCH
    assert (state.accept_lengths[:, :rounds] == DEPTH + 1).all()  # as verified, the cut last round too
    accounts(state)


def test_a_limit_past_the_buffer_is_cut():
    """A request made by hand may ask for more than its cache holds; no commit is shifted back over the prefix."""
    room = CAPACITY - DEPTH - 1
    long = tiny.plain(STUB, tiny.request(PROMPTS, [room - len(p) for p in PROMPTS]))
    state = perfect(tiny.request(PROMPTS, 99), long)
    assert tiny.outputs(state) == tiny.outputs(long) and state.length.tolist() == [room] * BATCH
    assert state.reason.tolist() == [LENGTH] * BATCH


@pytest.mark.parametrize("where", range(8))
def test_end_token_anywhere_in_a_block(where):
    """FC-06: the token at `where` of each row's output is declared an end token of that row; 0 ends without a round."""
    free = tiny.plain(STUB, tiny.request(PROMPTS, 30))
    asked = tiny.request(PROMPTS, 30)
    ends = np.array([[-1, x[where], -1] for x in tiny.outputs(free)])
    asked = asked._replace(eos=jnp.asarray(ends, jnp.int32))
    state = perfect(asked, free)
    wanted = [cut(x, [end]) for x, (_, end, _) in zip(tiny.outputs(free), ends, strict=True)]
    assert tiny.outputs(state) == wanted == tiny.outputs(tiny.plain(STUB, asked))
    assert state.reason.tolist() == [STOP] * BATCH
    assert all((n == 0) == (len(x) == 1) for n, x in zip(state.rounds.tolist(), wanted, strict=True))
    accounts(state)


def test_any_of_several_end_tokens_ends():
    """FC-07, and an end token at the very limit counts as an end."""
    free = tiny.plain(STUB, tiny.request(PROMPTS, 30))
    first = tiny.outputs(free)[0]
    for ends in ([first[3], first[5]], [first[5], 999, first[3]], [first[5]]):
        asked = tiny.request(PROMPTS, 30, eos=ends)
        assert tiny.outputs(perfect(asked, free)) == [cut(x, ends) for x in tiny.outputs(free)]
    limit = len(cut(first, [first[3]]))
    assert perfect(tiny.request(PROMPTS, limit, eos=[first[3]]), free).reason[0] == STOP


@pytest.mark.parametrize("pair", ["stub", "real"])
def test_mates_and_padding_change_nothing(pair):
    """FC-04, FC-05: each row equals its single run, also in a longer prompt bucket and beside rows that end early."""
    loaded = STUB if pair == "stub" else tiny.target("moe")
    static = PERFECT if pair == "stub" else real("moe", True, 16, "accum_logp")
    head = tiny.head(True).params if pair == "real" else None
    options = {"temperature": [0.0, 1.0, 0.0, 0.7], "seed": [1, 2, 3, 4], "budget": [6, 3, 1, 5], "new": [30, 9, 0, 25]}
    answers = tiny.plain(loaded, tiny.request(PROMPTS, **options)).tokens
    rank = [[0, 0, 0, 0, 0, 0], [0, 1, -1, 0, 0, 0]]

    def run(rows, slots):
        mine = {name: [values[i] for i in rows] for name, values in options.items()}
        asked = tiny.request([PROMPTS[i] for i in rows], **mine, slots=slots)
        draft = tiny.coached(answers[np.array(rows)], rank, head)
        state = tiny.decode(static, {"target": loaded.params, "draft": draft}, asked)
        return tiny.outputs(state), state.accept_lengths.tolist()

    tokens, lengths = run([0, 1, 2, 3], 8)
    assert run([3, 2, 1, 0], 8) == (tokens[::-1], lengths[::-1])
    assert run([1, 1, 3, 3], 8) == ([tokens[i] for i in (1, 1, 3, 3)], [lengths[i] for i in (1, 1, 3, 3)])
    if pair == "stub":
        assert run([0, 1, 2, 3], 16) == (tokens, lengths)
    for i in range(4):
        assert run([i], 8) == ([tokens[i]], [lengths[i]])


@functools.lru_cache(None)
def stub_head(answers: tuple[int, ...], rank: int = 0) -> tiny.LoadedHead:
    return tiny.LoadedHead(tiny.CoachedDraft(DEPTH, tiny.VOCAB), tiny.coached([answers], [rank] * DEPTH))


@pytest.mark.parametrize("budget", [1, 2, 3, 8])
def test_generate_with_any_budget(budget):
    """Through `speculate.generate`: FC-23, budgets between buckets, and shallower trees than the head drafts."""
    prompt, sampling = [3, 1, 4, 1, 5], SamplingConfig(max_new_tokens=40)
    wanted = baseline.generate(STUB, prompt, sampling)
    head = stub_head((*prompt, *wanted.token_ids))
    got = speculate.generate(STUB, head, prompt, TreeConfig(budget=budget), sampling)
    assert got.token_ids == wanted.token_ids and got.finish_reason == "length"
    assert got.settings["budget"] == budget and max(got.tree_sizes) <= budget
    assert got.new_tokens == len(got.token_ids) == 1 + sum(got.emitted) and got.rounds == len(got.emitted)
    assert got.acceptance_length == pytest.approx(np.mean(got.emitted))
    if budget == 1:
        assert got.accept_lengths == [1] * 39
    assert wanted.accept_lengths == [1] * 39


def test_generate_a_batch_of_three():
    """Padded to four; each with options of its own, one of them nothing to do."""
    prompts = [[1, 2, 3], [4], list(range(12))]
    sampling = [SamplingConfig(20), SamplingConfig(0), SamplingConfig(9, temperature=1.0, seed=7)]
    head = tiny.head(True)
    loaded = tiny.target("dense")
    together = speculate.generate(loaded, head, prompts, TreeConfig(budget=8), sampling)
    plain = baseline.generate(loaded, prompts, sampling)
    assert isinstance(together, list) and len(together) == 3
    for prompt, option, got, wanted in zip(prompts, sampling, together, plain, strict=True):
        assert got.token_ids == wanted.token_ids and len(got.token_ids) == option.max_new_tokens == got.new_tokens
        assert got.prompt_tokens == len(prompt) and got.settings["seed"] == option.seed
        after_first = max(got.new_tokens - 1, 0)
        assert got.tokens_per_second * got.seconds["decode"] == pytest.approx(after_first)
    assert together[1].rounds == 0 and together[1].accept_lengths == together[1].emitted == together[1].tree_sizes == []


def test_context_used_to_the_last_token():
    """FC-57: prompt + new = the target's context works, one more is refused with the numbers; FC-09: -1 is refused."""
    loaded = dataclasses.replace(STUB, config=tiny.model_config("dense", max_positions=251))
    prompt = [1, 2, 3, 4, 5]
    wanted = baseline.generate(loaded, prompt, SamplingConfig(246))
    head = stub_head((*prompt, *wanted.token_ids))
    got = speculate.generate(loaded, head, prompt, TreeConfig(budget=8), SamplingConfig(246))
    assert got.token_ids == wanted.token_ids and len(got.token_ids) == 246
    assert got.settings["capacity"] == 5 + 246 + DEPTH + 1 == 256  # not one slot to spare
    engine_requests.check(loaded, [1] * 251, SamplingConfig(0))
    with pytest.raises(ConfigError, match="252 tokens, and the target's context is 251"):
        engine_requests.check(loaded, [1] * 252, SamplingConfig(0))
    with pytest.raises(ConfigError, match=r"max_new_tokens=247.*252.*251.*at most 246"):
        speculate.generate(loaded, head, prompt, TreeConfig(budget=8), SamplingConfig(247))
    with pytest.raises(ConfigError, match="max_new_tokens=-1"):
        SamplingConfig(-1)


def test_wrong_options_are_refused_by_name():
    """FC-23."""
    for name in ("budget", "width", "depth"):
        with pytest.raises(ConfigError, match=f"{name}=0"):
            TreeConfig(**{name: 0})
    with pytest.raises(ConfigError, match=r"depth=40.*at most 4"):
        speculate.start(tiny.target("dense"), tiny.head(True), [1], TreeConfig(budget=8, depth=40))


CHEAP = {"xla_backend_optimization_level": 0}  # compiling is all of the time here
QUICK = {
    name: jax.jit(getattr(decoder, name), static_argnums=0, compiler_options=CHEAP) for name in ("prefill", "rounds")
}


# What runs in f32 without its device, and the least that all its kernels take: head dim, slots.
BACKENDS = {"xla": (PLAIN_XLA, 16, CAPACITY), "pallas": (Hopper(), 16, CAPACITY), "tpu": (TPU(), 64, 128)}


@pytest.mark.parametrize("name", ["xla", "pallas", pytest.param("tpu", marks=pytest.mark.slow)])
def test_every_backend_that_runs_f32(name, monkeypatch):
    """A real pair built for it against plain decoding with XLA, also coached to be accepted along branches; then with
    NaN as the embedding of the padding token, which ends the row that says it and reaches no other.

    That plain decoding with the kernels is the same too is in test_gpu_kernels.py.
    """
    for function, quick in QUICK.items():
        monkeypatch.setattr(tiny, function, quick)
    interpreted = functools.partial(tpu_attention.attend, interpret=True)
    monkeypatch.setattr(tpu_attention, "attend", interpreted)
    backend, head_dim, capacity = BACKENDS[name]
    wide = {"hidden_size": 64, "head_dim": head_dim, "intermediate_size": 64}
    config = tiny.head_config(True, **wide | {"num_heads": 4, "num_layers": 1})
    head, shapes = block.build(config, jnp.float32, backend=backend)
    draft_params = tiny.random_like(shapes, 4)
    options = {"budget": [6, 4], "temperature": [0.0, 1.0], "seed": 6}
    asked = tiny.request([[3, 1, 4, 1, 5], [9, 2]], 12, **options)

    def built(backend):
        model, shapes = qwen3.build(tiny.model_config("dense", **wide), jnp.float32, backend)
        return dataclasses.replace(tiny.target("dense"), model=model, params=tiny.random_like(shapes, 3))

    wanted, loaded = tiny.plain(built(PLAIN_XLA), asked, capacity), built(backend)
    assert 0 not in np.concatenate(tiny.outputs(wanted))  # the padding token
    broken = loaded.params | {"embedding": loaded.params["embedding"].at[0].set(jnp.nan)}
    static = tiny.loop(loaded.model, tiny.CoachedDraft(DEPTH, tiny.VOCAB, head), 8, capacity, "best_first", 4)
    for coach in (True, False):
        draft = tiny.coached(wanted.tokens, [[0, 1, 0, 0, 0, 0], [0, 0, -1, 0, 0, 0]], draft_params, coach)
        state = tiny.decode(static, {"target": loaded.params, "draft": draft}, asked)
        equal(state, wanted)
        assert not coach or state.accept_lengths.max() > 2
        again = tiny.decode(static, {"target": broken, "draft": draft}, asked)
        equal(again, wanted)
        assert (again.accept_lengths == state.accept_lengths).all()
    said = tiny.request([[3, 1, 4, 1, 5], [9, 0]], 12, **options)
    alone = tiny.decode(static, {"target": broken, "draft": draft}, said)
    assert alone.reason.tolist() == [LENGTH, NONFINITE] and tiny.outputs(alone) == [tiny.outputs(wanted)[0], []]


@pytest.mark.parametrize(
    "head",
    [pytest.param(tiny.head(True), id="block"), pytest.param(tiny.eagle3(), id="eagle3", marks=pytest.mark.slow)],
)
def test_a_window_changes_no_token(head):
    """Drafts look back at few tokens; they change, and what is committed does not."""
    target = tiny.target("dense")
    prompts, option = [[3, 1, 4, 1, 5, 9, 2, 6], [8], [2, 7, 1, 8]], SamplingConfig(20, eos=())
    plain = speculate.generate(target, None, prompts, None, option)
    runs = [speculate.generate(target, head, prompts, TreeConfig(16, window=w), option) for w in (0, 2)]
    for run in runs:
        assert [r.token_ids for r in run] == [r.token_ids for r in plain]
    assert [r.accept_lengths for r in runs[0]] != [r.accept_lengths for r in runs[1]]
    with pytest.raises(ConfigError, match="window=5: this drafter has no context"):
        speculate.generate(target, load.load_drafter("ngram", target), [1], TreeConfig(8, window=5), option)
