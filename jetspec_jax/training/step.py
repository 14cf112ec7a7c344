"""One update of the head, as a pure function: anchors, blocks, loss, gradient, AdamW.

Parameters are f32 and live in the coordinates of scaled features: every tapped channel divided by its root mean square.
The scale is folded into `fc` before each use, so the forward in training is that of the exported head.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jaxtyping import Array, Int

from jetspec_jax.config import HeadConfig
from jetspec_jax.drafts import jetspec
from jetspec_jax.models import Target
from jetspec_jax.training import anchors as anchor_rules
from jetspec_jax.training import features as feature_store
from jetspec_jax.training import forward, losses
from jetspec_jax.training.features import Features

NORM_SHARE = 0.3  # of the target's final norm, where the head's starts: first logits are flatter than the target's


class TrainState(NamedTuple):
    """What a checkpoint holds; the position in the data follows from `step`."""

    params: dict  # f32
    optimizer: optax.OptState
    step: jax.Array  # [] int32


class Metrics(NamedTuple):
    loss: jax.Array  # [] f32
    run_length: jax.Array  # [] f32, drafted tokens a block would have kept, plus one
    first_hit: jax.Array  # [] f32, share of blocks whose slot 1 is right


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is static in a step; hashable. Losses as in `losses.distill`, gamma as in `anchors.weights`.

    target: pure functions of the target; head: its configuration; dtype: of the forward and backward pass.
    width: positions S of a row.
    """

    target: Target
    head: HeadConfig
    dtype: str
    width: int
    anchors: int
    gamma: float
    loss: str
    temperature: float
    loss_chunk: int
    peak_lr: float
    steps: int
    warmup: float = 0.04
    final_lr: float = 0.1
    weight_decay: float = 0.0
    clip: float = 1.0
    seed: int = 0

    @property
    def schedule(self) -> optax.Schedule:
        """Linear warm-up over a share of the steps, then a cosine down to a share of the peak."""
        warmup = max(1, round(self.warmup * self.steps))
        return optax.warmup_cosine_decay_schedule(
            0.0, self.peak_lr, warmup, max(self.steps, warmup + 1), self.final_lr * self.peak_lr
        )

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW behind a clip of the global norm."""
        return optax.chain(
            optax.clip_by_global_norm(self.clip),
            optax.adamw(self.schedule, b1=0.9, b2=0.95, weight_decay=self.weight_decay),
        )


def init(recipe: Recipe, target_params) -> TrainState:
    """Random f32 parameters: matrices N(0, 0.02), norms one, the last norm a share of the target's."""
    _, shapes = jetspec.build(recipe.head, jnp.float32)
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(recipe.seed), len(leaves))
    params = jax.tree.unflatten(
        structure,
        [
            0.02 * jax.random.normal(key, leaf.shape) if len(leaf.shape) > 1 else jnp.ones(leaf.shape)
            for key, leaf in zip(keys, leaves, strict=True)
        ],
    )
    params["norm"] = NORM_SHARE * target_params["norm"].astype(jnp.float32)
    return TrainState(params, recipe.optimizer.init(params), jnp.int32(0))


def fold(params: dict, scale: jax.Array, dtype) -> dict:
    """The parameters of the head that reads unscaled features, in `dtype`; scale [F]."""
    folded = params | {"fc": params["fc"] / scale[:, None]}
    return jax.tree.map(lambda x: x.astype(dtype), folded)


def update(
    recipe: Recipe, target_params, features: Features, state: TrainState, rows: Int[Array, " B"]
) -> tuple[TrainState, Metrics]:
    """One step on the named rows; anchors are drawn from the recipe's seed and the step's number."""
    key = jax.random.fold_in(jax.random.key(recipe.seed), state.step)
    hidden, score = _blocks(recipe, target_params, features, rows, key)
    drafted, pullback = jax.vjp(hidden, state.params)
    gradient, metrics = score(drafted)
    (gradient,) = pullback(gradient)
    change, optimizer = recipe.optimizer.update(gradient, state.optimizer, state.params)
    return TrainState(optax.apply_updates(state.params, change), optimizer, state.step + 1), metrics


def evaluate(recipe: Recipe, target_params, features: Features, params: dict, rows: Int[Array, " B"]) -> Metrics:
    """Loss and run length on the named rows; the same anchors every time."""
    hidden, score = _blocks(recipe, target_params, features, rows, jax.random.key(recipe.seed))
    return score(hidden(params))[1]


def _blocks(recipe: Recipe, target_params, features: Features, rows, key):
    """Two functions: parameters to hidden states [B, A, D, E] of the drafted slots; those to gradient and metrics."""
    head, target = recipe.head, recipe.target
    graphdef = jetspec.build(head, recipe.dtype)[0].graphdef
    batch = feature_store.fetch(features, rows, recipe.width)
    anchors = anchor_rules.sample(key, batch.prompt_length, batch.length, recipe.anchors, recipe.width)
    weight = anchor_rules.weights(anchors, batch.length, head.depth, recipe.gamma)

    tokens = jnp.take_along_axis(batch.tokens, anchors.position, 1)
    block = jnp.pad(tokens[..., None], ((0, 0), (0, 0), (0, head.depth)), constant_values=head.mask_token_id)
    block = target.embed(target_params, block)

    def hidden(params):
        module = nnx.merge(graphdef, nnx.State(fold(params, features.scale, recipe.dtype)))
        return forward.hidden(module, block, anchors, batch.taps)[:, :, 1:]

    def score(drafted):
        ahead = anchors.position[..., None] + jnp.arange(1, head.block_size)
        label = jnp.minimum(ahead, recipe.width - 1).reshape(rows.size, -1)
        final = jnp.take_along_axis(batch.final, label[..., None] - 1, 1)
        slots = losses.Rows(
            draft=drafted.reshape(-1, drafted.shape[-1]),
            teacher=final.reshape(-1, final.shape[-1]),
            label=jnp.take_along_axis(batch.tokens, label, 1).reshape(-1),
            weight=weight.reshape(-1),
        )
        loss = losses.distill(unembedding(target_params), slots, recipe.loss, recipe.temperature, recipe.loss_chunk)
        metrics = Metrics(loss.value, *losses.run_length(loss.hit.reshape(weight.shape), weight > 0))
        return loss.gradient.reshape(drafted.shape), metrics

    return hidden, score


def unembedding(target_params) -> jax.Array:
    """lm_head [V, E] of the target; a tied one is its embedding."""
    return target_params["lm_head"] if "lm_head" in target_params else target_params["embedding"]
