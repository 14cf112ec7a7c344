"""GGUF files to test with, written by the `gguf` package from a Hugging Face folder."""

import json
import pathlib

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import load_file

LLAMA = pathlib.Path(__file__).parent / "fixtures" / "reference" / "llama"
QWEN = pathlib.Path(__file__).parent / "fixtures" / "reference" / "qwen3_untied"
HEADS = {"q_proj": 4, "k_proj": 2}
NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "embed_tokens": "token_embd", "norm": "output_norm",
    "lm_head": "output",
}  # fmt: skip
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ã ©", "1 2"]
SPECIAL = {"<|endoftext|>": 3, "<|im_start|>": 3, "<|im_end|>": 3, "<think>": 4}
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"


def original(name: str) -> str:
    """The name that converters give a published tensor."""
    parts = name.removeprefix("model.").split(".")
    prefix = f"blk.{parts[1]}." if parts[0] == "layers" else ""
    middle = ".".join(parts[2:-1]) if prefix else parts[0]
    return f"{prefix}{NAMES[middle]}.{parts[-1]}"


def permuted(x: np.ndarray, heads: int) -> np.ndarray:
    """llama.cpp's order of query and key rows: pairs (i, i + half) side by side."""
    return x.reshape(heads, 2, -1, x.shape[-1]).swapaxes(1, 2).reshape(x.shape)


def byte_level_vocabulary() -> list[str]:
    from tokenizers import pre_tokenizers

    merged = [m.replace(" ", "") for m in MERGES]
    return [*SPECIAL, *sorted(pre_tokenizers.ByteLevel.alphabet()), *merged]


def write(
    path, source=LLAMA, quantised=None, fields=(), extra=(), vocabulary=None, kinds=True, merges=MERGES, alignment=None,
    types=SPECIAL, eos=2,
):  # fmt: skip
    """The checkpoint `source` as a GGUF file; `quantised` picks the type of a tensor by its published name."""
    raw = json.loads((source / "config.json").read_text())
    arch = raw["model_type"]
    writer = gguf.GGUFWriter(path, arch)
    if alignment:
        writer.add_custom_alignment(alignment)
    writer.add_block_count(raw["num_hidden_layers"])
    writer.add_context_length(raw["max_position_embeddings"])
    writer.add_embedding_length(raw["hidden_size"])
    writer.add_feed_forward_length(raw["intermediate_size"])
    writer.add_head_count(raw["num_attention_heads"])
    writer.add_head_count_kv(raw["num_key_value_heads"])
    writer.add_key_length(raw["head_dim"])
    writer.add_rope_dimension_count(raw["head_dim"])
    writer.add_rope_freq_base(raw["rope_parameters"]["rope_theta"])
    writer.add_layer_norm_rms_eps(raw["rms_norm_eps"])
    for key, value in fields:
        kind = next(kind for kind in (str, bool, float, int) if isinstance(value, kind))
        {str: writer.add_string, bool: writer.add_bool, float: writer.add_float32, int: writer.add_uint32}[kind](
            key, value
        )
    if vocabulary is not None:
        writer.add_tokenizer_model("gpt2")
        if "tokenizer.ggml.pre" not in dict(fields):
            writer.add_tokenizer_pre("smollm")
        writer.add_token_list(vocabulary)
        if kinds:
            writer.add_token_types([types.get(t, 1) for t in vocabulary])
        if merges is not None:
            writer.add_token_merges(merges)
        writer.add_eos_token_id(eos)
        writer.add_chat_template(TEMPLATE)
    tensors = {n: x for file in source.glob("*.safetensors") for n, x in load_file(file).items()}
    for name, x in [*tensors.items(), *extra]:
        heads = HEADS.get(name.split(".")[-2]) if arch == "llama" else None
        x = permuted(x, heads) if heads and x.ndim == 2 else x
        kind = (quantised or (lambda name: Kind.F32))(name)
        label = original(name) if name in tensors else name
        if kind == Kind.F32:
            writer.add_tensor(label, np.ascontiguousarray(x))
        else:
            writer.add_tensor(label, gguf.quants.quantize(x, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
