"""Published names of tensors, and how each parameter of a stack of layers is made of them.

Files hold Hugging Face names in torch's [out, in] order; parameters hold one fused QKV and one fused gate-up array a
layer, [in, ...out], experts stacked. Every parameter has a `Fusion` that says which published tensors it is made of.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from jetspec_jax.config import ModelConfig, Sizes


@dataclasses.dataclass(frozen=True)
class Fusion:
    """Says how one parameter is made of published tensors.

    groups: one tuple of names (several groups are stacked on a new first axis: experts). shapes: how [out] of each
    name of a group is cut, (rows,) for a single name; several names are joined along the last axis but one of it.
    matrix: stored transposed.
    """

    groups: tuple[tuple[str, ...], ...]
    shapes: tuple[tuple[int, ...], ...]
    matrix: bool
    stacked: bool = False

    def names(self) -> list[str]:
        """Returns all names, group by group."""
        return [name for group in self.groups for name in group]

    @property
    def sizes(self) -> list[int]:
        """Rows [out] that each name of a group contributes."""
        return [math.prod(shape) for shape in self.shapes]

    def join(self, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Returns the parameter, from published tensors."""
        parts = [self._join([read(name) for name in group]) for group in self.groups]
        whole = np.stack(parts) if self.stacked else parts[0]
        return np.moveaxis(whole, -1, int(self.stacked)) if self.matrix else whole

    def part(self, read: Callable[[str, tuple[slice, ...]], np.ndarray], index: tuple[slice, ...]) -> np.ndarray:
        """Returns a part of the parameter, out of the parts of published tensors that it is made of.

        Args:
          read: of a name and the rows (and columns) of that tensor.
          index: a slice with start and stop for each axis of the parameter.
        """
        groups = self.groups[index[0]] if self.stacked else self.groups
        first, *others = index[1:] if self.stacked else index
        out, rest = (tuple(others), (first,)) if self.matrix else ((first,), tuple(others))
        parts = [self._joined_part(read, group, out, rest) for group in groups]
        whole = np.stack(parts) if self.stacked else parts[0]
        return np.moveaxis(whole, -1, int(self.stacked)) if self.matrix else whole

    def _joined_part(self, read, group: tuple[str, ...], out: tuple[slice, ...], rest: tuple[slice, ...]) -> np.ndarray:
        """Returns what one group gives to a part. out: slices of what it is cut into. rest: of its columns."""
        if len(group) == 1:
            return read(group[0], (*out, *rest))
        *before, joined, last = out
        pieces, at = [], 0
        for name, shape in zip(group, self.shapes, strict=True):
            own = slice(max(joined.start - at, 0), min(joined.stop - at, shape[-2]))
            at += shape[-2]
            if own.stop > own.start:
                pieces.append(_rows(read, name, shape, (*before, own, last), rest))
        return np.concatenate(pieces, axis=-3)

    def split(self, parameter: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the published tensors, from the parameter; the inverse of `join`, bit for bit."""
        whole = np.moveaxis(parameter, int(self.stacked), -1) if self.matrix else parameter
        return {
            name: np.ascontiguousarray(piece)
            for group, part in zip(self.groups, whole if self.stacked else [whole], strict=True)
            for name, piece in zip(group, self._split(part), strict=True)
        }

    def _join(self, tensors: list[np.ndarray]) -> np.ndarray:
        if len(tensors) == 1:
            return tensors[0]
        cut = [t.reshape(*shape, -1) for t, shape in zip(tensors, self.shapes, strict=True)]
        return np.concatenate(cut, axis=-3)

    def _split(self, whole: np.ndarray) -> list[np.ndarray]:
        if len(self.shapes) == 1:
            return [whole]
        cuts = np.cumsum([shape[-2] for shape in self.shapes])[:-1]
        return [piece.reshape(-1, whole.shape[-1]) for piece in np.split(whole, cuts, axis=-3)]


def _rows(read, name: str, shape: tuple[int, ...], cut: tuple[slice, ...], rest: tuple[slice, ...]) -> np.ndarray:
    """Returns a part of a tensor whose rows are cut into `shape`; no row before or after the part is read."""
    lead = next((axis for axis, size in enumerate(shape) if size > 1), len(shape) - 1)
    below = math.prod(shape[lead + 1 :])
    found = read(name, (slice(cut[lead].start * below, cut[lead].stop * below), *rest))
    found = found.reshape(*shape[:lead], -1, *shape[lead + 1 :], found.shape[-1])
    return found[(*(slice(None) if axis == lead else piece for axis, piece in enumerate(cut)), ...)]


def of_target(c: ModelConfig) -> dict[str, Any]:
    """Returns a tree like the target's parameters, of `Fusion`s."""
    tree: dict[str, Any] = {
        "embedding": plain("model.embed_tokens.weight", c.vocab_size),
        "layers": {i: layer(c, f"model.layers.{i}.", i) for i in range(c.num_layers)},
        "norm": plain("model.norm.weight", c.hidden_size),
    }
    if not c.tie_embeddings:
        tree["lm_head"] = plain("lm_head.weight", c.vocab_size)
    return tree


def layer(c: Sizes, prefix: str, index: int = 0) -> dict[str, Fusion]:
    """Returns the fusions of one layer of target or head, whose names begin with `prefix`."""
    attention, kv_heads, dim = prefix + "self_attn.", c.num_kv_heads, c.head_dim
    kv = (kv_heads, 1, dim)
    tree = {
        "input_norm": plain(prefix + "input_layernorm.weight", c.hidden_size),
        "qkv": Fusion(
            (tuple(f"{attention}{x}_proj.weight" for x in "qkv"),),
            ((kv_heads, c.num_heads // kv_heads, dim), kv, kv),
            True,
        ),
        "out": matrix(attention + "o_proj.weight", c.hidden_size),
        "post_norm": plain(prefix + "post_attention_layernorm.weight", c.hidden_size),
    }
    if c.qk_norm:
        tree["q_norm"] = plain(attention + "q_norm.weight", c.head_dim)
        tree["k_norm"] = plain(attention + "k_norm.weight", c.head_dim)
    if c.moe is not None and index in c.moe.sparse_layers:
        width = c.moe.intermediate_size
        experts = [f"{prefix}mlp.experts.{x}." for x in range(c.moe.num_experts)]
        tree["router"] = matrix(prefix + "mlp.gate.weight", c.moe.num_experts)
        gate_up = tuple((e + "gate_proj.weight", e + "up_proj.weight") for e in experts)
        tree["gate_up"] = Fusion(gate_up, ((1, width), (1, width)), True, stacked=True)
        tree["down"] = Fusion(
            tuple((e + "down_proj.weight",) for e in experts), ((c.hidden_size,),), True, stacked=True
        )
    else:
        width = c.intermediate_size
        names = (prefix + "mlp.gate_proj.weight", prefix + "mlp.up_proj.weight")
        tree["gate_up"] = Fusion((names,), ((1, width), (1, width)), True)
        tree["down"] = matrix(prefix + "mlp.down_proj.weight", c.hidden_size)
    return tree


def plain(name: str, rows: int) -> Fusion:
    """Returns one tensor as it is stored, `rows` along its first axis."""
    return Fusion(((name,),), ((rows,),), matrix=False)


def matrix(name: str, rows: int) -> Fusion:
    """Returns one matrix that is stored transposed, with `rows` outputs."""
    return Fusion(((name,),), ((rows,),), matrix=True)
