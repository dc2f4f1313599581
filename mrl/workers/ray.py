"""Ranks as Ray actors: the only file that imports ray."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import ray
import torch.distributed as dist
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mrl.workers.group import WorkerError
from mrl.workers.specs import JobSpec
from mrl.workers.spmd import rank_environment

_GRACE_S = 1.0  # after a first failure: time for the death that caused it to be seen
_ROOM_S = 60.0  # for Ray to find a host with room for each node of the job


@ray.remote
class _Rank:
    """One rank's roles in an actor."""

    def hostname(self) -> str:
        """Name the host that Ray has put this rank on."""
        return socket.gethostname()

    def build(self, spec: JobSpec, host: str, port: int) -> str:
        """Join the job and build the roles; gives the rank's device, in words."""
        from mrl.workers.host import WorkerHost

        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        self.host = WorkerHost(spec, dist.TCPStore(host, port))
        return self.host.binding()

    def call(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        """Run a role's method; Ray has fetched `args` from its store, once a node."""
        return self.host.call(role, method, args)

    def close(self) -> None:
        """Leave the job."""
        self.host.close()


class RayPool:
    """Ranks reached through Ray; the driver needs no GPU."""

    def __init__(self, world_size: int, spec: JobSpec) -> None:
        """Start one actor a rank, on a running Ray cluster or on one of this host's own.

        Raises WorkerError with the first cause when a rank fails.
        """
        self.world_size = world_size
        self._owns_cluster = not ray.is_initialized()
        if self._owns_cluster:
            address = os.environ.get("RAY_ADDRESS")
            local: dict[str, Any] = {} if address else {
                "num_cpus": max(world_size, os.cpu_count() or 1), "include_dashboard": False,
            }  # fmt: skip
            ray.init(log_to_driver=False, configure_logging=False, **local)
        self._actors: list[Any] = []
        self._places: PlacementGroup | None = None
        self._stored: tuple[Any, Any] = (None, None)  # the last arguments, in Ray's object store
        try:
            self._start(spec)
        except BaseException:
            self.close()
            raise

    def _start(self, spec: JobSpec) -> None:
        host = ray.util.get_node_ip_address()
        self._store = dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        gpus = 1 if spec.device == "cuda" else 0
        node_size = min(self.world_size, spec.ranks_per_node)
        self._places = _reserve(self.world_size // node_size, node_size, gpus)
        for rank in range(self.world_size):
            # Ray shows each actor its own GPU, so every rank is local rank 0 to itself.
            local = 0 if gpus else rank % node_size
            environment = rank_environment(
                rank,
                local,
                self.world_size,
                node_size,
                spec.device,
                os.environ,
                spec.deterministic,
            )
            if host == "127.0.0.1" or not os.environ.get("RAY_ADDRESS"):
                environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
            place = PlacementGroupSchedulingStrategy(
                self._places, placement_group_bundle_index=rank // node_size
            )
            actor = _Rank.options(  # type: ignore[attr-defined]
                num_cpus=1,
                num_gpus=gpus,
                runtime_env={"env_vars": environment},
                scheduling_strategy=place,
            ).remote()
            self._actors.append(actor)
        self._names = [f"rank {rank}" for rank in range(self.world_size)]
        hosts = self.wait(self._on_all("hostname"))
        self._names = [f"rank {rank} on {name}" for rank, name in enumerate(hosts)]
        for binding in self.wait(self._on_all("build", spec, host, self._store.port)):
            print(binding)  # Ray keeps what the actors themselves print

    def submit(self, rank: int, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Ask a rank to run a role's method; calls in a row with the same args store them once."""
        if args is not self._stored[0]:
            self._stored = (args, ray.put(args))
        ref = self._actors[rank].call.remote(role, method, self._stored[1])
        return _future(self._names[rank], f"{role}.{method}", ref)

    def _on_all(self, method: str, *args: Any) -> list[Future[Any]]:
        refs = [getattr(actor, method).remote(*args) for actor in self._actors]
        return [_future(name, method, ref) for name, ref in zip(self._names, refs, strict=True)]

    def wait(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Give all results in order, or raise the first cause as soon as one fails."""
        done, _ = wait(futures, return_when=FIRST_EXCEPTION)
        failed = [f for f in done if f.exception() is not None]
        if failed:
            time.sleep(_GRACE_S)
            errors = [f.exception() for f in futures if f.done() and f.exception() is not None]
            # A dead process is the cause of its peers' broken connections.
            errors.sort(key=lambda error: not isinstance(error, _RankDied))
            raise WorkerError(str(errors[0])) from None
        return [future.result() for future in futures]

    def close(self) -> None:
        """End the actors, and the cluster if this pool started it."""
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._places is not None:
            remove_placement_group(self._places)
            self._places = None
        if self._owns_cluster and ray.is_initialized():
            ray.shutdown()


def _reserve(nodes: int, node_size: int, gpus: int) -> PlacementGroup:
    """Reserve a host for the ranks of each node: left alone, Ray deals neighbours out over hosts.

    Raises ValueError where the cluster has no such room.
    """
    need = {"CPU": node_size} | ({"GPU": node_size} if gpus else {})
    places = placement_group([dict(need) for _ in range(nodes)], strategy="PACK")
    if not places.wait(_ROOM_S):
        remove_placement_group(places)
        free = {name: ray.available_resources().get(name, 0) for name in need}
        raise ValueError(
            f"Ray has no room for {nodes} x {need} (trainer.nnodes x n_gpus_per_node, each on one "
            f"host) within {_ROOM_S:.0f} s: {free} are free on {len(ray.nodes())} hosts"
        )
    return places


class _RankDied(WorkerError):
    """The actor's process is gone."""


def _future(who: str, name: str, ref: Any) -> Future[Any]:
    """Wrap a Ray reference; failures name the rank, its host and the call."""
    future: Future[Any] = Future()

    def relay(source: Future[Any]) -> None:
        error = source.exception()
        if error is None:
            future.set_result(source.result())
        elif isinstance(error, ray.exceptions.RayActorError):
            future.set_exception(_RankDied(f"{who} ended during {name}: {error}"))
        else:
            future.set_exception(WorkerError(f"{who} failed in {name}:\n{error}"))

    ref.future().add_done_callback(relay)
    return future
