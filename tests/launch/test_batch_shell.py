"""What both Slurm scripts share, with shells in place of srun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 60.0
# A run that is deaf at first, then leaves with a status when it is asked to.
RUN = """
trap '' USR1
touch {folder}/started
until [[ -e {folder}/listen ]]; do read -rt 0.1 <> <(:) || true; done
trap 'exit {status}' USR1
touch {folder}/listening
while :; do read -rt 0.1 <> <(:) || true; done
"""
BATCH = """
set -euo pipefail
source launch/slurm.sh
echo "$MASTER_PORT" >{folder}/port
bash {folder}/run.sh &
run_pid=$!
bash -c 'exec -a node01 sleep 600' & rays=($!)
bash -c 'exec -a node02 sleep 600' & rays+=($!)
printf '%s\\n' "$run_pid" "${{rays[@]}}" >{folder}/pids.part
mv {folder}/pids.part {folder}/pids
trap 'kill $(jobs -p) 2>/dev/null || true' EXIT
finish "$run_pid" "${{rays[@]}}"
"""


class Batch:
    """A batch script with a run and a step on each of two nodes."""

    def __init__(self, folder: Path, status: int = 0, given: dict[str, str] | None = None) -> None:
        """Start it; its run leaves with `status`."""
        self.folder = folder
        (folder / "run.sh").write_text(RUN.format(folder=folder, status=status))
        (folder / "scontrol").write_text(f'#!/bin/sh\necho "$@" >>{folder}/requeued\n')
        (folder / "scontrol").chmod(0o755)
        slurm = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NODELIST": "node[01-02]"}
        path = f"{folder}:{os.environ['PATH']}"
        address = {"PYTHON": sys.executable, "MASTER_ADDR": "127.0.0.1", "PATH": path}
        self.process = subprocess.Popen(
            ["bash", "-c", BATCH.format(folder=folder)],
            cwd=ROOT,
            env={**os.environ, **slurm, **address, **(given or {})},
            stdin=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.wait_for("started")

    def wait_for(self, name: str) -> Path:
        """Wait until a file is there."""
        deadline = time.monotonic() + LIMIT_S
        while not (self.folder / name).exists():
            assert time.monotonic() < deadline and self.process.poll() is None, name
            time.sleep(0.02)
        return self.folder / name

    def end(self) -> tuple[int, str]:
        """Give its status and what stood last on its standard error."""
        _, text = self.process.communicate(timeout=LIMIT_S)
        return self.process.returncode, text.rstrip().splitlines()[-1]

    @property
    def requeued(self) -> str:
        """What scontrol was asked for."""
        file = self.folder / "requeued"
        return file.read_text() if file.exists() else ""


def test_a_run_that_starts_late_still_hears_that_the_time_is_up(tmp_path: Path) -> None:
    batch = Batch(tmp_path)
    batch.process.send_signal(signal.SIGUSR1)
    (tmp_path / "listen").touch()
    status, last = batch.end()
    assert (status, batch.requeued) == (0, "requeue 4711\n")
    assert last.startswith("[launch] job 4711 is queued again")


def test_a_run_that_fails_while_it_stops_is_not_queued_again(tmp_path: Path) -> None:
    batch = Batch(tmp_path, status=3)
    (tmp_path / "listen").touch()
    batch.wait_for("listening")
    batch.process.send_signal(signal.SIGUSR1)
    assert batch.end()[0] == 3
    assert batch.requeued == ""


@pytest.mark.parametrize("first", ["run", "node"])
def test_a_node_that_leaves_ends_the_job_and_is_named_last(first: str, tmp_path: Path) -> None:
    batch = Batch(tmp_path)
    run, _, node02 = map(int, batch.wait_for("pids").read_text().split())
    for pid in (run, node02) if first == "run" else (node02, run):  # either may be seen first
        os.kill(pid, signal.SIGKILL)
    status, last = batch.end()
    assert status != 0
    assert last == "[launch] node02 left the job: its step ended by SIGKILL"
    assert batch.requeued == ""


def test_each_job_has_a_port_of_its_own_unless_the_user_names_one(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in "abc"]
    for folder in folders:
        folder.mkdir()
    batches = [
        Batch(folder, given={"MASTER_PORT": port} if port else None)
        for folder, port in zip(folders, ("", "", "29511"), strict=True)
    ]
    ports = [int(batch.wait_for("port").read_text()) for batch in batches]
    for batch in batches:
        (batch.folder / "listen").touch()
        batch.wait_for("listening")
        batch.process.send_signal(signal.SIGTERM)
    assert [batch.end()[0] for batch in batches] == [0, 0, 0]
    assert ports[2] == 29511 and len(set(ports)) == 3


def test_a_run_of_a_job_array_has_its_line_of_the_sweep(tmp_path: Path) -> None:
    sweep = tmp_path / "rates.txt"
    sweep.write_text("actor.optim.lr=1e-6\nactor.optim.lr=3e-6 'data.prompt_key=a b'\n")
    given = {
        **{key: value for key, value in os.environ.items() if not key.startswith("SLURM_")},
        "PYTHON": sys.executable, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500",
        "SLURM_JOB_NODELIST": "node01", "MRL_SWEEP": str(sweep),
    }  # fmt: skip
    script = "set -euo pipefail; source launch/slurm.sh; printf '%s\\0' \"${run[@]}\""

    def source(**task: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", script],
            cwd=ROOT,
            env={**given, **task},
            capture_output=True,
            text=True,
            check=False,
        )

    words = source(SLURM_ARRAY_TASK_ID="1").stdout.split("\0")[:-1]
    name = "trainer.experiment_name=rates-1"
    assert words == ["actor.optim.lr=3e-6", "data.prompt_key=a b", name]
    outside = source(SLURM_ARRAY_TASK_ID="2")
    assert outside.returncode != 0 and "submit --array=0-1" in outside.stderr
    alone = source()
    assert alone.returncode != 0 and "submit with --array" in alone.stderr
