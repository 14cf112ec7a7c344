"""SIGTERM as a question that training asks between two pieces of work, with an end where it cannot ask in time."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

GRACE = 1.5  # seconds until the process ends without an answer; while XLA compiles, no Python runs
STATUS = 143


class _Watch:
    """A thread that learns of signals while the main thread is inside a long call."""

    def __init__(self, log: Callable[[str], None]):
        self.came, self.answered, self._log = False, False, log
        self._outlet, inlet = os.pipe()
        os.set_blocking(inlet, False)
        self._others = signal.set_wakeup_fd(inlet, warn_on_full_buffer=False)
        self._inlet = inlet
        threading.Thread(target=self._wait, daemon=True).start()

    def stopped(self) -> bool:
        """Whether to stop; whoever hears so saves what there is, however long that takes."""
        self.answered = self.answered or self.came
        return self.came

    def _wait(self) -> None:
        while data := os.read(self._outlet, 1):
            if data[0] != signal.SIGTERM:
                if self._others >= 0:
                    os.write(self._others, data)
                continue
            self.came = True
            time.sleep(GRACE)
            if not self.answered:
                self._log(
                    "train: SIGTERM in the middle of a long step; the same command goes on at the last checkpoint"
                )
                os._exit(STATUS)

    def close(self) -> None:
        self.answered = True
        signal.set_wakeup_fd(self._others)
        os.close(self._inlet)


@contextlib.contextmanager
def asked(log: Callable[[str], None] = lambda line: None) -> Iterator[Callable[[], bool]]:
    """Yields the question whether SIGTERM came.

    A block that does not ask for `GRACE` seconds after the signal ends the process: a checkpoint is renamed into place
    when it is whole, so what is lost is what came after the last one. Outside the main thread the answer is no, and
    whoever runs it handles signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    watch = _Watch(log)

    def handle(*_) -> None:
        watch.came = True

    old = signal.signal(signal.SIGTERM, handle)
    try:
        yield watch.stopped
    finally:
        signal.signal(signal.SIGTERM, old)
        watch.close()
