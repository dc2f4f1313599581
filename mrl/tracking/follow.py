"""Reading a metrics file while a run writes it."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from mrl.tracking.jsonl import step_of


class Follower:
    """Reads only what is new; begins anew when the file is another one, or shorter."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file, self._offset = -1, 0
        self._rows: list[dict[str, Any]] = []

    def read(self) -> list[dict[str, Any]]:
        """Give all whole rows so far; none where the file is not there."""
        try:
            with self.path.open("rb") as file:
                found = os.fstat(file.fileno())
                if found.st_ino != self._file or found.st_size < self._offset:
                    self._forget()
                    self._file = found.st_ino
                file.seek(self._offset)
                text = file.read()
        except FileNotFoundError:
            self._forget()
            return []
        whole = text.rfind(b"\n") + 1  # what follows is still being written
        self._offset += whole
        for line in text[:whole].decode("utf-8", "replace").splitlines():
            if step_of(line) is not None:
                self._rows.append(json.loads(line))
        return self._rows

    def _forget(self) -> None:
        self._file, self._offset, self._rows = -1, 0, []
