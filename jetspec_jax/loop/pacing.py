"""Which number of nodes pays best, decided on the device from what rounds say of themselves.

A ladder of programs verifies 1, 4, 8, ... nodes a round; 1 is a plain step. What each would commit is known from the
probabilities that the draft gives its own paths, of which a round scores as many as the largest program has; what each
costs was measured. The rule is the best ratio of the two, plain decoding among them, for the block of rounds that comes
next. A smaller program's trees are the first nodes of a larger one's, so that a change of size changes speed alone.

Three things make this safe:

* Probabilities are what the draft believes. Beside them stands what was accepted, node by node: a head that is too sure
  of itself is corrected by the ratio of the two.
* Both are means over recent rounds that fade with the tokens committed since, and a new text has `EVIDENCE` rounds of
  its own before plain decoding is chosen for it; one alone where that is found to be `FAR` from paying.
* Plain steps draft nothing, so nothing would ever end them. Of three ways back, a draft without verification costs
  about as much as a round of the cheapest tree and commits nothing; a fixed interval costs too much where drafts are
  poor and is too rare where they nearly pay. So a single round of the tree that loses least is run whenever what it
  loses, by the estimate, is `PROBE` of the plain time since the last one: every few tokens near break-even, and every
  few hundred far below it. The other way round a few plain steps are timed now and then between trees, by the same
  account: what a machine's other work costs a round with many rows and one with a single row is not the same share.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jetspec_jax.layers.numerics import narrow
from jetspec_jax.loop import budgets
from jetspec_jax.loop.state import RUNNING
from jetspec_jax.options import BUDGET_RULES

PATH_TOKENS = 64.0  # committed tokens after which what the draft said counts 1/e; answers change within sentences
TRUST_TOKENS = 256.0  # the same of how right it was, which is the head's more than the text's
TRUST_KEPT = 32.0  # promised tokens that a new text takes over from the one before
TRUST_PRIOR = 8.0  # accepted and promised tokens that are taken as seen before any was, half of them for each segment
EVIDENCE = 2  # rounds with trees before a text is decoded plainly
FAR = 0.4  # plain steps: a first round that loses as many ends the trial
PROBE = 0.005  # of the time of plain decoding, for rounds that look whether trees pay again
RESTING = 1.02  # how much faster a tree must look before plain decoding ends; one probe alone is noisy
PROBE_STEPS = 8, 4096  # plain steps between probes, at least and at most
PLAIN_STEPS = 4  # that are timed between trees
PLAIN_LEAST = 32  # plain steps' time between two such looks, at least
MANY = 2**20  # rounds; the host has its own limits


@dataclasses.dataclass(frozen=True)
class Ladder:
    """The sizes among which is chosen; static.

    sizes: nodes of a round, ascending; 1 is a plain step, where it is among them.
    depth: longest path of the largest.
    rule: `best` is the largest ratio of all; `caddtree` and `cast` are `budgets`' rules, which stop at the first node
      or size that does not pay. They choose a tree, and plain decoding is taken where it pays more than that.
    """

    sizes: tuple[int, ...]
    depth: int
    rule: str = "best"

    def __post_init__(self):
        if list(self.sizes) != sorted(set(self.sizes)) or self.sizes[0] < 1 or self.sizes[-1] < 2:
            raise ValueError(f"sizes={self.sizes}: give ascending numbers of nodes, the last at least 2")
        if self.rule not in BUDGET_RULES:
            raise ValueError(f"rule={self.rule}: use {', '.join(BUDGET_RULES)}")

    @property
    def plain(self) -> bool:
        """Whether plain decoding is among them."""
        return self.sizes[0] == 1

    @property
    def trees(self) -> tuple[int, ...]:
        """The sizes of trees."""
        return self.sizes[self.plain :]


class Price(NamedTuple):
    """What rounds cost."""

    contexts: jax.Array  # [C] f32, committed tokens, ascending
    seconds: jax.Array  # [C, n] f32, of a round of each size, as they were measured
    factor: jax.Array  # [n] f32, how much longer they take now

    def at(self, length: Float[Array, ""]) -> Float[Array, " n"]:
        """Returns the seconds of a round of each size after so many tokens."""
        return self.factor * jax.vmap(lambda column: jnp.interp(length, self.contexts, column), 1)(self.seconds)


class Belief(NamedTuple):
    """What rounds have said; sums that fade. G nodes of the largest tree, the root left out of the arrays."""

    weight: jax.Array  # [] f32, rounds
    path: jax.Array  # [G - 1] f32, probability of the path to each node, mean over rows
    promised: jax.Array  # [G - 1] f32, the same of nodes that were verified
    kept: jax.Array  # [G - 1] f32, whether they were accepted
    tested: jax.Array  # [] f32, rounds with trees since the text was new
    rested: jax.Array  # [] f32, plain steps since the last of them


class Next(NamedTuple):
    """What the next block is."""

    place: jax.Array  # [] int32, into `Ladder.sizes`
    rounds: jax.Array  # [] int32, at most, before the choice is made anew
    resting: jax.Array  # [] bool, whether plain decoding is what pays; not so where plain steps are timed between trees
    seconds: jax.Array  # [n] f32, of a round of each size


def start(nodes: int) -> Belief:
    """Returns what is believed of a text before its first round: half a round of a usual head.

    nodes: G, of the largest tree.
    """
    rank = jnp.arange(1, nodes, dtype=jnp.float32)
    zero, none = jnp.zeros(()), jnp.zeros_like(rank)
    return Belief(jnp.float32(0.5), 0.5 * 0.6 * rank**-0.9, none, none, zero, zero)


@narrow
def renewed(ladder: Ladder, belief: Belief, share: Float[Array, ""]) -> Belief:
    """Returns the belief when a share of the rows is new: it counts for less, half a round where all are.

    How far the draft is to be trusted is the head's more than the text's, and counts for as much as `TRUST_KEPT` says.

    Args:
      ladder: of no meaning here; it makes this a program like the others.
      belief: before.
      share: of the rows, in 0..1.
    """
    del ladder
    weight = (1 - share) * belief.weight + share * jnp.minimum(belief.weight, 0.5)
    path = belief.path * weight / jnp.maximum(belief.weight, 1e-6)
    trust = 1 - share + share * TRUST_KEPT / jnp.maximum(belief.promised.sum(), TRUST_KEPT)
    tested, promised, kept = belief.tested * (1 - share), belief.promised * trust, belief.kept * trust
    return Belief(weight, path, promised, kept, tested, belief.rested)


def probabilities(ladder: Ladder, belief: Belief) -> Float[Array, " m"]:
    """Returns how probable each node of the largest tree is to be accepted, the root left out.

    What the draft says, times how right it was: in all, and more closely between each two sizes.
    """
    total = (belief.kept.sum() + TRUST_PRIOR) / (belief.promised.sum() + TRUST_PRIOR)
    trust = []
    for low, high in itertools.pairwise((1, *ladder.trees)):
        part = slice(low - 1, high - 1)
        prior = TRUST_PRIOR / 2
        own = (belief.kept[part].sum() + prior * total) / (belief.promised[part].sum() + prior)
        trust.append(jnp.full(high - low, own))
    said = belief.path[: ladder.sizes[-1] - 1] / jnp.maximum(belief.weight, 1e-6)
    return jnp.clip(said * jnp.concatenate(trust), 0.0, 1.0)


def expected(ladder: Ladder, belief: Belief) -> Float[Array, " n"]:
    """Returns the tokens that a round of each size commits a row, the target's own included."""
    tokens = 1 + jnp.concatenate([jnp.zeros(1), jnp.cumsum(probabilities(ladder, belief))])
    deepest = jnp.minimum(jnp.array(ladder.sizes), ladder.depth + 1)
    return jnp.minimum(tokens[jnp.array(ladder.sizes) - 1], deepest)


@narrow
def choose(
    ladder: Ladder,
    belief: Belief,
    price: Price,
    length: Int[Array, " B"],
    reason: Int[Array, " B"],
    resting: Bool[Array, ""],
    worked: Float[Array, ""],
) -> Next:
    """Returns the next block.

    Args:
      ladder: the sizes.
      belief: what rounds have said.
      price: of the sizes.
      length: committed tokens of each row.
      reason: `State.reason`: a round is paid for by the rows that have not ended.
      resting: whether plain decoding was what paid, `Next.resting` of the block before.
      worked: seconds of rounds with trees since the last plain step.
    """
    running = reason == RUNNING
    mean = jnp.where(running, length, 0).sum() / jnp.maximum(running.sum(), 1)
    seconds, tokens = price.at(mean), expected(ladder, belief)
    rate, first = tokens / seconds, int(ladder.plain)
    tree = first + _tree(ladder, belief, seconds[first:], rate[first:])
    if not ladder.plain:
        return Next(tree.astype(jnp.int32), jnp.int32(MANY), jnp.bool_(False), seconds)
    loss = (seconds - tokens * seconds[0])[1:]  # beside plain decoding
    test = 1 + jnp.argmin(loss)
    every = jnp.clip(jnp.ceil(loss.min() / (PROBE * seconds[0])), *PROBE_STEPS)

    pays = rate[tree] > rate[0] * jnp.where(resting, RESTING, 1.0)
    needed = jnp.where((belief.tested >= 1) & (loss.min() >= FAR * seconds[0]), 1, EVIDENCE)
    looks = (belief.tested < needed) | (belief.rested >= every)
    lost = PLAIN_STEPS * jnp.maximum(seconds[0] - 1 / rate[tree], 0.0)
    times = pays & (PROBE * worked >= lost) & (worked >= PLAIN_LEAST * seconds[0])
    place = jnp.where(pays, jnp.where(times, 0, tree), jnp.where(looks, test, 0))
    rounds = jnp.where(pays, jnp.where(times, PLAIN_STEPS, MANY), jnp.where(looks, 1, every - belief.rested))
    return Next(place.astype(jnp.int32), rounds.astype(jnp.int32), ~pays & (belief.tested >= needed), seconds)


def _tree(ladder: Ladder, belief: Belief, seconds: Float[Array, " m"], rate: Float[Array, " m"]) -> Int[Array, ""]:
    """Returns the place of the tree that the rule chooses, among the trees."""
    sizes = jnp.array(ladder.trees, jnp.float32)
    if ladder.rule == "best" or len(ladder.trees) == 1:
        return jnp.argmax(rate)
    found = probabilities(ladder, belief)
    if ladder.rule == "cast":
        nodes = 1 + budgets.grid_size(found, jnp.int32(1), tuple(n - 1 for n in ladder.trees), seconds)
    else:  # costs of any number of nodes: on the lines between the sizes, the first of them prolonged to the root alone
        every = jnp.arange(1, ladder.sizes[-1] + 1, dtype=jnp.float32)
        slope = (seconds[1] - seconds[0]) / (sizes[1] - sizes[0])
        below = jnp.maximum(seconds[0] - slope * (sizes[0] - every), 0.0)
        verify = jnp.where(every < sizes[0], below, jnp.interp(every, sizes, seconds))
        nodes = 1 + budgets.tree_size(found, jnp.float32(0.0), verify)
    return jnp.argmax(sizes >= nodes)


def faded(belief: Belief, tokens: Float[Array, ""], steps: Float[Array, ""]) -> Belief:
    """Returns the belief after so many tokens a row, of which so many plain steps."""
    near, far = jnp.exp(-tokens / PATH_TOKENS), jnp.exp(-tokens / TRUST_TOKENS)
    return Belief(
        belief.weight * near, belief.path * near, belief.promised * far, belief.kept * far, belief.tested,
        belief.rested + steps,
    )  # fmt: skip
