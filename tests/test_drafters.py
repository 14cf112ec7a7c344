"""What a comparison decodes with, and what its rounds lost, against a plain reading of the recorded rounds."""

import dataclasses
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jetspec_jax import methods, speculate
from jetspec_jax.command import UsageError
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.evals import drafters, lost, trace
from jetspec_jax.files.load import load_drafter, load_target
from jetspec_jax.layers import vocabulary
from jetspec_jax.loop import tree as trees
from jetspec_jax.loop import verify
from jetspec_jax.loop.choice import NOISE_SHARE, Choice
from jetspec_jax.loop.processors import Past, Sampling
from jetspec_jax.loop.state import Round
from jetspec_jax.options import SHARPNESS

PROMPT = [3, 1, 4, 1, 5]
TARGET, HEAD = tiny.target("dense"), tiny.head(True)


class TestWords:
    def test_a_drafter_is_called_by_its_method_and_by_its_head_where_two_have_one(self):
        found = drafters.parse(["jetspec=a/one", "ngram", "jetspec=b/two/", "autoregressive"])
        assert [one.label for one in found] == ["jetspec=one", "ngram", "jetspec=two"]
        assert [one.source for one in found] == ["a/one", None, "b/two/"]
        assert drafters.parse(["jetspec=a/one"])[0].label == "jetspec"
        found = drafters.parse(["jetspec=x/a/head", "jetspec=x/b/head", "jetspec"])
        assert [one.label for one in found] == ["jetspec=a/head", "jetspec=b/head", "jetspec=demo"]

    @pytest.mark.parametrize(
        "words, said",
        [
            (["jetspek"], "no method 'jetspek' among jetspec, dflash"), (["ngram=x"], "ngram drafts without a head"),
            (["jetspec="], "the head's folder is missing"), (["ngram", "ngram"], "named twice"),
            (["jetspec=a/x", "jetspec=a/../a/x"], "two of them are one folder"), (["=x"], "no method ''"),
        ],
    )  # fmt: skip
    def test_wrong_words(self, words, said):
        with pytest.raises(UsageError, match=r"^--drafters") as error:
            drafters.parse(words)
        assert said in str(error.value)

    def test_a_method_that_needs_a_head_is_refused_without_one(self):
        with pytest.raises(UsageError, match="jetspec: it needs a head"):
            drafters.load(drafters.parse(["jetspec"]), TARGET, demo=False)


def test_a_head_that_two_methods_draft_with_is_loaded_once():
    folder = pathlib.Path(__file__).parent / "fixtures" / "peer_parity" / "dense_bidirectional"
    target = load_target(folder / "target")
    named = drafters.parse([f"ddtree={folder / 'head'}", "ngram", f"dflash={folder / 'head'}"])
    (_, one), (_, other), (_, two) = drafters.load(named, target, demo=False)
    assert one is two and one is not other and one.family == "dflash"


@pytest.mark.parametrize("scorer, same", [("own", False), ("none", True)])
def test_scorers_can_be_left_out(monkeypatch, scorer, same):
    """Its trees are then those of the head alone, and the chain that stands beside them too."""
    head = dataclasses.replace(tiny.scored(), family="jetspec")
    bare = dataclasses.replace(head, draft=head.draft.unscored())
    monkeypatch.setattr("jetspec_jax.files.load.load_head", lambda source, target: head)
    found = drafters.entries(drafters.load(drafters.parse(["jetspec=x"]), TARGET, False, scorer), [6])
    for entry in found[1:]:
        drawn = [trees_of(entry.head, entry.tree), trees_of(bare, entry.tree)]
        assert (drawn[0] == drawn[1]) is same, entry.cell


def trees_of(head, tree):
    """Tokens and parents of every tree of a short answer."""
    rounds, _ = trace.record(TARGET, head, PROMPT, tree, SamplingConfig(12))
    return [(done.tokens.tolist(), done.parents.tolist()) for done in rounds]


def loaded(*words):
    """Drafters of the tiny target, as `drafters.load` returns them."""
    heads = {"jetspec": tiny.head(True), "ngram": load_drafter("ngram", TARGET), "eagle3": tiny.eagle3()}
    heads["dflash"] = tiny.head(False)
    return [(drafters.Named(word, word, None), heads[word]) for word in words]


def test_every_tree_has_its_chain_beside_it_and_every_chain_stands_once():
    cells = [str(entry.cell) for entry in drafters.entries(loaded("jetspec", "dflash", "ngram"), [4, 8, 16])]
    assert cells == [
        "plain decoding", "jetspec tree 4", "jetspec chain 4", "jetspec tree 8", "jetspec chain 5", "jetspec tree 16",
        "dflash chain 5", "ngram tree 4", "ngram chain 4", "ngram tree 8", "ngram chain 8", "ngram tree 16",
        "ngram chain 16",
    ]  # fmt: skip
    cells = [str(entry.cell) for entry in drafters.entries(loaded("jetspec", "dflash", "ngram"), ["auto", 4])]
    assert cells == [
        "plain decoding", "jetspec auto", "jetspec tree 4", "jetspec chain 4", "dflash chain 5", "ngram tree 4",
        "ngram chain 4",
    ]  # fmt: skip


def test_a_drafter_that_would_have_no_cell_is_refused():
    with pytest.raises(ConfigError, match=r"budgets=auto: ngram drafts without probabilities.* give a number too"):
        drafters.entries(loaded("jetspec", "ngram"), ["auto"])


@pytest.mark.parametrize("method", ["eagle3", "ngram"])  # a block's lies in the comparison's test
def test_a_chain_has_no_siblings(method):
    ((_, head),) = loaded(method)
    tree, narrow = methods.chain(method, 4, head)
    assert tree.budget == 4
    prompt = [*range(37), *range(36, -1, -1)]  # every token was followed by two others
    rounds, result = trace.record(TARGET, narrow, prompt, tree, SamplingConfig(12))
    plain = speculate.generate(TARGET, None, [prompt], None, SamplingConfig(12))
    assert result.token_ids == plain[0].token_ids
    assert max(len(done.tokens) for done in rounds) == 4
    for done in rounds:
        assert done.parents.tolist() == list(range(-1, len(done.tokens) - 1))


def by_hand(done: trace.Recorded, ranked: np.ndarray, width: int) -> str:
    """What a recorded round lost, by looking for the token."""
    depth = len(done.accepted)
    if depth > len(ranked):
        return "nothing"
    nodes = zip(done.tokens.tolist(), done.depths.tolist(), strict=True)
    if any(token == done.bonus and at == depth for token, at in nodes):
        return "parent wrong"
    best = sorted(range(ranked.shape[1]), key=lambda token: (-ranked[depth - 1, token], token))[:width]
    return "not in the tree" if done.bonus in best else "no candidate"


def coach(ranks):
    """A draft that has the right token of each depth at a chosen rank, -1 not at all."""
    plain = speculate.generate(TARGET, None, [PROMPT], None, SamplingConfig(24))[0].token_ids
    draft = tiny.CoachedDraft(4, tiny.VOCAB)
    return tiny.LoadedHead(draft, tiny.coached([([*PROMPT, *plain] + [0] * 64)[:64]], ranks))


@pytest.mark.parametrize("heat, kind", [(0.0, "coach"), (1.2, "head"), (0.0, "scored chain")])
def test_what_rounds_lost(heat, kind):
    sampling = SamplingConfig(24, temperature=heat, seed=5)
    ranks = np.random.default_rng(3).choice([0, 0, 0, 1, 2, -1], (11, 4))
    head = {"head": HEAD, "coach": coach(ranks), "scored chain": tiny.scored()}[kind]
    tree, width = (TreeConfig(5, width=1), 7) if kind == "scored chain" else (TreeConfig(8, width=3), 3)
    rounds, result = trace.record(TARGET, head, PROMPT, tree, sampling)
    wanted, length = dict.fromkeys(lost.KINDS, 0), len(PROMPT) + 1
    for done, kept in zip(rounds, result.emitted, strict=True):
        ranked = np.asarray(done.draft_logits, np.float64)
        if heat:
            noise = [vocabulary.gumbel(jnp.uint32(5), jnp.int32(length + d), tiny.VOCAB) for d in range(len(ranked))]
            ranked = SHARPNESS * (ranked + NOISE_SHARE * heat * np.asarray(noise))
        wanted[by_hand(done, ranked, width)] += 1
        length += kept
    assert lost.split(TARGET, head, PROMPT, tree, sampling) == wanted
    assert sum(wanted.values()) == result.rounds and sum(map(bool, wanted.values())) >= 2, wanted


def test_each_reason_of_a_round_made_by_hand():
    """Root 9 with children 1 and 2, and 3 below 1; the candidates of both depths are the three best of five tokens."""
    row = lambda *values: jnp.asarray([values] * 5)
    logits = jnp.asarray([[[0, 9, 8, 7, -1], [0, -1, 9, 8, 7]]] * 5, jnp.float32)
    tree = trees.Tree(row(9, 1, 2, 3), row(-1, 0, 0, 1), row(0, 1, 1, 2), jnp.full(5, 4), logits)
    # What the target says after the path, and how long it is: none of depth 1; a candidate that the tree has not;
    # at depth 2 below another parent; nothing, for the path is whole; and no candidate of depth 2.
    count, bonus = jnp.array([1, 1, 2, 3, 2]), [4, 3, 3, 0, 1]
    tokens = np.zeros((5, 3), int)
    tokens[np.arange(5), np.asarray(count) - 1] = bonus
    paths = jnp.asarray([[0, 0, 0], [0, 0, 0], [0, 2, 0], [0, 1, 3], [0, 1, 0]])
    done = Round(tree, verify.Accepted(paths, jnp.asarray(tokens), count), jnp.zeros((5, 4, 5)))
    sampling = Sampling(None, jnp.zeros(5, jnp.uint32))
    zeros = jnp.zeros(5, jnp.int32)
    choice = Choice(sampling, Past(jnp.full((5, 8), 9), zeros, zeros + 4, zeros[:, None]), zeros > 0, None, None, 2)
    found = lost.kinds(trees.Rule(4, width=3), choice, done)
    names = [lost.KINDS[kind] for kind in found.tolist()]
    assert names == ["no candidate", "not in the tree", "parent wrong", "nothing", "no candidate"]


def test_a_draft_without_rows_of_logits_says_nothing():
    assert lost.split(TARGET, load_drafter("ngram", TARGET), PROMPT, TreeConfig(8), SamplingConfig(12)) is None
