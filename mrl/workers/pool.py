"""Ranks that are processes, reached over sockets.

The controller listens; every rank connects to it, is told its job and then serves calls. Who
starts the ranks is another matter: `spmd.py` spawns them here, `launched.py` meets those of
torchrun and srun.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, Listener
from typing import Any

from mrl.workers.group import Answers, WorkerError
from mrl.workers.hangs import ANSWER_S, CallClocks, Hang, Late, explain_hang, patience
from mrl.workers.specs import JobSpec
from mrl.workers.wire import (
    AskStack,
    Call,
    Goodbye,
    Hello,
    Packed,
    Pulse,
    Reply,
    Stack,
    pack,
    receive,
    send,
    send_packed,
)

_GRACE_S = 1.0  # after a first failure: time for the death that caused it to be seen
_LOOK_S = 0.5  # between two looks for a failure
_PULSE_S = 10.0  # between two signs of life of the controller, at most


@dataclass(frozen=True, slots=True)
class Cause:
    """What ended a job, as far as one rank goes."""

    rank: int
    text: str  # one line
    died: bool  # the process is gone, rather than an exception caught
    evidence: str = ""  # what belongs above it
    lasting: bool = False  # of wrong input
    after_s: float = 0.0  # how long the call had lasted
    hung: bool = False  # found by the clock, while the processes were alive

    @property
    def order(self) -> tuple[bool, bool]:
        """Sort first what is no echo: who hangs, then who died, then who met an exception."""
        # A killed process is the cause of its peers' broken connections, whoever reports first.
        return not self.hung, not self.died


class SpmdPool:
    """Ranks reached over sockets."""

    def __init__(
        self,
        listener: Listener,
        world_size: int,
        spec: JobSpec,
        hang_timeout_s: float = math.inf,
        collective_timeout_s: float = math.inf,
    ) -> None:
        """Take the ranks in and tell them their job; `start` waits until they are built.

        A rank that is at one call for longer than `hang_timeout_s` has failed. Where a call fails
        after `collective_timeout_s`, a rank that others waited for is looked for.
        """
        self.world_size = world_size
        self._listener, self._spec = listener, spec
        self._hang_s, self._collective_s = hang_timeout_s, collective_timeout_s
        self._connections: dict[int, Connection] = {}
        self._hellos: dict[int, Hello] = {}
        self._sending = [threading.Lock() for _ in range(world_size)]
        self._clocks = CallClocks()
        self._stacks: dict[int, str] = {}  # of the ranks that were asked for theirs
        self._silent: list[int] = []  # that were asked and did not answer
        self._pending: dict[int, tuple[str, Answers]] = {}  # by call number
        self._lock = threading.Lock()
        self._count = 0
        self._causes: list[Cause] = []
        self._failed = threading.Event()
        self._closing = False

    @property
    def has_failed(self) -> bool:
        """Say whether a rank has failed, or is gone unnoticed so far."""
        return self._failed.is_set() or any(map(_is_cut, list(self._connections.values())))

    def start(self) -> None:
        """Accept every rank and wait until all have built their roles.

        Raises WorkerError with the first cause when a rank fails.
        """
        threading.Thread(target=self._accept, daemon=True).start()
        threading.Thread(target=self._keep_time, daemon=True).start()
        deadline = time.monotonic() + self._hang_s
        while len(self._connections) < self.world_size:
            self._raise_if_failed()
            if time.monotonic() > deadline:
                lost = sorted(set(range(self.world_size)) - set(self._connections))
                raise WorkerError(
                    f"ranks {lost} have not reported within trainer.hang_timeout_s={self._hang_s:g}"
                )
            time.sleep(0.02)
        self.wait([self.submit(range(self.world_size), "", "build", ())])

    def submit(
        self, ranks: Sequence[int], role: str, method: str, args: tuple[Any, ...]
    ) -> Answers:
        """Ask different ranks to run a role's method; the call is pickled once for all."""
        answers = Answers(ranks)
        with self._lock:
            self._count += 1
            name = f"{role}.{method}".lstrip(".")
            call = pack(Call(self._count, role, method, args))  # what cannot be sent is not awaited
            self._pending[self._count] = (name, answers)
            self._clocks.asked(ranks, name)
            if self._failed.is_set():
                return answers  # whoever waits for them is told the cause
            try:
                for rank in ranks:
                    self._deliver(rank, call)
            except OSError:
                self._failed.set()  # its reader thread tells why
        return answers

    def _deliver(self, rank: int, call: Packed) -> None:
        with self._sending[rank]:
            send_packed(self._connections[rank], call)

    def wait(self, calls: Sequence[Answers]) -> list[list[Any]]:
        """Give the answers to each call, or raise the first cause as soon as a rank fails."""
        waiting: set[Future[list[Any]]] = set(calls)
        while waiting:
            _done, waiting = wait(waiting, _LOOK_S)
            self._raise_if_failed()
        return [call.result() for call in calls]

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
            self._hellos[hello.rank] = hello
            self._connections[hello.rank] = connection
            thread.start()

    def _read(self, hello: Hello, connection: Connection) -> None:
        try:
            while True:
                message = receive(connection)
                if isinstance(message, Stack):
                    self._stacks[hello.rank] = message.text
                    continue
                reply = Reply._make(message)
                seconds = self._clocks.answered(hello.rank)
                name, answers = self._pending[reply.number]
                if reply.failure is None:
                    if answers.take(hello.rank, reply.value):
                        del self._pending[reply.number]
                    continue
                who = f"rank {hello.rank} on {hello.host}"
                text = f"{who} failed in {name}: {last_error(reply.failure)}"
                trace = f"{who} in {name}:\n{reply.failure.rstrip()}"
                self._fail(Cause(hello.rank, text, False, trace, reply.lasting, seconds))
        except (EOFError, OSError):
            if not self._closing:
                text = f"{self._name(hello.rank)} ended{self._calls(hello.rank)}"
                self._fail(Cause(hello.rank, text, died=True))
        except Exception as error:  # an answer that cannot be read: the caller would wait for it
            text = f"the answer of {self._name(hello.rank)} cannot be read: {error!r}"
            self._fail(Cause(hello.rank, text, False))

    def _name(self, rank: int) -> str:
        hello = self._hellos[rank]
        return f"rank {rank} (pid {hello.pid} on {hello.host})"

    def _calls(self, rank: int) -> str:
        names = [name for name, answers in list(self._pending.values()) if answers.awaits(rank)]
        return f" during {names[0]}" if names else ""

    def _fail(self, cause: Cause) -> None:
        self._causes.append(cause)
        self._failed.set()

    def _raise_if_failed(self) -> None:
        if not self._failed.is_set():
            return
        time.sleep(_GRACE_S)
        causes = sorted(self._causes, key=lambda cause: cause.order)
        if not causes:
            raise WorkerError("a rank is unreachable")
        cause = causes[0]
        if not cause.hung and cause.after_s >= self._collective_s:
            cause = self._awaited() or cause
        evidence = "\n".join(filter(None, (self._remains(cause), cause.evidence)))
        raise WorkerError(self._explain(cause), evidence, cause.lasting)

    def _explain(self, cause: Cause) -> str:
        return cause.text

    def _remains(self, cause: Cause) -> str:
        """Give what the rank left behind elsewhere."""
        return ""

    def _keep_time(self) -> None:
        """Look for ranks that hang, and tell all ranks that the controller lives."""
        last_pulse = time.monotonic()
        while not self._closing and not self._failed.is_set():
            time.sleep(patience(self._hang_s))
            if late := self._clocks.late(self._hang_s):
                hang = self._inquire(late, f"trainer.hang_timeout_s={self._hang_s:g}")
                self._fail(_hang_cause(hang))
                self._unblock(hang)
            if time.monotonic() - last_pulse > min(_PULSE_S, self._hang_s / 4):
                last_pulse = time.monotonic()
                self._tell(range(self.world_size), Pulse())
        while self._failed.is_set() and not self._closing:
            time.sleep(ANSWER_S)  # whatever failed, nobody stays at sending to a rank that is deaf
            for rank, lock in enumerate(self._sending):
                if lock.locked():
                    self._hang_up(rank)

    def _awaited(self) -> Cause | None:
        """Find a rank that kept its peers waiting until their collective ran out of time."""
        late = self._clocks.late(self._collective_s / 2)
        if not late:
            return None
        hang = self._inquire(late, f"trainer.fault_timeout_s={self._collective_s:g}")
        return None if len(hang.ranks) == len(late) > 1 else _hang_cause(hang)

    def _inquire(self, late: Sequence[Late], limit: str) -> Hang:
        """Ask ranks that are late what they do."""
        self._tell([one.rank for one in late], AskStack())
        deadline = time.monotonic() + ANSWER_S
        while time.monotonic() < deadline and any(one.rank not in self._stacks for one in late):
            time.sleep(0.05)
        names = {one.rank: self._name(one.rank) for one in late}
        return explain_hang(late, dict(self._stacks), names, limit)

    def _tell(self, ranks: Iterable[int], message: Any) -> None:
        """Send word to ranks; one that a long message is on its way to is passed over."""
        for rank in ranks:
            lock = self._sending[rank]
            if rank in self._connections and lock.acquire(timeout=0.1):
                with contextlib.suppress(OSError):  # its reader thread tells why
                    send(self._connections[rank], message)
                lock.release()

    def _unblock(self, hang: Hang) -> None:
        """Hang up on ranks that do not answer: the controller may be at sending them something."""
        for rank in set(hang.ranks) - set(self._stacks):
            self._silent.append(rank)
            self._signal(rank, signal.SIGUSR2)  # see leave_traces
            self._hang_up(rank)

    def _hang_up(self, rank: int) -> None:
        with (
            contextlib.suppress(OSError),
            socket.socket(fileno=os.dup(self._connections[rank].fileno())) as end,
        ):
            end.shutdown(socket.SHUT_RDWR)

    def end_silent(self) -> None:
        """Kill ranks of this host that did not answer: one that is stopped hears no other signal.

        Those of other hosts are their launcher's to end.
        """
        for rank in self._silent:
            self._signal(rank, signal.SIGKILL)

    def _signal(self, rank: int, number: signal.Signals) -> None:
        if self._hellos[rank].host == socket.gethostname():
            with contextlib.suppress(ProcessLookupError):
                os.kill(self._hellos[rank].pid, number)


def _is_cut(connection: Connection) -> bool:
    """Say whether the other end of a connection is gone and all it sent was read."""
    try:
        with socket.socket(fileno=os.dup(connection.fileno())) as end:
            return end.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
    except BlockingIOError:
        return False
    except OSError:
        return True


def _hang_cause(hang: Hang) -> Cause:
    return Cause(hang.ranks[0], hang.cause, died=False, evidence=hang.evidence, hung=True)


def last_error(trace: str) -> str:
    """Give the exception of a printed traceback in one line."""
    lines = trace.rstrip().splitlines()
    starts = [i for i, line in enumerate(lines) if re.match(r"[A-Za-z_][\w.]*(:|$)", line)]
    error = lines[starts[-1] :] if starts else lines[-1:]
    return " ".join(line.strip() for line in error)[:500]
