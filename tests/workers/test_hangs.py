"""A rank that hangs ends the job in time, and is told from those that wait for it."""

from __future__ import annotations

import math
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.connection import Listener

import pytest

from mrl.workers.group import WorkerError
from mrl.workers.hangs import CallClocks, Late, explain_hang
from mrl.workers.wire import receive, send
from tests.runs import ROOT
from tests.workers.test_spmd import KEY, ToyPool, toy

LIMIT_S = 2.0


@contextmanager
def hasty(
    world_size: int, hang_s: float = LIMIT_S, collective_s: float = math.inf
) -> Iterator[ToyPool]:
    """Hold ranks that are given little time for a call, or for a collective."""
    with toy(world_size) as pool:
        pool._hang_s, pool._collective_s = hang_s, collective_s
        yield pool


def test_a_rank_that_sleeps_for_ever_is_named_with_its_place() -> None:
    with hasty(2) as pool:
        futures = [pool.submit([rank], "actor", "sleep", (60.0 * rank, None)) for rank in (0, 1)]
        with pytest.raises(WorkerError) as caught:
            pool.wait(futures)
    error = caught.value
    assert error.cause.startswith("rank 1 (pid ")
    assert "hangs in actor.sleep for" in error.cause and "trainer.hang_timeout_s=2" in error.cause
    assert "time.sleep(args[0])" in error.evidence or 'File "<string>"' in error.evidence


def test_a_stopped_rank_is_named_and_ended_although_a_message_is_on_its_way_to_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("mrl.workers.pool.ANSWER_S", 1.0)
    with hasty(2) as pool:
        pool.ranks[1].send_signal(signal.SIGSTOP)
        large = os.urandom(50_000_000)  # more than a socket holds: the controller waits for it
        futures = [pool.submit([1], "actor", "sleep", (0.0, large))]
        with pytest.raises(WorkerError, match=r"rank 1 .*hangs in actor\.sleep.*does not answer"):
            pool.wait(futures)
        pool.end_silent()
        assert pool.ranks[1].wait(timeout=10.0) == -signal.SIGKILL


def test_the_rank_that_others_waited_for_is_the_cause_of_their_time_out() -> None:
    with hasty(2, math.inf, 1.0) as pool:
        futures = [
            pool.submit([0], "actor", "raise", ("timed out in a collective", 1.5)),
            pool.submit([1], "actor", "sleep", (60.0, None)),
        ]
        with pytest.raises(WorkerError, match=r"rank 1 .*hangs in actor\.sleep.*fault_timeout_s"):
            pool.wait(futures)


def test_a_failure_of_its_own_is_its_cause() -> None:
    with hasty(2, math.inf, 1.0) as pool:
        futures = [
            pool.submit([0], "actor", "raise", ("at once",)),
            pool.submit([1], "actor", "sleep", (60.0, None)),
        ]
        with pytest.raises(WorkerError, match=r"rank 0 .*KeyError: 'at once'"):
            pool.wait(futures)


@pytest.mark.parametrize(("method", "lasting"), [("raise", False), ("refuse", True)])
def test_wrong_input_lasts_and_other_failures_may_pass(method: str, lasting: bool) -> None:
    with toy(1) as pool:
        with pytest.raises(WorkerError) as caught:
            pool.wait([pool.submit([0], "", method, ("why",))])
        assert caught.value.lasting is lasting
        assert caught.value.within("in step 3, ").lasting is lasting


def stack(*files: str) -> str:
    return "".join(f'  File "{file}", line 7, in work\n    code()\n' for file in files)


SLEEPS = stack("mrl/workers/actor.py", "mrl/a.py")
WAITS = stack("mrl/workers/actor.py", "site-packages/torch/distributed/distributed_c10d.py")


@pytest.mark.parametrize(
    ("stacks", "blamed", "said"),
    [
        ({0: WAITS, 1: SLEEPS, 2: WAITS}, (1,), 'rank one hangs .* is at File "mrl/a.py"'),
        ({0: WAITS, 2: SLEEPS}, (1,), "rank one hangs .* does not answer"),
        ({0: WAITS, 1: WAITS, 2: WAITS}, (0, 1, 2), "rank nil hangs .*wait for each other"),
        ({0: SLEEPS, 1: WAITS, 2: SLEEPS}, (0, 2), r"rank nil hangs .*as do ranks \[2\]"),
    ],
)
def test_who_waits_in_a_collective_is_not_to_blame(
    stacks: dict[int, str], blamed: tuple[int, ...], said: str
) -> None:
    names = {0: "rank nil", 1: "rank one", 2: "rank two"}
    late = [Late(rank, "actor.update", 20.0) for rank in range(3)]
    hang = explain_hang(late, stacks, names, "a limit")
    assert hang.ranks == blamed
    assert re.search(said, hang.cause), hang.cause
    assert "\n" not in hang.cause


def test_a_clock_runs_for_the_first_call_alone() -> None:
    clocks = CallClocks()
    for call in ("first", "second"):
        clocks.asked([3], call)
    assert [late.call for late in clocks.late(-1.0)] == ["first"]
    clocks.answered(3)
    assert [late.call for late in clocks.late(-1.0)] == ["second"]
    clocks.answered(3)
    assert clocks.late(-1.0) == []


DEAF = """
import sys
from mrl.workers.wire import connect, serve

connection = connect(("127.0.0.1", int(sys.argv[1])), bytes.fromhex(sys.argv[2]), 1)
serve(connection, lambda role, method, args: None, 1.0, lambda: print("silence", flush=True))
"""


def test_a_rank_ends_when_the_controller_is_silent() -> None:
    with Listener(("127.0.0.1", 0), authkey=KEY) as listener:
        rank = subprocess.Popen(
            [sys.executable, "-c", DEAF, str(listener.address[1]), KEY.hex()],
            cwd=ROOT,
            stdout=subprocess.PIPE,
        )
        connection = listener.accept()
        receive(connection)
        send(connection, "a word")
        assert rank.wait(timeout=60.0) == 1
        assert rank.stdout is not None and rank.stdout.read() == b"silence\n"
        connection.close()
