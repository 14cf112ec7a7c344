"""The package's folder in the user's cache: the demo target, and compiled programs between processes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import tempfile

from jetspec_jax.fields import ConfigError


def path() -> pathlib.Path:
    """Returns JETSPEC_CACHE, or jetspec_jax in the user's cache directory.

    Raises:
      ConfigError: neither is given, and the user has no home, as in some containers.
    """
    own, root = os.environ.get("JETSPEC_CACHE"), os.environ.get("XDG_CACHE_HOME")
    folder = own or os.path.join(root or "~/.cache", "jetspec_jax")
    found = os.path.expanduser(folder)
    if found.startswith("~"):
        raise ConfigError(f"{folder}: there is no such home; set JETSPEC_CACHE to a folder for downloads and programs")
    return pathlib.Path(found)


def keep_programs() -> None:
    """Turns on jax's persistent compilation cache in our folder, unless it is set or the folder cannot be written.

    On a GPU jax keeps XLA's autotuning results in it too.
    """
    import jax

    name = "jax_compilation_cache_dir"
    if getattr(jax.config, name):
        return
    try:
        folder = path() / "xla"
    except ConfigError as error:
        print(f"warning: {error}; compiled programs are not kept", file=sys.stderr)
        return
    try:
        str(folder).encode()
    except UnicodeEncodeError:  # jax hands the name on as UTF-8
        print(f"warning: {str(folder)!r} is no UTF-8 name, so compiled programs are not kept", file=sys.stderr)
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        jax.config.update(name, str(folder))
