"""A replica that never answers ends the wait for all, by the name of its rank and call."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from multiprocessing.connection import Listener

import pytest

from mrl.config.plan import spread
from mrl.types import Prompt, SamplingParams
from mrl.workers.group import RolloutGroup, WorkerError
from mrl.workers.pool import SpmdPool
from mrl.workers.wire import AUTHKEY_BYTES
from tests.runs import ROOT

KEY = os.urandom(AUTHKEY_BYTES)
SAMPLING = SamplingParams(n=2, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=4, seed=1)
RANKS, HANGS = 2, 1
RANK = f"""
import sys, time
import mrl.types
from mrl.workers.wire import connect, receive, serve

port, key, rank = int(sys.argv[1]), bytes.fromhex(sys.argv[2]), int(sys.argv[3])

def call(role, method, args):
    if method != "generate":
        return None
    if rank == {HANGS}:
        time.sleep(1e6)
    return [()] * len(args[0])

connection = connect(("127.0.0.1", port), key, rank)
receive(connection)
serve(connection, call)
"""


@pytest.fixture
def pool() -> Iterator[SpmdPool]:
    """Ranks that are small processes; one of them never answers a prompt."""
    listener = Listener(("127.0.0.1", 0), backlog=RANKS, authkey=KEY)
    arguments = [sys.executable, "-c", RANK, str(listener.address[1]), KEY.hex()]
    ranks = [
        subprocess.Popen([*arguments, str(rank)], cwd=ROOT, stderr=subprocess.DEVNULL)
        for rank in range(RANKS)
    ]
    pool = SpmdPool(listener, RANKS, None, hang_timeout_s=60.0)  # type: ignore[arg-type]
    try:
        pool.start()  # which takes its time on a busy machine
        pool._hang_s = 3.0
        yield pool
    finally:
        pool.close()
        for rank in ranks:
            rank.kill()
            rank.wait()


@pytest.mark.slow  # the fast siblings are of hung ranks in general
@pytest.mark.multiprocess
def test_a_replica_that_never_answers_is_named(pool: SpmdPool) -> None:
    prompts = [Prompt(f"p{i}", (i,), "", "", None, {}) for i in range(7)]
    with pytest.raises(WorkerError, match=rf"rank {HANGS}\b.*rollout\.generate") as error:
        RolloutGroup(pool, 1, spread).generate(prompts, SAMPLING)
    assert "hang_timeout_s=3" in str(error.value)
