"""Ranks for tests: processes forked from one that has imported the heavy packages already.

Importing torch, transformers and Megatron takes longer than most tests. One process, the zygote,
imports them once a session and waits; every `Ranks.run` or `Ranks.job` forks its ranks from it and
kills them afterwards, so a group of ranks costs a fraction of a second and no state survives from
one test to the next. The ranks join the trainer's own `SpmdPool`.
"""

from __future__ import annotations

import faulthandler
import gc
import importlib
import math
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import Pipe
from multiprocessing.connection import Connection, Listener
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch.distributed as dist

from mrl.workers.group import call_all
from mrl.workers.pool import Cause, SpmdPool
from mrl.workers.specs import JobSpec
from mrl.workers.spmd import rank_environment
from mrl.workers.wire import AUTHKEY_BYTES, connect, die_with_parent, receive, send, serve

ROOT = Path(__file__).resolve().parent.parent
IMPORT_LIMIT_S = 300.0  # for the zygote's imports on a busy machine
CALL_LIMIT_S = 120.0  # a job: far above what a test needs, far below pytest's own limit
WARM_MODULES = (
    "pytest",
    "transformers.models.qwen2.modeling_qwen2",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.tokenization_qwen2",
    "mrl.workers.actor",
    "mrl.workers.critic",
    "mrl.workers.reference",
    "mrl.workers.host",
    "mrl.workers.megatron.engine",
    "mrl.workers.rollout_hf",
    "mrl.workers.rollout_vllm",
    "vllm.entrypoints.llm",  # vllm imports the rest at its first use
    "vllm.v1.worker.cpu_worker",
)
_ENTRY = "from tests.ranks import zygote; zygote"


@dataclass(frozen=True, slots=True)
class Fork:
    """Ask the zygote for ranks; it answers with their pids."""

    world_size: int
    address: tuple[str, int]  # where ranks report
    authkey: bytes
    store_port: int
    logs: Path


@dataclass(frozen=True, slots=True)
class Signal:
    """Ask the zygote to signal ranks; those it kills are gone when it answers."""

    pids: tuple[int, ...]
    number: int


class Ranks:
    """Source of warm ranks."""

    def __init__(self) -> None:
        """Start the zygote; its imports go on beside the caller until ranks are asked for."""
        self._folder = tempfile.TemporaryDirectory(prefix="ranks-")
        self._logs, self._count, self._ready = Path(self._folder.name), 0, False
        self._control, theirs = Pipe()
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        }
        with (self._logs / "zygote.log").open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-c", f"{_ENTRY}({theirs.fileno()})"],
                cwd=ROOT,
                env=environment,
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
        theirs.close()

    def run(
        self, world: int, function: Callable[..., Any], limit_s: float = CALL_LIMIT_S, **kwargs: Any
    ) -> list[Any]:
        """Run a module-level function on `world` ranks that share a gloo group.

        Gives its result on each rank, in rank order; raises WorkerError with the traceback of the
        first that failed, or with all stacks when the time limit passes.
        """
        with self.job(world, None, limit_s) as pool:
            return pool.each(function, **kwargs)

    @contextmanager
    def job(
        self, world: int, spec: JobSpec | None, limit_s: float = CALL_LIMIT_S
    ) -> Iterator[ForkedPool]:
        """Hold `world` ranks with the roles of a job, or with a gloo group alone, in a block."""
        self._wait_until_ready()
        self._count += 1
        pool = ForkedPool(world, spec, self._ask, self._logs / f"job_{self._count:03d}", limit_s)
        try:
            pool.start()
            yield pool
        finally:
            pool.close()

    def close(self) -> None:
        """End the zygote."""
        self._control.close()
        self._process.wait()
        self._folder.cleanup()

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        if not self._control.poll(IMPORT_LIMIT_S):
            raise TimeoutError(f"the zygote imports for more than {IMPORT_LIMIT_S} s")
        try:
            self._ready = receive(self._control)
        except EOFError:
            log = (self._logs / "zygote.log").read_text()
            raise RuntimeError(f"the zygote ended:\n{log}") from None

    def _ask(self, request: Fork | Signal) -> Any:
        send(self._control, request)
        return receive(self._control)


class ForkedPool(SpmdPool):
    """Ranks forked from the zygote; they end with the pool or at its time limit."""

    def __init__(
        self,
        world_size: int,
        spec: JobSpec | None,
        ask: Callable[[Fork | Signal], Any],
        logs: Path,
        limit_s: float,
    ) -> None:
        """Fork the ranks and start the clock."""
        authkey = secrets.token_bytes(AUTHKEY_BYTES)
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        listener = Listener(("127.0.0.1", 0), backlog=world_size, authkey=authkey)
        hang_s = spec.hang_timeout_s if spec is not None else math.inf
        super().__init__(listener, world_size, spec, hang_s)  # type: ignore[arg-type]
        logs.mkdir(parents=True)
        self._logs, self._ask, self._limit_s = logs, ask, limit_s
        fork = Fork(world_size, listener.address, authkey, self._store.port, logs)
        self._pids: tuple[int, ...] = ask(fork)
        self._clock = threading.Timer(limit_s, self._expire)
        self._clock.daemon = True
        self._clock.start()

    def each(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Run a module-level function on every rank; in a job it is given the host first."""
        name = (function.__module__, function.__qualname__)
        return call_all(self, range(self.world_size), "", "run", *name, kwargs)

    def close(self) -> None:
        """Kill the ranks."""
        self._clock.cancel()
        super().close()
        self._ask(Signal(self._pids, signal.SIGKILL))

    def _expire(self) -> None:
        late = [
            rank
            for rank in range(self.world_size)
            if any(answers.awaits(rank) for _, answers in list(self._pending.values()))
        ]
        self._ask(Signal(self._pids, signal.SIGUSR1))  # every rank writes its stacks
        time.sleep(0.5)
        stacks = [f"rank {rank}:\n{self._log(rank)}" for rank in range(self.world_size)]
        text = f"ranks {late} did not answer in {self._limit_s} s"
        self._fail(Cause(late[0] if late else 0, "\n".join([*stacks, text]), died=False))

    def _remains(self, cause: Cause) -> str:
        return self._log(cause.rank) if cause.died else ""

    def _log(self, rank: int) -> str:
        path = self._logs / f"rank_{rank}.log"
        lines = path.read_text(errors="replace").splitlines() if path.exists() else []
        return "\n".join(lines[-60:])


def zygote(handle: int, modules: Sequence[str] = WARM_MODULES) -> None:
    """Import, then fork and end ranks as asked until the session is over."""
    die_with_parent()
    control = Connection(handle)
    for name in modules:
        importlib.import_module(name)
    threads = os.listdir("/proc/self/task")
    assert len(threads) == 1, f"forking a process of {len(threads)} threads is not safe"
    gc.freeze()  # forks then write to fewer pages
    send(control, True)
    while True:
        try:
            request = receive(control)
        except EOFError:
            return
        if isinstance(request, Fork):
            send(
                control, tuple(_fork(request, rank, control) for rank in range(request.world_size))
            )
        else:
            for pid in request.pids:  # ended ones are not yet reaped: a pid is never another's
                os.kill(pid, request.number)
            if request.number == signal.SIGKILL:
                for pid in request.pids:
                    os.waitpid(pid, 0)
            send(control, None)


def _fork(request: Fork, rank: int, control: Connection) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        control.close()
        _be_rank(request, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _be_rank(request: Fork, rank: int) -> None:
    """Report, take the job, serve calls."""
    die_with_parent()
    log = os.open(request.logs / f"rank_{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(log, 1)
    os.dup2(log, 2)
    faulthandler.register(signal.SIGUSR1, file=2)
    world = request.world_size
    os.environ.update(rank_environment(rank, rank, world, world, "cpu", os.environ))
    connection = connect(request.address, request.authkey, rank)
    spec = receive(connection)
    store = dist.TCPStore("127.0.0.1", request.store_port)
    first: list[Any] = []

    def call(role: str, method: str, args: tuple[Any, ...]) -> Any:
        if method == "build":
            first.extend(_build(spec, store, rank, world))
            return None
        if role == "":
            module, name, kwargs = args
            return attrgetter(name)(importlib.import_module(module))(*first, **kwargs)
        return first[0].answer(role, method, args)

    serve(connection, call)


def _build(spec: JobSpec | None, store: dist.Store, rank: int, world: int) -> list[Any]:
    if spec is not None:
        from mrl.workers.host import WorkerHost

        return [WorkerHost(spec, store)]
    limit = timedelta(seconds=CALL_LIMIT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=limit)
    return []
