"""Ctrl-C and SIGTERM: end what is going on in order if that goes quickly, and at once if it does not.

Python runs its signal handlers in the main thread between two instructions, so while that thread waits in a
library written in another language (an origin that does not answer) they do not run at all. A thread of its own
is therefore told of the signal through a pipe. To end at once is as safe as any kill: what is done is kept.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from llm_prefetch.cli.display import say

_SILENT_SECONDS = 0.5
_GRACE_SECONDS = 4.5
_SIGNALLED = 128
_SIGNALS = (signal.SIGINT, signal.SIGTERM)
_SHOW_CURSOR = "\x1b[?25h"


@contextmanager
def interruptible() -> Iterator[threading.Event]:
    """Raise `KeyboardInterrupt` in the main thread at the first signal; the second one, or a delay, ends the process.

    The event is set with the first signal, for threads to look at: a transfer then ends within a piece.
    """
    stop, raised = threading.Event(), threading.Event()
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def handle(number: int, _frame: object) -> None:
        stop.set()
        if not raised.is_set():
            raised.set()
            raise KeyboardInterrupt(number)

    before = {number: signal.signal(number, handle) for number in _SIGNALS}
    wakeup = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    watcher = threading.Thread(target=_watch, args=(reading, stop), name="interrupt", daemon=True)
    watcher.start()
    try:
        yield stop
    finally:
        signal.set_wakeup_fd(wakeup)
        for number, handler in before.items():
            # After one signal the process is ending: another one must not change the exit code.
            signal.signal(number, signal.SIG_IGN if raised.is_set() else handler)
        os.close(writing)
        watcher.join()
        os.close(reading)


def exit_code(interrupt: KeyboardInterrupt) -> int:
    """The exit code of a process that a signal ended, and the talk that goes with it."""
    say("llm-prefetch: interrupted; run the same again, what is done is kept")
    number: int = interrupt.args[0] if interrupt.args else signal.SIGINT
    return _SIGNALLED + number


def _watch(reading: int, stop: threading.Event) -> None:
    number = _next_signal(reading)
    if number is None:
        return
    stop.set()
    if not _soon(reading, _SILENT_SECONDS):
        say("stopping; once more to stop at once")
        _soon(reading, _GRACE_SECONDS)
    if _soon(reading, 0) and _next_signal(reading) is None:
        return
    if sys.stderr.isatty():
        say(_SHOW_CURSOR)
    os._exit(exit_code(KeyboardInterrupt(number)))


def _soon(reading: int, seconds: float) -> bool:
    return bool(select.select([reading], [], [], seconds)[0])


def _next_signal(reading: int) -> int | None:
    """The next of our signals; `None` when all is done."""
    while number := os.read(reading, 1):
        if number[0] in _SIGNALS:
            return number[0]
    return None
