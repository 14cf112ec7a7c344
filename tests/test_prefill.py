"""Prompts read in chunks: the same caches, tokens and draft context as read at once, in memory of one chunk."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jetspec_jax import baseline, speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.drafts import block
from jetspec_jax.engine import programs
from jetspec_jax.engine.programs import program
from jetspec_jax.loop import decoder
from jetspec_jax.loop.processors import Sampling
from jetspec_jax.loop.state import Request
from jetspec_jax.models import qwen3

CAPACITY, SLOTS = 64, 26
PROMPTS = [list(range(1, 27)), [7], [3, 1, 4, 1, 5, 9, 2, 6], list(range(30, 13, -1))]  # 26, 1, 8, 17 tokens
CHUNKS = [1, 4, 7, 8, 25]  # one row; a divisor of a length; uneven ones, whose last chunk starts early; almost all


def states(loaded, head, chunk: int):
    """State after prefill, read at once and in chunks."""
    draft = head.draft if head else tiny.TableDraft(4)
    params = {"target": loaded.params, "draft": head.params if head else {"logits": jnp.zeros((4, tiny.VOCAB))}}
    asked = tiny.request(PROMPTS, 20, slots=SLOTS, temperature=[0.0, 1.0, 0.0, 0.7])
    make = lambda size: tiny.loop(loaded.model, draft, 8, CAPACITY, prefill_chunk=size)
    return [jax.device_get(tiny.prefill(make(size), params, asked)) for size in (SLOTS, chunk)]


@pytest.mark.parametrize("chunk", CHUNKS)
def test_the_stub_reads_exactly_the_same(chunk):
    """Keys are tokens and values positions, so a row lost, doubled or moved by a chunk's border would show."""
    loaded = tiny.hash_target()
    whole, pieces = states(loaded, None, chunk)
    assert (whole.tokens == pieces.tokens).all() and (whole.length == pieces.length).all()
    for row, prompt in enumerate(PROMPTS):
        keys, values = (x[row, 0, : len(prompt), 0].tolist() for x in pieces.cache[0])
        assert keys == prompt and values == list(range(len(prompt)))


@pytest.mark.parametrize("kind, causal, chunk", [("dense", True, 7), ("moe", False, 8)])
def test_caches_and_draft_context_are_equal(kind, causal, chunk):
    loaded, head = tiny.target(kind), tiny.head(causal)
    whole, pieces = states(loaded, head, chunk)
    assert (whole.tokens == pieces.tokens).all() and (whole.length == pieces.length).all()
    assert (whole.draft.length == pieces.draft.length).all() and (whole.draft.count == pieces.draft.count).all()
    for ours, theirs in ((pieces.cache, whole.cache), (pieces.draft.context, whole.draft.context)):
        for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            for row, prompt in enumerate(PROMPTS):
                tiny.close(x[row, :, : len(prompt)], y[row, :, : len(prompt)])


@pytest.mark.slow
def test_generate_gives_the_same_tokens():
    """A batch of unequal prompts through `generate`, and the tokens of a plain run read at once."""
    loaded, head, sampling = tiny.target("dense"), tiny.head(True), SamplingConfig(24)
    ask = lambda drafting, chunk: speculate.generate(
        loaded, drafting, PROMPTS, TreeConfig(8), sampling, prefill_chunk=chunk
    )
    wanted, got = ask(None, 512), ask(head, 5)
    assert [r.token_ids for r in got] == [r.token_ids for r in wanted]
    assert (got[0].settings["prefill_chunk"], wanted[0].settings["prefill_chunk"]) == (5, 512)


def test_a_prompt_that_fills_the_capacity():
    """FC-57: the last chunk ends at the last slot that a prompt may have."""
    loaded = tiny.hash_target()
    head = tiny.LoadedHead(tiny.TableDraft(4), {"logits": jnp.zeros((4, tiny.VOCAB))})
    prompt = [i % tiny.VOCAB for i in range(251)]
    wanted = speculate.generate(loaded, None, prompt, None, SamplingConfig(5))
    for chunk in (100, 256):
        got = speculate.generate(loaded, head, prompt, TreeConfig(8), SamplingConfig(5), prefill_chunk=chunk)
        assert got.token_ids == wanted.token_ids
        if chunk == 100:
            assert got.settings["capacity"] == 512  # 251 + 5 + 5


@functools.lru_cache(None)
def loud(kind: str):
    """A tiny target in which the values of token 0 alone are infinite, in its first layer; 0 is also the padding."""
    loaded = tiny.target(kind)
    first = loaded.params["layers"][0]
    # A channel that token 0 alone has; the weight is finite, and only its product with that channel is not.
    embedding = loaded.params["embedding"].at[:, 0].set(0).at[0].set(0).at[0, 0].set(9)
    layers = loaded.params["layers"] | {0: first | {"qkv": first["qkv"].at[0, :, -1].set(3e38)}}
    return dataclasses.replace(loaded, params=loaded.params | {"embedding": embedding, "layers": layers})


@pytest.mark.parametrize(
    "kind, causal, chunk",
    [
        ("dense", True, 2), ("moe", False, None),
        pytest.param("dense", True, None, marks=pytest.mark.slow),
        pytest.param("moe", False, 2, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_values_that_are_not_finite_are_told_before_a_token(kind, causal, chunk):
    """Attention takes such a value for 0, and with one new token nothing would come after. Padding tells nothing."""
    loaded, prompts = loud(kind), [[1, 0, 2, 3], [4, 5], [6, 7, 8], [3, 0]]
    option = SamplingConfig(1, bad_words=[[0]])
    for head in (None, tiny.head(causal)):
        got = speculate.generate(loaded, head, prompts, TreeConfig(4), option, prefill_chunk=chunk)
        assert [r.finish_reason for r in got] == ["error", "length", "length", "error"]
        assert [r.new_tokens for r in got] == [0, 1, 1, 0] and "not finite" in got[0].error
    sound = speculate.generate(quiet(loaded), None, prompts, None, option)
    assert not sound[0].error and [r.token_ids for r in got[1:3]] == [r.token_ids for r in sound[1:3]]


def quiet(loaded):
    """The same target with a weight that is no louder than the others; no other token has that channel."""
    first = loaded.params["layers"][0]
    layers = loaded.params["layers"] | {0: first | {"qkv": first["qkv"].at[0, :, -1].set(0)}}
    return dataclasses.replace(loaded, params=loaded.params | {"layers": layers})


@pytest.mark.parametrize("layer", [0, 1])
def test_a_broken_value_projection_of_any_layer_is_told(layer):
    loaded = tiny.target("dense")
    own = loaded.params["layers"][layer]
    layers = loaded.params["layers"] | {layer: own | {"qkv": own["qkv"].at[3, 1, -1, 2].set(jnp.nan)}}
    broken = dataclasses.replace(loaded, params=loaded.params | {"layers": layers})
    with pytest.raises(speculate.DecodeError, match="not finite"):
        speculate.generate(broken, None, [1, 2, 3], None, SamplingConfig(1))
    nothing = speculate.generate(broken, None, [1, 2, 3], None, SamplingConfig(0))
    assert nothing.finish_reason == "length" and not nothing.token_ids


@pytest.mark.parametrize("chunk", [0, -4, 1.5, True])
def test_wrong_chunks_are_refused_by_name(chunk):
    with pytest.raises(ConfigError, match=rf"prefill_chunk={chunk}"):
        speculate.start(tiny.hash_target(), None, [1], prefill_chunk=chunk)


def test_logits_after_a_long_text():
    """`baseline.next_logits` reads in chunks too, over the border of its buffer sizes."""
    loaded = tiny.target("llama")
    ids = np.random.default_rng(0).integers(0, tiny.VOCAB, 1100).tolist()
    wanted = tiny.path_logits(loaded, ids)[0]
    for lengths in ([1023, 5], [1024], [1100]):
        tiny.close(baseline.next_logits(loaded, [ids[:n] for n in lengths]), wanted[np.array(lengths) - 1])


WIDE = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64}


@functools.lru_cache(None)
def memory(slots: int, chunk: int):
    """Bytes that prefill needs beside its inputs and outputs."""
    model, params = qwen3.build(tiny.model_config("dense", vocab_size=20_000, **WIDE), jnp.float32)
    draft, head = block.build(tiny.head_config(True, vocab_size=20_000), jnp.float32)
    static = tiny.loop(model, draft, 8, slots + 6, prefill_chunk=chunk)
    row = lambda dtype, *shape: jax.ShapeDtypeStruct((2, *shape), dtype)
    ints = row(jnp.int32)
    asked = Request(row(jnp.int32, slots), ints, ints, ints, Sampling(None, row(jnp.uint32)), row(jnp.int32, 3))
    compiled, _ = program(decoder.prefill, static, {"target": params, "draft": head}, asked)
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_the_prompt():
    """Neither with prompt x prompt nor with prompt x vocabulary; four times the prompt is a little bookkeeping more."""
    small, large = memory(1024, 128), memory(4096, 128)
    assert large - small < 2 * 4 * 4096 * 4  # a few [B, S] records
    assert large < 2 * 4 * 4 * 128 * (1024 + 128) * 4  # one layer's scores of a chunk, a few copies
    assert memory(1024, 1024) > 4 * small


def test_long_prompts_share_a_program():
    """FC-55: chunks are one loop, so any length of a capacity is the same prefill."""
    loaded = tiny.hash_target()
    before = len(programs._PROGRAMS)
    for length in (70, 100, 129, 200):
        prompt = [i % 30 for i in range(length)]
        speculate.generate(loaded, None, prompt, None, SamplingConfig(9), prefill_chunk=33)
    assert sorted(key[0].__name__ for key in list(programs._PROGRAMS)[before:]) == ["prefill", "rounds"]
