"""The tests' own source of ranks."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrl.workers.group import WorkerError
from tests.ranks import Ranks
from tests.workers.jobs import job, role

STATE: list[int] = []


def total_rank(weight: float) -> float:
    tensor = torch.tensor(dist.get_rank() * weight)
    dist.all_reduce(tensor)
    return float(tensor)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_ranks_share_a_group(world: int, ranks: Ranks) -> None:
    assert ranks.run(world, total_rank, weight=0.5) == [sum(range(world)) / 2] * world


def touch() -> tuple[int, int, str]:
    STATE.append(1)
    return len(STATE), os.getpid(), os.environ["RANK"]


def test_no_state_survives_a_run(ranks: Ranks) -> None:
    first, second = ranks.run(2, touch), ranks.run(2, touch)
    assert [count for count, *_ in first + second] == [1] * 4
    assert [rank for *_, rank in second] == ["0", "1"]
    pids = [pid for _, pid, _ in first + second]
    assert len(set(pids)) == 4
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def fail_on_one() -> None:
    if dist.get_rank() == 1:
        raise KeyError("the first cause")
    dist.barrier()


def test_a_failure_comes_back_with_its_traceback(ranks: Ranks) -> None:
    with pytest.raises(WorkerError, match=r"rank 1 .*(?s:.*)in fail_on_one(?s:.*)the first cause"):
        ranks.run(2, fail_on_one)


def die() -> None:
    os._exit(3)


def test_a_death_is_told(ranks: Ranks) -> None:
    with pytest.raises(WorkerError, match=r"rank \d .*ended"):
        ranks.run(2, die)


def hang_on_one() -> Any:
    if dist.get_rank() == 1:
        time.sleep(3600)
    return os.getpid()


def test_a_hang_ends_at_the_limit_and_shows_where(ranks: Ranks) -> None:
    with pytest.raises(WorkerError, match=r"hang_on_one(?s:.*)ranks \[1\] did not answer in"):
        ranks.run(2, hang_on_one, limit_s=6.0)
    assert ranks.run(1, total_rank, weight=1.0) == [0.0]  # the next run is not affected


def test_a_job_that_cannot_be_built_is_told(ranks: Ranks, tmp_path: Path) -> None:
    with (
        pytest.raises(WorkerError, match=r"failed in build(?s:.*)config\.json"),
        ranks.job(1, job(role(tmp_path))),
    ):
        pass
