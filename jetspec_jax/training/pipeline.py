"""The stages of a training run: prompts, answers, features, training, export.

    WORKDIR/pool.jsonl, pool.json     prompts of the demo's pool, and their counts by source with licences
    WORKDIR/own.jsonl                 prompts that the target wrote itself
    WORKDIR/answers/, answers.json    answers of the target, and their counts
    WORKDIR/features/                 features of the target, where they are kept in files
    WORKDIR/scale.npy                 root mean square of the tapped channels
    WORKDIR/train/                    settings.json, checkpoints and metrics.jsonl
    WORKDIR/head/                     the head in the published format, with its model card

A scorer of counts needs no features and no training: after the answers comes its head, with the counts beside it.

A stage whose output is complete is skipped; one that was cut off goes on. What an output was made with lies beside it
(`manifest`): a command with other settings is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.engine import spread
from jetspec_jax.evals import acceptance
from jetspec_jax.fields import shown
from jetspec_jax.files import demo, load, pair
from jetspec_jax.files import mesh as on_mesh
from jetspec_jax.layers.numerics import narrow
from jetspec_jax.models import sharding
from jetspec_jax.models.qwen3 import Qwen3Target
from jetspec_jax.training import counting, export, features, files, gather, loop, manifest, objective, teacher
from jetspec_jax.training import recipe as recipes
from jetspec_jax.training.checkpoints import any_saved
from jetspec_jax.training.data import packing
from jetspec_jax.training.data.batches import Batches
from jetspec_jax.training.data.packing import Packed
from jetspec_jax.training.objective import Objective
from jetspec_jax.training.recipe import Recipe
from jetspec_jax.training.settings import Settings
from jetspec_jax.training.teacher import Features

MEMORY_SHARE = 0.82  # of the device, for features; the rest is for the step

Log = Callable[[str], None]


@narrow
def run(config: Settings, workdir: Path, log: Log) -> bool:
    """Runs all stages up to `config.until`, or as far as `config.max_minutes` allows; True when all are done.

    Raises:
      ConfigError: a value, file or set of stored outputs does not fit.
      loop.TrainingError: training cannot go on.
    """
    config.check_files()
    try:
        workdir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--workdir={shown(str(workdir))[1:-1]}: cannot be made ({error.strerror}); give a folder to write to"
        ) from None
    lead = jax.process_index() == 0
    with files.alone(workdir) if lead else contextlib.nullcontext():
        return _run(config, workdir, log)


def _run(config: Settings, workdir: Path, log: Log) -> bool:
    begin = time.monotonic()

    def on_time() -> bool:
        return not config.max_minutes or time.monotonic() - begin < 60 * config.max_minutes

    if config.until == "pool":
        gather.source(config, workdir, log)
        return True
    mesh = _mesh(config, workdir)
    target = _target(config, mesh)
    # Said once, so that answers, rows and the exported head agree with how decoding will render prompts.
    mode = pair.thinking(target, None, config.thinking_switch)
    config = dataclasses.replace(config, thinking={None: "default", True: "on", False: "off"}[mode])
    learns = objective.load(objective.module(config.family_name))
    config.check_target(target.config, target.eos)
    head = learns.configure(config, target.config)
    start = _start(config, target, learns, head)
    if config.decode_prompts:
        _decoded(config, target, mode)  # a file that cannot be read is noticed now
    read = gather.source(config, workdir, log)

    found = gather.gather(config, workdir, target, read, on_time, log)
    if found is None:
        log("answers: time is up; the same command goes on")
        return False
    if config.until == "answers":
        return True
    packed, judged = _sequences(config, found, log)
    if config.counted:
        return _count(config, workdir, target, learns.decide(head, packed)["scorer"], packed, found.counts, log)

    # ---- what is learnt is settled
    packed = _fitting(packed, target, head, mesh, log) if config.features == "memory" else packed
    steps = config.steps or math.ceil(config.epochs * len(packed.tokens) / config.batch)
    begun = any_saved(workdir / "train")
    decided = learns.decide(head, packed)
    decided = {name: start[name] for name in decided} if start else decided
    _settle(workdir / "train", manifest.recipe(config, target, head, steps, packed, decided), begun, log)
    assert isinstance(target.model, Qwen3Target)  # the teacher runs its layers over packed documents
    recipe = recipes.make(
        config, target.model, target.dtype, head, steps, teacher.kernel(config.attention, target.dtype)
    )
    scale = _scale(workdir / "scale.npy", begun, config, target, packed, recipe)

    made = _features(config, workdir, target, packed, recipe, mesh, on_time, log)
    if made is None:
        log("features: time is up; the same command goes on")
        return False
    kept, stored = made
    batches = Batches(
        packed, config.batch, config.accumulate, config.seed, stored, jax.process_index(), jax.process_count()
    )
    plan = loop.Plan(
        config.log_every, config.eval_every, config.save_every, judged, config.eval_budgets, config.eval_width,
        config.resume_step,
    )  # fmt: skip
    begun_at = time.monotonic()
    given = loop.Given(target, scale, batches, kept, learns.unfold(start, scale) if start else None, decided)
    outcome = loop.train(recipe, given, workdir / "train", plan, mesh, on_time, log)
    at = int(outcome.state.step)
    log(f"train: step {at} of {steps}, {time.monotonic() - begun_at:.0f} s")
    del given, kept, made

    # ---- export: also of an unfinished head, so that a machine that goes away leaves one
    if at == 0:
        return False
    params, saved = outcome.state.params, at
    if config.export == "best" and outcome.best is not None:
        params, saved = outcome.best, outcome.notes["best_step"]
    params = params if jax.process_count() == 1 else spread.fetch(params)
    made_of = target, recipe, export.Trained(params, scale, saved, at), config, found.counts
    if jax.process_index() == 0:
        export.write(workdir / "head", *made_of)
    spread.meet("export")
    unfinished = "" if at == steps else f"; unfinished: the run is at step {at} of {steps}"
    log(f"export: {workdir / 'head'} (step {saved}{unfinished})")
    if at == steps and config.decode_prompts:
        export.write(workdir / "head", *made_of, _decode(config, workdir, target, log))
    return at == steps


def _count(config: Settings, workdir: Path, target, found, packed: Packed, counts: dict[str, Any], log: Log) -> bool:
    """Writes the head of `init_head` with counts beside it, decodes with it if asked to; then all is done."""
    if jax.process_index() == 0:
        counting.write(workdir / "head", load.find(config.init_head), found, config, counts)
    spread.meet("counts")
    log(f"counts: {workdir / 'head'}, out of {int(packed.paired.sum()):,} pairs of tokens")
    if config.decode_prompts:
        _decode(config, workdir, target, log)
    return True


def _sequences(config: Settings, found: gather.Examples, log: Log) -> tuple[Packed, Packed | None]:
    """Packed sequences to train on, and those that are judged."""
    length = config.sequence_length
    packed = packing.pack(found.train, length)
    judged = packing.pack(found.heldout, length) if found.heldout and config.eval_sequences else None
    if judged is not None:
        judged = judged.sample(config.eval_sequences)
    found.counts.update(tokens=int(packed.learnt.sum()), sequences=len(packed.tokens))
    filled = float((packed.document > 0).mean())
    log(
        f"data: {len(found.train):,} examples with {found.counts['tokens']:,} supervised tokens in "
        f"{len(packed.tokens):,} sequences of {length} ({filled:.0%} full); {len(found.heldout):,} examples held out"
    )
    return packed, judged


def _features(  # noqa: PLR0913  # what a run has made before this stage
    config: Settings, workdir: Path, target, packed: Packed, recipe: Recipe, mesh, on_time, log: Log
) -> tuple[Features | None, features.Stored | None] | None:
    """Features that are kept on the devices or in files, where they are; None when time ran out."""
    taps, began = recipe.head.tap_layers, time.monotonic()
    if config.features == "memory":
        over = sharding.split(mesh)

        def place(shape, dtype) -> jax.Array:
            return jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=over)()

        def put(x) -> jax.Array:
            return jax.device_put(x, over)

        batch = config.feature_batch * mesh.shape["data"]
        kept = features.resident(target, packed, taps, batch, recipe.attention, place, put)
        size = sum(x.nbytes for x in kept) / 2**30
        log(f"features: {len(packed.tokens):,} sequences, {size:.1f} GiB, {time.monotonic() - began:.0f} s")
        return kept, None
    if config.features == "disk":
        folder = workdir / "features"
        done = features.write(
            folder, target, packed, taps, config.feature_batch, recipe.attention, on_time=on_time, log=log,
        )  # fmt: skip
        return (None, features.Stored(folder, target, packed, taps)) if done else None
    return None, None


def _start(config: Settings, target, learns: Objective, head) -> dict | None:
    """Parameters of the head to go on from; None where there is none. The scorer of a frozen head is not among them.

    Raises:
      ConfigError: it is another kind of head than this run's.
    """
    if not config.init_head:
        return None
    try:
        found = load.load_head(config.init_head, target)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"--config.init_head: {error}") from None
    params, sizes = found.params, found.config
    if "scorer" in params and (config.frozen_head or not config.scorer_rank):  # a new one is trained, or none
        params = {name: x for name, x in params.items() if name != "scorer"}
        sizes = dataclasses.replace(sizes, scorer_kind="", scorer_rank=0, scorer_width=0)
    if differs := learns.check_start(head, sizes):
        name, old, new = differs
        raise ConfigError(
            f"--config.init_head={config.init_head}: its {name} is {old}, this run's {new}; make them equal"
        )
    return params


def _mesh(config: Settings, workdir: Path) -> jax.sharding.Mesh:
    devices, model = jax.device_count(), config.model_parallel
    if config.mesh:
        try:
            mesh = sharding.mesh_of(config.mesh)
        except ConfigError as error:
            raise ConfigError(f"--config.{error}") from None
    elif devices % model:
        raise ConfigError(f"--config.model_parallel={model}: it must divide the number of devices, {devices}")
    else:
        mesh = sharding.make_mesh(model)
    part, groups = config.batch // config.accumulate, mesh.shape["data"]
    if part % groups:
        raise ConfigError(
            f"--config.batch={config.batch}: {part} sequences at a time do not split over {groups} devices"
        )
    if jax.process_count() > 1:
        _check_processes(config, workdir, mesh)
    return mesh


def _check_processes(config: Settings, workdir: Path, mesh) -> None:
    """Raises ConfigError for what several processes do not do together."""
    count, groups = jax.process_count(), mesh.shape["data"]
    if groups % count:
        raise ConfigError(
            f"--config.mesh: data={groups} does not split over {count} processes, each of which reads rows of its own"
        )
    stages = {"pool": not config.data, "answers": config.answers == "target"}
    for stage in (stage for stage, needed in stages.items() if needed):
        if not (workdir / f"{stage}.json").is_file():
            raise ConfigError(
                f"{workdir / stage}.json is not there, and several processes do not make it; run "
                f"--config.until={stage} in one first"
            )
    if config.decode_prompts:
        raise ConfigError(
            "--config.decode_prompts: several processes train alone; leave it out, and use decode.py after"
        )


def _target(config: Settings, mesh) -> load.LoadedTarget:
    """The target on the mesh, each device's part read alone; XLA splits the work of the layers."""
    source = config.target or demo.fetch_target()
    if mesh.size == 1:
        return load.load_target(source, config.dtype or None)
    dtype = config.dtype or (None if jax.default_backend() == "cpu" else "bfloat16")
    return on_mesh.for_training(load.load_target(source, dtype, "xla", mesh=mesh))


def _settle(folder: Path, values: dict[str, Any], begun: bool, log: Log) -> None:
    """Refuses another recipe than that of the checkpoints in the folder; writes it where none is compared."""
    if jax.process_index() and not begun:
        return  # the first process writes
    path = folder / manifest.FILE
    if not manifest.sign(path, values, "use a new --workdir, or the old value", begun):
        log(f"train: {folder} is of a version that kept no {path.name}; its settings are taken to be the present ones")
        files.write_json(path, values)


def _scale(path: Path, begun: bool, config: Settings, target, packed: Packed, recipe: Recipe) -> jax.Array:
    """The scale of the run's first command: a resumed run must not move its coordinates by a rounding."""
    taps = recipe.head.tap_layers
    if not begun:
        found = features.scale(target, packed, taps, config.scale_sequences, config.feature_batch, recipe.attention)
        if jax.process_index() == 0:
            with files.whole(path) as unfinished:
                np.save(unfinished, np.asarray(found))
        spread.meet("scale")
    try:
        stored = np.load(path)
    except (OSError, EOFError, ValueError) as error:  # gone, empty or cut short
        raise ConfigError(
            f"{path}: cannot be read ({str(error).splitlines()[0]}), and the checkpoints in {path.parent / 'train'} "
            "need it; copy it back, or use a new --workdir"
        ) from None
    if stored.size != len(taps) * recipe.head.hidden_size:
        raise ConfigError(f"{path}: made for other taps ({stored.size} channels); use a new --workdir")
    return jnp.asarray(stored)


def _fitting(packed: Packed, target, head, mesh, log: Log) -> Packed:
    """As many sequences as the devices hold features of."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    sequence = (len(head.tap_layers) + 1) * head.hidden_size * jnp.dtype(target.dtype).itemsize * packed.tokens.shape[1]
    room = int(MEMORY_SHARE * limit / sequence) * mesh.shape["data"] if limit else len(packed.tokens)
    if room >= len(packed.tokens):
        return packed
    log(f"features: memory for {room:,} of {len(packed.tokens):,} sequences, drawn at random")
    chosen = np.sort(np.random.default_rng(0).permutation(len(packed.tokens))[:room])
    return packed.select(chosen)


def _decoded(config: Settings, target, mode: bool | None) -> list[list[int]]:
    """Token ids of the prompts that the finished head decodes."""
    try:
        ids = acceptance.read(target, config.decode_prompts, config.decode_limit, config.max_prompt_tokens, mode)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"--config.decode_prompts={config.decode_prompts}: {error}") from None
    return ids


def _decode(config: Settings, workdir: Path, target, log: Log) -> dict[str, Any]:
    """Decodes prompts for real with the exported head; the figures lie beside it and go into its card."""
    head = load.load_head(workdir / "head", target)
    ids = _decoded(config, target, pair.thinking(target, head, None))
    tree = TreeConfig(config.decode_budget)
    found = acceptance.measure(target, head, ids, tree, SamplingConfig(config.max_new_tokens), min(32, len(ids)))
    del found["token_ids"]
    found |= {"set": Path(config.decode_prompts).name, "budget": config.decode_budget}
    found |= {"max_new_tokens": config.max_new_tokens, "hardware": export.hardware()}
    files.write_json(workdir / "decode.json", found)
    low, high = found["interval_95"]
    log(
        f"decode: acceptance length {found['acceptance_length']:.2f} ({low:.2f}-{high:.2f}) at budget "
        f"{config.decode_budget}, {found['prompts']} prompts, {found['rounds']} rounds"
    )
    return found
