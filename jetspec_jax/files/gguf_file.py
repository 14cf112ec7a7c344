"""GGUF files as a source of published tensors, configuration and tokenizer data.

The table of contents is parsed here: `gguf.GGUFReader` makes several arrays for each of a vocabulary's strings, which
takes seconds. Quantised blocks are decoded by the `gguf` package.
"""

from __future__ import annotations

import math
import mmap
import pathlib
import struct
from typing import Any

import numpy as np

from jetspec_jax.fields import ConfigError, Fields, shown, whole
from jetspec_jax.files import text

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
# Value types of the format, by number; 8 is a string and 9 an array.
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9


class GGUF:
    """Reads one GGUF file; implements `checkpoint.Source`. Quantised tensors are read as f32.

    fields: the metadata, whose values are of any type until they are read through it.

    Raises:
      ConfigError: the file is none, is cut short, or is of an architecture or a kind that is not supported.
    """

    def __init__(self, path: pathlib.Path):
        import gguf

        self.path = path
        try:
            with text.open_regular(path) as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            contents = _Contents(self._bytes)
            self.fields = Fields(contents.fields, str(path))
            self.shapes: dict[str, tuple[int, ...]] = {}
            self._blocks: dict[str, tuple[Any, int, tuple[int, ...]]] = {}
            for original, (shape, kind, offset) in contents.tensors.items():
                quantization, name = gguf.GGMLQuantizationType(kind), self._published(original)
                stored = gguf.quants.quant_shape_to_byte_shape(shape, quantization)
                if offset + math.prod(stored) > len(self._bytes):
                    raise ValueError(f"{original} lies beyond its end")
                self.shapes[name], self._blocks[name] = shape, (quantization, offset, stored)
        except ConfigError:
            raise
        except (ValueError, OSError, struct.error, RecursionError, OverflowError, MemoryError) as error:
            raise ConfigError(f"{path}: not a complete GGUF file ({error})") from None
        self.architecture = self.fields.text("general.architecture", "")
        if self.architecture not in MODEL_TYPES:
            raise self.fields.wrong("general.architecture", f"not supported; use one of {', '.join(MODEL_TYPES)}")
        parts = self.fields.whole("split.count", 0, default=1)
        if parts > 1:
            raise ConfigError(f"{path}: one of {parts} parts; join them (llama-gguf-split --merge)")

    def read(self, name: str) -> np.ndarray:
        """Returns one tensor on the host, dequantised."""
        import gguf

        kind, offset, stored = self._blocks[name]
        blocks = np.frombuffer(self._bytes, np.uint8, math.prod(stored), offset).reshape(stored)
        try:
            array = gguf.quants.dequantize(blocks, kind).reshape(self.shapes[name])
        except NotImplementedError:
            raise ConfigError(f"{self.path}: {name} is quantised as {kind.name}, which is not supported") from None
        if self.architecture == "llama" and name.endswith(("q_proj.weight", "k_proj.weight")):
            # Llama files hold query and key rows in the order of interleaved RoPE; ours rotates halves.
            heads = self._number("attention.head_count" if "q_proj" in name else "attention.head_count_kv")
            array = array.reshape(heads, -1, 2, array.shape[-1]).swapaxes(1, 2).reshape(array.shape)
        return array

    def config(self) -> dict[str, Any]:
        """Returns what the `config.json` of this model would say."""
        fields, own = self.fields, lambda key: f"{self.architecture}.{key}"
        heads, hidden = self._number("attention.head_count"), self._number("embedding_length")
        if "model.embed_tokens.weight" not in self.shapes:
            raise ConfigError(f"{self.path}: the tensor token_embd.weight is missing")
        head_dim = fields.whole(own("attention.key_length"), default=max(hidden // heads, 1))
        # A factor without a type is linear; 0 is none.
        factors = (own("rope.scaling.factor"), own("rope.scale_linear"))
        scaled = any(fields.real(key, 0, 1e9, 1.0) not in (0.0, 1.0) for key in factors)
        scaling = fields.text(own("rope.scaling.type"), "linear" if scaled else "none")
        if "rope_freqs.weight" in self.shapes:
            scaling = "llama3"  # its factors are a tensor
        if scaling != "none":
            what = f"RoPE scaling {shown(scaling)} of a GGUF file is not supported"
            raise ConfigError(f"{self.path}: {what}; give the safetensors folder")
        if fields.whole(own("rope.dimension_count"), default=head_dim) != head_dim:
            raise fields.wrong(own("rope.dimension_count"), f"RoPE turns whole heads of {head_dim}")
        return {
            "model_type": MODEL_TYPES[self.architecture],
            "vocab_size": self.shapes["model.embed_tokens.weight"][0],
            "hidden_size": hidden,
            "num_hidden_layers": self._number("block_count"),
            "num_attention_heads": heads,
            "num_key_value_heads": self._number("attention.head_count_kv"),
            "head_dim": head_dim,
            "intermediate_size": self._number("feed_forward_length"),
            "rms_norm_eps": fields.real(own("attention.layer_norm_rms_epsilon"), 1e-12, 1, 1e-6),
            "rope_theta": fields.real(own("rope.freq_base"), 1e-9, 1e30, 10000.0),
            "max_position_embeddings": self._number("context_length"),
            "sliding_window": fields.whole(own("attention.sliding_window"), 0, default=0),
            "attention_bias": any(name.endswith("_proj.bias") for name in self.shapes),
            "tie_word_embeddings": "lm_head.weight" not in self.shapes,
        }

    def _number(self, key: str) -> int:
        return self.fields.whole(f"{self.architecture}.{key}")

    @staticmethod
    def _published(name: str) -> str:
        if name in TOP:
            return TOP[name]
        parts = name.split(".")
        if parts[0] == "blk" and len(parts) == 4 and parts[2] in LAYER:
            return f"model.layers.{parts[1]}.{LAYER[parts[2]]}.{parts[3]}"
        return name


class _Contents:
    """Metadata and the table of tensors (shape, type, offset) at the start of a file, version 2 or 3, little-endian."""

    def __init__(self, data: mmap.mmap):
        self._data, self._at = data, 0
        if data[:4] != b"GGUF":
            raise ValueError("it does not begin with GGUF")
        version = self._scalars("4xI")[0]
        if version not in (2, 3):
            raise ValueError(f"version {version}; 2 and 3 are supported")
        tensors, fields = self._scalars("QQ")
        self.fields: dict[str, Any] = {}
        for _ in range(fields):
            key = self._string()
            self.fields[key] = self._value(self._scalars("I")[0])
        self.tensors: dict[str, tuple[tuple[int, ...], int, int]] = {}
        for _ in range(tensors):
            name = self._string()
            (axes,) = self._scalars("I")
            if not 1 <= axes <= 4:
                raise ValueError(f"{name} has {axes} axes")
            shape = tuple(reversed(self._scalars(f"{axes}Q")))
            self.tensors[name] = (shape, *self._scalars("IQ"))
        step = self.fields.get("general.alignment", 32)
        if not whole(step) or step < 1:
            raise ValueError(f"general.alignment={step!r}")
        start = -(-self._at // step) * step
        self.tensors = {name: (shape, kind, start + at) for name, (shape, kind, at) in self.tensors.items()}

    def _scalars(self, layout: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + layout, self._data, self._at)
        self._at += struct.calcsize("<" + layout)
        return values

    def _string(self) -> str:
        (size,) = self._scalars("Q")
        end = self._at + size
        if end > len(self._data):
            raise ValueError("a text lies beyond its end")
        text = self._data[self._at : end].decode("utf-8")
        self._at = end
        return text

    def _value(self, kind: int) -> Any:
        if kind in SCALARS:
            return self._scalars(SCALARS[kind])[0]
        if kind == STRING:
            return self._string()
        if kind != ARRAY:
            raise ValueError(f"value type {kind} is unknown")
        inner, count = self._scalars("IQ")
        if inner in SCALARS:
            return list(self._scalars(f"{count}{SCALARS[inner]}"))
        return [self._value(inner) for _ in range(count)]
