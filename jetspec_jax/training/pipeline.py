"""The stages of a training run: pool, answers, features, training, export.

    WORKDIR/pool.jsonl, pool.json     prompts, and their counts by source with licences
    WORKDIR/answers/, answers.json    answers of the target, and their counts
    WORKDIR/scale.npy                 root mean square of the tapped channels
    WORKDIR/train/                    checkpoints and metrics.jsonl
    WORKDIR/head/                     the head in the published format, with its model card

A stage whose output is complete is skipped. Features are not stored: they are large, and made in seconds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_collections
import numpy as np

from jetspec_jax import demo, load
from jetspec_jax.config import ConfigError, HeadConfig, ModelConfig, default_taps
from jetspec_jax.evals import prompts
from jetspec_jax.training import answers as answer_store
from jetspec_jax.training import export, features, loop, losses, pool, regenerate
from jetspec_jax.training.answers import Answers
from jetspec_jax.training.step import Recipe

STAGES = ("pool", "answers", "export")
COUNTS = (
    "max_prompt_tokens", "max_new_tokens", "answer_batch", "save_batches", "feature_batch", "head_layers", "taps",
    "steps", "batch", "anchors", "loss_chunk", "log_every", "eval_every", "save_every",
)  # fmt: skip
SHARES = ("max_minutes", "max_prompts", "samples", "heldout_prompts", "gamma", "peak_lr", "warmup", "weight_decay")
MEMORY_SHARE = 0.82  # of the device, for features; the rest is for the step


def run(config: ml_collections.ConfigDict, workdir: Path, log: Callable[[str], None]) -> None:
    """Runs all stages up to `config.until`, or as far as `config.max_minutes` allows.

    Raises:
      ConfigError: a value, file or set of stored outputs does not fit.
    """
    begin = time.monotonic()
    on_time = lambda: not config.max_minutes or time.monotonic() - begin < 60 * config.max_minutes
    workdir.mkdir(parents=True, exist_ok=True)

    # ---- pool
    pool_file = Path(config.pool) if config.pool else workdir / "pool.jsonl"
    if not pool_file.exists():
        _build_pool(config, pool_file)
    rows = prompts.read(pool_file)
    log(f"pool: {len(rows)} prompts in {pool_file}")
    if config.until == "pool":
        return

    # ---- answers
    target = load.load_target(config.target or demo.fetch_target(), config.dtype or None)
    folder, summary = workdir / "answers", workdir / "answers.json"
    if not summary.exists():
        ids = regenerate.tokenize(target, rows[: config.max_prompts or None], config.max_prompt_tokens)
        complete = regenerate.regenerate(
            target,
            ids,
            folder,
            batch=config.answer_batch,
            max_prompt=config.max_prompt_tokens,
            max_new=config.max_new_tokens,
            samples=config.samples,
            temperature=config.temperature,
            save_batches=config.save_batches,
            on_time=on_time,
            log=log,
        )
        if not complete:
            log("answers: time is up; the same command goes on")
            return
        summary.write_text(json.dumps(_count(answer_store.read(folder), rows), indent=1) + "\n")
    counts = json.loads(summary.read_text())
    log(f"answers: {json.dumps(counts)}")
    if config.until == "answers":
        return

    # ---- features
    known = answer_store.read(folder)
    chosen = answer_store.usable(known, config.trim_loops)
    head = head_config(config, target.config)
    width = config.max_prompt_tokens + config.max_new_tokens
    room = _room(target, head)
    if room and chosen.length.sum() > room:
        chosen = answer_store.fitting(chosen, room, config.seed)
        log(f"features: memory for {len(chosen.length):,} answers of {len(known.length):,}, drawn at random")
    used = int((chosen.length - chosen.prompt_length).sum())
    counts |= {"used": {"answers": len(chosen.length), "tokens": used}}
    start = time.monotonic()
    store = features.compute(target.model, target.params, head.tap_layers, chosen, width, config.feature_batch)
    store = store._replace(scale=_fixed(workdir / "scale.npy", store.scale))
    size = (store.taps.nbytes + store.final.nbytes) / 2**30
    log(f"features: {store.tokens.size - width:,} positions, {size:.1f} GiB, {time.monotonic() - start:.0f} s")

    # ---- training
    # The pool's order is a hash, so its first prompts are a fair sample.
    heldout = chosen.prompt < min(config.heldout_prompts, counts["prompts"] // 10)
    recipe = Recipe(
        target=target.model,
        head=head,
        dtype=str(target.dtype),
        width=width,
        anchors=config.anchors,
        gamma=config.gamma,
        loss=config.loss,
        temperature=config.loss_temperature,
        loss_chunk=config.loss_chunk,
        peak_lr=config.peak_lr,
        steps=config.steps,
        warmup=config.warmup,
        final_lr=config.final_lr,
        weight_decay=config.weight_decay,
        clip=config.clip,
        seed=config.seed,
    )
    start = time.monotonic()
    state = loop.train(
        recipe,
        target.params,
        store,
        np.flatnonzero(~heldout),
        np.flatnonzero(heldout & (chosen.sample == 0)),
        workdir / "train",
        batch=config.batch,
        log_every=config.log_every,
        eval_every=config.eval_every,
        save_every=config.save_every,
        on_time=on_time,
        log=log,
    )
    log(f"train: step {int(state.step)} of {config.steps}, {time.monotonic() - start:.0f} s")

    # ---- export: also of an unfinished head, so that a machine that goes away leaves one
    export.write(workdir / "head", target, recipe, state, store.scale, config, counts)
    log(f"export: {workdir / 'head'}")


def check(config: ml_collections.ConfigDict) -> None:
    """Refuses values that no file or target could make right."""
    for key, known in (("until", STAGES), ("loss", losses.KINDS)):
        if config[key] not in known:
            raise ConfigError(f"--config.{key}={config[key]}: choose one of {', '.join(known)}")
    for keys, least in ((COUNTS, 1), (SHARES, 0)):
        for key in keys:
            if config[key] < least:
                raise ConfigError(f"--config.{key}={config[key]}: give a number >= {least}")


def head_config(config: ml_collections.ConfigDict, target: ModelConfig) -> HeadConfig:
    """The head: layers, taps and block from the configuration, every other size from the target."""
    return HeadConfig(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        num_layers=config.head_layers,
        num_heads=target.num_heads,
        num_kv_heads=target.num_kv_heads,
        head_dim=target.head_dim,
        intermediate_size=target.intermediate_size,
        norm_eps=target.norm_eps,
        rope_theta=target.rope_theta,
        max_positions=target.max_positions,
        num_target_layers=target.num_layers,
        block_size=config.block_size,
        mask_token_id=config.mask_token_id,
        tap_layers=default_taps(target.num_layers, config.taps),
        causal=config.causal,
        dtype="bfloat16",
    )


def _build_pool(config, path: Path) -> None:
    if not config.data:
        raise ConfigError("--config.data is missing: the folder of prompt sets (or give --config.pool, a pool file)")
    rows, counts = pool.build(Path(config.data), config.code_prompts, config.code_per_package, config.chat_prompts)
    path.with_suffix(".json").write_text(json.dumps(counts, indent=1) + "\n")
    prompts.write(path, rows)


def _count(known: Answers, rows: list[dict]) -> dict:
    """Answers and tokens in all and by source, before loops are cut."""
    new = known.length - known.prompt_length
    source = np.array([rows[i]["id"].split("/")[0] for i in known.prompt])
    greedy = known.sample == 0
    return {
        "prompts": int(greedy.sum()),
        "answers": len(new),
        "tokens": int(new.sum()),
        "ended": round(float(known.ended.mean()), 3),
        "sources": {
            str(s): {"prompts": int((greedy & (source == s)).sum()), "tokens": int(new[source == s].sum())}
            for s in np.unique(source)
        },
    }


def _room(target, head: HeadConfig) -> int | None:
    """Positions whose features fit on the device; None where it does not tell its memory."""
    limit = (jax.local_devices()[0].memory_stats() or {}).get("bytes_limit")
    position = (len(head.tap_layers) + 1) * head.hidden_size * jnp.dtype(target.dtype).itemsize
    return int(MEMORY_SHARE * limit / position) if limit else None


def _fixed(path: Path, scale) -> jnp.ndarray:
    """The scale of the run's first command: a resumed run must not move its coordinates by a rounding."""
    if not path.exists():
        np.save(path, np.asarray(scale))
    return jnp.asarray(np.load(path))
