"""What XLA makes of the decode loop: no copies of the cache, nothing that leaves the device, few programs."""

import functools
import math
import re

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jetspec_jax import speculate
from jetspec_jax.backends.choose import resolve
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.drafts import block
from jetspec_jax.engine import programs
from jetspec_jax.engine.programs import program
from jetspec_jax.layers.attention import CHUNK
from jetspec_jax.loop import decoder
from jetspec_jax.loop.processors import Sampling
from jetspec_jax.loop.state import Request
from jetspec_jax.models import qwen3

# B=2, S=8192: the cache is 100 times all else. The head's context is of another size, so that shapes tell them apart.
BATCH, SLOTS, ROWS, DEPTH = 2, 8192, 8, 4
WIDE = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 64}
HOST_CALLS = re.compile(r"\b(outfeed|infeed|send|recv|custom-call[^\n]*(callback|host))", re.IGNORECASE)
CUSTOM_CALLS = {"TopK", "topk", "__gpu$TopK", "__onednn$matmul", "__onednn$matmul_reorder"}


@functools.lru_cache(None)
def compiled_rounds(builder: str):
    """The donated program, and the sizes of what it must hold."""
    model, params = qwen3.build(tiny.model_config("dense", **WIDE), jnp.float32)
    draft, head = block.build(tiny.head_config(True, **WIDE | {"num_heads": 2, "num_kv_heads": 2}), jnp.float32)
    static = tiny.loop(model, draft, ROWS, SLOTS, builder, 4)
    weights = {"target": params, "draft": head}
    row = lambda dtype: jax.ShapeDtypeStruct((BATCH,), dtype)
    ints = row(jnp.int32)
    tokens, ends = (jax.ShapeDtypeStruct((BATCH, n), jnp.int32) for n in (16, 3))
    asked = Request(tokens, ints, ints, ints, Sampling(row(jnp.float32), row(jnp.uint32)), ends)
    state = jax.eval_shape(functools.partial(decoder.prefill, static), weights, asked)
    compiled, _ = program(decoder.rounds, static, weights, state, jax.ShapeDtypeStruct((), jnp.int32), donate=(1,))
    return compiled, state


def size(tree) -> int:
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


@pytest.mark.parametrize("builder", ["best_first", "accum_logp"])
def test_temporary_memory_is_a_small_part_of_the_cache(builder):
    """At most 5 % of the K/V, two f32 copies of the logits, and one layer's attention scores."""
    compiled, state = compiled_rounds(builder)
    kv = size(state.cache) + size(state.draft.context)
    fresh = kv // SLOTS * ROWS
    logits = 4 * BATCH * (ROWS + DEPTH) * tiny.VOCAB
    scores = 4 * BATCH * WIDE["num_heads"] * ROWS * (CHUNK + ROWS)
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes <= 0.05 * (kv + fresh) + 2 * logits + scores
    assert memory.alias_size_in_bytes >= kv  # the donated caches are the returned ones


def test_no_copy_of_the_cache():
    """No instruction but in-place updates and plumbing produces an array of a cache's shape."""
    compiled, state = compiled_rounds("best_first")
    shapes = {",".join(map(str, x.shape)) for x in jax.tree.leaves((state.cache, state.draft.context))}
    assert len(shapes) == 2
    produced = re.findall(rf"= f32\[(?:{'|'.join(shapes)})\]\S* ([\w-]+)\(", compiled.as_text())
    assert produced  # the expression finds what it looks for
    plumbing = {"parameter", "get-tuple-element", "bitcast", "tuple", "while"}
    plumbing |= {"dynamic-update-slice", "scatter", "fusion"}  # in place, or the temporary memory would tell
    assert set(produced) <= plumbing, sorted(set(produced) - plumbing)


def test_nothing_leaves_the_device():
    text = compiled_rounds("best_first")[0].as_text()
    assert not HOST_CALLS.findall(text)
    assert set(re.findall(r'custom_call_target="([^"]+)"', text)) <= CUSTOM_CALLS
    assert re.findall(r"\bwhile\(", text)


@pytest.mark.parametrize("kernels", ["xla", "pallas"])
@pytest.mark.parametrize("kind", ["dense", "moe", "llama"])
def test_no_weight_matrix_is_made_wider(kind, kernels):
    """In 16 bits products take the weights as they are: the only wide arrays of a round are far smaller."""
    wide = {"hidden_size": 128, "num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "intermediate_size": 128}
    how = resolve(kernels, "bfloat16", 32)
    model, params = qwen3.build(tiny.model_config(kind, **wide), jnp.bfloat16, how)
    draft, head = block.build(tiny.head_config(True, **wide), jnp.bfloat16, backend=how)
    static, weights = tiny.loop(model, draft, 4, 32), {"target": params, "draft": head}
    row = jax.ShapeDtypeStruct((1,), jnp.int32)
    tokens, ends = (jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (8, 2))
    asked = Request(tokens, row, row, row, Sampling(None, jax.ShapeDtypeStruct((1,), jnp.uint32)), ends)
    state = jax.eval_shape(functools.partial(decoder.prefill, static), weights, asked)
    text = str(jax.make_jaxpr(functools.partial(decoder.step, static))(weights, state))
    widened = re.findall(r":f32\[([\d,]+)\] = convert_element_type", text)
    smallest = min(x.size for x in jax.tree.leaves(params["layers"]) if x.ndim > 1 and x.shape[-1] > 4)
    assert widened and max(math.prod(map(int, x.split(","))) for x in widened) < smallest / 2, widened


STUB = tiny.hash_target()
HEAD = tiny.LoadedHead(tiny.TableDraft(3), {"logits": jnp.asarray(np.random.default_rng(0).standard_normal((3, 37)))})
HEAD.params["logits"] = HEAD.params["logits"].astype(jnp.float32)


def generate(length: int, budget: int = 5, **options):
    prompt = [i % 30 for i in range(length)]
    return speculate.generate(STUB, HEAD, prompt, TreeConfig(budget=budget, width=4), SamplingConfig(**options))


def test_programs_follow_the_buckets():
    """FC-55: 200 tokens from prompts of five lengths: one prefill a prompt bucket (16, 32, 64) and one loop."""
    before = len(programs._PROGRAMS)
    for length in (1, 9, 16, 30, 40):
        result = generate(length, max_new_tokens=200)
        assert result.new_tokens == 200
    made = list(programs._PROGRAMS)[before:]
    assert sorted(key[0].__name__ for key in made) == ["prefill"] * 3 + ["rounds"]
    again = generate(13, max_new_tokens=200)
    assert again.seconds["compile"] == 0 and len(programs._PROGRAMS) == before + 4


def test_nothing_that_a_request_changes_compiles():
    """Budget within its bucket, seed, limit, end tokens and the number of rounds are traced; so is the temperature,
    once some row samples."""
    generate(5, max_new_tokens=10)
    generate(5, max_new_tokens=10, temperature=0.5)
    events = []
    listen = lambda name, seconds, **_: events.append(name) if "backend_compile" in name else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for budget, options in [
            (5, {"max_new_tokens": 33}),
            (6, {"max_new_tokens": 10, "temperature": 1.0, "seed": 7}),
            (8, {"max_new_tokens": 150, "eos": (3, 4)}),
            (7, {"max_new_tokens": 0}),
        ]:
            generate(7, budget, **options)
        assert not events
        jax.jit(lambda x: x + 12345)(jnp.zeros(3))
        assert events  # the listener hears
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_values_of_options_compile_nothing():
    """Which options a batch uses is static, their values are not."""
    first = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 5,
        "repetition_penalty": 1.1,
        "logit_bias": {3: 1.0},
        "bad_words": [(1, 2)],
    }
    generate(5, max_new_tokens=10, **first)
    before = len(programs._PROGRAMS)
    others = {"top_p": 0.5, "top_k": 9, "presence_penalty": 0.3, "logit_bias": dict.fromkeys(range(4), -1.0)}
    result = generate(7, 7, max_new_tokens=90, temperature=1.0, seed=3, bad_words=[(4, 5), (7, 8)], **others)
    assert result.seconds["compile"] == 0 and len(programs._PROGRAMS) == before


def test_rounds_are_one_program_for_any_number():
    engine = speculate.start(STUB, HEAD, [1, 2, 3], TreeConfig(budget=5, width=4), SamplingConfig(max_new_tokens=60))
    before, counts = len(programs._PROGRAMS), []
    for n in (1, 7, 0):
        engine.advance(n)
        counts.append(int(engine.state.rounds[0]))
        assert len(programs._PROGRAMS) <= before + 1
    assert counts == [1, 8, 8]


def test_a_second_stream_compiles_nothing():
    """Also nothing small: what a stream reads between rounds comes over as it is and is sliced on the host. The second
    prompt has another length, so that a slice on the device would be a new program."""
    loaded, head = tiny.target("dense"), tiny.head(True)
    ask = lambda prompt, new: list(speculate.stream(loaded, head, prompt, TreeConfig(8), SamplingConfig(new)))
    ask([1, 2, 3], 40)
    seen = []
    jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: seen.append(name))
    assert len(ask([9, 8, 7, 6, 5, 4, 3], 37)) > 5
    assert not [name for name in seen if "backend_compile" in name]
