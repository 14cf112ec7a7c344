"""A drafter of your own: a table of bigrams that is learnt from the text while it is decoded.

    python examples/own_drafter.py [--target DIR]

A drafter implements `jetspec_jax.loop.contracts.Draft`: a frozen dataclass of pure functions on arrays with B rows,
which become a part of the compiled round. The target decides every token, so a bad drafter costs speed alone.
"""

import argparse
import dataclasses

import jax.numpy as jnp

from jetspec_jax import SamplingConfig, TreeConfig, baseline, load_target, speculate
from jetspec_jax.files import demo
from jetspec_jax.files.pair import LoadedHead
from jetspec_jax.loop.tree import cut


@dataclasses.dataclass(frozen=True)
class Bigrams:
    """Drafts a chain: after each token comes what came after it when it last stood in the text."""

    vocab_size: int
    depth: int = 7  # tokens drafted a round
    taps = ()  # it reads no layer of the target

    @property
    def nodes(self):
        return self.depth + 1  # of its trees, the root included

    def shaped(self, rule, depth):
        return dataclasses.replace(self, depth=depth)

    def init(self, params, batch, capacity):
        return jnp.full((batch, self.vocab_size), -1)  # the position at which each token stood last

    def extend(self, params, last, seen, ends):
        at = jnp.arange(seen.tokens.shape[1])
        fresh = (at >= seen.start[:, None]) & (at < (seen.start + seen.count)[:, None])
        token = jnp.where(fresh, seen.tokens, self.vocab_size)  # what is out of range is dropped
        return last.at[jnp.arange(len(last))[:, None], token].max(at, mode="drop")

    def propose(self, params, last, choice, budget, ends):
        row, line, known, size = jnp.arange(len(last)), [choice.anchor], True, 1
        for _ in range(self.depth):
            place = last[row, line[-1]]
            known &= place >= 0
            line.append(choice.past.tokens[row, place + 1])
            size += known
        depths = jnp.broadcast_to(jnp.arange(self.nodes), (len(last), self.nodes))
        return cut((jnp.stack(line, 1), depths - 1, depths, size), choice.anchor, budget), last


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--target", help="a folder, a .gguf file or a hub id; default: the demo's")
    target = load_target(parser.parse_args().target or demo.fetch_target())
    draft = Bigrams(target.config.vocab_size)
    drafter = LoadedHead(draft, {}, source="bigrams")  # used where a head is used

    prompt, sampling = "Repeat this line five times: the cat sat on the mat.", SamplingConfig(64)
    result = speculate.generate(target, drafter, prompt, TreeConfig(budget=8), sampling)
    plain = baseline.generate(target, prompt, sampling)
    print(f"{result.text}\n{result.new_tokens} tokens, {result.acceptance_length:.2f} a round")
    print(f"plain decoding: {'the same tokens' if plain.token_ids == result.token_ids else 'other tokens'}")
