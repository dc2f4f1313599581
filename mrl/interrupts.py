"""Ctrl-C that a library cannot swallow, and signals that ask a run to stop in order."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

AGAIN_S = 3.0
_STOPS = (signal.SIGUSR1, signal.SIGTERM)


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


def ends_with_others() -> bool:
    """Say whether a launcher started this process as a rank, and ends all ranks with one."""
    return "TORCHELASTIC_RUN_ID" in os.environ or "SLURM_PROCID" in os.environ


@contextmanager
def stop_requests() -> Iterator[threading.Event]:
    """Give an event that SIGUSR1 or SIGTERM sets: finish the step in hand, save, leave.

    A second SIGTERM ends the process at once. SIGTERM is left to a launcher that started this
    process as a rank, since it ends the other ranks with it. Outside the main thread nothing is
    changed.
    """
    asked = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield asked
        return
    numbers = _STOPS[:1] if ends_with_others() else _STOPS

    def ask(number: int, frame: FrameType | None) -> None:
        asked.set()
        if number == signal.SIGTERM:
            signal.signal(number, signal.SIG_DFL)

    # None: a handler that was not set from Python, which cannot be put back
    before = {number: signal.signal(number, ask) or signal.SIG_DFL for number in numbers}
    try:
        yield asked
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
