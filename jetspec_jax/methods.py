"""What `--method` names: a drafter, the tree that it draws, and the options that contradict it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jetspec_jax.options import MAX_BUDGET, ConfigError, TreeConfig


class Method(NamedTuple):
    """A drafter and its tree, as `--method` names them.

    head: whether it drafts with a head. causal: the block that the head must have, None for either. tree: the tree
    that it draws, out of what the options say. refused: options that contradict it. family: of the drafter, where it
    needs no head.
    """

    help: str
    head: bool
    causal: bool | None
    tree: Callable[[TreeConfig, Any], TreeConfig]
    refused: tuple[str, ...]
    family: str | None = None


def _given(tree: TreeConfig, head) -> TreeConfig:
    return tree


def _chain(tree: TreeConfig, head) -> TreeConfig:
    return dataclasses.replace(tree, budget=(tree.depth or head.draft.depth) + 1, width=1, builder="accum_logp")


def _exact(tree: TreeConfig, head) -> TreeConfig:
    """No sibling is cut off: a node can use no more children than the tree has rows."""
    return dataclasses.replace(tree, width=MAX_BUDGET, builder="best_first")


NO_DRAFT = ("head", "budget", "width", "depth", "tree", "sharpness", "trace", "show_tree", "tree_svg", "compare")
LOOKED_UP = ("head", "width", "tree", "sharpness")
METHODS = {
    "jetspec": Method("a tree from a head's block", True, None, _given, ()),
    "dflash": Method("the chain of a bidirectional head", True, False, _chain, ("budget", "width", "tree")),
    "ddtree": Method("the most probable tree of a bidirectional head", True, False, _exact, ("width", "tree")),
    "ngram": Method("what followed the last tokens before, without a head", False, None, _given, LOOKED_UP, "ngram"),
    "autoregressive": Method("no draft", False, None, _given, NO_DRAFT),
}


def usual(head, wants_tree: bool) -> str:
    """Returns the method of a head where none is given: its family, or jetspec where options ask for a tree."""
    return "jetspec" if head.config.causal or wants_tree else "dflash"


def tree(name: str, given: TreeConfig, head) -> TreeConfig:
    """Returns the tree that a method draws with a head.

    Raises:
      ConfigError: the head's block is not what the method needs.
    """
    method = METHODS[name]
    if method.causal not in (None, head.config.causal):
        block = "causal" if head.config.causal else "bidirectional"
        raise ConfigError(f"method={name}: {head.source} is a {block} head; use --method jetspec")
    return method.tree(given, head)
