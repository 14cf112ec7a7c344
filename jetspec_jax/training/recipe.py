"""What is static in a training step: the objective, the mix of losses, the optimiser and its schedule."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import optax

from jetspec_jax.models.qwen3 import Qwen3Target
from jetspec_jax.training import objective
from jetspec_jax.training.losses import Mix
from jetspec_jax.training.objective import Objective
from jetspec_jax.training.settings import Settings


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is static in a step; hashable.

    target: pure functions of the target; head: its configuration, of the family that `objective` names; dtype: of the
    forward and backward pass; attention: "xla" or "cudnn"; remat: keep only what enters a layer of the head. The
    others are settings of the same names.
    """

    target: Qwen3Target
    head: Any
    dtype: str
    anchors: int
    steps: int
    peak_lr: float
    objective: str = objective.module("jetspec")
    mix: Mix = dataclasses.field(default_factory=Mix)
    gamma: float = 0.0
    window: int = 0
    frozen_head: bool = False
    scorer_parents: str = "text"
    unroll: int = 7
    unroll_decay: float = 0.8
    confidence: float = 1.0
    loss_chunk: int = 4096
    warmup: float = 0.04
    final_lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    clip: float = 1.0
    attention: str = "xla"
    remat: bool = False
    seed: int = 0

    @property
    def learns(self) -> Objective:
        """The functions of the head's family."""
        return objective.load(self.objective)

    @property
    def schedule(self) -> optax.Schedule:
        """Linear warm-up over a share of the steps, then a cosine down to a share of the peak."""
        warmup = max(1, round(self.warmup * self.steps))
        return optax.warmup_cosine_decay_schedule(
            0.0, self.peak_lr, warmup, max(self.steps, warmup + 1), self.final_lr * self.peak_lr
        )

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW after a clip of the global norm; only matrices decay."""

        def matrices(params):
            return jax.tree.map(lambda x: x.ndim > 1, params)

        adamw = optax.adamw(self.schedule, self.beta1, self.beta2, weight_decay=self.weight_decay, mask=matrices)
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)


def make(config: Settings, model: Qwen3Target, dtype, head: Any, steps: int, attention: str) -> Recipe:
    """Returns the recipe of a run. steps: those that `config.steps` or `config.epochs` come to; attention: resolved."""
    shares = config.forward_kl, config.reverse_kl, config.cross_entropy
    mix = Mix(*shares, config.loss_temperature, config.total_variation)
    same = {f.name for f in dataclasses.fields(Recipe)} & {f.name for f in dataclasses.fields(Settings)}
    values = {name: getattr(config, name) for name in same - {"target", "dtype", "steps", "attention"}}
    return Recipe(
        target=model, head=head, dtype=str(dtype), steps=steps, objective=objective.module(config.family_name),
        mix=mix, attention=attention, **values,
    )  # fmt: skip
