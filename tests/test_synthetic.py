"""The synthetic draft: its acceptance is what was asked for, and its tokens are the script's."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jetspec_jax import speculate
from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.drafts import synthetic
from jetspec_jax.drafts.synthetic import SyntheticConfig
from jetspec_jax.files.load import load_drafter

PROMPT = [3, 1, 4]


def pair(acceptance, depth=4, head=None, dtype=jnp.float32):
    """A scripted tiny target and its draft."""
    loaded, config = tiny.target("dense"), SyntheticConfig(acceptance, tiny.VOCAB, depth)
    model, params = synthetic.scripted(loaded.model, loaded.params, loaded.config.hidden_size)
    scripted = dataclasses.replace(loaded, model=model, params=params)
    if head is None:
        return scripted, load_drafter("synthetic", scripted, config)
    return scripted, tiny.LoadedHead(*synthetic.build(config, inner=head.draft, inner_params=head.params))


@pytest.mark.parametrize("sampling", [SamplingConfig(200), SamplingConfig(200, temperature=1.5, top_p=0.9)])
@pytest.mark.parametrize("acceptance", [1.0, 2.0, 3.4, 5.0, (0.9, 0.5, 0.5)], ids=str)
def test_acceptance_is_what_was_asked_for(acceptance, sampling):
    target, head = pair(acceptance)
    results = [speculate.generate(target, head, PROMPT, TreeConfig(8), sampling)]
    lengths = np.concatenate([r.accept_lengths[:-1] for r in results])  # the last round may be cut
    wanted = 1 + sum(SyntheticConfig(acceptance, tiny.VOCAB, 4).reach())
    spread = 4 * max(lengths.std(), 0.02) / np.sqrt(lengths.size)
    assert abs(lengths.mean() - wanted) <= spread + 1e-9
    if not isinstance(acceptance, tuple):
        assert set(lengths) <= {int(acceptance), int(acceptance) + 1}


def test_tokens_are_the_scripts_with_and_without_a_head_inside():
    script = synthetic.script(tiny.VOCAB)
    wanted = [int(script[3 + i]) for i in range(40)]
    for inner in (None, tiny.head(True)):
        target, head = pair(2.5, head=inner)
        for chunk in (None, 2):
            fast = speculate.generate(target, head, PROMPT, TreeConfig(6), SamplingConfig(40), prefill_chunk=chunk)
            assert fast.token_ids == wanted and fast.accept_lengths != [1] * fast.rounds
        assert speculate.generate(target, None, PROMPT, None, SamplingConfig(40)).token_ids == wanted


def test_the_script_begins_anew_where_it_ends():
    params = {"script": synthetic.script(tiny.VOCAB, size=5)}
    assert synthetic.script_at(params, jnp.arange(10)).tolist() == 2 * params["script"].tolist()


def test_a_head_inside_bounds_the_depth():
    config = SyntheticConfig(2.0, tiny.VOCAB)
    assert synthetic.build(config)[0].depth == 15
    assert synthetic.build(config, inner=tiny.head(True).draft)[0].depth == 4


def test_positions_survive_16_bits():
    """A position is carried as digits that bfloat16 holds exactly."""
    positions = jnp.arange(0, synthetic.BASE**synthetic.DIGITS, 9973)
    digits = (positions[:, None] // synthetic.BASE ** jnp.arange(synthetic.DIGITS) % synthetic.BASE).astype(
        jnp.bfloat16
    )
    back = (digits.astype(jnp.int32) * synthetic.BASE ** jnp.arange(synthetic.DIGITS)).sum(-1)
    assert (back == positions).all()


@pytest.mark.parametrize("acceptance", [0.5, 6.0, (0.5, 1.5), (0.1,) * 5], ids=str)
def test_impossible_acceptance_is_refused(acceptance):
    with pytest.raises(ConfigError, match="acceptance="):
        SyntheticConfig(acceptance, tiny.VOCAB, 4)


def test_a_draft_with_ranks_knows_how_often_it_is_right():
    """Trees accept what their own probabilities promise; larger ones more."""
    loaded, ranks = tiny.target("dense"), (0.6, 0.2, 0.1)
    model, params = synthetic.scripted(loaded.model, loaded.params, loaded.config.hidden_size)
    target = dataclasses.replace(loaded, model=model, params=params)
    head = load_drafter("synthetic", target, SyntheticConfig(1.0, tiny.VOCAB, 3, ranks=ranks))
    plain = speculate.generate(target, None, PROMPT, None, SamplingConfig(400))
    # Paths of at most three steps, the most probable first: 0.6, 0.36, 0.216, 0.2, 0.12, 0.12, 0.1 ...
    for nodes, wanted in ((4, 2.176), (8, 2.716)):
        result = speculate.generate(target, head, PROMPT, TreeConfig(nodes), SamplingConfig(400))
        lengths = np.array(result.accept_lengths[:-1])
        assert result.token_ids == plain.token_ids
        assert abs(lengths.mean() - wanted) <= 4 * lengths.std() / np.sqrt(lengths.size)


@pytest.mark.parametrize("ranks", [(0.2, 0.6), (0.9, 0.2), (0.5, 0.0)], ids=str)
def test_impossible_ranks_are_refused(ranks):
    with pytest.raises(ConfigError, match="ranks="):
        SyntheticConfig(1.0, tiny.VOCAB, 4, ranks=ranks)
