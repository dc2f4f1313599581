"""Both Slurm scripts, on two hosts of two ranks: network namespaces, a small srun, no scontrol."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.runs import END_LIMIT_S, ROOT, START_LIMIT_S, Command, Inputs, overrides, steps_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(1500)]

UNSHARE = (
    "unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--mount-proc",
    "--kill-child",
)  # fmt: skip
CLUSTER = ROOT / "tests/launch/cluster.sh"
SCRIPTS = ("slurm_torchrun", "slurm_ray")
JOB_LIMIT_S = 600.0
ENVIRONMENT = {"NPROC_PER_NODE": "2", "RAY_WAIT_S": "240"}
SCONTROL = '#!/usr/bin/env bash\necho "$@" >>"$CLUSTER/scontrol"\n'


def can_make_hosts() -> bool:
    probe = [*UNSHARE, "ip", "link", "add", "bridge", "type", "bridge"]
    try:
        return subprocess.run(probe, capture_output=True, check=False).returncode == 0
    except FileNotFoundError:
        return False


needs_namespaces = pytest.mark.skipif(
    not can_make_hosts(), reason="this user may not make network namespaces (unshare, ip)"
)


class Cluster(Command):
    """A batch job on two hosts."""

    def __init__(self, script: str, inputs: Inputs, folder: Path, *changes: str) -> None:
        """Submit it."""
        self.folder, self.run = folder, folder / "run"
        self.script = str(ROOT / f"launch/{script}.sbatch")
        folder.mkdir(exist_ok=True)
        super().__init__(
            [
                *UNSHARE, "bash", str(CLUSTER), str(folder), "2", self.script, str(inputs.config),
                *overrides(self.run, "trainer.device=cpu", *changes),
            ],
            folder,
            {**ENVIRONMENT, "PYTHON": str(ROOT / ".venv/bin/python")},
        )  # fmt: skip

    @property
    def last_line(self) -> str:
        """What stands last on its standard error."""
        return self.stderr.rstrip().splitlines()[-1]

    def processes_of(self, host: int) -> list[psutil.Process]:
        """List what runs on a host: the processes in its network namespace."""
        space = (self.folder / "nodes").read_text().splitlines()[host].split()[2]
        return [process for process in self.tree() if _network(process) == space]

    def fail_host(self, host: int) -> None:
        """Let a host die: all of its processes."""
        deadline = time.monotonic() + 5.0
        while processes := self.processes_of(host):
            assert time.monotonic() < deadline, processes
            for process in processes:
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()

    def signal_batch(self, number: signal.Signals) -> None:
        """Signal the batch script alone, as Slurm's --signal=B: does."""
        shells = [p for p in self.tree() if _arguments(p)[:2] == ["bash", self.script]]
        shells[0].send_signal(number)  # the others are its own children


def _network(process: psutil.Process) -> str:
    try:
        return os.readlink(f"/proc/{process.pid}/ns/net")
    except OSError:
        return "gone"


def _arguments(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:
        return []


@pytest.mark.parametrize("script", SCRIPTS)
@needs_namespaces
def test_a_job_of_two_hosts_runs_to_its_end(script: str, inputs: Inputs, tmp_path: Path) -> None:
    with Cluster(script, inputs, tmp_path, "trainer.total_training_steps=2") as job:
        assert job.wait(JOB_LIMIT_S) == 0, job.stderr
        assert not job.survivors()
    assert sorted(steps_of(job.run)) == [0, 1, 2]
    hosts = [rank["host"] for rank in json.loads((job.run / "ranks.json").read_text())]
    # neighbours share a host, whatever order the launcher gives the hosts
    assert hosts in (["node01"] * 2 + ["node02"] * 2, ["node02"] * 2 + ["node01"] * 2)
    for rank, host in enumerate(hosts):
        assert f"rank {rank} on {host}: cpu, OMP_NUM_THREADS=1" in job.out_file.read_text()
    assert (job.run / "global_step_2/COMPLETE").exists()


@pytest.mark.parametrize("script", SCRIPTS)
@needs_namespaces
def test_a_killed_host_ends_the_job_on_the_other_and_is_named_last(
    script: str, inputs: Inputs, tmp_path: Path, record_property: pytest.RecordProperty
) -> None:
    with Cluster(script, inputs, tmp_path, "trainer.total_epochs=50") as job:
        job.wait_for_step(job.run, 1)
        assert len(job.processes_of(1)) > 2
        job.fail_host(1)
        since = time.monotonic()
        assert job.wait(END_LIMIT_S) != 0, job.stderr
        record_property("seconds", round(time.monotonic() - since, 1))
        assert not job.survivors()
    assert job.last_line.startswith("[launch]") and "node02" in job.last_line
    assert "kill" in job.last_line.lower()


@pytest.mark.parametrize(
    ("script", "number"),
    [("slurm_torchrun", signal.SIGUSR1), ("slurm_ray", signal.SIGTERM)],
)
@needs_namespaces
def test_near_the_time_limit_a_job_saves_and_is_queued_again_and_then_finishes(
    script: str,
    number: signal.Signals,
    inputs: Inputs,
    tmp_path: Path,
    record_property: pytest.RecordProperty,
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text(SCONTROL)
    (tmp_path / "bin/scontrol").chmod(0o755)
    requeues, steps = tmp_path / "scontrol", 10
    changes = (f"trainer.total_training_steps={steps}", "trainer.save_freq=-1")
    with Cluster(script, inputs, tmp_path, *changes) as job:
        job.wait_for_step(job.run, 1)
        since = time.monotonic()
        job.signal_batch(number)
        assert job.wait(START_LIMIT_S) == 0, job.stderr
        record_property("seconds", round(time.monotonic() - since, 1))
        assert not job.survivors()
    last = max(steps_of(job.run))
    assert (job.run / f"global_step_{last}/COMPLETE").exists()
    assert requeues.read_text() == "requeue 4711\n"
    assert 1 <= last < steps
    with Cluster(script, inputs, tmp_path, *changes) as job:  # as Slurm starts it again
        assert job.wait(JOB_LIMIT_S) == 0, job.stderr
        assert not job.survivors()
        assert f"resuming from {job.run}/global_step_{last}" in job.out_file.read_text()
    assert sorted(steps_of(job.run)) == list(range(steps + 1))
    assert (job.run / f"global_step_{steps}/COMPLETE").exists()
    assert requeues.read_text() == "requeue 4711\n"
