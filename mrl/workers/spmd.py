"""Ranks as plain processes: spawned here on one host, or started by torchrun or srun.

The controller listens; every rank connects to it, is told its job and then serves calls. Without
a launcher the controller is the process that the user started, and the ranks are its children.
Under a launcher it is a thread of rank 0.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl.workers.determinism import deterministic_environment
from mrl.workers.group import WorkerError
from mrl.workers.specs import JobSpec
from mrl.workers.wire import (
    AUTHKEY_BYTES,
    Call,
    Goodbye,
    Hello,
    Packed,
    connect,
    die_with_parent,
    pack,
    receive,
    send,
    send_packed,
    serve,
)

_GRACE_S = 1.0  # after a first failure: time for the death that caused it to be seen
_STOP_S = 10.0  # for ranks to leave on their own before they are killed
_LOG_TAIL_LINES = 30
_KEPT = ("NCCL_", "TORCH_NCCL_", "GLOO_")  # a user's, which Ray's actors would not inherit


@dataclass(frozen=True, slots=True)
class _Cause:
    rank: int
    text: str
    died: bool  # the process is gone, rather than an exception caught


class SpmdPool:
    """Ranks reached over sockets."""

    def __init__(self, listener: Listener, world_size: int, spec: JobSpec) -> None:
        """Take the ranks in and tell them their job; `start` waits until they are built."""
        self.world_size = world_size
        self._listener, self._spec = listener, spec
        self._connections: dict[int, Connection] = {}
        self._pending: dict[int, tuple[int, str, Future[Any]]] = {}  # by call number
        self._lock = threading.Lock()
        self._count = 0
        self._packed: tuple[tuple[Any, ...], Packed] = ((), pack(()))  # the last arguments
        self._causes: list[_Cause] = []
        self._failed = threading.Event()
        self._closing = False

    def start(self) -> None:
        """Accept every rank and wait until all have built their roles.

        Raises WorkerError with the first cause when a rank fails.
        """
        threading.Thread(target=self._accept, daemon=True).start()
        while len(self._connections) < self.world_size:
            self._raise_if_failed()
            time.sleep(0.02)
        self.wait([self.submit(rank, "", "build", ()) for rank in range(self.world_size)])

    def submit(self, rank: int, role: str, method: str, args: tuple[Any, ...]) -> Future[Any]:
        """Ask a rank to run a role's method; calls in a row with the same args pickle them once."""
        future: Future[Any] = Future()
        with self._lock:
            if args is not self._packed[0]:
                self._packed = (args, pack(args))
            self._count += 1
            number = self._count
            self._pending[number] = (rank, f"{role}.{method}".lstrip("."), future)
            try:
                self._deliver(rank, Call(number, role, method), self._packed[1])
            except OSError:
                self._failed.set()  # its reader thread tells why
        return future

    def _deliver(self, rank: int, call: Call, args: Packed) -> None:
        send(self._connections[rank], call)
        send_packed(self._connections[rank], args)

    def wait(self, futures: Sequence[Future[Any]]) -> list[Any]:
        """Give all results in order, or raise the first cause as soon as one fails."""
        open_futures = set(futures)
        while open_futures:
            _done, open_futures = wait(open_futures, timeout=0.5, return_when=FIRST_EXCEPTION)
            self._raise_if_failed()
        return [future.result() for future in futures]

    def close(self) -> None:
        """Let the ranks leave."""
        self._closing = True
        if not self._failed.is_set():
            for connection in self._connections.values():
                try:
                    send(connection, Goodbye())
                except OSError:
                    continue  # already gone, which is what we want
        self._listener.close()

    def _accept(self) -> None:
        while len(self._connections) < self.world_size:
            try:
                connection = self._listener.accept()
            except (OSError, EOFError, AuthenticationError):
                if self._closing:
                    return
                continue  # a stranger came to this port and went, or could not name the key
            hello = receive(connection)
            assert isinstance(hello, Hello)
            send(connection, self._spec)
            thread = threading.Thread(target=self._read, args=(hello, connection), daemon=True)
            self._connections[hello.rank] = connection
            thread.start()

    def _read(self, hello: Hello, connection: Connection) -> None:
        try:
            while True:
                reply = receive(connection)
                rank, name, future = self._pending.pop(reply.number)
                if reply.failure is not None:
                    where = f"rank {rank} on {hello.host} failed in {name}"
                    self._fail(_Cause(rank, f"{where}:\n{reply.failure}", died=False))
                else:
                    future.set_result(reply.value)
        except (EOFError, OSError):
            if not self._closing:
                who = f"rank {hello.rank} (pid {hello.pid} on {hello.host})"
                text = f"{who} ended{self._calls(hello.rank)}"
                self._fail(_Cause(hello.rank, text, died=True))

    def _calls(self, rank: int) -> str:
        names = [name for r, name, _ in list(self._pending.values()) if r == rank]
        return f" during {names[0]}" if names else ""

    def _fail(self, cause: _Cause) -> None:
        self._causes.append(cause)
        self._failed.set()

    def _raise_if_failed(self) -> None:
        if not self._failed.is_set():
            return
        time.sleep(_GRACE_S)
        # A killed process is the cause of its peers' broken connections, whoever reports first.
        causes = sorted(self._causes, key=lambda cause: not cause.died)
        raise WorkerError(self._explain(causes[0]) if causes else "a rank is unreachable")

    def _explain(self, cause: _Cause) -> str:
        return cause.text


class SpawnedPool(SpmdPool):
    """Ranks that are children of this process, on this host."""

    module = "mrl.workers.spmd"  # that a rank runs
    arguments: tuple[str, ...] = ()

    def __init__(self, world_size: int, spec: JobSpec, log_folder: Path) -> None:
        """Start the ranks; their output goes to `log_folder`/rank_<k>.log."""
        # Both ports are the kernel's choice and are bound from the start: no race for them.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        authkey = secrets.token_bytes(AUTHKEY_BYTES)
        listener = Listener(("127.0.0.1", 0), backlog=world_size, authkey=authkey)
        super().__init__(listener, world_size, spec)
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
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(self._store.port),
            "MRL_CONTROLLER": f"{address[0]}:{address[1]}",
            "MRL_AUTHKEY": authkey.hex(),
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
                    self._fail(_Cause(rank, f"rank {rank} ended{self._calls(rank)}", died=True))
            time.sleep(0.1)

    def _explain(self, cause: _Cause) -> str:
        if not cause.died:
            return cause.text
        code = self._children[cause.rank].poll()
        how = "" if code is None else f"exit code {code}"
        if code is not None and code < 0:
            how = f"killed by {signal.Signals(-code).name}"
        log = self._logs[cause.rank]
        tail = log.read_text(errors="replace").splitlines()[-_LOG_TAIL_LINES:]
        return "\n".join([f"last lines of {log}:", *tail, f"{cause.text}: {how}"])


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
    cores = len(os.sched_getaffinity(0))
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


def work(connection: Connection, store: dist.Store) -> None:
    """Be a rank: learn the job, build the roles, serve calls, leave."""
    from mrl.workers.host import WorkerHost

    spec = receive(connection)
    hosts: list[WorkerHost] = []

    def call(role: str, method: str, args: tuple[Any, ...]) -> Any:
        if method == "build":
            hosts.append(WorkerHost(spec, store))
            return None
        return hosts[0].call(role, method, args)

    serve(connection, call)
    for host in hosts:
        host.close()


def _main() -> None:
    """Run a spawned rank."""
    die_with_parent()
    host, _, port = os.environ["MRL_CONTROLLER"].rpartition(":")
    authkey = bytes.fromhex(os.environ.pop("MRL_AUTHKEY"))
    connection = connect((host, int(port)), authkey, int(os.environ["RANK"]))
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))
    work(connection, store)


def run_under_launcher(
    device: str,
    control: Callable[[Callable[[JobSpec], SpmdPool]], None],
    deterministic: bool = False,
) -> None:
    """Be rank 0 and the controller of a job that torchrun or srun started.

    `control(make_pool)` is the controller; it runs in a thread, since the roles want the main
    thread. When it fails, rank 0 prints the cause and ends non-zero, which makes the launcher end
    the other ranks.
    """
    store, world_size = _meet(device, deterministic)
    authkey = secrets.token_bytes(AUTHKEY_BYTES)
    # on every address: MASTER_ADDR may name a loopback one on its own host
    listener = Listener(("", 0), backlog=world_size, authkey=authkey)
    store.set("controller", f"{os.environ['MASTER_ADDR']}:{listener.address[1]}:{authkey.hex()}")

    def make_pool(spec: JobSpec) -> SpmdPool:
        pool = SpmdPool(listener, world_size, spec)
        pool.start()
        return pool

    def run() -> None:
        try:
            control(make_pool)
        except BaseException as error:
            # Process edge: the main thread may hang in a collective, so end from here.
            text = f"{type(error).__name__}: {error}"
            if not isinstance(error, WorkerError):
                traceback.print_exc()
            print(text, file=sys.stderr, flush=True)
            _tell_torchrun(text)
            os._exit(1)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    _work_for_controller(store)
    thread.join()


def serve_rank(device: str, deterministic: bool = False) -> None:
    """Be a rank other than 0 of a job that torchrun or srun started, until it is over."""
    store, _ = _meet(device, deterministic)
    _work_for_controller(store)


def _meet(device: str, deterministic: bool) -> tuple[dist.Store, int]:
    """Join the launcher's ranks; give the store that they share and their number."""
    store, rank, world_size = next(dist.rendezvous("env://"))
    local_rank = int(os.environ["LOCAL_RANK"])
    local_size = int(os.environ.get("LOCAL_WORLD_SIZE", world_size))
    os.environ |= rank_environment(
        rank, local_rank, world_size, local_size, device, os.environ, deterministic
    )
    return dist.PrefixStore("mrl", store), world_size


def _work_for_controller(store: dist.Store) -> None:
    host, port, key = store.get("controller").decode().rsplit(":", 2)
    connection = connect((host, int(port)), bytes.fromhex(key), int(os.environ["RANK"]))
    work(connection, dist.PrefixStore("ranks", store))


def _tell_torchrun(cause: str) -> None:
    """Leave the cause where torchrun looks for it, so that its own last words repeat it."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path is not None:
        message = {"message": cause, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(path).write_text(json.dumps({"message": message}))


if __name__ == "__main__":
    _main()
