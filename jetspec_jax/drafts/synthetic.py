"""A draft of known acceptance, and the scripted target that makes it known: for benches, load tests and the library.

The target runs whole and then chooses what a script says at each position; the draft knows the script, and is right for
as many positions of a round as its acceptance asks. So every operation is paid for, also those whose cost depends on
acceptance, and the tokens say nothing. A real head may run inside, for its cost alone.

    model, weights = synthetic.scripted(target.model, target.params, width)
    draft, params = synthetic.build(SyntheticConfig(3.5, vocab_size))

With `ranks` the draft knows how often it is right: the right token is among its candidates, at a rank that is drawn
from the probabilities that it gives them. Larger trees then accept more, as far as these probabilities say.
"""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jetspec_jax.layers import vocabulary
from jetspec_jax.loop.choice import Choice
from jetspec_jax.loop.contracts import Backend, Ends, Output, Seen
from jetspec_jax.loop.tree import Rule, Tree
from jetspec_jax.options import ConfigError

BONUS = 1e4  # on the script's token: no noise and no penalty reaches it
DIGITS, BASE = 3, 128  # a position as numbers that 16 bits hold exactly


@dataclasses.dataclass(frozen=True)
class SyntheticConfig:
    """How much a synthetic draft gets right.

    acceptance: tokens a round on average, bonus included; or the share of right drafts at each depth, where all before
      were right.
    vocab_size: of the target.
    depth: positions drafted a round.
    seed: of the script and of the rounds' luck.
    ranks: probabilities of the draft's candidates at each depth, the largest first; what they leave to 1 is that the
      right token is none of them. () follows `acceptance`, which says nothing beside others.
    """

    acceptance: float | tuple[float, ...]
    vocab_size: int
    depth: int = 15
    seed: int = 0
    ranks: tuple[float, ...] = ()

    def __post_init__(self):
        falling = list(self.ranks) == sorted(self.ranks, reverse=True)
        if self.ranks and not (falling and self.ranks[-1] > 0 and sum(self.ranks) <= 1 + 1e-6):
            raise ConfigError(f"ranks={self.ranks}: give falling probabilities that are at most 1 together")
        if isinstance(self.acceptance, tuple):
            if len(self.acceptance) > self.depth or not all(0 <= share <= 1 for share in self.acceptance):
                raise ConfigError(f"acceptance={self.acceptance}: give at most {self.depth} shares in 0..1")
        elif not 1 <= self.acceptance <= self.depth + 1:
            raise ConfigError(f"acceptance={self.acceptance}: give a number of tokens in 1..{self.depth + 1}")

    def reach(self) -> list[float]:
        """Returns the share of rounds that accept at least 1, 2, ... drafts, one for each depth."""
        shares: list[float] = []
        for d in range(self.depth):
            if isinstance(self.acceptance, tuple):
                here = self.acceptance[d] if d < len(self.acceptance) else 0.0
                shares.append((shares[-1] if d else 1.0) * here)
            else:
                shares.append(min(max(self.acceptance - 1 - d, 0.0), 1.0))
        return shares


@dataclasses.dataclass(frozen=True)
class Scripted:
    """A target that chooses params["script"][p] at position p; implements `contracts.Target` around a real one.

    width: E of the real target. Hidden states carry their position in `DIGITS` channels more.
    """

    inner: Any
    width: int

    @property
    def vocab_size(self) -> int:
        return self.inner.vocab_size

    @property
    def backend(self) -> Backend:
        return self.inner.backend

    def init_cache(self, params, batch, capacity):
        return self.inner.init_cache(params["inner"], batch, capacity)

    def forward(self, params, tokens, positions, mask, cache=None, length=None, taps=()) -> Output:
        out = self.inner.forward(params["inner"], tokens, positions, mask, cache, length, taps)
        digits = positions[..., None] // BASE ** jnp.arange(DIGITS) % BASE
        return out._replace(hidden=jnp.concatenate([out.hidden, digits.astype(out.hidden.dtype)], -1))

    def embed(self, params, tokens):
        return self.inner.embed(params["inner"], tokens)

    def logits(self, params, hidden):
        logits = self.inner.logits(params["inner"], hidden[..., : self.width])
        if hidden.shape[-1] == self.width:  # a draft's
            return logits
        digits = hidden[..., self.width :].astype(jnp.int32)
        position = (digits * BASE ** jnp.arange(DIGITS)).sum(-1)
        return _favour(logits, script_at(params, position + 1))


@dataclasses.dataclass(frozen=True)
class Synthetic:
    """The draft; implements `contracts.Draft`.

    params: {"script": [n], "reach": [D], "ranks": [K], "seed": [], "inner": ...}.
    inner: a block head's draft that runs for its cost alone, or None.
    ranked: whether candidates have the probabilities of `ranks`.
    """

    vocab_size: int
    depth: int
    rule: Rule
    inner: Any = None
    ranked: bool = False

    scored: ClassVar[bool] = True

    @property
    def nodes(self) -> int:
        return self.rule.nodes

    @property
    def taps(self) -> tuple[int, ...]:
        return self.inner.taps if self.inner else ()

    def shaped(self, rule: Rule, depth: int) -> Synthetic:
        inner = self.inner.shaped(rule, depth) if self.inner else None
        return dataclasses.replace(self, rule=rule, depth=depth, inner=inner)

    def init(self, params, batch: int, capacity: int):
        return self.inner.init(params["inner"], batch, capacity) if self.inner else None

    def extend(self, params, state, seen: Seen, ends: Ends):
        return self.inner.extend(params["inner"], state, seen, ends) if self.inner else None

    def room(self, state):
        return self.inner.room(state)

    def wait(self, state, seen: Seen):
        return self.inner.wait(state, seen)

    def absorb(self, params, state, tokens, ends: Ends):
        return self.inner.absorb(params["inner"], state, tokens, ends)

    def resized(self, state, rows: int):
        return self.inner.resized(state, rows)

    def propose(self, params, state, choice: Choice, budget: Int[Array, " B"], ends: Ends) -> tuple[Tree, Any]:
        length = choice.past.length
        logits = jnp.zeros((length.size, self.depth, vocabulary.held(self.vocab_size)))
        if self.inner:
            logits, state = self.inner.logits(params["inner"], state, choice.anchor, length, ends)
        at = jnp.arange(self.depth)
        if self.ranked:
            return choice.tree(self.rule, self._candidates(params, length, logits), budget), state
        luck = jax.vmap(lambda n: jax.random.uniform(jax.random.fold_in(jax.random.key(params["seed"]), n)))(length)
        right = (luck[:, None] < params["reach"][: self.depth]).sum(-1, keepdims=True)
        token = script_at(params, length[:, None] + at)
        wrong = (token + 1) % self.vocab_size
        return choice.tree(self.rule, _favour(logits, jnp.where(at < right, token, wrong)), budget), state

    def _candidates(self, params, length: Int[Array, " B"], logits: Float[Array, "B D V"]) -> Float[Array, "B D V"]:
        """Returns logits under which the script's token has a rank that is drawn for each position anew."""
        ranks, vocab = params["ranks"], self.vocab_size
        position = length[:, None] + jnp.arange(self.depth)
        draw = lambda p, n: jax.random.uniform(
            jax.random.fold_in(jax.random.fold_in(jax.random.key(params["seed"]), n), p)
        )
        luck = jax.vmap(jax.vmap(draw, (0, None)))(position, length)
        rank = (luck[..., None] >= jnp.cumsum(ranks)).sum(-1)  # K where it is none of them
        place = (jnp.arange(vocab) - (script_at(params, position) - rank)[..., None]) % vocab
        known = jnp.log(ranks)[jnp.minimum(place, ranks.size - 1)]
        return jnp.where(place < ranks.size, known + 0.0 * logits, -BONUS)


def script_at(params: dict, position: Int[Array, "*rows"]) -> Int[Array, "*rows"]:
    """Returns the script's tokens; it begins anew where it ends."""
    return params["script"][position % params["script"].size]


def script(vocab_size: int, seed: int = 0, size: int = 4096) -> Int[Array, " n"]:
    """Draws the tokens of a script."""
    return jax.random.randint(jax.random.key(seed), (size,), 0, vocab_size, jnp.int32)


def scripted(model, params, width: int, seed: int = 0) -> tuple[Scripted, dict]:
    """Returns a target that follows the script, and its parameters.

    Args:
      model: pure functions of a target.
      params: its parameters.
      width: E, of its hidden states.
      seed: of the script; that of the draft's configuration.
    """
    return Scripted(model, width), {"inner": params, "script": script(model.vocab_size, seed)}


def build(config: SyntheticConfig, dtype=None, backend=None, inner=None, inner_params=None) -> tuple[Synthetic, dict]:
    """Returns the draft and its parameters.

    Args:
      config: what it gets right.
      dtype: of no meaning here, as of every family.
      backend: of no meaning here, as of every family.
      inner: a block head's draft that runs for its cost alone.
      inner_params: its parameters.
    """
    depth = min(config.depth, inner.depth) if inner else config.depth
    params = {
        "script": script(config.vocab_size, config.seed),
        "reach": jnp.array(config.reach(), jnp.float32),
        "ranks": jnp.array(config.ranks, jnp.float32),
        "seed": jnp.uint32(config.seed),
        "inner": inner_params,
    }
    return Synthetic(config.vocab_size, depth, Rule(64), inner, bool(config.ranks)), params


def _favour(logits: Float[Array, "*rows V"], token: Int[Array, "*rows"]) -> Float[Array, "*rows V"]:
    held = logits.shape[-1]
    return jnp.where(jnp.arange(held) == vocabulary.slot(token, held)[..., None], logits + BONUS, logits)
