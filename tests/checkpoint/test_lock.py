from __future__ import annotations

import errno
import fcntl
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from mrl.checkpoint.lock import FolderInUseError, folder_lock

HOLD = """
import sys, time
from pathlib import Path
from mrl.checkpoint.lock import folder_lock
with folder_lock(Path(sys.argv[1])):
    if len(sys.argv) > 2:  # a child that outlives it
        import os
        if os.fork() == 0:
            time.sleep(60)
            os._exit(0)
    print("held", os.getpid() if len(sys.argv) > 2 else "", flush=True)
    time.sleep(60)
"""


def holder(folder: Path, *more: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), *more],
        stdout=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stdout.readline().startswith("held")
    return process


def test_a_second_job_is_told_who_holds_the_folder(tmp_path: Path) -> None:
    process = holder(tmp_path)
    with (
        pytest.raises(FolderInUseError, match=rf"in use by process {process.pid} on .* since 20"),
        folder_lock(tmp_path),
    ):
        pass
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def test_a_dead_job_holds_nothing_even_if_a_child_of_it_lives(tmp_path: Path) -> None:
    process = holder(tmp_path, "fork")
    process.kill()
    process.wait()
    with folder_lock(tmp_path):
        pass
    os.killpg(process.pid, signal.SIGKILL)


def test_a_disk_without_locks_is_warned_about(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*args: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", no_locks)
    with pytest.warns(UserWarning, match="knows no locks"), folder_lock(tmp_path):
        pass


def test_the_folder_is_free_after_the_block(tmp_path: Path) -> None:
    for _ in range(2):
        with folder_lock(tmp_path / "run"):
            assert f"process {os.getpid()}" in (tmp_path / "run" / ".lock").read_text()
    assert (tmp_path / "run" / ".lock").read_text() == ""
