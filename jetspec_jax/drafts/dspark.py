"""The DSpark head (arXiv 2607.05147), and the tree of PCTree (arXiv 2608.02123) on it.

A bidirectional block like DFlash's, whose anchor slot predicts too: a block of D slots drafts D tokens, in one pass.
Then the Markov head (`markov.py`) adds to the logits of every slot what the token before makes of them. A chain goes
from left to right, each token the best after the one before. A tree does the same at every node, so that siblings have
children of their own, which no tree out of one distribution a depth has.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jetspec_jax.backends.xla import PLAIN_XLA, XLA
from jetspec_jax.drafts.block import BlockDraft, Head, HeadState
from jetspec_jax.drafts.dspark_files import DSparkConfig
from jetspec_jax.drafts.markov import Confidence, Markov
from jetspec_jax.layers import vocabulary
from jetspec_jax.loop import tree as trees
from jetspec_jax.loop.choice import Choice
from jetspec_jax.loop.contracts import Ends
from jetspec_jax.loop.tree import Frontier, Rule, Scores, Tree
from jetspec_jax.options import ConfigError

# Children of a node. PCTree finds that the second sibling gives most and that four are enough; those that the tree does
# not keep cost a place in a top-k and no verified row.
WIDTH = 4
# Nodes that are expanded at a depth. 64 nodes over seven depths are nine a depth; each costs a row of V logits a depth.
FRONTIER = 16


class DSpark(Head):
    """Parameters of the head: of a block, of the Markov head and of the confidence, where it has them."""

    config: DSparkConfig

    def __init__(self, config: DSparkConfig, dtype):
        super().__init__(config, dtype)
        if config.markov_rank:
            self.markov = Markov(config, dtype)
        if config.confidence:
            self.confidence = Confidence(config, dtype)

    def start(self, batch: int) -> jax.Array:
        """Returns what the Markov head remembers at the anchor [B, 1, Z]."""
        return self.markov.start(batch) if self.config.markov_rank else jnp.zeros((batch, 1, 0))

    def after(
        self, logits: Float[Array, "B 1 V"], hidden: Float[Array, "B 1 E"], token: Int[Array, "B T"], memory: jax.Array
    ) -> tuple[Float[Array, "B T V"], jax.Array]:
        """Returns the logits of one slot after each of T tokens, and what is remembered of each path [B, T, Z]."""
        rows = (*token.shape, hidden.shape[-1])
        if not self.config.markov_rank:
            return jnp.broadcast_to(logits, (*token.shape, logits.shape[-1])), memory
        bias, memory = self.markov.bias(jnp.broadcast_to(hidden, rows), token, memory)
        return logits + bias, memory

    def trust(self, hidden: Float[Array, "B T E"], before: Int[Array, "B T"]) -> Float[Array, "B T"]:
        """Returns the logit of the confidence in each slot's token, of its hidden state and the token before."""
        rows = (hidden, self.markov.embed(before)) if self.config.confidence_markov else (hidden,)
        return self.confidence.logits(*rows)


@dataclasses.dataclass(frozen=True)
class DSparkDraft(BlockDraft):
    """The head as pure functions; implements `contracts.Draft`. A width of 1 is a chain, any other PCTree's tree.

    temperature: divides the confidence, and nothing that ranks candidates.
    """

    config: DSparkConfig

    first: ClassVar[int] = 0

    def __post_init__(self):
        super().__post_init__()
        if self.rule.builder != "best_first" and self.rule.width != 1:
            raise ConfigError(f"tree={self.rule.builder}: a DSpark head draws a chain or PCTree's tree; leave it out")

    @property
    def slots(self) -> int:
        """Rows of the block that are run."""
        return self.config.block_size

    def shaped(self, rule: Rule, depth: int) -> DSparkDraft:
        width = max(min(rule.width or WIDTH, rule.scored - 1, self.config.vocab_size), 1)
        return dataclasses.replace(self, rule=dataclasses.replace(rule, width=width), depth=depth)

    def propose(self, params, state: HeadState, choice: Choice, budget, ends: Ends) -> tuple[Tree, HeadState]:
        hidden, state = self.hidden(params, state, choice.anchor, choice.past.length, ends)
        head, base = self._module(params), ends.logits(hidden)
        rank = lambda logits, level: choice.foresee(logits, self.rule.sharpness, level)
        if self.rule.width == 1:
            tokens, logits, sure = self._chain(head, hidden, base, choice.anchor, rank)
            return self._line(tokens, sure, choice.anchor, budget)._replace(logits=logits), state

        def children(level: int, at: Frontier, memory: jax.Array):
            if level:
                memory = jnp.take_along_axis(memory, at.parent[..., None], 1)
            slot = slice(level, level + 1)
            logits, memory = head.after(base[:, slot], hidden[:, slot], at.token, memory)
            ranked = rank(logits, level)
            best, token = vocabulary.top_k(ranked, self.rule.width)
            return token, best - vocabulary.log_total(ranked), memory

        frontier = min(self.rule.scored - 1, FRONTIER)
        start = head.start(len(base))
        grown, scores = trees.levels(children, start, choice.anchor, self.rule.scored, self.depth, frontier)
        return trees.cut(trees.first(grown, self.nodes), choice.anchor, budget)._replace(scores=scores), state

    def guesses(
        self, params, state: HeadState, anchor: Int[Array, " B"], length: Int[Array, " B"], ends: Ends
    ) -> Int[Array, "B D"]:
        """Returns the greedy chain of the D positions from `length` on."""
        hidden, _ = self.hidden(params, state, anchor, length, ends)
        return self._chain(self._module(params), hidden, ends.logits(hidden), anchor, lambda logits, level: logits)[0]

    def confidence(self, params, hidden: Float[Array, "B D E"], before: Int[Array, "B D"]) -> Float[Array, "B D"]:
        """Returns the logit with which the head expects each token of a chain to be accepted, if all before it are.

        The running product of their sigmoids is the probability that the chain survives so far: what
        `loop.budgets.chain_lengths` asks for.

        Args:
          params: of the head.
          hidden: of the drafted slots, as `hidden` returns them.
          before: the token before each slot: the anchor, then the chain without its last token.

        Raises:
          ConfigError: the head has no confidence.
        """
        head = self._module(params)
        if not self.config.confidence:
            raise ConfigError("enable_confidence_head=False: this head was trained without a confidence")
        logits = head.trust(hidden, before)
        return logits / self._temperatures() if self.temperature else logits

    def _chain(
        self, head: DSpark, hidden: jax.Array, base: jax.Array, anchor: jax.Array, rank: Callable[..., jax.Array]
    ) -> tuple[Int[Array, "B D"], Float[Array, "B D V"], Float[Array, "B D"]]:
        """Returns the best tokens from left to right, the logits of their slots, and the tokens' log-probabilities."""

        def step(carry: Any, level: jax.Array):
            token, memory = carry
            slot = lambda x: jax.lax.dynamic_slice_in_dim(x, level, 1, 1)
            logits, memory = head.after(slot(base), slot(hidden), token, memory)
            ranked = rank(logits, level)
            token = vocabulary.best(ranked)
            sure = vocabulary.at(ranked, token) - vocabulary.log_total(ranked)
            return (token, memory), (token[:, 0], logits[:, 0], sure[:, 0, 0])

        start = anchor[:, None], head.start(len(base))
        _, (tokens, logits, sure) = jax.lax.scan(step, start, jnp.arange(self.depth))
        return tokens.T, logits.swapaxes(0, 1), sure.T

    def _line(
        self, tokens: Int[Array, "B D"], sure: Float[Array, "B D"], anchor: Int[Array, " B"], budget: Int[Array, " B"]
    ) -> Tree:
        """Returns the tree of one path, each token of which has a log-probability of its own."""
        spine = jnp.cumsum(jnp.where(jnp.isnan(sure), -jnp.inf, sure), axis=1)
        missing = max(self.rule.scored - 1 - self.depth, 0)
        node = jnp.pad(spine[:, : self.rule.scored - 1], ((0, 0), (1, missing)), constant_values=-jnp.inf)
        at = jnp.broadcast_to(jnp.arange(self.nodes), (len(tokens), self.nodes))
        fitting = tokens[:, : self.nodes - 1]
        padded = jnp.pad(fitting, ((0, 0), (1, self.nodes - 1 - fitting.shape[1])))
        tree = trees.cut((padded, at - 1, at, jnp.full(len(tokens), 1 + fitting.shape[1])), anchor, budget)
        return tree._replace(scores=Scores(node.at[:, 0].set(0.0), spine))

    def _module(self, params) -> DSpark:
        return nnx.merge(self.graphdef, nnx.State(params))


def build(config: DSparkConfig, dtype, backend: XLA = PLAIN_XLA) -> tuple[DSparkDraft, dict]:
    """Returns the pure functions of a head, and its parameters as shapes.

    Args:
      config: of the head.
      dtype: of its parameters.
      backend: how it computes.
    """
    graphdef, state = nnx.split(nnx.eval_shape(lambda: DSpark(config, dtype)))
    return DSparkDraft(config, config.depth, Rule(64), graphdef, backend), nnx.to_pure_dict(state)
