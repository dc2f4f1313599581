"""The pool that scores responses in processes of its own, with a hard limit a sample.

Each process leads its own session. Past the limit the process and all its descendants are killed
and another takes its place; only the sample in hand is lost, and it is unscored, not 0. Plain
subprocesses speak over a socket, so that a worker starts in a tenth of a second, holds nothing of
the trainer (no torch, no CUDA context) and cannot break the protocol by printing.
"""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from multiprocessing.connection import wait
from types import TracebackType

import psutil

from mrl.config.schema import CustomRewardConfig, RewardComponentConfig
from mrl.rewards.registry import ScoreItem
from mrl.rewards.verdict import Component
from mrl.types import Score

logger = logging.getLogger(__name__)

_START_S = 120.0  # limit for starting a process, or loading a reward function with its imports
_CHUNK = 16  # items a message: enough to hide the round trip, few enough to spread
_STDERR = 2


class _Worker:
    """One scoring process and the items that it holds; the first of them is being scored."""

    def __init__(
        self, custom: tuple[str, str] | None, timeout_s: float, components: Sequence[Component]
    ) -> None:
        self._timeout_s = timeout_s
        self.connection, far = multiprocessing.Pipe()
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        with far:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "mrl.rewards.worker", str(far.fileno())],
                pass_fds=[far.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=_STDERR,
                start_new_session=True,
                env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            )
        self.items: deque[tuple[int, ScoreItem]] = deque()
        self.deadline = math.inf
        self.connection.send((timeout_s, custom, components))

    def wait_ready(self) -> None:
        """Wait until the custom function is loaded.

        Raises:
            ValueError: if the process cannot start, with its reason.
        """
        problem: str | None = f"no answer within {_START_S:.0f} s"
        if self.connection.poll(_START_S):
            try:
                problem = self.connection.recv()
            except (EOFError, OSError):
                problem = f"ended at start with exit code {self.kill()}"
        if problem is not None:
            self.kill()
            raise ValueError(f"reward process: {problem}")

    def assign(self, chunk: Sequence[tuple[int, ScoreItem]]) -> None:
        """Send items; they start their time once the functions are loaded."""
        self.items.extend(chunk)
        self.deadline = time.monotonic() + _START_S
        with contextlib.suppress(OSError):  # a dead process shows at the next receive
            self.connection.send(list(chunk))

    def receive(self) -> tuple[int, Score] | None:
        """Take one message: the score of the first item, or None for "started".

        Raises:
            EOFError, OSError: if the process died.
        """
        message = self.connection.recv()
        self.deadline = time.monotonic() + self._timeout_s
        if message == "started":
            return None
        index, value, status, detail, extra = message
        self.items.popleft()
        if not self.items:
            self.deadline = math.inf
        return index, Score(value, status, detail, extra or None)

    def kill(self) -> int:
        """End the process and everything it started; give its exit code when it is gone."""
        if self.process.returncode is not None:
            return self.process.returncode
        descendants: list[psutil.Process] = []
        with contextlib.suppress(psutil.NoSuchProcess):
            descendants = psutil.Process(self.process.pid).children(recursive=True)
        # The leader is not reaped yet, so the group's number is still ours.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        for process in descendants:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self.connection.close()
        return self.process.wait()


class RewardRunner:
    """A pool of scoring processes; a context manager, for one thread at a time."""

    def __init__(
        self,
        custom: CustomRewardConfig,
        num_workers: int,
        timeout_s: float,
        components: Mapping[str, RewardComponentConfig] | None = None,
    ) -> None:
        """Start the pool, so that a broken custom function is known now.

        Args:
            custom: the user's function; with `path=None` the registry decides by data source.
            num_workers: processes, at least 1.
            timeout_s: hard limit of one sample in seconds, all its components together.
            components: several rewards by name, whose weighted sum is the score; None or empty:
                one function, the user's or the registry's.

        Raises:
            ValueError: if a number is out of range or the custom function does not load.
        """
        if num_workers < 1:
            raise ValueError(f"reward.num_workers is {num_workers}, expected at least 1")
        if not timeout_s > 0:
            raise ValueError(f"reward.timeout_s is {timeout_s}, expected seconds above 0")
        self._custom = (os.path.abspath(custom.path), custom.name) if custom.path else None
        self._components = [_component(*named) for named in (components or {}).items()]
        self._timeout_s = timeout_s
        self._workers: list[_Worker] = []
        try:
            for _ in range(num_workers):
                self._workers.append(_Worker(self._custom, timeout_s, self._components))
            for worker in self._workers:
                worker.wait_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardRunner:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End all scoring processes and their descendants."""
        while self._workers:
            self._workers.pop().kill()

    def score(self, items: Sequence[ScoreItem]) -> tuple[Score, ...]:
        """Score items; the result is in their order.

        A sample whose function raised, ran out of time, took its process down or returned no
        finite number has `value=None` and says why; a warning counts them.
        """
        if not self._workers:
            raise RuntimeError("the reward pool is closed")
        todo = deque(enumerate(items))
        size = max(1, min(_CHUNK, len(items) // (4 * len(self._workers))))
        scores: dict[int, Score] = {}
        while len(scores) < len(items):
            for worker in self._workers:
                if todo and not worker.items:
                    worker.assign([todo.popleft() for _ in range(min(size, len(todo)))])
            self._collect(scores, todo)
        ordered = tuple(scores[index] for index in range(len(items)))
        _report_unscored(ordered)
        return ordered

    def _collect(self, scores: dict[int, Score], todo: deque[tuple[int, ScoreItem]]) -> None:
        """Take what the processes answer, up to the nearest deadline; replace the failed."""
        busy: dict[object, int] = {
            worker.connection: slot for slot, worker in enumerate(self._workers) if worker.items
        }
        nearest = min(self._workers[slot].deadline for slot in busy.values())
        ready = wait(
            [self._workers[slot].connection for slot in busy.values()],
            timeout=max(0.0, nearest - time.monotonic()),
        )
        for connection in ready:
            self._drain(busy[connection], scores, todo)
        now = time.monotonic()
        for slot in busy.values():
            worker = self._workers[slot]
            # An answer may have come since the wait: it counts.
            if worker.items and worker.deadline <= now and not worker.connection.poll():
                worker.kill()
                self._replace(slot, self._timed_out(), scores, todo)

    def _drain(
        self, slot: int, scores: dict[int, Score], todo: deque[tuple[int, ScoreItem]]
    ) -> None:
        """Take the answers of one process that are there."""
        worker = self._workers[slot]
        try:
            while worker.items and worker.connection.poll():
                if (scored := worker.receive()) is not None:
                    scores[scored[0]] = scored[1]
        except (EOFError, OSError):
            code = worker.kill()
            if code == -signal.SIGALRM:  # its own alarm, because this process was held up
                failure = self._timed_out()
            else:
                failure = Score(None, "error", f"its process ended with exit code {code}")
            self._replace(slot, failure, scores, todo)

    def _timed_out(self) -> Score:
        return Score(None, "timeout", f"longer than reward.timeout_s={self._timeout_s:g}")

    def _replace(
        self,
        slot: int,
        failure: Score,
        scores: dict[int, Score],
        todo: deque[tuple[int, ScoreItem]],
    ) -> None:
        """Start a process for a killed one: its item in hand failed, the others wait again."""
        (index, _), *waiting = self._workers[slot].items
        scores[index] = failure
        todo.extendleft(reversed(waiting))
        self._workers[slot] = _Worker(self._custom, self._timeout_s, self._components)
        self._workers[slot].wait_ready()


def _component(name: str, config: RewardComponentConfig) -> Component:
    custom = (os.path.abspath(config.path), config.name) if config.path else None
    return Component(name, config.weight, custom, config.data_source)


def _report_unscored(scores: Sequence[Score]) -> None:
    failed = [score for score in scores if score.status != "ok"]
    if failed:
        counts = ", ".join(f"{n} {s}" for s, n in sorted(Counter(f.status for f in failed).items()))
        logger.warning(
            "reward: %d of %d samples unscored (%s); the first: %s",
            len(failed),
            len(scores),
            counts,
            failed[0].detail,
        )
