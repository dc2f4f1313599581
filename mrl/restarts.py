"""Another try after a failed rank, from the last checkpoint: trainer.max_restarts.

Under torchrun a failed rank ends the controller too, so there torchrun tries again
(`--max-restarts`) and this module only tells the tries apart.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable
from itertools import count
from threading import Event

from mrl.checkpoint.atomic import write_atomically
from mrl.checkpoint.folder import CheckpointFolder, Found, Latest
from mrl.config.schema import TrainerConfig
from mrl.workers.group import WorkerError

_RUN_ID = "TORCHELASTIC_RUN_ID"
_STARTED = ".started_by_torchrun"


def with_restarts(run: Callable[[int], None], allowed: int, stop: Event) -> None:
    """Call `run(number)`, number counting the tries before it, until one succeeds.

    Tries again after a failed rank, `allowed` times, unless the run was asked to stop or the
    failure is of wrong input. Raises WorkerError with the last cause.
    """
    for number in count():
        try:
            run(number)
        except WorkerError as error:
            if number >= allowed or stop.is_set() or error.lasting:
                tries = f"after {number} of {allowed} restarts (trainer.max_restarts), "
                raise error.within(tries if number else "") from None
            print(error.evidence, file=sys.stderr)
            told = f"restart {number + 1} of {allowed} (trainer.max_restarts), since {error.cause}"
            print(told, file=sys.stderr, flush=True)
        else:
            return


def resume_point(folder: CheckpointFolder, trainer: TrainerConfig, tries: int) -> Latest:
    """Apply trainer.resume_mode to a run that was tried before, here or by torchrun.

    Another try goes on from what the ones before it have saved, whatever the mode. Raises as
    `CheckpointFolder.resume_point`.
    """
    if int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")) and _was_started(folder):
        tries += 1
    first = folder.resume_point(trainer.resume_mode, trainer.resume_from_path)
    if not tries:
        return first
    latest = folder.latest()  # the first try has set aside what was later than its start
    start = first.found.step if first.found else -1
    return latest if latest.found is not None and latest.found.step > start else first


def start_from(folder: CheckpointFolder, found: Found | None) -> None:
    """Set aside what is later than a run's start, and note it for torchrun's further tries.

    A try of torchrun's that failed before this has set nothing aside: what it left there is of
    another run.
    """
    folder.set_aside(found.step if found else -1)
    if _RUN_ID in os.environ:
        folder.root.mkdir(parents=True, exist_ok=True)
        write_atomically(folder.root / _STARTED, _job())


def _was_started(folder: CheckpointFolder) -> bool:
    path = folder.root / _STARTED
    return path.is_file() and path.read_text(encoding="utf-8") == _job()


def _job() -> str:
    """Name the torchrun agent that starts this process again and again."""
    return f"{os.environ.get(_RUN_ID, '')} {socket.gethostname()} {os.getppid()}\n"
