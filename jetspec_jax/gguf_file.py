"""GGUF files (through the `gguf` package) as a source of published tensors, configuration and tokenizer data."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np

from jetspec_jax.config import ConfigError

MODEL_TYPES = {"llama": "llama", "qwen3": "qwen3"}

TOP = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"} | {
    "output.weight": "lm_head.weight"
}
LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class GGUF:
    """One GGUF file; implements `checkpoint.Source`. Quantised tensors are read as f32.

    Raises:
      ConfigError: the file is none, or of an architecture that is not supported.
    """

    def __init__(self, path: pathlib.Path):
        import gguf

        try:
            reader = gguf.GGUFReader(path)
        except (ValueError, OSError) as error:
            raise ConfigError(f"{path}: not a complete GGUF file ({error})") from None
        self._fields, self._path = reader.fields, path
        self.architecture = self.get("general.architecture")
        if self.architecture not in MODEL_TYPES:
            raise ConfigError(f"{path}: architecture {self.architecture!r} is not supported; {list(MODEL_TYPES)} are")
        self._tensors = {self._published(t.name): t for t in reader.tensors}
        self.shapes = {name: tuple(int(n) for n in reversed(t.shape)) for name, t in self._tensors.items()}

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the metadata; lists as lists."""
        field = self._fields.get(key)
        return default if field is None else field.contents()

    def read(self, name: str) -> np.ndarray:
        import gguf

        tensor = self._tensors[name]
        array = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(self.shapes[name])
        if self.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # Llama files hold query and key rows in the order of interleaved RoPE; ours rotates halves.
            heads = self._number("attention.head_count" if "q_proj" in name else "attention.head_count_kv")
            array = array.reshape(heads, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        return array

    def config(self) -> dict[str, Any]:
        """What the `config.json` of this model would say."""
        heads, hidden = self._number("attention.head_count"), self._number("embedding_length")
        scaling = self.get(f"{self.architecture}.rope.scaling.type", "none")
        return {
            "model_type": MODEL_TYPES[self.architecture],
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "hidden_size": hidden,
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv"),
            "head_dim": self.get(f"{self.architecture}.attention.key_length", hidden // heads),
            "intermediate_size": self._number("feed_forward_length"),
            "rms_norm_eps": float(self.get(f"{self.architecture}.attention.layer_norm_rms_epsilon", 1e-6)),
            "rope_theta": float(self.get(f"{self.architecture}.rope.freq_base", 10000.0)),
            "rope_scaling": None if scaling == "none" else {"rope_type": scaling},
            "max_position_embeddings": self._number("context_length"),
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id"),
        }

    def _number(self, key: str) -> int:
        value = self.get(f"{self.architecture}.{key}")
        if not isinstance(value, int):
            raise ConfigError(f"{self._path}: {self.architecture}.{key} is {value!r}; a whole number is needed")
        return value

    @staticmethod
    def _published(name: str) -> str:
        if name in TOP:
            return TOP[name]
        parts = name.split(".")
        if parts[0] == "blk" and len(parts) == 4 and parts[2] in LAYER:
            return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{parts[3]}"
        return name
