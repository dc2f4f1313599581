"""A profiled rank leaves a trace with its phases; any other rank pays nothing."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from pathlib import Path

import torch

from mrl.workers.profiling import Profiler


def names(trace: Path) -> set[str]:
    return {
        event["name"] for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]
    }


def test_a_trace_names_phases_and_operations(tmp_path: Path) -> None:
    profiler = Profiler(3, torch.device("cpu"))
    for step in (1, 2):
        profiler.begin()
        with profiler.phase("actor", "update"):
            torch.ones(8) @ torch.ones(8)
        with profiler.phase("actor", "save"):
            pass
        (file,) = profiler.end(tmp_path / f"step_{step}")
        assert file == str(tmp_path / f"step_{step}" / "rank_3.trace.json.gz")
        assert names(Path(file)) >= {"update_actor", "actor.save", "aten::dot"}


def test_nothing_is_named_while_nothing_is_recorded() -> None:
    profiler = Profiler(0, torch.device("cpu"))
    assert isinstance(profiler.phase("actor", "update"), nullcontext)
