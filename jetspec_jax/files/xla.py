"""The XLA flags that were tested, by the version of jaxlib; they are never set unasked."""

from __future__ import annotations

import os

from jetspec_jax.fields import ConfigError

# By jaxlib version, because a name that XLA does not know ends the process. What they bring is in docs/performance.md.
TESTED = {"0.11.2": ("--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL", "--xla_gpu_graph_min_graph_size=1")}


def tested_flags() -> tuple[str, ...]:
    """Returns the flags for the jaxlib that is installed.

    Raises:
      ConfigError: none were tested with it.
    """
    import jaxlib.version

    version = jaxlib.version.__version__
    if version not in TESTED:
        raise ConfigError(f"xla_flags=tested: none were tested with jaxlib {version}, only with {', '.join(TESTED)}")
    return TESTED[version]


def apply_flags() -> None:
    """Adds `tested_flags` to XLA_FLAGS; only before jax has looked for devices. What is set there already wins."""
    os.environ["XLA_FLAGS"] = " ".join([*tested_flags(), os.environ.get("XLA_FLAGS", "")]).strip()


def check_device() -> None:
    """Raises ConfigError where jax has no device to compute on, which JAX_PLATFORMS can ask for."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the second where a platform is known and has no device
        named = os.environ.get("JAX_PLATFORMS", "")
        why = (str(error).strip() or "no device of that kind is here").splitlines()[0][:200]
        raise ConfigError(f"JAX_PLATFORMS={named}: {why}; install its jax, or leave the variable out") from None
