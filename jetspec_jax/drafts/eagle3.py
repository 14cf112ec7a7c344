"""The EAGLE-3 head (arXiv 2503.01840) with the dynamic tree of EAGLE-2 (arXiv 2406.16858).

One decoder layer drafts token by token. Its row at position p reads the features of p and the embedding of the token at
p + 1, and predicts the token at p + 2. Further down a path, where the target has no features yet, the layer's own
output stands in for them, so that each depth of a tree costs a pass of the layer over the nodes expanded there. The
head has an lm_head of its own, over the tokens that are frequent in its training text.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax.backends.xla import PLAIN_XLA, XLA
from jetspec_jax.drafts import waiting
from jetspec_jax.drafts.eagle3_files import Eagle3Config
from jetspec_jax.layers import cache as kv_cache
from jetspec_jax.layers import rope, vocabulary
from jetspec_jax.layers.cache import KV
from jetspec_jax.layers.numerics import einsum, rms_norm
from jetspec_jax.loop import tree as trees
from jetspec_jax.loop.choice import Choice
from jetspec_jax.loop.contracts import Ends, Seen
from jetspec_jax.loop.tree import Frontier, Rule, Tree
from jetspec_jax.models.layer import Layer
from jetspec_jax.options import ConfigError

WIDTH = 10  # children of a node, and nodes expanded at a depth, as EAGLE-2 has them


class FusedLayer(Layer):
    """A decoder layer whose attention reads an embedding and a feature side by side; the feature is its residual."""

    def __init__(self, config: Eagle3Config, dtype):
        super().__init__(config, dtype)
        self.hidden_norm = nnx.Param(jnp.zeros((config.hidden_size,), dtype))
        self.qkv = nnx.Param(jnp.zeros((2 * config.hidden_size, *self.qkv.shape[1:]), dtype))

    def rows(self, embedded: Float[Array, "B T E"], feature: Float[Array, "B T E"]) -> Float[Array, "B T two_E"]:
        """Returns what the attention projects."""
        eps = self.config.norm_eps
        normed = rms_norm(embedded, self.input_norm[...], eps), rms_norm(feature, self.hidden_norm[...], eps)
        return jnp.concatenate(normed, -1)


class Eagle3(nnx.Module):
    """Parameters of the head. F = 3 E of the target, U the draft's own vocabulary."""

    def __init__(self, config: Eagle3Config, dtype):
        c = self.config = config
        weight = lambda *shape: nnx.Param(jnp.zeros(shape, dtype))
        self.fc = weight(len(c.tap_layers) * c.hidden_size, c.hidden_size)
        self.layer = FusedLayer(c, dtype)
        self.norm = weight(c.hidden_size)
        self.lm_head = weight(c.draft_vocab_size, c.hidden_size)
        if c.reduced:
            self.d2t = nnx.Param(jnp.zeros((c.draft_vocab_size,), jnp.int32))

    def fuse(self, features: Float[Array, "B T F"]) -> Float[Array, "B T E"]:
        """Returns one feature of the tapped ones of each row."""
        return einsum("btf,fe->bte", features.astype(self.fc.dtype), self.fc[...])

    def angles(self, positions: Int[Array, "B T"]) -> rope.Rope:
        """Returns the rotations of these positions."""
        return rope.angles(positions, self.config.head_dim, self.config.rope_theta, self.config.rope_scaling)

    def after(
        self, feature: Float[Array, "B T E"], attended: Float[Array, "B T N H"], backend: XLA = PLAIN_XLA
    ) -> tuple[Float[Array, "B T E"], Float[Array, "B T E"]]:
        """Returns the layer's output, which stands in for the next row's feature, and its norm for the lm_head."""
        x, product = self.layer.after(feature, attended, backend)
        return backend.add_norm(x, product, self.norm[...], self.config.norm_eps)

    def logits(self, normed: Float[Array, "B T E"]) -> Float[Array, "B T V"]:
        """Returns f32 logits over the target's vocabulary; -inf for tokens that the head cannot draft."""
        c, table = self.config, self.lm_head[...]
        if not c.reduced:
            return einsum("bte,ue->btu", normed, vocabulary.share(table, 0), jnp.float32)
        own = einsum("bte,ue->btu", normed, table, jnp.float32)
        held = vocabulary.held(c.vocab_size)
        ids = vocabulary.slot(jnp.arange(c.draft_vocab_size) + self.d2t[...], held)
        return jnp.full((*own.shape[:2], held), -jnp.inf).at[..., ids].set(own)


class Eagle3State(NamedTuple):
    """Context of the head, and the rows that wait for the token after them or for the next round."""

    context: KV  # [B, K, S, H] each
    start: jax.Array  # [B] position of the first pending row
    count: jax.Array  # type: ignore[assignment]  # [B] pending rows; the context holds all before them
    pending: jax.Array  # [B, D + 1, F] features


class _Level(NamedTuple):
    """What the nodes that were expanded last hand to those below them; R nodes so far."""

    feature: jax.Array  # [B, F, E] the layer's output at each
    above: jax.Array  # [B, F, R] bool, which of all nodes each sees
    keys: tuple[jax.Array, ...]  # [B, K, F, H] of every level
    values: tuple[jax.Array, ...]


@dataclasses.dataclass(frozen=True)
class Eagle3Draft:
    """The head as pure functions; implements `contracts.Draft`.

    window: committed tokens, the last ones, that a row looks back at; 0 is all.
    """

    config: Eagle3Config
    depth: int
    rule: Rule
    graphdef: nnx.GraphDef = dataclasses.field(compare=False, repr=False)
    backend: XLA = PLAIN_XLA
    window: int = 0

    scored: ClassVar[bool] = True

    def __post_init__(self):
        if not 1 <= self.depth <= self.config.depth:
            raise ConfigError(f"depth={self.depth}: this head drafts 1..{self.config.depth} positions a round")
        if self.rule.builder != "best_first":
            raise ConfigError(f"tree={self.rule.builder}: an EAGLE head draws the dynamic tree alone; leave it out")

    @property
    def nodes(self) -> int:
        return self.rule.nodes

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.tap_layers

    def shaped(self, rule: Rule, depth: int) -> Eagle3Draft:
        width = min(rule.width or WIDTH, rule.scored - 1, self.config.draft_vocab_size)
        return dataclasses.replace(self, rule=dataclasses.replace(rule, width=max(width, 1)), depth=depth)

    def windowed(self, window: int) -> Eagle3Draft:
        """Returns the draft that looks back at so many committed tokens; 0 is all."""
        return dataclasses.replace(self, window=window)

    def init(self, params, batch: int, capacity: int) -> Eagle3State:
        c, dtype = self.config, params["fc"].dtype
        zeros = jnp.zeros((batch,), jnp.int32)
        (context,) = kv_cache.init(1, batch, params["layer"]["qkv"].shape[1], capacity, c.head_dim, dtype)
        pending = jnp.zeros((batch, self.depth + 1, len(c.tap_layers) * c.hidden_size), dtype)
        return Eagle3State(context, zeros, zeros, pending)

    def extend(self, params, state: Eagle3State, seen: Seen, ends: Ends) -> Eagle3State:
        """Projects the rows of a prompt at once, and keeps those of a path for the next round.

        The last row of a prompt has no token after it yet, so it waits as well. A layer alone has keys and values that
        depend on its input and on nothing before it: no prompt row attends.
        """
        if seen.path:
            return state._replace(pending=seen.features.astype(state.pending.dtype), start=seen.start, count=seen.count)
        head = self._module(params)
        rows, _, at = self._rows(head, seen.features, seen.start, seen.tokens, ends)
        kv = head.layer.context_kv(rows, head.angles(at))
        (context,) = kv_cache.write((state.context,), (kv,), seen.start)
        last = jnp.maximum(seen.count - 1, 0)
        row = jnp.take_along_axis(seen.features, last[:, None, None], 1).astype(state.pending.dtype)
        some = seen.count > 0
        pending = jnp.where(some[:, None, None], state.pending.at[:, :1].set(row), state.pending)
        start = jnp.where(some, seen.start + last, state.start)
        return Eagle3State(context, start, jnp.where(some, 1, state.count), pending)

    def room(self, state: Eagle3State) -> Int[Array, " B"]:
        return state.pending.shape[1] - state.count

    def wait(self, state: Eagle3State, seen: Seen) -> Eagle3State:
        return state._replace(pending=waiting.added(state.pending, state.count, seen), count=state.count + seen.count)

    def absorb(self, params, state: Eagle3State, tokens: Int[Array, "B S"], ends: Ends) -> Eagle3State:
        """The last row goes on waiting: it drafts, and the token after it may be to come."""
        head = self._module(params)
        rows, _, at = self._rows(head, state.pending, state.start, tokens, ends)
        (context,) = kv_cache.write((state.context,), (head.layer.context_kv(rows, head.angles(at)),), state.start)
        last = jnp.maximum(state.count - 1, 0)
        row = jnp.take_along_axis(state.pending, last[:, None, None], 1)
        return Eagle3State(context, state.start + last, state.count - last, state.pending.at[:, :1].set(row))

    def resized(self, state: Eagle3State, rows: int) -> Eagle3State:
        return state._replace(pending=waiting.resized(state.pending, rows))

    def propose(self, params, state: Eagle3State, choice: Choice, budget, ends: Ends) -> tuple[Tree, Eagle3State]:
        head = self._module(params)
        rows, feature, at = self._rows(head, state.pending, state.start, choice.past.tokens, ends)
        q, k, v = head.layer.project(rows, head.angles(at), self.backend)
        kv = k, v
        new = jnp.broadcast_to(jnp.arange(feature.shape[1]), feature.shape[:2])
        (context,) = self.backend.commit((state.context,), (kv,), new, state.start)
        length = state.start + state.count

        # Only the last row drafts. It sees those before it in the context, the pending ones among them: how many there
        # are must not change how far it looks back.
        last = jnp.maximum(state.count - 1, 0)[:, None]
        take = lambda x: jnp.take_along_axis(x, last.reshape(-1, *[1] * (x.ndim - 1)), 1)
        (own,) = kv_cache.take((kv,), last)
        seen = kv_cache.latest(context, jnp.maximum(length - 1, 0), self.window)
        attended = self.backend.attend(take(q), own, jnp.ones((*last.shape, 1), bool), *seen)
        output, normed = head.after(take(feature), attended, self.backend)
        first = _Level(output, jnp.zeros((*output.shape[:2], 0), bool), (), ())

        def children(level: int, at: Frontier, above: _Level):
            scored, normed_here = above, normed
            if level:
                scored, normed_here = self._expand(head, level, at, above, context, length, ends)
            ranked = choice.foresee(head.logits(normed_here), self.rule.sharpness, level)
            best, token = vocabulary.top_k(ranked, self.rule.candidates)
            return token, best - vocabulary.log_total(ranked), scored

        width = self.rule.candidates
        grown, scores = trees.levels(children, first, choice.anchor, self.rule.scored, self.depth, width)
        tree = trees.cut(trees.first(grown, self.nodes), choice.anchor, budget)._replace(scores=scores)
        return tree, Eagle3State(context, length, jnp.zeros_like(state.count), state.pending)

    def _rows(self, head: Eagle3, features, start, tokens, ends: Ends) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns what the layer projects of the rows from `start` on, their fused features, and their positions.

        tokens: the committed ones [B, S].
        """
        at = start[:, None] + jnp.arange(features.shape[1])
        after = jnp.take_along_axis(tokens, jnp.minimum(at + 1, tokens.shape[1] - 1), 1)
        feature = head.fuse(features)
        return self._beside(head, after, feature, ends), feature, at

    def _beside(self, head: Eagle3, tokens, feature, ends: Ends) -> jax.Array:
        """Returns the rows of tokens beside features."""
        return head.layer.rows(ends.embed(tokens).astype(feature.dtype), feature)

    def _expand(
        self, head: Eagle3, level: int, at: Frontier, above: _Level, context: KV, length, ends: Ends
    ) -> tuple[_Level, jax.Array]:
        """Runs the layer over the nodes of a level, each after its own path."""
        take = lambda x: jnp.take_along_axis(x, at.parent[..., None], 1)
        feature, count = take(above.feature), at.token.shape[1]
        positions = jnp.broadcast_to(length[:, None] + level - 1, at.token.shape)
        rows = self._beside(head, at.token, feature, ends)
        q, k, v = head.layer.project(rows, head.angles(positions), self.backend)
        keys, values = (*above.keys, k), (*above.values, v)
        own = jnp.broadcast_to(jnp.eye(count, dtype=bool), (len(feature), count, count))
        sees = jnp.concatenate([take(above.above), own], -1)
        fresh = jnp.concatenate(keys, 2), jnp.concatenate(values, 2)
        attended = self.backend.attend(q, fresh, sees, *kv_cache.latest(context, length, self.window))
        output, normed = head.after(feature, attended, self.backend)
        return _Level(output, sees, keys, values), normed

    def _module(self, params) -> Eagle3:
        return nnx.merge(self.graphdef, nnx.State(params))


def build(config: Eagle3Config, dtype, backend: XLA = PLAIN_XLA) -> tuple[Eagle3Draft, dict]:
    """Returns the pure functions of a head, and its parameters as shapes.

    Args:
      config: of the head.
      dtype: of its parameters.
      backend: how it computes.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Eagle3(config, dtype)))
    return Eagle3Draft(config, config.depth, Rule(64), graphdef, backend), nnx.to_pure_dict(state)
