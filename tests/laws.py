"""The exact law of a stub target's tokens, decoders that sample it, and the test of a sample against it."""

import jax
import numpy as np
import tiny
from scipy import stats

from jetspec_jax.layers import vocabulary
from jetspec_jax.loop.decoder import Decoder
from jetspec_jax.loop.plain import PLAIN

VOCAB, DEPTH, DRAWS, BATCH = 8, 2, 200_000, 50_000
LOADED = tiny.hash_target(VOCAB, seed=3, scale=1.0)
ALONE = Decoder(LOADED.model, PLAIN, 8)
TREE = tiny.loop(LOADED.model, tiny.TableDraft(DEPTH), 8, 8, "best_first", 3)
CHAIN = tiny.loop(LOADED.model, tiny.TableDraft(DEPTH), 3, 8, "accum_logp", 1)
PROMPT = 5


noise_of = jax.jit(vocabulary.gumbel, static_argnums=2)


def law(temperature: float) -> np.ndarray:
    """Exact law [V, V, V] of the first three tokens."""
    softmax = lambda logits: np.exp(np.asarray(jax.nn.log_softmax(logits / temperature), np.float64))
    pairs = [[PROMPT, a, b] for a in range(VOCAB) for b in range(VOCAB)]
    logits = tiny.path_logits(LOADED, pairs).reshape(VOCAB, VOCAB, 3, VOCAB)
    first, second, third = softmax(logits[0, 0, 0]), softmax(logits[:, 0, 1]), softmax(logits[:, :, 2])
    return first[:, None, None] * second[:, :, None] * third


def draft_logits(kind: str) -> np.ndarray:
    """good: the target's own marginals. bad: every token alike. adversarial: sure of what the target likes least."""
    joint = law(1.0)
    marginals = np.log(np.stack([joint.sum((0, 2)), joint.sum((0, 1))]))
    return {"good": marginals, "bad": np.zeros_like(marginals), "adversarial": -20 * marginals}[kind]


def p_value(tokens: np.ndarray, wanted: np.ndarray) -> float:
    """Chi-square of joint counts; cells that expect fewer than 5 are pooled, and those that are impossible left out."""
    cells = np.ravel_multi_index(tokens.T, wanted.shape)
    seen, expected = np.bincount(cells, minlength=wanted.size), wanted.ravel() * len(tokens)
    small = expected < 5
    pool = lambda x: np.append(x[~small], x[small].sum()) if wanted.ravel()[small].any() else x[~small]
    seen, expected = pool(seen), pool(expected)
    return stats.chisquare(seen, expected * seen.sum() / expected.sum()).pvalue
