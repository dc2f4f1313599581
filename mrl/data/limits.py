"""A time limit on Python code that may not end, in any thread."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import time
from collections.abc import Iterator

_CHECK_S = 1.0
_raise_in = ctypes.pythonapi.PyThreadState_SetAsyncExc


class _Watch(threading.Thread):
    """One thread that watches all others: a limited block costs two assignments, no timer."""

    def __init__(self) -> None:
        super().__init__(daemon=True, name="time limits")
        self.deadlines: dict[int, float] = {}  # by thread
        self.late: set[int] = set()  # threads that were sent a TimeoutError
        self.lock = threading.Lock()

    def run(self) -> None:
        """Interrupt what is late."""
        while True:
            time.sleep(_CHECK_S)
            with self.lock:
                now = time.monotonic()
                for thread in [t for t, limit in self.deadlines.items() if limit < now]:
                    del self.deadlines[thread]
                    self.late.add(thread)
                    _raise_in(ctypes.c_ulong(thread), ctypes.py_object(TimeoutError))


_watch: _Watch | None = None
_starting = threading.Lock()


def _running() -> _Watch:
    global _watch
    with _starting:
        if _watch is None or not _watch.is_alive():  # a fork has no threads
            _watch = _Watch()
            _watch.start()
        return _watch


@contextlib.contextmanager
def limited(seconds: float) -> Iterator[None]:
    """Raise TimeoutError inside the block when it takes longer, to about a second.

    It comes between two bytecodes: a call into C is not interrupted. Blocks do not nest.
    """
    watch, thread = _running(), threading.get_ident()
    with watch.lock:
        watch.deadlines[thread] = time.monotonic() + seconds
    try:
        yield
    finally:
        with watch.lock:
            watch.deadlines.pop(thread, None)
            is_late = thread in watch.late
            watch.late.discard(thread)
        if is_late:  # sent, maybe not yet raised: it must not hit what comes after
            _raise_in(ctypes.c_ulong(thread), None)
