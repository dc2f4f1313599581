"""Which checkpoints outlive the others: the newest, and the best there has been."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from pathlib import Path

import pytest

from mrl.checkpoint.folder import CheckpointFolder
from mrl.checkpoint.state import TrainerState, best_value

START = TrainerState(0, 0, 42, {"epoch": 0}, 0.1)


def save(folder: CheckpointFolder, step: int, best: int | None) -> None:
    (folder.begin(step) / "actor.pt").write_text("weights")
    folder.commit(step, best=best)


@pytest.mark.parametrize("keep", [1, 2, 3])
@pytest.mark.parametrize("seed", range(4))
def test_the_best_and_the_newest_stay_whatever_the_order(
    tmp_path: Path, keep: int, seed: int
) -> None:
    """Validation comes at other steps than saving, and every restart forgets all but the files."""
    rng, state, validated = random.Random(seed), START, 3 + seed
    for step in range(1, 40):
        state = dataclasses.replace(state, global_step=step)
        if step % validated == 0:
            state = state.with_validation(rng.random())
        if step % 2 == 0:
            folder = CheckpointFolder(tmp_path, keep=keep)
            had = set(folder.steps())
            save(folder, step, state.best_step)
            left = folder.steps()
            assert step in left and len(left) <= keep + 1
            if state.best_step in had:
                assert state.best_step in left
            newest = sorted({*had, step} - {state.best_step})[-1:]
            assert set(newest) <= set(left) or step == state.best_step


def test_a_worse_result_after_a_resume_changes_nothing(tmp_path: Path) -> None:
    best = dataclasses.replace(START, global_step=60).with_validation(0.8)
    best.save(tmp_path)
    resumed = dataclasses.replace(TrainerState.load(tmp_path), global_step=70).with_validation(0.6)
    assert (resumed.best_metric, resumed.best_step) == (0.8, 60)


def test_a_count_of_unscored_samples_is_no_result() -> None:
    with contextlib.suppress(ValueError, StopIteration):
        assert best_value({"val-aux/sums/unscored": 5.0}, None) is None


def test_the_best_of_a_run_that_no_longer_asks_for_it_stays(tmp_path: Path) -> None:
    for step, best in ((1, 1), (2, 1), (3, None), (4, None)):
        save(CheckpointFolder(tmp_path, keep=1), step, best)
    assert CheckpointFolder(tmp_path, keep=1).steps() == [1, 4]
    assert (tmp_path / "best").resolve() == tmp_path / "global_step_1"


def test_results_of_another_metric_do_not_compare() -> None:
    state = dataclasses.replace(START, global_step=1).with_validation(0.9, "val-core/a")
    state = dataclasses.replace(state, global_step=2).with_validation(0.3, "val-core/b")
    assert (state.best_metric, state.best_step) == (0.3, 2)
    assert dataclasses.replace(state, global_step=3).with_validation(0.2, "val-core/b") == (
        dataclasses.replace(state, global_step=3)
    )
