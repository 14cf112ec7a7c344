"""The settings of a training run: every key with its default, meaning and valid values, checked before any work.

A configuration file gives some of them (`get_config()`), the command line overrides (`--config.KEY=VALUE`); what
neither names has the default here.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import numbers
import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.config import ConfigError, ModelConfig
from jetspec_jax.options import Option

STAGES = ("pool", "answers", "export")
WHOLE = math.inf  # no upper limit


def _number(default, low, high=WHOLE, above: bool = False):
    """A field with a range; above: the lower end itself is not valid."""
    return dataclasses.field(default=default, metadata={"low": low, "high": high, "above": above})


def _one_of(default: str, *choices: str):
    return dataclasses.field(default=default, metadata={"choices": choices})


@dataclasses.dataclass(frozen=True)
class Settings:
    """One training run; a wrong value raises ConfigError with the key, the value and what is valid."""

    # ---- the run
    seed: int = _number(0, 0, 2**32 - 1)
    max_minutes: float = _number(0.0, 0)  # of this command; saves and stops then, the same command goes on; 0: none
    until: str = _one_of("export", *STAGES)  # last stage to run

    # ---- target
    target: str = ""  # folder, GGUF file or hub id; "" is the demo's target
    dtype: str = _one_of("", "", "float32", "bfloat16", "float16")  # "" is the target's default
    thinking: str = _one_of("default", "default", "on", "off")  # switch of the chat template

    # ---- prompts
    data: str = ""  # rows: .jsonl, .parquet, a folder of them, or a Hugging Face dataset on disk
    prompt_sets: str = ""  # folder of prompt sets: own prompts keep off its benchmarks; the pool, where data is empty
    code_prompts: int = _number(11_000, 0)  # of that pool
    code_per_package: int = _number(600, 1)
    chat_prompts: int = _number(2_500, 0)
    own_prompts: int = _number(0, 0)  # user turns that the target writes itself, beside the pool's
    own_temperature: float = _number(1.0, 0, 10, above=True)
    max_prompts: int = _number(0, 0)  # the first rows, own_prompts on top; 0 is all

    # ---- answers
    answers: str = _one_of("target", "target", "corpus")  # the target answers the prompts, or the rows' own answers
    max_prompt_tokens: int = _number(256, 1)  # longer prompts are not answered; corpus rows: see sequence_length
    max_new_tokens: int = _number(256, 2)  # of the target's answers
    samples: int = _number(0, 0)  # sampled answers a prompt, beside the greedy one
    temperature: float = _number(0.8, 0, 10, above=True)  # of those
    answer_batch: int = _number(256, 1)
    save_batches: int = _number(8, 1)  # batches in one file of answers
    answer_head: str = ""  # a head that speeds the answers up; "" decodes plainly
    answer_budget: int = _number(32, 1, 1024)  # tree nodes with that head
    trim_loops: bool = False  # cut answers that end by repeating themselves
    text_loss: str = _one_of(
        "all", "all", "assistant"
    )  # of plain text: all of it, or what the template's marks enclose

    # ---- sequences
    sequence_length: int = _number(512, 8)
    heldout: int = _number(64, 0)  # prompts never trained on

    # ---- features
    features: str = _one_of("online", "online", "disk", "memory")  # target in every step; once to files; once to device
    feature_batch: int = _number(16, 1)  # sequences a forward of the target, where it is run once
    scale_sequences: int = _number(64, 1)  # from which the channels' scale is taken

    # ---- head; every size that is not here is the target's
    family: str = ""  # of the head; "" is jetspec, or dflash where causal is false
    head_layers: int = _number(5, 1, 100)
    taps: int = _number(5, 1, 100)  # tapped layers, spread by the published formula
    tap_layers: tuple[int, ...] = ()  # or exactly these, 0-based
    block_size: int = _number(16, 2, 1024)
    mask_token_id: int = -1  # an embedding row that no text uses; there is no default
    causal: bool = True
    init_head: str = ""  # a head to go on from, instead of random parameters

    # ---- objective
    anchors: int = _number(256, 1)  # blocks a sequence
    gamma: float = _number(0.0, 0)  # depth weight exp(-(k - 1) / gamma); 0 is uniform
    forward_kl: float = _number(1.0, 0)  # shares of the mix
    reverse_kl: float = _number(0.0, 0)
    cross_entropy: float = _number(0.0, 0)
    loss_temperature: float = _number(1.0, 0, 100, above=True)
    loss_chunk: int = _number(4096, 1)  # rows whose f32 logits exist at a time

    # ---- optimiser
    steps: int = _number(0, 0)  # updates; 0: as many as `epochs` asks for
    epochs: float = _number(0.0, 0)
    batch: int = _number(8, 1)  # sequences an update, of all devices
    accumulate: int = _number(1, 1)  # parts of the batch, one after the other
    peak_lr: float = _number(3e-4, 0, 1, above=True)
    warmup: float = _number(0.04, 0, 1)  # share of the steps
    final_lr: float = _number(0.1, 0, 1)  # share of the peak, at the end of the cosine
    beta1: float = _number(0.9, 0, 0.9999)
    beta2: float = _number(0.95, 0, 0.99999)
    weight_decay: float = _number(0.0, 0, 1)
    clip: float = _number(1.0, 0, above=True)  # of the gradient's global norm

    # ---- devices
    model_parallel: int = _number(1, 1)  # devices that share one copy of the target; the others are data parallel
    attention: str = _one_of("auto", "auto", "xla", "cudnn")
    remat: bool = True  # recompute a layer of the head in the backward pass instead of keeping what is inside it

    # ---- figures
    log_every: int = _number(50, 1)
    eval_every: int = _number(500, 1)
    save_every: int = _number(1_000, 1)
    eval_sequences: int = _number(16, 0)  # held-out sequences of the tree evaluation
    eval_budgets: tuple[int, ...] = (16, 32, 64, 128, 256)  # tree nodes, root included; "best" is by the middle one
    eval_width: int = _number(64, 1, 1024)
    decode_prompts: str = ""  # prompt file that the finished head decodes for real
    decode_limit: int = _number(32, 1)
    decode_budget: int = _number(64, 1, 1024)
    resume_step: int = _number(0, 0)  # checkpoint to go on from; 0 is the newest that is whole
    export: str = _one_of("best", "best", "last")  # by acceptance length on the held-out rows

    def __post_init__(self):
        for field in dataclasses.fields(self):
            _in_range(field.name, getattr(self, field.name), field.metadata)
        if self.mask_token_id < 0:
            given = "is missing" if self.mask_token_id == -1 else f"{self.mask_token_id}: negative"
            raise wrong("mask_token_id", given, "give the id of an embedding row of the target that no text uses")
        if not (self.forward_kl or self.reverse_kl or self.cross_entropy):
            raise wrong("forward_kl", 0, "forward_kl, reverse_kl and cross_entropy are all 0; give one a share")
        if bool(self.steps) == bool(self.epochs):
            raise wrong("steps", self.steps, f"epochs={self.epochs}: give one of the two")
        if self.batch % self.accumulate:
            raise wrong("accumulate", self.accumulate, f"it must divide batch={self.batch}")
        if self.block_size > self.sequence_length:
            raise wrong("block_size", self.block_size, f"longer than sequence_length={self.sequence_length}")
        if not self.eval_budgets or not all(1 < b <= 1024 for b in self.eval_budgets):
            raise wrong("eval_budgets", self.eval_budgets, "give numbers in 2..1024")
        if self.answers == "corpus" and not self.data:
            raise wrong("answers", "corpus", "give the rows with --config.data")
        if self.answers == "corpus" and self.own_prompts:
            raise wrong("own_prompts", self.own_prompts, "prompts without an answer need --config.answers=target")

    def check_files(self) -> None:
        """Refuses paths that do not exist, before anything slow; what may be a hub id is left to the loader."""
        if not self.data and not self.prompt_sets:
            raise ConfigError(
                "--config.data is missing: rows to learn from (or --config.prompt_sets, the folder of the demo's "
                "prompt sets)"
            )
        for name in ("data", "prompt_sets", "decode_prompts"):
            value = getattr(self, name)
            if value and not Path(value).exists():
                raise wrong(name, value, "no such file or folder")
        if self.prompt_sets and not Path(self.prompt_sets).is_dir():
            raise wrong("prompt_sets", self.prompt_sets, "a folder is needed")
        if self.decode_prompts and not Path(self.decode_prompts).is_file():
            raise wrong("decode_prompts", self.decode_prompts, "a file is needed, this is a folder")

    @property
    def thinking_switch(self) -> bool | None:
        """What the chat template gets; None leaves it out."""
        return {"default": None, "on": True, "off": False}[self.thinking]

    @property
    def family_name(self) -> str:
        """The family of the head."""
        return self.family or ("jetspec" if self.causal else "dflash")

    def check_target(self, target: ModelConfig, eos: tuple[int, ...]) -> None:
        """Refuses what no head of this target can have; its family looks at the rest."""
        if self.mask_token_id in eos:
            raise wrong("mask_token_id", self.mask_token_id, "an end token of the target; take a row that no text uses")
        if self.sequence_length > target.context_length:
            raise wrong("sequence_length", self.sequence_length, f"the target has {target.context_length} positions")


PATHS = {"target", "data", "prompt_sets", "answer_head", "init_head", "decode_prompts"}  # "~" is the user's folder
KINDS: dict[str, Any] = {f.name: typing.get_type_hints(Settings)[f.name] for f in dataclasses.fields(Settings)}


def option(field: dataclasses.Field) -> Option:
    """The option of a key on the command line; `from_text` and the class check its value."""
    limits, known = field.metadata, [field.metadata.get("help", "")]
    if "choices" in limits:
        known.append(f"One of {', '.join(map(repr, limits['choices']))}.")
    if "low" in limits:
        end = "" if limits["high"] == WHOLE else f", <= {limits['high']:g}"
        known.append(f"{'>' if limits['above'] else '>='} {limits['low']:g}{end}.")
    known.append(f"Default: {field.default!r}.")
    return Option(f"config.{field.name}", "any", " ".join(filter(None, known)), metavar="VALUE")


def make(values: Mapping[str, Any], where: str) -> Settings:
    """Settings from the keys of a configuration file and its overrides.

    Raises:
      ConfigError: a key does not exist (the nearest is named) or a value does not fit.
    """
    for key in values:
        if key not in KINDS:
            raise ConfigError(f"{where}: {key}: no such key{nearest(str(key), list(KINDS))}")
    fitted = {key: _fitted(key, value, KINDS[key]) for key, value in values.items()}
    return Settings(**fitted | {key: os.path.expanduser(fitted[key]) for key in PATHS & fitted.keys()})


def nearest(name: str, known: list[str], prefix: str = "") -> str:
    """The end of a line that refuses a name."""
    close = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {prefix}{close[0]}?" if close else f"; known: {', '.join(sorted(known))}"


def from_text(key: str, text: str) -> Any:
    """A value of the command line as its key's type."""
    kind = KINDS[key]
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        if kind == tuple[int, ...]:
            return tuple(int(part) for part in text.strip("()[]").split(",") if part.strip())
        return kind(text)
    except (KeyError, ValueError, OverflowError):
        raise wrong(key, text, f"{_article(kind)} is needed") from None


def _fitted(name: str, value: Any, kind: Any) -> Any:
    """The value in its key's type; whole numbers do for fractions, nothing else is converted."""
    whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    if kind is float and (whole or isinstance(value, numbers.Real)) and not isinstance(value, bool):
        if not math.isfinite(value):
            raise wrong(name, value, "a finite number is needed")
        return float(value)
    if kind is int and whole:
        return int(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str | Path):
        return str(value)
    if kind == tuple[int, ...] and isinstance(value, list | tuple):
        return tuple(_fitted(name, part, int) for part in value)
    raise wrong(name, repr(value), f"{_article(kind)} is needed")


def _in_range(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if "choices" in limits and value not in limits["choices"]:
        known = ", ".join(c or repr(c) for c in limits["choices"])
        raise wrong(name, value, f"choose one of {known}{_hint(value, limits['choices'])}")
    if "low" in limits:
        low, high = limits["low"], limits["high"]
        if value < low or value > high or (limits["above"] and value == low):
            end = "" if high == WHOLE else f" and <= {high:g}"
            raise wrong(name, value, f"give a number {'>' if limits['above'] else '>='} {low}{end}")


def _hint(value: str, choices: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(value, choices, 1, 0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _article(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, "a list of whole numbers, such as 1,9,17")


def wrong(name: str, value: Any, why: str) -> ConfigError:
    """Returns the error that names a key, its value and the fix."""
    text = str(value)
    return ConfigError(f"--config.{name}{' ' if text.startswith('is ') else '='}{text}: {why}")
