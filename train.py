"""Trains a draft head.

    python train.py --config configs/demo.py --workdir DIR [--config.KEY=VALUE ...]

Stages: prompt pool, answers of the target, features, training, export to DIR/head. Each leaves its output in DIR; the
same command again goes on where it stopped. Exit status: 0 done or out of time, 2 wrong options, 1 other errors.
"""

import sys

from jetspec_jax import demo
from jetspec_jax.config import ConfigError
from jetspec_jax.training import options, pipeline


def main(argv: list[str]) -> int:
    """Runs the stages; the exit status."""
    if not argv or set(argv) & {"-h", "--help"}:
        print(__doc__, file=sys.stdout if argv else sys.stderr)
        return 0 if argv else 2
    try:
        config, workdir = options.parse(argv)
        pipeline.check(config)
    except ConfigError as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 2
    demo.keep_programs()
    try:
        pipeline.run(config, workdir, log=lambda line: print(line, file=sys.stderr, flush=True))
    except (ConfigError, OSError) as error:
        print(f"train.py: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
