"""How RoPE is stretched beyond the length that a model was trained on, as `config.json` says it; no arrays here.

Old files say `rope_scaling`, new ones `rope_parameters`; the keys inside are the same. `rope.angles` computes with it.
"""

from __future__ import annotations

import dataclasses
import math
import numbers
from typing import Any

KINDS = ("linear", "dynamic", "yarn", "llama3")


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """One rule for all layers.

    kind: `linear` divides all frequencies by `factor`; `dynamic` (NTK) raises the base with the length; `yarn` divides
      the slow channels only, with a ramp, and scales the attention; `llama3` divides by wavelength.
    original_length: the length that the unscaled frequencies were trained for.
    attention_factor: on cosines and sines; 1 but for yarn.

    Raises:
      ValueError: a value cannot be computed with; the message names it.
    """

    kind: str
    factor: float
    original_length: int
    attention_factor: float = 1.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True  # yarn: ramp between whole channels
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"rope_type={self.kind!r} is not supported; use default, {', '.join(KINDS)}")
        if self.kind == "llama3" and not self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                f"high_freq_factor={self.high_freq_factor}: give a value above low_freq_factor={self.low_freq_factor}"
            )
        if self.kind == "yarn" and self.beta_fast < self.beta_slow:
            raise ValueError(f"beta_fast={self.beta_fast}: give a value of at least beta_slow={self.beta_slow}")

    def context_length(self, max_positions: int) -> int:
        """Returns how many positions the target may use.

        The file's `max_position_embeddings` names the unscaled length for `linear` and `dynamic`, either one for
        `yarn`, and the whole for `llama3`.
        """
        stretched = {
            "linear": max_positions * self.factor,
            "dynamic": max_positions * self.factor,
            "yarn": self.original_length * self.factor,
            "llama3": 0,
        }[self.kind]
        return max(max_positions, int(stretched))

    @classmethod
    def from_hf(cls, rope: dict[str, Any], max_positions: int) -> RopeScaling | None:
        """Reads one set of parameters with the defaults of transformers; None where RoPE is not scaled."""
        kind = rope.get("rope_type") or rope.get("type") or "default"
        if kind == "default":
            return None
        if kind not in KINDS:
            raise ValueError(f"rope_type={kind!r} is not supported; use default, {', '.join(KINDS)}")
        if kind in ("linear", "dynamic"):  # the length of `dynamic` is always that of the file
            return cls(kind, _number(rope, "factor", at_least=1), max_positions)
        original = int(_number(rope, "original_max_position_embeddings", max_positions, at_least=1))
        if kind == "llama3":
            low, high = (_number(rope, key) for key in ("low_freq_factor", "high_freq_factor"))
            factor = _number(rope, "factor", at_least=1)
            return cls(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
        factor = _number(rope, "factor", max_positions / original, at_least=1)
        truncate = rope.get("truncate", True)
        if not isinstance(truncate, bool):
            raise ValueError(f"truncate is {truncate!r}; true or false is needed")
        return cls(
            kind,
            factor,
            original,
            attention_factor=_attention_factor(rope, factor),
            beta_fast=_number(rope, "beta_fast", 32.0),
            beta_slow=_number(rope, "beta_slow", 1.0),
            truncate=truncate,
        )

    def to_hf(self) -> dict[str, Any]:
        """Returns the dict that `from_hf` reads, in the old spelling's keys."""
        values: dict[str, Any] = {"rope_type": self.kind, "factor": self.factor}
        if self.kind in ("yarn", "llama3"):
            values["original_max_position_embeddings"] = self.original_length
        keys = {
            "yarn": ("attention_factor", "beta_fast", "beta_slow", "truncate"),
            "llama3": ("low_freq_factor", "high_freq_factor"),
        }
        return values | {key: getattr(self, key) for key in keys.get(self.kind, ())}


def _attention_factor(rope: dict[str, Any], factor: float) -> float:
    """YaRN's: given, of two mscales, or 0.1 ln(factor) + 1."""
    if rope.get("attention_factor") is not None:
        return _number(rope, "attention_factor")

    def scale(m: float) -> float:
        return 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0

    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return scale(_number(rope, "mscale")) / scale(_number(rope, "mscale_all_dim"))
    return scale(1.0)


def _number(rope: dict[str, Any], key: str, default: float | None = None, at_least: float = 1e-9) -> float:
    value: Any = default if rope.get(key) is None else rope[key]
    real = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if not real or not at_least <= float(value) < math.inf:
        bound = f">= {at_least:g}" if at_least >= 1 else "> 0"
        raise ValueError(f"{key} is {value!r}; a number {bound} is needed")
    return float(value)
