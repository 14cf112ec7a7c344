"""A two-layer random target that trains in milliseconds, a tokenizer of characters, and what a step needs."""

from __future__ import annotations

import functools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import HeadConfig, ModelConfig
from jetspec_jax.drafts.dspark_files import DSparkConfig
from jetspec_jax.drafts.eagle3_files import Eagle3Config
from jetspec_jax.files import load
from jetspec_jax.files.tokenizer import Tokenizer
from jetspec_jax.models import qwen3
from jetspec_jax.training import objective, step
from jetspec_jax.training.data import packing
from jetspec_jax.training.data.batches import Batch
from jetspec_jax.training.data.examples import Example
from jetspec_jax.training.recipe import Recipe

MODEL = ModelConfig("qwen3", 48, 16, 2, 2, 1, 8, 24, 1e-6, 1e4, 512, True, True, eos_token_ids=(1,))
HEAD = HeadConfig(48, 16, 1, 2, 1, 8, 24, 1e-6, 1e4, 512, 2, 4, 3, (0, 1), True)
EAGLE = Eagle3Config(48, 32, 16, 2, 1, 8, 24, 1e-6, 1e4, 512, 2, (0, 1), depth=3)
DSPARK = DSparkConfig(
    48, 16, 1, 2, 1, 8, 24, 1e-6, 1e4, 512, 2, 4, 3, (0, 1), False, markov_rank=8, confidence=True,
    confidence_markov=True,
)  # fmt: skip
WIDTH = 24
END, SPEAKERS = "$", {"system": "<", "user": "@", "assistant": ">"}
ALPHABET = "?$ M\n<@>0123456789abcdefghijklmnopqrstuvwxyz.,U\u2042"  # "M" is the mask, id 3


class Letters(Tokenizer):
    """A tokenizer of single characters with a chat template `@question$>answer$`."""

    has_chat_template, knows_thinking = True, False
    eos = (1,)

    def __init__(self):
        super().__init__(None)

    def encode(self, text, begin=False):
        return [max(ALPHABET.find(letter), 0) for letter in text]

    def decode(self, ids):
        return "".join(ALPHABET[i] if i < len(ALPHABET) else "?" for i in ids)

    def render_chat(self, messages, thinking=None, answer_follows=True):
        text = "".join(SPEAKERS.get(m["role"], "") + m["content"] + END for m in messages)
        return text + SPEAKERS["assistant"] * answer_follows

    def encode_chat(self, messages, thinking=None):
        return self.encode(self.render_chat(messages))


def random_params(shapes, seed):
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(seed), len(leaves))
    drawn = [
        0.3 * jax.random.normal(k, x.shape) if len(x.shape) > 1 else 1 + 0.1 * jax.random.normal(k, x.shape)
        for k, x in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, drawn)


@functools.lru_cache(None)
def target(model=MODEL) -> load.LoadedTarget:
    """The target as `load_target` would return it."""
    functions, shapes = qwen3.build(model, jnp.float32)
    params = random_params(shapes, 0)
    return load.LoadedTarget(
        functions, params, model, "float32", model.eos_token_ids, "tiny.gguf", "f00d", 0.0, lambda: Letters()
    )


def recipe(steps=4, **change) -> Recipe:
    values = {
        "target": target().model,
        "head": HEAD,
        "dtype": "float32",
        "anchors": 4,
        "steps": steps,
        "peak_lr": 1e-2,
        "gamma": 7.0,
        "loss_chunk": 16,
        "seed": 0,
    }
    return Recipe(**values | change)


def eagle_recipe(steps=4, **change) -> Recipe:
    """A recipe for an EAGLE-3 head that drafts three steps, 32 of 48 tokens."""
    return recipe(steps, **{"head": EAGLE, "objective": objective.module("eagle3"), "unroll": 3, "gamma": 0.0} | change)


def dspark_recipe(steps=4, **change) -> Recipe:
    """A recipe for a DSpark head with a block of four slots, all of which draft."""
    return recipe(steps, **{"head": DSPARK, "objective": objective.module("dspark"), "gamma": 4.0} | change)


def example(name: str, tokens, prompt: int) -> Example:
    tokens = np.asarray(tokens, np.int32)
    return Example(name, tokens, np.arange(tokens.size) >= prompt)


def random_examples(count: int, seed: int = 0, longest: int = WIDTH) -> list[Example]:
    draw = np.random.default_rng(seed)
    lengths = draw.integers(6, longest + 1, count)
    return [example(f"r/{i}", draw.integers(4, 48, n), int(draw.integers(1, n - 3))) for i, n in enumerate(lengths)]


def batch(packed: packing.Packed, rows, parts: int = 1) -> Batch:
    """Sequences as one update takes them."""
    p = packed.select(np.asarray(rows))
    fold = lambda x: jnp.asarray(x.reshape(parts, -1, *x.shape[1:]))
    return Batch(*map(fold, (p.tokens, p.document, p.position, p.learnt, np.asarray(rows, np.int32))))


@functools.lru_cache(None)
def start(r: Recipe) -> step.TrainState:
    """The state before the first step."""
    return jax.jit(lambda params: step.init(r, params))(target().params)


RUN = {
    "target": "t",
    "mask_token_id": 3,
    "max_prompt_tokens": 9,
    "max_new_tokens": 15,
    "answer_batch": 4,
    "sequence_length": WIDTH,
    "heldout": 1,
    "features": "memory",
    "feature_batch": 2,
    "head_layers": 1,
    "tap_layers": (0, 1),
    "block_size": 4,
    "anchors": 4,
    "steps": 2,
    "batch": 2,
    "peak_lr": 1e-2,
    "log_every": 1,
    "eval_every": 1,
    "eval_budgets": (2, 4),
    "eval_width": 2,
    "loss_chunk": 64,
}  # settings of a whole run in seconds


EAGLE_RUN = {k: v for k, v in RUN.items() if k not in ("mask_token_id", "block_size")} | {
    "family": "eagle3",
    "draft_vocab": 32,
    "unroll": 3,
}


def questions(folder: pathlib.Path) -> pathlib.Path:
    """Writes a dozen prompts to learn from."""
    path = folder / "rows.jsonl"
    texts = ["ab", "cde", "f", "gh", "ijk", "l", "mn", "op", "q", "rst", "u", "v"]
    path.write_text("".join(json.dumps({"id": f"s/{i}", "prompt": t}) + "\n" for i, t in enumerate(texts)))
    return path


DSPARK_RUN = RUN | {
    "family": "dspark",
    "markov_rank": 6,
    "forward_kl": 0.0,
    "cross_entropy": 0.1,
    "total_variation": 0.9,
}
