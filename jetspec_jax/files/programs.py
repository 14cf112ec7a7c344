"""Compiled programs: where they are kept between processes, and the XLA flags that were tested with them."""

from __future__ import annotations

import contextlib
import os
import pathlib
import tempfile

from jetspec_jax.config import ConfigError

# By jaxlib version, because a name that XLA does not know ends the process. What they bring is in docs/performance.md.
TESTED = {"0.11.2": ("--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL", "--xla_gpu_graph_min_graph_size=1")}


def cache_folder() -> pathlib.Path:
    """JETSPEC_CACHE, or jetspec_jax in the user's cache directory."""
    own = os.environ.get("JETSPEC_CACHE")
    if own:
        return pathlib.Path(own).expanduser()
    root = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(root) if root else pathlib.Path.home() / ".cache") / "jetspec_jax"


def keep() -> None:
    """Turns on jax's persistent compilation cache in our folder, unless it is set or the folder cannot be written.

    On a GPU jax keeps XLA's autotuning results in it too. A folder whose name is not UTF-8, which jax could not pass on
    to XLA, is not used either.
    """
    import jax

    folder, name = cache_folder() / "xla", "jax_compilation_cache_dir"
    given = getattr(jax.config, name)
    if not _utf8(given or folder):
        jax.config.update(name, None)
        return
    if given:
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        jax.config.update(name, str(folder))


def _utf8(path: str | pathlib.Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def check_device() -> None:
    """Raises ConfigError where jax has no device to compute on, which JAX_PLATFORMS can ask for."""
    import jax

    try:
        jax.devices()
    except (RuntimeError, AssertionError) as error:  # the second where a platform is known and has no device
        named = os.environ.get("JAX_PLATFORMS", "")
        why = (str(error).strip() or "no device of that kind is here").splitlines()[0][:200]
        raise ConfigError(f"JAX_PLATFORMS={named}: {why}; install its jax, or leave the variable out") from None


def tested_flags() -> tuple[str, ...]:
    """The flags for the jaxlib that is installed; they are never set unasked.

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
