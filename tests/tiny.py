"""Small things to decode with: random targets and heads, stub targets and drafts that know the answer, and requests.

The stub target is integer arithmetic: its logits are a row of a table, chosen by a hash of every token that a position
may see (prefix and ancestors) and of where it stands. One wrong mask entry, position or cache row changes the output,
and no rounding can blur the comparison.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.backends.xla import PLAIN_XLA, XLA
from jetspec_jax.config import HeadConfig, ModelConfig, MoEConfig
from jetspec_jax.drafts import block as blocks
from jetspec_jax.drafts import counts, dspark_files, eagle3_files, scorer
from jetspec_jax.drafts import dspark as dsparks
from jetspec_jax.drafts import eagle3 as eagles
from jetspec_jax.engine.geometry import Geometry
from jetspec_jax.files import checkpoint, pair
from jetspec_jax.files.pair import LoadedTarget
from jetspec_jax.layers import cache as kv_cache
from jetspec_jax.layers import masks, vocabulary
from jetspec_jax.loop import decoder
from jetspec_jax.loop.contracts import Ends, Output, Seen
from jetspec_jax.loop.plain import PLAIN
from jetspec_jax.loop.processors import Sampling
from jetspec_jax.loop.state import Request, State
from jetspec_jax.loop.tree import Rule
from jetspec_jax.models import names as published
from jetspec_jax.models import qwen3
from jetspec_jax.options import SHARPNESS

VOCAB = 37
MANY = np.int32(10_000)  # rounds
TARGETS = ("dense", "moe", "llama")
TAPS = (1, 0)  # not in layer order, and the last layer among them


def model_config(kind: str, **changes) -> ModelConfig:
    """Two layers; the first of `moe` is dense, `llama` ties its embedding."""
    moe = MoEConfig(4, 2, 12, True, (1,)) if kind == "moe" else None
    values = {
        "model_type": {"dense": "qwen3", "moe": "qwen3_moe", "llama": "llama"}[kind],
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 4,
        "num_kv_heads": 2,
        "head_dim": 8,
        "intermediate_size": 24,
        "norm_eps": 1e-6,
        "rope_theta": 1e4,
        "max_positions": 512,
        "tie_embeddings": kind == "llama",
        "qk_norm": kind != "llama",
        "moe": moe,
    }
    return ModelConfig(**values | changes)


def head_config(causal: bool, block: int = 5, **changes) -> HeadConfig:
    """Two layers over the taps of a tiny target; other heads and another RoPE base than the target's."""
    values = {
        "vocab_size": VOCAB,
        "hidden_size": 16,
        "num_layers": 2,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 6,
        "intermediate_size": 20,
        "norm_eps": 1e-6,
        "rope_theta": 1e3,
        "max_positions": 512,
        "num_target_layers": 2,
        "block_size": block,
        "mask_token_id": VOCAB - 1,
        "tap_layers": TAPS,
        "causal": causal,
    }
    return HeadConfig(**values | changes)


def _inputs(shape) -> int:
    """The axis that a product sums over: the first, after the experts' of [X, E, 2, F] and [X, F, E]."""
    experts = (len(shape) == 3 and shape[1] != 2) or (len(shape) == 4 and shape[2] == 2)
    return shape[1] if experts else shape[0]


def random_params(shapes, seed: int = 0, scale: float = 0.02):
    """Normal parameters in the dtypes of the shapes: matrices N(0, scale), norms 1 + N(0, scale)."""
    rng = np.random.default_rng(seed)
    draw = lambda x: jax.device_put((rng.normal(size=x.shape) * scale + (len(x.shape) == 1)).astype(x.dtype))
    return jax.tree.map(draw, shapes)


def random_like(shapes, seed: int):
    """Random values in the given shapes: norms about 1, everything else of unit gain."""
    leaves, structure = jax.tree.flatten(shapes)
    draw = np.random.default_rng(seed)

    def fill(leaf):
        values = draw.standard_normal(leaf.shape)
        values = 1 + 0.2 * values if leaf.ndim == 1 else 1.5 * values / np.sqrt(_inputs(leaf.shape))
        return jnp.asarray(values, leaf.dtype)

    return jax.tree.unflatten(structure, [fill(leaf) for leaf in leaves])


@functools.lru_cache(None)
def target(kind: str, seed: int = 2) -> Loaded:
    """A random target as `speculate` expects it."""
    config = model_config(kind)
    model, shapes = qwen3.build(config, jnp.float32)
    params = random_like(shapes, seed)
    params["embedding"] = params["embedding"] * (2.0 if kind == "llama" else 4.0)  # else the output is one token
    return Loaded(model, params, config, jnp.dtype("float32"))


def save_target(folder, config: ModelConfig, raw_config: dict, params, **shards) -> None:
    """Writes a target in the published layout under its own `config.json`; the package itself writes heads alone."""
    tensors = checkpoint.disassemble(published.of_target(config), params)
    checkpoint.save(pathlib.Path(folder), tensors, {"config.json": raw_config}, **shards)


@functools.lru_cache(None)
def head(causal: bool, seed: int = 1, block: int = 5) -> LoadedHead:
    """A random head for the tiny targets."""
    config = head_config(causal, block)
    draft, shapes = blocks.build(config, jnp.float32)
    return LoadedHead(draft, random_like(shapes, seed), config)


@functools.lru_cache(None)
def scored(causal: bool = True, child: float = 1.0, inner: int = 0, rank: int = 6, kind: str = "") -> LoadedHead:
    """The head with a random scorer; child: how much its children's matrix says, 0 of a new one."""
    bare = head(causal)
    config = dataclasses.replace(bare.config, scorer_rank=rank, scorer_width=inner, scorer_kind=kind)
    if kind == "counts":
        text = np.random.default_rng(3).integers(0, VOCAB, 4_000)
        params = jax.tree.map(jnp.asarray, counts.count(text[:-1], text[1:], config, 3.0))
        params["strength"] = jnp.linspace(3.0, 1.0, config.depth)
    else:
        params = random_like(scorer.shapes(config, jnp.float32), 3)
        params |= {name: child * x for name, x in params.items() if name in ("child", "w2")}
    draft = dataclasses.replace(bare.draft, config=config)
    return dataclasses.replace(bare, draft=draft, params=bare.params | {"scorer": params})


@functools.lru_cache(None)
def dspark(markov: str = "vanilla", seed: int = 1, block: int = 4, **changes) -> LoadedHead:
    """A random DSpark head for the tiny targets, whose tokens depend as much on the token before as on the block."""
    shape = dataclasses.asdict(head_config(False, block)) | {"rope_scaling": None}
    usual = {"markov_rank": 6, "markov": markov, "confidence": True, "confidence_markov": True}
    config = dspark_files.DSparkConfig(**shape | usual | changes)
    draft, shapes = dsparks.build(config, jnp.float32)
    params = random_like(shapes, seed)
    if config.markov_rank:
        stretch = lambda name, x: x - 1 if "bias" in name else 3 * x
        params["markov"] = {name: stretch(name, x) for name, x in params["markov"].items()}
        if markov == "rnn":  # the slot speaks last and would drown what is remembered
            params["markov"]["joint"] = params["markov"]["joint"].at[-config.hidden_size :].divide(6)
    return dataclasses.replace(LoadedHead(draft, params, config), family="dspark")


@functools.lru_cache(None)
def eagle3(seed: int = 1, draft_vocab: int = 29, depth: int = 4) -> LoadedHead:
    """A random EAGLE-3 head for the tiny targets, which drafts every token but some."""
    config = eagle3_files.Eagle3Config(
        vocab_size=VOCAB, draft_vocab_size=draft_vocab, hidden_size=16, num_heads=6, num_kv_heads=2, head_dim=6,
        intermediate_size=20, norm_eps=1e-6, rope_theta=1e3, max_positions=512, num_target_layers=2, tap_layers=TAPS,
        depth=depth,
    )  # fmt: skip
    draft, shapes = eagles.build(config, jnp.float32)
    params = random_like(shapes, seed)
    if config.reduced:
        ids = np.sort(np.random.default_rng(seed).permutation(VOCAB)[:draft_vocab])
        params["d2t"] = jnp.asarray(ids - np.arange(draft_vocab), jnp.int32)
    return dataclasses.replace(LoadedHead(draft, params, config), family="eagle3")


def Loaded(model, params, config, dtype="float32", tokenizer=None) -> LoadedTarget:
    """What `load_target` returns, of things made here."""
    return LoadedTarget(model, params, config, str(jnp.dtype(dtype)), (), "tiny", "", 0.0, lambda: tokenizer)


def LoadedHead(draft, params=None, config=None, source="tiny head", metadata=None) -> pair.LoadedHead:
    """What `load_head` returns, of things made here."""
    return pair.LoadedHead(draft, params or {}, config, source, metadata or {}, 0.0, "")


@dataclasses.dataclass(frozen=True)
class HashTarget:
    """Logits are `table[hash of all visible tokens and their positions]`; the cache holds tokens as keys and positions
    as values, so that its contents can be read."""

    vocab_size: int
    modulus: int = 97
    backend: XLA = PLAIN_XLA

    def params(self, seed: int, scale: float = 2.0):
        """Random table and position weights."""
        draw = np.random.default_rng(seed)
        table = scale * draw.standard_normal((self.modulus, self.vocab_size))
        return {
            "table": jnp.asarray(table, jnp.float32),
            "weight": jnp.asarray(draw.integers(1, self.modulus, 512), jnp.int32),
        }

    def init_cache(self, params, batch, capacity):
        return kv_cache.init(1, batch, 1, capacity, 1, jnp.int32)

    def forward(self, params, tokens, positions, mask, cache=None, length=None, taps=()):
        worth = lambda token, position: (token + 1) * params["weight"][position] % self.modulus
        seen = (mask * worth(tokens, positions)[:, None, :]).sum(-1)
        if cache is not None:
            keys, values = (x[:, 0, :, 0] for x in cache[0])
            inside = jnp.arange(keys.shape[1]) < length[:, None]
            seen += (inside * worth(keys, values)).sum(-1, keepdims=True)
        fresh = tuple(x[:, None, :, None].astype(jnp.int32) for x in (tokens, positions))
        return Output(params["table"][seen % self.modulus], (fresh,), None)

    def embed(self, params, tokens):
        return params["table"][tokens]

    def logits(self, params, hidden):
        return hidden


def hash_target(vocab: int = VOCAB, seed: int = 0, scale: float = 2.0) -> Loaded:
    """The stub target as `speculate` expects it; only `max_positions` is read of a configuration."""
    model = HashTarget(vocab)
    return Loaded(model, model.params(seed, scale), model_config("dense", max_positions=256), jnp.dtype("float32"))


EIGHT = Rule(8)
NO_ENDS = Ends(None, None)  # for drafts that ask nothing of them


def seen(features, count, start=0, path=False) -> Seen:
    """Rows for a draft that reads no tokens; numbers hold for every row."""
    row = lambda value: jnp.broadcast_to(jnp.asarray(value, jnp.int32), features.shape[:1])
    return Seen(jnp.asarray(features), row(start), row(count), None, path)


@dataclasses.dataclass(frozen=True)
class TableDraft:
    """The same draft logits in every round, params {"logits": [D, V]}: good, bad, broken or adversarial."""

    depth: int
    taps: tuple[int, ...] = ()
    rule: Rule = EIGHT

    @property
    def nodes(self):
        return self.rule.nodes

    def shaped(self, rule, depth):
        return dataclasses.replace(self, rule=rule, depth=depth)

    def init(self, params, batch, capacity):
        return jnp.zeros((batch,))

    def extend(self, params, state, seen, ends):
        return state

    def propose(self, params, state, choice, budget, ends):
        table = params["logits"][: self.depth]
        return choice.tree(self.rule, jnp.broadcast_to(table, (budget.size, *table.shape)), budget), state


@dataclasses.dataclass(frozen=True)
class CoachedDraft:
    """Knows the plain continuation and puts its tokens at chosen ranks; keeps the state of a real head on the way.

    params: "plain" [B or 1, S] tokens at absolute positions; "rank" [R, D], read at row `length % R`: 0 is on the
    spine, r the r-th sibling, -1 withholds the right token; "coach" False leaves the logits to the real head.
    """

    depth: int
    vocab_size: int
    head: Any = None
    rule: Rule = EIGHT

    scored = True

    @property
    def nodes(self):
        return self.rule.nodes

    @property
    def taps(self):
        return self.head.taps if self.head else ()

    def room(self, state):
        return self.head.room(state)

    def wait(self, state, seen):
        return self.head.wait(state, seen)

    def absorb(self, params, state, tokens, ends):
        return self.head.absorb(params["head"], state, tokens, ends)

    def resized(self, state, rows):
        return self.head.resized(state, rows)

    def shaped(self, rule, depth):
        head = self.head.shaped(rule, depth) if self.head else None
        return dataclasses.replace(self, rule=rule, depth=depth, head=head)

    def init(self, params, batch, capacity):
        return self.head.init(params["head"], batch, capacity) if self.head else jnp.zeros((batch,))

    def extend(self, params, state, seen, ends):
        return self.head.extend(params["head"], state, seen, ends) if self.head else state

    def propose(self, params, state, choice, budget, ends):
        length = choice.past.length
        ahead = length[:, None] + jnp.arange(self.depth)
        plain = jnp.broadcast_to(params["plain"], (budget.size, params["plain"].shape[1]))
        right = jnp.take_along_axis(plain, jnp.minimum(ahead, plain.shape[1] - 1), 1)[..., None]
        rank = params["rank"][length % params["rank"].shape[0], : self.depth, None]
        behind = (jnp.arange(self.vocab_size) - right - 1) % self.vocab_size  # decoys in cyclic order
        own = jnp.where(rank < 0, -jnp.inf, 0.5 - rank)
        told = vocabulary.share(jnp.where(behind == self.vocab_size - 1, own, -behind))
        if self.head is not None:
            drafted, state = self.head.logits(params["head"], state, choice.anchor, length, ends)
            told = jnp.where(params["coach"], told, drafted)
        return choice.tree(self.rule, told, budget), state


def coached(plain, rank, head_params=None, coach: bool = True):
    """Params of a `CoachedDraft`."""
    rank = jnp.asarray(np.atleast_2d(np.asarray(rank, np.int32)))
    return {"plain": jnp.asarray(plain, jnp.int32), "rank": rank, "head": head_params, "coach": jnp.asarray(coach)}


prefill = jax.jit(decoder.prefill, static_argnums=0)
rounds = jax.jit(decoder.rounds, static_argnums=0)
step_recorded = jax.jit(decoder.step_recorded, static_argnums=0)


def request(prompts, new, budget=64, temperature=0.0, seed=0, eos=(), slots: int = 8, ends: int = 3) -> Request:
    """Right-padded arrays; numbers hold for every row, lists give one value a row. `eos`: ids for every row."""
    batch = len(prompts)
    row = lambda value, dtype: np.broadcast_to(np.asarray(value, dtype), (batch,))
    lengths = row([len(p) for p in prompts], np.int32)
    asked = Request(
        tokens=np.array([[*p, *[0] * (slots - len(p))] for p in prompts], np.int32),
        prompt_length=lengths,
        limit=lengths + row(new, np.int32),
        budget=row(budget, np.int32),
        sampling=Sampling(row(temperature, np.float32), row(seed, np.uint32)),
        eos=np.broadcast_to(np.array([*eos, *[-1] * (ends - len(eos))], np.int32), (batch, ends)),
    )
    return jax.tree.map(jnp.asarray, asked)


def geometry(options, prompt: int = 8) -> Geometry:
    """Sizes for one request of each of the options."""
    fitted = Geometry.fit([[0]] * len(options), options, PLAIN, 512)
    return dataclasses.replace(fitted, prompt=prompt)


def loop(
    model, draft, nodes, capacity, builder="best_first", width=64, sharpness=SHARPNESS, **static
) -> decoder.Decoder:
    """A decoder whose draft makes trees of this shape."""
    return decoder.Decoder(model, draft.shaped(Rule(nodes, builder, width, sharpness), draft.depth), capacity, **static)


def decode(static: decoder.Decoder, params, asked: Request) -> State:
    """To the end of every row; on the host, without the caches."""
    state = rounds(static, params, prefill(static, params, asked), MANY)
    return jax.device_get(state._replace(cache=(), draft=None))


def outputs(state: State) -> list[list[int]]:
    """New tokens of every row."""
    tokens, first, last = jax.device_get((state.tokens, state.prompt_length, state.length))
    return [row[a:b].tolist() for row, a, b in zip(tokens, first, last, strict=True)]


def plain(loaded: Loaded, asked: Request, capacity: int = 48) -> State:
    """Decoding with the target alone."""
    static = decoder.Decoder(loaded.model, PLAIN, capacity)
    return decode(static, {"target": loaded.params, "draft": None}, asked)


def path_logits(loaded: Loaded, tokens) -> jax.Array:
    """Logits [B, T, V] of one plain forward over whole sequences."""
    tokens = jnp.atleast_2d(jnp.asarray(tokens, jnp.int32))
    return _path_logits(loaded.model, loaded.params, tokens)


@functools.partial(jax.jit, static_argnums=0)
def _path_logits(model, params, tokens):
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    out = model.forward(params, tokens, positions, masks.causal(tokens.shape[1]))
    return model.logits(params, out.hidden)


def close(actual, wanted, tolerance: float = 1e-5) -> None:
    """max|difference| <= tolerance * max|value|."""
    actual, wanted = np.asarray(actual, np.float64), np.asarray(wanted, np.float64)
    assert actual.shape == wanted.shape
    worst = np.abs(actual - wanted).max(initial=0.0)
    assert worst <= tolerance * np.abs(wanted).max(initial=0.0), (worst, np.abs(wanted).max())
