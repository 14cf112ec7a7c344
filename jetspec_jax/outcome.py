"""How a command ends: one line for whatever was raised, and its exit status; Ctrl-C and SIGTERM within two seconds.

Status: 0 done, 1 the files or the run are wrong, 2 the options alone are, 130 interrupted, 143 terminated. Set
JETSPEC_TRACEBACK=1 to see where an error comes from. Nothing here imports jax or anything else that is slow, so that
this works while they are being imported.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import importlib
import io
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator

TYPE_CHECKING = False  # typing itself would take a while
if TYPE_CHECKING:
    from typing import Any, NoReturn

WORDS: dict[int, str] = {signal.SIGINT: "interrupted", signal.SIGTERM: "terminated"}
GRACE = 1.2  # seconds that a signalled command has for its own end; no Python runs while XLA compiles or computes
LONGEST = 500  # characters of a line
FULL = ("RESOURCE_EXHAUSTED", "out of memory", "Out of memory")
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_listeners: list[_Listener] = []
_errors: tuple[Any, str] | None = None  # where to, and a label, where stderr is no longer this process's own


class Terminated(BaseException):
    """SIGTERM came."""


def start(module: str) -> NoReturn:
    """Runs `main` of a module as this process's command; imports it with signals answered already."""
    os.environ["JAX_ENABLE_X64"] = "0"  # every program is 32-bit, and says its dtypes for that
    name = installed() or module.removeprefix("jetspec_jax.").removesuffix(".server")
    with listening(name):
        status = run(name, lambda: importlib.import_module(module).main())
    sys.exit(status)


# The installed commands; their modules are imported when they run.
decode, train, audit, doctor, serve = (
    functools.partial(start, f"jetspec_jax.{name}") for name in ("decode", "train", "audit", "doctor", "serve.server")
)


def run(name: str, work: Callable[[], int], full: str = "", after: str = "") -> int:
    """Calls `work` and returns its status; what it raises becomes one line on stderr, and the status for that.

    name: what the line begins with. full: what helps where the device is full. after: what an interrupted command says
    of itself.
    """
    for listener in _listeners:
        listener.after = after
    for output in (sys.stdout, sys.stderr):  # what a narrow terminal cannot show is escaped
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="backslashreplace")
    try:
        status = work()
        _flush()
        return status
    except BaseException as error:
        return _refuse(name, error, full, after)


def _refuse(name: str, error: BaseException, full: str, after: str) -> int:
    came = next((listener.came for listener in _listeners if listener.came), None)
    if came or isinstance(error, KeyboardInterrupt | Terminated):  # whatever a library made of the signal
        number = came or (signal.SIGTERM if isinstance(error, Terminated) else signal.SIGINT)
        for listener in _listeners:
            listener.name, listener.came = name, number
            _leave(listener)
        return _say(name, WORDS[number] + after, 128 + number)
    if isinstance(error, Exception) and os.environ.get("JETSPEC_TRACEBACK") and not _ours(error):
        raise error
    try:
        _flush()
        if isinstance(error, SystemExit):  # argparse after its help, a library
            known = error.code is None or isinstance(error.code, int)
            return int(error.code or 0) if known else _say(name, str(error.code), 1)
    except OSError as broken:
        _discard()
        error = broken
    if isinstance(error, BrokenPipeError):  # whoever read our output has had enough
        _discard()
        return 1
    return _say(name, line(error, full), 2 if type(error).__name__ == "UsageError" else 1)


def line(error: BaseException, full: str = "") -> str:
    """Returns one line for people. full: what helps where the device is full."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    text, kind = str(error), type(error).__name__
    if _ours(error):
        return cut(" ".join(text.split()))
    text = next(filter(None, map(str.strip, text.splitlines())), "")
    stored = _no_space(error)
    if stored is not None:
        return cut(stored)
    if isinstance(error, OSError):
        where = f"{os.fsdecode(error.filename)}: " if isinstance(error.filename, str | bytes) else ""
        return cut(f"{where}{error.strerror or text}")
    if isinstance(error, MemoryError):
        return "out of memory; a smaller model, batch or context needs less"
    if isinstance(error, RecursionError):
        return "something is nested too deeply to be read"
    if isinstance(error, UnicodeError):
        return cut(f"text that is not UTF-8 ({text})")
    if "initialize backend" in text:  # a plain RuntimeError of jax
        return cut(text)
    if any(word in text for word in FULL):
        return f"{text[:200]} (if the device is full: {full or 'end other programs'})"
    if kind in ("JaxRuntimeError", "XlaRuntimeError"):
        return cut(text[:300])
    return cut(f"{kind}: {text[:300]} (not expected; JETSPEC_TRACEBACK=1 shows where)")


def _ours(error: BaseException) -> bool:
    """Whether the message was written for people: every error class of this package is."""
    return type(error).__module__.startswith("jetspec_jax.")


def _no_space(error: BaseException) -> str | None:
    """The line for a full disk, however deep a library has wrapped it."""
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, OSError) and link.errno in NO_SPACE:
            return (f"{link.filename}: " if link.filename else "") + os.strerror(link.errno)
        text = str(link)
        for number in NO_SPACE:
            if os.strerror(number) in text:
                return os.strerror(number)
        link = link.__cause__ or link.__context__
    return None


def cut(text: str) -> str:
    """Returns a line of at most `LONGEST` characters, without the middle of a longer one: what helps is at its end."""
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]} ... {text[5 - LONGEST // 2 :]}"


def name_errors(output: Any, label: str) -> None:
    """Says errors there from now on, with a label: what else is printed is another process's to say."""
    global _errors
    _errors = output, f" ({label})"


def _say(name: str, text: str, status: int) -> int:
    output, label = _errors or (sys.stderr, "")
    with contextlib.suppress(OSError, ValueError):
        print(f"{name}{label}: {text}", file=output, flush=True)
    return status


def _flush() -> None:
    if sys.stdout is not None and not sys.stdout.closed:
        sys.stdout.flush()


def _discard() -> None:
    """What is still to be printed goes nowhere, so that Python's own end does not stumble over it."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def installed() -> str | None:
    """Returns the name of the installed command that is running, such as jetspec-decode; None for files and modules."""
    name = os.path.basename(sys.argv[0] if sys.argv else "")
    return name if name.startswith("jetspec-") else None


@contextlib.contextmanager
def listening(name: str) -> Iterator[None]:
    """Answers SIGINT and SIGTERM for this process from here on; the block ends the process if one came.

    The first signal raises KeyboardInterrupt (or `Terminated`) in the main thread. Where no Python runs there, or where
    it is swallowed, the process ends all the same after `GRACE` seconds: everything that is kept is written whole or
    not at all, so that nothing is lost.
    """
    _open_streams(name)
    listener = _Listener(name)
    _listeners.append(listener)
    yield
    if listener.came:
        _leave(listener)
    listener.close()


def _leave(listener: _Listener) -> NoReturn:
    """Ends the process now: without waiting for what the device still computes, and while the frames that were at work
    still hold what it computes with. Letting go of that under its hands crashes now and then."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
    listener.end()


def _open_streams(name: str) -> None:
    """Python has None for a stream that is closed, and its number would go to the first file that is opened."""
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (for the rest of the process)
    if sys.stdout is None:
        print(f"{name}: standard output is closed; there is nowhere to answer", file=sys.stderr)
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise SystemExit(1)


def _importing(frame: Any) -> bool:
    """Whether a module is being imported: extension modules crash or swallow what is raised in them, and nothing that
    is kept is being written. So also before the command's own work begins."""
    while frame is not None and frame.f_code is not run.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return frame is None


class _Listener:
    """The handler of both signals, and a thread that notices where the handler cannot run."""

    def __init__(self, name: str):
        self.name, self.after, self.came, self.said = name, "", 0, False
        inlet, self._outlet = os.pipe()
        os.set_blocking(self._outlet, False)
        signal.set_wakeup_fd(self._outlet, warn_on_full_buffer=False)
        for number in WORDS:
            if signal.getsignal(number) != signal.SIG_IGN:  # nohup, or a job in the background
                signal.signal(number, self._handle)
        self._unraisable = sys.unraisablehook
        sys.unraisablehook = self._swallowed
        threading.Thread(target=self._watch, args=(inlet,), daemon=True).start()

    def _handle(self, number: int, frame: Any) -> None:
        again, self.came = self.came, self.came or number
        if again or _importing(frame):
            self.end()
        raise Terminated() if number == signal.SIGTERM else KeyboardInterrupt()

    def _swallowed(self, unraisable: Any) -> None:
        if not issubclass(unraisable.exc_type, KeyboardInterrupt | Terminated):
            self._unraisable(unraisable)

    def _watch(self, inlet: int) -> None:
        while data := os.read(inlet, 1):
            number = data[0]
            if number in WORDS and signal.getsignal(number) == self._handle:  # training answers SIGTERM itself
                time.sleep(GRACE)
                self.came = self.came or number
                self.end()

    def end(self) -> NoReturn:
        """Ends the process now."""
        if not self.said:
            self.said = True
            os.write(2, f"{self.name}: {WORDS[signal.Signals(self.came)]}{self.after}\n".encode())
        os._exit(128 + self.came)

    def close(self) -> None:
        """Leaves the signals to the system: the work is done, and only Python's own end is left."""
        for number in WORDS:
            if signal.getsignal(number) == self._handle:
                signal.signal(number, signal.SIG_DFL)
