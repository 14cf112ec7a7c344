"""The package's folder in the user's cache: the demo target, and compiled programs between processes."""

from __future__ import annotations

import contextlib
import os
import pathlib
import sys
import tempfile


def path() -> pathlib.Path:
    """Returns JETSPEC_CACHE, or jetspec_jax in the user's cache directory."""
    own = os.environ.get("JETSPEC_CACHE")
    if own:
        return pathlib.Path(own).expanduser()
    root = os.environ.get("XDG_CACHE_HOME")
    return (pathlib.Path(root) if root else pathlib.Path.home() / ".cache") / "jetspec_jax"


def keep_programs() -> None:
    """Turns on jax's persistent compilation cache in our folder, unless it is set or the folder cannot be written.

    On a GPU jax keeps XLA's autotuning results in it too.
    """
    import jax

    name = "jax_compilation_cache_dir"
    if getattr(jax.config, name):
        return
    folder = path() / "xla"
    try:
        str(folder).encode()
    except UnicodeEncodeError:  # jax hands the name on as UTF-8
        print(f"warning: {str(folder)!r} is no UTF-8 name, so compiled programs are not kept", file=sys.stderr)
        return
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
        jax.config.update(name, str(folder))
