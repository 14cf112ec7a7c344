"""One round's tree for people: as lines for a terminal, and as an SVG picture.

Beside each node stands what the draft gave it, given its parent, and what the target did. The accepted path is marked;
the bonus is the token that the target adds after it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple
from xml.sax.saxutils import escape

import numpy as np

from jetspec_jax.evals.trace import Recorded

COLUMN, ROW, MARGIN = 150, 26, 16  # of the picture, in pixels
SHOWN = 14  # characters of a token in the picture


class Node(NamedTuple):
    """A node as it is drawn."""

    text: str
    draft: float | None  # probability, given its parent; None of the root and the bonus
    target: float | None
    accepted: bool
    children: list[int]
    depth: int


def nodes(done: Recorded, text: Callable[[int], str]) -> list[Node]:
    """Returns all nodes, the bonus as the last, below the last accepted one. text: a token as people read it."""
    path, last = {int(i) for i in done.accepted}, int(done.accepted[-1])
    draft = None if done.foretold is None else np.exp(done.foretold)
    assert done.target_logits is not None, "record(..., full=) keeps them"
    target = _softmax(done.target_logits)
    found = []
    for i, (token, parent, depth) in enumerate(zip(done.tokens, done.parents, done.depths, strict=True)):
        drafted = None if draft is None or i == 0 else float(draft[i])
        judged = None if i == 0 else float(target[parent, token])
        children = [int(j) for j in np.flatnonzero(done.parents == i)]
        children += [len(done.tokens)] if i == last else []
        found.append(Node(text(int(token)), drafted, judged, i in path, children, int(depth)))
    depth = int(done.depths[last]) + 1
    return [*found, Node(text(done.bonus), None, float(target[last, done.bonus]), True, [], depth)]


def _softmax(logits: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore", invalid="ignore"):
        shifted = np.exp(logits - logits.max(-1, keepdims=True))
        return shifted / shifted.sum(-1, keepdims=True)


def title(done: Recorded, number: int) -> str:
    """Returns what the round did, in one line."""
    drafted, kept = len(done.tokens) - 1, len(done.accepted) - 1
    return f"round {number}: {drafted} tokens drafted, {kept} accepted, 1 more from the target"


def lines(done: Recorded, number: int, text: Callable[[int], str]) -> list[str]:
    """Draws the tree for a terminal: accepted nodes have a full dot, `+` is the bonus; p draft / target."""
    drawn = nodes(done, text)
    out = [f"{title(done, number)} (draft's probability / target's)"]
    waiting = [(0, "", "")]
    while waiting:  # no recursion: a chain may be a thousand deep
        i, stem, branch = waiting.pop()
        node = drawn[i]
        mark = "+" if i == len(drawn) - 1 else "●" if node.accepted else "○"
        chance = " / ".join("-" if p is None else f"{p:.2f}" for p in (node.draft, node.target))
        out.append(f"{stem}{branch}{mark} {node.text}" + (f"  {chance}" if i else ""))
        below = stem + {"": "", "├─ ": "│  ", "└─ ": "   "}[branch]
        branches = ["├─ "] * (len(node.children) - 1) + ["└─ "]
        waiting += [(child, below, b) for child, b in zip(node.children, branches, strict=False)][::-1]
    return out


def _heights(drawn: list[Node]) -> dict[int, float]:
    """The row of each node: leaves one below the other, the others amid their children."""
    order, waiting = [], [0]
    while waiting:
        order.append(waiting.pop())
        waiting += drawn[order[-1]].children[::-1]
    leaves = [i for i in order if not drawn[i].children]
    heights = {i: float(row) for row, i in enumerate(leaves)}
    for i in reversed(order):
        if below := drawn[i].children:
            heights[i] = (heights[below[0]] + heights[below[-1]]) / 2
    return heights


def svg(done: Recorded, number: int, text: Callable[[int], str]) -> str:
    """Draws the tree as an SVG picture: depth to the right, the accepted path thick and green, the bonus dashed."""
    drawn = nodes(done, text)
    heights = _heights(drawn)
    wide = MARGIN * 2 + COLUMN * (1 + max(node.depth for node in drawn))
    high = MARGIN * 2 + ROW * (1 + max(heights.values())) + ROW
    x = lambda i: MARGIN + COLUMN * drawn[i].depth + 6
    y = lambda i: MARGIN + ROW * (heights[i] + 1.5)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide:g}" height="{high:g}" viewBox="0 0 {wide:g} {high:g}" '
        'font-family="monospace" font-size="11" paint-order="stroke">',
        f'<rect width="{wide:g}" height="{high:g}" fill="white"/>',
        f'<text x="{MARGIN}" y="{MARGIN + 8}" font-size="13">{escape(title(done, number))}</text>',
    ]
    for i, node in enumerate(drawn):
        for child in node.children:
            on, dash = node.accepted and drawn[child].accepted, child == len(drawn) - 1
            middle = (x(i) + x(child)) / 2
            out.append(
                f'<path d="M{x(i):g} {y(i):g}C{middle:g} {y(i):g} {middle:g} {y(child):g} {x(child):g} {y(child):g}" '
                f'fill="none" stroke="{"#2a8" if on else "#bbb"}" stroke-width="{2.5 if on else 1}"'
                f"{' stroke-dasharray=' + chr(34) + '4 3' + chr(34) if dash else ''}/>"
            )
    for i, node in enumerate(drawn):
        colour = "#2a8" if node.accepted else "#bbb"
        shown = node.text if len(node.text) <= SHOWN else f"{node.text[: SHOWN - 1]}…"
        chance = " / ".join(f"{p:.2f}" for p in (node.draft, node.target) if p is not None)
        halo = 'stroke="white" stroke-width="2"'
        out += [
            f'<circle cx="{x(i):g}" cy="{y(i):g}" r="4" fill="{colour}"/>',
            f'<text x="{x(i) + 7:g}" y="{y(i) - 3:g}" {halo}>{escape(shown)}</text>',
            f'<text x="{x(i) + 7:g}" y="{y(i) + 9:g}" font-size="8" fill="#777" {halo}>{chance}</text>',
        ]
    return "\n".join([*out, "</svg>", ""])
