"""Trains a draft head; `training/options.py` has the command's words, `training/settings.py` its keys."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from jetspec_jax import command


@command.tool(
    "train.py",
    "smaller --config.batch, anchors, loss_chunk or feature_batch, or remat=true",
    "; the same command goes on at the last checkpoint",
)
def main(argv: Sequence[str]) -> int:
    """Runs the stages; returns the exit status."""
    from jetspec_jax.config import ConfigError
    from jetspec_jax.training import options

    try:
        config, workdir = options.parse(argv)
        config.check_files()
    except (ConfigError, OSError) as error:
        raise command.UsageError(str(error)) from None
    from jetspec_jax.files import xla
    from jetspec_jax.training import pipeline

    xla.check_device()
    pipeline.run(config, workdir, log=lambda line: print(line, file=sys.stderr, flush=True))
    return 0
