"""What an output was made with, as JSON beside it, so that a command with other values is refused and mixes nothing."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from jetspec_jax.config import ConfigError
from jetspec_jax.training import files
from jetspec_jax.training.data.packing import Packed
from jetspec_jax.training.settings import KINDS, Settings

FILE = "settings.json"

POOL = "code_prompts", "code_per_package", "chat_prompts", "documents"
OWN = "own_prompts", "own_temperature"
ASKED = "max_prompts", "max_prompt_tokens", "thinking"

# The same numbers but for rounding: another machine may need other ones.
ROUNDING = frozenset(("features", "feature_batch", "loss_chunk", "accumulate", "attention", "remat")) | {
    "model_parallel",
    "mesh",
}
WATCHING = frozenset(("max_minutes", "log_every", "save_every"))  # when a run looks up and stops

# Settings that a run may change between two commands; any other one, also a future one, belongs to the recipe.
FREE = (
    ROUNDING
    | WATCHING
    | {"until", "resume_step", "export", "license", "eval_every", "decode_prompts", "decode_limit", "decode_budget"}
    | {"scale_sequences"}  # the scale is made once
    # Compared by what came of them: fingerprint, dtype, steps, taps, digest of the data.
    | {"target", "dtype", "epochs", "taps", "data", "prompt_sets", "max_prompts", "max_prompt_tokens", *POOL, *OWN}
    | {"dialogues"}
    | {"max_new_tokens", "samples", "temperature", "answer_batch", "save_batches", "answer_head", "answer_budget"}
)


def recipe(
    config: Settings, target, head, steps: int, packed: Packed, decided: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Returns all that decides what a training run learns and which of its heads is the best one.

    Args:
      config: of the run.
      target: what `load_target` returns.
      head: its configuration.
      steps: updates.
      packed: what is learnt.
      decided: parameters that the data decides and training leaves alone.
    """
    named = {k: v for k, v in dataclasses.asdict(config).items() if k not in FREE}
    named |= {"tap_layers": head.tap_layers, "steps": steps}
    digest = hashlib.sha256()
    for array in (packed.tokens, packed.document, packed.learnt):
        digest.update(array.tobytes())
    return {
        "target_fingerprint": target.fingerprint,
        "target_dtype": str(target.dtype),
        **named,
        "sequences": len(packed.tokens),
        "data_digest": digest.hexdigest()[:16],
        **{f"{k}_digest": hashlib.sha256(np.asarray(v).tobytes()).hexdigest()[:16] for k, v in (decided or {}).items()},
    }


def prompts(config: Settings) -> dict[str, Any]:
    """Returns the settings that choose the prompts which are answered."""
    names = (() if config.data else POOL) + (OWN if config.own_prompts else OWN[:1]) + ASKED
    return {name: getattr(config, name) for name in names}


def sign(path: Path, values: dict[str, Any], fix: str, begun: bool, prefix: str = "--config.") -> bool:
    """Writes what an output is made with, or compares it with what the output that is there was made with.

    Args:
      path: of the manifest.
      values: keys and plain values; one that the manifest's version of the package did not know is passed over.
      fix: the end of the line that refuses.
      begun: whether there is any output; without, what an earlier command meant to do does not count.
      prefix: what stands before a key that is a setting.

    Returns:
      False where there is an output and nothing says what it was made with.

    Raises:
      ConfigError: a value differs, the first one is named; or the manifest cannot be read.
    """
    if not begun:
        path.parent.mkdir(parents=True, exist_ok=True)
        files.write_json(path, values)
        return True
    if not path.exists():
        return False
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(found, dict):
            raise ValueError("no JSON object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no readable manifest ({error}); {fix}") from None
    for key, value in json.loads(json.dumps(values)).items():
        if found.get(key, value) != value:
            name = f"{prefix}{key}" if key in KINDS else key
            raise ConfigError(f"{name}={_shown(value)}: {path.parent} was made with {_shown(found[key])}; {fix}")
    return True


def _shown(value: Any) -> str:
    """As the command line takes it."""
    if isinstance(value, list):
        value = ",".join(map(str, value))
    text = str(value).lower() if isinstance(value, bool) else str(value) or "''"
    return text if len(text) <= 80 else f"{text[:80]}..."
