"""One save of a role under way on one rank."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from mrl.resharding.torch_dist_files import Stored

Written = tuple[list[Path], list[Stored]]  # files, and what those in Megatron's format hold


class Saving:
    """A folder that is being written, here and now or from a thread."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        write: Callable[[], Written],
        in_background: bool,
    ) -> None:
        """Write, or start to."""
        self.folder, self.settings = folder, settings
        self._write: Callable[[], Written] | None = write
        self._written: Written = ([], [])
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None
        if in_background:
            self._thread = threading.Thread(target=self._run, name="checkpoint", daemon=True)
            self._thread.start()
        else:
            self._run()

    @property
    def is_done(self) -> bool:
        """Say whether nothing is left to write, or writing failed."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> Written:
        """Wait for the end; what writing raised is in `error` then."""
        if self._thread is not None:
            self._thread.join()
        return self._written

    def _run(self) -> None:
        assert self._write is not None
        try:
            self._written = self._write()
        except BaseException as error:  # raised by whoever waits
            self.error = error
        self._write = None  # and with it the copies on the host


def flush(paths: Collection[Path]) -> None:
    """Bring files and their folders to the disk."""
    for path in {*paths, *(path.parent for path in paths)}:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
