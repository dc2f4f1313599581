"""Does a long run stay as it began: memory, file handles, processes and step time?

The laptop quickstart (warm-up, then its RL config) goes on for hours, with validation and
checkpoints as configured; its processes are looked at every few seconds, from the first RL step
on. Then it is asked to end (SIGTERM) and must save, and leave nothing. Each quantity is given as
its median in ten equal parts of that time; growth compares the last part with the second, since
caches still fill in the first.
"""

from __future__ import annotations

import argparse
import contextlib
import signal
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import psutil

from benchmarks.record import ROOT
from mrl.tracking.jsonl import read_metrics
from tests.runs import MRL, Command

NAME = "soak"
_PARTS = 10
_START_LIMIT_S = 1800.0
_END_LIMIT_S = 120.0
_BESIDE = ("timing_s/testing", "timing_s/save_checkpoint")  # not in every step


@dataclass(frozen=True, slots=True)
class Look:
    """What the processes of a run held at a moment."""

    at: float  # time.time()
    controller_gb: float  # memory of its own, as the kernel counts it (USS)
    ranks_gb: float
    others_gb: float  # scoring processes, and what starts processes
    handles: int
    threads: int
    processes: int
    shared_files: int  # of /dev/shm

    @staticmethod
    def at_run(command: Command) -> Look:
        """Look at all processes; one that ends meanwhile is left out."""
        memory = {"controller": 0.0, "ranks": 0.0, "others": 0.0}
        handles = threads = processes = 0
        for process in (psutil.Process(command.process.pid), *command.tree()):
            with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
                kind = "ranks" if "RANK" in process.environ() else "others"
                kind = "controller" if process.pid == command.process.pid else kind
                memory[kind] += process.memory_full_info().uss / 1e9
                handles += process.num_fds()
                threads += process.num_threads()
                processes += 1
        shared = sum(1 for _ in Path("/dev/shm").iterdir())
        sizes = memory["controller"], memory["ranks"], memory["others"]
        return Look(time.time(), *sizes, handles, threads, processes, shared)


def run(argv: Sequence[str] = ()) -> dict[str, Any]:
    """Run for so long; gives each quantity over the time, its growth, and how the run ended."""
    parser = argparse.ArgumentParser(prog=f"benchmarks.run {NAME}", description=__doc__)
    parser.add_argument("--hours", type=float, default=2.0, help="of RL (default 2)")
    parser.add_argument("--seed", type=int, default=1, help="of the quickstart; names its folder")
    parser.add_argument("--every", type=float, default=10.0, help="seconds between two looks")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="of the RL stage")
    options = parser.parse_args(argv)
    folder = ROOT / "runs" / "quickstart" / f"seed_{options.seed}"
    metrics = folder / "grpo" / "metrics.jsonl"
    if metrics.exists():
        raise ValueError(f"{metrics.parent} holds a run already: take another --seed, or remove it")
    endless = ["trainer.total_training_steps=1000000", "trainer.total_epochs=1000000"]
    line = [*MRL, "quickstart", "--seed", str(options.seed), *endless, *options.overrides]
    with Command(line, folder / "soak") as command:
        _wait(command, metrics.exists, _START_LIMIT_S)
        start, looks = time.time(), [Look.at_run(command)]
        while time.time() - start < options.hours * 3600:
            time.sleep(options.every)
            if command.process.poll() is not None:
                raise RuntimeError(f"ended early:\n{command.stderr[-3000:]}")
            looks.append(Look.at_run(command))
        command.process.send_signal(signal.SIGTERM)
        asked = time.time()
        status = command.wait(_END_LIMIT_S)
        ended_s, left = time.time() - asked, command.survivors()
    rows = [row for row in read_metrics(metrics) if "timing_s/step" in row]
    kept = max(int(p.name.rpartition("_")[2]) for p in metrics.parent.glob("global_step_*[0-9]"))
    return {
        "hours": (looks[-1].at - looks[0].at) / 3600,
        "steps": rows[-1]["step"],
        "seconds_a_step": _over_time([_step_seconds(row) for row in rows]),
        **{name: _over_time([getattr(look, name) for look in looks]) for name in _QUANTITIES},
        "end": {
            "status": status,
            "seconds": ended_s,
            "last_checkpoint": kept,
            "processes_left": left,
        },
    }


_QUANTITIES = [name for name in Look.__dataclass_fields__ if name != "at"]


def _step_seconds(row: dict[str, Any]) -> float:
    seconds: float = row["timing_s/step"] - sum(row.get(name, 0.0) for name in _BESIDE)
    return seconds


def _over_time(values: Sequence[float]) -> dict[str, Any]:
    """Give the medians of ten equal parts, and the last one over the second."""
    cuts = [round(i * len(values) / _PARTS) for i in range(_PARTS + 1)]
    parts: list[float] = [statistics.median(values[a:b]) for a, b in pairwise(cuts) if a < b]
    return {
        "medians": [round(part, 4) for part in parts],
        "growth": round(parts[-1] / second, 4)
        if (second := parts[min(1, len(parts) - 1)])
        else None,
    }


def _wait(command: Command, until: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not until():
        if command.process.poll() is not None or time.monotonic() > deadline:
            raise RuntimeError(f"no first step:\n{command.stderr[-3000:]}")
        command.tree()
        time.sleep(0.5)
