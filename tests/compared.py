"""Requests of a comparison made by hand: ten plain steps of a second each, and trees beside them."""

import dataclasses

from jetspec_jax.evals import ledger, summary
from jetspec_jax.evals.drafters import Cell

BASE = ledger.Request(
    session=1, set="a", prompt=0, id=None, prompt_tokens=10, temperature=0.0, drafter="autoregressive",
    method="autoregressive", shape="plain", nodes=1, depth=0, new_tokens=11, rounds=10, finish_reason="length",
    prefill=0.5, decode=10.0, accept_lengths=(1,) * 10, emitted=(1,) * 10, peak_bytes=None, verdict="plain",
    parted_at=None, margin=None, lost=None, score=None, token_ids=(), text="",
)  # fmt: skip
PLAIN, TREE = BASE.cell, Cell("jetspec", "jetspec", "tree", 8)
SETTINGS = {"sets": {"a": [2, ""]}, "sampling": {"temperature": [0.0]}, "cells": [list(PLAIN), list(TREE)]}


def tree(accepted, decode, **change):
    """A request of a tree of depth 5 whose rounds accepted so many drafts, all given out."""
    lengths = tuple(n + 1 for n in accepted)
    values = {
        "drafter": "jetspec", "method": "jetspec", "shape": "tree", "nodes": 8, "depth": 5, "rounds": len(lengths),
        "accept_lengths": lengths, "emitted": lengths, "new_tokens": 1 + sum(lengths), "decode": decode,
        "verdict": "equal",
    }  # fmt: skip
    return dataclasses.replace(BASE, **values | change)


def of(*requests, **settings):
    return summary.of(ledger.Run(SETTINGS | settings, list(requests)))
