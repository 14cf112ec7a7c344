"""The draft head against a NumPy re-derivation, and its cached context against recomputation."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracles
import pytest
import tiny

from jetspec_jax.drafts import block
from jetspec_jax.layers import cache as kv_cache
from jetspec_jax.loop.contracts import Ends

EMBED = jnp.asarray(np.random.default_rng(9).standard_normal((tiny.VOCAB, 16)), jnp.float32)
FEATURES = jnp.asarray(np.random.default_rng(8).standard_normal((2, 14, 32)), jnp.float32)
TOKENS = jnp.asarray(np.random.default_rng(7).integers(0, tiny.VOCAB - 1, (2, 24)), jnp.int32)
CAPACITY = 24


@functools.partial(jax.jit, static_argnums=0)
def propose(draft, params, state, length):
    """Hidden states of the drafted slots instead of logits, and the state."""
    length = jnp.asarray(length)
    anchor = jnp.take_along_axis(TOKENS, length[:, None] - 1, 1)[:, 0]
    return draft.logits(params, state, anchor, length, Ends(lambda t: EMBED[t], lambda hidden: hidden))


@functools.partial(jax.jit, static_argnums=0)
def prefill(draft, params, features, length):
    return draft.extend(params, draft.init(params, 2, CAPACITY), tiny.seen(features, jnp.asarray(length)), tiny.NO_ENDS)


def keep(draft, params, state, rows, counts):
    return draft.extend(params, state, tiny.seen(rows, counts, path=True), tiny.NO_ENDS)


def reference(loaded, row: int, context: int, slots: int, first: int = 0):
    """Anchor at position `context`: its token, and masks. first: position of the first row of the context."""
    block = [TOKENS[row, context]] + [loaded.config.mask_token_id] * (slots - 1)
    return oracles.head_hidden(loaded.config, loaded.params, EMBED[jnp.array(block)], FEATURES[row, first:context])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_equals_numpy(causal):
    loaded = tiny.head(causal)
    contexts = [9, 4]
    state = prefill(loaded.draft, loaded.params, FEATURES[:, :9], contexts)
    hidden, _ = propose(loaded.draft, loaded.params, state, [c + 1 for c in contexts])
    for row, context in enumerate(contexts):
        tiny.close(hidden[row], reference(loaded, row, context, 5)[1:])


@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("window", [1, 3, 6, 23, 24])
def test_a_window_is_a_context_that_begins_later(window, batch):
    """Rotations are relative, so the block of a longer context sees what that of its last rows alone would see."""
    loaded = tiny.head(True)
    draft = loaded.draft.windowed(window)
    contexts = jnp.array([9, 4])
    state = prefill(draft, loaded.params, FEATURES[:, :9], contexts)
    hidden, state = windowed(draft, loaded.params, state, batch, contexts + 1)
    for row in range(batch):
        first = max(0, int(contexts[row]) - window)
        tiny.close(hidden[row], reference(loaded, row, int(contexts[row]), 5, first)[1:])
    rows = jnp.stack([FEATURES[0, 9:14], FEATURES[1, 4:9]])[:batch]  # a round of 3 and 1 moves the window
    state = keep(draft, loaded.params, state, rows, jnp.array([3, 1])[:batch])
    hidden, _ = windowed(draft, loaded.params, state, batch, contexts + jnp.array([4, 2]))
    for row, context in ((0, 12), (1, 5))[:batch]:
        tiny.close(hidden[row], reference(loaded, row, context, 5, max(0, context - window))[1:])


@pytest.mark.parametrize("batch", [1, 2])
def test_what_a_window_returns(batch):
    """The last slots of a row, and how many of them are committed: a kernel may read as many as it is told."""
    slots = jnp.arange(7.0)[:, None] + 10 * jnp.arange(batch)[:, None, None, None]
    length = jnp.array([6, 2])[:batch]
    (keys, values), count = kv_cache.latest((slots, -slots), length, 3)
    assert keys[:, 0, :, 0].tolist() == [[3, 4, 5], [10, 11, 12]][:batch] and count.tolist() == [3, 2][:batch]
    np.testing.assert_array_equal(values, -keys)


@functools.partial(jax.jit, static_argnums=(0, 3))
def windowed(draft, params, state, batch, length):
    """`propose` of the first rows alone: one row is read in another way."""
    few = jax.tree.map(lambda x: x[:batch], state)
    anchor = jnp.take_along_axis(TOKENS[:batch], length[:batch, None] - 1, 1)[:, 0]
    return draft.logits(params, few, anchor, length[:batch], Ends(lambda t: EMBED[t], lambda hidden: hidden))


def test_masks_differ():
    """The same weights under the other mask give other slots, so the flag is not ignored."""
    loaded, other = tiny.head(True), tiny.head(False)
    state = prefill(loaded.draft, loaded.params, FEATURES[:, :9], [9, 4])
    a, _ = propose(loaded.draft, loaded.params, state, [10, 5])
    b, _ = propose(other.draft, loaded.params, state, [10, 5])
    assert float(jnp.abs(a - b).max()) > 0.1


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_context_over_rounds_equals_context_at_once(causal):
    """Rounds that commit different numbers of rows, 0 among them; the rest of a pending buffer is noise."""
    loaded = tiny.head(causal)
    draft, params = loaded.draft, loaded.params
    seen = np.array([3, 1])
    state = prefill(draft, params, FEATURES[:, :5], seen)
    for counts in ([1, 5], [5, 1], [2, 0], [0, 4]):
        _, state = propose(draft, params, state, seen + 1)
        rows = np.full((2, 5, 32), 50.0, np.float32)
        for b in range(2):
            rows[b, : counts[b]] = FEATURES[b, seen[b] : seen[b] + counts[b]]
        state = keep(draft, params, state, rows, counts)
        seen = seen + counts
    hidden, state = propose(draft, params, state, seen + 1)
    assert state.length.tolist() == seen.tolist() and state.count.tolist() == [0, 0]
    whole = prefill(draft, params, FEATURES[:, :14], seen)
    wanted, _ = propose(draft, params, whole, seen + 1)
    tiny.close(hidden, wanted)
    for (k, v), (wk, wv) in zip(state.context, whole.context, strict=True):
        for b, n in enumerate(seen):
            tiny.close(k[b, :, :n], wk[b, :, :n])
            tiny.close(v[b, :, :n], wv[b, :, :n])
    for b, n in enumerate(seen):
        tiny.close(hidden[b], reference(loaded, b, int(n), 5)[1:])


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_smaller_depth_is_the_beginning_of_the_block(causal):
    """A causal head runs fewer slots and stays exact; a bidirectional one has to run them all."""
    loaded = tiny.head(causal)
    short = dataclasses.replace(loaded.draft, depth=2)
    assert short.slots == (3 if causal else 5)
    state = prefill(loaded.draft, loaded.params, FEATURES[:, :9], [9, 4])
    whole, _ = propose(loaded.draft, loaded.params, state, [10, 5])
    state = prefill(short, loaded.params, FEATURES[:, :9], [9, 4])
    few, _ = propose(short, loaded.params, state, [10, 5])
    tiny.close(few, whole[:, :2])


@functools.partial(jax.jit, static_argnums=0)
def run_block(draft, params, state, block):
    head = draft._module(params)
    context = head.context(state.pending)
    return head(block, state.length, context, state.count, state.context, state.length)[0]


@pytest.mark.parametrize("causal", [True, False], ids=["causal", "bidirectional"])
def test_slots_see_earlier_slots_only_in_a_causal_head(causal):
    loaded = tiny.head(causal)
    state = prefill(loaded.draft, loaded.params, FEATURES[:, :9], [9, 4])
    block = jnp.asarray(np.random.default_rng(3).standard_normal((2, 5, 16)), jnp.float32)
    base = run_block(loaded.draft, loaded.params, state, block)
    for slot in range(5):
        moved = run_block(loaded.draft, loaded.params, state, block.at[:, slot].add(1.0))
        changed = (jnp.abs(moved - base).max((0, 2)) > 1e-6).tolist()
        assert changed == [not causal or i >= slot for i in range(5)]


def test_block_reads_the_anchor_and_every_context_row():
    """Pitfalls of method 9: slot 0 is the anchor, not a mask; no context row is lost, the last pending one neither."""
    loaded = tiny.head(True)
    draft, params = loaded.draft, loaded.params
    state = prefill(draft, params, FEATURES[:, :9], [9, 4])
    state = keep(draft, params, state, FEATURES[:, 9:14], [3, 1])
    base, _ = propose(draft, params, state, [13, 6])
    for row, pending in ((0, 3), (1, 1)):
        for i in range(5):
            moved = keep(draft, params, state, FEATURES[:, 9:14].at[row, i].add(1.0), [3, 1])
            changed = jnp.abs(propose(draft, params, moved, [13, 6])[0] - base).max((1, 2)) > 1e-6
            assert changed.tolist() == [row == 0 and i < pending, row == 1 and i < pending]
    assert block.build(loaded.config, jnp.float32, depth=3)[0].depth == 3
