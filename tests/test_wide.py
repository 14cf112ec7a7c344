"""With JAX_ENABLE_X64 on: the same tokens, in the library and in programs of the caller's own."""

import functools

import jax
import jax.numpy as jnp
import pytest
import tiny

from jetspec_jax import audit, baseline, speculate
from jetspec_jax.config import SamplingConfig, TreeConfig
from jetspec_jax.loop import decoder
from jetspec_jax.loop.plain import PLAIN

PROMPTS = [[1, 2, 3], [9]]
MANY = SamplingConfig(
    8, 1.0, 3, top_k=9, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.1, frequency_penalty=0.1,
    logit_bias={3: 1.0}, bad_words=[[4, 5]], min_new_tokens=2, logprobs=True,
)  # fmt: skip


@pytest.mark.slow  # the other test of this file has the same programs from outside
def test_the_library():
    target, head = tiny.target("dense"), tiny.head(True)
    decode = lambda drafts: [r.token_ids for r in speculate.generate(target, drafts, PROMPTS, TreeConfig(6), MANY)]
    narrow = decode(head)
    with jax.enable_x64(True):
        assert decode(head) == decode(None) == narrow
        found = baseline.first_difference(target, PROMPTS[0], narrow[0], [*narrow[0][:-1], -1], MANY)
        assert found.position == 7
        assert audit.audit(target, head, PROMPTS, TreeConfig(6), SamplingConfig(6))["equal"] == 2


def test_programs_of_the_callers_own():
    target = tiny.target("dense")
    static, params = decoder.Decoder(target.model, PLAIN, 48), {"target": target.params, "draft": None}
    asked = tiny.request(PROMPTS, 5)
    wanted = tiny.outputs(tiny.decode(static, params, asked))
    with jax.enable_x64(True):
        state = jax.jit(functools.partial(speculate.prefill, static))(params, asked)
        state = jax.jit(functools.partial(speculate.rounds, static))(params, state, jnp.int32(9))
    assert tiny.outputs(state) == wanted
