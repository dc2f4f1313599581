"""A folder that appears whole or not at all, and whose writing can be taken up again."""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from mrl.checkpoint.atomic import sync_to_disk, write_atomically

MARKER = "CONVERTING.json"  # says what is being written; gone when all is


class Draft:
    """`TARGET.converting`, which becomes `TARGET` when it is complete."""

    def __init__(self, target: Path, job: Mapping[str, Any]) -> None:
        """Begin, or take up, the writing of `target`; `job` says from what and how (JSON).

        Raises ValueError when the target is there already, or a draft of another job is, or
        another process writes it.
        """
        self.target = target.absolute()
        check_free(self.target)
        self.path = draft_of(self.target)
        marker = self.path / MARKER
        self.resumed = self.path.is_dir() and any(self.path.iterdir())
        if self.resumed and not marker.is_file():
            raise ValueError(
                f"{self.path} is complete, but was not moved: move it to {self.target} or delete it"
            )
        text = json.dumps(job, indent=1, sort_keys=True) + "\n"
        if self.resumed and marker.read_text() != text:
            raise ValueError(
                f"{self.path} is what an interrupted conversion of another source, or with other "
                f"options, left; delete it, or choose another target (it says: {marker})"
            )
        if not self.resumed:
            write_atomically(marker, text)
        self._lock = _lock(marker)

    def commit(self) -> None:
        """Flush everything and move the folder to its place."""
        for path in sorted(self.path.rglob("*")):
            sync_to_disk(path)
        (self.path / MARKER).unlink()
        sync_to_disk(self.path)
        self.path.rename(self.target)
        sync_to_disk(self.target.parent)
        self._lock.close()


def draft_of(target: Path) -> Path:
    """Give the folder in which a target is written."""
    return target.with_name(f"{target.name}.converting")


def check_free(target: Path) -> None:
    """Refuse a target that is there already, saying what to do."""
    if (target / MARKER).is_file():
        raise ValueError(f"{target} is half-written ({MARKER} is in it); delete it first")
    if target.exists() and not (target.is_dir() and not any(target.iterdir())):
        raise ValueError(f"{target} is there already; delete it, or choose another target")


def check_whole(source: Path) -> None:
    """Refuse a source whose own conversion did not finish."""
    if (source / MARKER).is_file():
        raise ValueError(
            f"{source} is half-written ({MARKER} is in it): finish its conversion first"
        )


def check_space(folder: Path, num_bytes: int) -> None:
    """Refuse to begin what the disk cannot hold; `folder` need not be there yet."""
    while not folder.exists():
        folder = folder.parent
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ValueError(
            f"{folder} has {free / 1e9:.2f} GB free, {num_bytes / 1e9:.2f} GB are still to write"
        )


def _lock(path: Path) -> IO[str]:
    handle = path.open()
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise ValueError(f"{path.parent}: another process is writing it") from None
    return handle
