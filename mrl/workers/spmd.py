"""Ranks as processes that are spawned here, on one host.

The controller is the process that the user started, and the ranks are its children.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl.workers.determinism import deterministic_environment
from mrl.workers.hangs import leave_traces
from mrl.workers.meeting import KEY_VARIABLE, LOOPBACK, loopback_store, new_key
from mrl.workers.pool import Cause, SpmdPool
from mrl.workers.specs import JobSpec
from mrl.workers.wire import connect, die_with_parent, receive, serve

_STOP_S = 10.0  # for ranks to leave on their own before they are killed
_LOG_TAIL_LINES = 30
_KEPT = ("NCCL_", "TORCH_NCCL_", "GLOO_")  # a user's, which Ray's actors would not inherit


class SpawnedPool(SpmdPool):
    """Ranks that are children of this process, on this host."""

    module = "mrl.workers.spmd"  # that a rank runs
    arguments: tuple[str, ...] = ()

    def __init__(self, world_size: int, spec: JobSpec, log_folder: Path) -> None:
        """Start the ranks; their output goes to `log_folder`/rank_<k>.log."""
        # Both ports are the kernel's choice and are bound from the start: no race for them.
        self._store = loopback_store()
        authkey = new_key()
        listener = Listener((LOOPBACK, 0), backlog=world_size, authkey=authkey)
        super().__init__(listener, world_size, spec, spec.hang_timeout_s, spec.timeout_s)
        log_folder.mkdir(parents=True, exist_ok=True)
        self._logs = [log_folder / f"rank_{rank}.log" for rank in range(world_size)]
        self._children: list[subprocess.Popen[bytes]] = []
        try:
            for rank in range(world_size):
                self._children.append(self._spawn(rank, listener.address, authkey, spec.device))
            threading.Thread(target=self._watch, daemon=True).start()
            self.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the ranks: by goodbye, then by force; none is left."""
        failed = self._failed.is_set() or sys.exc_info()[0] is not None
        super().close()
        deadline = time.monotonic() + (0.0 if failed else _STOP_S)
        for child in self._children:
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(max(0.0, deadline - time.monotonic()))
        for child in self._children:
            # The rank leads a session of its own: whatever it started goes with it.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
        for connection in self._connections.values():
            connection.close()

    def _spawn(
        self, rank: int, address: Any, authkey: bytes, device: str
    ) -> subprocess.Popen[bytes]:
        environment = {
            **os.environ,
            **rank_environment(
                rank,
                rank,
                self.world_size,
                self.world_size,
                device,
                os.environ,
                self._spec.deterministic,
            ),
            "MASTER_ADDR": LOOPBACK,
            "MASTER_PORT": str(self._store.port),
            "MRL_CONTROLLER": f"{address[0]}:{address[1]}",
            KEY_VARIABLE: authkey.hex(),
        }
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        with self._logs[rank].open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", self.module, *self.arguments],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _watch(self) -> None:
        while not self._closing and not self._failed.is_set():
            for rank, child in enumerate(self._children):
                if child.poll() is not None and not self._closing:
                    self._fail(Cause(rank, f"rank {rank} ended{self._calls(rank)}", died=True))
            time.sleep(0.1)

    def _explain(self, cause: Cause) -> str:
        code = self._children[cause.rank].poll()
        if not cause.died or code is None:
            return cause.text
        if code == -signal.SIGKILL:
            return f"{cause.text}: killed by SIGKILL, as the kernel does when memory runs out"
        how = f"exit code {code}" if code >= 0 else f"killed by {signal.Signals(-code).name}"
        return f"{cause.text}: {how}"

    def _remains(self, cause: Cause) -> str:
        if not cause.died and (not cause.hung or cause.evidence):
            return ""
        log = self._logs[cause.rank]
        tail = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join([f"last lines of {log}:", *tail])


def rank_environment(
    rank: int,
    local_rank: int,
    world_size: int,
    local_world_size: int,
    device: str,
    given: Mapping[str, str],
    deterministic: bool = False,
) -> dict[str, str]:
    """Give the environment of a rank on `cpu` or `cuda`; what the user has set is kept.

    Raises ValueError where that contradicts a `deterministic` job.
    """
    # On a GPU the host's own work is small. With a thread a core it waited now and then for a tenth
    # of a second, and the GPU with it: perhaps for threads that spin until a CPU quota is used up.
    cores = len(os.sched_getaffinity(0)) if device == "cpu" else 1
    defaults = {
        "OMP_NUM_THREADS": str(max(1, cores // local_world_size)),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # ranks share the cores by OMP_NUM_THREADS
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_USE_FLASHINFER_SAMPLER": "0",  # its first start compiles for two minutes
        "CUDA_DEVICE_MAX_CONNECTIONS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
    if device == "cpu":
        # vLLM and Megatron would compile small functions for seconds at every start.
        defaults["TORCHDYNAMO_DISABLE"] = "1"
    environment = {name: given.get(name, value) for name, value in defaults.items()}
    environment |= {name: value for name, value in given.items() if name.startswith(_KEPT)}
    environment |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(local_rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(local_world_size),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine lives in this process
    }
    return environment | (deterministic_environment(given) if deterministic else {})


def work(
    connection: Connection, store: dist.Store, on_silence: Callable[[], None] | None = None
) -> None:
    """Be a rank: learn the job, build the roles, serve calls, leave.

    `on_silence` is called before this process ends because the controller has not been heard of
    for as long as a call may last (None: the controller is not to be watched).
    """
    from mrl.workers.host import WorkerHost

    spec = receive(connection)
    silence_s = spec.hang_timeout_s if on_silence is not None else None
    hosts: list[WorkerHost] = []

    def call(role: str, method: str, args: tuple[Any, ...]) -> Any:
        if method == "build":
            hosts.append(WorkerHost(spec, store))
            return None
        return hosts[0].answer(role, method, args)

    serve(connection, call, silence_s, on_silence or (lambda: None))
    for host in hosts:
        host.close()


def _main() -> None:
    """Run a spawned rank."""
    die_with_parent()
    leave_traces()
    host, _, port = os.environ["MRL_CONTROLLER"].rpartition(":")
    authkey = bytes.fromhex(os.environ.pop(KEY_VARIABLE))
    connection = connect((host, int(port)), authkey, int(os.environ["RANK"]))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    work(connection, store)


if __name__ == "__main__":
    _main()
