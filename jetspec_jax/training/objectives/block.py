"""Training of the block heads (JetSpec, DFlash): blocks at drawn anchors, over the features before each.

At inference a block reads a cached context of one length; here every anchor of a sequence is a block with a context of
its own, through the layers that decode. Context keys and values are projected once a sequence. Two ways to attend give
the same numbers: "xla" joins two partial attentions, over the context before the anchor and over the block itself, so
that no mask of all blocks against all blocks is made; "cudnn" makes that mask and lets a fused kernel keep no score.
Where blocks look back at a window, each takes the keys of its own one, so that what a block costs does not grow with
the sequence, and "xla" is the way.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, Literal, NamedTuple, TypeVar

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jetspec_jax.config import ConfigError, HeadConfig, ModelConfig, default_taps
from jetspec_jax.drafts import block as block_draft
from jetspec_jax.drafts import counts, scorer
from jetspec_jax.drafts.block import Head
from jetspec_jax.layers import masks
from jetspec_jax.layers.attention import MASKED
from jetspec_jax.layers.cache import KV
from jetspec_jax.layers.numerics import einsum
from jetspec_jax.training import anchors as anchor_rules
from jetspec_jax.training import flops, initial, settings, teacher
from jetspec_jax.training.anchors import Anchors
from jetspec_jax.training.data.batches import Batch
from jetspec_jax.training.data.packing import Packed
from jetspec_jax.training.losses import Logits, Term
from jetspec_jax.training.objective import Questions
from jetspec_jax.training.recipe import Recipe
from jetspec_jax.training.settings import Settings
from jetspec_jax.training.teacher import Features

FOREIGN = "unroll", "unroll_decay", "draft_vocab", "markov_rank", "markov_head", "confidence"
Kind = TypeVar("Kind", bound=HeadConfig)


class Blocks(NamedTuple):
    """What the forward reads beside the features."""

    anchors: Anchors
    embedded: Float[Array, "B A T E"]  # of [anchor, MASK, ...]
    before: Int[Array, "B A D"] | None = None  # the text's token before each label, where there is a scorer


def configure(config: Settings, target: ModelConfig) -> HeadConfig:
    """Returns the head with every size that is no setting from the target.

    Raises:
      ConfigError: a tap or the mask does not fit this target, or the family is of the other mask.
    """
    if config.family and config.causal != (config.family == "jetspec"):
        raise settings.wrong("causal", str(config.causal).lower(), f"a {config.family} head is the other way round")
    settings.refuse_foreign(config, FOREIGN)
    return sized(HeadConfig, config, target, causal=config.causal, **scored(config))


def scored(config: Settings) -> dict[str, Any]:
    """Returns kind and sizes of the scorer beside the head; {} where there is none.

    Raises:
      ConfigError: a key of a scorer that there is not, or one that its kind has no use for.
    """
    given = [n for n in settings.SCORER if getattr(config, n) != Settings.__dataclass_fields__[n].default]
    if not config.scorer_rank:
        if given:
            raise settings.wrong(given[0], getattr(config, given[0]), "there is no scorer; give scorer_rank")
        return {}
    width = config.scorer_width
    kind = config.scorer_kind or ("swiglu" if width else "product")
    if kind == "swiglu" and not width:
        raise settings.wrong("scorer_kind", kind, "it has a width; give scorer_width")
    if config.block_size < 3:
        raise settings.wrong("scorer_rank", config.scorer_rank, f"block_size={config.block_size} has no pair of slots")
    if config.scorer_parents == "drafted" and config.cross_entropy:
        why = "cross_entropy would teach the text's token after another one; give the loss another share"
        raise settings.wrong("scorer_parents", "drafted", why)
    uses = {"swiglu": {"scorer_width", "scorer_parents"}, "counts": {"scorer_strength"}}
    for name in given:
        if name not in uses.get(kind, {"scorer_parents"}) | {"scorer_kind"}:
            why = f"a scorer of kind {kind} has no use for it; leave it out"
            raise settings.wrong(name, getattr(config, name), why)
    return {"scorer_kind": kind, "scorer_rank": config.scorer_rank, "scorer_width": width}


def sized(kind: type[Kind], config: Settings, target: ModelConfig, **own: Any) -> Kind:
    """Returns a configuration of this kind; own: the fields that no other kind has, and its mask.

    Raises:
      ConfigError: a tap or the mask does not fit this target.
    """
    rows = target.vocab_size
    if config.mask_token_id >= rows:
        why = f"the target has the embedding rows 0..{rows - 1}"
        raise settings.wrong("mask_token_id", config.mask_token_id, why)
    try:
        return kind(
            vocab_size=rows,
            hidden_size=target.hidden_size,
            num_layers=config.head_layers,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            intermediate_size=target.intermediate_size,
            norm_eps=target.norm_eps,
            rope_theta=target.rope_theta,
            rope_scaling=target.rope_scaling,
            max_positions=target.max_positions,
            num_target_layers=target.num_layers,
            block_size=config.block_size,
            mask_token_id=config.mask_token_id,
            tap_layers=config.tap_layers or default_taps(target.num_layers, config.taps),
            dtype="bfloat16",
            **own,
        )
    except ConfigError as error:
        key = "tap_layers" if config.tap_layers else "taps"
        raise settings.wrong(key, config.tap_layers or config.taps, f"does not fit the target ({error})") from None


def check_start(config: HeadConfig, found: HeadConfig) -> tuple[str, Any, Any] | None:
    """Returns the first size in which the head to go on from differs from this run's."""
    if not found.scorer_rank:  # a new one begins beside it
        new = {name: getattr(config, name) for name in ("scorer_kind", "scorer_rank", "scorer_width")}
        found = dataclasses.replace(found, **new)
    return initial.differing(config, found, "num_anchors")


def decide(config: HeadConfig, packed: Packed) -> dict:
    """Returns a scorer of counts, in full strength, where that is its kind; all other parameters are trained."""
    if config.scorer_kind != "counts":
        return {}
    here = packed.paired
    return {"scorer": counts.count(packed.tokens[:, :-1][here], packed.tokens[:, 1:][here], config, 1.0)}


def init(config: HeadConfig, key: jax.Array, target_params: dict, decided: dict) -> dict:
    """Returns matrices from N(0, 0.02) and norms of one; the last norm is a share of the target's."""
    _, shapes = block_draft.build(config, jnp.float32)
    start = initial.draw(shapes, key) | initial.norm(target_params)
    if config.scorer_rank:
        start["scorer"] |= {name: jnp.zeros_like(x) for name, x in start["scorer"].items() if name in scorer.ZEROS}
    return start


def fold(params: dict, scale: Float[Array, " F"], dtype) -> dict:
    """Returns the parameters of the head that reads unscaled features, in `dtype`."""
    folded = params | {"fc": params["fc"] / scale[:, None]}
    return jax.tree.map(lambda x: x.astype(dtype), folded)


def unfold(folded: dict, scale: Float[Array, " F"]) -> dict:
    """Returns f32 parameters in the coordinates of scaled features, from those of a finished head."""
    wide = jax.tree.map(lambda x: x.astype(jnp.float32), folded)
    return wide | {"fc": wide["fc"] * scale[:, None]}


def draw(recipe: Recipe, target_params: dict, part: Batch, keys: Key[Array, " B"]) -> Questions:
    """Returns blocks at `recipe.anchors` places a sequence, drawn without replacement."""
    candidate = anchor_rules.candidates(part.learnt, part.document)
    return blocks(recipe, target_params, part, anchor_rules.sample(keys, candidate, recipe.anchors), recipe.gamma)


def ask(
    recipe: Recipe, target_params: dict, part: Batch, place: Int[Array, "B A"], valid: Bool[Array, "B A"]
) -> Questions:
    """Returns blocks at these places; every label that exists weighs 1."""
    return blocks(recipe, target_params, part, Anchors(place, valid), 0.0)


def blocks(recipe: Recipe, target_params, part: Batch, anchors: Anchors, gamma: float) -> Questions:
    """Returns the blocks at these anchors, with the slots that their head drafts and what these weigh."""
    depth = recipe.head.depth
    tokens = jnp.take_along_axis(part.tokens, anchors.position, 1)[..., None]
    label = anchor_rules.labels(anchors, part.tokens.shape[1], depth)
    given = before(part, label) if recipe.head.scorer_rank else None  # `siblings` puts drafted ones among them
    if given is not None and recipe.scorer_parents == "others":
        given = jnp.roll(given, 1, axis=1)  # of the block before: tokens of the same kind that say nothing
    added = ((0, 0), (0, 0), (0, recipe.head.block_size - 1))
    block = jnp.pad(tokens, added, constant_values=recipe.head.mask_token_id)
    return Questions(
        Blocks(anchors, recipe.target.embed(target_params, block), given),
        label,
        anchor_rules.weights(anchors, part.learnt, part.document, depth, gamma),
    )


def before(part: Batch, label: Int[Array, "B A D"]) -> Int[Array, "B A D"]:
    """Returns the text's token before each label."""
    flat = label.reshape(len(part.tokens), -1) - 1
    return jnp.take_along_axis(part.tokens, flat, 1).reshape(label.shape)


def hidden(recipe: Recipe, folded: dict, part: Batch, features: Features, asked: Questions) -> Float[Array, "B A D E"]:
    """Returns hidden states of the drafted slots, with the parameters of the finished head."""
    graphdef = block_draft.build(recipe.head, recipe.dtype)[0].graphdef
    head = nnx.merge(graphdef, nnx.State({k: v for k, v in folded.items() if k != "scorer"}))
    anchors, block, _ = asked.inputs
    return forward(
        head, block, anchors, features.taps, part.document, part.position,
        attention=recipe.attention, remat=recipe.remat, window=recipe.window,
    )[:, :, 1:]  # fmt: skip


def logits(
    recipe: Recipe, target_params: dict, folded: dict, hidden: Float[Array, "B A D E"], asked: Questions
) -> Logits:
    """Returns the products with the target's lm_head, and those of the scorer's parents with all children."""
    own = Term(hidden, teacher.unembedding(target_params))
    if not recipe.head.scorer_rank:
        return Logits((own,))
    embed = lambda tokens: scorer.normed(recipe.target.embed(target_params, tokens))
    before, every = asked.inputs.before, jnp.arange(recipe.head.vocab_size)
    rows = scorer.parents(folded["scorer"], hidden, before, embed(before))
    below = jnp.arange(rows.shape[2])[:, None] > 0  # the root adds nothing
    children = scorer.children(folded["scorer"], every, embed(every))
    return Logits((own, Term(jnp.where(below, rows, 0), children, trained=True)))


def confidence(
    recipe: Recipe, folded: dict, hidden: Float[Array, "B A D E"], asked: Questions
) -> Float[Array, "B A D"] | None:
    """Returns None: the head says nothing of the kind."""
    return None


def by_path(config: HeadConfig) -> bool:
    """Returns whether nodes tell on their children; without a scorer all nodes of a depth share the row of a slot."""
    return config.scorer_rank > 0


def work(recipe: Recipe, sequences: int, length: int) -> dict[str, float]:
    """Returns operations of the head, counted as `flops` says, and the slots that meet lm_head."""
    head, tokens = recipe.head, sequences * length
    rows = sequences * min(recipe.anchors, length) * head.block_size
    fuse = 2 * tokens * len(head.tap_layers) * head.hidden_size * head.hidden_size
    context = head.num_layers * 2 * head.hidden_size * head.num_kv_heads * head.head_dim
    context_rows = min(length / 2, recipe.window) if recipe.window else length / 2
    seen = 4 * rows * (context_rows + head.block_size) * head.num_heads * head.head_dim * head.num_layers
    once = 2 * rows * flops.row_parameters(head) + fuse + 2 * tokens * context + seen
    scored = 3 * 2.0 * head.vocab_size * head.scorer_rank  # its product with all children, and the two of its gradient
    return {
        "head_forward": float(once),
        "head_backward": 0.0 if recipe.frozen_head else float(2 * once - fuse),
        "slots": float(rows // head.block_size * head.depth),
        "table": 2 * 2.0 * head.vocab_size * head.hidden_size + scored,
    }


def describe(recipe: Recipe) -> dict[str, str]:
    """Returns the block of a head and how its slots weigh, for its model card."""
    c: HeadConfig = recipe.head
    mask = "causal" if c.causal else "bidirectional"
    block = f"{c.block_size} slots, {mask}, mask token {c.mask_token_id}"
    said = {"block": block, "depth weight in training": f"gamma {recipe.gamma:g}"}
    alone = ", trained beside a head that stayed as it was" if recipe.frozen_head else ""
    inner = f", SwiGLU of width {c.scorer_width}" if c.scorer_width else f", {c.scorer}"
    others = {"drafted": ", by drafted tokens too", "others": ", taught by tokens of other places (a control)"}
    other = others.get(recipe.scorer_parents, "")
    return said | ({"scorer": f"rank {c.scorer_rank}{inner}{alone}{other}"} if c.scorer_rank else {})


def forward(  # noqa: PLR0913  # arrays of one forward pass
    head: Head,
    block: Float[Array, "B A T E"],
    anchors: Anchors,
    features: Float[Array, "B S F"],
    document: Int[Array, "B S"],
    position: Int[Array, "B S"],
    attention: str = "xla",
    remat: bool = False,
    window: int = 0,
) -> Float[Array, "B A T E"]:
    """Returns hidden states of every slot of every block, for the target's lm_head.

    block: embeddings of [anchor, MASK, ...], T = block size. features: tapped target features of the sequence; what
    lies at or after an anchor, in another document, or farther back than the window, is not read by its block. remat:
    keep only what enters a layer. window: 0 is all.
    """
    c = head.config
    batch, count, slots, embed = block.shape
    window = window if window < features.shape[1] else 0
    seen = anchor_rules.seen(anchors, document, window)
    # What no block sees (padding) may be NaN, which a weight of zero would keep out of no sum and of no gradient.
    features = jnp.where(seen.any(1)[..., None], features, 0)
    context = head.context_kv(head.context(features), position)
    own = (masks.causal(slots) if c.causal else jnp.ones((1, slots, slots), bool))[0]
    start = jnp.take_along_axis(position, anchors.position, 1)
    angles = head.angles((start[..., None] + jnp.arange(slots)).reshape(batch, -1))

    # The f32 scores of a layer are larger than everything else that a step keeps, so they are always made again.
    joined = functools.partial(_attend_windows, anchors.position, window) if window else _attend
    attend = _fused if attention == "cudnn" and not window else joined if remat else jax.checkpoint(joined)

    def over_context(i, q, fresh):
        return attend(q, fresh, context[i], seen, own), None

    x = block.reshape(batch, count * slots, embed)
    return head.run(x, angles, over_context, remat=remat).hidden.reshape(block.shape)


def _attend_windows(
    position: Int[Array, "B A"],
    window: int,
    q: Float[Array, "B R N H"],
    block: KV,
    context: KV,
    seen: Bool[Array, "B A S"],
    own: Bool[Array, "T T"],
) -> Float[Array, "B R N H"]:
    """The rows of each block over the `window` rows of context before its anchor, and over the block itself."""

    def cut(rows: Float[Array, "S K H"], places: Int[Array, " A"]):
        padded = jnp.pad(rows, ((window, 0), (0, 0), (0, 0)))  # what would lie before the first row is nobody's
        return jax.vmap(lambda at: jax.lax.dynamic_slice_in_dim(padded, at, window))(places)

    def keys(x: Float[Array, "B K S H"]):
        wide = x.swapaxes(1, 2).astype(jnp.float32)  # a row's gradient is a sum over all blocks that see it
        return jax.vmap(cut)(wide, position).swapaxes(2, 3).astype(x.dtype)  # [B, A, K, window, H]

    index = position[..., None] - window + jnp.arange(window)
    near = jnp.take_along_axis(seen, jnp.maximum(index, 0), 2) & (index >= 0)
    return _attend(q, block, (keys(context[0]), keys(context[1])), near, own, "baksh")


def _attend(
    q: Float[Array, "B R N H"],
    block: KV,
    context: tuple[jax.Array, jax.Array],
    seen: Bool[Array, "B A S"],
    own: Bool[Array, "T T"],
    axes: Literal["bksh", "baksh"] = "bksh",
) -> Float[Array, "B R N H"]:
    """R = A * T block rows over their context and their own block; softmax over both in f32.

    axes: of the context's keys and values; with "a", each block has its own.
    """
    batch, rows, heads, dim = q.shape
    kv_heads, count, slots = block[0].shape[1], seen.shape[1], own.shape[0]
    q = q.reshape(batch, count, slots, kv_heads, heads // kv_heads, dim).transpose(0, 3, 4, 1, 2, 5)
    k, v = (x.reshape(batch, kv_heads, count, slots, dim) for x in block)
    scale = 1 / math.sqrt(dim)
    before = einsum(f"bkgath,{axes}->bkgats", q, context[0], jnp.float32) * scale
    before = jnp.where(seen[:, None, None, :, None], before, MASKED)
    within = jnp.where(own, einsum("bkgath,bkarh->bkgatr", q, k, jnp.float32) * scale, MASKED)

    # A slot always sees itself, so the peak is a real score and no row is empty.
    peak = jax.lax.stop_gradient(jnp.maximum(before.max(-1), within.max(-1)))[..., None]
    before, within = jnp.exp(before - peak), jnp.exp(within - peak)
    total = before.sum(-1) + within.sum(-1)
    value = einsum(f"bkgats,{axes}->bkgath", before.astype(v.dtype), context[1], jnp.float32)
    value = value + einsum("bkgatr,bkarh->bkgath", within.astype(v.dtype), v, jnp.float32)
    out = (value / total[..., None]).astype(v.dtype)
    return out.transpose(0, 3, 4, 1, 2, 5).reshape(batch, rows, heads, dim)


def _fused(
    q: Float[Array, "B R N H"],
    block: KV,
    context: KV,
    seen: Bool[Array, "B A S"],
    own: Bool[Array, "T T"],
    implementation: Literal["cudnn", "xla"] = "cudnn",
) -> Float[Array, "B R N H"]:
    """The same over one list of keys: the context, then all blocks."""
    slots, count = own.shape[0], seen.shape[1]
    block_of = jnp.arange(count * slots) // slots
    blocks = (block_of[:, None] == block_of) & jnp.tile(own, (count, count))
    mask = jnp.concatenate([seen.repeat(slots, 1), jnp.broadcast_to(blocks, (seen.shape[0], *blocks.shape))], axis=-1)
    k, v = (jnp.concatenate([c, b], axis=2) for c, b in zip(context, block, strict=True))
    return teacher.fused(q, k, v, mask, implementation=implementation)
