"""Plain decoding as a draft: its tree is the root alone."""

from __future__ import annotations

import dataclasses

from jetspec_jax.loop import tree


@dataclasses.dataclass(frozen=True)
class Plain:
    """Drafts nothing, so that a round is one step of the target; implements `contracts.Draft`."""

    depth = 0
    nodes = 1
    taps = ()

    def shaped(self, rule, depth):
        return self

    def init(self, params, batch, capacity):
        return None

    def extend(self, params, state, seen, ends):
        return state

    def propose(self, params, state, choice, budget, ends):
        return tree.root(choice.anchor), state


PLAIN = Plain()
