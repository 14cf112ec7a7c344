"""A family of heads lands as one module: training knows it by the functions of `objective.Objective` alone."""

import ast
import dataclasses
import pathlib
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import HEAD, WIDTH, random_examples, recipe, target

from jetspec_jax.config import ConfigError
from jetspec_jax.drafts import families
from jetspec_jax.models import sharding
from jetspec_jax.training import anchors, journal, loop, losses, objective, teacher
from jetspec_jax.training.data import packing
from jetspec_jax.training.data.batches import Batches

TRAINING = pathlib.Path(objective.__file__).parent
OBJECTIVES = {row.objective for row in families.FAMILIES if row.objective}


def test_every_objective_has_all_functions():
    assert {p.stem for p in (TRAINING / "objectives").glob("*.py")} - {"__init__"} == {
        name.rpartition(".")[2] for name in OBJECTIVES
    }
    wanted = {name for name in vars(objective.Objective) if not name.startswith("_")}
    for name in OBJECTIVES:
        assert wanted <= set(vars(objective.load(name)))
    with pytest.raises(ConfigError, match=r"--config.family=eagle9: choose one of jetspec, dflash"):
        objective.module("eagle9")


def test_training_names_no_family():
    """Who imports a head's types or an objective would have to change for the next family; their table names them."""
    for path in TRAINING.rglob("*.py"):
        if path.parent.name == "objectives":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import | ast.ImportFrom) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if names == ["families", "jetspec_jax.drafts"]:
                continue
            assert not any("drafts" in n or "objectives" in n or n == "HeadConfig" for n in names), path


@dataclasses.dataclass(frozen=True)
class Config:
    """Of a head that reads one feature row and knows no other slot."""

    tap_layers: tuple[int, ...] = (0, 1)
    depth: int = 2
    block_size: int = 3
    hidden_size: int = HEAD.hidden_size
    vocab_size: int = HEAD.vocab_size


def straight() -> types.ModuleType:
    """The objective of a family with one matrix a depth, written down here and nowhere else."""
    module = types.ModuleType("straight")
    module.configure = lambda settings, target: Config()
    module.check_start = lambda config, found: None
    module.decide = lambda config, packed: {}
    module.init = lambda config, key, target_params, decided: {
        "fc": 0.1 * jax.random.normal(key, (config.depth, 32, config.hidden_size))
    }
    module.fold = lambda params, scale, dtype: {"fc": (params["fc"] / scale[:, None]).astype(dtype)}
    module.unfold = lambda folded, scale: {"fc": folded["fc"] * scale[:, None]}

    def asked(part, places, depth, gamma):
        label = anchors.labels(places, part.tokens.shape[1], depth)
        return objective.Questions(places, label, anchors.weights(places, part.learnt, part.document, depth, gamma))

    def draw(recipe, target_params, part, keys):
        places = anchors.sample(keys, anchors.candidates(part.learnt, part.document), recipe.anchors)
        return asked(part, places, recipe.head.depth, recipe.gamma)

    def hidden(recipe, folded, part, features, asked):
        before = jnp.take_along_axis(features.taps, jnp.maximum(asked.inputs.position - 1, 0)[..., None], 1)
        return jnp.einsum("baf,dfe->bade", before, folded["fc"])

    def logits(recipe, target_params, folded, hidden, asked):
        return losses.Logits((losses.Term(hidden, teacher.unembedding(target_params)),))

    module.draw, module.hidden, module.logits = draw, hidden, logits
    module.confidence = lambda recipe, folded, hidden, asked: None
    module.by_path = lambda config: False
    module.ask = lambda recipe, p, part, place, valid: asked(
        part, anchors.Anchors(place, valid), recipe.head.depth, 0.0
    )
    module.work = lambda recipe, sequences, length: {
        "head_forward": 1.0,
        "head_backward": 2.0,
        "slots": 8.0,
        "table": 4.0,
    }
    module.describe = lambda recipe: {"rows": "one"}
    return module


def test_a_new_family_trains_and_is_evaluated(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "straight", straight())
    row = families.Family("straight", None, objective="straight")
    monkeypatch.setattr(families, "FAMILIES", (*families.FAMILIES, row))
    r = recipe(steps=30, head=Config(), objective=objective.module("straight"), peak_lr=0.1)
    packed = packing.pack(random_examples(6), WIDTH)
    plan = loop.Plan(10, 30, 30, packed, budgets=(2, 4), width=4)
    given = loop.Given(target(), jnp.linspace(1, 2, 32), Batches(packed, 4, 1, 0))
    outcome = loop.train(r, given, tmp_path, plan, sharding.make_mesh(1, jax.devices()[:1]))
    curve = [record["loss"] for record in journal.read(tmp_path)]
    assert curve[-1] < 0.9 * curve[0] and outcome.best is not None
    assert set(journal.read(tmp_path)[-1]["heldout"]["acceptance"]) == {"2", "4"}
    assert np.isfinite(outcome.state.params["fc"]).all()
