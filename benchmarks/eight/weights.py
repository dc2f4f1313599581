"""Weight transfers, each in ranks of its own: `mrl bench reshard` and what the planner says."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from benchmarks import reshard
from benchmarks.eight.entries import Entry, Numbers, Result
from benchmarks.transfers import OF_WORLD, Case
from mrl.resharding import plan
from mrl.resharding.estimate import estimate
from mrl.resharding.hardware import GPUS, NETWORKS


def entries(world: int, smoke: bool, gpu: str) -> list[Entry]:
    """List one entry a transfer on so many ranks."""
    return [
        Entry(
            f"{world}/{name}",
            lambda: None,
            partial(_measure, name, smoke),
            measured,
            partial(_planned, case, smoke, gpu),
        )
        for name, case in OF_WORLD[world].items()
    ]


def measured(found: Mapping[str, Any]) -> Numbers:
    """Give what the planner predicts."""
    return {
        "direct_ms": found["direct"]["median_ms"],
        "gather_ms": found["gather"]["median_ms"],
        "received_gb": max(found["direct"]["received_bytes"]) / 1e9,
    }


def _measure(name: str, smoke: bool) -> Result:
    found: Result = reshard.run_section("tensors", [name], smoke)[name]
    if "failed" in found:
        raise RuntimeError(f"{found['failed']}\n{found['log']}")
    return found


def _planned(case: Case, smoke: bool, gpu: str) -> Numbers:
    settings = reshard.SMOKE if smoke else reshard.REAL
    shape = settings.shape(case.model)
    source = case.source(shape)
    made = plan(source.layout(), case.target(shape).layout(), settings.bucket_bytes)
    chip = GPUS[gpu]
    times = estimate(made, source, settings.bucket_bytes, chip, NETWORKS[chip.network])
    return {
        "direct_ms": 1e3 * times.direct.total,
        "gather_ms": 1e3 * times.allgather.total,
        "received_gb": max(made.floor_bytes(rank) for rank in range(case.world)) / 1e9,
    }
