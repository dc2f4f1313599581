from __future__ import annotations

import errno
import os
from dataclasses import replace
from pathlib import Path

import pytest

from mrl.checkpoint.folder import BEST, TRACKER, CheckpointFolder
from mrl.checkpoint.saver import Saver
from mrl.checkpoint.state import TrainerState, best_value
from mrl.config import Config
from mrl.config.schema import ActorConfig, CheckpointConfig, TrainerConfig
from mrl.workers.group import WorkerError

STATE = TrainerState(1, 1, 42, {"epoch": 0}, 0.1)


class Role:
    """Writes what it is told to; its disk can be slow, and full."""

    def __init__(self) -> None:
        self.is_slow, self.is_full = False, False
        self.begun: list[Path] = []

    def save(self, folder: Path) -> None:
        self.begin_save(folder)
        self.finish_save(folder)

    def begin_save(self, folder: Path) -> None:
        folder.mkdir(parents=True)
        (folder / "half").write_text("x")
        self.begun.append(folder)

    def is_saved(self) -> bool:
        return not self.is_slow

    def finish_save(self, folder: Path) -> None:
        if self.is_full:
            raise WorkerError("rank 3 on node7 failed in finish_save: No space left on device")
        (folder / "whole").write_text("y")


def saver(root: Path, role: Role, background: bool = True, keep: int | None = None,
          best: str | None = None) -> Saver:  # fmt: skip
    config = Config(
        actor=ActorConfig(checkpoint=CheckpointConfig(async_save=background)),
        trainer=TrainerConfig(best_metric=best),
    )
    return Saver(CheckpointFolder(root, keep), {"actor": role}, config)


def at(step: int, best: int | None = None) -> TrainerState:
    return replace(STATE, global_step=step, best_step=best)


def tracked(root: Path) -> str:
    return (root / TRACKER).read_text().strip()


def test_the_tracker_moves_when_all_ranks_have_written(tmp_path: Path) -> None:
    role = Role()
    under_test = saver(tmp_path, role)
    under_test.save(at(1))
    assert not (tmp_path / TRACKER).exists()
    role.is_slow = True
    under_test.poll()
    assert under_test.folder.latest().found is None
    role.is_slow = False
    under_test.poll()
    assert tracked(tmp_path) == "1"
    assert under_test.folder.has(1)


def test_in_the_foreground_a_checkpoint_counts_when_it_is_settled(tmp_path: Path) -> None:
    under_test = saver(tmp_path, Role(), background=False)
    under_test.save(at(1))
    under_test.poll()
    assert under_test.folder.latest().found is None
    under_test.settle()
    assert tracked(tmp_path) == "1"
    under_test.settle()


def test_one_save_is_under_way_at_most_and_the_last_is_waited_for(tmp_path: Path) -> None:
    role = Role()
    role.is_slow = True
    under_test = saver(tmp_path, role)
    under_test.save(at(1))
    under_test.save(at(2))
    assert tracked(tmp_path) == "1"
    under_test.finish()
    under_test.finish()
    assert tracked(tmp_path) == "2"


@pytest.mark.parametrize("background", [True, False])
def test_a_full_disk_names_step_and_rank_and_leaves_the_older_one(
    tmp_path: Path, background: bool
) -> None:
    role = Role()
    under_test = saver(tmp_path, role, background, keep=1)
    under_test.save(at(1))
    under_test.finish()
    role.is_full = True
    with pytest.raises(WorkerError, match=r"checkpoint of step 2 .* GiB were free.*_1: rank 3 on"):
        under_test.save(at(2))
        under_test.poll()
    assert tracked(tmp_path) == "1"
    assert under_test.folder.latest().found.step == 1
    assert not list(tmp_path.glob("*.tmp-*")), "the half one gives its space back"
    role.is_full = False
    under_test.save(at(3))
    under_test.finish()
    assert under_test.folder.steps() == [3]


def test_a_disk_that_fills_at_the_commit_is_said_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_test = saver(tmp_path, Role(), keep=1)
    under_test.save(at(1))
    under_test.finish()
    under_test.save(at(2))

    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match=r"checkpoint of step 2 .*No space left") as caught:
            under_test.finish()
    assert caught.value.errno == errno.ENOSPC
    assert under_test.folder.latest().found.step == 1


def test_the_best_one_is_kept_and_linked(tmp_path: Path) -> None:
    under_test = saver(tmp_path, Role(), background=False, keep=1, best="val-core/a")
    for step, best in ((1, 1), (2, 1), (3, 1)):
        under_test.save(at(step, best))
        under_test.settle()
    assert under_test.folder.steps() == [1, 3]
    assert (tmp_path / BEST).resolve().name == "global_step_1"
    under_test.save(at(4, 4))
    under_test.settle()
    assert under_test.folder.steps() == [4]
    assert (tmp_path / BEST).resolve().name == "global_step_4"
    restarted = saver(tmp_path, Role(), background=False, keep=2, best="val-core/a")
    for step in (5, 6, 7):
        restarted.save(at(step, 4))
        restarted.settle()
    assert restarted.folder.steps() == [4, 6, 7]
    restarted.folder.set_aside(after=6)
    assert (tmp_path / BEST).exists()
    restarted.folder.set_aside(after=-1)
    assert not (tmp_path / BEST).is_symlink()


def test_without_a_metric_nothing_is_best(tmp_path: Path) -> None:
    under_test = saver(tmp_path, Role(), background=False, keep=1)
    for step in (1, 2):
        under_test.save(at(step, 1))
    under_test.finish()
    assert under_test.folder.steps() == [2]
    assert not (tmp_path / BEST).exists()


def test_the_best_metric_is_the_one_named() -> None:
    metrics = {"val-core/a/acc/mean@1": 0.1, "val-core/b/acc/mean@1": 0.7}
    assert best_value(metrics, None) == 0.1
    assert best_value(metrics, "val-core/b/acc/mean@1") == 0.7
    with pytest.raises(ValueError, match=r"'acc', validation gives val-core/a.*, val-core/b"):
        best_value(metrics, "acc")
