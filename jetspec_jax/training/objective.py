"""What a family of heads brings to training: one module in `objectives`, named by its row among the families.

The step, the loop, the evaluation and the export know a head by these functions alone.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple, Protocol, cast, runtime_checkable

import jax
from jaxtyping import Array, Bool, Float, Int, Key

from jetspec_jax.config import ConfigError, ModelConfig
from jetspec_jax.drafts import families
from jetspec_jax.training.losses import Logits


class Questions(NamedTuple):
    """A places of each of B sequences from which D tokens are to be drafted."""

    inputs: Any  # arrays that the family's forward reads beside the features
    label: Int[Array, "B A D"]  # index in the sequence of the token that a slot is to draft, at least 1
    weight: Float[Array, "B A D"]  # of a slot in the loss; 0 where the text holds no such token
    taught: Int[Array, "B A D"] | None = None  # row of `Features.final` that teaches a slot; None: label - 1


@runtime_checkable
class Objective(Protocol):
    """The functions of such a module.

    config: of the head, frozen and hashable, with `tap_layers`, `depth`, `hidden_size`, `vocab_size`, `num_layers`.
    params: f32, for taps that are divided by `scale` [F]; what is in whole numbers is not trained. folded: those of the
    finished head. recipe: `recipe.Recipe`. part: a `batches.Batch` of sequences [B, S]. Everything that takes arrays is
    traced, but for `decide`.
    """

    def configure(self, settings: Any, target: ModelConfig) -> Any:
        """Returns the head's configuration; raises ConfigError where the settings do not fit the target."""

    def check_start(self, config: Any, found: Any) -> tuple[str, Any, Any] | None:
        """Returns the first size in which a head to go on from differs: name, its value, this run's."""

    def decide(self, config: Any, packed: Any) -> dict:
        """Returns the parameters that the data decides and training leaves alone; packed: all that is learnt from."""

    def init(self, config: Any, key: jax.Array, target_params: dict, decided: dict) -> dict:
        """Returns parameters to start from, f32 but for those that were decided."""

    def fold(self, params: dict, scale: Float[Array, " F"], dtype: Any) -> dict:
        """Returns the parameters of the head that reads unscaled taps."""

    def unfold(self, folded: dict, scale: Float[Array, " F"]) -> dict:
        """Returns f32 parameters for scaled taps, from those of a finished head."""

    def draw(self, recipe: Any, target_params: dict, part: Any, keys: Key[Array, " B"]) -> Questions:
        """Returns what a training step asks, drawn at random with one key a sequence."""

    def ask(
        self, recipe: Any, target_params: dict, part: Any, place: Int[Array, "B A"], valid: Bool[Array, "B A"]
    ) -> Questions:
        """Returns what is asked at these positions; every label that exists weighs 1."""

    def hidden(self, recipe: Any, folded: dict, part: Any, features: Any, asked: Questions) -> Float[Array, "B A D E"]:
        """Returns the hidden states of which the drafted logits are made."""

    def logits(self, recipe: Any, target_params: dict, folded: dict, hidden: Any, asked: Questions) -> Logits:
        """Returns the drafted logits as products [B, A, D, E] x [U, E]: with the target's lm_head, or tables of the
        head's own."""

    def confidence(self, recipe: Any, folded: dict, hidden: Any, asked: Questions) -> Float[Array, "B A D"] | None:
        """Returns the logit of the trust that the head has in each slot, None where it has no such thing. It learns the
        overlap of the two distributions there, with the share `recipe.confidence`."""

    def by_path(self, config: Any) -> bool:
        """Returns whether a node's candidates depend on its path. The evaluation follows chains then, and no trees."""

    def work(self, recipe: Any, sequences: int, length: int) -> dict[str, float]:
        """Returns the operations of the head in one step: head_forward, head_backward; slots that become logits; and
        table, the operations of one slot in the tables of its logits, forward and backward."""

    def describe(self, recipe: Any) -> dict[str, str]:
        """Returns rows of the model card that are special to the family."""


def module(family: str) -> str:
    """Returns the dotted name of a family's objective.

    Raises:
      ConfigError: there is no such family, or it cannot be trained.
    """
    known = {row.name: row.objective for row in families.FAMILIES if row.objective}
    if family not in known:
        raise ConfigError(f"--config.family={family}: choose one of {', '.join(known)}")
    return known[family]


def load(name: str) -> Objective:
    """Returns the objective of this dotted name."""
    return cast(Objective, importlib.import_module(name))
