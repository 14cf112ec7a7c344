"""Every key of a configuration reaches what it configures: changed, it changes what a run hands on, or is refused."""

import dataclasses
import json
import re
import types
from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small import HEAD, RUN, WIDTH, Letters, batch, random_examples, target

from jetspec_jax.config import ConfigError
from jetspec_jax.evals import acceptance
from jetspec_jax.files import load
from jetspec_jax.training import counting, export, features, loop, pipeline, regenerate, settings, step
from jetspec_jax.training import recipe as recipes
from jetspec_jax.training.data import answers, own_prompts, packing, pool
from jetspec_jax.training.data import talks as talks_of_target
from jetspec_jax.training.losses import Mix
from jetspec_jax.training.objectives import block as learns


class Proof(NamedTuple):
    """What a key is changed to, what that must change, and what else is set in both runs."""

    value: object
    changes: str  # a name in the record of a run; "refused"; "step": the recipe and the program of the step
    base: Mapping = MappingProxyType({})


TEXTS = {"answers": "corpus", "text_loss": "all"}
DSPARK = {"family": "dspark", "markov_rank": 6}
EAGLE = {"family": "eagle3", "mask_token_id": -1, "block_size": 16, "draft_vocab": 32, "unroll": 3}
POOL = {"data": "", "prompt_sets": "SETS"}
PROOFS = {
    "seed": Proof(7, "recipe seed rows"),
    "max_minutes": Proof(1e-9, "on_time"),
    "until": Proof("answers", "stages"),
    "target": Proof("other", "target"),
    "dtype": Proof("bfloat16", "target"),
    "thinking": Proof("on", "asked"),
    "data": Proof("OTHER", "asked"),
    "prompt_sets": Proof("SETS", "pool", {"data": "", "prompt_sets": "SETS2"}),
    "code_prompts": Proof(5, "pool", POOL),
    "code_per_package": Proof(5, "pool", POOL),
    "chat_prompts": Proof(5, "pool", POOL),
    "documents": Proof(5, "pool", POOL),
    "own_prompts": Proof(3, "own", {"own_prompts": 2}),
    "own_temperature": Proof(0.5, "own", {"own_prompts": 2}),
    "max_prompts": Proof(3, "asked"),
    "answers": Proof("corpus", "packed"),
    "max_prompt_tokens": Proof(4, "asked answered"),
    "max_new_tokens": Proof(9, "answered"),
    "samples": Proof(2, "answered"),
    "temperature": Proof(0.3, "answered"),
    "dialogues": Proof(3, "held", {"sequence_length": 128, "dialogues": 2}),
    "answer_batch": Proof(3, "answered"),
    "save_batches": Proof(3, "answered"),
    "answer_head": Proof("HEAD", "answered"),
    "answer_budget": Proof(3, "answered"),
    "trim_loops": Proof(True, "packed", {"sequence_length": 64}),
    "drop_truncated": Proof(True, "packed", {"sequence_length": 64}),
    "text_loss": Proof("assistant", "packed", TEXTS),
    "sequence_length": Proof(64, "packed"),
    "heldout": Proof(0, "judged"),
    "features": Proof("disk", "features"),
    "feature_batch": Proof(3, "features"),
    "scale_sequences": Proof(3, "scale"),
    "family": Proof("dflash", "refused"),
    "head_layers": Proof(2, "step"),
    "taps": Proof(2, "refused", {"tap_layers": (), "taps": 1}),
    "tap_layers": Proof((1, 0), "step"),
    "block_size": Proof(5, "step"),
    "mask_token_id": Proof(7, "step"),
    "causal": Proof(False, "step"),
    "draft_vocab": Proof(30, "step decided", EAGLE),
    "markov_rank": Proof(5, "step", DSPARK),
    "markov_head": Proof("gated", "step", DSPARK),
    "scorer_rank": Proof(3, "step"),
    "scorer_width": Proof(4, "step", {"scorer_rank": 3}),
    "scorer_parents": Proof("others", "step", {"scorer_rank": 3}),
    "scorer_kind": Proof("markov", "step", {"scorer_rank": 3}),
    "scorer_strength": Proof(
        0.3,
        "counted",
        {"scorer_rank": 3, "scorer_kind": "counts", "steps": 0, "frozen_head": True, "init_head": "HEAD"},
    ),
    "frozen_head": Proof(True, "step", {"scorer_rank": 3, "init_head": "HEAD"}),
    "init_head": Proof("HEAD", "start"),
    "anchors": Proof(3, "step"),
    "window": Proof(5, "step"),
    "gamma": Proof(2.0, "step"),
    "unroll": Proof(2, "step", EAGLE),
    "unroll_decay": Proof(0.5, "step", EAGLE),
    "forward_kl": Proof(0.5, "step"),
    "reverse_kl": Proof(0.5, "step"),
    "cross_entropy": Proof(0.5, "step"),
    "total_variation": Proof(0.5, "step"),
    "confidence": Proof(0.5, "step", DSPARK),
    "loss_temperature": Proof(2.0, "step"),
    "loss_chunk": Proof(8, "step"),
    "steps": Proof(9, "step"),
    "epochs": Proof(3.0, "step", {"steps": 0, "epochs": 1.0}),
    "batch": Proof(4, "rows"),
    "accumulate": Proof(2, "rows"),
    "peak_lr": Proof(0.5, "step"),
    "warmup": Proof(0.9, "step", {"steps": 40}),
    "final_lr": Proof(0.5, "step"),
    "beta1": Proof(0.5, "step"),
    "beta2": Proof(0.5, "step"),
    "weight_decay": Proof(0.5, "step"),
    "clip": Proof(0.5, "step"),
    "model_parallel": Proof(2, "refused"),
    "mesh": Proof("data=2", "refused"),
    "attention": Proof("cudnn", "recipe features scale"),
    "remat": Proof(False, "step"),
    "log_every": Proof(3, "plan"),
    "eval_every": Proof(3, "plan"),
    "save_every": Proof(3, "plan"),
    "eval_sequences": Proof(0, "judged"),
    "eval_budgets": Proof((2, 8), "plan"),
    "eval_width": Proof(3, "plan"),
    "decode_prompts": Proof("DECODED", "decoded"),
    "decode_limit": Proof(3, "decoded", {"decode_prompts": "DECODED"}),
    "decode_budget": Proof(3, "decoded", {"decode_prompts": "DECODED"}),
    "resume_step": Proof(3, "plan"),
    "export": Proof("last", "exported"),
    "license": Proof("mit", "card"),
}


def test_every_key_has_a_proof():
    assert list(PROOFS) == list(settings.KINDS), "say here what the new key changes"


def row(i: int) -> dict:
    """A conversation, or a text with the template's marks."""
    turns = [{"role": "user", "content": "q" * (1 + i % 5)}, {"role": "assistant", "content": "cd"}]
    return {"messages": turns} if i % 3 else {"text": "@a$>bc$@d$>ef$"}


class Thinker(Letters):
    knows_thinking = True


@pytest.fixture
def handed(tmp_path, monkeypatch):
    """A function from changed settings to what a run hands to its stages; nothing slow is done."""
    files = {name: tmp_path / name for name in ("ROWS.jsonl", "OTHER.jsonl", "DECODED.jsonl")}
    for count, path in zip((18, 17, 1), files.values(), strict=True):
        lines = [{"id": f"s/{i}"} | row(i) for i in range(count)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for name in ("SETS", "SETS2"):
        (tmp_path / name).mkdir()
    seen = {}
    put = lambda name, *values: seen.__setitem__(name, values)
    loaded = target()
    thinking = load.LoadedTarget(
        loaded.model, loaded.params, loaded.config, "float32", (1,), "tiny.gguf", "f00d", 0.0, lambda: Thinker()
    )
    monkeypatch.setattr(load, "load_target", lambda source, dtype: put("target", source, dtype) or thinking)
    config = learns.configure(settings.make(RUN | {"data": "d"}, "c"), loaded.config)
    head = types.SimpleNamespace(config=config, params={"fc": jnp.ones((32, 16))}, source="HEAD", metadata={})
    monkeypatch.setattr(load, "load_head", lambda source, target: head)
    talks = [{"id": f"p/{i}", "messages": [{"role": "user", "content": "a" * (i % 5 + 1)}]} for i in range(12)]
    monkeypatch.setattr(pool, "build", lambda *given: put("pool", *given) or (talks, {}))
    monkeypatch.setattr(pool, "Forbidden", lambda folder: types.SimpleNamespace(matches=None, digest=folder.name))
    monkeypatch.setattr(own_prompts, "write", lambda target, *given: put("own", *given[:4]) or talks[:2])
    monkeypatch.setattr(talks_of_target, "write", lambda target, firsts, *given: put("held", firsts, given[1]) or True)
    real_ask = regenerate.ask

    def ask(target, rows, longest, thinking):
        found = real_ask(target, rows, longest, thinking)
        put("asked", found.ids, longest, thinking)
        return found

    def answer(target, prompts, folder, on_time, log, **options):
        put("on_time", on_time())
        put("answered", {k: str(v) for k, v in options.items()})
        bodies = [
            [*range(4, 9), 1],
            [5, 6, 7, 8] * 8,
            [9, 9, 4, 6],
        ]  # one that ends, a loop that is cut, one that is cut
        bodies[1] = bodies[1] if seen["long"] else bodies[1][:8]
        rows = [np.array([*p, *bodies[i % 3]], np.uint16) for i, p in enumerate(prompts)]
        one = lambda f: np.array([f(i) for i in range(len(rows))])
        known = answers.join(
            rows, one(int), one(lambda i: 0), one(lambda i: len(prompts[i])), one(lambda i: rows[i].size),
            one(lambda i: i % 3 == 0), one(lambda i: False),
        )  # fmt: skip
        answers.write(folder, 0, known)
        return True

    def train(recipe, given, folder, plan, mesh, on_time, log):
        put("recipe", recipe)
        put("seed", given.data.identities(0))
        put("rows", given.data[0].rows.tolist())
        put("start", given.start is None)
        put("decided", {name: value.tolist() for name, value in given.decided.items()})
        packed = given.data._packed
        put("packed", packed.tokens.tolist(), packed.learnt.tolist())
        put("judged", None if plan.heldout is None else plan.heldout.tokens.tolist())
        put("plan", [getattr(plan, f) for f in PLAN])
        state = types.SimpleNamespace(step=recipe.steps, params="last")
        return types.SimpleNamespace(state=state, best="best", notes={"best_step": 1})

    def write(folder, target, recipe, trained, config, counts, measured=None):
        put("exported", trained.params, trained.step)
        trained = trained._replace(params=None)
        put("card", export._card(target, recipe, trained, config, counts, [], measured, 0).partition("# Draft")[0])

    def read(target, path, limit, longest, mode):
        put("decoded", path, limit, longest, mode)
        return [[4, 5]]

    def measure(target, head, ids, tree, sampling, batch):
        seen["decoded"] += (tree.budget, sampling.max_new_tokens)
        return {"token_ids": [], "interval_95": (1, 2), "acceptance_length": 1.5, "prompts": 1, "rounds": 1}

    monkeypatch.setattr(regenerate, "ask", ask)
    monkeypatch.setattr(regenerate, "regenerate", answer)
    monkeypatch.setattr(features, "scale", lambda t, p, taps, *given: put("scale", *given) or jnp.ones(16 * len(taps)))
    kept = features.Features(jnp.ones(1), jnp.ones(1))
    monkeypatch.setattr(features, "resident", lambda t, p, *given: put("features", "memory", *given[:3]) or kept)
    monkeypatch.setattr(features, "write", lambda f, t, p, *given, **_: put("features", "disk", *given[:3]) or True)
    monkeypatch.setattr(features, "Stored", lambda *given: None)
    monkeypatch.setattr(loop, "train", train)
    monkeypatch.setattr(load, "find", lambda source: source)
    counted = lambda folder, head, found, made, data: put("counted", head, found["next"].shape, made.scorer_strength)
    monkeypatch.setattr(counting, "write", counted)
    monkeypatch.setattr(export, "write", write)
    monkeypatch.setattr(acceptance, "read", read)
    monkeypatch.setattr(acceptance, "measure", measure)
    number = iter(range(1000))

    def run(**change):
        seen.clear()
        named = {n: str(tmp_path / f"{n}.jsonl") for n in ("OTHER", "DECODED")}
        named |= {n: str(tmp_path / n) for n in ("SETS", "SETS2")}
        change = {k: named.get(v, v) if isinstance(v, str) else v for k, v in change.items()}
        made = settings.make(RUN | {"data": str(tmp_path / "ROWS.jsonl")} | change, "c")
        seen["long"] = made.sequence_length > WIDTH
        try:
            pipeline.run(made, tmp_path / f"run{next(number)}", lambda line: None)
        except ConfigError as error:
            seen["refused"] = str(error)
        seen["stages"] = sorted(seen)
        return dict(seen)

    return run


PLAN = ("log_every", "eval_every", "save_every", "budgets", "width", "resume_step")
EXAMPLES = packing.pack(random_examples(6), WIDTH)


def program(recipe) -> str:
    """The traced step, which holds every number that the recipe gives it."""
    count = len(recipe.head.tap_layers) * HEAD.hidden_size
    decided = recipe.learns.decide(recipe.head, EXAMPLES)
    state = jax.eval_shape(lambda params: step.init(recipe, params, None, decided), target().params)
    given = target().params, jnp.ones(count), state, batch(EXAMPLES, [0, 1])
    traced = jax.make_jaxpr(step.update, static_argnums=0)(recipe, *given)
    return re.sub("0x[0-9a-f]+", "", str(traced)) + str([float(recipe.schedule(i)) for i in range(0, 50, 7)])


def test_every_key_reaches_what_it_configures(handed):
    bases, programs = {}, {}

    def traced(recipe):
        if recipe not in programs:
            programs[recipe] = program(recipe)
        return programs[recipe]

    for key, proof in PROOFS.items():
        if str(proof.base) not in bases:
            bases[str(proof.base)] = handed(**proof.base)
        base = bases[str(proof.base)]
        assert "refused" not in base, (key, base.get("refused"))
        changed = handed(**dict(proof.base) | {key: proof.value})
        names = proof.changes.split()
        for name in ["recipe" if name == "step" else name for name in names]:
            assert str(changed.get(name)) != str(base.get(name)), (key, name)
        if "refused" in names:
            assert re.search(f"--config.{key}=|--config.causal=", changed["refused"]), changed["refused"]
        if "step" in names:
            assert traced(base["recipe"][0]) != traced(changed["recipe"][0]), key
    again = handed()
    assert program(again["recipe"][0]) == traced(again["recipe"][0])  # equal settings, equal programs


def test_every_number_of_the_recipe_is_the_setting_of_its_name():
    """A change shows that a key arrives somewhere; this, that no two of them are swapped."""
    given = {"forward_kl": 0.5, "reverse_kl": 0.25, "cross_entropy": 0.125, "loss_temperature": 1.5, "beta1": 0.7}
    given |= {"total_variation": 0.4, "unroll": 4, "unroll_decay": 0.9, "confidence": 0.3}
    given |= {"beta2": 0.8, "warmup": 0.3, "final_lr": 0.2, "weight_decay": 0.6, "clip": 3.0, "gamma": 5.0, "seed": 9}
    given |= {"window": 3, "frozen_head": True, "scorer_rank": 2, "scorer_parents": "others", "init_head": "x"}
    config = settings.make(RUN | given | {"data": "d", "remat": False}, "c")
    made = recipes.make(config, target().model, "float32", HEAD, 7, "xla")
    assert made.mix == Mix(forward_kl=0.5, reverse_kl=0.25, cross_entropy=0.125, temperature=1.5, total_variation=0.4)
    same = {f.name for f in dataclasses.fields(made)} & settings.KINDS.keys() - {
        "target",
        "dtype",
        "steps",
        "attention",
    }
    assert len(same) == 18 and all(getattr(made, name) == getattr(config, name) for name in same)
    assert (made.steps, made.attention, made.dtype) == (7, "xla", "float32")
