"""One job at a time in a run folder."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

LOCK_FILE = ".lock"
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderInUseError(ValueError):
    """Another job works in the folder."""


@contextmanager
def folder_lock(root: Path) -> Iterator[None]:
    """Hold a run folder inside the block.

    The lock is the operating system's and goes with this process, however it ends; children do
    not have it. On a disk without locks a warning says so. Raises FolderInUseError, which names the
    holder.
    """
    root.mkdir(parents=True, exist_ok=True)
    with (root / LOCK_FILE).open("a+", encoding="utf-8") as file:
        try:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                file.seek(0)
                raise FolderInUseError(
                    f"trainer.default_local_dir {root} is in use by {file.read().strip()}: wait "
                    "for the end of that job, or give this one another folder"
                ) from None
            warnings.warn(f"{root} knows no locks ({error}): run one job in it", stacklevel=2)
        file.truncate(0)
        started = time.strftime("%Y-%m-%d %H:%M:%S")
        file.write(f"process {os.getpid()} on {socket.gethostname()} since {started}\n")
        file.flush()
        yield
        file.truncate(0)
