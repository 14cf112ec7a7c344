"""The stages of a training run: prompts, answers, features, training, export.

    WORKDIR/pool.jsonl, pool.json     prompts of the demo's pool, and their counts by source with licences
    WORKDIR/own.jsonl                 prompts that the target wrote itself
    WORKDIR/answers/, answers.json    answers of the target, and their counts
    WORKDIR/features/                 features of the target, where they are kept in files
    WORKDIR/scale.npy                 root mean square of the tapped channels
    WORKDIR/train/                    settings.json, checkpoints and metrics.jsonl
    WORKDIR/head/                     the head in the published format, with its model card

A stage whose output is complete is skipped; one that was cut off goes on. What an output was made with lies beside it
(`manifest`): a command with other settings is refused.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import itertools
import json
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jetspec_jax.config import ConfigError, SamplingConfig, TreeConfig
from jetspec_jax.evals import acceptance, formats
from jetspec_jax.files import demo, load, pair
from jetspec_jax.models import sharding
from jetspec_jax.training import export, features, files, loop, manifest, objective, regenerate, teacher
from jetspec_jax.training import recipe as recipes
from jetspec_jax.training.checkpoints import any_saved
from jetspec_jax.training.data import answers as answer_store
from jetspec_jax.training.data import examples, own_prompts, packing, pool, rows
from jetspec_jax.training.data.batches import Batches
from jetspec_jax.training.data.examples import Example
from jetspec_jax.training.data.packing import Packed
from jetspec_jax.training.objective import Objective
from jetspec_jax.training.settings import Settings

MEMORY_SHARE = 0.82  # of the device, for features; the rest is for the step

Log = Callable[[str], None]


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
            f"--workdir={workdir}: cannot be made ({error.strerror}); give a folder to write to"
        ) from None
    lead = jax.process_index() == 0
    with files.alone(workdir) if lead else contextlib.nullcontext():
        return _run(config, workdir, log)


def _run(config: Settings, workdir: Path, log: Log) -> bool:
    begin = time.monotonic()
    on_time = lambda: not config.max_minutes or time.monotonic() - begin < 60 * config.max_minutes
    if config.until == "pool":
        _source(config, workdir, log)
        return True
    mesh = _mesh(config)
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
    source = _source(config, workdir, log)

    # ---- examples: the rows' own answers, or the target's
    if config.answers == "corpus":
        known, report = examples.build(
            itertools.islice(rows.read(source), config.max_prompts or None), target.tokenizer, target.eos,
            config.sequence_length, config.thinking_switch, config.text_loss,
        )  # fmt: skip
        for line in report.lines():
            log(line)
        counts: dict[str, Any] = {"input": report.read, "used": report.used, "dropped": dict(report.dropped)}
    else:
        answered = _answers(config, workdir, target, source, on_time, log)
        if answered is None:
            log("answers: time is up; the same command goes on")
            return False
        known, counts = answered
    if config.until == "answers":
        return True

    # ---- sequences
    train, heldout = _split(known, config)
    length = config.sequence_length
    packed = packing.pack(train, length)
    judged = packing.pack(heldout, length) if heldout and config.eval_sequences else None
    if judged is not None:
        judged = judged.sample(config.eval_sequences)
    filled = float((packed.document > 0).mean())
    counts |= {
        "examples": len(train),
        "heldout": len(heldout),
        "tokens": int(packed.learnt.sum()),
        "sequences": len(packed.tokens),
        "longest": max(e.tokens.size for e in train),
        "sources": _sources(train),
    }
    log(
        f"data: {len(train):,} examples with {counts['tokens']:,} supervised tokens in {len(packed.tokens):,} "
        f"sequences of {length} ({filled:.0%} full); {len(heldout):,} examples held out"
    )

    # ---- what is learnt is settled
    if config.features == "memory":
        packed = _fitting(packed, target, head, mesh, log)
    steps = config.steps or math.ceil(config.epochs * len(packed.tokens) / config.batch)
    begun = any_saved(workdir / "train")
    _settle(workdir / "train", manifest.recipe(config, target, head, steps, packed), begun, log)

    # ---- features
    attention = teacher.kernel(config.attention, target.dtype)
    scale = _scale(workdir / "scale.npy", begun, config, target, packed, head, attention)
    kept, stored = None, None
    filled_from = time.monotonic()
    if config.features == "memory":
        place = lambda shape, dtype: jax.jit(lambda: jnp.zeros(shape, dtype), out_shardings=sharding.split(mesh))()
        put = lambda x: jax.device_put(x, sharding.split(mesh))
        batch = config.feature_batch * mesh.shape["data"]
        kept = features.resident(target, packed, head.tap_layers, batch, attention, place, put)
        size = sum(x.nbytes for x in kept) / 2**30
        log(f"features: {len(packed.tokens):,} sequences, {size:.1f} GiB, {time.monotonic() - filled_from:.0f} s")
    elif config.features == "disk":
        done = features.write(
            workdir / "features", target, packed, head.tap_layers, config.feature_batch, attention,
            jax.process_index(), jax.process_count(), on_time, log,
        )  # fmt: skip
        if not done:
            log("features: time is up; the same command goes on")
            return False
        stored = features.Stored(workdir / "features", target, packed, head.tap_layers)

    # ---- training
    recipe = recipes.make(config, target.model, target.dtype, head, steps, attention)
    batches = Batches(
        packed, config.batch, config.accumulate, config.seed, stored, jax.process_index(), jax.process_count()
    )
    plan = loop.Plan(
        config.log_every, config.eval_every, config.save_every, judged, config.eval_budgets, config.eval_width,
        config.resume_step,
    )  # fmt: skip
    begun_at = time.monotonic()
    initial = learns.unfold(start, scale) if start else None
    outcome = loop.train(recipe, target, scale, batches, kept, workdir / "train", plan, mesh, initial, on_time, log)
    at = int(outcome.state.step)
    log(f"train: step {at} of {steps}, {time.monotonic() - begun_at:.0f} s")
    del kept

    # ---- export: also of an unfinished head, so that a machine that goes away leaves one
    if at == 0:
        return False
    params, saved = outcome.state.params, at
    if config.export == "best" and outcome.best is not None:
        params, saved = outcome.best, outcome.notes["best_step"]
    export.write(workdir / "head", target, recipe, params, saved, at, scale, config, counts)
    unfinished = "" if at == steps else f"; unfinished: the run is at step {at} of {steps}"
    log(f"export: {workdir / 'head'} (step {saved}{unfinished})")
    if at == steps and config.decode_prompts:
        _decode(config, workdir, target, log)
    return at == steps


def _start(config: Settings, target, learns: Objective, head) -> dict | None:
    """Parameters of the head to go on from; None where there is none.

    Raises:
      ConfigError: it is another kind of head than this run's.
    """
    if not config.init_head:
        return None
    try:
        found = load.load_head(config.init_head, target)
    except (ConfigError, OSError) as error:
        raise ConfigError(f"--config.init_head: {error}") from None
    if differs := learns.check_start(head, found.config):
        name, old, new = differs
        raise ConfigError(
            f"--config.init_head={config.init_head}: its {name} is {old}, this run's {new}; make them equal"
        )
    return found.params


def _mesh(config: Settings) -> jax.sharding.Mesh:
    devices, model = jax.device_count(), config.model_parallel
    if devices % model:
        raise ConfigError(f"--config.model_parallel={model}: it must divide the number of devices, {devices}")
    part = config.batch // config.accumulate
    if part % (devices // model):
        raise ConfigError(
            f"--config.batch={config.batch}: {part} sequences at a time do not split over {devices // model} devices"
        )
    return sharding.make_mesh(model)


def _target(config: Settings, mesh) -> load.LoadedTarget:
    """The target on the mesh; a model that needs several devices is read into the host's memory first."""
    source = config.target or demo.fetch_target()
    if mesh.size == 1:
        return load.load_target(source, config.dtype or None)
    dtype = config.dtype or (None if jax.default_backend() == "cpu" else "bfloat16")
    with jax.default_device(jax.local_devices(backend="cpu")[0]):
        target = load.load_target(source, dtype, "xla")  # our kernels say nothing about meshes
    return dataclasses.replace(target, params=jax.device_put(target.params, sharding.frozen(target.params, mesh)))


def _source(config: Settings, workdir: Path, log: Log) -> Path:
    """The rows to learn from; the demo's pool is built where none are given."""
    if config.data:
        return Path(config.data)
    path = workdir / "pool.jsonl"
    made = {name: getattr(config, name) for name in manifest.POOL}
    if path.exists():
        manifest.check(path.with_suffix(".settings.json"), made, _fix(path))
    else:
        found, counts = pool.build(
            Path(config.prompt_sets), config.code_prompts, config.code_per_package, config.chat_prompts
        )
        files.write_json(path.with_suffix(".json"), counts)
        manifest.write(path.with_suffix(".settings.json"), made)
        with files.whole(path) as unfinished:
            formats.write(unfinished, found)
    log(f"pool: {path}")
    return path


def _fix(output: Path) -> str:
    return f"remove {output} to make it anew, use a new --workdir, or the old value"


def _answers(
    config: Settings, workdir: Path, target, source: Path, on_time, log: Log
) -> tuple[list[Example], dict[str, Any]] | None:
    """Examples of the target's answers and their counts; None when time ran out."""
    folder, asking = workdir / "answers", manifest.prompts(config)
    if any(folder.glob("part-*.npz")):
        manifest.check(folder / manifest.FILE, asking, _fix(folder))
    else:
        manifest.write(folder / manifest.FILE, asking)
    own = workdir / "own.jsonl"
    made = {name: getattr(config, name) for name in (*manifest.OWN, "seed")}
    if config.own_prompts:
        benchmarks = pool.Forbidden(Path(config.prompt_sets)) if config.prompt_sets else None
        if benchmarks:  # without benchmarks to compare with, prompts that were kept off some are as good
            made["benchmarks"] = benchmarks.digest
    if config.own_prompts and own.exists():
        manifest.check(own.with_suffix(".settings.json"), made, _fix(own))
    elif config.own_prompts:
        forbidden = benchmarks.matches if benchmarks else lambda text: False
        written = own_prompts.write(
            target, config.own_prompts, config.own_temperature, config.seed, config.answer_batch, forbidden, log
        )
        manifest.write(own.with_suffix(".settings.json"), {"benchmarks": "none"} | made)
        with files.whole(own) as unfinished:
            formats.write(unfinished, written)

    if config.own_prompts and not config.prompt_sets:
        log("own prompts: not compared with any benchmark, since --config.prompt_sets is not given")

    def asked() -> Iterator[rows.Row]:
        yield from itertools.islice(rows.read(source), config.max_prompts or None)
        if config.own_prompts:
            yield from rows.read(own)

    found = regenerate.ask(target, asked(), config.max_prompt_tokens, config.thinking_switch)
    for why, n in found.skipped.most_common():
        log(f"prompts: {n:,} of {found.total:,} left out: {why}")
    complete = regenerate.regenerate(
        target,
        found.ids,
        folder,
        batch=config.answer_batch,
        max_prompt=config.max_prompt_tokens,
        max_new=config.max_new_tokens,
        samples=config.samples,
        temperature=config.temperature,
        save_batches=config.save_batches,
        head=load.load_head(config.answer_head, target) if config.answer_head else None,
        budget=config.answer_budget,
        on_time=on_time,
        log=log,
    )
    if not complete:
        return None
    known = answer_store.read(folder)
    counts = regenerate.counts(found, known)
    files.write_json(workdir / "answers.json", counts)
    log(f"answers: {json.dumps(counts)}")
    kept, dropped = answer_store.learnable(known, found.identities, config.trim_loops)
    for why, n in dropped.most_common():
        log(f"answers: {n:,} left out: {why}")
    if not kept:
        raise ConfigError("answers: none is longer than one token; there is nothing to learn from")
    longest = max(e.tokens.size for e in kept)
    if longest > config.sequence_length:
        raise ConfigError(
            f"--config.sequence_length={config.sequence_length}: an answer with its prompt has {longest} tokens; "
            "give at least max_prompt_tokens + max_new_tokens"
        )
    return kept, counts


def _split(known: list[Example], config: Settings) -> tuple[list[Example], list[Example]]:
    """Examples to train on and held-out ones; all answers to a prompt are on one side, sampled ones are not judged."""
    mark = answer_store.SAMPLE if config.answers == "target" else "\0"  # rows may be called anything
    prompt = lambda e: e.identity.partition(mark)[0]
    digest = lambda name: hashlib.sha256(name.encode("utf-8", "replace")).digest()
    names = sorted({prompt(e) for e in known}, key=digest)
    heldout = set(names[: min(config.heldout, len(names) // 10)])
    judged = [e for e in known if prompt(e) in heldout and mark not in e.identity]
    return [e for e in known if prompt(e) not in heldout], judged


def _sources(known: list[Example]) -> dict[str, dict[str, int]]:
    """Examples and supervised tokens by the first part of their ids, where ids have parts."""
    number: Counter[str] = Counter()
    tokens: Counter[str] = Counter()
    for example in known:
        source = example.identity.rpartition("/")[0] or "data"
        number[source] += 1
        tokens[source] += int(example.learnt.sum())
    if len(number) > 200:  # ids with parts of another meaning
        return {"data": {"examples": number.total(), "tokens": tokens.total()}}
    return {name: {"examples": number[name], "tokens": tokens[name]} for name in sorted(number)}


def _settle(folder: Path, values: dict[str, Any], begun: bool, log: Log) -> None:
    """Refuses another recipe than that of the checkpoints in the folder; writes it where none is compared."""
    path = folder / manifest.FILE
    if begun:
        if manifest.check(path, values, "use a new --workdir, or the old value"):
            return
        log(f"train: {folder} is of a version that kept no {path.name}; its settings are taken to be the present ones")
    if jax.process_index() == 0:
        manifest.write(path, values)


def _scale(path: Path, begun: bool, config: Settings, target, packed: Packed, head, attention: str) -> jax.Array:
    """The scale of the run's first command: a resumed run must not move its coordinates by a rounding."""
    if not begun:
        found = features.scale(target, packed, head.tap_layers, config.scale_sequences, config.feature_batch, attention)
        with files.whole(path) as unfinished:
            np.save(unfinished, np.asarray(found))
    try:
        stored = np.load(path)
    except (OSError, EOFError, ValueError) as error:  # gone, empty or cut short
        raise ConfigError(
            f"{path}: cannot be read ({str(error).splitlines()[0]}), and the checkpoints in {path.parent / 'train'} "
            "need it; copy it back, or use a new --workdir"
        ) from None
    if stored.size != len(head.tap_layers) * head.hidden_size:
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
    if not ids:
        raise ConfigError(f"--config.decode_prompts={config.decode_prompts}: no prompt of the file is short enough")
    return ids


def _decode(config: Settings, workdir: Path, target, log: Log) -> None:
    """Decodes prompts for real with the exported head; the figures lie beside it."""
    head = load.load_head(workdir / "head", target)
    ids = _decoded(config, target, pair.thinking(target, head, None))
    tree = TreeConfig(config.decode_budget)
    found = acceptance.measure(target, head, ids, tree, SamplingConfig(config.max_new_tokens), min(32, len(ids)))
    del found["token_ids"]
    files.write_json(workdir / "decode.json", found)
    low, high = found["interval_95"]
    log(
        f"decode: acceptance length {found['acceptance_length']:.2f} ({low:.2f}-{high:.2f}) at budget "
        f"{config.decode_budget}, {found['prompts']} prompts, {found['rounds']} rounds"
    )
