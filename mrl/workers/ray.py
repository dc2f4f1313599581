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

from mrl.workers.group import WorkerError
from mrl.workers.specs import JobSpec
from mrl.workers.spmd import rank_environment

_GRACE_S = 1.0  # after a first failure: time for the death that caused it to be seen


@ray.remote
class _Rank:
    """One rank's roles in an actor."""

    def build(self, spec: JobSpec, host: str, port: int) -> None:
        """Join the job and build the roles."""
        from mrl.workers.host import WorkerHost

        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        self.host = WorkerHost(spec, dist.TCPStore(host, port))

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
        for rank in range(self.world_size):
            # Ray shows each actor its own GPU, so every rank is local rank 0 to itself.
            local = 0 if gpus else rank
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
            actor = _Rank.options(  # type: ignore[attr-defined]
                num_cpus=1, num_gpus=gpus, runtime_env={"env_vars": environment}
            ).remote()
            self._actors.append(actor)
        builds = [actor.build.remote(spec, host, self._store.port) for actor in self._actors]
        self.wait([_future(rank, "build", ref) for rank, ref in enumerate(builds)])

    def submit(self, rank: int, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Ask a rank to run a role's method; calls in a row with the same args store them once."""
        if args is not self._stored[0]:
            self._stored = (args, ray.put(args))
        ref = self._actors[rank].call.remote(role, method, self._stored[1])
        return _future(rank, f"{role}.{method}", ref)

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
        if self._owns_cluster and ray.is_initialized():
            ray.shutdown()


class _RankDied(WorkerError):
    """The actor's process is gone."""


def _future(rank: int, name: str, ref: Any) -> Future[Any]:
    """Wrap a Ray reference; failures name the rank, its host and the call."""
    future: Future[Any] = Future()

    def relay(source: Future[Any]) -> None:
        error = source.exception()
        if error is None:
            future.set_result(source.result())
        elif isinstance(error, ray.exceptions.RayActorError):
            future.set_exception(_RankDied(f"rank {rank} ended during {name}: {error}"))
        else:
            where = f"rank {rank} on {socket.gethostname()} failed in {name}"
            future.set_exception(WorkerError(f"{where}:\n{error}"))

    ref.future().add_done_callback(relay)
    return future
