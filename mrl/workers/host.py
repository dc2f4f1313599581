"""All roles of one rank, and the call that reaches them."""

from __future__ import annotations

import datetime
import os
import socket
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mrl.config.roles import ROLES
from mrl.workers.busy import BusyClock, Timed
from mrl.workers.determinism import deterministic_algorithms
from mrl.workers.profiling import Profiler
from mrl.workers.specs import JobSpec, RankInfo, RoleSpec, RolloutSpec
from mrl.workers.worlds import worlds

if TYPE_CHECKING:
    from mrl.workers.megatron.offload import RoleMemory


class WorkerHost:
    """One rank's roles on one device."""

    def __init__(self, spec: JobSpec, store: dist.Store) -> None:
        """Join the ranks that meet at `store` and build the roles.

        RANK, LOCAL_RANK and WORLD_SIZE come from the environment.
        """
        self.rank = int(os.environ["RANK"])
        self.world_size = int(os.environ["WORLD_SIZE"])
        self.device = _device(spec.device)
        self._deterministic = spec.deterministic
        self._busy = BusyClock(self.device)
        self._profiler = Profiler(self.rank, self.device)
        print(self.binding(), flush=True)
        self._join(spec, store)
        everyone = range(self.world_size)
        self._everyone, self._trainer, self._engine = worlds(
            (everyone, spec.trainer_ranks or everyone, spec.rollout_ranks or everyone),
            datetime.timedelta(seconds=spec.timeout_s),
        )
        self._roles: dict[str, Any] = {"host": self}
        self._memories: dict[str, RoleMemory] = {}
        # a sync reads the actor's parameters and frees them itself, and so may the reference
        self._actors_readers = {"sync", "ref"} if spec.ref_is_actors_base else {"sync"}
        # The engine comes first: it measures the memory that is free for it.
        if spec.rollout is not None and self._engine.is_member:
            self._build_rollout(spec, spec.rollout)
        if self._trainer.is_member:
            with self._trainer.active(), deterministic_algorithms(spec.deterministic):
                self._build_megatron(spec)
        if spec.rollout is not None:
            self._build_sync(spec, spec.rollout)
        self._worlds = {
            name: {"rollout": self._engine, "host": self._everyone, "sync": self._everyone}.get(
                name, self._trainer
            )
            for name in self._roles
        }

    def call(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        """Run a role's method on this rank; the role `host` is the rank itself."""
        # the engine's kernels have no such forms: there seeds and equal batches must do
        exact = self._deterministic and role in ROLES
        with (
            self._worlds[role].active(),
            deterministic_algorithms(exact),
            self._profiler.phase(role, method),
        ):
            self._make_room(role)
            return getattr(self._roles[role], method)(*args)

    def answer(self, role: str, method: str, args: tuple[Any, ...]) -> Timed:
        """Do what `call` does and say how long this rank itself worked."""
        self._busy.start()
        value = self.call(role, method, args)
        return Timed(value, self._busy.seconds())

    def begin_profile(self) -> None:
        """Record what this rank computes from now on."""
        self._profiler.begin()

    def end_profile(self, folder: Path) -> tuple[str, ...]:
        """Write what was recorded below `folder`; gives the files."""
        return self._profiler.end(folder)

    def _make_room(self, role: str) -> None:
        """Free the memory that other roles on this device can do without."""
        for name, memory in self._memories.items():
            if name != role != "host":
                memory.give_back(keep_params=name == "actor" and role in self._actors_readers)

    def describe(self) -> RankInfo:
        """Say where this rank runs."""
        name = "cpu"
        if self.device.type == "cuda":
            name = torch.cuda.get_device_name(self.device)
        return RankInfo(self.rank, socket.gethostname(), os.getpid(), str(self.device), name)

    def binding(self) -> str:
        """Say which physical device this rank has, and what decided that."""
        device = str(self.device)
        if self.device.type == "cuda":
            found = torch.cuda.get_device_properties(self.device)
            seen = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
            device += f" = {found.name} GPU-{found.uuid}, CUDA_VISIBLE_DEVICES={seen}"
        threads = os.environ.get("OMP_NUM_THREADS", "unset")
        return f"rank {self.rank} on {socket.gethostname()}: {device}, OMP_NUM_THREADS={threads}"

    def close(self) -> None:
        """Leave the job."""
        if "rollout" in self._roles:
            with self._engine.active():
                self._roles["rollout"].close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _join(self, spec: JobSpec, store: dist.Store) -> None:
        backend = "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo"
        timeout = datetime.timedelta(seconds=spec.timeout_s)
        dist.init_process_group(
            backend, store=store, rank=self.rank, world_size=self.world_size, timeout=timeout
        )

    def _build_rollout(self, spec: JobSpec, rollout: RolloutSpec) -> None:
        from mrl.workers.rollout import Rollout, build_engine

        index = self._engine.ranks.index(self.rank)
        slot = index if rollout.slots is None else rollout.slots[index]
        with self._engine.active():
            engine = build_engine(rollout, self.device)
        role = Rollout(engine, rollout, slot, colocated=self._trainer.is_member)
        role.sleep()
        self._roles["rollout"] = role

    def _build_sync(self, spec: JobSpec, rollout: RolloutSpec) -> None:
        from mrl.workers.weight_sync import WeightSync

        actor = self._roles["actor"].engine.weights if self._trainer.is_member else None
        self._roles["sync"] = WeightSync(
            actor,
            self._memories.get("actor"),
            self._roles["rollout"] if self._engine.is_member else None,
            rollout,
            spec.ranks_per_node,
            self._engine.active,
        )

    def _build_megatron(self, spec: JobSpec) -> None:
        from mrl.workers.actor import Actor
        from mrl.workers.critic import Critic
        from mrl.workers.megatron.engine import MegatronEngine
        from mrl.workers.megatron.groups import ParallelGroups, group_sizes
        from mrl.workers.reference import Reference

        made: dict[tuple[Any, ...], ParallelGroups] = {}  # a communicator costs device memory

        def engine(role: RoleSpec) -> MegatronEngine:
            sizes = group_sizes(role.layout)
            if sizes not in made:
                made[sizes] = ParallelGroups(role.layout, spec.seed, spec.timeout_s)
            engine = MegatronEngine(role, made[sizes], self.device)
            self._memories[role.name] = engine.memory
            if engine.trainer is not None:  # gradients are summed over ranks of other rows
                meeting = engine.config.finalize_model_grads_func
                engine.config.finalize_model_grads_func = self._busy.until(meeting)
            engine.memory.give_back()  # the next role is built in its place
            return engine

        self._roles["actor"] = Actor(engine(spec.actor), spec.policy_loss)
        if spec.critic is not None:
            self._roles["critic"] = Critic(engine(spec.critic), spec.cliprange_value)
        if spec.ref is not None:
            actor = self._roles["actor"].engine
            self._roles["ref"] = Reference(actor if spec.ref_is_actors_base else engine(spec.ref))


def _device(kind: str) -> torch.device:
    """Take this rank's device, and its share of the cores, as the launcher has set it."""
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if kind == "cuda":
        local = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(local)
        return torch.device("cuda", local)
    return torch.device("cpu")
