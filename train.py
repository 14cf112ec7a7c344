"""Trains a draft head.

    python train.py --config configs/NAME.py --workdir DIR [--config.KEY=VALUE ...]

Stages: prompts, answers of the target, features, training, export to DIR/head. Each leaves its output in DIR; the same
command again goes on where it stopped, also after SIGTERM. Exit status: 0 done or out of time, 2 wrong options, 1 other
errors, 130 interrupted.
"""

import sys


def main(argv: list[str]) -> int:
    """Runs the stages; the exit status."""
    if not argv or set(argv) & {"-h", "--help"}:
        from jetspec_jax.training import settings

        print(
            f"{__doc__}\nKEY, what it means, [its default]:\n{settings.describe()}",
            file=sys.stdout if argv else sys.stderr,
        )
        return 0 if argv else 2

    from jetspec_jax.config import ConfigError
    from jetspec_jax.training import options

    say = lambda line: print(line, file=sys.stderr, flush=True)
    try:
        config, workdir = options.parse(argv)
        config.check_files()
    except (ConfigError, OSError) as error:
        say(f"train.py: {error}")
        return 2

    import jax

    from jetspec_jax.training import loop, pipeline

    try:
        pipeline.run(config, workdir, log=say)
    except (ConfigError, loop.TrainingError, OSError) as error:
        say(f"train.py: {error}")
        return 1
    except jax.errors.JaxRuntimeError as error:
        hint = "if the device is full: smaller --config.batch, anchors, loss_chunk or feature_batch, or remat=true"
        say(f"train.py: {str(error).splitlines()[0][:200]} ({hint})")
        return 1
    except KeyboardInterrupt:
        say("train.py: interrupted; the same command goes on at the last checkpoint")
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
