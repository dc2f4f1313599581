"""Profiles and busy seconds on one GPU: run with `python -m pytest -m gpu tests/gpu`."""

from __future__ import annotations

import gzip
import json
import pickle
import time
from pathlib import Path

import pytest
import torch

from mrl.workers.busy import BusyClock
from mrl.workers.profiling import Profiler

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
DEVICE = torch.device("cuda", 0)


def multiply(times: int) -> None:
    matrix = torch.ones(4096, 4096, device=DEVICE)
    for _ in range(times):
        matrix = matrix @ matrix * 1e-4


def test_a_profile_holds_kernels_phases_and_the_memory_of_its_own_step(tmp_path: Path) -> None:
    profiler = Profiler(0, DEVICE)
    for step in (1, 2):  # a second one, after the first
        profiler.begin()
        with profiler.phase("actor", "update"):
            multiply(2)
        trace, memory = map(Path, profiler.end(tmp_path / f"step_{step}"))
        events = json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
        assert "update_actor" in {event["name"] for event in events}
        assert "kernel" in {event.get("cat") for event in events}
        with memory.open("rb") as file:
            snapshot = pickle.load(file)
        traced = [e["action"] for device in snapshot["device_traces"] for e in device]
        assert "alloc" in traced
    multiply(1)
    assert not any(torch.cuda.memory._snapshot()["device_traces"]), "recording is off again"


def test_own_work_ends_at_the_meeting_although_the_host_is_ahead() -> None:
    clock = BusyClock(DEVICE)
    meet = clock.until(multiply)  # what peers are waited for in
    multiply(1)
    torch.cuda.synchronize()
    clock.start()
    multiply(20)
    meet(200)  # queued at once, ten times as long
    torch.cuda.synchronize()
    own = clock.seconds()
    begun = time.perf_counter()
    multiply(20)
    torch.cuda.synchronize()
    alone = time.perf_counter() - begun
    assert 0.3 * alone < own < 3 * alone
