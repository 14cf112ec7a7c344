"""The JetSpec draft head (arXiv 2606.18394), and with a bidirectional block the DFlash head: the same tensors.

The head is a small Qwen3 stack without embedding and lm_head. Its input is the block [anchor, MASK, ...]; tapped target
features of the committed positions enter every layer as keys and values. Slot k of the output predicts the token k
positions after the anchor.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax.backends.xla import PLAIN_XLA, XLA
from jetspec_jax.config import ConfigError, HeadConfig
from jetspec_jax.drafts import scorer, waiting
from jetspec_jax.layers import cache as kv_cache
from jetspec_jax.layers import masks, vocabulary
from jetspec_jax.layers.cache import Cache
from jetspec_jax.layers.numerics import einsum, rms_norm
from jetspec_jax.loop.choice import Choice
from jetspec_jax.loop.contracts import Ends, Seen
from jetspec_jax.loop.tree import Candidates, Rule, Tree
from jetspec_jax.models.layer import Stack, kv_heads


class Head(Stack):
    """Parameters of the head. F = taps * E of the target."""

    config: HeadConfig

    def __init__(self, config: HeadConfig, dtype):
        super().__init__(config, dtype)
        self.fc = nnx.Param(jnp.zeros((len(config.tap_layers) * config.hidden_size, config.hidden_size), dtype))
        self.hidden_norm = nnx.Param(jnp.zeros((config.hidden_size,), dtype))

    def context(self, features: Float[Array, "B C F"]) -> Float[Array, "B C E"]:
        """Fuses tapped features; every layer projects the same rows to keys and values."""
        fused = einsum("bcf,fe->bce", features.astype(self.fc.dtype), self.fc[...])
        return rms_norm(fused, self.hidden_norm[...], self.config.norm_eps)

    def context_kv(self, context: Float[Array, "B C E"], positions: Int[Array, "B C"]) -> Cache:
        """Returns the context rows' keys and values of every layer: nothing that comes later changes them."""
        angles = self.angles(positions)
        return tuple(layer.context_kv(context, angles) for layer in self.layers)

    def __call__(  # noqa: PLR0913  # arrays of one pass
        self,
        block: Float[Array, "B T E"],
        start: Int[Array, " B"],
        context: Float[Array, "B C E"],
        count: Int[Array, " B"],
        cache: Cache,
        length: Int[Array, " B"],
        backend: XLA = PLAIN_XLA,
        window: int = 0,
    ) -> tuple[Float[Array, "B T E"], Cache]:
        """Returns hidden states of the block for the target's lm_head, and the cache with the new context in it.

        Block and context share one product a layer. The context enters the cache before the block reads it, so the
        cache is updated in place.

        Args:
          block: embeddings of [anchor, MASK, ...] at positions start, start + 1, ...
          start: position of the anchor.
          context: fused features, of which the first `count` rows are new, at positions length, length + 1, ...
          count: new rows of the context.
          cache: keys and values of the context so far.
          length: its rows.
          backend: what computes.
          window: rows of the context, the last ones, that the block sees; 0 is all.
        """
        rows, slots = context.shape[1], block.shape[1]
        positions = [length[:, None] + jnp.arange(rows), start[:, None] + jnp.arange(slots)]
        angles = self.angles(jnp.concatenate(positions, axis=1))
        own = masks.causal(slots) if self.config.causal else jnp.ones((1, slots, slots), bool)
        mask = jnp.pad(own, ((0, 0), (0, 0), (rows, 0)))  # the context is read from the cache
        new = jnp.broadcast_to(jnp.arange(rows), (len(block), rows))

        def attend(i, q, fresh):
            (kv,) = backend.commit((cache[i],), (fresh,), new, length)
            return backend.attend(q[:, rows:], fresh, mask, *kv_cache.latest(kv, length + count, window)), kv

        ran = self.run(block, angles, attend, backend, context)
        return ran.hidden, ran.kept


class HeadState(NamedTuple):
    """Context of the head: projected rows, and the rows of the last round that wait to be projected."""

    context: Cache  # one (k, v) pair [B, K, S, H] a layer
    length: jax.Array  # [B] projected rows
    pending: jax.Array  # [B, D + 1, F] features
    count: jax.Array  # type: ignore[assignment]  # [B] pending rows


@dataclasses.dataclass(frozen=True)
class BlockDraft:
    """The head as pure functions; implements `contracts.Draft`.

    depth may be smaller than the block allows. A causal head then runs fewer slots: the first are exact without the
    rest. A bidirectional one runs the whole block.

    window: committed tokens, the last ones, that the block looks back at; 0 is all. A head knows no distances that its
      training rows did not have.
    temperature: divides the logits of each depth before candidates are ranked (`evals/calibrate.py`); () is 1 for all.
    alone: whether the scorer that the head has beside it is left out, so that all nodes of a depth share a row.
    """

    config: HeadConfig
    depth: int
    rule: Rule
    graphdef: nnx.GraphDef = dataclasses.field(compare=False, repr=False)
    backend: XLA = PLAIN_XLA
    temperature: tuple[float, ...] = ()
    window: int = 0
    alone: bool = False

    scored: ClassVar[bool] = True
    first: ClassVar[int] = 1  # slot that predicts the token after the anchor

    def __post_init__(self):
        if not 1 <= self.depth <= self.config.depth:
            raise ConfigError(f"depth={self.depth}: this head drafts 1..{self.config.depth} positions a round")

    @property
    def nodes(self) -> int:
        return self.rule.nodes

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.tap_layers

    @property
    def slots(self) -> int:
        """Rows of the block that are run."""
        return self.depth + 1 if self.config.causal else self.config.block_size

    def init(self, params, batch: int, capacity: int) -> HeadState:
        c, dtype = self.config, params["fc"].dtype
        zeros = jnp.zeros((batch,), jnp.int32)
        context = kv_cache.init(c.num_layers, batch, kv_heads(params), capacity, c.head_dim, dtype)
        pending = jnp.zeros((batch, self.depth + 1, len(c.tap_layers) * c.hidden_size), dtype)
        return HeadState(context, zeros, pending, zeros)

    def extend(self, params, state: HeadState, seen: Seen, ends: Ends) -> HeadState:
        """Projects the features of a prompt at once; those of a path wait, and share the products of the next block."""
        if seen.path:
            return state._replace(pending=seen.features.astype(state.pending.dtype), count=seen.count)
        head = self._module(params)
        positions = seen.start[:, None] + jnp.arange(seen.features.shape[1])
        fresh = head.context_kv(head.context(seen.features), positions)
        some = seen.count > 0  # what still waited of an earlier text is none of this one
        length, count = jnp.where(some, seen.start + seen.count, state.length), jnp.where(some, 0, state.count)
        return state._replace(context=kv_cache.write(state.context, fresh, seen.start), length=length, count=count)

    def room(self, state: HeadState) -> Int[Array, " B"]:
        return state.pending.shape[1] - state.count

    def wait(self, state: HeadState, seen: Seen) -> HeadState:
        return state._replace(pending=waiting.added(state.pending, state.count, seen), count=state.count + seen.count)

    def absorb(self, params, state: HeadState, tokens: Int[Array, "B S"], ends: Ends) -> HeadState:
        head = self._module(params)
        positions = state.length[:, None] + jnp.arange(state.pending.shape[1])
        fresh = head.context_kv(head.context(state.pending), positions)
        context = kv_cache.write(state.context, fresh, state.length)
        return HeadState(context, state.length + state.count, state.pending, jnp.zeros_like(state.count))

    def resized(self, state: HeadState, rows: int) -> HeadState:
        return state._replace(pending=waiting.resized(state.pending, rows))

    def propose(self, params, state: HeadState, choice: Choice, budget, ends: Ends) -> tuple[Tree, HeadState]:
        hidden, state = self.hidden(params, state, choice.anchor, choice.past.length, ends)
        cooled = lambda x: x / self._temperatures().reshape(-1, *[1] * (x.ndim - 2)) if self.temperature else x

        def adds(found: Candidates):
            return cooled(scorer.bias(params["scorer"], hidden, found.token, ends.embed(found.token)))

        logits = cooled(ends.logits(hidden))
        return choice.tree(
            self.rule, logits, budget, self.backend.grow, adds if self.config.scorer_rank and not self.alone else None
        ), state

    def logits(
        self, params, state: HeadState, anchor: Int[Array, " B"], length: Int[Array, " B"], ends: Ends
    ) -> tuple[Float[Array, "B D V"], HeadState]:
        """Runs the block: f32 logits of the D positions from `length` on, and the state after it.

        anchor: the token at position length - 1.
        """
        hidden, state = self.hidden(params, state, anchor, length, ends)
        return ends.logits(hidden), state

    def guesses(
        self, params, state: HeadState, anchor: Int[Array, " B"], length: Int[Array, " B"], ends: Ends
    ) -> Int[Array, "B D"]:
        """Returns the tokens of the D positions from `length` on that the head takes for the most probable."""
        return vocabulary.best(self.logits(params, state, anchor, length, ends)[0])

    def hidden(
        self, params, state: HeadState, anchor: Int[Array, " B"], length: Int[Array, " B"], ends: Ends
    ) -> tuple[Float[Array, "B D E"], HeadState]:
        """Runs the block: what the target's lm_head reads of the D drafted slots, and the state after it."""
        head = self._module(params)
        block = jnp.pad(anchor[:, None], ((0, 0), (0, self.slots - 1)), constant_values=self.config.mask_token_id)
        context = head.context(state.pending)
        at = state.count, state.context, state.length
        hidden, cache = head(ends.embed(block), length - 1, context, *at, self.backend, self.window)
        state = state._replace(context=cache, length=state.length + state.count, count=jnp.zeros_like(state.count))
        return hidden[:, self.first : self.first + self.depth], state

    def shaped(self, rule: Rule, depth: int) -> BlockDraft:
        return dataclasses.replace(self, rule=rule, depth=depth)

    def calibrated(self, temperature: tuple[float, ...]) -> BlockDraft:
        """Returns the draft with a temperature for each position of the whole block; () takes them out."""
        return dataclasses.replace(self, temperature=temperature)

    def unscored(self) -> BlockDraft:
        """Returns the draft without its scorer."""
        return dataclasses.replace(self, alone=True)

    def windowed(self, window: int) -> BlockDraft:
        """Returns the draft that looks back at so many committed tokens; 0 is all."""
        return dataclasses.replace(self, window=window)

    def _temperatures(self) -> Float[Array, " D"]:
        return jnp.array(self.temperature[: self.depth], jnp.float32)

    def _module(self, params) -> Head:
        return nnx.merge(self.graphdef, nnx.State({k: v for k, v in params.items() if k != "scorer"}))


def build(
    config: HeadConfig, dtype, depth: int | None = None, backend: XLA = PLAIN_XLA, rule: Rule | None = None
) -> tuple[BlockDraft, dict]:
    """Returns the pure functions of a head, and its parameters as shapes.

    Args:
      config: of the head.
      dtype: of its parameters.
      depth: longest path; None is the whole block.
      backend: how it computes.
      rule: how its scores become a tree; None is a tree of 64 nodes.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: Head(config, dtype)))
    shapes = nnx.to_pure_dict(state)
    if config.scorer_rank:
        shapes["scorer"] = scorer.shapes(config, dtype)
    return BlockDraft(config, depth or config.depth, rule or Rule(64), graphdef, backend), shapes
