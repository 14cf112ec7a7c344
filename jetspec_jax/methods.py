"""What `--method` names: a drafter, the tree that it draws, and the options that contradict it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

from jetspec_jax.options import MAX_BUDGET, ConfigError, TreeConfig


class Method(NamedTuple):
    """A drafter and its tree, as `--method` names them.

    families: of the heads that it drafts with; none where it needs no head. tree: the tree that it draws, out of what
    the options say. refused: options that contradict it. drafter: the family without files that drafts. sequential:
    whether every drafted depth is a pass of its own.
    """

    help: str
    families: tuple[str, ...]
    tree: Callable[[TreeConfig, Any], TreeConfig]
    refused: tuple[str, ...]
    drafter: str | None = None
    sequential: bool = False

    @property
    def head(self) -> bool:
        """Whether it drafts with a head."""
        return bool(self.families)


def _given(tree: TreeConfig, head) -> TreeConfig:
    return tree


def _chain(tree: TreeConfig, head) -> TreeConfig:
    return dataclasses.replace(tree, budget=(tree.depth or head.draft.depth) + 1, width=1, builder="best_first")


def _exact(tree: TreeConfig, head) -> TreeConfig:
    """No sibling is cut off: a node can use no more children than the tree has rows."""
    return dataclasses.replace(tree, width=MAX_BUDGET, builder="best_first")


SHAPED = ("budget", "width", "tree")
NO_DRAFT = (
    "head", "budget", "width", "depth", "tree", "sharpness", "window", "scorer", "budget_rule", "prune", "trace",
    "show_tree", "tree_svg", "compare",
)  # fmt: skip
LOOKED_UP = ("head", "width", "tree", "sharpness", "window", "scorer", "budget_rule", "prune")
METHODS = {  # the first of a family's that draws a tree is the one for options that ask for a tree
    "jetspec": Method("a tree from a head's block", ("jetspec", "dflash"), _given, ()),
    "dflash": Method("the chain of a bidirectional head", ("dflash",), _chain, (*SHAPED, "budget_rule")),
    "ddtree": Method("the most probable tree of a bidirectional head", ("dflash",), _exact, ("width", "tree")),
    "eagle3": Method("the dynamic tree of an EAGLE-3 head", ("eagle3",), _given, ("tree",), sequential=True),
    "dspark": Method("the chain of a DSpark head", ("dspark",), _chain, (*SHAPED, "budget_rule")),
    "pctree": Method(
        "the tree of a DSpark head, in which siblings have children of their own", ("dspark",), _given, ("tree",)
    ),
    "ngram": Method("what followed the last tokens before, without a head", (), _given, LOOKED_UP, "ngram"),
    "autoregressive": Method("no draft", (), _given, NO_DRAFT),
}


def usual(head, wants_tree: bool) -> str:
    """Returns the method of a head where none is given: its family, or what draws a tree where options ask for one."""
    drawing = (name for name, row in METHODS.items() if head.family in row.families and "budget" not in row.refused)
    return next(drawing, head.family) if wants_tree else head.family


def tree(name: str, given: TreeConfig, head) -> TreeConfig:
    """Returns the tree that a method draws with a head.

    Raises:
      ConfigError: the head's family is none that the method drafts with.
    """
    method = METHODS[name]
    if head.family not in method.families:
        fitting = " or ".join(other for other, row in METHODS.items() if head.family in row.families)
        raise ConfigError(f"method={name}: the family of {head.source} is {head.family}; use --method {fitting}")
    return method.tree(given, head)


def chain(name: str, nodes: int, head) -> tuple[TreeConfig, Any]:
    """Returns the chain of a method's drafter, and the drafter as it draws it: one guess a depth, no siblings.

    Args:
      name: of the method.
      nodes: that the chain may have, the root included; it is no longer than the drafter can draft.
      head: the drafter.
    """
    depth = min(nodes - 1, head.draft.depth)
    if not METHODS[name].head:  # its tree is made of matches, and the best of them alone is a chain
        head = dataclasses.replace(head, draft=dataclasses.replace(head.draft, matches=1))
    return TreeConfig(depth + 1, width=1, depth=depth), head
