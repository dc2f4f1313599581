"""Jobs of a training benchmark: the trainer's own actor on ranks that this process starts."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.ranks import BenchmarkPool, OneDevicePool
from benchmarks.workload import Model
from mrl.config import Config, build_plan, load_config
from mrl.resharding.families import ModelShape
from mrl.types import Batching
from mrl.workers.group import TrainGroup
from mrl.workers.job import roles_on, supervised_job_spec
from mrl.workers.specs import JobSpec

_STEPS = 1_000_000  # the schedule never ends
_LEFT_BYTES = 1 << 30  # of a closed job on the device


@dataclass(frozen=True, slots=True)
class Repeats:
    """How often to measure."""

    warmups: int
    measured: int


@dataclass(frozen=True)
class Job:
    """An actor on its ranks."""

    pool: BenchmarkPool
    shape: ModelShape
    group: TrainGroup
    gpus: int

    def actor(self, budget: int) -> TrainGroup:
        """Give the actor with micro-batches of at most `budget` tokens a context-parallel rank."""
        known = self.group
        batching = Batching(max_tokens=budget * known.ranks.cp)
        return TrainGroup(self.pool, known.role, known.ranks, batching, batching, known.hidden_size)

    def probe(self, method: str, *args: Any) -> list[Any]:
        """Ask every rank's probe."""
        return self.pool.ask("probe", method, *args)

    def memory(self) -> dict[str, float]:
        """Give the memory of the fullest rank, GB."""
        ranks = self.probe("memory")
        return {name: round(max(rank[name] for rank in ranks), 3) for name in ranks[0]}

    def measure(self, act: Callable[[], Any], repeats: Repeats) -> dict[str, Any]:
        """Time `act` as the controller sees it, seconds, the devices idle at both ends."""
        seconds = []
        for turn in range(repeats.warmups + repeats.measured):
            if turn == repeats.warmups:
                self.probe("reset_peak")
            self.probe("synchronize")
            start = time.perf_counter()
            act()
            self.probe("synchronize")
            if turn >= repeats.warmups:
                seconds.append(time.perf_counter() - start)
        return {**spread(seconds), "memory_gb": self.memory()}


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Say how measurements lie."""
    return {
        "median_s": statistics.median(seconds),
        "min_s": min(seconds),
        "max_s": max(seconds),
        "repeats": len(seconds),
    }


class Jobs:
    """The ranks at hand; one pool lives at a time, since each wants the whole device."""

    def __init__(self, device: str, folder: Path) -> None:
        """Keep models and the ranks' output below `folder`."""
        self.device, self.folder = device, folder
        self._key: tuple[int, bool] | None = None
        self._pool: BenchmarkPool | None = None
        self._spec: JobSpec | None = None
        self._count = 0

    @property
    def devices(self) -> int:
        """Count the devices; CPU ranks always find one."""
        return torch.cuda.device_count() if self.device == "cuda" else 1 << 10

    def config(
        self, model: Model, overrides: Sequence[str], world: int, longest: tuple[int, int]
    ) -> Config:
        """Give the config of a job; raises ConfigError, a ValueError, where it is refused."""
        path = model.write(self.folder / model.name)
        (self.folder / "job.yaml").write_text("{}\n")
        return load_config(self.folder / "job.yaml", [
            f"model.path={path}",
            f"data.max_prompt_length={longest[0]}",
            f"data.max_response_length={longest[1]}",
            "data.train_batch_size=64",
            "actor.ppo_mini_batch_size=64",
            "actor.use_dynamic_bsz=true",
            f"actor.ppo_max_token_len_per_gpu={sum(longest)}",
            "algorithm.adv_estimator=grpo",
            "rollout.n=8",
            f"trainer.device={self.device}",
            f"trainer.n_gpus_per_node={world}",
            "trainer.fault_timeout_s=300",
            *overrides,
        ])  # fmt: skip

    def open(
        self, model: Model, overrides: Sequence[str], world: int, longest: tuple[int, int]
    ) -> Job:
        """Run the actor of a config on `world` ranks; the last job ends if it is another.

        `longest` are prompt and response tokens. Ranks share a GPU where there are too few. Raises
        WorkerError when a rank fails, ValueError for a config that is refused.
        """
        config = self.config(model, overrides, world, longest)
        plan = build_plan(config)
        spec = supervised_job_spec(config, plan, _STEPS)
        one_device = world > self.devices
        pool = self._ranks(world, one_device, spec)
        if spec != self._spec:
            if self._spec is not None and max(pool.ask("", "clear")) > _LEFT_BYTES:
                self.close()  # something holds on to the last job: new processes are free of it
                pool = self._ranks(world, one_device, spec)
            self._spec = None
            pool.open(spec)
            self._spec = spec
        shape = ModelShape.from_folder(Path(config.model.path))
        group = roles_on(pool, config, plan, spec).actor
        return Job(pool, shape, group, 1 if one_device else world)

    def close(self) -> None:
        """End the ranks."""
        if self._pool is not None:
            self._pool.close()
        self._pool = self._spec = self._key = None

    def _ranks(self, world: int, one_device: bool, spec: JobSpec) -> BenchmarkPool:
        if self._pool is not None and self._key == (world, one_device):
            return self._pool
        self.close()
        self._count += 1
        make = OneDevicePool if one_device else BenchmarkPool
        pool = make(world, spec, self.folder / f"ranks_{self._count}")
        self._pool, self._key = pool, (world, one_device)
        if one_device:
            check_shared_device(pool, self.device)
        return pool


def check_shared_device(pool: BenchmarkPool, device: str) -> None:
    """Sum a number over the ranks; raises RuntimeError where the sum is wrong."""
    world = pool.world_size
    sums = pool.ask("", "all_reduce", device)
    if sums != [world * (world + 1) / 2] * world:
        raise RuntimeError(f"all-reduce of {world} ranks on one device gave {sums}")
