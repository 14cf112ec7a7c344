"""The DSpark head: its chain and its tree against a recomputation of every path, decoding with it, and its files."""

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
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.drafts import dspark, families
from jetspec_jax.evals import probe, trace
from jetspec_jax.files import checkpoint, load
from jetspec_jax.loop.choice import NOISE_SHARE, choose, noise_rows
from jetspec_jax.loop.contracts import Ends
from jetspec_jax.loop.processors import Past, Sampling
from jetspec_jax.loop.tree import Rule

EMBED = jnp.asarray(np.random.default_rng(9).standard_normal((tiny.VOCAB, 16)), jnp.float32)
FEATURES = jnp.asarray(np.random.default_rng(8).standard_normal((2, 9, 32)), jnp.float32)
TOKENS = jnp.asarray(np.random.default_rng(7).integers(0, tiny.VOCAB - 1, (2, 24)), jnp.int32)
TARGET = pathlib.Path(__file__).parent / "fixtures" / "peer_parity" / "dense_causal" / "target"
ENDS = Ends(lambda tokens: EMBED[tokens], lambda hidden: 0.3 * hidden @ EMBED.T)
CONTEXTS = [9, 4]
KINDS = ["vanilla", "gated", "rnn"]


@functools.partial(jax.jit, static_argnums=0)
def propose(draft, params, budget, temperature=None):
    """The trees after contexts of 9 and 4 rows, and what the head makes of its own greedy chain there."""
    count = jnp.asarray(CONTEXTS)
    length = count + 1
    state = draft.extend(params, draft.init(params, 2, 24), tiny.seen(FEATURES, count), tiny.NO_ENDS)
    past = Past(TOKENS, length, length, jnp.full((2, 1), -1))
    choice = choose(Sampling(temperature, jnp.arange(2, dtype=jnp.uint32)), past, length < 0, draft.depth, tiny.VOCAB)
    tree, _ = draft.propose(params, state, choice, budget, ENDS)
    hidden, _ = draft.hidden(params, state, choice.anchor, length, ENDS)
    chain = draft.guesses(params, state, choice.anchor, length, ENDS)
    before = jnp.concatenate([choice.anchor[:, None], chain[:, :-1]], 1)
    return tree, chain, draft.confidence(params, hidden, before)


def recomputed(loaded, row: int):
    """Hidden states of all slots in f64, and log-probabilities after a path that begins with the anchor."""
    context, slots = CONTEXTS[row], loaded.config.block_size
    block = [int(TOKENS[row, context])] + [loaded.config.mask_token_id] * (slots - 1)
    hidden = oracles.head_hidden(loaded.config, loaded.params, EMBED[jnp.array(block)], FEATURES[row, :context])
    base = 0.3 * hidden @ np.asarray(EMBED, np.float64).T

    def logp(path):
        logits = oracles.dspark_logits(loaded.config, loaded.params, hidden, base, [block[0], *path])
        return np.log(oracles.softmax(logits))

    return block[0], hidden, logp


@pytest.mark.parametrize("kind", KINDS)
def test_the_chain_is_that_of_recomputed_paths(kind):
    loaded = tiny.dspark(kind)
    tree, chain, trust = propose(loaded.draft.shaped(Rule(8, width=1), 4), loaded.params, jnp.array([8, 3]))
    assert tree.size.tolist() == [5, 3]  # a block of 4 slots drafts 4 tokens; the anchor is the fifth
    for row in range(2):
        anchor, hidden, logp = recomputed(loaded, row)
        path, trusted = [], []
        for slot in range(4):
            w1 = np.asarray(loaded.params["markov"]["w1"], np.float64)[[anchor, *path][-1]]
            p = {name: np.asarray(x, np.float64) for name, x in loaded.params["confidence"].items()}
            trusted.append(np.concatenate([hidden[slot], w1]) @ p["proj"][0] + p["bias"][0])
            after = logp(path)
            drafted = np.asarray(tree.logits[row, slot], np.float64)
            tiny.close(drafted - np.log(np.exp(drafted).sum()), after)
            path.append(int(after.argmax()))
        size = int(tree.size[row])
        assert tree.tokens[row, :size].tolist() == [anchor, *path][:size] and chain[row].tolist() == path
        assert tree.parents[row].tolist() == [*range(-1, size - 1), *[-1] * (8 - size)]
        tiny.close(trust[row], trusted)


def test_a_sampled_chain_knows_the_noise_of_its_positions():
    loaded, temperature = tiny.dspark(), jnp.array([0.7, 1.3])
    rule = Rule(5, width=1, sharpness=2.0)
    tree, greedy, _ = propose(loaded.draft.shaped(rule, 4), loaded.params, jnp.array([5, 5]), temperature)
    sampling = Sampling(temperature, jnp.arange(2, dtype=jnp.uint32))
    noise = np.asarray(noise_rows(sampling, jnp.asarray(CONTEXTS) + 1, 4, tiny.VOCAB), np.float64)
    for row in range(2):
        _, _, logp = recomputed(loaded, row)
        path = []
        for slot in range(4):
            path.append(int((logp(path) / float(temperature[row]) + NOISE_SHARE * noise[row, slot]).argmax()))
        assert tree.tokens[row, 1:].tolist() == path != greedy[row].tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_the_tree_is_that_of_recomputed_paths(kind):
    loaded = tiny.dspark(kind)
    tree, *_ = propose(loaded.draft.shaped(Rule(64, width=3), 4), loaded.params, jnp.array([64, 40]))
    for row in range(2):
        anchor, _, logp = recomputed(loaded, row)

        @functools.cache
        def children(path, logp=logp):
            after = logp(path)
            return [(int(t), float(after[t])) for t in np.argsort(-after, kind="stable")[:3]]

        size = int(tree.size[row])
        wanted = oracles.eagle2(children, size, 4, dspark.FRONTIER)
        tokens, parents = (np.asarray(x[row]).tolist() for x in (tree.tokens, tree.parents))
        paths = [()]
        for token, parent in zip(tokens[1:size], parents[1:size], strict=True):
            paths.append((*paths[parent], token))
        assert tokens[0] == anchor and paths[1:] == [path for path, _ in wanted]
        assert len({children((token,))[0] for token, _ in children(())}) == 3  # siblings have children of their own


@pytest.mark.slow  # the scorer's in the default run is of the same rule
@pytest.mark.parametrize("width", [pytest.param(1, id="chain"), pytest.param(3, id="tree")])
def test_every_depth_is_ranked_under_the_noise_of_its_position(width):
    """Noise that leaves no choice: the best path is what it says, position by position."""
    loaded = tiny.dspark()
    draft, row = loaded.draft.shaped(Rule(8, width=width), 4), jnp.array([[5, 9, 2, 7, 11], [3, 1, 8, 8, 0]])
    length = jnp.asarray(CONTEXTS) + 1
    past = Past(TOKENS, length, length, jnp.full((2, 1), -1))
    warm = Sampling(jnp.ones(2), jnp.zeros(2, jnp.uint32))
    choice = choose(warm, past, length < 0, 4, tiny.VOCAB)._replace(noise=1000 * jax.nn.one_hot(row, tiny.VOCAB))
    state = draft.extend(loaded.params, draft.init(loaded.params, 2, 24), tiny.seen(FEATURES, length - 1), ENDS)
    tree, _ = draft.propose(loaded.params, state, choice, jnp.array([8, 8]), ENDS)
    assert tree.tokens[:, 1:5].tolist() == row[:, :4].tolist() and tree.parents[:, 1:5].tolist() == [[0, 1, 2, 3]] * 2


def test_a_calibration_divides_the_confidence():
    loaded, temperature = tiny.dspark(), (0.5, 3.0, 1.0, 2.0)
    draft = loaded.draft.shaped(Rule(4, width=1), 3)
    asked = jax.random.normal(jax.random.key(0), (2, 3, 16)), TOKENS[:, :3]
    plain = draft.confidence(loaded.params, *asked)
    tiny.close(draft.calibrated(temperature).confidence(loaded.params, *asked), plain / jnp.array(temperature[:3]))


def test_without_a_markov_head_all_parents_share_their_children():
    loaded = tiny.dspark(markov_rank=0, confidence_markov=False)
    tree, chain, trust = propose(loaded.draft.shaped(Rule(12, width=3), 4), loaded.params, jnp.array([12, 12]))
    logp = recomputed(loaded, 0)[-1]
    assert chain[0].tolist() == [int(logp([0] * slot).argmax()) for slot in range(4)]
    assert trust.shape == (2, 4) and tree.size.tolist() == [12, 12]
    second = {int(t) for t, d in zip(tree.tokens[0], tree.depths[0], strict=True) if d == 2}
    assert second <= set(np.argsort(-logp([0]))[:3].tolist())


OPTIONS = st.fixed_dictionaries({
    "max_new_tokens": st.sampled_from([1, 12, 20]),
    "temperature": st.sampled_from([0.0, 0.7, 1.0]),
    "seed": st.integers(0, 9),
    "top_k": st.sampled_from([0, 5]),
    "repetition_penalty": st.sampled_from([1.0, 1.3]),
    "logit_bias": st.sampled_from([(), ((3, 4.0), (36, -100.0))]),
    "eos": st.sampled_from([(), (5, 6)]),
})  # fmt: skip
EVERY = {
    "max_new_tokens": 20, "temperature": 0.9, "top_k": 9, "repetition_penalty": 1.1, "logit_bias": ((7, 1.0),),
    "eos": (9,),
}  # fmt: skip
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [8], [0, 1, 7], [5, 4]]
CHAIN, TREE = TreeConfig(5, width=1), TreeConfig(16)


@pytest.mark.parametrize("markov, tree", [
    pytest.param("vanilla", CHAIN, marks=pytest.mark.slow), ("gated", TREE),
    pytest.param("rnn", TreeConfig(8, depth=2), marks=pytest.mark.slow),
])  # fmt: skip
@settings(max_examples=6, derandomize=True)
@given(asked=st.lists(OPTIONS, min_size=3, max_size=3))
def test_tokens_are_those_of_plain_decoding(markov, tree, asked):
    """Each row has options of its own; the last has all of them, so that one program serves every example."""
    options = [SamplingConfig(**row) for row in (*asked, EVERY)]
    target, head = tiny.target("dense"), tiny.dspark(markov)
    fast = speculate.generate(target, head, PROMPTS, tree, options, prefill_chunk=4)
    plain = speculate.generate(target, None, PROMPTS, None, options)
    assert [r.token_ids for r in fast] == [r.token_ids for r in plain]


def test_a_batch_of_eight_accepts_and_equals_single_rows():
    target, head, option = tiny.target("dense"), tiny.dspark(), SamplingConfig(24, eos=())
    prompts = [[i, i + 1, 7] for i in range(8)]
    together = speculate.generate(target, head, prompts, TREE, option)
    for a, prompt in zip(together[::3], prompts[::3], strict=True):
        b = speculate.generate(target, head, prompt, TREE, option)
        assert (a.token_ids, a.accept_lengths, a.tree_sizes) == (b.token_ids, b.accept_lengths, b.tree_sizes)
    assert max(n for r in together for n in r.accept_lengths) >= 3
    chains = speculate.generate(target, head, prompts, CHAIN, option)
    assert [r.token_ids for r in chains] == [r.token_ids for r in together]
    assert sum(r.rounds for r in together) < sum(r.rounds for r in chains)


def test_the_doctors_probe_runs_the_chain():
    """At the anchors of real rounds it finds the lengths that were accepted there."""
    target, head, prompt = tiny.target("dense"), tiny.dspark(), PROMPTS[2]
    rounds, result = trace.record(target, head, prompt, CHAIN, SamplingConfig(40, eos=()))
    lengths = [len(done.accepted) for done in rounds]
    anchors = len(prompt) + np.cumsum([0, *lengths])[:-1]
    whole = anchors + head.draft.depth < len(prompt) + 40
    found = probe.texts(target, [prompt], [result.token_ids], head.draft.depth)
    padded = np.resize(anchors[whole], (1, probe.ANCHORS)).astype(np.int32)
    runs, _ = probe.runs(target, head, found._replace(anchors=padded), head.config)
    assert runs.tolist() == np.resize(np.array(lengths)[whole], probe.ANCHORS).tolist() and max(lengths) >= 3


def test_no_other_tree_is_drawn():
    with pytest.raises(ConfigError, match="tree=accum_logp: a DSpark head draws a chain or PCTree's tree"):
        tree = TreeConfig(8, builder="accum_logp")
        speculate.generate(tiny.target("dense"), tiny.dspark(), [1], tree, SamplingConfig(3))
    with pytest.raises(ConfigError, match="depth=5"):
        speculate.generate(tiny.target("dense"), tiny.dspark(), [1], TreeConfig(8, depth=5), SamplingConfig(3))
    with pytest.raises(ConfigError, match="trained without a confidence"):
        loaded = tiny.dspark(confidence=False, confidence_markov=False)
        loaded.draft.confidence(loaded.params, jnp.zeros((1, 4, 16)), jnp.zeros((1, 4), jnp.int32))


PUBLISHED = {
    "architectures": ["Qwen3DSparkModel"], "model_type": "qwen3", "vocab_size": 37, "hidden_size": 16,
    "num_hidden_layers": 2, "num_target_layers": 36, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 6,
    "intermediate_size": 20, "rms_norm_eps": 1e-6, "rope_theta": 1e3, "max_position_embeddings": 512, "block_size": 7,
    "mask_token_id": 36, "target_layer_ids": [1, 9, 17, 25, 33], "num_anchors": 512, "enable_confidence_head": True,
    "confidence_head_with_markov": True, "markov_rank": 6, "markov_head_type": "vanilla", "attention_bias": False,
    "layer_types": ["full_attention", "full_attention"], "tie_word_embeddings": False, "use_cache": True,
    "sliding_window": None, "use_sliding_window": False, "max_window_layers": 36, "transformers_version": "4.53.2",
}  # fmt: skip


def read(raw):
    family = families.of_config(raw, "h/config.json")
    assert family.name == "dspark"
    return family.config(raw, "h/config.json", lambda line: None, None)


def test_published_configurations():
    config = read(PUBLISHED)
    assert (config.depth, config.block_size, config.tap_layers) == (7, 7, (1, 9, 17, 25, 33)) == (
        7, 7, config.usual_taps
    )  # fmt: skip
    assert (config.markov_rank, config.markov, config.confidence, config.confidence_markov) == (
        6,
        "vanilla",
        True,
        True,
    )
    assert read(config.to_hf() | {"num_anchors": 64}) == dataclasses.replace(config, num_anchors=64, dtype="bfloat16")
    bare = {"markov_rank": 0, "markov_head_type": None, "enable_confidence_head": False}
    assert read(PUBLISHED | bare).markov_rank == 0 and not read(PUBLISHED | bare).confidence_markov


@pytest.mark.parametrize(
    "change, said",
    [
        ({"target_layer_ids": [-1, 9]}, "-1 is the embedding's output"),
        ({"target_layer_ids": [36]}, "36 is not a layer"),
        ({"target_layer_ids": None}, "at least one tapped layer"),
        ({"markov_head_type": "gru"}, "use vanilla, gated, rnn"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"markov_rank": 0}, "confidence_head_with_markov=True"),
        ({"mask_token_id": 37}, "mask_token_id=37"),
        ({"block_size": None}, "block_size"),
        ({"model_type": "gemma4"}, "only DSpark heads of qwen3"),
        ({"dflash_config": {"mask_token_id": 3}}, "a head of DSpark in this layout"),
        ({"emb_dim": 8}, "Domino"),
        ({"strange": 1}, "not understood"),
    ],
)
def test_refused_configurations(change, said):
    with pytest.raises(ConfigError) as error:
        read(PUBLISHED | change)
    assert said in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize("kind", KINDS)
def test_files_give_the_head_again(tmp_path, capsys, kind):
    own, target = tiny.dspark(kind), dataclasses.replace(tiny.target("dense"), dtype="float32")
    checkpoint.save_head(tmp_path / "head", own.config, own.params, {"family": "dspark"})
    head = load.load_head(tmp_path / "head", target)
    assert head.family == "dspark" and head.config == dataclasses.replace(own.config, dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, head.params, own.params)
    assert capsys.readouterr().err == ""


def test_published_names_and_copies_of_the_target(tmp_path, capsys):
    """Linear layers of torch are [out, in]; copies of the target's two ends are expected, those of another are not."""
    own, target = tiny.dspark("rnn"), tiny.target("dense")
    checkpoint.save_head(tmp_path / "head", own.config, own.params)
    file = tmp_path / "head" / "model.safetensors"
    tensors = load_file(file)
    shapes = {name: x.shape for name, x in tensors.items() if "head" in name}
    assert shapes == {
        "markov_head.markov_w1.weight": (37, 6), "markov_head.markov_w2.weight": (37, 6),
        "markov_head.joint_proj.weight": (18, 28), "markov_head.joint_proj.bias": (18,),
        "confidence_head.proj.weight": (1, 22), "confidence_head.proj.bias": (1,),
    }  # fmt: skip
    copies = {name: np.zeros((37, 16), np.float32) for name in ("embed_tokens.weight", "lm_head.weight")}
    save_file(tensors | copies, file)
    load.load_head(tmp_path / "head", target)
    assert capsys.readouterr().err == ""
    save_file(tensors | copies | {"lm_head.weight": np.zeros((40, 16), np.float32)}, file)
    load.load_head(tmp_path / "head", target)
    assert "lm_head.weight ignored" in capsys.readouterr().err
    del tensors["markov_head.joint_proj.bias"]
    save_file(tensors, file)
    with pytest.raises(ConfigError, match=r"1 tensor is missing: markov_head.joint_proj.bias"):
        load.load_head(tmp_path / "head", target)


@pytest.mark.slow  # the command draws EAGLE-3's tree in the default run
def test_the_command_draws_chain_and_tree(tmp_path, capsys):
    """The default is the chain, and the tree where options ask for one; other families' methods are refused by name."""
    target = load.load_target(TARGET)
    t = target.config
    config = dataclasses.replace(
        tiny.dspark().config, vocab_size=t.vocab_size, hidden_size=t.hidden_size, num_target_layers=t.num_layers,
        tap_layers=(0, 1, t.num_layers - 1), mask_token_id=t.vocab_size - 1,
    )  # fmt: skip
    _, shapes = dspark.build(config, jnp.float32)
    checkpoint.save_head(tmp_path / "head", config, tiny.random_like(shapes, 3))
    command = ["--target", str(TARGET), "--head", str(tmp_path / "head"), "--prompt_ids=1,2,3", "--max_new_tokens=9"]
    for more, method, size, width in (([], "dspark", 5, 1), (["--budget=12"], "pctree", 12, 4)):
        assert decode.main([*command, *more, "--json", "--compare", "--ignore_eos"]) == 0
        got = json.loads(capsys.readouterr().out)
        assert got["method"] == method and got["compare"]["equal"] and set(got["tree_sizes"]) == {size}
        assert got["settings"]["width"] == width and got["settings"]["depth"] == 4
    for more in (["--method=dspark", "--width=2"], ["--method=pctree", "--tree=best_first"]):
        assert decode.main([*command, *more]) == 2
        assert f"contradicts {more[0].replace('=', ' ')}" in capsys.readouterr().err
    assert decode.main([*command, "--method=ddtree"]) == 1
    assert "is dspark; use --method dspark or pctree" in capsys.readouterr().err
