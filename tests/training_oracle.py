"""A training step and its evaluation, dense and slow, written from the method and not from the package.

Every block is a row of its own with one mask over all positions of its sequence; gradients come from jax, everything
that is drawn, weighed, counted or updated is plain NumPy.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import oracles


class Block(NamedTuple):
    """One block of D slots after its anchor."""

    sequence: int
    anchor: int
    position: int  # of the anchor in its document
    sees: np.ndarray  # [S] bool, features of which rows
    label: np.ndarray  # [D] index of the token that slot k drafts, 0 where there is none
    weight: np.ndarray  # [D]


def candidates(learnt, document) -> list[int]:
    """Learnt positions with a learnt successor in the same document."""
    last = len(learnt) - 1
    return [i for i in range(last) if learnt[i] and learnt[i + 1] and document[i] == document[i + 1]]


def block(batch, row: int, anchor: int, depth: int, gamma: float) -> Block:
    document, learnt, position = (np.asarray(x)[row] for x in (batch.document, batch.learnt, batch.position))
    sees = (np.arange(document.size) < anchor) & (document == document[anchor])
    label, weight = np.zeros(depth, int), np.zeros(depth)
    for k in range(1, depth + 1):
        at = anchor + k
        if at >= document.size or document[at] != document[anchor] or not learnt[at]:
            break
        label[k - 1], weight[k - 1] = at, np.exp(-(k - 1) / gamma) if gamma else 1.0
    return Block(row, anchor, int(position[anchor]), sees, label, weight)


def drawn(batch, key, step: int, count: int, depth: int, gamma: float) -> list[Block]:
    """The blocks of a step: the places of the highest noise, which is drawn for the step and for the row alone."""
    blocks, size = [], batch.learnt.shape[1]
    for row, learnt in enumerate(np.asarray(batch.learnt)):
        noise = np.asarray(jax.random.uniform(jax.random.fold_in(jax.random.fold_in(key, step), row), (size,)))
        places = np.array(candidates(learnt, np.asarray(batch.document)[row]), int)
        chosen = np.sort(places[np.argsort(-noise[places])][:count]).tolist()
        blocks += [block(batch, row, anchor, depth, gamma) for anchor in chosen]
    return blocks


def norm(x, weight, eps):
    return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rope(x, positions, theta):
    half = x.shape[-1] // 2
    angle = positions[:, None, None] / theta ** (jnp.arange(half) / half)
    first, second = x[..., :half], x[..., half:]
    turned = first * jnp.cos(angle) - second * jnp.sin(angle), second * jnp.cos(angle) + first * jnp.sin(angle)
    return jnp.concatenate(turned, -1)


def layer(c, p, x, context, positions, visible):
    """x [T, E] over context rows [C, E] and itself; positions [C + T]; visible [T, C + T]."""
    h = norm(x, p["input_norm"], c.norm_eps)
    both = jnp.concatenate([context, h])
    split = lambda w: w.reshape(len(w), -1, c.head_dim)
    fused = p["qkv"]  # [E, K, G + 2, H]
    q = jnp.einsum("te,enh->tnh", h, split(fused[:, :, :-2]))
    k, v = (jnp.einsum("te,ekh->tkh", both, fused[:, :, i]) for i in (-2, -1))
    q = rope(norm(q, p["q_norm"], c.norm_eps), positions[len(context) :], c.rope_theta)
    k = rope(norm(k, p["k_norm"], c.norm_eps), positions, c.rope_theta)
    group = q.shape[1] // k.shape[1]
    score = jnp.einsum("tnh,snh->nts", q, k.repeat(group, 1)) / c.head_dim**0.5
    share = jax.nn.softmax(jnp.where(visible, score, -jnp.inf), -1)
    attended = jnp.einsum("nts,snh->tnh", share, v.repeat(group, 1)).reshape(len(x), -1)
    x = x + attended @ p["out"].reshape(attended.shape[-1], -1)
    z = norm(x, p["post_norm"], c.norm_eps)
    return x + (jax.nn.silu(z @ p["gate_up"][:, 0]) * (z @ p["gate_up"][:, 1])) @ p["down"]


@functools.lru_cache(None)
def target_states(model, taps):
    """A function to tapped layers [S, F] and final hidden states [S, E] of one sequence, documents apart."""
    c = model.config

    @jax.jit
    def run(params, tokens, document, position):
        visible = (document[:, None] == document) & jnp.tril(jnp.ones((tokens.size,) * 2, bool))
        x, outputs = params["embedding"][tokens], []
        for p in params["layers"].values():
            x = layer(c, p, x, jnp.zeros((0, c.hidden_size)), position, visible)
            outputs.append(x)
        return jnp.concatenate([outputs[t] for t in taps], -1), norm(x, params["norm"], c.norm_eps)

    return run


def head_states(*given):
    """Hidden states [D, E] of what one block drafts, as `block_states` takes it."""
    return block_states(*given)[1:]


def block_states(c, params, embedding, anchor_token, features, sees, position, places):
    """Hidden states of all slots; features [S, F], places [S]: positions of the rows in their documents."""
    context = norm(features @ params["fc"], params["hidden_norm"], c.norm_eps)
    slots = c.block_size
    x = embedding[jnp.concatenate([anchor_token[None], jnp.full(slots - 1, c.mask_token_id)])]
    own = jnp.tril(jnp.ones((slots, slots), bool)) if c.causal else jnp.ones((slots, slots), bool)
    visible = jnp.concatenate([jnp.broadcast_to(sees, (slots, sees.size)), own], 1)
    positions = jnp.concatenate([places, position + jnp.arange(slots)])
    for p in params["layers"].values():
        x = layer(c, p, x, context, positions, visible)
    return norm(x, params["norm"], c.norm_eps)


def dspark_slot(c, params, table, hidden, before):
    """Logits [V] of one slot and that of its confidence: hidden state [E], the token before it."""
    row = seen = params["markov"]["w1"][before]
    if c.markov == "gated":
        gate = jnp.concatenate([hidden, row]) @ params["markov"]["gate"] + params["markov"]["gate_bias"]
        row = row / (1 + jnp.exp(-gate))
    trust = jnp.concatenate([hidden, seen]) @ params["confidence"]["proj"][0] + params["confidence"]["bias"][0]
    return table @ hidden + params["markov"]["w2"] @ row, trust


def dspark_loss(r, target_params, scale, params, batch, blocks, taps, final):
    """Weighted sum of the losses of all slots [blocks, D], whole logits at once, and its weight.

    taps [B, S, F], final [B, S, E]: of the target.
    """
    embedding = target_params["embedding"]
    table, heat = target_params.get("lm_head", embedding), r.mix.temperature
    folded = params | {"fc": params["fc"] / scale[:, None]}
    tokens, places, rows = np.asarray(batch.tokens), np.asarray(batch.position), np.array([b.sequence for b in blocks])
    label, weight = (np.stack([getattr(b, name) for b in blocks]) for name in ("label", "weight"))

    def slot(hidden, before, teacher, label):
        z, trust = dspark_slot(r.head, folded, table, hidden, before)
        wanted = table @ teacher
        p, q = jax.nn.softmax(wanted / heat), jax.nn.softmax(z / heat)
        same = jax.lax.stop_gradient(jnp.minimum(p, q).sum())
        unsure = -same * jnp.log(jax.nn.sigmoid(trust)) - (1 - same) * jnp.log(1 - jax.nn.sigmoid(trust))
        return each_loss(r.mix, z, wanted, label)[0] + r.confidence * unsure

    def one(token, features, sees, position, places, *slots):
        return jax.vmap(slot)(block_states(r.head, folded, embedding, token, features, sees, position, places), *slots)

    value = jax.vmap(one)(
        tokens[rows, [b.anchor for b in blocks]], np.asarray(taps)[rows], np.stack([b.sees for b in blocks]),
        np.array([b.position for b in blocks]), places[rows], tokens[rows[:, None], label - 1],
        np.asarray(final)[rows[:, None], label - 1], tokens[rows[:, None], label],
    )  # fmt: skip
    return (value * weight).sum(), weight.sum()


def eagle3_states(c, params, embedding, tokens, taps, sees, place, anchor, steps):
    """Hidden states [steps, E] along the path that begins with the token at `anchor` and goes on as the text does.

    tokens [S], tapped layers [S, F], the rows that are seen [S], places of all rows in their documents [S]. Each token
    of the path is a row more, and the last row alone is asked: a run of its own for every row and step.
    """
    p, row = params["layer"], anchor - 1
    feature, after, seen = taps @ params["fc"], embedding[jnp.roll(tokens, -1)], sees
    split = lambda x: x.reshape(len(x), -1, c.head_dim)
    fused, drafted = p["qkv"], []
    wq, wk, wv = (w.reshape(len(fused), -1) for w in (fused[:, :, :-2], fused[:, :, -2], fused[:, :, -1]))
    for n in range(steps):
        if n:
            token = tokens[jnp.minimum(anchor + n, len(tokens) - 1)]
            feature, after = jnp.vstack([feature, drafted[-1]]), jnp.vstack([after, embedding[token]])
            place, seen = jnp.append(place, place[row] + n), jnp.append(seen, True)
        me = row if n == 0 else len(feature) - 1
        x = jnp.hstack([norm(after, p["input_norm"], c.norm_eps), norm(feature, p["hidden_norm"], c.norm_eps)])
        q, k = (rope(split(x @ w), place, c.rope_theta) for w in (wq, wk))
        group = q.shape[1] // k.shape[1]
        score = jnp.einsum("nh,snh->ns", q[me], k.repeat(group, 1)) / c.head_dim**0.5
        share = jax.nn.softmax(jnp.where(seen, score, -jnp.inf), -1)
        h = feature[me] + jnp.einsum("ns,snh->nh", share, split(x @ wv).repeat(group, 1)).reshape(-1) @ p["out"]
        z = norm(h, p["post_norm"], c.norm_eps)
        drafted.append(h + (jax.nn.silu(z @ p["gate_up"][:, 0]) * (z @ p["gate_up"][:, 1])) @ p["down"])
    return norm(jnp.stack(drafted), params["norm"], c.norm_eps)


def eagle3_loss(r, target_params, scale, params, batch, blocks, taps, final):
    """Weighted sum of the losses of all steps [blocks, D], whole logits at once, and its weight.

    taps [B, S, F], final [B, S, E]: of the target. A step whose best token for the target is none of the head's counts
    for nothing.
    """
    embedding, ids = target_params["embedding"], np.arange(r.head.draft_vocab_size) + np.asarray(params["d2t"])
    tokens, places, rows = np.asarray(batch.tokens), np.asarray(batch.position), np.array([b.sequence for b in blocks])
    label, weight = (np.stack([getattr(b, name) for b in blocks]) for name in ("label", "weight"))
    wanted = np.asarray(final)[rows[:, None], label - 1] @ np.asarray(target_params.get("lm_head", embedding)).T
    text = tokens[rows[:, None], label]
    counts = np.isin(wanted.argmax(-1), ids) & (np.isin(text, ids) | (not r.mix.cross_entropy))
    weight = weight * r.unroll_decay ** np.arange(label.shape[1]) * counts
    own = np.minimum(np.searchsorted(ids, text), ids.size - 1)
    folded = params | {"fc": params["fc"] / scale[:, None]}

    def one(wanted, own, *given):
        hidden = eagle3_states(r.head, folded, embedding, *given, label.shape[1])
        return jax.vmap(lambda z, *x: each_loss(r.mix, z, *x)[0])(hidden @ params["lm_head"].T, wanted, own)

    sees, anchor = np.stack([b.sees for b in blocks]), np.array([b.anchor for b in blocks])
    value = jax.vmap(one)(wanted[..., ids], own, tokens[rows], np.asarray(taps)[rows], sees, places[rows], anchor)
    return (value * weight).sum(), weight.sum()


def each_loss(mix, z, wanted, label):
    """Loss of one slot of drafted logits, and whether its best token is right."""
    t = mix.temperature
    p, q = jax.nn.log_softmax(wanted / t), jax.nn.log_softmax(z / t)
    value = mix.forward_kl * t**2 * (jnp.exp(p) * (p - q)).sum() + mix.reverse_kl * t**2 * (jnp.exp(q) * (q - p)).sum()
    value += mix.total_variation * jnp.abs(jnp.exp(p) - jnp.exp(q)).sum()
    return value - mix.cross_entropy * jax.nn.log_softmax(z)[label], z.argmax() == wanted.argmax()


class Step(NamedTuple):
    gradient: dict  # clipped
    metrics: dict[str, float]


def gradient(r, target_params, scale, params, batch, blocks: list[Block]) -> Step:
    """Of the weighted mean loss over all blocks of a batch whose sequences stand one after the other [B, S]."""
    states = target_states(r.target, r.head.tap_layers)
    found = [states(target_params, *x) for x in zip(batch.tokens, batch.document, batch.position, strict=True)]
    taps, final = (np.stack([s[i] for s in found]) for i in range(2))
    rows = [b.sequence for b in blocks]
    tokens, places = np.asarray(batch.tokens), np.asarray(batch.position)
    label, weight = np.stack([b.label for b in blocks]), np.stack([b.weight for b in blocks])
    given = (
        tokens[rows, [b.anchor for b in blocks]], taps[rows], np.stack([b.sees for b in blocks]),
        np.array([b.position for b in blocks]), places[rows], final[np.array(rows)[:, None], label - 1],
        tokens[np.array(rows)[:, None], label],
    )  # fmt: skip
    more = r.anchors * len(tokens) - len(blocks)  # one shape for all steps: what is added weighs nothing
    padded = [np.concatenate([x, np.repeat(x[:1], more, 0)]) for x in given]
    weights = np.concatenate([weight, np.zeros((more, weight.shape[1]))])
    (value, hit), slope = _whole(r)(params, target_params, scale, jnp.asarray(weights), *padded)
    hit = np.asarray(hit)[: len(blocks)]
    size = float(np.sqrt(sum((np.asarray(x, np.float64) ** 2).sum() for x in jax.tree.leaves(slope))))
    runs = [np.cumprod(h & (w > 0)).sum() for h, w in zip(hit, weight, strict=True)]
    metrics = {
        "loss": float(value), "run_length": float(np.mean(runs)) + 1, "first_hit": float(np.mean(hit[:, 0])),
        "blocks": len(blocks), "gradient_norm": size,
    }  # fmt: skip
    return Step(jax.tree.map(lambda x: np.asarray(x, np.float64) * min(1.0, r.clip / size), slope), metrics)


@functools.lru_cache(None)
def _whole(r):
    def loss(params, target_params, scale, weight, *given):
        folded, embedding = params | {"fc": params["fc"] / scale[:, None]}, target_params["embedding"]
        table = target_params.get("lm_head", embedding)

        def one(token, features, sees, position, places, teacher, label):
            hidden = head_states(r.head, folded, embedding, token, features, sees, position, places)
            slot = lambda x, wanted, token: each_loss(r.mix, table @ x, table @ wanted, token)
            return jax.vmap(slot)(hidden, teacher, label)

        value, hit = jax.vmap(one)(*given)
        return (value * weight).sum() / weight.sum(), hit

    return jax.jit(jax.value_and_grad(loss, has_aux=True))


def rate(r, step: int) -> float:
    """Linear warm-up, then half a cosine down to its share of the peak."""
    warm = max(1, round(r.warmup * r.steps))
    if step < warm:
        return r.peak_lr * step / warm
    along = min((step - warm) / (r.steps - warm), 1.0)
    return r.peak_lr * ((1 - r.final_lr) * (1 + np.cos(np.pi * along)) / 2 + r.final_lr)


class Adam:
    """AdamW by its formula, with the decay for matrices alone."""

    def __init__(self, r, params):
        self.r, self.count = r, 0
        self.first = self.second = jax.tree.map(lambda x: np.zeros(x.shape), params)

    def __call__(self, params, slope):
        r, lr = self.r, rate(self.r, self.count)
        self.count += 1
        mix = lambda share, old, new: jax.tree.map(lambda a, b: share * a + (1 - share) * b, old, new)
        self.first = mix(r.beta1, self.first, slope)
        self.second = mix(r.beta2, self.second, jax.tree.map(np.square, slope))

        def moved(w, m, v):
            w = np.asarray(w, np.float64)
            change = m / (1 - r.beta1**self.count) / (np.sqrt(v / (1 - r.beta2**self.count)) + 1e-8)
            return w - lr * (change + r.weight_decay * w * (w.ndim > 1))

        return jax.tree.map(moved, params, self.first, self.second)


def acceptance(r, target_params, head_params, packed, budgets, width: int) -> dict:
    """What `evaluation.measure` reports, from trees that are enumerated and walked one by one."""
    c = r.head
    table = np.asarray(target_params.get("lm_head", target_params["embedding"]), np.float64)
    states = jax.jit(lambda *x: head_states(c, head_params, target_params["embedding"], *x))
    walked, every = {b: [] for b in budgets}, {b: [] for b in budgets}
    ranks, agree = [[] for _ in range(c.depth)], [[] for _ in range(c.depth)]
    for row in range(len(packed.tokens)):
        tokens, document, learnt = (np.asarray(x[row]) for x in (packed.tokens, packed.document, packed.learnt))
        place = packed.position[row]
        taps, final = map(np.asarray, target_states(r.target, c.tap_layers)(target_params, tokens, document, place))
        choice = (final @ table.T).argmax(-1)
        accepted = {}
        for anchor in candidates(learnt, document):
            b = block(packed, row, anchor, c.depth, 0.0)
            hidden = states(tokens[anchor], taps, b.sees, b.position, place)
            logits = np.asarray(hidden, np.float64) @ table.T
            logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            order = np.argsort(-logp, axis=-1, kind="stable")[:, :width]
            nodes = oracles.best_first(
                np.take_along_axis(logp, order, 1).astype(np.float32), order, int(tokens[anchor]), max(budgets)
            )
            known, path, reached = 0, [0], 0
            while known < c.depth and b.weight[known] > 0:
                wanted, known = choice[b.label[known] - 1], known + 1
                better = int((logits[known - 1] > logits[known - 1, wanted]).sum())
                agree[known - 1].append(better == 0)
                if reached == known - 1:  # the largest tree holds the path so far
                    ranks[known - 1].append(better)
                    here = [i for i, (t, up, _) in enumerate(nodes) if up == path[-1] and t == wanted]
                    path, reached = path + here, reached + len(here)
                if tokens[b.label[known - 1]] != wanted:
                    break  # the text goes on otherwise than the target would
            accepted[anchor] = {n: sum(i < n for i in path[1:]) for n in budgets}
        for n in budgets:
            every[n] += [a[n] for a in accepted.values()]
            at = 0
            while at < tokens.size:
                if at in accepted:
                    walked[n].append(accepted[at][n])
                    at += accepted[at][n]
                at += 1
    share = lambda hits: round(float(np.mean(hits)), 4) if len(hits) else 0.0
    return {
        "anchors": len(every[budgets[0]]),
        "acceptance": {str(b): 1 + float(np.mean(walked[b])) for b in budgets},
        "every_anchor": {str(b): 1 + float(np.mean(every[b])) for b in budgets},
        "agreement": [share(a) for a in agree],
        "conditional": [[share([x == rank for x in found]) for rank in range(8)] for found in ranks],
    }
