"""Landlock: a process gives up files outside its folder, TCP and signals, without privileges.

Linux 5.13 on for files; the kernel tells which further accesses it knows (docs.kernel.org,
userspace-api/landlock). Standard library only: `jail.py` imports it without the package.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

_LIBC = ctypes.CDLL(None, use_errno=True)
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446  # system calls, the same number on every machine
_READ = 1 | 4 | 8  # execute, read a file, read a folder
_FILE_ONLY = 1 | 2 | 4 | 1 << 14 | 1 << 15  # what a rule on something other than a folder may hold
_ACCESSES = {1: 13, 2: 14, 3: 15, 5: 16}  # ABI: how many kinds of access to files it knows
_TCP, _SIGNALS_AND_SOCKETS = 1 | 2, 1 | 2
_TCP_ABI, _SCOPED_ABI = 4, 6


class _Ruleset(ctypes.Structure):
    _fields_ = (
        ("files", ctypes.c_uint64),
        ("network", ctypes.c_uint64),
        ("scoped", ctypes.c_uint64),
    )


class _Beneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed", ctypes.c_uint64), ("parent", ctypes.c_int32))


def restrict(readable: Sequence[str], writable: Sequence[str]) -> int:
    """Confine this process and all that it starts; gives the kernel's ABI version.

    Raises:
        OSError: if the kernel has no Landlock or refuses.
    """
    abi = _call(_CREATE, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    everything = (1 << max(kinds for known, kinds in _ACCESSES.items() if known <= abi)) - 1
    rules = _Ruleset(
        everything,
        _TCP if abi >= _TCP_ABI else 0,
        _SIGNALS_AND_SOCKETS if abi >= _SCOPED_ABI else 0,
    )
    size = 24 if abi >= _SCOPED_ABI else 16 if abi >= _TCP_ABI else 8
    ruleset = _call(_CREATE, ctypes.byref(rules), ctypes.c_size_t(size), ctypes.c_uint32(0))
    allowed = [(path, _READ) for path in readable]
    allowed += [(path, _READ | 2) for path in readable if path.startswith("/dev/")]
    for path, access in [*allowed, *((path, everything) for path in writable)]:
        fd = os.open(path, os.O_PATH)
        mask = everything if os.path.isdir(path) else _FILE_ONLY
        rule = _Beneath(access & mask & everything, fd)
        _call(_ADD_RULE, ruleset, ctypes.c_int(1), ctypes.byref(rule), ctypes.c_uint32(0))
        os.close(fd)
    _call(_RESTRICT, ruleset, ctypes.c_uint32(0))
    os.close(ruleset)
    return abi


def _call(number: int, *arguments: object) -> int:
    found: int = _LIBC.syscall(ctypes.c_long(number), *arguments)
    if found < 0:
        reason = os.strerror(ctypes.get_errno())
        raise OSError(ctypes.get_errno(), f"Landlock system call {number}: {reason}")
    return found
