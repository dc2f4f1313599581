"""Ctrl-C that a library cannot swallow."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 3.0


@contextmanager
def insistent_interrupts(again_s: float = AGAIN_S) -> Iterator[None]:
    """Raise KeyboardInterrupt again, after `again_s` seconds, until the block is being left.

    Python raises it wherever the main thread happens to be, which may be a callback or an extension
    that drops it. Outside the main thread nothing is changed.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    timers: list[threading.Timer] = []

    def interrupt(number: int, frame: FrameType | None) -> None:
        error = sys.exc_info()[1]
        while error is not None:  # what is closed on the way out is not disturbed
            if isinstance(error, KeyboardInterrupt):
                return
            error = error.__context__
        timer = threading.Timer(again_s, os.kill, (os.getpid(), signal.SIGINT))
        timer.daemon = True
        timers.append(timer)
        timer.start()
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for timer in timers:
            timer.cancel()
        signal.signal(signal.SIGINT, before)
