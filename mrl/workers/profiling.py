"""Profiles of a rank: a trace of what it computes, a snapshot of its memory, ranges by phase."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager as Context
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function

# What `timing_s/<phase>` and the controller call the work of a role.
_PHASES = {
    "rollout.generate": "gen",
    "actor.log_probs": "old_log_prob",
    "ref.log_probs": "ref",
    "critic.values": "values",
    "critic.update": "update_critic",
    "actor.update": "update_actor",
    "actor.update_fresh": "update_actor",
    "actor.supervise": "update_actor",
    "sync.run": "reshard",
}
_MEMORY_EVENTS = 200_000  # the last of them are kept, some 100 MB on the host


class Profiler:
    """The profiler of one rank, on between `begin` and `end`."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self._rank, self._on_gpu = rank, device.type == "cuda"
        self._profile: profile | None = None

    def begin(self) -> None:
        """Record from now on."""
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if self._on_gpu else [])]
        self._profile = profile(activities=activities, acc_events=True)  # one cycle, kept whole
        if self._on_gpu:
            torch.cuda.memory._record_memory_history(max_entries=_MEMORY_EVENTS)
        self._profile.start()

    def end(self, folder: Path) -> tuple[str, ...]:
        """Stop and write `rank_<r>.trace.json.gz`, on a GPU `rank_<r>.memory.pickle` too.

        Gives the files. The first opens in ui.perfetto.dev, the second in
        pytorch.org/memory_viz.
        """
        assert self._profile is not None, "nothing is recorded"
        recorded, self._profile = self._profile, None
        if self._on_gpu:
            torch.cuda.synchronize()
        recorded.stop()
        folder.mkdir(parents=True, exist_ok=True)
        files = [folder / f"rank_{self._rank}.trace.json.gz"]
        recorded.export_chrome_trace(str(files[0]))
        if self._on_gpu:
            files.append(folder / f"rank_{self._rank}.memory.pickle")
            torch.cuda.memory._dump_snapshot(str(files[1]))
            torch.cuda.memory._record_memory_history(enabled=None)
        return tuple(map(str, files))

    def phase(self, role: str, method: str) -> Context[object]:
        """Name what runs in a block, in the trace and for Nsight (NVTX); free unless recording."""
        if self._profile is None or role == "host":
            return nullcontext()
        return self._named(_PHASES.get(f"{role}.{method}", f"{role}.{method}"))

    @contextmanager
    def _named(self, phase: str) -> Iterator[None]:
        with ExitStack() as ranges:
            ranges.enter_context(record_function(phase))
            if self._on_gpu:
                ranges.enter_context(torch.cuda.nvtx.range(phase))
            yield
