"""The command line of `train.py`: a configuration file and overrides of its values."""

from __future__ import annotations

import dataclasses
import os
import runpy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_collections

from jetspec_jax import command, hosts
from jetspec_jax.config import ConfigError
from jetspec_jax.fields import Option
from jetspec_jax.training import settings
from jetspec_jax.training.settings import Settings

CONFIGS = Path(__file__).parent.parent / "configs"  # the repository's configs/, in an installed package too
LINE = command.Line(
    "Trains a draft head.\n\n"
    "    jetspec-train --config smollm2_135m --workdir DIR [--config.KEY=VALUE ...]\n\n"
    "Stages: prompts, answers of the target, features, training, export to DIR/head. Each leaves its output in DIR;\n"
    "the same command again goes on where it stopped, also after SIGTERM. Exit status: 0 done or out of time, 2 wrong\n"
    "options, 1 other errors, 130 interrupted. `python train.py` in a checkout is the same.",
    [
        Option("config", "text", "A Python file with get_config(), or the name of one of ours: "
               f"{', '.join(sorted(path.stem for path in CONFIGS.glob('*.py')))}.", required=True, metavar="FILE"),
        Option("workdir", "text", "Folder of everything that the run leaves.", required=True, metavar="DIR"),
        command.MESH,
        *hosts.OPTIONS,
        *(settings.option(field) for field in dataclasses.fields(Settings)),
    ],
)  # fmt: skip


def parse(argv: Sequence[str]) -> tuple[Settings, Path]:
    """Settings with their overrides, and the work folder.

    Raises:
      ConfigError: an option or key does not exist (the nearest one is named), or a value does not fit.
    """
    args = LINE.parse(argv)
    given = {name.removeprefix("config."): getattr(args, name) for name in args.given if name.startswith("config.")}
    workdir = Path(os.path.expanduser(args.workdir))
    if os.path.exists(workdir) and not os.path.isdir(workdir):  # no error for a name that no system takes
        raise ConfigError(f"--workdir={workdir}: a folder is needed, this is a file")
    path = find(args.config)
    command.check_mesh(args.mesh)
    hosts.check(args)
    overrides = {key: settings.from_text(key, value) for key, value in given.items()}
    overrides |= {"mesh": args.mesh} if args.mesh else {}
    config = settings.make(load(path) | overrides, f"--config={path}")
    hosts.join(args)
    return config, workdir


def find(name: str) -> Path:
    """Finds the file of that name, or the configuration of ours that is called so."""
    path, ours = Path(os.path.expanduser(name)), CONFIGS / f"{Path(name).stem}.py"
    plain = name in (ours.stem, ours.name)
    return ours if plain and not path.is_file() and ours.is_file() else path


def load(path: Path) -> dict[str, Any]:
    """Returns what `get_config()` of a Python file does: a mapping of keys to values."""
    where = f"--config={path}"
    if not path.is_file():
        raise ConfigError(f"{where}: no such file; give one, or the name of one in configs/")
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
