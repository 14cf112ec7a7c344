"""The command line of `train.py`: a configuration file and overrides of its values."""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_collections

from jetspec_jax.config import ConfigError
from jetspec_jax.training import settings
from jetspec_jax.training.settings import Settings

USAGE = "usage: python train.py --config configs/NAME.py --workdir DIR [--config.KEY=VALUE ...]"


def parse(argv: list[str]) -> tuple[Settings, Path]:
    """Settings with their overrides, and the work folder.

    Raises:
      ConfigError: an option or key does not exist (the nearest one is named), or a value does not fit.
    """
    given: dict[str, str] = {}
    overrides: dict[str, Any] = {}
    rest = iter(argv)
    for argument in rest:
        if not argument.startswith("--"):
            raise ConfigError(f"{argument!r}: not an option\n{USAGE}")
        name, equals, value = argument[2:].partition("=")
        name = name.replace("-", "_")
        if name not in ("config", "workdir") and not name.startswith("config."):
            raise ConfigError(f"--{name}: no such option{settings.nearest(name, ['config', 'workdir'], '--')}\n{USAGE}")
        key = name.removeprefix("config.")
        if name.startswith("config.") and key not in settings.KINDS:
            raise ConfigError(f"--{name}: no such key{settings.nearest(key, list(settings.KINDS), '--config.')}")
        if not equals:
            value = next(rest, "")
            if not value:
                raise ConfigError(f"--{name}: a value is missing\n{USAGE}")
        if name in ("config", "workdir"):
            given[name] = value
        else:
            overrides[key] = settings.from_text(key, value)
    for name in ("config", "workdir"):
        if not given.get(name):
            raise ConfigError(f"--{name} is missing\n{USAGE}")
    workdir = Path(os.path.expanduser(given["workdir"]))
    if workdir.exists() and not workdir.is_dir():
        raise ConfigError(f"--workdir={workdir}: a folder is needed, this is a file")
    path = Path(given["config"])
    return settings.make(load(path) | overrides, f"--config={path}"), workdir


def load(path: Path) -> dict[str, Any]:
    """What `get_config()` of a Python file returns: a mapping of keys to values."""
    where = f"--config={path}"
    if not path.is_file():
        raise ConfigError(f"{where}: no such file; give one of configs/*.py")
    try:
        names = runpy.run_path(str(path))
    except (Exception, SystemExit) as error:  # whatever the file does
        raise ConfigError(f"{where}: not a configuration file ({_line(error)})") from None
    if not callable(names.get("get_config")):
        raise ConfigError(f"{where}: it has no function get_config()")
    try:
        config = names["get_config"]()
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{where}: get_config() fails ({_line(error)})") from None
    if isinstance(config, ml_collections.ConfigDict):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise ConfigError(f"{where}: get_config() returns {type(config).__name__}; a ConfigDict or dict is needed")
    return dict(config)


def _line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
