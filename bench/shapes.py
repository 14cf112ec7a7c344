"""Pairs of published shapes with random weights, and states at a given length, for benchmarks without checkpoints."""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jetspec_jax.backends.choose import resolve
from jetspec_jax.config import HeadConfig, ModelConfig, MoEConfig
from jetspec_jax.drafts import block, block_files
from jetspec_jax.drafts.block import HeadState
from jetspec_jax.engine.programs import program
from jetspec_jax.fields import Option
from jetspec_jax.files import demo, text
from jetspec_jax.files import mesh as on_mesh
from jetspec_jax.files.checkpoint import numpy_dtype
from jetspec_jax.loop import decoder
from jetspec_jax.loop.processors import Sampling
from jetspec_jax.loop.state import RUNNING, Request, State
from jetspec_jax.models import qwen3, sharding

QWEN = {"norm_eps": 1e-6, "rope_theta": 1e6, "max_positions": 40960, "vocab_size": 151936, "head_dim": 128}


def _qwen3(hidden: int, layers: int, heads: int, ffn: int, tied: bool, **more) -> ModelConfig:
    return ModelConfig(
        model_type="qwen3_moe" if "moe" in more else "qwen3", hidden_size=hidden, num_layers=layers, num_heads=heads,
        intermediate_size=ffn, tie_embeddings=tied, qk_norm=True, **{"num_kv_heads": 8} | QWEN | more,
    )  # fmt: skip


def _head(target: ModelConfig, layers: int, taps: tuple[int, ...], mask: int, **more) -> HeadConfig:
    same = ("vocab_size", "hidden_size", "norm_eps", "rope_theta", "max_positions", "head_dim", "num_heads",
            "num_kv_heads", "intermediate_size")  # fmt: skip
    return HeadConfig(
        **{name: getattr(target, name) for name in same} | more,
        num_layers=layers, num_target_layers=target.num_layers, block_size=16, mask_token_id=mask, tap_layers=taps,
        causal=True,
    )  # fmt: skip


_8B = _qwen3(4096, 36, 32, 12288, False)
_0_6B = _qwen3(1024, 28, 16, 3072, True)
_30B = _qwen3(2048, 48, 32, 6144, False, num_kv_heads=4, moe=MoEConfig(128, 8, 768, True, tuple(range(48))))
_30B_6 = dataclasses.replace(_30B, num_layers=6, moe=dataclasses.replace(_30B.moe, sparse_layers=tuple(range(6))))
_32B = _qwen3(5120, 64, 64, 25600, False)
_135M = ModelConfig(
    model_type="llama", vocab_size=49152, hidden_size=576, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    intermediate_size=1536, norm_eps=1e-5, rope_theta=1e5, max_positions=8192, tie_embeddings=True, qk_norm=False,
)  # fmt: skip
_SMALL = {"num_kv_heads": 2, "head_dim": 16, "vocab_size": 512}
_TINY = _qwen3(64, 2, 4, 128, False, **_SMALL)
_TINY_MOE = _qwen3(64, 2, 4, 128, False, **_SMALL, moe=MoEConfig(8, 2, 64, True, (1,)))
PAIRS = {
    "qwen3-8b": (_8B, _head(_8B, 5, (1, 9, 17, 25, 33), 151669)),
    "qwen3-0.6b": (_0_6B, _head(_0_6B, 5, (1, 7, 13, 19, 25), 151669)),
    "qwen3-30b-a3b": (_30B, _head(_30B, 8, (1, 12, 23, 34, 45), 151669)),
    "qwen3-30b-a3b-6": (_30B_6, _head(_30B_6, 2, (0, 1, 2, 3, 4), 151669)),
    "qwen3-32b": (_32B, _head(_32B, 5, (1, 16, 31, 46, 61), 151669)),
    "smollm2-135m": (_135M, block_files.config(text.read_json(demo.head_folder() / "config.json"), "demo head")),
    "tiny": (_TINY, _head(_TINY, 1, (0, 1), 511)),
    "tiny-moe": (_TINY_MOE, _head(_TINY_MOE, 1, (0, 1), 511)),
}  # smollm2-135m is the demo pair; six layers for what depth does not change; the tiny ones are smoke runs for a CPU

SHAPE = Option("shape", "choice", "Shape of target and head.", "qwen3-8b", choices=tuple(PAIRS))
DTYPE = Option("dtype", "choice", "Dtype of the weights.", "bfloat16", choices=("bfloat16", "float32"))


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target and a head with random weights on the device."""

    target: qwen3.Qwen3Target
    draft: block.BlockDraft
    params: dict

    @property
    def plain(self) -> dict:
        return {"target": self.params["target"], "draft": None}


def random_pair(
    name: str,
    dtype: str = "bfloat16",
    attention: str = "auto",
    scorer: tuple[int, int] = (0, 0),
    mesh: Mesh | None = None,
) -> Pair:
    """A pair with every weight random; on a mesh as `load_target` and `load_head` would put it there.

    scorer: rank and width of the one beside its head.
    """
    config, head = PAIRS[name]
    head = dataclasses.replace(head, scorer_rank=scorer[0], scorer_width=scorer[1])
    how = resolve(attention, dtype, config.head_dim)
    how = how if mesh is None else on_mesh.backend(how, mesh, config)
    target, shapes = qwen3.build(config, numpy_dtype(dtype), how)
    draft, head_shapes = block.build(head, numpy_dtype(dtype), backend=how)
    shapes, lies = {"target": shapes, "draft": head_shapes}, None
    if mesh is not None:
        drafting = sharding.drafting(head_shapes, mesh, head)
        lies = {"target": sharding.decoding(shapes["target"], mesh, config), "draft": drafting}
    return Pair(target, draft, drawn(shapes, lies))


def drawn(shapes, lies=None):
    """Arrays of these shapes, drawn where they lie, one at a time: normal with the gain of a trained network."""
    leaves, structure = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    places = [None] * len(leaves) if lies is None else jax.tree.leaves(lies)
    arrays = []
    for key, x, where in zip(keys, leaves, places, strict=True):
        draw = _draw if where is None else jax.jit(_draw, static_argnums=(1, 2), out_shardings=where)
        arrays.append(draw(key, x.shape, x.dtype))
    return jax.block_until_ready(jax.tree.unflatten(structure, arrays))


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(key, shape, dtype):
    values = jax.random.normal(key, shape, jnp.float32 if len(shape) == 1 else dtype)
    return (1 + 0.1 * values).astype(dtype) if len(shape) == 1 else 0.02 * values


def state_at(static: decoder.Decoder, params: dict, length: int, batch: int, budget: int) -> State:
    """A state that has committed `length` tokens. Caches hold random numbers, so that drafts and choices vary; the
    committed tokens are ones and zeros, since a round reads none of them but the last."""
    row = lambda value, dtype=jnp.int32: jnp.full((batch,), value, dtype)
    asked = Request(
        tokens=jnp.ones((batch, 16), jnp.int32), prompt_length=row(16), limit=row(static.capacity), budget=row(budget),
        sampling=Sampling(None, row(0, jnp.uint32)), eos=jnp.full((batch, 8), -1, jnp.int32),
    )  # fmt: skip
    state = program(decoder.prefill, static, params, asked).run(params, asked)
    state = state._replace(cache=_noise(state.cache))
    if isinstance(state.draft, HeadState):
        state = state._replace(draft=state.draft._replace(context=_noise(state.draft.context)))
    return at_length(state, length)


def _noise(tree):
    """Random numbers that lie as the arrays of a tree do."""
    draw = lambda tree: jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape, x.dtype), tree)
    return jax.jit(draw, out_shardings=jax.tree.map(lambda x: x.sharding, tree))(tree)


def at_length(state: State, length: int) -> State:
    """The same state, all rows running at `length` committed tokens, no rounds on record."""
    full = lambda x, value: jnp.full_like(x, value)
    draft = state.draft
    if isinstance(draft, HeadState):
        draft = draft._replace(length=full(draft.length, length - 2), count=full(draft.count, 1))
    return state._replace(
        length=full(state.length, length), reason=full(state.reason, RUNNING), rounds=full(state.rounds, 0),
        draft=draft,
    )  # fmt: skip
