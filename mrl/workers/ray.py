"""Ranks as Ray actors: the only file that imports ray."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait
from datetime import timedelta
from functools import partial
from typing import Any

import ray
import torch.distributed as dist
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from mrl.workers.group import Answers, WorkerError
from mrl.workers.hangs import ANSWER_S, CallClocks, Late, explain_hang, own_stack, patience
from mrl.workers.meeting import LOOPBACK, loopback_store
from mrl.workers.pool import last_error
from mrl.workers.specs import JobSpec
from mrl.workers.spmd import rank_environment
from mrl.workers.wire import WRONG_INPUT

_GRACE_S = 1.0  # after a first failure: time for the death that caused it to be seen
_LOOK_S = 0.5  # between two looks for a failure
_ROOM_S = 60.0  # for Ray to find a host with room for each node of the job
_ASK, _STACK = "hang/ask", "hang/stack/"  # keys of the store that ranks meet at


@ray.remote
class _Rank:
    """One rank's roles in an actor."""

    def place(self) -> tuple[str, int]:
        """Name the host that Ray has put this rank on, and its process."""
        # Ray's own handler leaves in good order, which takes a minute where a collective is open.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        return socket.gethostname(), os.getpid()

    def build(self, spec: JobSpec, host: str, port: int) -> str:
        """Join the job and build the roles; gives the rank's device, in words."""
        from mrl.workers.host import WorkerHost

        os.environ.update(MASTER_ADDR=host, MASTER_PORT=str(port))
        threading.Thread(target=_tell_stack, args=(host, port), daemon=True).start()
        self.host = WorkerHost(spec, dist.TCPStore(host, port))
        return self.host.binding()

    def call(self, role: str, method: str, args: tuple[Any, ...]) -> Any:
        """Run a role's method; Ray has fetched `args` from its store, once a node."""
        return self.host.answer(role, method, args)

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
        self._hang_s, self._collective_s = spec.hang_timeout_s, spec.timeout_s
        self._clocks = CallClocks()
        self._owns_cluster = not ray.is_initialized()
        if self._owns_cluster:
            address = os.environ.get("RAY_ADDRESS")
            local: dict[str, Any] = {} if address else {
                "num_cpus": max(world_size, os.cpu_count() or 1), "include_dashboard": False,
            }  # fmt: skip
            ray.init(log_to_driver=False, configure_logging=False, **local)
        self._actors: list[Any] = []
        self._places: PlacementGroup | None = None
        self._failures: list[_RankFailed] = []
        try:
            self._start(spec)
        except BaseException:
            self.close()
            raise

    def _start(self, spec: JobSpec) -> None:
        host = ray.util.get_node_ip_address()
        self._store = (
            loopback_store()
            if host == LOOPBACK
            else dist.TCPStore(host, 0, is_master=True, wait_for_workers=False)
        )
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
        self._hosts = self._on_all("place")
        self._names = [f"rank {rank} on {host}" for rank, (host, _) in enumerate(self._hosts)]
        for binding in self._on_all("build", spec, host, self._store.port):
            print(binding)  # Ray keeps what the actors themselves print

    def submit(
        self, ranks: Sequence[int], role: str, method: str, args: tuple[Any, ...]
    ) -> Answers:
        """Ask different ranks to run a role's method; Ray stores the arguments once for all."""
        stored = ray.put(args)
        refs = [self._actors[rank].call.remote(role, method, stored) for rank in ranks]
        return self._answers(ranks, f"{role}.{method}", refs)

    def _on_all(self, method: str, *args: Any) -> list[Any]:
        refs = [getattr(actor, method).remote(*args) for actor in self._actors]
        (answers,) = self.wait([self._answers(range(self.world_size), method, refs)])
        return answers

    def wait(self, calls: Sequence[Answers]) -> list[list[Any]]:
        """Give the answers to each call, or raise the first cause as soon as a rank fails."""
        waiting: set[Future[list[Any]]] = set(calls)
        while waiting and not self._failures:
            _, waiting = wait(waiting, min(_LOOK_S, patience(self._hang_s)))
            if late := self._clocks.late(self._hang_s):
                raise self._hang(late, f"trainer.hang_timeout_s={self._hang_s:g}")
        if self._failures:
            time.sleep(_GRACE_S)
            # A dead process is the cause of its peers' broken connections.
            failure = min(self._failures, key=lambda failure: not failure.died)
            raise self._awaited(failure) or failure from None
        return [call.result() for call in calls]

    def _awaited(self, failure: _RankFailed) -> WorkerError | None:
        """Find a rank that kept its peers waiting until their collective ran out of time."""
        late = self._clocks.late(self._collective_s / 2)
        if failure.died or failure.after_s < self._collective_s or not late:
            return None
        return self._hang(late, f"trainer.fault_timeout_s={self._collective_s:g}")

    def _hang(self, late: Sequence[Late], limit: str) -> WorkerError:
        """Ask ranks that are late what they do, by way of the store that they met at."""
        self._store.set(_ASK, "")
        stacks: dict[int, str] = {}
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and len(stacks) < len(late):
            for rank in {one.rank for one in late} - set(stacks):
                if self._store.check([f"{_STACK}{rank}"]):
                    stacks[rank] = self._store.get(f"{_STACK}{rank}").decode()
            time.sleep(0.05)
        names = {one.rank: self._names[one.rank] for one in late}
        hang = explain_hang(late, stacks, names, limit)
        for rank in {one.rank for one in late} - set(stacks):
            host, pid = self._hosts[rank]
            if host == socket.gethostname():  # elsewhere it is Ray's to end
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)  # a stopped actor hears nothing else
        return WorkerError(hang.cause, hang.evidence)

    def _answers(self, ranks: Sequence[int], name: str, refs: Sequence[Any]) -> Answers:
        """Wrap Ray references; failures name the rank, its host and the call."""
        answers = Answers(ranks)
        self._clocks.asked(ranks, name)

        def relay(rank: int, source: Future[Any]) -> None:
            seconds, error = self._clocks.answered(rank), source.exception()
            who = self._names[rank]
            if error is None:
                answers.take(rank, source.result())
            elif isinstance(error, ray.exceptions.RayActorError):
                told = " ".join(str(error).split())
                self._failures.append(_RankFailed(f"{who} ended during {name}: {told}", died=True))
            else:
                lasting = isinstance(error, WRONG_INPUT)  # Ray gives errors their own class too
                text = f"{who} failed in {name}: {last_error(str(error))}"
                trace = f"{who} in {name}:\n{str(error).rstrip()}"
                self._failures.append(_RankFailed(text, trace, lasting, after_s=seconds))

        for rank, ref in zip(ranks, refs, strict=True):
            ref.future().add_done_callback(partial(relay, rank))
        return answers

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


class _RankFailed(WorkerError):
    """One rank's failure; `died` if the actor's process is gone."""

    def __init__(
        self,
        cause: str,
        evidence: str = "",
        lasting: bool = False,
        died: bool = False,
        after_s: float = 0.0,
    ) -> None:
        super().__init__(cause, evidence, lasting)
        self.died, self.after_s = died, after_s


def _tell_stack(host: str, port: int) -> None:
    """Wait until the driver asks what this rank does, and tell it."""
    store = dist.TCPStore(host, port)  # of this thread: the rank's own may be waited at
    try:
        store.wait([_ASK], timedelta(days=365))
        store.set(f"{_STACK}{os.environ['RANK']}", own_stack())
    except dist.DistError:
        return  # the job is over
