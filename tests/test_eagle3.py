"""The EAGLE-3 head: its tree against a recomputation of every path, decoding with it, and its files."""

import dataclasses
import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file, save_file

import decode
from jetspec_jax import speculate
from jetspec_jax.backends.hopper import Hopper
from jetspec_jax.backends.xla import PLAIN_XLA
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.drafts import eagle3, eagle3_files, families
from jetspec_jax.files import checkpoint, load
from jetspec_jax.loop.choice import choose
from jetspec_jax.loop.contracts import Ends, Seen
from jetspec_jax.loop.processors import Past, Sampling
from jetspec_jax.loop.tree import Rule

EMBED = jnp.asarray(np.random.default_rng(9).standard_normal((tiny.VOCAB, 16)), jnp.float32)
FEATURES = jnp.asarray(np.random.default_rng(8).standard_normal((2, 14, 32)), jnp.float32)
TOKENS = jnp.asarray(np.random.default_rng(7).integers(0, tiny.VOCAB, (2, 24)), jnp.int32)
TARGET = pathlib.Path(__file__).parent / "fixtures" / "peer_parity" / "dense_causal" / "target"
ENDS = Ends(lambda tokens: EMBED[tokens], None)


@functools.partial(jax.jit, static_argnums=0)
def propose(draft, params, state, length, budget):
    """The tree after `length` committed tokens of every row, and the state."""
    past = Past(TOKENS, length, length, jnp.full((2, 1), -1))
    choice = choose(Sampling(None, jnp.zeros(2, jnp.uint32)), past, length < 0, draft.depth, tiny.VOCAB)
    return draft.propose(params, state, choice, budget, ENDS)


@functools.partial(jax.jit, static_argnums=(0, 5))
def extend(draft, params, state, features, where, path):
    return draft.extend(params, state, Seen(features, *where, TOKENS, path), ENDS)


def contexts(draft, params, pieces, lengths):
    """The state after a prompt that is read in pieces of so many rows."""
    state, first = draft.init(params, 2, 24), 0
    for size in pieces:
        count = jnp.clip(jnp.array(lengths) - first, 0, size)
        state = extend(draft, params, state, FEATURES[:, first : first + size], (jnp.full(2, first), count), False)
        first += size
    return state


def check(loaded, tree, row: int, length: int, nodes: int, depth: int, width: int, window: int = 0):
    """A row's tree is EAGLE-2's, with the head's own log-probabilities after every path."""

    @functools.cache
    def children(path):
        ids = jnp.array([*TOKENS[row, 1:length].tolist(), *path], jnp.int32)
        logp = oracles.eagle3_logp(loaded, FEATURES[row, : length - 1], EMBED[ids], path, window)
        best = np.argsort(-logp, kind="stable")[:width]
        return [(int(t), float(logp[t])) for t in best]

    wanted = oracles.eagle2(children, nodes, depth, width)
    size = int(tree.size[row])
    tokens, parents, depths = (np.asarray(x[row]).tolist() for x in (tree.tokens, tree.parents, tree.depths))
    paths = [()]
    for t, parent, d in zip(tokens[1:size], parents[1:size], depths[1:size], strict=True):
        paths.append((*paths[parent], t))
        assert len(paths[-1]) == d
    assert tokens[0] == int(TOKENS[row, length - 1])
    assert paths[1:] == [path for path, _ in wanted]


@pytest.mark.parametrize("pieces, draft_vocab", [
    ((4, 4, 4), 29), ((14,), tiny.VOCAB),
    pytest.param((14,), 29, marks=pytest.mark.slow), pytest.param((4, 4, 4), tiny.VOCAB, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_tree_is_that_of_recomputed_paths(draft_vocab, pieces):
    """Prompts of 9 and 4 tokens; then a round that commits 3 and 1."""
    loaded = tiny.eagle3(draft_vocab=draft_vocab)
    draft = loaded.draft.shaped(Rule(50, width=5), 3)
    state = contexts(draft, loaded.params, pieces, [9, 4])
    budget = jnp.array([50, 7])
    tree, state = propose(draft, loaded.params, state, jnp.array([10, 5]), budget)  # one token more: prefill's
    check(loaded, tree, 0, 10, 50, 3, 5)
    check(loaded, tree, 1, 5, 7, 3, 5)
    # Features of positions 9..11 and 4; their rows wait, and are read with the tokens that were committed after them.
    rows = jnp.stack([FEATURES[0, 9:13], FEATURES[1, 4:8]])
    state = extend(draft, loaded.params, state, rows, (jnp.array([9, 4]), jnp.array([3, 1])), True)
    absorbed = draft.absorb(loaded.params, state, TOKENS, ENDS)  # as plain steps do: the last row alone waits on
    assert absorbed.count.tolist() == [1, 1] and absorbed.start.tolist() == [11, 4]
    for one in (state, absorbed):
        tree, _ = propose(draft, loaded.params, one, jnp.array([13, 6]), budget)
        check(loaded, tree, 0, 13, 50, 3, 5)
        check(loaded, tree, 1, 6, 7, 3, 5)


OPTIONS = st.fixed_dictionaries({
    "max_new_tokens": st.sampled_from([1, 12, 20]),
    "temperature": st.sampled_from([0.0, 0.7, 1.0]),
    "seed": st.integers(0, 9),
    "top_k": st.sampled_from([0, 5]),
    "top_p": st.sampled_from([1.0, 0.8]),
    "repetition_penalty": st.sampled_from([1.0, 1.3]),
    "logit_bias": st.sampled_from([(), ((3, 4.0), (36, -100.0))]),
    "eos": st.sampled_from([(), (5, 6)]),
    "budget": st.sampled_from([1, 2, 7, 16]),
})  # fmt: skip
# A row with every option, so that all examples run the same programs.
EVERY = SamplingConfig(
    20, 0.9, 1, top_k=9, top_p=0.9, repetition_penalty=1.2, logit_bias=((3, 4.0), (36, -9.0)), eos=(5,), budget=16
)
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [8], [2, 7, 1, 8]]


@pytest.mark.parametrize("kind", ["dense", *(pytest.param(n, marks=pytest.mark.slow) for n in ("moe", "llama"))])
@settings(max_examples=12, derandomize=True)  # rounding at a near-tie may part the two, so the examples are fixed
@given(asked=st.tuples(OPTIONS, OPTIONS))
def test_tokens_are_those_of_plain_decoding(kind, asked):
    target, head = tiny.target(kind), tiny.eagle3()
    options = [*(SamplingConfig(**a) for a in asked), EVERY]
    fast = speculate.generate(target, head, PROMPTS, TreeConfig(16), options, prefill_chunk=4)
    plain = speculate.generate(target, None, PROMPTS, None, options)
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]


@pytest.mark.slow  # as DSpark's, in the default run
def test_a_batch_of_eight_accepts_and_equals_single_rows():
    target, head = tiny.target("dense"), tiny.eagle3(draft_vocab=tiny.VOCAB)
    prompts = [[i, i + 1, 7] for i in range(8)]
    together = speculate.generate(target, head, prompts, TreeConfig(32), SamplingConfig(24, eos=()))
    alone = [speculate.generate(target, head, p, TreeConfig(32), SamplingConfig(24, eos=())) for p in prompts]
    for a, b in zip(together, alone, strict=True):
        assert (a.token_ids, a.accept_lengths, a.tree_sizes) == (b.token_ids, b.accept_lengths, b.tree_sizes)
    assert max(n for r in together for n in r.accept_lengths) >= 3  # 10 of 37 tokens a depth: some paths are right


@pytest.mark.parametrize("window", [1, 2, 5])
def test_a_window_does_not_depend_on_the_rounds_before(window):
    """Rows of a round that wait are in the window like those of a prompt: the tree is that of a fresh start."""
    loaded = tiny.eagle3()
    draft = loaded.draft.shaped(Rule(50, width=5), 3).windowed(window)
    lengths, budget = jnp.array([13, 6]), jnp.array([50, 50])
    state = contexts(draft, loaded.params, (14,), [9, 4])
    _, state = propose(draft, loaded.params, state, jnp.array([10, 5]), budget)
    rows = jnp.stack([FEATURES[0, 9:13], FEATURES[1, 4:8]])
    state = extend(draft, loaded.params, state, rows, (jnp.array([9, 4]), jnp.array([3, 1])), True)
    tree, _ = propose(draft, loaded.params, state, lengths, budget)
    fresh, _ = propose(draft, loaded.params, contexts(draft, loaded.params, (14,), [12, 5]), lengths, budget)
    for one, other in zip(tree[:4], fresh[:4], strict=True):
        np.testing.assert_array_equal(one, other)
    whole, _ = propose(draft.windowed(0), loaded.params, state, lengths, budget)
    assert (whole.tokens != tree.tokens).any()
    for row, length in enumerate(lengths.tolist()):
        check(loaded, tree, row, length, 50, 3, 5, window)


@pytest.mark.slow  # the scorer's in the default run is of the same rule
def test_every_depth_is_ranked_under_the_noise_of_its_position():
    """Noise that leaves no choice: the best path is what it says, position by position."""
    loaded, length = tiny.eagle3(draft_vocab=tiny.VOCAB), jnp.array([10, 5])
    draft, row = loaded.draft.shaped(Rule(8, width=3), 3), jnp.array([[5, 9, 2, 7], [3, 1, 8, 0]])
    past = Past(TOKENS, length, length, jnp.full((2, 1), -1))
    warm = Sampling(jnp.ones(2), jnp.zeros(2, jnp.uint32))
    choice = choose(warm, past, length < 0, 3, tiny.VOCAB)._replace(noise=1000 * jax.nn.one_hot(row, tiny.VOCAB))
    state = contexts(draft, loaded.params, (14,), [9, 4])
    tree, _ = draft.propose(loaded.params, state, choice, jnp.array([8, 8]), ENDS)
    assert tree.tokens[:, 1:4].tolist() == row[:, :3].tolist() and tree.parents[:, 1:4].tolist() == [[0, 1, 2]] * 2


def test_only_the_dynamic_tree():
    with pytest.raises(ConfigError, match="tree=accum_logp: an EAGLE head"):
        tree = TreeConfig(8, builder="accum_logp")
        speculate.generate(tiny.target("dense"), tiny.eagle3(), [1], tree, SamplingConfig(3))
    with pytest.raises(ConfigError, match="depth=5"):
        speculate.generate(tiny.target("dense"), tiny.eagle3(), [1], TreeConfig(8, depth=5), SamplingConfig(3))


PUBLISHED = {
    "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "vocab_size": 37, "draft_vocab_size": 29,
    "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6,
    "intermediate_size": 20, "rms_norm_eps": 1e-6, "rope_theta": 1e3, "max_position_embeddings": 512,
    "bos_token_id": 1, "pad_token_id": 0, "transformers_version": "4.53.2", "tie_word_embeddings": False,
}  # fmt: skip


def read(raw, layers=36):
    family = families.of_config(raw, "h/config.json")
    assert family.name == "eagle3"
    target = tiny.model_config("dense", num_layers=layers)
    return family.config(raw, "h/config.json", lambda line: None, target)


def test_published_configurations():
    """Files name no layer, or what is the input of a layer, or (in a table of their own) its output."""
    key = "eagle_aux_hidden_state_layer_ids"
    assert read(PUBLISHED).tap_layers == (1, 17, 32)
    assert read(PUBLISHED | {key: [2, 18, 33]}).tap_layers == (1, 17, 32)
    assert read(PUBLISHED | {"eagle_config": {key: [1, 17, 32], "use_aux_hidden_state": True}}).tap_layers == (
        1,
        17,
        32,
    )
    assert not read(PUBLISHED).qk_norm and read(PUBLISHED | {"model_type": "qwen3"}).qk_norm
    assert read(PUBLISHED | {"draft_vocab_size": None}).draft_vocab_size == 37


@pytest.mark.parametrize(
    "change, said",
    [
        ({"num_hidden_layers": 2}, "an EAGLE-3 head has 1 layer"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "EAGLE-1 or 2"),
        ({"draft_vocab_size": 38}, "draft_vocab_size=38"),
        ({"target_hidden_size": 32}, "no adapter"),
        ({"markov_rank": 8}, "DSpark"),
        ({"final_logit_softcapping": 30.0}, "softcap"),
        ({"strange": 1}, "not understood"),
        ({"architectures": ["LlamaForCausalLMEagle"]}, "EAGLE"),
    ],
)
def test_refused_configurations(change, said):
    with pytest.raises(ConfigError) as error:
        read(PUBLISHED | change)
    assert said in str(error.value) and "\n" not in str(error.value)


def saved(tmp_path, **changes):
    loaded = tiny.eagle3()
    checkpoint.save_head(tmp_path / "head", loaded.config, loaded.params | changes, {"family": "eagle3"})
    return tmp_path / "head"


def test_files_give_the_head_again(tmp_path, capsys):
    folder, own = saved(tmp_path), tiny.eagle3()
    raw = json.loads((folder / "config.json").read_text())
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"]
    target = dataclasses.replace(tiny.target("dense"), dtype="float32")
    head = load.load_head(folder, target)
    assert head.family == "eagle3" and head.config == dataclasses.replace(own.config, depth=8, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, head.params, own.params)
    assert capsys.readouterr().err == ""
    for said, window in ((None, 0), (3, 3)):
        (folder / "jetspec.json").write_text(json.dumps({"context_window": said}))
        assert load.load_head(folder, target).draft == head.draft.windowed(window)
    fast = speculate.generate(target, head, PROMPTS, TreeConfig(16), SamplingConfig(12, eos=()))
    plain = speculate.generate(target, None, PROMPTS, None, SamplingConfig(12, eos=()))
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]


def test_a_table_of_other_numbers_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="d2t is stored as float32; whole numbers are needed"):
        load.load_head(saved(tmp_path, d2t=jnp.zeros(29)), tiny.target("dense"))
    file = saved(tmp_path) / "model.safetensors"
    tensors = load_file(file)
    save_file(tensors | {"d2t": tensors["d2t"].astype(np.int64) + 2**32}, file)
    with pytest.raises(ConfigError, match=r"d2t holds 429496[0-9]*, which is out of int32's range"):
        load.load_head(file.parent, tiny.target("dense"))
    with pytest.raises(ConfigError, match=r"fc.weight is stored as int32; only unquantised floats"):
        load.load_head(saved(tmp_path, fc=jnp.zeros((32, 16), jnp.int32)), tiny.target("dense"))


@pytest.mark.parametrize("where, value, said", [(3, 900, "leads to token 903"), (1, -1, "leads to token 0 twice")])
def test_a_broken_table_of_tokens_is_refused(tmp_path, where, value, said):
    table = np.zeros(29, np.int32)
    table[where] = value
    with pytest.raises(ConfigError, match=said):
        load.load_head(saved(tmp_path, d2t=jnp.asarray(table)), tiny.target("dense"))
    assert eagle3_files.check(tiny.eagle3().config, tiny.eagle3().params) is None


@pytest.mark.slow  # as DSpark's, in the default run
def test_the_command_draws_its_tree(tmp_path, capsys):
    """The default method is the head's family; trees of other families are refused by name."""
    target = load.load_target(TARGET)
    t = target.config
    config = dataclasses.replace(
        tiny.eagle3().config, vocab_size=t.vocab_size, draft_vocab_size=t.vocab_size, hidden_size=t.hidden_size,
        num_target_layers=t.num_layers, tap_layers=(0, 1, t.num_layers - 1),
    )  # fmt: skip
    _, shapes = eagle3.build(config, jnp.float32)
    checkpoint.save_head(tmp_path / "head", config, tiny.random_like(shapes, 3))
    command = ["--target", str(TARGET), "--head", str(tmp_path / "head"), "--prompt_ids=1,2,3", "--max_new_tokens=9"]
    assert decode.main([*command, "--json", "--compare", "--budget=20", "--ignore_eos"]) == 0
    got = json.loads(capsys.readouterr().out)
    assert got["method"] == "eagle3" and got["compare"]["equal"] and set(got["tree_sizes"]) == {20}
    assert got["settings"]["width"] == 10 and got["settings"]["depth"] == 8
    assert decode.main([*command, "--tree=best_first", "--method=eagle3"]) == 2
    assert "contradicts --method eagle3" in capsys.readouterr().err
    assert decode.main([*command, "--method=ddtree"]) == 1
    assert "is eagle3; use --method eagle3" in capsys.readouterr().err


@pytest.mark.slow  # the kernels draw those of blocks in the default run
def test_the_kernels_draw_the_same_tree():
    """In the interpreter, f32: head sizes that the kernels take, and a tree whose rows are no power of two."""
    config = dataclasses.replace(tiny.eagle3().config, head_dim=16, num_heads=4)
    trees = []
    for backend in (PLAIN_XLA, Hopper()):
        draft, shapes = eagle3.build(config, jnp.float32, backend)
        params = tiny.random_like(shapes, 5) | {"d2t": tiny.eagle3().params["d2t"]}
        draft = draft.shaped(Rule(12, width=5), 3)
        state = contexts(draft, params, (14,), [9, 4])
        trees.append(propose(draft, params, state, jnp.array([10, 5]), jnp.array([12, 12]))[0])
    for a, b in zip(trees[0][:4], trees[1][:4], strict=True):
        np.testing.assert_array_equal(a, b)
