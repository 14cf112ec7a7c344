"""transformers' own generate on the weights of a pair, as an outside measure of plain decoding."""

from __future__ import annotations

import statistics
import time

import jax
import shapes

from jetspec_jax.config import ConfigError


def per_token(pair: shapes.Pair, length: int, steps: int, repeats: int = 3) -> float:
    """Seconds a token after a prompt of `length`: static cache, compiled, greedy, batch 1, the weights of `pair`.

    The median over `repeats` of (time of `steps` tokens - time of `steps` // 4) / difference.
    """
    try:
        import torch
        import transformers
    except ImportError as error:
        raise ConfigError(f"--anchor: {error}; install torch, or leave it out") from None
    model = _model(pair, torch, transformers)
    prompt = torch.randint(0, pair.target.vocab_size, (1, length), device=model.device)

    def run(tokens: int) -> float:
        begin = time.perf_counter()
        model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=tokens, min_new_tokens=tokens,
            do_sample=False, cache_implementation="static", pad_token_id=0,
        )  # fmt: skip
        if model.device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter() - begin

    short = steps // 4
    for _ in range(2):
        run(short), run(steps)  # compiles
    return statistics.median((run(steps) - run(short)) / (steps - short) for _ in range(repeats))


def _model(pair: shapes.Pair, torch, transformers):
    """The target as a transformers model; arrays are handed over on the device."""
    c, params = pair.target.config, pair.params["target"]
    kinds = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }
    if c.model_type not in kinds:
        raise ConfigError(f"--anchor: no transformers model is set up for {c.model_type}; choose a dense shape")
    make, kind = kinds[c.model_type]
    config = make(
        vocab_size=c.vocab_size, hidden_size=c.hidden_size, num_hidden_layers=c.num_layers,
        num_attention_heads=c.num_heads, num_key_value_heads=c.num_kv_heads, head_dim=c.head_dim,
        intermediate_size=c.intermediate_size, rms_norm_eps=c.norm_eps, max_position_embeddings=c.max_positions,
        tie_word_embeddings=c.tie_embeddings, rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
        eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = kind(config)
    move = lambda x: torch.from_dlpack(jax.block_until_ready(x))
    tensors = {"model.embed_tokens.weight": params["embedding"], "model.norm.weight": params["norm"]}
    if not c.tie_embeddings:
        tensors["lm_head.weight"] = params["lm_head"]
    for i in range(c.num_layers):
        layer, at = params["layers"][i], f"model.layers.{i}."
        q, k, v = layer["qkv"][:, :, :-2], layer["qkv"][:, :, -2], layer["qkv"][:, :, -1]
        named = {"self_attn.q_proj": q, "self_attn.k_proj": k, "self_attn.v_proj": v, "self_attn.o_proj": layer["out"],
                 "mlp.gate_proj": layer["gate_up"][:, 0], "mlp.up_proj": layer["gate_up"][:, 1],
                 "mlp.down_proj": layer["down"]}  # fmt: skip
        tensors |= {f"{at}{name}.weight": w.reshape(w.shape[0], -1).T for name, w in named.items()}
        norms = {"input_layernorm": "input_norm", "post_attention_layernorm": "post_norm"}
        norms |= {"self_attn.q_norm": "q_norm", "self_attn.k_norm": "k_norm"} if c.qk_norm else {}
        tensors |= {f"{at}{name}.weight": layer[own] for name, own in norms.items()}
    device = move(params["norm"]).device
    model.load_state_dict({name: move(x) for name, x in tensors.items()}, strict=not c.tie_embeddings, assign=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(config).to(device)
    return model.eval()
