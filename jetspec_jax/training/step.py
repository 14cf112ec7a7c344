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
from jaxtyping import Array, Bool, Float

from jetspec_jax.config import HeadConfig
from jetspec_jax.drafts import block as block_draft
from jetspec_jax.models.qwen3 import Qwen3Target
from jetspec_jax.training import anchors as anchor_rules
from jetspec_jax.training import forward, losses, teacher
from jetspec_jax.training.anchors import Anchors
from jetspec_jax.training.batches import Batch
from jetspec_jax.training.losses import Mix
from jetspec_jax.training.teacher import Features

NORM_SHARE = 0.3  # of the target's final norm, where the head's starts: first logits are flatter than the target's


class TrainState(NamedTuple):
    """What a checkpoint holds."""

    params: dict  # f32
    optimizer: optax.OptState
    step: jax.Array  # [] int32, updates made
    position: jax.Array  # [] int32, batches taken, those without an anchor included
    key: jax.Array  # [2] uint32, of the anchors' noise; a step folds its position in
    broken: jax.Array  # [] int32, position of the first batch with a value that is not finite, -1: none


class Metrics(NamedTuple):
    loss: jax.Array  # [] f32, weighted mean
    run_length: jax.Array  # [] f32, drafted tokens a block would have kept, plus one
    first_hit: jax.Array  # [] f32, share of blocks whose slot 1 is right
    blocks: jax.Array  # [] f32, with at least one label
    gradient_norm: jax.Array  # [] f32, before clipping


@dataclasses.dataclass(frozen=True)
class Recipe:
    """What is static in a step; hashable. gamma as in `anchors.weights`, attention and remat as in `forward.hidden`.

    target: pure functions of the target; head: its configuration; dtype: of the forward and backward pass.
    """

    target: Qwen3Target
    head: HeadConfig
    dtype: str
    anchors: int
    steps: int
    peak_lr: float
    mix: Mix = dataclasses.field(default_factory=Mix)
    gamma: float = 0.0
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
    def schedule(self) -> optax.Schedule:
        """Linear warm-up over a share of the steps, then a cosine down to a share of the peak."""
        warmup = max(1, round(self.warmup * self.steps))
        return optax.warmup_cosine_decay_schedule(
            0.0, self.peak_lr, warmup, max(self.steps, warmup + 1), self.final_lr * self.peak_lr
        )

    @property
    def optimizer(self) -> optax.GradientTransformation:
        """AdamW behind a clip of the global norm; only matrices decay."""
        matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)
        adamw = optax.adamw(self.schedule, self.beta1, self.beta2, weight_decay=self.weight_decay, mask=matrices)
        return optax.chain(optax.clip_by_global_norm(self.clip), adamw)


def init(recipe: Recipe, norm: Float[Array, " E"], params: dict | None = None) -> TrainState:
    """The state before the first step.

    norm: the target's final norm, of which the head's is a share. params: f32 parameters to start from, in the
    coordinates of scaled features; None draws matrices from N(0, 0.02) and sets norms to one.
    """
    key = jax.random.key(recipe.seed)
    if params is None:
        _, shapes = block_draft.build(recipe.head, jnp.float32)
        leaves, structure = jax.tree.flatten(shapes)
        drawn = [
            0.02 * jax.random.normal(k, leaf.shape) if len(leaf.shape) > 1 else jnp.ones(leaf.shape)
            for k, leaf in zip(jax.random.split(key, len(leaves)), leaves, strict=True)
        ]
        params = jax.tree.unflatten(structure, drawn) | {"norm": NORM_SHARE * norm.astype(jnp.float32)}
    zero = jnp.int32(0)
    return TrainState(params, recipe.optimizer.init(params), zero, zero, jax.random.key_data(key), jnp.int32(-1))


def fold(params: dict, scale: Float[Array, " F"], dtype) -> dict:
    """The parameters of the head that reads unscaled features, in `dtype`."""
    folded = params | {"fc": params["fc"] / scale[:, None]}
    return jax.tree.map(lambda x: x.astype(dtype), folded)


def unfold(params: dict, scale: Float[Array, " F"]) -> dict:
    """f32 parameters in the coordinates of scaled features, from those of a finished head."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), params)
    return wide | {"fc": wide["fc"] * scale[:, None]}


def update(
    recipe: Recipe,
    target_params: dict,
    scale: Float[Array, " F"],
    state: TrainState,
    batch: Batch,
) -> tuple[TrainState, Metrics]:
    """One step. Parts of the batch run one after the other; the result is that of the whole batch at once.

    A batch without an anchor changes nothing but the position. So does one with a value that is not finite, and every
    batch after it: `state.broken` keeps the first one's position.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.position)
    parts, width = batch.rows.shape

    def one(part: Batch, number) -> tuple:
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(number * width + jnp.arange(width))
        features = _features(recipe, target_params, part)
        candidate = anchor_rules.candidates(part.learnt, part.document)
        anchors = anchor_rules.sample(keys, candidate, recipe.anchors)
        return _gradient(recipe, target_params, scale, state.params, part, features, anchors)

    if parts == 1:
        gradient, sums = one(jax.tree.map(lambda x: x[0], batch), 0)
    else:

        def add(total, xs):
            return jax.tree.map(jnp.add, total, one(*xs)), None

        shape = jax.eval_shape(one, jax.tree.map(lambda x: x[0], batch), 0)
        empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
        (gradient, sums), _ = jax.lax.scan(add, empty, (batch, jnp.arange(parts)))

    any_label = sums.weight > 0
    gradient = jax.tree.map(lambda x: x / jnp.maximum(sums.weight, 1e-9), gradient)
    metrics = sums.means(optax.tree.norm(gradient))
    finite = jnp.isfinite(metrics.loss) & jnp.isfinite(metrics.gradient_norm)
    good = any_label & finite & (state.broken < 0)

    def apply(params, optimizer):
        change, optimizer = recipe.optimizer.update(gradient, optimizer, params)
        return optax.apply_updates(params, change), optimizer

    params, optimizer = jax.lax.cond(good, apply, lambda *same: same, state.params, state.optimizer)
    first = any_label & ~finite & (state.broken < 0)
    state = TrainState(
        params,
        optimizer,
        state.step + good,
        state.position + 1,
        state.key,
        jnp.where(first, state.position, state.broken),
    )
    return state, metrics


class _Sums(NamedTuple):
    """Over the blocks of a part."""

    loss: jax.Array
    weight: jax.Array
    run: jax.Array
    first: jax.Array
    blocks: jax.Array

    def means(self, gradient_norm) -> Metrics:
        blocks = jnp.maximum(self.blocks, 1)
        loss = self.loss / jnp.maximum(self.weight, 1e-9)
        return Metrics(loss, self.run / blocks, self.first / blocks, self.blocks.astype(jnp.float32), gradient_norm)


def _features(recipe: Recipe, target_params, part: Batch) -> Features:
    """Brought with the batch, or made here; the same numbers."""
    if part.features is not None:
        return part.features
    p = part
    return teacher.run(
        recipe.target, target_params, p.tokens, p.document, p.position, recipe.head.tap_layers, recipe.attention
    )


def _gradient(recipe, target_params, scale, params, part: Batch, features: Features, anchors: Anchors):
    """Gradient of the summed loss with respect to `params`, and sums. The target is never differentiated."""
    embedded = blocks(recipe, target_params, part, anchors)
    run = lambda p: drafted(recipe, fold(p, scale, recipe.dtype), embedded, part, features, anchors)
    hidden, pullback = jax.vjp(run, params)
    weight = anchor_rules.weights(anchors, part.learnt, part.document, recipe.head.depth, recipe.gamma)
    label = anchor_rules.labels(anchors, part.tokens.shape[1], recipe.head.depth).reshape(hidden.shape[0], -1)
    rows = losses.Rows(
        draft=hidden.reshape(hidden.shape[0], -1, hidden.shape[-1]),
        teacher=jnp.take_along_axis(features.final, label[..., None] - 1, 1),
        label=jnp.take_along_axis(part.tokens, label, 1),
        weight=weight.reshape(label.shape),
    )
    loss = losses.distill(unembedding(target_params), rows, recipe.mix, recipe.loss_chunk)
    (gradient,) = pullback(loss.gradient.reshape(hidden.shape))
    exists: Bool[Array, "B A D"] = weight > 0
    run_sum, first, count = losses.run_length(loss.hit.reshape(weight.shape), exists)
    return gradient, _Sums(loss.value, weight.sum(), run_sum, first, count)


def blocks(recipe: Recipe, target_params, part: Batch, anchors: Anchors) -> Float[Array, "B A T E"]:
    """Embeddings of [anchor, MASK, ...]."""
    tokens = jnp.take_along_axis(part.tokens, anchors.position, 1)[..., None]
    depth = recipe.head.depth
    block = jnp.pad(tokens, ((0, 0), (0, 0), (0, depth)), constant_values=recipe.head.mask_token_id)
    return recipe.target.embed(target_params, block)


def drafted(recipe: Recipe, folded: dict, block, part: Batch, features: Features, anchors: Anchors):
    """Hidden states [B, A, D, E] of the drafted slots, with the parameters of the finished head."""
    graphdef = block_draft.build(recipe.head, recipe.dtype)[0].graphdef
    head = nnx.merge(graphdef, nnx.State(folded))
    where = part.document, part.position
    return forward.hidden(head, block, anchors, features.taps, *where, recipe.attention, recipe.remat)[:, :, 1:]


def unembedding(target_params) -> jax.Array:
    """lm_head [V, E] of the target; a tied one is its embedding."""
    return target_params["lm_head"] if "lm_head" in target_params else target_params["embedding"]
