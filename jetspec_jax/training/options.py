"""The command line of `train.py`: a configuration file and overrides of its values."""

from __future__ import annotations

import difflib
import runpy
from pathlib import Path
from typing import Any

import ml_collections

from jetspec_jax.config import ConfigError

USAGE = "usage: python train.py --config configs/NAME.py --workdir DIR [--config.KEY=VALUE ...]"


def parse(argv: list[str]) -> tuple[ml_collections.ConfigDict, Path]:
    """Configuration with its overrides, and the work folder.

    Raises:
      ConfigError: an option or key does not exist (the nearest one is named), or a value does not fit.
    """
    given, overrides = {}, []
    rest = iter(argv)
    for argument in rest:
        if not argument.startswith("--"):
            raise ConfigError(f"{argument!r}: not an option\n{USAGE}")
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        if name not in ("config", "workdir") and not name.startswith("config."):
            raise ConfigError(f"--{name}: no such option{_nearest(name, ['config', 'workdir'], '--')}\n{USAGE}")
        if not equals:
            value = next(rest, "")
            if not value:
                raise ConfigError(f"--{name}: a value is missing\n{USAGE}")
        if name in ("config", "workdir"):
            given[name] = value
        else:
            overrides.append((name.removeprefix("config."), value))
    for name in ("config", "workdir"):
        if name not in given:
            raise ConfigError(f"--{name} is missing\n{USAGE}")
    config = load(Path(given["config"]))
    for key, value in overrides:
        if key not in config:
            raise ConfigError(f"--config.{key}: no such key{_nearest(key, list(config), '--config.')}")
        config[key] = _convert(key, value, config[key])
    return config, Path(given["workdir"])


def load(path: Path) -> ml_collections.ConfigDict:
    """What `get_config()` of a Python file returns."""
    if not path.is_file():
        raise ConfigError(f"--config={path}: no such file; give one of configs/*.py")
    try:
        names = runpy.run_path(str(path))
    except Exception as error:  # whatever the file does
        raise ConfigError(f"--config={path}: not a configuration file ({type(error).__name__}: {error})") from None
    if "get_config" not in names:
        raise ConfigError(f"--config={path}: it has no function get_config()")
    return names["get_config"]()


def _nearest(name: str, known: list[str], prefix: str) -> str:
    close = difflib.get_close_matches(name, known, 1, 0.5)
    return (
        f"; did you mean {prefix}{close[0]}?" if close else f"; known: {', '.join(prefix + k for k in sorted(known))}"
    )


def _convert(key: str, text: str, default: Any) -> Any:
    """The text as the type of the key's present value."""
    kind = type(default)
    try:
        if kind is bool:
            return {"true": True, "false": False, "1": True, "0": False}[text.lower()]
        return kind(text)
    except (KeyError, ValueError):
        raise ConfigError(f"--config.{key}={text}: a {kind.__name__} is needed, such as {default!r}") from None
