from __future__ import annotations

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from mrl.checkpoint.folder import MARKER, TRACKER, CheckpointFolder, why_incomplete


def save(folder: CheckpointFolder, step: int, content: str = "weights") -> Path:
    draft = folder.begin(step)
    (draft / "actor").mkdir()
    (draft / "actor" / "rank_0.pt").write_text(f"{content} {step}")
    return folder.commit(step)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_a_committed_checkpoint_is_found_and_lists_its_files(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    path = save(folder, 5)
    assert names(tmp_path) == ["global_step_5", TRACKER]
    assert (tmp_path / TRACKER).read_text().strip() == "5"
    assert json.loads((path / MARKER).read_text()) == {"step": 5, "files": {"actor/rank_0.pt": 9}}
    latest = CheckpointFolder(tmp_path).latest()
    assert (latest.found.step, latest.found.path, latest.skipped) == (5, path, ())


def test_nothing_counts_before_commit(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    (folder.begin(2) / "actor.pt").write_text("half")
    assert folder.latest().found.step == 1
    assert not folder.has(2)


def test_newest_is_by_number_not_by_spelling(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    for step in (9, 100, 10):
        save(folder, step)
    assert folder.steps() == [9, 10, 100]
    assert folder.latest().found.step == 100


def test_a_truncated_file_is_skipped_and_named(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 9)
    os.truncate(save(folder, 10) / "actor" / "rank_0.pt", 3)
    latest = folder.latest()
    assert latest.found.step == 9
    assert latest.skipped[0].path.name == "global_step_10"
    assert latest.skipped[0].reason == "actor/rank_0.pt has 3 bytes, 10 were saved"


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda path: (path / MARKER).unlink(), "no COMPLETE marker"),
        (lambda path: (path / MARKER).write_text("{"), "marker is unreadable"),
        (lambda path: (path / MARKER).write_text("[]"), "marker is unreadable"),
        (lambda path: (path / "actor" / "rank_0.pt").unlink(), "actor/rank_0.pt is missing"),
        (shutil.rmtree, "no such folder"),
    ],
)
def test_every_damage_is_said(tmp_path: Path, damage, reason: str):
    path = save(CheckpointFolder(tmp_path), 1)
    assert why_incomplete(path) is None
    damage(path)
    assert reason in why_incomplete(path)


def test_a_deleted_tracker_is_not_missed(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 3)
    (tmp_path / TRACKER).unlink()
    assert folder.resume_point("auto", None).found.step == 3


@pytest.mark.parametrize("text", ["7", "seven"])
def test_a_tracker_that_lies_is_reported(tmp_path: Path, text: str):
    folder = CheckpointFolder(tmp_path)
    save(folder, 3)
    (tmp_path / TRACKER).write_text(text)
    latest = folder.latest()
    assert latest.found.step == 3
    assert len(latest.skipped) == 1


def test_a_kill_during_the_save_leaves_the_older_checkpoint(tmp_path: Path):
    save(CheckpointFolder(tmp_path), 1)
    script = """
        import os, signal, sys
        from mrl.checkpoint.folder import CheckpointFolder
        draft = CheckpointFolder(sys.argv[1], keep=1).begin(2)
        (draft / "actor.pt").write_text("half")
        os.kill(os.getpid(), signal.SIGKILL)
    """
    killed = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=False
    )
    assert killed.returncode == -signal.SIGKILL
    folder = CheckpointFolder(tmp_path, keep=1)
    assert folder.resume_point("auto", None).found.step == 1
    save(folder, 2)
    assert names(tmp_path) == ["global_step_2", TRACKER]  # the killed draft is cleared too


def test_no_fresh_start_over_damaged_checkpoints_without_being_told(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    (save(folder, 4) / MARKER).unlink()
    with pytest.raises(ValueError, match=r"global_step_4: no COMPLETE.*resume_mode=disable"):
        folder.resume_point("auto", None)
    assert folder.resume_point("disable", None).found is None


def test_a_fresh_folder_starts_at_zero(tmp_path: Path):
    latest = CheckpointFolder(tmp_path / "none").resume_point("auto", None)
    assert (latest.found, latest.skipped) == (None, ())


def test_resume_by_path_checks_that_path(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 1)
    path = save(folder, 2)
    assert folder.resume_point("resume_path", str(tmp_path / "global_step_1")).found.step == 1
    (path / MARKER).unlink()
    with pytest.raises(ValueError, match="no COMPLETE marker"):
        folder.resume_point("resume_path", str(path))
    with pytest.raises(ValueError, match=r"expected .*global_step_<N>"):
        folder.resume_point("resume_path", str(tmp_path))
    with pytest.raises(ValueError, match=r"needs trainer\.resume_from_path"):
        folder.resume_point("resume_path", None)
    with pytest.raises(ValueError, match="'always', expected auto"):
        folder.resume_point("always", None)


def test_setting_aside_keeps_all_and_hides_the_abandoned_future(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    for step in (10, 20, 30):
        save(folder, step, "old")
    moved = folder.set_aside(after=10)
    assert [path.name for path in moved] == ["global_step_20-0", "global_step_30-0"]
    assert (tmp_path / TRACKER).read_text().strip() == "10"
    save(folder, 20, "new")
    assert folder.latest().found.step == 20
    assert (moved[0] / "actor" / "rank_0.pt").read_text() == "old 20"
    assert folder.set_aside(after=-1)[1].name == "global_step_20-1"
    assert folder.latest() == CheckpointFolder(tmp_path / "none").latest()
    assert not (tmp_path / TRACKER).exists()


def test_a_complete_step_is_saved_once_and_never_overwritten(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    save(folder, 237)
    assert folder.has(237)
    with pytest.raises(ValueError, match="already complete and is never overwritten"):
        folder.begin(237)
    assert folder.steps() == [237]


def test_a_damaged_step_is_saved_again_and_the_damaged_one_kept_aside(tmp_path: Path):
    folder = CheckpointFolder(tmp_path)
    (save(folder, 8, "first") / MARKER).unlink()
    save(folder, 8, "second")
    assert folder.has(8)
    kept = tmp_path / "superseded" / "global_step_8-0" / "actor" / "rank_0.pt"
    assert kept.read_text() == "first 8"


def test_keep_n_deletes_the_oldest_by_number(tmp_path: Path):
    folder = CheckpointFolder(tmp_path, keep=2)
    for step in (9, 10, 100):
        save(folder, step)
    assert folder.steps() == [10, 100]


def test_keep_one_holds_after_a_restart(tmp_path: Path):
    save(CheckpointFolder(tmp_path, keep=1), 1)
    save(CheckpointFolder(tmp_path, keep=1), 2)
    assert CheckpointFolder(tmp_path).steps() == [2]


def test_the_old_one_lives_until_the_new_one_is_complete(tmp_path: Path, monkeypatch):
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 1)
    with pytest.raises(ValueError, match="commit of step 2 without begin"):
        folder.commit(2)
    draft = folder.begin(2)
    (draft / "actor.pt").write_text("half")

    def full_disk(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full_disk)
        with pytest.raises(OSError, match="No space left"):
            folder.commit(2)
    assert folder.latest().found.step == 1
    folder.commit(2)  # the same draft, once there is room again
    assert folder.steps() == [2]


def test_a_failing_deletion_warns_and_the_save_stands(tmp_path: Path, monkeypatch):
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 1)

    def stuck(path: Path) -> None:
        raise OSError(errno.EBUSY, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", stuck)
    with pytest.warns(UserWarning, match=r"could not delete .*global_step_1: .*busy"):
        save(folder, 2)
    assert folder.latest().found.step == 2


def test_keep_n_never_deletes_the_checkpoint_just_saved(tmp_path: Path):
    save(CheckpointFolder(tmp_path), 100)
    folder = CheckpointFolder(tmp_path, keep=1)
    save(folder, 50)
    assert folder.steps() == [50, 100]


def test_senseless_keep_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="keep is 0"):
        CheckpointFolder(tmp_path, keep=0)


def test_checkpoints_need_no_torch():
    code = (
        "import sys, mrl.checkpoint.folder, mrl.checkpoint.state; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
