"""How RoPE is stretched beyond the length that a model was trained on, as `config.json` says it; no arrays here.

Old files say `rope_scaling`, new ones `rope_parameters`; the keys inside are the same. `rope.angles` computes with it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jetspec_jax.fields import Fields

MOST_FACTOR, MOST = 1e5, 1e9  # of stretching, and of any other number
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
    def from_hf(
        cls, rope: Mapping[str, Any] | Fields, max_positions: int, where: str = "rope_scaling"
    ) -> RopeScaling | None:
        """Reads one set of parameters with the defaults of transformers; None where RoPE is not scaled."""
        fields = rope if isinstance(rope, Fields) else Fields(rope, where)
        name = "rope_type" if fields.has("rope_type") else "type"
        kind = fields.text(name, "default")
        if kind == "default":
            return None
        if kind not in KINDS:
            raise fields.wrong(name, f"not supported; use default, {', '.join(KINDS)}")
        if kind in ("linear", "dynamic"):  # the length of `dynamic` is always that of the file
            return cls(kind, fields.real("factor", 1, MOST_FACTOR), max_positions)
        original = int(fields.real("original_max_position_embeddings", 1, MOST, max_positions))
        if kind == "llama3":
            low, high = (fields.real(key, 1e-9, MOST) for key in ("low_freq_factor", "high_freq_factor"))
            factor = fields.real("factor", 1, MOST_FACTOR)
            return cls(kind, factor, original, low_freq_factor=low, high_freq_factor=high)
        factor = fields.real("factor", 1, MOST_FACTOR, max_positions / original)
        if "truncate" in fields.raw and not fields.has("truncate"):  # null is no default here: it counts as false
            raise fields.wrong("truncate", "true or false is needed")
        return cls(
            kind,
            factor,
            original,
            attention_factor=_attention_factor(fields, factor),
            beta_fast=fields.real("beta_fast", 1e-9, MOST, 32.0),
            beta_slow=fields.real("beta_slow", 1e-9, MOST, 1.0),
            truncate=fields.flag("truncate", True),
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


def _attention_factor(fields: Fields, factor: float) -> float:
    """Returns YaRN's: given, of two mscales, or 0.1 ln(factor) + 1."""
    if fields.has("attention_factor"):
        return fields.real("attention_factor", 1e-9, MOST)
    scale = lambda m: 0.1 * m * math.log(factor) + 1.0 if factor > 1 else 1.0
    one, all_dim = (fields.real(key, 0, MOST, 0.0) for key in ("mscale", "mscale_all_dim"))
    return scale(one) / scale(all_dim) if one and all_dim else scale(1.0)
