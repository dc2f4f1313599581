"""Ranks of a training benchmark: the trainer's own, with weights drawn instead of read.

They outlive a job, so that one start of the processes serves many layouts, and they answer what a
benchmark asks beside the roles: memory, time, a profile.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks import sides
from mrl.resharding.coverage import padding_of
from mrl.workers import spmd
from mrl.workers.group import call_all
from mrl.workers.specs import JobSpec
from mrl.workers.spmd import SpawnedPool
from mrl.workers.wire import receive, serve

ONE_DEVICE = "--one-device"
_CHECK_TIMEOUT = timedelta(seconds=60)
_PROFILED = 25  # kernels in the table
# Two ranks on one GPU: NCCL takes them for two hosts and talks over the loopback interface.
_AS_TWO_HOSTS: Mapping[str, str] = {
    "LOCAL_RANK": "0",
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_P2P_DISABLE": "1",
    "NCCL_SHM_DISABLE": "1",
    "NCCL_MNNVL_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_CUMEM_ENABLE": "0",
}


class BenchmarkPool(SpawnedPool):
    """Ranks on this host that take one job after another."""

    module = "benchmarks.ranks"

    def open(self, spec: JobSpec) -> None:
        """Build the roles of a job in place of the last one's."""
        self.ask("", "build", spec)

    def ask(self, role: str, method: str, *args: Any) -> list[Any]:
        """Call every rank and give their answers in rank order."""
        return call_all(self, range(self.world_size), role, method, *args)


class OneDevicePool(BenchmarkPool):
    """Ranks that share the first GPU: for correctness alone, they take turns on it."""

    arguments = (ONE_DEVICE,)


@torch.no_grad()
def draw(weights: Any, folder: Path) -> None:
    """Fill a role's weights without files: matrices by the config's std, norms near 1.

    The values are those of the logical tensors in bfloat16, the same in every layout and dtype.
    """
    params = weights.params()
    for view in padding_of(weights.layout, weights.rank, params):
        view.zero_()
    std = json.loads((folder / "config.json").read_text())["initializer_range"]
    logical = {
        name: replace(info, dtype="bfloat16") for name, info in weights.layout.tensors.items()
    }
    if params:
        device = next(iter(params.values())).device
        sides.Weights(logical, device, std).fill(weights.layout, weights.rank, params)


class Probe:
    """What a benchmark asks of one rank beside its roles."""

    def __init__(self, host: Any) -> None:
        self.host = host
        self._cuda = host.device.type == "cuda"
        activities = [torch.profiler.ProfilerActivity.CPU]
        if self._cuda:
            activities.append(torch.profiler.ProfilerActivity.CUDA)
        self._profiler = partial(torch.profiler.profile, activities=activities)
        self._running: Any = None

    def synchronize(self) -> None:
        """Wait for the device."""
        if self._cuda:
            torch.cuda.synchronize()

    def reset_peak(self) -> None:
        """Start anew to watch for the highest memory use."""
        if self._cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()

    def memory(self) -> dict[str, float]:
        """Give this process's memory on the device and on the host, GB; zeros on a CPU device."""
        resident = int(Path("/proc/self/statm").read_text().split()[1])
        host = {"host": resident * os.sysconf("SC_PAGE_SIZE") / 1e9}
        if not self._cuda:
            names = ("allocated", "reserved", "peak_allocated", "peak_reserved")
            return host | dict.fromkeys(names, 0.0)
        torch.cuda.synchronize()
        return host | {
            "allocated": torch.cuda.memory_allocated() / 1e9,
            "reserved": torch.cuda.memory_reserved() / 1e9,
            "peak_allocated": torch.cuda.max_memory_allocated() / 1e9,
            "peak_reserved": torch.cuda.max_memory_reserved() / 1e9,
        }

    def give_back(self) -> float:
        """Free what the layout lets leave the device; gives the seconds."""
        self.synchronize()
        start = time.perf_counter()
        self.host._roles["actor"].engine.memory.give_back()
        self.synchronize()
        return time.perf_counter() - start

    def bring(self) -> float:
        """Bring all that training needs and changes; gives the seconds."""
        from mrl.workers.megatron.offload import TRAIN

        self.synchronize()
        start = time.perf_counter()
        engine = self.host._roles["actor"].engine
        with engine.groups.active():
            engine.memory.enter(TRAIN)
        self.synchronize()
        return time.perf_counter() - start

    def host_bytes(self) -> int:
        """Count the bytes of the buffers that offloaded memory goes to."""
        return int(self.host._roles["actor"].engine.memory.host_bytes)

    def start_profile(self) -> None:
        """Record every kernel from here on."""
        self.synchronize()
        self._running = self._profiler()
        self._running.__enter__()

    def stop_profile(self) -> str:
        """End the recording; give its table, the kernels by their time."""
        self.synchronize()
        self._running.__exit__(None, None, None)
        by = "self_cuda_time_total" if self._cuda else "self_cpu_time_total"
        table = self._running.key_averages().table(
            sort_by=by, row_limit=_PROFILED, max_name_column_width=90
        )
        self._running = None
        return str(table)

    def implementation(self) -> dict[str, str]:
        """Say what the engine resolved its `auto` settings to."""
        precision = self.host._roles["actor"].engine.precision
        return {"dtype": str(precision.dtype), "transformer_impl": precision.transformer_impl}


class RankServer:
    """One rank's answers, over all its jobs."""

    def __init__(self, store: dist.Store) -> None:
        self.store, self._jobs = store, 0
        self.host: Any = None
        self.probe: Probe | None = None

    def call(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        """Build a job, or pass a call on to it."""
        if role == "":
            own: dict[str, Callable[..., Any]] = {
                "build": self._build,
                "clear": self.close,
                "all_reduce": self._all_reduce,
            }
            return own[method](*args)
        if role == "probe":
            return getattr(self.probe, method)(*args)
        return self.host.call(role, method, args)

    def close(self) -> int:
        """Leave the last job; gives the bytes that it leaves on the device, as it should none."""
        if self.host is not None:
            from megatron.core import parallel_state

            self.host.close()
            # Megatron lists every group that it made, and a listed one keeps its threads
            parallel_state._global_process_group_list = None
        self.host = self.probe = None
        gc.collect()
        if not torch.cuda.is_available():
            return 0
        torch.cuda.empty_cache()
        return torch.cuda.memory_allocated()

    def _build(self, spec: JobSpec | None = None) -> None:
        from mrl.workers.host import WorkerHost

        if spec is None:
            return  # the pool's first word: jobs follow
        self.close()
        self._jobs += 1
        self.host = WorkerHost(spec, dist.PrefixStore(f"job_{self._jobs}", self.store))
        self.probe = Probe(self.host)

    def _all_reduce(self, device: str) -> float:
        """Sum the ranks' numbers on the device, each its rank plus one."""
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        if device == "cuda":
            torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.PrefixStore("check", self.store),
            rank=rank,
            world_size=world,
            timeout=_CHECK_TIMEOUT,
        )
        number = torch.tensor(rank + 1.0, device=device)
        dist.all_reduce(number)
        total = float(number)
        dist.destroy_process_group()
        return total


def _work(connection: Any, store: dist.Store) -> None:
    from mrl.workers.megatron.weights import Weights

    receive(connection)  # the spec that the pool was made with
    Weights.load = draw  # type: ignore[method-assign]
    server = RankServer(store)
    serve(connection, server.call)
    server.close()


def main(args: Sequence[str], work: Callable[[Any, dist.Store], None] = _work) -> None:
    """Be a rank that does `work`."""
    if ONE_DEVICE in args:
        os.environ.update(_AS_TWO_HOSTS, NCCL_HOSTID=f"rank{os.environ['RANK']}")
    spmd.work = work  # type: ignore[assignment]
    spmd._main()


if __name__ == "__main__":
    main(sys.argv[1:])
