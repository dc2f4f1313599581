"""`mrl train` and its ranks, noting when the parts of their start begin and end; light to import.

python -m benchmarks.marked CONFIG [key=value ...] is `mrl train CONFIG [key=value ...]`; the notes
go to the folder that MRL_MARKS names. With --rank it is a rank of that run.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Any

FOLDER = "MRL_MARKS"
_RANK = "--rank"


def mark(part: str, start: float, end: float) -> None:
    """Note a part, in seconds since the epoch; at once, since ranks may be killed."""
    who = os.environ.get("RANK", "command")
    with (Path(os.environ[FOLDER]) / f"{who}.jsonl").open("a") as file:
        file.write(json.dumps({"part": part, "start": start, "end": end}) + "\n")


def marked(owner: Any, name: str, part: str) -> None:
    """Have a method noted whenever it runs to its end."""
    method: Callable[..., Any] = getattr(owner, name)

    @wraps(method)
    def run(*args: Any, **kwargs: Any) -> Any:
        start = time.time()
        answer = method(*args, **kwargs)
        mark(part, start, time.time())
        return answer

    setattr(owner, name, run)


def command(argv: list[str]) -> int:
    """Be `mrl train`."""
    import mrl.cli
    import mrl.trainer
    from mrl.workers.group import RolloutGroup
    from mrl.workers.spmd import SpawnedPool

    now = time.time()
    mark("imports", now, now)
    SpawnedPool.module, SpawnedPool.arguments = "benchmarks.marked", (_RANK,)
    marked(SpawnedPool, "__init__", "pool")
    marked(RolloutGroup, "sync", "sync")
    marked(mrl.trainer._Run, "step", "step")
    return mrl.cli.main(["train", *argv])


def rank() -> None:
    """Be a rank."""
    from mrl.workers import spmd
    from mrl.workers.host import WorkerHost

    for method, part in (
        ("_join", "join"),
        ("_build_rollout", "engine"),
        ("_build_megatron", "megatron"),
        ("_build_sync", "sync_layout"),
    ):
        marked(WorkerHost, method, part)
    spmd._main()


if __name__ == "__main__":
    if sys.argv[1:] == [_RANK]:
        rank()
    else:
        sys.exit(command(sys.argv[1:]))
