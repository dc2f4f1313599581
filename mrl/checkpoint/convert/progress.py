"""What a long conversion says while it runs."""

from __future__ import annotations

import re
import time
from collections.abc import Callable

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class Progress:
    """Count bytes; say after each file how far it is, how fast and for how long still."""

    def __init__(self, num_files: int, num_bytes: int, say: Callable[[str], None]) -> None:
        self._files, self._bytes, self._say = num_files, num_bytes, say
        self._done_files = self._done_bytes = self._kept_bytes = 0
        self._start = time.monotonic()

    def advance(self, num_bytes: int, kept: bool = False) -> None:
        """Count a file; `kept` ones were there already and do not count for the speed."""
        self._done_files += 1
        self._done_bytes += num_bytes
        if kept:
            self._kept_bytes += num_bytes
            return
        seconds = max(time.monotonic() - self._start, 1e-9)
        speed = (self._done_bytes - self._kept_bytes) / seconds
        left = (self._bytes - self._done_bytes) / max(speed, 1.0)
        self._say(
            f"file {self._done_files}/{self._files}: {size(self._done_bytes)} of "
            f"{size(self._bytes)}, {size(speed)}/s, {left:.0f} s left"
        )


def parse_size(text: str) -> int:
    """Read a number of bytes such as 5GB (10^9) or 5GiB (2^30); raises ValueError."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([a-zA-Z]*)", text.strip())
    unit = (found[2].upper() or "B") if found else ""
    if found is None or unit not in _UNITS or float(found[1]) == 0:
        raise ValueError(f"size {text!r}: expected a number and a unit, such as 5GB or 500MB")
    return int(float(found[1]) * _UNITS[unit])


def size(num_bytes: float) -> str:
    """Write a number of bytes for people."""
    for unit, count in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if num_bytes >= count:
            return f"{num_bytes / count:.1f} {unit}"
    return f"{num_bytes:.0f} B"
