"""The scorer beside a block head: its rows against a recomputation, a new one that changes nothing, and decoding."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny

from jetspec_jax import speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.drafts import counts, scorer
from jetspec_jax.evals import draw, trace
from jetspec_jax.loop.choice import NOISE_SHARE, choose, noise_rows
from jetspec_jax.loop.contracts import Ends
from jetspec_jax.loop.processors import Past, Sampling
from jetspec_jax.loop.tree import Rule, foretold

RANK, INNER = 6, 5
EMBED = jnp.asarray(np.random.default_rng(9).standard_normal((tiny.VOCAB, 16)), jnp.float32)
FEATURES = jnp.asarray(np.random.default_rng(8).standard_normal((2, 9, 32)), jnp.float32)
TOKENS = jnp.asarray(np.random.default_rng(7).integers(0, tiny.VOCAB - 1, (2, 24)), jnp.int32)
ENDS = Ends(lambda tokens: EMBED[tokens], lambda hidden: 0.3 * hidden @ EMBED.T)


@functools.partial(jax.jit, static_argnums=0)
def propose(draft, params, temperature=None):
    """Trees after contexts of 9 and 4 rows, with the hidden states that they are made of."""
    count = jnp.array([9, 4])
    length = count + 1
    state = draft.extend(params, draft.init(params, 2, 24), tiny.seen(FEATURES, count), tiny.NO_ENDS)
    past = Past(TOKENS, length, length, jnp.full((2, 1), -1))
    choice = choose(Sampling(temperature, jnp.arange(2, dtype=jnp.uint32)), past, length < 0, draft.depth, tiny.VOCAB)
    tree, _ = draft.propose(params, state, choice, jnp.array([12, 12]), ENDS)
    return tree, draft.hidden(params, state, choice.anchor, length, ENDS)[0]


def table(params, hidden, logits, width: int, scale: float = 1.0, noise=0.0, token=None):
    """Log-probabilities [D, W, W] of a row's candidates after each candidate above, in f64, and their tokens.

    token: the candidates [D, W]; None are the best `width`.
    """
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}
    hidden = np.asarray(hidden, np.float64)
    logits = scale * (np.asarray(logits, np.float64) + noise)
    token = np.argsort(-logits, axis=1, kind="stable")[:, :width] if token is None else token
    normed = lambda x: x / np.sqrt((x * x).mean(-1, keepdims=True) + scorer.EPS)
    rows, slots = normed(np.asarray(EMBED, np.float64)), normed(hidden)

    def parent(a, slot):
        if "down" in p:
            gate, up = np.split(slot @ p["slot"] + rows[a] @ p["parent"], 2)
            return (gate / (1 + np.exp(-gate)) * up) @ p["down"]
        return (rows[a] @ p["parent"]) * (1 + slot @ p["gate"] if "gate" in p else 1)

    def bias(d, a, slot):
        if "lift" in p:
            return [p["strength"][d] * p["lift"][a][p["next"][a] == b].sum() / 256 for b in token[d]]
        if "w1" in p:
            return p["w2"][token[d]] @ p["w1"][a]
        return (rows[token[d]] @ p["child"]) @ parent(a, slot)

    found = np.zeros((len(logits), width, width))
    for d in range(len(logits)):
        for a in range(width):
            raised = logits[d].copy()
            if d:
                raised[token[d]] += scale * np.asarray(bias(d, token[d - 1, a], slots[d]))
            found[d, a] = (raised - np.log(np.exp(raised - raised.max()).sum()) - raised.max())[token[d]]
    return found, token


@pytest.mark.parametrize(
    "builder, reference", [("best_first", oracles.best_first), ("accum_logp", oracles.accum_logp_table)]
)
@pytest.mark.parametrize(
    "causal, kind",
    [
        *((True, kind) for kind in scorer.KINDS),
        *(pytest.param(False, kind, marks=pytest.mark.slow) for kind in ("product", "swiglu")),
    ],
)
def test_trees_are_those_of_recomputed_rows(builder, reference, causal, kind):
    head = tiny.scored(causal, inner=INNER * (kind == "swiglu"), kind=kind)
    tree, hidden = propose(head.draft.shaped(Rule(12, builder, 4), 4), head.params)
    told = foretold(tree)
    for row in range(2):
        logp, token = table(head.params["scorer"], hidden[row], tree.logits[row], 4)
        wanted = reference(logp.astype(np.float32), token, int(tree.tokens[row, 0]), 12)
        got = list(zip(*(x[row].tolist() for x in (tree.tokens, tree.parents, tree.depths)), strict=True))
        assert got == wanted
        place, paths = [0], [0.0]
        for t, parent, d in wanted[1:]:
            w = list(token[d - 1]).index(t)
            paths.append(paths[parent] + logp[d - 1, place[parent] if d > 1 else 0, w])
            place.append(w)
        np.testing.assert_allclose(tree.scores.node[row], paths, atol=1e-5)
        own = [p - paths[parent] for p, (_, parent, _) in zip(paths, wanted, strict=True)]
        np.testing.assert_allclose(told[row], [0.0, *own[1:]], atol=1e-5)
        best = logp[0, 0]
        for d in range(4):
            best = (best[:, None] + logp[d]).max(0) if d else best
            np.testing.assert_allclose(tree.scores.spine[row, d], best.max(), atol=1e-5)


@pytest.mark.parametrize("kind", [kind for kind in scorer.KINDS if kind != "counts"])
def test_rows_of_parents_and_children_have_the_dtype_of_the_head(kind):
    """So that their product is one of 16 bits too."""
    of = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)
    shapes = scorer.shapes(
        tiny.scored(inner=INNER * (kind == "swiglu"), rank=RANK, kind=kind).draft.config, jnp.bfloat16
    )
    token = jax.ShapeDtypeStruct((4, 3), jnp.int32)
    above = jax.eval_shape(scorer.parents, shapes, of(4, 1, 16), token, of(4, 3, 16))
    below = jax.eval_shape(scorer.children, shapes, token, of(4, 3, 16))
    assert above.shape == below.shape == (4, 3, RANK) and above.dtype == below.dtype == jnp.bfloat16


@pytest.mark.parametrize("kind, slots", [("product", True), ("pairs", False), ("markov", False), ("counts", False)])
def test_what_is_blind_to_the_slot(kind, slots):
    draw, params = np.random.default_rng(1), tiny.scored(kind=kind).params["scorer"]
    token = jnp.asarray(draw.integers(0, tiny.VOCAB, (1, 4, 6)))
    slots_of = lambda: jnp.asarray(draw.standard_normal((1, 4, 16)), jnp.float32)
    one, other = (scorer.bias(params, slots_of(), token, EMBED[token]) for _ in range(2))
    assert np.abs(one[:, 1:]).max() > 0.1 and not one[:, 0].any()
    assert (one != other).any() == slots


def test_counts_are_those_of_the_most_lifted_pairs():
    """Three tokens; 1 after 0 seven times of eight, and so on: lifts by hand, in steps, the unlifted left out."""
    above, below = np.array([0] * 8 + [1] * 6 + [2] * 2), np.array([1] * 7 + [2] + [2, 2, 0, 0, 0, 1] + [0, 2])
    config = dataclasses.replace(tiny.head_config(True), vocab_size=4, mask_token_id=3, scorer_rank=1)
    found = counts.count(above, below, config, 0.75)
    step = lambda together, expected: round(256 * np.log((together + 1) / (expected + 1)))
    # Tokens 0, 1, 2 are the first of 8, 6, 2 of the 16 pairs and the second of 4, 8, 4.
    assert found["next"][:, 0].tolist() == [1, 0, 0, 0]
    assert found["lift"][:, 0].tolist() == [step(7, 8 * 8 / 16), step(3, 6 * 4 / 16), step(1, 2 * 4 / 16), 0]
    assert found["strength"].tolist() == [0.75] * config.depth
    more = counts.count(above, below, dataclasses.replace(config, scorer_rank=3), 0.75)
    assert more["next"][:3].tolist() == [[1, 0, 0], [0, 2, 0], [0, 2, 0]]
    assert (more["lift"][:3] > 0).tolist() == [[True, False, False], [True, True, False], [True, True, False]]
    none = counts.count(above[:0], below[:0], config, 0.5)
    assert not none["lift"].any()


def test_few_pairs_lift_less_than_many():
    """A pair seen once says less than one seen a hundred times, though neither first token has another next one."""
    filler = np.repeat(np.arange(8, 20), 50)
    above, below = (np.concatenate([[a], [b] * 100, filler]) for a, b in ((0, 2), (1, 3)))
    config = dataclasses.replace(tiny.head_config(True), vocab_size=20, mask_token_id=19, scorer_rank=2)
    lift = counts.count(above, below, config, 1.0)["lift"]
    assert 0 < lift[0, 0] < 256 < lift[2, 0]


def test_sampled_rows_rank_pairs_as_they_rank_tokens():
    head, temperature = tiny.scored(), jnp.array([0.7, 1.3])
    tree, hidden = propose(head.draft.shaped(Rule(12, width=4, sharpness=0.8), 4), head.params, temperature)
    length, told = jnp.array([10, 5]), foretold(tree)
    noise = np.asarray(noise_rows(Sampling(temperature, jnp.arange(2, dtype=jnp.uint32)), length, 4, tiny.VOCAB))
    for row, heat in enumerate((0.7, 1.3)):
        known = heat * NOISE_SHARE * noise[row].astype(np.float64)
        logp, token = table(head.params["scorer"], hidden[row], tree.logits[row], 4, 0.8, known)
        wanted = oracles.best_first(logp.astype(np.float32), token, int(tree.tokens[row, 0]), 12)
        got = list(zip(*(x[row].tolist() for x in (tree.tokens, tree.parents, tree.depths)), strict=True))
        assert got == wanted
        raw, _ = table(head.params["scorer"], hidden[row], tree.logits[row], 4, token=token)  # without heat and noise
        place = [0, *(list(token[d - 1]).index(t) for t, _, d in wanted[1:])]
        own = [raw[d - 1, place[parent] if d > 1 else 0, w] for (_, parent, d), w in zip(wanted, place, strict=True)]
        np.testing.assert_allclose(told[row], [0.0, *own[1:]], atol=1e-5)


def test_a_greedy_row_beside_a_sampled_one_has_the_tree_that_it_has_alone():
    draw, length = np.random.default_rng(2), jnp.array([10, 5])
    logits, bias = (jnp.asarray(draw.standard_normal(s), jnp.float32) for s in ((2, 3, tiny.VOCAB), (2, 3, 4, 4)))

    @functools.partial(jax.jit, static_argnums=0)
    def grown(nodes, temperature):
        past = Past(TOKENS, length, length, jnp.full((2, 1), -1))
        choice = choose(Sampling(temperature, jnp.arange(2, dtype=jnp.uint32)), past, length < 0, 3, tiny.VOCAB)
        return choice.tree(Rule(nodes, width=4, sharpness=0.5), logits, jnp.array([9, 6]), adds=lambda _: bias)

    alone, beside = grown(9, None), grown(9, jnp.array([0.0, 1.3]))
    assert beside.tokens[0].tolist() == alone.tokens[0].tolist()
    np.testing.assert_allclose(beside.scores.node[0], alone.scores.node[0], atol=1e-5)
    assert np.abs(beside.scores.node[1] - alone.scores.node[1]).max() > 0.1
    assert (np.isfinite(foretold(beside)) == beside.valid()).all() and beside.size.tolist() == [9, 6]
    assert grown(1, None).parents.tolist() == [[-1], [-1]]  # plain decoding has no candidates


def greedy_path(logp, token):
    """Tokens of the best child of each node from the root on, and how probable the path is up to each."""
    path, scores, at = [], [], 0
    for d in range(len(logp)):
        row = logp[d, at if d else 0]
        at = int(np.argmax(row))
        path.append(int(token[d, at]))
        scores.append(row[at] + (scores[-1] if scores else 0.0))
    return path, scores


@pytest.mark.parametrize(
    "causal, inner, builder, heat",
    [
        (True, INNER, "best_first", (0.7, 1.3)),
        (False, 0, "accum_logp", None),
        pytest.param(True, 0, "best_first", (0.7, 1.3), marks=pytest.mark.slow),
    ],
)
def test_a_chain_is_the_greedy_path_through_the_rows_of_its_nodes(causal, inner, builder, heat):
    """Among as many candidates as the tree of as many nodes has, seven here; one program of a ladder is as another."""
    head, temperature = tiny.scored(causal, inner=inner), None if heat is None else jnp.array(heat)
    tree, hidden = propose(head.draft.shaped(Rule(8, builder, 1, 0.8), 4), head.params, temperature)
    short, _ = propose(head.draft.shaped(Rule(4, builder, 1, 0.8, grown=8), 4), head.params, temperature)
    bare, _ = propose(head.draft.unscored().shaped(Rule(8, builder, 1, 0.8), 4), head.params, temperature)
    noise = np.zeros((2, 4, tiny.VOCAB))
    if heat:
        sampling = Sampling(temperature, jnp.arange(2, dtype=jnp.uint32))
        noise = np.asarray(noise_rows(sampling, jnp.array([10, 5]), 4, tiny.VOCAB), np.float64)
    for row in range(2):
        t = heat[row] if heat else 1.0
        scale = 0.8 if heat else 1.0
        known = t * NOISE_SHARE * noise[row]
        logp, token = table(head.params["scorer"], hidden[row], tree.logits[row], 7, scale, known)
        path, scores = greedy_path(logp, token)
        assert tree.size[row] == 5 and tree.tokens[row, 1:5].tolist() == path
        assert tree.parents[row, :5].tolist() == [-1, 0, 1, 2, 3] and tree.depths[row, :5].tolist() == [0, 1, 2, 3, 4]
        np.testing.assert_allclose(tree.scores.node[row], [0, *scores, *[-np.inf] * 3], atol=1e-5)
        np.testing.assert_allclose(tree.scores.spine[row], scores, atol=1e-5)
    np.testing.assert_array_equal(short.tokens, tree.tokens[:, :4])
    np.testing.assert_array_equal(short.scores.node, tree.scores.node)
    assert (tree.tokens != bare.tokens).any()


@pytest.mark.parametrize("width", [4, 1])
@pytest.mark.parametrize(
    "builder, inner, kind",
    [
        ("best_first", 0, "product"),
        ("accum_logp", INNER, "swiglu"),
        ("best_first", 0, "pairs"),
        ("best_first", 0, "markov"),
    ],
)
def test_a_new_scorer_changes_no_tree(builder, inner, kind, width):
    new, bare, own = (
        tiny.scored(child=0.0, inner=inner, kind=kind),
        tiny.head(True),
        tiny.scored(kind=kind, inner=inner),
    )
    rule = Rule(12, builder, width)
    one, _ = propose(new.draft.shaped(rule, 4), new.params)
    other, _ = propose(bare.draft.shaped(rule, 4), bare.params)
    same = lambda a, b: jax.tree.map(np.testing.assert_array_equal, a, b)
    same(one[:4], other[:4])
    if width == 1:
        same(one.scores, other.scores)
    moved, _ = propose(own.draft.shaped(rule, 4), own.params)
    assert (moved.tokens != other.tokens).any()


@pytest.mark.parametrize("width", [4, 1])
def test_a_head_whose_scorer_is_left_out_is_the_program_of_one_that_has_none(width):
    own, bare, rule = tiny.scored(), tiny.head(True), Rule(12, width=width)
    text = lambda draft, params: propose.lower(draft.shaped(rule, 4), params).as_text()
    assert text(own.draft.unscored(), own.params) == text(bare.draft, bare.params)
    assert text(own.draft, own.params) != text(bare.draft, bare.params)


GREEDY, WARM, CHAIN = SamplingConfig(20), SamplingConfig(20, temperature=1.0, seed=4, top_k=9), TreeConfig(5, width=1)
DECODED = [(GREEDY, [dataclasses.replace(CHAIN, prune=0.2)]), (WARM, [TreeConfig(8), CHAIN])]
MORE = [(GREEDY, [TreeConfig(8, width=3, builder="accum_logp"), CHAIN])]


@pytest.mark.parametrize("cases", [DECODED, pytest.param(MORE, marks=pytest.mark.slow)], ids=["usual", "more"])
def test_decoding_with_it_is_plain_decoding(cases):
    decoded(tiny.scored(), cases)


@pytest.mark.parametrize("kind", ["pairs", "markov", "counts"])
def test_decoding_with_any_kind_is_plain_decoding(kind):
    decoded(tiny.scored(kind=kind), [(GREEDY, [TreeConfig(8)])])


def decoded(head, cases):
    """Asserts it, with trees that are the head's own."""
    target, prompts = tiny.target("dense"), [[5, 6, 7], [9, 3]]
    for options, trees in cases:
        plain = speculate.generate(target, None, prompts, None, options)
        for tree in trees:
            found = speculate.generate(target, head, prompts, tree, options)
            assert [r.token_ids for r in found] == [r.token_ids for r in plain]
            assert all(r.rounds for r in found)
            sizes = {size for r in found for size in r.tree_sizes}
            assert sizes == {5} if tree is CHAIN else len(sizes) > 1 or not tree.prune


@pytest.mark.parametrize("tree", [TreeConfig(8, width=3), TreeConfig(5, width=1)], ids=["tree", "chain"])
def test_a_round_is_drawn_with_the_rows_that_it_was_built_of(tree):
    target, head, prompt = tiny.target("dense"), tiny.scored(), [5, 6, 7]
    rounds, _ = trace.record(target, head, prompt, tree, SamplingConfig(8), full=1)
    done = speculate.start(target, head, [prompt], tree, SamplingConfig(8)).record()
    node, parents = np.asarray(done.tree.scores.node[0], np.float64), np.asarray(done.tree.parents[0])
    drawn = draw.nodes(rounds[0], str)[1:-1]
    assert len(drawn) == int(done.tree.size[0]) - 1
    said = [one.draft for one in drawn]
    np.testing.assert_allclose(said, [np.exp(node[i] - node[parents[i]]) for i in range(1, len(said) + 1)], rtol=1e-4)
    shared = [oracles.softmax(rounds[0].draft_logits[d - 1])[t] for t, d in zip(*rounds[0][0:3:2], strict=True) if d]
    assert np.abs(np.subtract(said, shared)).max() > 0.05  # what a row that all nodes of a depth share would say
    assert rounds[1].foretold is None
