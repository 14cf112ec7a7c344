"""Scaled RoPE: frequencies and attention factors of transformers, both spellings, and lossless decoding with them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny

from jetspec_jax import baseline, speculate
from jetspec_jax.config import ConfigError, ModelConfig, SamplingConfig, TreeConfig
from jetspec_jax.drafts import block, block_files
from jetspec_jax.files import checkpoint
from jetspec_jax.layers import rope
from jetspec_jax.layers.rope_scaling import RopeScaling
from jetspec_jax.models import names, qwen3

ORIGINAL = 40960  # max_position_embeddings of the reference values; theta 1e6, head_dim 32
PARAMETERS = {
    "linear": {"rope_type": "linear", "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "factor": 4.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768},
    "yarn_given": {
        "rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 2048, "beta_fast": 16, "beta_slow": 2,
        "attention_factor": 0.9, "truncate": False,
    },
    "yarn_mscale": {
        "rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
    "llama3": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
}  # fmt: skip
# `ROPE_INIT_FUNCTIONS` of transformers 5.24: sequence length, attention factor, inverse frequencies.
REFERENCE = [
    ("linear", 1, 1.0, [0.25, 0.105424128, 0.0444569848, 0.0187473539, 0.00790569466, 0.00333380373, 0.00140585331,
     0.000592843455, 0.000250000012, 0.000105424122, 4.44569851e-05, 1.87473561e-05, 7.90569356e-06, 3.33380353e-06,
     1.40585337e-06, 5.92843435e-07]),
    ("yarn", 1, 1.138629436111989, [1.0, 0.421696514, 0.177827939, 0.0749894157, 0.0316227786, 0.0133352149,
     0.00477990136, 0.00165996165, 0.000549999997, 0.000168678584, 4.44569851e-05, 1.87473561e-05, 7.90569356e-06,
     3.33380353e-06, 1.40585337e-06, 5.92843435e-07]),
    ("yarn_given", 1, 0.9, [1.0, 0.421696514, 0.177827939, 0.0749894157, 0.0257716198, 0.00602263957, 0.000702926656,
     0.000296421727, 0.000125000006, 5.2712061e-05, 2.22284925e-05, 9.37367804e-06, 3.95284678e-06, 1.66690177e-06,
     7.02926684e-07, 2.96421717e-07]),
    ("yarn_mscale", 1, 1.0569662567531275, [1.0, 0.421696514, 0.177827939, 0.0749894157, 0.0254563373, 0.0081344815,
     0.00233371649, 0.000521702226, 2.49999994e-05, 1.05424124e-05, 4.44569832e-06, 1.87473552e-06, 7.90569402e-07,
     3.33380342e-07, 1.40585328e-07, 5.92843428e-08]),
    ("llama3", 1, 1.0, [1.0, 0.421696514, 0.177827939, 0.0749894157, 0.0316227786, 0.0133352149, 0.00562341325,
     0.00174321025, 0.000213607578, 5.2712061e-05, 2.22284925e-05, 9.37367804e-06, 3.95284678e-06, 1.66690177e-06,
     7.02926684e-07, 2.96421717e-07]),
    ("dynamic", 40960, 1.0, [1.0, 0.421696514, 0.177827939, 0.0749894157, 0.0316227786, 0.0133352149, 0.00562341325,
     0.00237137382, 0.00100000005, 0.000421696488, 0.00017782794, 7.49894243e-05, 3.16227743e-05, 1.33352141e-05,
     5.62341347e-06, 2.37137374e-06]),
    ("dynamic", 65536, 1.0, [1.0, 0.388658404, 0.151055366, 0.058708936, 0.0228177216, 0.00886829942, 0.0034467394,
     0.00133960426, 0.000520648435, 0.000202354408, 7.86467426e-05, 3.05667163e-05, 1.18800117e-05, 4.61726631e-06,
     1.79453957e-06, 6.97462838e-07]),
    ("dynamic", 163840, 1.0, [1.0, 0.355416119, 0.126320615, 0.0448963828, 0.0159568973, 0.00567133818, 0.00201568496,
     0.00071640691, 0.000254622544, 9.04969638e-05, 3.21640764e-05, 1.14316317e-05, 4.06298614e-06, 1.44405067e-06,
     5.13238888e-07, 1.82413359e-07]),
]  # fmt: skip
RAW = {
    "model_type": "qwen3", "vocab_size": 37, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "intermediate_size": 24, "max_position_embeddings": 64,
}  # fmt: skip
SMALL = {  # every rule, with lengths that a test reaches
    "linear": {"rope_type": "linear", "factor": 2.0},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    "llama3": PARAMETERS["llama3"] | {"original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("name, length, attention, inverse", REFERENCE, ids=[f"{n}-{i}" for n, i, *_ in REFERENCE])
def test_frequencies_are_those_of_transformers(name, length, attention, inverse):
    scaling = RopeScaling.from_hf(PARAMETERS[name], ORIGINAL)
    positions = jnp.array([[length - 1]])
    ours = rope.inverse_frequencies(32, 1e6, scaling, positions)
    np.testing.assert_allclose(ours.ravel(), inverse, rtol=2e-6)
    assert scaling.attention_factor == pytest.approx(attention, rel=1e-12)
    cos, sin = rope.angles(positions, 32, 1e6, scaling)
    np.testing.assert_allclose(cos**2 + sin**2, attention**2, rtol=1e-5)


@pytest.mark.parametrize("name", PARAMETERS)
def test_live_comparison_with_transformers(name):
    pytest.importorskip("torch")
    import transformers
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    transformers.logging.set_verbosity_error()
    for theta, dim, positions in ((1e4, 64, 4096), (5e5, 128, 131072)):
        given = PARAMETERS[name] | {"rope_theta": theta}
        sizes = {"hidden_size": 64, "num_attention_heads": 2, "head_dim": dim, "max_position_embeddings": positions}
        config = transformers.Qwen3Config(**sizes, rope_parameters=given)
        for length in (17, positions, 3 * positions):
            theirs, attention = ROPE_INIT_FUNCTIONS[given["rope_type"]](config, "cpu", seq_len=length)
            scaling = RopeScaling.from_hf(PARAMETERS[name], positions)
            ours = rope.inverse_frequencies(dim, theta, scaling, jnp.array([[length - 1]]))
            np.testing.assert_allclose(ours.ravel(), theirs.numpy(), rtol=3e-6)
            assert scaling.attention_factor == pytest.approx(attention)


class TestReading:
    @pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
    @pytest.mark.parametrize("word", ["type", "rope_type"])
    @pytest.mark.parametrize("name", PARAMETERS)
    def test_both_spellings(self, key, word, name):
        given = {k: v for k, v in PARAMETERS[name].items() if k != "rope_type"} | {word: PARAMETERS[name]["rope_type"]}
        for raw in (RAW | {key: given, "rope_theta": 5e5}, RAW | {key: given | {"rope_theta": 5e5}}):
            config = ModelConfig.from_hf(raw)
            assert config.rope_theta == 5e5 and config.rope_scaling == RopeScaling.from_hf(PARAMETERS[name], 64)

    @pytest.mark.parametrize("name", PARAMETERS)
    def test_a_head_keeps_its_scaling(self, name):
        config = tiny.head_config(True, dtype="float32", rope_scaling=RopeScaling.from_hf(PARAMETERS[name], 512))
        assert block_files.config(config.to_hf()) == config

    def test_the_context_that_a_target_may_use(self):
        length = lambda rope: ModelConfig.from_hf(RAW | {"rope_scaling": rope}).context_length
        assert length(None) == 64
        assert length({"rope_type": "linear", "factor": 4}) == length({"rope_type": "dynamic", "factor": 4}) == 256
        assert length({"rope_type": "yarn", "factor": 4}) == 256
        assert length({"rope_type": "yarn", "factor": 4, "original_max_position_embeddings": 32}) == 128
        assert length({"rope_type": "yarn", "original_max_position_embeddings": 16}) == 64  # factor 4 by itself
        assert length(SMALL["llama3"]) == 64

    @pytest.mark.parametrize(
        "given, words",
        [
            ({"rope_type": "longrope", "factor": 4.0}, ("longrope", "yarn")),
            ({"rope_type": "marvellous"}, ("marvellous",)),
            ({"rope_type": "linear"}, ("factor", "None")),
            ({"rope_type": "linear", "factor": 0.5}, ("factor", "0.5")),
            ({"rope_type": "dynamic", "factor": "4"}, ("factor", "'4'")),
            ({"rope_type": "yarn", "factor": True}, ("factor", "True")),
            ({"rope_type": "yarn", "factor": 4.0, "beta_fast": 1, "beta_slow": 2}, ("beta_fast",)),
            ({"rope_type": "yarn", "factor": 4.0, "truncate": 3}, ("truncate",)),
            ({"rope_type": "yarn", "factor": 4.0, "attention_factor": -1}, ("attention_factor", "-1")),
            ({"rope_type": "llama3", "factor": 8.0}, ("low_freq_factor",)),
            (PARAMETERS["llama3"] | {"low_freq_factor": 4.0}, ("high_freq_factor",)),
            (PARAMETERS["llama3"] | {"original_max_position_embeddings": "8k"}, ("original_max_position_embeddings",)),
        ],
    )
    @pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
    def test_bad_values_are_refused_by_name(self, key, given, words):
        with pytest.raises(ConfigError) as error:
            ModelConfig.from_hf(RAW | {key: given}, "some/config.json")
        line = str(error.value)
        assert "\n" not in line and all(word in line for word in (*words, key, "some/config.json"))


def scaled(kind: str) -> tuple[tiny.Loaded, tiny.LoadedHead]:
    """A random target and head under one rule, original length 64."""
    config = tiny.model_config("dense", max_positions=64, rope_scaling=RopeScaling.from_hf(SMALL[kind], 64))
    model, shapes = qwen3.build(config, jnp.float32)
    params = tiny.random_like(shapes, 2)
    params["embedding"] = params["embedding"] * 4.0
    head_config = tiny.head_config(True, max_positions=64, rope_scaling=RopeScaling.from_hf(SMALL[kind], 64))
    draft, shapes = block.build(head_config, jnp.float32)
    return (
        tiny.Loaded(model, params, config, jnp.dtype("float32")),
        tiny.LoadedHead(draft, tiny.random_like(shapes, 1), head_config),
    )


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.slow if k != "dynamic" else ()) for k in SMALL])
def test_decoding_is_lossless(kind):
    """FC-33, FC-34: prompt and output run over the original length of target and head; batched and unequal."""
    loaded, head = scaled(kind)
    prompts, sampling = [list(range(1, 31)), [3, 1, 4]], SamplingConfig(loaded.config.context_length - 31)
    wanted = baseline.generate(loaded, prompts, sampling)
    got = speculate.generate(loaded, head, prompts, TreeConfig(8), sampling)
    assert [r.token_ids for r in got] == [r.token_ids for r in wanted]


@pytest.mark.parametrize("kind", SMALL)
def test_the_target_is_computed_with_its_scaling(kind):
    loaded, _ = scaled(kind)
    unscaled = dataclasses.replace(loaded.config, rope_scaling=None)
    other = dataclasses.replace(loaded, model=qwen3.build(unscaled, jnp.float32)[0])
    tokens = np.random.default_rng(0).integers(0, 37, 100)
    apart = jnp.abs(tiny.path_logits(loaded, tokens) - tiny.path_logits(other, tokens)).max((0, 2))
    assert apart[-1] > 0.1
    assert (apart[:64].max() == 0) == (kind == "dynamic")  # which leaves the original length alone


def test_a_long_prompt_of_dynamic_ntk_is_refused():
    """Generation may go beyond the original length (above); a prompt may not, for transformers rotates it otherwise."""
    loaded, _ = scaled("dynamic")
    speculate.check(loaded, [1] * 64, SamplingConfig(20))
    with pytest.raises(ConfigError, match=r"65 tokens.*'dynamic'.*64.*yarn"):
        speculate.check(loaded, [1] * 65, SamplingConfig(20))
    with pytest.raises(ConfigError, match="context is 192"):
        speculate.check(loaded, [1] * 60, SamplingConfig(200))


@pytest.mark.parametrize("kind", SMALL)
def test_logits_are_those_of_transformers(kind):
    """Token by token with a cache, over twice the original length."""
    torch = pytest.importorskip("torch")
    import transformers

    transformers.logging.set_verbosity_error()
    loaded, _ = scaled(kind)
    raw = {k: v for k, v in RAW.items() if k != "model_type"} | {"intermediate_size": 24, "rms_norm_eps": 1e-6}
    config = transformers.Qwen3Config(
        **raw, rope_parameters=dict(SMALL[kind]) | {"rope_theta": 1e4}, attn_implementation="eager"
    )
    model = transformers.Qwen3ForCausalLM(config).eval()
    tensors = checkpoint.disassemble(names.of_target(loaded.config), jax.device_get(loaded.params))
    model.load_state_dict({n: torch.tensor(x) for n, x in tensors.items()})
    tokens = np.random.default_rng(0).integers(0, 37, 128)
    theirs, cache = [], None
    with torch.no_grad():
        for token in tokens:
            out = model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            theirs.append(out.logits[0, 0].numpy())
    ours, theirs = np.asarray(tiny.path_logits(loaded, tokens)[0]), np.array(theirs)
    assert np.abs(ours - theirs).max() <= 3e-5 * np.abs(theirs).max()
