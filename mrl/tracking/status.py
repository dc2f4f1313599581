"""status.json: whether a run goes on, and how it ended."""

from __future__ import annotations

import json
import os
import socket
from dataclasses import asdict, dataclass
from pathlib import Path

from mrl.checkpoint.atomic import write_atomically

RUNNING, FINISHED, STOPPED, FAILED = "running", "finished", "stopped", "failed"
_FILE = "status.json"


@dataclass(frozen=True, slots=True)
class Status:
    """What the controller last said of a run."""

    state: str  # running | finished | stopped | failed
    step: int  # the last one that was written
    total_steps: int
    why: str  # one line; "" while it runs
    host: str
    pid: int

    @staticmethod
    def of_this_process(state: str, step: int, total_steps: int, why: str = "") -> Status:
        """Speak for the controller."""
        line = " ".join(why.split())
        return Status(state, step, total_steps, line, socket.gethostname(), os.getpid())

    def write(self, run: Path) -> None:
        """Write it into a run folder."""
        write_atomically(run / _FILE, json.dumps(asdict(self)) + "\n")


def read_status(run: Path) -> Status | None:
    """Read what is there; None where nothing is, or nothing that can be read."""
    try:
        return Status(**json.loads((run / _FILE).read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None
