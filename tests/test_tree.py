"""Tree builders against a heap and against brute force."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jetspec_jax.layers import masks, vocabulary
from jetspec_jax.loop import tree

# D, W, T, V: a chain, one depth, a full tree smaller than T, a width over the vocabulary, the usual case.
SHAPES = [(4, 1, 9, 6), (1, 3, 3, 8), (2, 2, 16, 5), (3, 9, 13, 4), (4, 3, 12, 9), (3, 4, 24, 7)]
BUILDERS = {"best_first": oracles.best_first, "accum_logp": oracles.accum_logp}
ANCHOR = 77


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _build(builder, width, rows, logits, budget):
    logits = jnp.asarray(logits, jnp.float32)
    batch = logits.shape[0]
    rule = tree.Rule(rows, builder, width)
    built = tree.build(rule, logits, jnp.full((batch,), ANCHOR, jnp.int32), budget)
    found = tree.candidates(rule, logits)
    return built, (found.logp[:, :, 0], found.token)


def build(*args):
    """The tree and its candidates, on the host."""
    return jax.device_get(_build(*args))


@functools.partial(jax.jit, static_argnums=(0, 1))
def grow(builder, rows, logp, token):
    """The builder itself, on scores that can be exact integers."""
    if builder == "best_first":
        return tree._best_first(logp, token, rows)
    return tree._accum_logp(logp[:, None], token, rows)


@functools.partial(jax.jit, static_argnums=1)
def candidates(logits, width):
    """Scores and tokens of each depth."""
    found = tree.candidates(tree.Rule(width + 1, width=width), logits)
    return found.logp[:, :, 0], found.token


def nodes(built, row: int = 0) -> list[oracles.Node]:
    size = int(built.size[row])
    return list(zip(*(x[row, :size].tolist() for x in (built.tokens, built.parents, built.depths)), strict=True))


def check_padding(built, row: int) -> None:
    after = slice(int(built.size[row]), None)
    for field, pad in ((built.tokens, 0), (built.parents, -1), (built.depths, 0)):
        assert (field[row, after] == pad).all()
    assert (np.asarray(built.valid()[row]) == (np.arange(built.tokens.shape[1]) < built.size[row])).all()


def worked_logits():
    """Rows a .6 b .3, c .7 d .2, e .5 f .4 of method 5.2; letters are tokens 1..6, token 0 has the rest."""
    rest = 0.1
    rows = [{1: 0.6, 2: 0.3, 0: rest}, {3: 0.7, 4: 0.2, 0: rest}, {5: 0.5, 6: 0.4, 0: rest}]
    return jnp.log(jnp.array([[[row.get(v, 1e-30) for v in range(7)] for row in rows]]))


R, A, B, C, D, E, F = ANCHOR, 1, 2, 3, 4, 5, 6


def test_worked_example_accum_logp():
    built, _ = build("accum_logp", 2, 8, worked_logits(), jnp.array([8]))
    rows = [(R, -1, 0), (A, 0, 1), (B, 0, 1), (C, 1, 2), (D, 1, 2), (E, 3, 3), (F, 3, 3), (C, 2, 2)]
    assert nodes(built) == rows
    built, _ = build("accum_logp", 2, 8, worked_logits(), jnp.array([6]))
    assert nodes(built) == rows[:6]
    check_padding(built, 0)


def test_worked_example_best_first():
    built, _ = build("best_first", 2, 8, worked_logits(), jnp.array([6]))
    # a .6, c|a .42, b .3, then e|ac and c|b, both .21: the smaller depth first, unless rounding sets them apart.
    assert nodes(built)[:4] == [(R, -1, 0), (A, 0, 1), (C, 1, 2), (B, 0, 1)]
    assert set(nodes(built)[4:]) == {(C, 3, 2), (E, 2, 3)}
    built, _ = build("best_first", 2, 8, worked_logits(), jnp.array([8]))
    assert nodes(built)[6:] == [(F, 2, 3), (D, 1, 2)]  # .168 and .12


@st.composite
def rows_of(draw, shape, low=-6, high=6):
    """Small integers, so that many paths tie; sometimes a row is flat, -inf in places, or NaN."""
    depth, _, _, vocab = shape
    values = [draw(st.lists(st.integers(low, high), min_size=vocab, max_size=vocab)) for _ in range(depth)]
    return np.array(values, np.float32)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(data=st.data())
def test_equals_reference_on_exact_ties(builder, shape, data):
    _, width, rows, vocab = shape
    width = min(width, rows - 1, vocab)
    logp = -np.abs(np.sort(-data.draw(rows_of(shape, -3, 0)), axis=1))[:, :width].astype(np.float32)
    logp = -np.sort(-logp, axis=1)
    token = np.argsort(data.draw(rows_of(shape)), axis=1, kind="stable")[:, :width].astype(np.int32)
    *got, size = jax.device_get(grow(builder, rows, logp, token))
    wanted = BUILDERS[builder](logp, token, 0, rows)
    assert int(size) == len(wanted)
    got = list(zip(*(x[: int(size)].tolist() for x in got), strict=True))
    assert got[1:] == wanted[1:]
    if builder == "best_first":
        scores = oracles.path_scores(wanted, logp, token)
        assert scores == oracles.ddtree_scores(logp, rows - 1)  # an independent enumeration
        assert scores == sorted(scores, reverse=True)


@pytest.mark.parametrize("builder", BUILDERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(data=st.data())
def test_equals_reference_from_logits(builder, shape, data):
    _, width, rows, _ = shape
    logits = np.stack([data.draw(rows_of(shape)) / np.float32(3) for _ in range(2)])
    budget = np.array(data.draw(st.lists(st.integers(1, rows + 9), min_size=2, max_size=2)), np.int32)
    built, (logp, token) = build(builder, width, rows, logits, budget)
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(logp, np.take_along_axis(exact, np.asarray(token), 2), atol=2e-6)
    np.testing.assert_allclose(logp, -np.sort(-exact, axis=-1)[..., : logp.shape[-1]], atol=2e-6)
    for row in range(2):
        whole = BUILDERS[builder](np.asarray(logp[row]), np.asarray(token[row]), ANCHOR, rows)
        got = nodes(built, row)
        assert got == whole[: budget[row]]
        full = sum(logp.shape[-1] ** d for d in range(shape[0] + 1))
        assert len(got) == min(budget[row], full, rows)
        check_padding(built, row)
        check_shape(got)


def check_shape(got: list[oracles.Node]) -> None:
    """Parents first and one depth above; no token twice under one parent (FC-24); the root alone has no parent."""
    assert got[0] == (ANCHOR, -1, 0)
    for i, (_, parent, depth) in enumerate(got[1:], 1):
        assert 0 <= parent < i and depth == got[parent][2] + 1
    assert len({(t, p) for t, p, _ in got}) == len(got)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@given(data=st.data())
def test_best_first_budget_minus_one_wide_is_ddtree(shape, data):
    """With width T - 1 no prefix of the whole product distribution scores better than the tree's worst node."""
    depth, _, rows, vocab = shape
    logits = data.draw(rows_of(shape)) / np.float32(2)
    built, _ = build("best_first", rows - 1, rows, logits[None], jnp.array([rows]))
    logp, token = (x[0] for x in jax.device_get(candidates(logits[None], vocab)))
    best = oracles.ddtree_scores(logp, rows - 1)
    assert oracles.path_scores(nodes(built), logp, token) == best
    assert max(d for _, _, d in nodes(built)) <= depth


@pytest.mark.parametrize("builder", BUILDERS)
def test_smaller_budget_is_a_prefix(builder):
    logits = jax.random.normal(jax.random.key(0), (1, 4, 9)) * 2
    whole = nodes(build(builder, 3, 12, logits, jnp.array([12]))[0])
    for budget in range(1, 12):
        assert nodes(build(builder, 3, 12, logits, jnp.array([budget]))[0]) == whole[:budget]
    for rows in (2, 5, 8):  # fewer static rows give the same tree too, as long as a node keeps its width
        width = min(3, rows - 1)
        if width == 3:
            assert nodes(build(builder, 3, rows, logits, jnp.array([rows]))[0]) == whole[:rows]


@pytest.mark.parametrize("builder", BUILDERS)
@settings(max_examples=15)
@given(data=st.data())
def test_broken_draft_rows_drop_out(builder, data):
    """-inf candidates make no node; a NaN or +inf row, and everything below it, makes none either (FC-23, FC-24)."""
    shape = depth, width, rows, _ = 4, 3, 12, 9
    logits = data.draw(rows_of(shape)) / np.float32(2)
    bad = data.draw(st.integers(0, depth - 1))
    kind = data.draw(st.sampled_from(["nan row", "one nan", "inf", "all -inf", "few", "few everywhere"]))
    spots = slice(data.draw(st.integers(0, 2)), None)
    rows_hit = slice(None) if kind == "few everywhere" else bad
    if kind.startswith("few"):
        logits[rows_hit, 1 + spots.start :] = -np.inf
    else:
        value = {"nan row": np.nan, "one nan": np.nan, "inf": np.inf, "all -inf": -np.inf}[kind]
        logits[bad, slice(3, 4) if kind in ("one nan", "inf") else slice(None)] = value
    built, (logp, token) = build(builder, width, rows, logits[None], jnp.array([rows]))
    logp, token = logp[0], token[0]
    if not kind.startswith("few"):
        assert not np.isfinite(logp[bad]).any()
    got = nodes(built)
    assert got == BUILDERS[builder](logp, token, ANCHOR, rows)
    assert all(np.isfinite(s) for s in oracles.path_scores(got, logp, token))
    check_shape(got)


@pytest.mark.parametrize("builder", BUILDERS)
def test_one_row_is_the_root(builder):
    logits = jnp.zeros((2, 3, 5))
    built = tree.build(tree.Rule(1, builder, 4), logits, jnp.array([3, 4]), jnp.array([1, 9]))
    assert built.tokens.tolist() == [[3], [4]] and built.parents.tolist() == [[-1], [-1]]
    assert built.depths.tolist() == [[0], [0]] and built.size.tolist() == [1, 1]


@pytest.mark.parametrize("builder", BUILDERS)
def test_width_one_is_the_spine(builder):
    logits = jax.random.normal(jax.random.key(1), (1, 4, 6))
    spine = logits[0].argmax(-1).tolist()
    built, _ = build(builder, 1, 9, logits, jnp.array([9]))
    assert nodes(built) == [(ANCHOR, -1, 0)] + [(t, i, i + 1) for i, t in enumerate(spine)]


def test_one_token_vocabulary():
    built, _ = build("best_first", 64, 8, jnp.zeros((1, 3, 1)), jnp.array([8]))
    assert nodes(built) == [(ANCHOR, -1, 0), (0, 0, 1), (0, 1, 2), (0, 2, 3)]


def test_ancestor_mask_of_built_trees():
    logits = jax.random.normal(jax.random.key(2), (2, 4, 9))
    for builder in BUILDERS:
        built, _ = build(builder, 3, 12, logits, jnp.array([12, 7]))
        mask = masks.ancestors(jnp.asarray(built.parents), 4)
        for row in range(2):
            assert (mask[row] == oracles.ancestors(built.parents[row].tolist())).all()


@pytest.mark.parametrize("vocab,k", [(5003, 1), (5003, 16), (5003, 20), (40_000, 64), (5003, 700)])
def test_top_k_of_a_long_axis_is_that_of_one_sort(vocab, k):
    """In two stages, in the first, in the second alone and in none; few different values, so that most are equal, and
    of equals the first wins; rows of one value, of fewer numbers than k, and with the best at the very end.
    Of NaN nothing is promised: `candidates` drops such a row."""
    draw = np.random.default_rng(k)
    x = np.concatenate([draw.integers(0, 6, (2, vocab)), draw.standard_normal((5, vocab))]).astype(np.float32)
    x[2], x[3, : vocab - k // 2 - 1] = 1.0, -np.inf
    x[4, -k:] += 10  # in few pieces
    x[5, :: vocab // k] += 10  # in a piece each
    value, token = jax.jit(vocabulary.top_k, static_argnums=1)(x, k)
    wanted, order = jax.lax.top_k(x, k)
    np.testing.assert_array_equal(value, wanted)
    np.testing.assert_array_equal(token, order)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _levels(nodes, depth, frontier, table):
    """A level's candidates hang on the parent's token alone: `table` [V, W, 2] has tokens and log-probabilities."""

    def children(level, at, carry):
        return table[at.token, :, 0].astype(jnp.int32), table[at.token, :, 1], carry

    anchor = jnp.zeros(1, jnp.int32)
    return tree.cut(tree.levels(children, None, anchor, nodes, depth, frontier)[0], anchor, jnp.array([nodes]))


@pytest.mark.parametrize("nodes, depth, frontier, width", [(2, 3, 1, 2), (9, 3, 2, 3), (16, 4, 15, 4), (40, 2, 4, 3)])
@given(data=st.data())
def test_levels_are_eagle2s_tree(nodes, depth, frontier, width, data):
    """Ties, impossible and broken candidates included; with a frontier of T - 1 these are the most probable paths."""
    vocab = 5
    logp = [data.draw(st.lists(st.sampled_from([0, -1, -1, -2, -9, -np.inf, np.nan]), min_size=width, max_size=width))
            for _ in range(vocab)]  # fmt: skip
    logp = -np.sort(-np.array(logp, np.float32), axis=1)
    token = np.stack([data.draw(st.permutations(range(vocab))) for _ in range(vocab)])[:, :width]
    got = jax.device_get(_levels(nodes, depth, frontier, jnp.stack([token, logp], -1)))
    clean = np.where(np.isnan(logp), -np.inf, logp)

    def children(path):
        last = path[-1] if path else 0
        return [(int(t), float(p)) for t, p in zip(token[last], clean[last], strict=True)]

    wanted = oracles.eagle2(children, nodes, depth, frontier)
    paths = [()]
    for t, parent, _ in tuple(zip(*(x[0].tolist() for x in got[:3]), strict=True))[1 : int(got.size[0])]:
        paths.append((*paths[parent], t))
    assert paths[1:] == [path for path, _ in wanted]
    check_padding(got, 0)
    if frontier == nodes - 1:
        every = [((), 0.0)]
        for _ in range(depth):
            every = list(dict(every + [((*p, t), s + q) for p, s in every for t, q in children(p)]).items())
        best = sorted((s for p, s in every if p), reverse=True)[: nodes - 1]
        assert [s for _, s in wanted] == [s for s in best if s > -np.inf]


def test_levels_leave_out_what_is_no_number():
    """A broken row costs candidates, and nothing below it is drafted."""

    def children(level, at, carry):
        shape = (*at.token.shape, 2)
        return jnp.broadcast_to(jnp.array([4, 5]), shape), jnp.broadcast_to(jnp.array([jnp.nan, -1.0]), shape), carry

    (tokens, parents, depths, built), _ = tree.levels(children, None, jnp.array([1]), 8, 3, 4)
    assert built.tolist() == [4] and tokens[0, 1:4].tolist() == [5, 5, 5]
    assert parents[0, 1:4].tolist() == [0, 1, 2] and depths[0, 1:4].tolist() == [1, 2, 3]


TABLES = {"best_first": oracles.best_first, "accum_logp": oracles.accum_logp_table}


@functools.partial(jax.jit, static_argnums=(0, 1))
def grow_table(builder, rows, logp, token):
    return tree.grow(builder, tree.Candidates(token[None], logp[None]), rows)


@pytest.mark.parametrize("builder", TABLES)
@pytest.mark.parametrize("shape", [(3, 4, 12), (2, 5, 24), (1, 4, 4)], ids=str)
@given(seed=st.integers(0, 2**32 - 1), ties=st.booleans())
def test_a_row_for_each_parent_equals_references(builder, shape, seed, ties):
    """Node for node, on random tables and on tables of small integers, where many paths tie."""
    depth, width, rows = shape
    draw = np.random.default_rng(seed)
    table = (
        draw.integers(-3, 1, (depth, width, width)) if ties else -np.abs(draw.standard_normal((depth, width, width)))
    )
    table = table.astype(np.float32)
    table[draw.random(table.shape) < 0.05] = -np.inf
    token = np.stack([draw.permutation(50)[:width] for _ in range(depth)]).astype(np.int32)
    *got, size = jax.device_get(grow_table(builder, rows, table, token))
    wanted = TABLES[builder](table, token, 0, rows)
    assert int(size[0]) == len(wanted)
    got = list(zip(*(x[0, : len(wanted)].tolist() for x in got), strict=True))
    assert got[1:] == wanted[1:]
    if builder == "best_first":
        scores = []
        place = [0]
        for t, parent, d in wanted[1:]:
            above = 0.0 if parent == 0 else scores[parent - 1]
            w = list(token[d - 1]).index(t)
            scores.append(np.float32(above + oracles.row_of(table, d - 1, place[parent])[w]))
            place.append(w)
        assert scores == oracles.table_scores(table, rows - 1)  # an independent enumeration


@functools.partial(jax.jit, static_argnums=0)
def draw_chain(rule, logp, token):
    zero = jnp.zeros(1, jnp.int32)
    return tree.drawn(rule, tree.Candidates(token[None], logp[None]), zero, zero + rule.nodes)


@pytest.mark.parametrize("builder", BUILDERS)
@given(seed=st.integers(0, 2**32 - 1), ties=st.booleans())
def test_a_chain_follows_the_best_child_of_each_node(builder, seed, ties):
    """Of equals the first; it ends where nothing is left to follow."""
    draw = np.random.default_rng(seed)
    logp = (draw.integers(-2, 1, (4, 5, 5)) if ties else -np.abs(draw.standard_normal((4, 5, 5)))).astype(np.float32)
    logp[draw.random(logp.shape) < 0.3] = -np.inf
    logp[draw.random((4, 5)) < 0.1] = -np.inf  # no child at all
    token = np.stack([draw.permutation(50)[:5] for _ in range(4)]).astype(np.int32)
    path, scores, at = [], [0.0], 0
    for d in range(4):
        row = logp[d, at if d else 0]
        at = int(row.argmax())
        scores.append(np.float32(scores[-1]) + row[at])
        if scores[-1] == -np.inf:
            break
        path.append((int(token[d, at]), d, d + 1))
    built = jax.device_get(draw_chain(tree.Rule(8, builder, 1), logp, token))
    assert nodes(built) == [(0, -1, 0), *path]
    whole = np.array((scores + [-np.inf] * 8)[:8], np.float32)
    np.testing.assert_allclose(built.scores.node[0], whole, rtol=1e-6)
    np.testing.assert_allclose(built.scores.spine[0], whole[1:5], rtol=1e-6)


@pytest.mark.parametrize("builder", TABLES)
def test_children_of_the_root_have_the_first_row_whatever_its_token(builder):
    """The root's token, 0 here, may be a candidate of the depth below it too."""
    logp, token = -np.arange(1, 9, dtype=np.float32).reshape(2, 2, 2), np.array([[5, 0], [0, 7]], np.int32)
    built = jax.device_get(draw_chain(tree.Rule(7, builder, 2), logp, token))
    place, scores = [0], [0.0]
    for t, parent, depth in nodes(built)[1:]:
        place.append(list(token[depth - 1]).index(t))
        scores.append(scores[parent] + logp[depth - 1, place[parent], place[-1]])
    assert len(scores) == 7 and built.scores.node[0].tolist() == scores


@pytest.mark.parametrize("builder", TABLES)
def test_equal_rows_are_the_shared_row(builder):
    """A table that says of every parent what one row says: the tree of that row, node for node."""
    draw = np.random.default_rng(5)
    logp = -np.sort(np.abs(draw.standard_normal((4, 6))), axis=1).astype(np.float32)
    token = np.stack([draw.permutation(50)[:6] for _ in range(4)]).astype(np.int32)
    table = np.repeat(logp[:, None], 6, axis=1)
    for one, other in zip(
        grow_table(builder, 17, table, token), grow_table(builder, 17, logp[:, None], token), strict=True
    ):
        np.testing.assert_array_equal(one.reshape(-1)[1:], other.reshape(-1)[1:])  # the root's token has no meaning
    with pytest.raises(ValueError, match="P=2: one row for all parents"):
        tree.grow(builder, tree.Candidates(token[None], table[None, :, :2]), 17)


@functools.partial(jax.jit, static_argnums=0)
def _scored(rule, logits, budget):
    return tree.build(rule, logits, jnp.full((len(logits),), ANCHOR, jnp.int32), budget)


@pytest.mark.parametrize("builder", BUILDERS)
@given(seed=st.integers(0, 2**32 - 1), broken=st.booleans())
def test_scores_are_the_sums_along_the_paths(builder, seed, broken):
    """Of every node that has grown, also of those that are not verified; the first nodes are the small tree's own."""
    logits = 2 * np.random.default_rng(seed).standard_normal((2, 4, 9)).astype(np.float32)
    if broken:
        logits[1, 2] = np.nan
    whole = jax.device_get(_scored(tree.Rule(24, builder, 4), logits, jnp.array([24, 24])))
    small = jax.device_get(_scored(tree.Rule(8, builder, 4, grown=24), logits, jnp.array([8, 5])))
    logp = jax.nn.log_softmax(logits, axis=-1)
    for row in range(2):
        wanted = [0.0]
        for token, parent, depth in nodes(whole, row)[1:]:
            wanted.append(wanted[parent] + float(logp[row, depth - 1, token]))
        wanted += [-np.inf] * (24 - len(wanted))
        np.testing.assert_allclose(whole.scores.node[row], wanted, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(small.scores.node[row], whole.scores.node[row])
        assert nodes(small, row) == nodes(whole, row)[: int(small.size[row])]
        check_padding(small, row)
        best = np.cumsum(np.where(np.isnan(logp[row]), -np.inf, logp[row]).max(-1))
        np.testing.assert_allclose(small.scores.spine[row], best, rtol=1e-5, atol=1e-5)
    assert small.size.tolist() == [8, 5]


@given(seed=st.integers(0, 2**32 - 1), least=st.floats(0.0, 1.0))
def test_pruning_leaves_out_what_is_less_probable_and_nothing_else(seed, least):
    logits = 2 * np.random.default_rng(seed).standard_normal((2, 4, 9)).astype(np.float32)
    whole = _scored(tree.Rule(24, "best_first", 4), logits, jnp.array([24, 24]))
    pruned = jax.device_get(tree.prune(whole, jnp.array([least, 0.0], jnp.float32)))
    lowest = jnp.log(jnp.float32(least))
    kept = [node for node, s in zip(nodes(whole), whole.scores.node[0], strict=True) if s >= lowest]
    assert nodes(pruned) == [nodes(whole)[0], *kept[1:]]
    assert nodes(pruned, 1) == nodes(whole, 1)
    check_padding(pruned, 0)


def test_rows_that_a_parent_adds_to_are_distributions():
    """Against the softmax of the whole vocabulary with the bias on the candidates alone."""
    draw = np.random.default_rng(1)
    logits = draw.standard_normal((2, 3, 11)).astype(np.float32) * 3
    found = tree.candidates(tree.Rule(6, width=4), jnp.asarray(logits))
    bias = draw.standard_normal((2, 3, 4, 4)).astype(np.float32)
    bias[0, 1, 2] = 0
    got = jax.device_get(jax.jit(tree.conditioned)(found, bias))
    token, row = np.asarray(found.token), np.asarray(found.logp[:, :, 0])
    for b, d, p in np.ndindex(2, 3, 4):
        raised = logits[b, d].astype(np.float64)
        raised[token[b, d]] += bias[b, d, p]
        whole = raised - np.log(np.exp(raised).sum())
        np.testing.assert_allclose(got.logp[b, d, p], whole[token[b, d]], atol=2e-6)
    assert (got.logp[0, 1, 2] == row[0, 1]).all()  # nothing is added: the shared row itself
    all_of_it = tree.candidates(tree.Rule(12, width=11), jnp.asarray(logits))
    got = jax.device_get(jax.jit(tree.conditioned)(all_of_it, np.ones((2, 3, 11, 11), np.float32)))
    np.testing.assert_allclose(np.exp(got.logp).sum(-1), 1, atol=1e-5)
    broken = found._replace(logp=found.logp.at[0, 0].set(-jnp.inf))
    assert (np.asarray(tree.conditioned(broken, jnp.asarray(bias)).logp)[0, 0] == -np.inf).all()


def test_a_node_as_probable_as_the_least_stays():
    """Paths of 1/2, 1/4 and 1/8 below the root: each is in the tree where it is the least itself."""
    row = lambda *values: jnp.asarray([values] * 3)
    scores = tree.Scores(jnp.log(row(1.0, 0.5, 0.25, 0.125)), jnp.zeros((3, 1)))
    whole = tree.Tree(row(9, 1, 2, 3), row(-1, 0, 0, 0), row(0, 1, 1, 1), jnp.full(3, 4), None, scores)
    assert tree.prune(whole, jnp.array([0.5, 0.25, 0.125])).size.tolist() == [2, 3, 4]
