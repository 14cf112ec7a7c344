"""The settings of a training run: every key with its default, meaning and valid values, checked before any work.

A configuration file gives some of them (`get_config()`), the command line overrides (`--config.KEY=VALUE`); what
neither names has the default here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import math
import numbers
import os
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jetspec_jax.config import MOST_SIZE, ConfigError, ModelConfig
from jetspec_jax.fields import MOST, Option, shown
from jetspec_jax.options import mesh_axes

LONGEST = 200  # characters of a value in a message; paths are longer than other values
STAGES = ("pool", "answers", "export")
STEPWISE = frozenset(("eagle3",))  # families that draft token by token
SCORER = "scorer_width", "scorer_kind", "scorer_parents", "scorer_strength"  # keys of a scorer, beside its rank
WHOLE = math.inf  # no upper limit but that of an int32, for whole numbers


def _key(default: Any, help: str, **limits: Any) -> Any:
    """A field with its meaning, and what is valid."""
    return dataclasses.field(default=default, metadata={"help": help, **limits})


def _number(default: float, help: str, low: float, high: float = WHOLE, above: bool = False) -> Any:
    """A field with a range; above: the lower end itself is not valid."""
    return _key(default, help, low=low, high=high, above=above)


def _one_of(default: str, help: str, *choices: str) -> Any:
    return _key(default, help, choices=choices)


@dataclasses.dataclass(frozen=True)
class Settings:
    """One training run; a wrong value raises ConfigError with the key, the value and what is valid."""

    # ---- the run
    seed: int = _number(0, "seed of everything that is drawn", 0, 2**32 - 1)
    max_minutes: float = _number(0.0, "after which it saves and stops; the same command goes on; 0 is no limit", 0)
    until: str = _one_of("export", "last stage to run", *STAGES)

    # ---- target
    target: str = _key("", "folder, GGUF file or hub id; '' is the demo's target")
    dtype: str = _one_of("", "'' is the target's default", "", "float32", "bfloat16", "float16")
    thinking: str = _one_of("default", "switch of the chat template", "default", "on", "off")

    # ---- prompts
    data: str = _key("", "rows: .jsonl, .parquet, a folder of them, or a Hugging Face dataset on disk")
    prompt_sets: str = _key("", "folder of prompt sets: the pool where data is empty, and benchmarks to keep off")
    code_prompts: int = _number(11_000, "prompts of the pool that ask for a function", 0)
    code_per_package: int = _number(600, "functions of one package in the pool", 1)
    chat_prompts: int = _number(2_500, "chat prompts in the pool", 0)
    documents: int = _number(0, "long prompts of the pool about source files and documentation", 0)
    own_prompts: int = _number(0, "user turns that the target writes itself, beside the pool's", 0)
    own_temperature: float = _number(1.0, "temperature at which it writes them", 0, 10, above=True)
    max_prompts: int = _number(0, "take the first rows, own_prompts on top; 0 is all", 0)

    # ---- answers
    answers: str = _one_of("target", "learn what the target answers, or the rows' own answers", "target", "corpus")
    max_prompt_tokens: int = _number(256, "longest prompt that is answered; corpus rows: see sequence_length", 1)
    max_new_tokens: int = _number(256, "tokens of an answer of the target", 2)
    samples: int = _number(0, "sampled answers a prompt, beside the greedy one", 0)
    temperature: float = _number(0.8, "temperature of the sampled answers", 0, 10, above=True)
    dialogues: int = _number(0, "conversations up to sequence_length in which the target writes both sides", 0)
    answer_batch: int = _number(256, "prompts answered together", 1)
    save_batches: int = _number(8, "batches in one file of answers", 1)
    answer_head: str = _key("", "a head that speeds the answers up; '' decodes plainly")
    answer_budget: int = _number(32, "tree nodes with that head", 1, 1024)
    trim_loops: bool = _key(False, "cut answers that end by repeating themselves")
    drop_truncated: bool = _key(False, "leave out answers that max_new_tokens cut, rows that sequence_length would cut")
    text_loss: str = _one_of(
        "all", "learn all of a plain text, or what the template's marks enclose", "all", "assistant"
    )

    # ---- sequences
    sequence_length: int = _number(512, "tokens of a packed sequence", 8)
    heldout: int = _number(64, "prompts never trained on; at most a tenth of all", 0)

    # ---- features
    features: str = _one_of(
        "online",
        "made in every step, or once to files or to the devices",
        "online",
        "disk",
        "memory",
    )
    feature_batch: int = _number(16, "sequences at a time, where features are made once", 1)
    scale_sequences: int = _number(64, "sequences from which the channels' scale is taken", 1)

    # ---- head; every size that is not here is the target's
    family: str = _key("", "family of the head; '' is jetspec, or dflash where causal is false")
    head_layers: int = _number(5, "layers of the head", 1, 100)
    taps: int = _number(5, "tapped layers, spread by the published formula", 1, 100)
    tap_layers: tuple[int, ...] = _key((), "or exactly these, 0-based")
    block_size: int = _number(16, "slots of a block, its anchor included", 2, 1024)
    mask_token_id: int = _key(-1, "an embedding row that no text uses; there is no default")
    causal: bool = _key(True, "a slot sees those before it; false: the whole block (DFlash)")
    draft_vocab: int = _number(0, "tokens an eagle3 head drafts, the most frequent of what is learnt; 0 is all", 0)
    markov_rank: int = _number(256, "rank of a dspark head's Markov head; 0: it has none", 0, MOST_SIZE)
    markov_head: str = _one_of("vanilla", "its kind; a published rnn head decodes, none is trained", "vanilla", "gated")
    scorer_rank: int = _number(
        0, "rank of a scorer beside a block head; counts: pairs a token; 0: it gets none", 0, MOST_SIZE
    )
    scorer_width: int = _number(0, "width of the SwiGLU of its parents; 0: they are of another kind", 0, MOST_SIZE)
    scorer_parents: str = _one_of(
        "text",
        "what it learns from: the text's tokens, drafted ones too, or those of other places (a control)",
        "text",
        "drafted",
        "others",
    )
    scorer_kind: str = _one_of(
        "", "its kind; '' is swiglu where it has a width, else product; counts take no steps",
        "", "product", "swiglu", "pairs", "markov", "counts",
    )  # fmt: skip
    scorer_strength: float = _number(0.5, "share of a pair's lift that a scorer of counts adds", 0)
    frozen_head: bool = _key(False, "train the scorer alone, beside the head of init_head")
    init_head: str = _key("", "a head to go on from, instead of random parameters")

    # ---- objective
    anchors: int = _number(256, "blocks, or rows at which steps begin, a sequence", 1)
    window: int = _number(0, "tokens before its anchor that a block looks back at; 0 is all", 0)
    gamma: float = _number(0.0, "depth weight exp(-(k - 1) / gamma); 0 is uniform", 0)
    unroll: int = _number(7, "steps of an eagle3 head, all but the first after its own output", 1, 64)
    unroll_decay: float = _number(0.8, "weight of each step, over that of the one before", 0, 1, above=True)
    forward_kl: float = _number(1.0, "share of the mix of losses", 0)
    reverse_kl: float = _number(0.0, "share of the mix", 0)
    cross_entropy: float = _number(0.0, "share of the mix", 0)
    total_variation: float = _number(0.0, "share of the mix", 0)
    confidence: float = _number(1.0, "share of a dspark head's confidence, beside the mix; 0: it has none", 0)
    loss_temperature: float = _number(1.0, "temperature of all but cross entropy", 0, 100, above=True)
    loss_chunk: int = _number(4096, "rows whose f32 logits exist at a time", 1)

    # ---- optimiser
    steps: int = _number(0, "updates; 0: as many as `epochs` asks for", 0)
    epochs: float = _number(0.0, "passes over the data, where steps is 0", 0)
    batch: int = _number(8, "sequences an update, of all devices", 1)
    accumulate: int = _number(1, "parts of the batch, one after the other", 1)
    peak_lr: float = _number(3e-4, "learning rate after the warm-up", 0, 1, above=True)
    warmup: float = _number(0.04, "share of the steps", 0, 1)
    final_lr: float = _number(0.1, "share of the peak, at the end of the cosine", 0, 1)
    beta1: float = _number(0.9, "first moment of AdamW", 0, 0.9999)
    beta2: float = _number(0.95, "second moment of AdamW", 0, 0.99999)
    weight_decay: float = _number(0.0, "weight decay of matrices", 0, 1)
    clip: float = _number(1.0, "most of the gradient's global norm", 0, above=True)

    # ---- devices
    model_parallel: int = _number(1, "devices that share one copy of the target; all devices are used", 1)
    mesh: str = _key("", "or the mesh itself, e.g. data=4,model=2, of the first devices; --mesh says the same")
    attention: str = _one_of(
        "auto", "what computes it; auto is cudnn on an NVIDIA GPU in 16 bits", "auto", "xla", "cudnn"
    )
    remat: bool = _key(True, "compute layers again in the backward pass instead of keeping what is in them")

    # ---- figures
    log_every: int = _number(50, "steps between two records", 1)
    eval_every: int = _number(500, "steps between two evaluations", 1)
    save_every: int = _number(1_000, "steps between two checkpoints", 1)
    eval_sequences: int = _number(16, "held-out sequences of the tree evaluation", 0)
    eval_budgets: tuple[int, ...] = _key(
        (16, 32, 64, 128, 256), "tree nodes, root included; the middle one decides what is best"
    )
    eval_width: int = _number(64, "candidates a depth of these trees", 1, 1024)
    decode_prompts: str = _key("", "prompt file that the finished head decodes for real")
    decode_limit: int = _number(32, "prompts of that file", 1)
    decode_budget: int = _number(64, "tree nodes of that decoding", 1, 1024)
    resume_step: int = _number(0, "checkpoint to go on from; 0 is the newest that is whole", 0)
    export: str = _one_of("best", "the step with the best held-out acceptance length, or the last", "best", "last")
    license: str = _key("", "license of the exported head, as its model card names it, e.g. apache-2.0")

    def __post_init__(self):
        for field in dataclasses.fields(self):
            _in_range(field.name, getattr(self, field.name), field.metadata)
        if self.mask_token_id < 0 and (self.has_mask or self.mask_token_id != -1):
            given = "is missing" if self.mask_token_id == -1 else f"{self.mask_token_id}: negative"
            raise wrong("mask_token_id", given, "give the id of an embedding row of the target that no text uses")
        if not (self.forward_kl or self.reverse_kl or self.cross_entropy or self.total_variation):
            shares = "forward_kl, reverse_kl, cross_entropy and total_variation"
            raise wrong("forward_kl", 0, f"{shares} are all 0; give one a share")
        if self.counted and (self.steps or self.epochs):
            name = "steps" if self.steps else "epochs"
            raise wrong(name, getattr(self, name), "a scorer of counts takes no steps; give steps=0 and epochs=0")
        if not self.counted and bool(self.steps) == bool(self.epochs):
            raise wrong("steps", self.steps, f"epochs={self.epochs}: give one of the two")
        if self.frozen_head and not (self.scorer_rank and self.init_head):
            missing = "init_head" if self.scorer_rank else "scorer_rank"
            raise wrong("frozen_head", "true", f"a scorer is trained beside a head that is there: give {missing}")
        if self.counted and not self.frozen_head:
            raise wrong("scorer_kind", "counts", "they are counted beside a head that is there: give frozen_head=true")
        if self.mesh and self.model_parallel != 1:
            raise wrong("mesh", self.mesh, f"model_parallel={self.model_parallel} says another; give one of the two")
        if self.mesh and "expert" in mesh_axes(self.mesh):
            raise wrong("mesh", self.mesh, "in training experts lie over model; leave the axis expert out")
        if self.batch % self.accumulate:
            raise wrong("accumulate", self.accumulate, f"it must divide batch={self.batch}")
        if self.has_mask and self.block_size > self.sequence_length:
            raise wrong("block_size", self.block_size, f"longer than sequence_length={self.sequence_length}")
        if not self.eval_budgets or not all(1 < b <= 1024 for b in self.eval_budgets):
            raise wrong("eval_budgets", self.eval_budgets, "give numbers in 2..1024")
        if self.answers == "corpus" and not self.data:
            raise wrong("answers", "corpus", "give the rows with --config.data")
        if self.answers == "corpus" and self.own_prompts:
            raise wrong("own_prompts", self.own_prompts, "prompts without an answer need --config.answers=target")
        if self.answers == "corpus" and self.dialogues:
            raise wrong("dialogues", self.dialogues, "the target writes them: --config.answers=target is needed")

    def check_files(self) -> None:
        """Refuses paths that do not exist, before anything slow; what may be a hub id is left to the loader."""
        if not self.data and not self.prompt_sets:
            raise ConfigError(
                "--config.data is missing: rows to learn from (or --config.prompt_sets, the folder of the demo's "
                "prompt sets)"
            )
        for name in ("data", "prompt_sets", "decode_prompts"):
            value = getattr(self, name)
            if value and not os.path.exists(value):  # false also for a name that no system takes
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
    def counted(self) -> bool:
        """Whether a scorer is counted beside a head and nothing is trained."""
        return self.scorer_kind == "counts"

    @property
    def family_name(self) -> str:
        """The family of the head."""
        return self.family or ("jetspec" if self.causal else "dflash")

    @property
    def has_mask(self) -> bool:
        """Whether the head drafts a block of masks in one pass, rather than token by token."""
        return self.family_name not in STEPWISE

    def check_target(self, target: ModelConfig, eos: tuple[int, ...]) -> None:
        """Refuses what no head of this target can have; its family looks at the rest."""
        if self.mask_token_id in eos:
            raise wrong("mask_token_id", self.mask_token_id, "an end token of the target; take a row that no text uses")
        if self.sequence_length > target.context_length:
            raise wrong("sequence_length", self.sequence_length, f"the target has {target.context_length} positions")


PATHS = {"target", "data", "prompt_sets", "answer_head", "init_head", "decode_prompts"}  # "~" is the user's folder
KINDS: dict[str, Any] = {f.name: typing.get_type_hints(Settings)[f.name] for f in dataclasses.fields(Settings)}


def option(field: dataclasses.Field) -> Option:
    """Returns the option of a key on the command line; `from_text` and the class check its value."""
    limits, said = field.metadata, field.metadata.get("help", "")
    known = [f"{said[:1].upper()}{said[1:]}." if said else ""]
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
            name = key if isinstance(key, str) and key.isprintable() and len(key) <= LONGEST else shown(key)
            raise ConfigError(f"{where}: {name}: no such key{nearest(name, list(KINDS))}")
    fitted = {key: _fitted(key, value, KINDS[key]) for key, value in values.items()}
    return Settings(**fitted | {key: os.path.expanduser(fitted[key]) for key in PATHS & fitted.keys()})


def nearest(name: str, known: list[str], prefix: str = "") -> str:
    """Returns the end of a line that refuses a name."""
    close = difflib.get_close_matches(name, known, 1, 0.5)
    return f"; did you mean {prefix}{close[0]}?" if close else f"; known: {', '.join(sorted(known))}"


def from_text(key: str, text: str) -> Any:
    """Returns a value of the command line as its key's type."""
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
        with contextlib.suppress(OverflowError):  # whole numbers beyond any float
            if math.isfinite(value):
                return float(value)
        raise wrong(name, value, "a finite number is needed")
    if kind is int and whole:
        return int(value)
    if kind is bool and isinstance(value, bool):
        return value
    if kind is str and isinstance(value, str | Path):
        return str(value)
    if kind == tuple[int, ...] and isinstance(value, list | tuple):
        parts = tuple(_fitted(name, part, int) for part in value)
        if all(abs(part) <= MOST for part in parts):
            return parts
    raise wrong(name, shown(value), f"{_article(kind)} is needed")


def _in_range(name: str, value: Any, limits: Mapping[str, Any]) -> None:
    if "choices" in limits and value not in limits["choices"]:
        known = ", ".join(c or repr(c) for c in limits["choices"])
        raise wrong(name, value, f"choose one of {known}{_hint(value, limits['choices'])}")
    if "low" in limits:
        low, high = limits["low"], limits["high"]
        most = MOST if high == WHOLE and isinstance(value, int) else high
        if value < low or value > most or (limits["above"] and value == low):
            end = "" if most == WHOLE or (high == WHOLE and value < low) else f" and <= {most:.12g}"
            raise wrong(name, value, f"give a number {'>' if limits['above'] else '>='} {low}{end}")


def refuse_foreign(config: Settings, names: tuple[str, ...]) -> None:
    """Raises ConfigError where one of these keys, which mean nothing to the family, was given a value."""
    for name in names:
        value, usual = getattr(config, name), Settings.__dataclass_fields__[name].default
        if value != usual:
            text = str(value).lower() if isinstance(value, bool) else value
            raise wrong(name, text, f"{config.family_name} heads have no use for it; leave it out")


def _hint(value: str, choices: tuple[str, ...]) -> str:
    close = difflib.get_close_matches(value, choices, 1, 0.5)
    return f"; did you mean {close[0]}?" if close else ""


def _article(kind: Any) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return names.get(kind, "a list of whole numbers, such as 1,9,17")


def wrong(name: str, value: Any, why: str) -> ConfigError:
    """Returns the error that names a key, its value and the fix."""
    text = value if isinstance(value, str) else shown(value)
    text = text if len(text) <= LONGEST and text.isprintable() else shown(text)
    return ConfigError(f"--config.{name}{' ' if text.startswith('is ') else '='}{text}: {why}")
