"""How a round chooses: one rule for every temperature, for plain and for speculative decoding.

The token at absolute position p is `argmax(logits / temperature + noise)`, with Gumbel noise that only the request's
seed and p decide; at temperature 0 there is no noise. A token chosen so is an exact sample of
softmax(logits / temperature), and because the noise belongs to the position, a tree that verifies many nodes chooses
the very token that plain decoding with this seed would choose. `processors` has the options that change the logits
before.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.layers import vocabulary
from jetspec_jax.loop import processors, verify
from jetspec_jax.loop import tree as trees
from jetspec_jax.loop.processors import Counts, Past, Sampling
from jetspec_jax.loop.tree import Candidates, Pairs, Rule, Tree
from jetspec_jax.loop.verify import Accepted

NOISE_SHARE = 0.85  # fitted on the demo pair, with its scorer, at temperature 1


class Choice(NamedTuple):
    """What decides the tokens of one round; made once a round, by `choose`.

    It lives inside one trace: `depth` is a Python number.
    """

    sampling: Sampling
    past: Past
    ended: jax.Array  # [B] bool, rows whose result does not matter
    counts: Counts | None  # of committed tokens; None without penalties
    noise: jax.Array | None  # [B, D + 1, V] f32 of the positions from `past.length` on; None where all rows are greedy
    depth: int  # D

    @property
    def anchor(self) -> Int[Array, " B"]:
        """The last committed token of every row, the root of its tree."""
        return jnp.take_along_axis(self.past.tokens, self.past.length[:, None] - 1, 1)[:, 0]

    def foresee(
        self, logits: Float[Array, "B R V"], sharpness: float, level: int | Int[Array, ""] | None = None
    ) -> Float[Array, "B R V"]:
        """Bends draft logits as the target's choice will be bent: by bias, penalties of what is there, and the noise.

        Were the draft's logits the target's own, the target would choose the argmax of logits / temperature + noise.
        They are an average over continuations that the draft cannot see: flatter, with an error that no temperature
        divides. So the noise counts for less, and softmax(sharpness * (logits + NOISE_SHARE * temperature * noise)) is
        about how probable each token is to be the target's choice; the sum of its logarithms along a path ranks paths.
        Greedy rows have no noise.

        Args:
          logits: of the draft, as they are.
          sharpness: how far the known noise is trusted; 0 leaves it out.
          level: positions between the anchor's successor and what every row guesses; None is one row a level, 0 first.
        """
        logits = processors.bias_and_penalties(logits, self.sampling, self.counts)
        if self.noise is None or not sharpness:
            return logits
        rows = self.noise[:, : logits.shape[1]]
        known = rows if level is None else jax.lax.dynamic_slice_in_dim(self.noise, level, 1, 1)
        ranked = sharpness * (logits + NOISE_SHARE * self.sampling.scale * known)
        return jnp.where(self.sampling.greedy[:, None, None], logits, ranked)

    def tree(
        self,
        rule: Rule,
        logits: Float[Array, "B D V"],
        budget: Int[Array, " B"],
        grower: Callable | None = None,
        adds: Callable[[Candidates], Float[Array, "B D W W"]] | None = None,
    ) -> Tree:
        """Builds the tree of a draft that gives one row of logits a depth.

        Args:
          rule: how candidates become a tree.
          logits: of the draft, as they are.
          budget: nodes of each row, the root included.
          grower: what computes `tree.grow`.
          adds: what each candidate adds to the logits of its children, as they are; None is nothing.
        """
        ranked = self.foresee(logits, rule.sharpness)
        if adds is None or rule.nodes == 1:
            return trees.build(rule, ranked, self.anchor, budget, grower)._replace(logits=logits)
        shared = trees.candidates(rule, ranked, paired=True)
        pairs = Pairs(shared.token, adds(shared))
        found = trees.conditioned(shared, self._sharpened(pairs.bias, rule.sharpness))
        return trees.drawn(rule, found, self.anchor, budget, grower)._replace(logits=logits, pairs=pairs)

    def _sharpened(self, bias: Float[Array, "B D W W"], sharpness: float) -> Float[Array, "B D W W"]:
        """Returns what is added to logits as `foresee` would have ranked them with it."""
        if self.noise is None or not sharpness:
            return bias
        cold = self.sampling.greedy[:, None, None, None]
        return jnp.where(cold, bias, sharpness * bias)

    def accept(self, tree: Tree, ancestors: Bool[Array, "B T T"], logits: Float[Array, "B T V"]) -> Accepted:
        """Finds the path on which the target agrees, and the tokens that it commits.

        Without options that change logits every node's choice is one pass over its logits. With them, a pass guesses,
        and only the nodes that the path visits have their row processed.
        """
        options = self.sampling
        if not (options.edits or options.filters):
            return verify.accept(tree, ancestors, self._pick(logits, tree.depths), self.depth)

        def rule(path):
            rows = jnp.take_along_axis(logits, path[..., None], 1)
            line = jnp.take_along_axis(tree.tokens, path, 1)
            return vocabulary.best(processors.scores(rows, line, self.past, options, self.noise, self.counts))

        if self.depth == 0:
            return verify.accept(tree, ancestors, rule(jnp.zeros_like(tree.tokens)), 0)
        guess = self._pick(processors.bias_and_penalties(logits, options, self.counts), tree.depths)
        return verify.accept_lazily(tree, ancestors, guess, self.ended, rule, self.depth)

    def _pick(self, logits: Float[Array, "B T V"], depths: Int[Array, "B T"]) -> Int[Array, "B T"]:
        """Picks the best token of every node; D + 1 rows of noise serve all T, by the nodes' depths."""
        if self.noise is not None:
            logits = logits / self.sampling.scale + jnp.take_along_axis(self.noise, depths[..., None], 1)
        return vocabulary.best(logits)


def choose(sampling: Sampling, past: Past, ended: Bool[Array, " B"], depth: int, vocab_size: int) -> Choice:
    """Makes the choice of a round, its noise drawn.

    Args:
      sampling: options of the rows.
      past: what is committed.
      ended: rows that are done.
      depth: longest path D; a round chooses up to D + 1 tokens.
      vocab_size: V.
    """
    counts = processors.committed(past, sampling, vocab_size)
    warm = sampling.temperature is not None
    noise = noise_rows(sampling, past.length, depth + 1, vocab_size) if warm else None
    return Choice(sampling, past, ended, counts, noise, depth)


def noise_rows(sampling: Sampling, first: Int[Array, " B"], span: int, vocab_size: int) -> Float[Array, "B R V"]:
    """Draws the noise of the R = `span` positions from `first` on of every row; zeros for greedy rows."""
    if sampling.temperature is None:
        return jnp.zeros((first.size, span, vocabulary.held(vocab_size)))
    positions = first[:, None] + jnp.arange(span)
    rows = jax.vmap(jax.vmap(vocabulary.gumbel, (None, 0, None)), (0, 0, None))(sampling.seed, positions, vocab_size)
    return jnp.where(sampling.greedy[:, None, None], 0.0, rows)
