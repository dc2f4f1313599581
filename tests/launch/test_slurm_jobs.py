"""Both Slurm scripts, on two hosts of two ranks: network namespaces, a small srun, no scontrol."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

from tests.runs import END_LIMIT_S, ROOT, Command, Inputs, overrides, steps_of

pytestmark = [pytest.mark.multiprocess, pytest.mark.slow, pytest.mark.timeout(900)]

UNSHARE = (
    "unshare", "--user", "--map-root-user", "--net", "--mount", "--pid", "--fork", "--mount-proc",
    "--kill-child",
)  # fmt: skip
CLUSTER = ROOT / "tests/launch/cluster.sh"
SCRIPTS = ("slurm_torchrun", "slurm_ray")
JOB_LIMIT_S = 600.0
ENVIRONMENT = {"NPROC_PER_NODE": "2", "RAY_WAIT_S": "120"}
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
        folder.mkdir(exist_ok=True)
        super().__init__(
            [
                *UNSHARE, "bash", str(CLUSTER), str(folder), "2",
                str(ROOT / f"launch/{script}.sbatch"), str(inputs.config),
                *overrides(self.run, "trainer.device=cpu", *changes),
            ],
            folder,
            {**ENVIRONMENT, "PYTHON": str(ROOT / ".venv/bin/python")},
        )  # fmt: skip

    def processes_of(self, host: int) -> list[psutil.Process]:
        """List what runs on a host: the processes in its network namespace."""
        spaces: dict[str, list[psutil.Process]] = {}
        ours = {p.pid for p in self.tree()}
        for process in self.tree():
            try:
                space = os.readlink(f"/proc/{process.pid}/ns/net")
            except OSError:
                continue
            spaces.setdefault(space, []).append(process)
        assert ours
        keeper = [p for group in spaces.values() for p in group if p.cmdline()[:1] == ["sleep"]]
        keeper = [p for p in keeper if "infinity" in p.cmdline()]
        keeper.sort(key=lambda process: process.pid)
        return spaces[os.readlink(f"/proc/{keeper[host].pid}/ns/net")]

    def fail_host(self, host: int) -> None:
        """Let a host die: all of its processes at once."""
        for process in self.processes_of(host):
            process.kill()


@pytest.mark.parametrize("script", SCRIPTS)
@needs_namespaces
def test_a_job_of_two_hosts_runs_to_its_end(script: str, inputs: Inputs, tmp_path: Path) -> None:
    with Cluster(script, inputs, tmp_path, "trainer.total_training_steps=2") as job:
        assert job.wait(JOB_LIMIT_S) == 0, job.stderr
        assert not job.survivors()
    assert sorted(steps_of(job.run)) == [0, 1, 2]
    ranks = (job.run / "ranks.json").read_text()
    assert ranks.count('"node01"') == ranks.count('"node02"') == 2
    assert (job.run / "global_step_2/COMPLETE").exists()


@pytest.mark.parametrize("script", SCRIPTS)
@needs_namespaces
def test_a_killed_host_ends_the_job_on_the_other(
    script: str, inputs: Inputs, tmp_path: Path
) -> None:
    with Cluster(script, inputs, tmp_path, "trainer.total_epochs=50") as job:
        job.wait_for_step(job.run, 1)
        assert len(job.processes_of(1)) > 2
        job.fail_host(1)
        since = time.monotonic()
        assert job.wait(END_LIMIT_S) != 0, job.stderr
        assert time.monotonic() - since < END_LIMIT_S
        assert not job.survivors()


@pytest.mark.parametrize("script", SCRIPTS)
@needs_namespaces
def test_the_time_limit_leaves_a_checkpoint_and_the_job_is_queued_again(
    script: str, inputs: Inputs, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/scontrol").write_text(SCONTROL)
    (tmp_path / "bin/scontrol").chmod(0o755)
    changes = ("trainer.total_epochs=50", "trainer.save_freq=-1")
    with Cluster(script, inputs, tmp_path, *changes) as job:
        job.wait_for_step(job.run, 1)
        batch = [p for p in job.tree() if any(script in part for part in p.cmdline())]
        batch = [
            p for p in batch if p.cmdline()[0] == "bash" and "cluster.sh" not in p.cmdline()[1]
        ]
        batch[0].send_signal(signal.SIGUSR1)
        assert job.wait(120) == 0, job.stderr
        assert not job.survivors()
    last = max(steps_of(job.run))
    assert (job.run / f"global_step_{last}/COMPLETE").exists()
    assert (tmp_path / "scontrol").read_text() == "requeue 4711\n"
