"""The controller and its ranks: order, first causes, and processes that come and go.

The ranks here are threads or small processes that serve toy calls over the real wire.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Listener
from pathlib import Path
from typing import Any

import pytest

from mrl import load_config
from mrl.config import build_plan
from mrl.workers.group import Answers, WorkerError, call_all
from mrl.workers.job import run_job
from mrl.workers.pool import SpmdPool
from mrl.workers.spmd import SpawnedPool, rank_environment
from mrl.workers.wire import connect, receive, serve
from tests.runs import ROOT, Inputs
from tests.workers import jobs

KEY = b"k" * 32

# A rank without a model: `sleep` seconds then give a value, `raise`, `kill` itself, or `meet`
# another rank: leave a file of its own and wait for the other's.
RANK = """
import os, signal, sys, time
from mrl.workers.wire import connect, receive, serve

def call(role, method, args):
    if method == "sleep":
        time.sleep(args[0])
        return args[1]
    if method == "raise":
        time.sleep(args[1] if len(args) > 1 else 0.0)
        raise KeyError(args[0])
    if method == "refuse":
        raise ValueError(args[0])
    if method == "meet":
        open(args[0], "w").close()
        while not os.path.exists(args[1]):
            time.sleep(0.01)
    if method == "kill":
        os.kill(os.getpid(), signal.SIGKILL)

connection = connect(("127.0.0.1", int(sys.argv[1])), bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
receive(connection)
serve(connection, call)
"""


class ToyPool(SpmdPool):
    """Ranks that are small processes."""

    def __init__(self, world_size: int) -> None:
        listener = Listener(("127.0.0.1", 0), backlog=world_size, authkey=KEY)
        super().__init__(listener, world_size, None)  # type: ignore[arg-type]
        self.port = listener.address[1]
        self.ranks = [
            subprocess.Popen(
                [sys.executable, "-c", RANK, str(self.port), KEY.hex(), str(rank)],
                cwd=ROOT,
                stderr=subprocess.DEVNULL,
            )
            for rank in range(world_size)
        ]


@contextmanager
def toy(
    world_size: int,
    before: Callable[[ToyPool], None] = lambda pool: None,
    kind: type[ToyPool] = ToyPool,
) -> Iterator[ToyPool]:
    """Hold a started pool; `before` comes between its making and its start."""
    pool = kind(world_size)
    try:
        before(pool)
        pool.start()
        yield pool
    finally:
        pool.close()
        for rank in pool.ranks:
            rank.kill()
            rank.wait()


def test_results_come_in_the_order_of_the_calls() -> None:
    with toy(3) as pool:
        delays = [0.3, 0.0, 0.1]
        futures = [pool.submit([rank], "", "sleep", (delays[rank], rank)) for rank in range(3)]
        futures += [pool.submit([0], "", "sleep", (0.0, "next"))]
        assert pool.wait(futures) == [[0], [1], [2], ["next"]]


def test_ranks_work_at_the_same_time_and_one_rank_in_order(tmp_path: Path) -> None:
    with toy(2) as pool:
        files = [str(tmp_path / "0"), str(tmp_path / "1")]
        pool.wait(
            [pool.submit([0], "", "meet", (*files,)), pool.submit([1], "", "meet", (*files[::-1],))]
        )
        slow, quick = (
            pool.submit([0], "", "sleep", (0.3, 1)),
            pool.submit([0], "", "sleep", (0.0, 2)),
        )
        pool.wait([quick])
        assert slow.done()


def test_a_raising_rank_is_reported_at_once_with_its_call_and_traceback() -> None:
    with toy(2) as pool:
        hanging = pool.submit([0], "actor", "sleep", (60.0, None))
        raising = pool.submit([1], "actor", "raise", ("the cause",))
        with pytest.raises(
            WorkerError, match=r"(?s)rank 1 on .* failed in actor\.raise.*the cause"
        ):
            pool.wait([hanging, raising])
        assert not hanging.done()


def test_a_death_is_the_cause_of_the_errors_around_it() -> None:
    with toy(3) as pool:
        futures = [
            pool.submit([0], "actor", "raise", ("connection closed by peer",)),
            pool.submit([1], "actor", "kill", ()),
            pool.submit([2], "actor", "raise", ("connection closed by peer",)),
        ]
        with pytest.raises(WorkerError, match=r"rank 1 .*ended during actor\.kill") as caught:
            pool.wait(futures)
        assert "connection closed" not in str(caught.value)


def test_calls_after_a_failure_fail_with_the_first_cause() -> None:
    with toy(2) as pool:
        with pytest.raises(WorkerError, match=r"ended during actor\.kill"):
            call_all(pool, range(pool.world_size), "actor", "kill")
        with pytest.raises(WorkerError, match=r"ended during actor\.kill"):
            call_all(pool, range(pool.world_size), "actor", "sleep", 0.0, None)


def test_a_rank_that_dies_before_its_roles_are_built_ends_the_start() -> None:
    class Failing(ToyPool):
        def submit(
            self, ranks: Sequence[int], role: str, method: str, args: tuple[Any, ...]
        ) -> Answers:
            super().submit([1], role, "kill", ())
            return super().submit(ranks, role, "sleep", (0.0, None))

    with pytest.raises(WorkerError, match="rank 1"), toy(2, kind=Failing):
        pass


def test_strangers_at_the_port_do_not_disturb_the_start() -> None:
    def knock(pool: ToyPool) -> None:
        for words in (b"", b"GET / HTTP/1.0\r\n\r\n", b"\x00\x00\x00\x04spam"):
            with socket.create_connection(("127.0.0.1", pool.port)) as stranger:
                stranger.sendall(words)

    with toy(2, knock) as pool:
        assert call_all(pool, range(2), "", "sleep", 0.0, "here") == ["here", "here"]


def test_ranks_leave_when_the_controller_is_gone() -> None:
    with toy(2) as pool:
        pool.submit([0], "", "sleep", (60.0, None))  # also one that is busy
        pool._closing = True
        for connection in pool._connections.values():
            with socket.socket(fileno=os.dup(connection.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)
        assert [rank.wait(timeout=10.0) for rank in pool.ranks] == [1, 1]


def test_ranks_leave_at_the_goodbye() -> None:
    with toy(2) as pool:
        pool.close()
        assert [rank.wait(timeout=10.0) for rank in pool.ranks] == [0, 0]


def test_a_large_message_passes_both_ways_while_ranks_are_busy() -> None:
    large = os.urandom(50_000_000)
    with toy(2) as pool:
        busy = [pool.submit([rank], "", "sleep", (0.3, None)) for rank in range(2)]
        echoes = [pool.submit([rank], "", "sleep", (0.0, large)) for rank in range(2)]
        assert pool.wait([*busy, *echoes])[2:] == [[large], [large]]


def test_many_pools_of_one_host_do_not_meet() -> None:
    """Sixteen jobs start at once; their ranks are threads, told apart by their answers."""
    with ExitStack() as stack:
        pools = []
        for number in range(16):
            listener = Listener(("127.0.0.1", 0), backlog=2, authkey=KEY)
            pools.append(SpmdPool(listener, 2, number))  # type: ignore[arg-type]
            stack.callback(pools[-1].close)
            for rank in range(2):
                threading.Thread(
                    target=_be_thread, args=(listener.address, rank), daemon=True
                ).start()
        for pool in pools:
            pool.start()
        answers = [call_all(pool, range(pool.world_size), "", "spec") for pool in pools]
        assert answers == [[(n, 0), (n, 1)] for n in range(16)]


def _be_thread(address: Any, rank: int) -> None:
    connection = connect(address, KEY, rank)
    spec = receive(connection)
    serve(connection, lambda role, method, args: (spec, rank))


@pytest.mark.parametrize(
    ("cores", "ranks", "given", "expected"),
    [(64, 8, None, "8"), (2, 8, None, "1"), (6, 4, None, "1"), (64, 8, "3", "3")],
)
def test_ranks_share_the_cores_unless_the_user_says_otherwise(
    monkeypatch: pytest.MonkeyPatch, cores: int, ranks: int, given: str | None, expected: str
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    user = {} if given is None else {"OMP_NUM_THREADS": given}
    environment = rank_environment(3, 3, ranks, ranks, "cpu", user)
    assert environment["OMP_NUM_THREADS"] == expected
    assert environment["RANK"] == environment["LOCAL_RANK"] == "3"
    assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == str(ranks)


def test_only_a_cpu_rank_goes_without_the_compiler() -> None:
    assert rank_environment(0, 0, 1, 1, "cpu", {})["TORCHDYNAMO_DISABLE"] == "1"
    assert "TORCHDYNAMO_DISABLE" not in rank_environment(0, 0, 1, 1, "cuda", {})


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_spawned_rank_that_cannot_build_tells_why(qwen2: Path, tmp_path: Path) -> None:
    spec = jobs.job(jobs.role(tmp_path / "no-such-model"))
    with pytest.raises(WorkerError, match=r"(?s)rank 0 on .* failed in \.?build.*no-such-model"):
        SpawnedPool(1, spec, tmp_path / "logs")
    assert "no-such-model" in (tmp_path / "logs" / "rank_0.log").read_text()


def test_the_wrong_number_of_launched_ranks_is_refused(
    monkeypatch: pytest.MonkeyPatch, inputs: Inputs
) -> None:
    config = load_config(inputs.config)
    spec = jobs.job(jobs.role(Path(config.model.path)))
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (launched | {"MASTER_PORT": "29500"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"started 3 ranks .*asks for 2"):
        run_job(config, build_plan(config), spec, lambda pool: None)


def test_a_rank_on_a_gpu_has_one_thread_unless_the_user_says_otherwise() -> None:
    def threads(device: str, **given: str) -> str:
        return rank_environment(0, 0, 1, 1, device, given)["OMP_NUM_THREADS"]

    assert threads("cuda") == "1"
    assert threads("cuda", OMP_NUM_THREADS="4") == threads("cpu", OMP_NUM_THREADS="4") == "4"
    assert threads("cpu") == str(len(os.sched_getaffinity(0)))
