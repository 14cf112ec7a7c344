"""Training of EAGLE-3 heads by training-time test (arXiv 2503.01840): it drafts after its own output, as in decoding.

The row before an anchor reads its features and the anchor's token, and drafts the token after that. At each further
step the layer's own output stands in for features: the row reads it with the next token of the text, one position on,
and attends to the rows of its document up to its own and to what it was at the steps before. That is the path of a tree
that follows the text, so what is trained is what `drafts.eagle3` decodes.

The keys of the first step are those of all rows and made once; only drawn rows go on. Attention to the two kinds of
keys is joined here, without a mask of all rows and steps against each other.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array, Bool, Float, Int, Key

from jetspec_jax.config import ConfigError, ModelConfig
from jetspec_jax.drafts import eagle3 as draft
from jetspec_jax.drafts import eagle3_files
from jetspec_jax.drafts.eagle3 import Eagle3
from jetspec_jax.drafts.eagle3_files import Eagle3Config
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

FOREIGN = (
    "block_size", "mask_token_id", "gamma", "window", "causal", "markov_rank", "markov_head", "confidence",
    "scorer_rank", *settings.SCORER, "frozen_head",
)  # fmt: skip


class Inputs(NamedTuple):
    """What the forward reads beside the features."""

    anchors: Anchors
    after: Float[Array, "B S E"]  # embeddings of the token after each row


def configure(config: Settings, target: ModelConfig) -> Eagle3Config:
    """Returns the head with every size that is no setting from the target.

    Raises:
      ConfigError: a tap or the drafted vocabulary does not fit this target, or a key is one of other families.
    """
    settings.refuse_foreign(config, FOREIGN)
    if config.head_layers != 1:
        settings.refuse_foreign(config, ("head_layers",))
    if config.draft_vocab > target.vocab_size:
        raise settings.wrong("draft_vocab", config.draft_vocab, f"the target has {target.vocab_size} tokens")
    if not config.tap_layers:
        settings.refuse_foreign(config, ("taps",))
    try:
        return Eagle3Config(
            vocab_size=target.vocab_size,
            draft_vocab_size=config.draft_vocab or target.vocab_size,
            hidden_size=target.hidden_size,
            num_heads=target.num_heads,
            num_kv_heads=target.num_kv_heads,
            head_dim=target.head_dim,
            intermediate_size=target.intermediate_size,
            norm_eps=target.norm_eps,
            rope_theta=target.rope_theta,
            rope_scaling=target.rope_scaling,
            max_positions=target.max_positions,
            num_target_layers=target.num_layers,
            tap_layers=config.tap_layers or eagle3_files.usual_taps(target.num_layers),
            dtype="bfloat16",
        )
    except ConfigError as error:
        why = f"does not fit the target ({error})"
        raise settings.wrong("tap_layers", config.tap_layers or "the published ones", why) from None


def check_start(config: Eagle3Config, found: Eagle3Config) -> tuple[str, Any, Any] | None:
    """Returns the first size in which the head to go on from differs from this run's."""
    return initial.differing(config, found, "depth")


def decide(config: Eagle3Config, packed: Packed) -> dict:
    """Returns the table of drafted tokens: the most frequent ones of what is learnt, the lower id before its equals."""
    if not config.reduced:
        return {}
    counts = np.bincount(packed.tokens[packed.learnt], minlength=config.vocab_size)
    ids = np.sort(np.argsort(-counts, kind="stable")[: config.draft_vocab_size])
    return {"d2t": (ids - np.arange(ids.size)).astype(np.int32)}


def init(config: Eagle3Config, key: jax.Array, target_params: dict, decided: dict) -> dict:
    """Returns matrices from N(0, 0.02), norms of one, and the target's final norm and rows of the drafted tokens."""
    _, shapes = draft.build(config, jnp.float32)
    start = initial.draw({name: shape for name, shape in shapes.items() if name not in ("d2t", "lm_head")}, key)
    table = teacher.unembedding(target_params).astype(jnp.float32)
    ids = tokens(config, decided)
    own = {"lm_head": table if ids is None else table[ids]}
    return start | initial.norm(target_params) | own | {k: jnp.asarray(v, jnp.int32) for k, v in decided.items()}


def tokens(config: Eagle3Config, params: dict) -> Int[Array, " U"] | None:
    """Returns the tokens that the head drafts; None for all."""
    return jnp.arange(config.draft_vocab_size) + jnp.asarray(params["d2t"]) if config.reduced else None


def fold(params: dict, scale: Float[Array, " F"], dtype) -> dict:
    """Returns the parameters of the head that reads unscaled features, in `dtype`; the table of tokens as it is."""
    folded = params | {"fc": params["fc"] / scale[:, None]}
    return jax.tree.map(lambda x: x.astype(dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x, folded)


def unfold(folded: dict, scale: Float[Array, " F"]) -> dict:
    """Returns f32 parameters in the coordinates of scaled features, from those of a finished head."""
    wide = fold(folded, jnp.ones(scale.shape), jnp.float32)
    return wide | {"fc": wide["fc"] * scale[:, None]}


def draw(recipe: Recipe, target_params: dict, part: Batch, keys: Key[Array, " B"]) -> Questions:
    """Returns `recipe.unroll` steps from `recipe.anchors` places a sequence, drawn without replacement."""
    candidate = anchor_rules.candidates(part.learnt, part.document) & (part.position > 0)
    anchors = anchor_rules.sample(keys, candidate, recipe.anchors)
    asked = _asked(recipe, target_params, part, anchors, recipe.unroll)
    return asked._replace(weight=asked.weight * recipe.unroll_decay ** jnp.arange(recipe.unroll))


def ask(
    recipe: Recipe, target_params: dict, part: Batch, place: Int[Array, "B A"], valid: Bool[Array, "B A"]
) -> Questions:
    """Returns as many steps as are decoded from these places; every label that exists weighs 1.

    There is none for the first token of a document, which has no row before it: in decoding the target makes one first.
    """
    later = jnp.take_along_axis(part.position, place, 1) > 0
    return _asked(recipe, target_params, part, Anchors(place, valid & later), recipe.head.depth)


def _asked(recipe: Recipe, target_params, part: Batch, anchors: Anchors, steps: int) -> Questions:
    after = jnp.pad(part.tokens[:, 1:], ((0, 0), (0, 1)))
    return Questions(
        Inputs(anchors, recipe.target.embed(target_params, after)),
        anchor_rules.labels(anchors, part.tokens.shape[1], steps),
        anchor_rules.weights(anchors, part.learnt, part.document, steps, 0.0),
    )


def hidden(recipe: Recipe, folded: dict, part: Batch, features: Features, asked: Questions) -> Float[Array, "B A D E"]:
    """Returns hidden states of the drafted tokens, with the parameters of the finished head."""
    graphdef = draft.build(recipe.head, recipe.dtype)[0].graphdef
    head = nnx.merge(graphdef, nnx.State(folded))
    anchors, after = asked.inputs
    where = part.document, part.position
    return forward(head, after, anchors, features.taps, *where, asked.weight > 0, recipe.remat)


def logits(
    recipe: Recipe, target_params: dict, folded: dict, hidden: Float[Array, "B A D E"], asked: Questions
) -> Logits:
    """Returns the products with the head's own table, which is trained."""
    return Logits((Term(hidden, folded["lm_head"], trained=True),), tokens(recipe.head, folded))


def confidence(
    recipe: Recipe, folded: dict, hidden: Float[Array, "B A D E"], asked: Questions
) -> Float[Array, "B A D"] | None:
    """Returns None: the head says nothing of the kind."""
    return None


def by_path(config: Eagle3Config) -> bool:
    """Returns True: what a node drafts was computed after its path."""
    return True


def work(recipe: Recipe, sequences: int, length: int) -> dict[str, float]:
    """Returns operations of the head, counted as `flops` says, and the slots that meet its table."""
    head, tokens = recipe.head, sequences * length
    anchors = sequences * min(recipe.anchors, length)
    steps = anchors * recipe.unroll
    single = head.hidden_size * (head.num_heads + 2 * head.num_kv_heads) * head.head_dim
    rest = flops.row_parameters(head) - single
    fuse = 2 * tokens * len(head.tap_layers) * head.hidden_size * head.hidden_size
    seen = 4 * steps * length / 2 * head.num_heads * head.head_dim
    # An embedding and a feature are projected side by side; the first step's rows are those of all tokens.
    once = 2 * steps * rest + 2 * (tokens + steps - anchors) * 2 * single + fuse + seen
    return {
        "head_forward": float(once),
        "head_backward": float(2 * once - fuse),
        "slots": float(steps),
        "table": 3 * 2.0 * head.draft_vocab_size * head.hidden_size,
    }


def describe(recipe: Recipe) -> dict[str, str]:
    """Returns the vocabulary of a head and the steps of its training, for its model card."""
    c: Eagle3Config = recipe.head
    part = f"the {c.draft_vocab_size:,} most frequent in training of" if c.reduced else "all"
    steps = (
        f"{recipe.unroll}, all but the first after its own output, each weighing {recipe.unroll_decay:g} of the last"
    )
    return {"drafted tokens": f"{part} {c.vocab_size:,}", "steps in training": steps}


def forward(  # noqa: PLR0913  # arrays of one forward pass
    head: Eagle3,
    after: Float[Array, "B S E"],
    anchors: Anchors,
    features: Float[Array, "B S F"],
    document: Int[Array, "B S"],
    position: Int[Array, "B S"],
    asked: Bool[Array, "B A D"],
    remat: bool = False,
) -> Float[Array, "B A D E"]:
    """Returns hidden states, for the head's table, of D steps from every anchor.

    after: embedding of the token after each row. features: tapped target features; what lies at or after an anchor, or
    in another document, is not read by its steps. asked: which steps have a label. remat: keep only what enters a step.
    """
    seen = anchor_rules.seen(anchors, document)
    # What nobody sees (padding) may be NaN, which a weight of zero would keep out of no sum and of no gradient.
    used = seen.any(1)[..., None]
    feature = head.fuse(jnp.where(used, features, 0))
    rows = head.layer.rows(jnp.where(used, after, 0).astype(feature.dtype), feature)
    q, k, v = head.layer.project(rows, head.angles(position))
    context = k, v
    row = jnp.maximum(anchors.position - 1, 0)
    at = lambda x, index: jnp.take_along_axis(x, index.reshape(*index.shape, *[1] * (x.ndim - 2)), 1)
    feature, q, place = at(feature, row), at(q, row), at(position, row)

    # The f32 scores are larger than everything else that a step keeps, so they are always made again.
    attend = _attend if remat else jax.checkpoint(_attend)

    def step(number: int, feature, q, own: tuple[KV, ...]):
        if number:
            token = at(after, jnp.minimum(row + number, after.shape[1] - 1))
            token = jnp.where(asked[:, :, number, None], token, 0).astype(feature.dtype)
            q, k, v = head.layer.project(head.layer.rows(token, feature), head.angles(place + number))
            own = (*own, (k, v))
        output, normed = head.after(feature, attend(q, context, seen, own))
        return output, normed, own

    own: tuple[KV, ...] = ()
    drafted = []
    for number in range(asked.shape[-1]):
        one = jax.checkpoint(step, static_argnums=0) if remat else step
        feature, normed, own = one(number, feature, q, own)
        drafted.append(normed)
    return jnp.stack(drafted, 2)


def _attend(
    q: Float[Array, "B A N H"], context: KV, seen: Bool[Array, "B A S"], own: tuple[KV, ...]
) -> Float[Array, "B A N H"]:
    """Rows over what they see of the context, and each over its own keys and values [B, K, A, H] of earlier steps."""
    batch, count, heads, dim = q.shape
    kv_heads = context[0].shape[1]
    q = q.reshape(batch, count, kv_heads, -1, dim).transpose(0, 2, 3, 1, 4)
    scale = 1 / math.sqrt(dim)
    before = einsum("bkgah,bksh->bkgas", q, context[0], jnp.float32) * scale
    score = [jnp.where(seen[:, None, None], before, MASKED)]
    score += [einsum("bkgah,bkah->bkga", q, k, jnp.float32)[..., None] * scale for k, _ in own]
    share = jax.nn.softmax(jnp.concatenate(score, -1), -1).astype(context[1].dtype)
    slots = context[0].shape[2]
    out = einsum("bkgas,bksh->bkgah", share[..., :slots], context[1], jnp.float32)
    for i, (_, v) in enumerate(own):
        out += share[..., slots + i, None].astype(jnp.float32) * v[:, :, None].astype(jnp.float32)
    return out.astype(q.dtype).transpose(0, 3, 1, 2, 4).reshape(batch, count, heads, dim)
