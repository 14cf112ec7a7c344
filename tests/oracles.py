"""Plain Python and NumPy re-derivations of the method, written from its description and not from the package."""

from __future__ import annotations

import heapq
import itertools

import numpy as np

Node = tuple[int, int, int]  # token, parent, depth


def row_of(logp, d: int, above: int):
    """Log-probabilities at depth d + 1 after candidate `above` of depth d; one row [D, W] serves all parents."""
    return logp[d] if logp.ndim == 2 else logp[d, above if d else 0]


def accum_logp_table(logp, token, anchor: int, budget: int) -> list[Node]:
    """`accum_logp` where each parent has a row of its own [D, W, W]; a sibling group is in the order of its row."""
    depth = len(token)
    nodes, places, scores = [(anchor, -1, 0)], [0], [np.float32(0)]
    heap, order = [(-0.0, 0, 0)], itertools.count(1)
    while heap and len(nodes) < budget:
        _, _, v = heapq.heappop(heap)
        d = nodes[v][2]
        if d == depth:
            continue
        row = row_of(logp, d, places[v])
        group = [int(w) for w in np.argsort(-row, kind="stable") if np.isfinite(row[w])]
        for w in group[: budget - len(nodes)]:
            nodes.append((int(token[d, w]), v, d + 1))
            places.append(w)
            scores.append(np.float32(scores[v] + row[w]))
            heapq.heappush(heap, (-scores[-1], next(order), len(nodes) - 1))
    return nodes


def table_scores(logp, nodes: int) -> list[float]:
    """Scores of the `nodes` most probable paths of a table, by a heap of next siblings and first children."""
    depth = logp.shape[0]
    ranked = lambda d, above: np.argsort(-row_of(logp, d, above), kind="stable")
    heap, count, out = [], itertools.count(), []

    def push(d: int, above: int, place: int, base):
        order = ranked(d, above)
        if place < len(order):
            w = int(order[place])
            score = np.float32(base + row_of(logp, d, above)[w])
            if np.isfinite(score):
                heapq.heappush(heap, (-score, next(count), d, above, place, base, w))

    push(0, 0, 0, np.float32(0))
    while heap and len(out) < nodes:
        score, _, d, above, place, base, w = heapq.heappop(heap)
        out.append(-score)
        push(d, above, place + 1, base)
        if d + 1 < depth:
            push(d + 1, w, 0, -score)
    return out


def accum_logp(logp, token, anchor: int, budget: int) -> list[Node]:
    """Best-first over whole sibling groups with a heap (method 5.1); zero-probability children are not made."""
    depth, width = logp.shape
    nodes, heap, order = [(anchor, -1, 0)], [(-0.0, 0, 0)], itertools.count(1)
    scores = [np.float32(0)]
    while heap and len(nodes) < budget:
        _, _, v = heapq.heappop(heap)
        d = nodes[v][2]
        if d == depth:
            continue
        for j in range(min(width, budget - len(nodes))):
            if np.isfinite(logp[d, j]):
                nodes.append((int(token[d, j]), v, d + 1))
                scores.append(np.float32(scores[v] + logp[d, j]))
                heapq.heappush(heap, (-scores[-1], next(order), len(nodes) - 1))
    return nodes


def ddtree_scores(logp, nodes: int) -> list[float]:
    """Scores of the `nodes` most probable paths, by the lazy heap of DDTree (method 5.3): next sibling, first child."""
    depth, width = logp.shape
    heap, out = [(-logp[0, 0], (0,), np.float32(0))], []
    while heap and len(out) < nodes:
        score, ranks, above = heapq.heappop(heap)
        if not np.isfinite(score):
            continue
        out.append(-score)
        d, r = len(ranks) - 1, ranks[-1]
        if r + 1 < width:
            heapq.heappush(heap, (-np.float32(above + logp[d, r + 1]), (*ranks[:-1], r + 1), above))
        if d + 1 < depth:
            heapq.heappush(heap, (-np.float32(-score + logp[d + 1, 0]), (*ranks, 0), -score))
    return out


def best_first(logp, token, anchor: int, budget: int) -> list[Node]:
    """All paths, enumerated; the best budget - 1 by score, then depth, then place in the level (parent, then rank)."""
    depth, width = token.shape
    level, everything = [(np.float32(0), ())], []
    for d in range(depth):
        below = [
            (np.float32(s + row_of(logp, d, ranks[-1] if ranks else 0)[r]), (*ranks, r))
            for s, ranks in level
            for r in range(width)
        ]
        level = sorted((x for x in below if np.isfinite(x[0])), key=lambda x: -x[0])  # stable: parent, then rank
        everything += level
    chosen = [ranks for _, ranks in sorted(everything, key=lambda x: -x[0])[: budget - 1]]  # stable: depth, then place
    index = {(): 0} | {ranks: i + 1 for i, ranks in enumerate(chosen)}
    return [(anchor, -1, 0)] + [(int(token[len(r) - 1, r[-1]]), index[r[:-1]], len(r)) for r in chosen]


def path_scores(nodes: list[Node], logp, token) -> list[float]:
    """Score of every node but the root, re-added along its path."""
    scores = [np.float32(0)]
    for t, parent, d in nodes[1:]:
        scores.append(np.float32(scores[parent] + logp[d - 1, list(token[d - 1]).index(t)]))
    return scores[1:]


def walk(nodes: list[Node], choice) -> tuple[list[int], list[int]]:
    """Follows the target's choices from the root (method 6.2): the path, and the tokens it commits."""
    path = [0]
    while True:
        wanted = int(choice[path[-1]])
        child = next((i for i, (t, p, _) in enumerate(nodes) if p == path[-1] and t == wanted), None)
        if child is None:
            return path, [nodes[i][0] for i in path[1:]] + [wanted]
        path.append(child)


def ancestors(parents) -> np.ndarray:
    """[T, T] True on the node itself and on everything above it."""
    out = np.eye(len(parents), dtype=bool)
    for i in range(len(parents)):
        up = parents[i]
        while up >= 0:
            out[i, up] = True
            up = parents[up]
    return out


def attention(q, keys, values, visible) -> np.ndarray:
    """Softmax attention in float64: q [T, N, H], keys and values [K, S, H], visible [T, S]; [T, N, H]."""
    q, keys, values = (np.asarray(x, np.float64) for x in (q, keys, values))
    out = np.zeros(q.shape)
    for n in range(q.shape[1]):
        k, v = (x[n // (q.shape[1] // keys.shape[0])] for x in (keys, values))
        score = np.where(visible, q[:, n] @ k.T / np.sqrt(q.shape[-1]), -np.inf)
        weight = np.exp(score - score.max(-1, keepdims=True))
        out[:, n] = weight / weight.sum(-1, keepdims=True) @ v
    return out


def rms_norm(x, weight, eps: float) -> np.ndarray:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def rope(x, positions, theta: float) -> np.ndarray:
    """Half-rotation convention; x [T, heads, H]."""
    half = x.shape[-1] // 2
    angle = np.asarray(positions)[:, None, None] / theta ** (np.arange(half) / half)
    rotated = np.concatenate([-x[..., half:], x[..., :half]], -1)
    return x * np.cos(np.tile(angle, 2)) + rotated * np.sin(np.tile(angle, 2))


def silu(x) -> np.ndarray:
    return x / (1 + np.exp(-x))


def head_hidden(config, params, block, features) -> np.ndarray:
    """Draft head of method 2.1 for one row: block embeddings [T, E], features [C, F] of positions 0..C-1; [T, E]."""
    p = lambda tree, name: np.asarray(tree[name], np.float64)
    rows, count = len(block), len(features)
    ctx = rms_norm(np.asarray(features, np.float64) @ p(params, "fc"), p(params, "hidden_norm"), config.norm_eps)
    h = np.asarray(block, np.float64)
    positions = np.arange(count + rows)
    inside = np.tril(np.ones((rows, rows), bool)) if config.causal else np.ones((rows, rows), bool)
    visible = np.concatenate([np.ones((rows, count), bool), inside], 1)
    split = lambda x: x.reshape(len(x), -1, config.head_dim)
    for layer in params["layers"].values():
        fused = p(layer, "qkv")  # [E, K, G + 2, H]
        wq, wk, wv = (w.reshape(len(fused), -1) for w in (fused[:, :, :-2], fused[:, :, -2], fused[:, :, -1]))
        x = rms_norm(h, p(layer, "input_norm"), config.norm_eps)
        both = np.concatenate([ctx, x])
        q = rope(rms_norm(split(x @ wq), p(layer, "q_norm"), config.norm_eps), positions[count:], config.rope_theta)
        k = rope(rms_norm(split(both @ wk), p(layer, "k_norm"), config.norm_eps), positions, config.rope_theta)
        attended = attention(q, k.swapaxes(0, 1), split(both @ wv).swapaxes(0, 1), visible)
        h = h + attended.reshape(rows, -1) @ p(layer, "out")
        z = rms_norm(h, p(layer, "post_norm"), config.norm_eps)
        gate, up = (z @ p(layer, "gate_up")[:, i] for i in range(2))
        h = h + (silu(gate) * up) @ p(layer, "down")
    return rms_norm(h, p(params, "norm"), config.norm_eps)


def dspark_logits(config, params, hidden, base, path) -> np.ndarray:
    """Logits [V] of DSpark's next slot after a path [anchor, token, ...], in f64: the Markov head, path by path.

    hidden, base: of all slots, [D, E] and [D, V]; the slot is that of the path's last token.
    """
    slot, kind = len(path) - 1, config.markov
    if not config.markov_rank:
        return base[slot]
    p = {name: np.asarray(x, np.float64) for name, x in params["markov"].items()}
    sigmoid = lambda x: 1 / (1 + np.exp(-x))
    row = p["w1"][path[-1]]
    if kind == "gated":
        row = row * sigmoid(np.concatenate([hidden[slot], row]) @ p["gate"] + p["gate_bias"])
    if kind == "rnn":
        memory = np.zeros(config.markov_rank)
        for k, token in enumerate(path):
            z = np.concatenate([memory, p["w1"][token], hidden[k]]) @ p["joint"] + p["joint_bias"]
            gate, new, out = z.reshape(3, -1)
            memory = sigmoid(gate) * memory + (1 - sigmoid(gate)) * np.tanh(new)
        row = np.tanh(out)
    return base[slot] + p["w2"] @ row


def processed(logits, context, prompt_length: int, option, ends=()) -> np.ndarray:
    """f64 scores [V] of the next token after `context` (prompt + output): transformers' processors, one by one, and
    the two OpenAI penalties after the repetition penalty. Dropped tokens have -inf; equal logits stay together."""
    scores = np.asarray(logits, np.float64).copy()
    for token, value in option.logit_bias:
        scores[token] += value
    for token in set(context):
        worse = scores[token] * option.repetition_penalty if scores[token] < 0 else None
        scores[token] = scores[token] / option.repetition_penalty if worse is None else worse
    output = list(context[prompt_length:])
    for token in set(output):
        scores[token] -= option.presence_penalty + option.frequency_penalty * output.count(token)
    for word in option.bad_words:
        size = len(word) - 1
        if size == 0 or (len(context) >= size and tuple(context[-size:]) == tuple(word[:-1])):
            scores[word[-1]] = -np.inf
    if len(output) < option.min_new_tokens:
        scores[list(ends)] = -np.inf
    if option.temperature < 1e-4:
        return scores
    scores = scores / option.temperature
    drop = lambda which: np.where(which, -np.inf, scores)
    if option.top_k:
        scores = drop(scores < np.sort(scores)[-min(option.top_k, scores.size)])
    if option.top_p < 1:
        above = np.array([softmax(scores)[scores > x].sum() for x in scores])
        scores = drop(above >= option.top_p)
    return drop(softmax(scores) < option.min_p * softmax(scores).max())


def softmax(scores) -> np.ndarray:
    """Of one row, in f64."""
    weight = np.exp(scores - scores.max())
    return weight / weight.sum()


def eagle2(children, nodes: int, depth: int, frontier: int) -> list[tuple[tuple[int, ...], float]]:
    """EAGLE-2's dynamic tree: (path, score) of its nodes but the root, best first.

    children: of a path, [(token, log-probability), ...] best first.
    """
    expanded, everything = [((), 0.0)], []
    for _ in range(depth):
        level = [((*path, t), score + p) for path, score in expanded for t, p in children(path)]
        level.sort(key=lambda node: -node[1])  # stable: the first of equals stays first
        everything += level
        expanded = level[:frontier]
    everything.sort(key=lambda node: -node[1])
    return [node for node in everything[: nodes - 1] if node[1] > -np.inf]


def eagle3_logp(loaded, features, embedded, path, window: int = 0) -> np.ndarray:
    """Log-probabilities [V] that an EAGLE-3 head gives after a path, all rows computed anew in f64.

    features: [C, F] tapped features of positions 0..C-1. embedded: of tokens 1..C, then of the path's, [C + n, E].
    window: of these positions, how many a row sees beside itself and its path, the last ones; 0 is all.
    """
    config, params = loaded.config, loaded.params
    p = lambda tree, name: np.asarray(tree[name], np.float64)
    layer, eps = params["layer"], config.norm_eps
    fused = p(layer, "qkv")
    wq, wk, wv = (w.reshape(len(fused), -1) for w in (fused[:, :, :-2], fused[:, :, -2], fused[:, :, -1]))
    split = lambda x: x.reshape(len(x), -1, config.head_dim)
    rows = list(np.asarray(features, np.float64) @ p(params, "fc"))
    for _ in range(len(path) + 1):
        g = np.stack(rows)
        count = len(g)
        x = np.concatenate([
            rms_norm(np.asarray(embedded[:count], np.float64), p(layer, "input_norm"), eps),
            rms_norm(g, p(layer, "hidden_norm"), eps),
        ], 1)  # fmt: skip
        q, k = (rope(split(x @ w), np.arange(count), config.rope_theta) for w in (wq, wk))
        seen = np.tril(np.ones((count, count), bool))
        if window:  # the row of position C - 1 is itself one of them
            seen[-1, : max(0, min(len(features), count - 1) - window)] = False
        attended = attention(q, k.swapaxes(0, 1), split(x @ wv).swapaxes(0, 1), seen)[-1]
        h = g[-1] + attended.reshape(-1) @ p(layer, "out")
        gate, up = (rms_norm(h, p(layer, "post_norm"), eps) @ p(layer, "gate_up")[:, i] for i in range(2))
        h = h + (silu(gate) * up) @ p(layer, "down")
        rows.append(h)
    own = rms_norm(rows[-1], p(params, "norm"), eps) @ p(params, "lm_head").T
    logits = np.full(config.vocab_size, -np.inf)
    logits[np.arange(len(own)) + (np.asarray(params["d2t"]) if config.reduced else 0)] = own
    return logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
