"""Saves that are written beside training."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.workers.group import WorkerError
from mrl.workers.host import WorkerHost
from tests.ranks import Ranks
from tests.workers.jobs import both, group, layout, weights_of
from tests.workers.megatron.test_resumed_layouts import state_of, train


def write_slowly(host: WorkerHost) -> None:
    """Keep every write of this rank's checkpoint waiting for a file that training leaves."""
    from mrl.workers.megatron import optimizer_state

    original, flag = optimizer_state.write_chunks, Path(os.environ["RANK_FLAG"])

    def write(path: Path, chunks: Any) -> Any:
        while not flag.exists():
            pass
        return original(path, chunks)

    optimizer_state.write_chunks = write


def set_flag(host: WorkerHost, flag: str) -> None:
    os.environ["RANK_FLAG"] = flag


def fill_the_disk(host: WorkerHost) -> None:
    """Let rank 1 write no file above 20 kB."""
    if host.rank == 1:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # the error, not the signal
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))


@pytest.mark.parametrize("away", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_save_in_the_background_is_of_the_moment_it_began(
    away: bool, ranks: Ranks, qwen2: Path, tmp_path: Path
) -> None:
    moves = dict.fromkeys(("param_offload", "grad_offload", "optimizer_offload"), away)
    spec = both(qwen2, layout(tp=2, dtype="bfloat16", **moves))
    flag = tmp_path / "go"
    with ranks.job(2, spec) as pool:
        actor, critic = group(pool, spec.actor), group(pool, spec.critic)
        train(pool, spec, 0)
        for role in (actor, critic):
            role.save(tmp_path / "at_once" / role.role)
        pool.each(set_flag, flag=str(flag))
        pool.each(write_slowly)
        for role in (actor, critic):
            role.begin_save(tmp_path / "beside" / role.role)
        train(pool, spec, 2)
        assert not actor.is_saved() and not critic.is_saved()
        assert not (tmp_path / "beside" / "actor" / "dist_ckpt" / ".metadata").exists()
        flag.touch()
        for role in (actor, critic):
            role.finish_save(tmp_path / "beside" / role.role)
            assert role.is_saved()
    for name in ("actor", "critic"):
        wanted, found = tmp_path / "at_once" / name, tmp_path / "beside" / name
        files = [sorted(p.relative_to(f).as_posix() for p in f.rglob("*")) for f in (wanted, found)]
        assert files[0] == files[1]
        for read in (state_of, weights_of):
            one, other = read(wanted), read(found)
            assert one.keys() == other.keys()
            assert all(torch.equal(one[key], other[key]) for key in one)


def test_a_rank_whose_disk_is_full_is_named_and_holds_up_no_other(
    ranks: Ranks, qwen2: Path, tmp_path: Path
) -> None:
    spec = both(qwen2, layout(tp=2))
    with ranks.job(2, spec) as pool:
        actor = group(pool, spec.actor)
        pool.each(fill_the_disk)
        actor.begin_save(tmp_path)
        with pytest.raises(WorkerError, match=r"(?s)rank 1 on .*File too large") as caught:
            actor.finish_save(tmp_path)
    assert os.strerror(errno.EFBIG) in str(caught.value)
    assert not (tmp_path / "dist_ckpt" / ".metadata").exists()
