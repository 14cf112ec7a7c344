"""One update of a head, as a pure function: features, what is asked, loss, gradient, optimiser.

Parameters are f32 and live in the coordinates of scaled features: every tapped channel divided by its root mean square.
The scale is folded into them before each use, so the forward in training is that of the exported head.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float

from jetspec_jax.training import losses, siblings, teacher
from jetspec_jax.training.data.batches import Batch
from jetspec_jax.training.objective import Questions
from jetspec_jax.training.recipe import Recipe
from jetspec_jax.training.teacher import Features


class TrainState(NamedTuple):
    """What a checkpoint holds."""

    params: dict  # f32, and whole numbers, which no update touches
    optimizer: optax.OptState
    step: jax.Array  # [] int32, updates made
    position: jax.Array  # [] int32, batches taken, those without an anchor included
    key: jax.Array  # [2] uint32, of what is asked; a step folds its position in
    broken: jax.Array  # [] int32, position of the first batch with a value that is not finite, -1: none


class Metrics(NamedTuple):
    loss: jax.Array  # [] f32, weighted mean
    run_length: jax.Array  # [] f32, drafted tokens a block would have kept, plus one
    first_hit: jax.Array  # [] f32, share of blocks whose slot 1 is right
    blocks: jax.Array  # [] f32, with at least one label
    gradient_norm: jax.Array  # [] f32, before clipping


def init(recipe: Recipe, target_params: dict, params: dict | None = None, decided: dict | None = None) -> TrainState:
    """Returns the state before the first step.

    Args:
      recipe: of the run.
      target_params: the head may start from some of them.
      params: f32 parameters to start from, in the coordinates of scaled features; None draws them.
      decided: those that the data decides, for parameters that are drawn.
    """
    key = jax.random.key(recipe.seed)
    if params is None:
        params = recipe.learns.init(recipe.head, key, target_params, decided or {})
    elif getattr(recipe.head, "scorer_rank", 0) and "scorer" not in params:  # a head to go on from has none yet
        params = params | {"scorer": recipe.learns.init(recipe.head, key, target_params, {})["scorer"]}
    zero, trained = jnp.int32(0), _trained(recipe, params)
    return TrainState(params, recipe.optimizer.init(trained), zero, zero, jax.random.key_data(key), jnp.int32(-1))


def update(
    recipe: Recipe,
    target_params: dict,
    scale: Float[Array, " F"],
    state: TrainState,
    batch: Batch,
) -> tuple[TrainState, Metrics]:
    """Takes one step. Parts of the batch run one after the other; the result is that of the whole batch at once.

    A batch without an anchor changes nothing but the position. So does one with a value that is not finite, and every
    batch after it: `state.broken` keeps the first one's position.
    """
    key = jax.random.fold_in(jax.random.wrap_key_data(state.key), state.position)
    parts, width = batch.rows.shape

    def one(part: Batch, number) -> tuple:
        keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(number * width + jnp.arange(width))
        features = _features(recipe, target_params, part)
        asked = recipe.learns.draw(recipe, target_params, part, keys)
        if recipe.scorer_parents == "drafted":
            more = jax.vmap(lambda key: jax.random.fold_in(key, 1))(keys)
            features, asked = siblings.drafted(
                recipe, target_params, scale, state.params, part, features, asked, more
            )  # fmt: skip
        return _gradient(recipe, target_params, scale, state.params, part, features, asked)

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

    trained = _trained(recipe, state.params)
    trained, optimizer = jax.lax.cond(good, apply, lambda *same: same, trained, state.optimizer)
    first = any_label & ~finite & (state.broken < 0)
    state = TrainState(
        _with(trained, state.params),
        optimizer,
        state.step + good,
        state.position + 1,
        state.key,
        jnp.where(first, state.position, state.broken),
    )
    return state, metrics


def _trained(recipe: Recipe, params: dict) -> dict:
    """Returns a tree with None for what no step changes: whole numbers, and all but the scorer of a frozen head."""
    changes = lambda name, x: jnp.issubdtype(x.dtype, jnp.floating) and (name == "scorer" or not recipe.frozen_head)
    return {
        name: jax.tree.map(lambda x, name=name: x if changes(name, x) else None, part) for name, part in params.items()
    }


def _with(trained: dict, params: dict) -> dict:
    """Returns `params` with these trained ones."""
    return jax.tree.map(lambda new, old: old if new is None else new, trained, params, is_leaf=lambda x: x is None)


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


def _gradient(recipe: Recipe, target_params, scale, params, part: Batch, features: Features, asked: Questions):
    """Gradient of the summed loss with respect to `params`, and sums. The target is never differentiated."""
    learns = recipe.learns

    def run(trained):
        folded = learns.fold(_with(trained, params), scale, recipe.dtype)
        hidden = learns.hidden(recipe, folded, part, features, asked)
        drafted = learns.logits(recipe, target_params, folded, hidden, asked)
        parts = tuple(losses.Slope(t.rows, t.table if t.trained else None) for t in drafted.terms)
        return (parts, learns.confidence(recipe, folded, hidden, asked)), drafted

    (made, trust), pullback, drafted = jax.vjp(run, _trained(recipe, params), has_aux=True)
    weight, batch = asked.weight, asked.weight.shape[0]
    chex.assert_equal_shape_prefix([asked.label, weight, *(x.rows for x in made)], 3)
    flat = lambda x: x.reshape(batch, -1, x.shape[-1])
    drafted = drafted._replace(terms=tuple(dataclasses.replace(t, rows=flat(t.rows)) for t in drafted.terms))
    label = asked.label.reshape(batch, -1)
    taught = label - 1 if asked.taught is None else asked.taught.reshape(batch, -1)
    rows = losses.Rows(
        teacher=jnp.take_along_axis(features.final, taught[..., None], 1),
        label=jnp.take_along_axis(part.tokens, label, 1),
        weight=weight.reshape(label.shape),
    )
    table = teacher.unembedding(target_params)
    loss = losses.distill(table, drafted, rows, recipe.mix, recipe.loss_chunk, overlap=trust is not None)
    slopes = tuple(s._replace(rows=s.rows.reshape(m.rows.shape)) for s, m in zip(loss.slopes, made, strict=True))
    counted, value, by_trust = loss.weight.reshape(weight.shape), loss.value, None
    if loss.overlap is not None:
        more, by_trust = losses.expect(trust, loss.overlap.reshape(weight.shape), recipe.confidence * counted)
        value += more
    (gradient,) = pullback((slopes, by_trust))
    exists: Bool[Array, "B A D"] = weight > 0
    run_sum, first, count = losses.run_length(loss.hit.reshape(weight.shape), exists)
    return gradient, _Sums(value, counted.sum(), run_sum, first, count)
