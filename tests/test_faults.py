"""A fault anywhere ends the whole job soon, says its first cause last, and leaves no process."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from benchmarks.faults import kills, rewards
from tests.faults.jobs import (
    PLANTER,
    STRIKE_LIMIT_S,
    Fault,
    FaultyJob,
    start,
    write_inputs,
)
from tests.runs import (
    END_LIMIT_S,
    START_LIMIT_S,
    Command,
    Inputs,
    overrides,
    rollouts_of,
    steps_of,
)
from tests.test_launchers import LAUNCHERS

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]

ENDLESS = (
    "trainer.total_epochs=10000",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "reward.timeout_s=0.2",
)
# the job of tests/faults/jobs.py, which has fewer parts
MATRIX = (
    Fault("kill", "rollout", 1, 2),
    Fault("stop", "update", 0, 3),
    Fault("raise", "save", 1, 4),
    Fault("hang", "validation", 1, 5),
    Fault("oom", "log_prob", 0, 6),
    Fault("term", "reshard", 1, 7),
    Fault("kill", "idle", 0, 8),
)


class Job:
    """A job that would go on for ever, with a fault to come as tests/faults says."""

    def __init__(
        self, launcher: str, inputs: Inputs, folder: Path, fault: str = "", *changes: str
    ) -> None:
        self.run = folder / "run"
        self._marks = folder / "marks"
        self._marks.mkdir(parents=True)
        arguments, more = LAUNCHERS[launcher]
        settings = overrides(self.run, *ENDLESS, *more, *changes)
        environment = {"PYTHONPATH": PLANTER, "MRL_TEST_FAULT_MARKS": str(self._marks)}
        environment |= {"MRL_TEST_FAULTS": fault} if fault else {}
        command = [*arguments, "train", str(inputs.config), *settings]
        self.command = Command(command, folder, environment)

    def wait_for_step(self, step: int) -> None:
        """Wait until a step is done, and take note of the processes."""
        self.command.wait_for_step(self.run, step)
        self.command.tree()

    def wait_for_fault(self) -> float:
        """Wait until the planted fault strikes; gives the moment."""
        deadline = time.monotonic() + START_LIMIT_S
        mark = self._marks / "0"
        while not (mark.exists() and mark.read_text()):
            assert self.command.process.poll() is None, self.command.stderr
            assert time.monotonic() < deadline, self.command.stderr
            self.command.tree()
            time.sleep(0.1)
        return float(mark.read_text())

    def end(self, since: float) -> int:
        """Wait for the end of the job that met its fault; gives the exit status."""
        status = self.command.wait(END_LIMIT_S)
        assert time.monotonic() - since < END_LIMIT_S
        assert self.command.survivors() == []
        return status

    @property
    def last_words(self) -> str:
        """The end of what a person sees."""
        return "\n".join(self.command.stderr.rstrip().splitlines()[-15:])

    @property
    def last_line(self) -> str:
        """The last line that a person sees."""
        return self.command.stderr.rstrip().splitlines()[-1]

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *error: Any) -> None:
        self.command.__exit__(*error)


def interrupt(job: Job) -> float:
    """Press Ctrl-C; gives the moment."""
    job.command.interrupt()
    return time.monotonic()


def kill_rank_1(job: Job) -> float:
    """Kill a rank as the kernel does when memory runs out; gives the moment."""
    job.command.rank(1).send_signal(signal.SIGKILL)
    return time.monotonic()


def assert_raised(job: Job, launcher: str) -> None:
    assert "the planted fault" in job.last_words
    cause = r"in step 2 \(update_actor\), rank 1 on .* failed in actor\.update: RuntimeError: the p"
    assert re.search(cause, job.command.stderr)
    if launcher != "torchrun":  # which has the last word on its own jobs
        assert re.match("mrl train: " + cause, job.last_line)


def assert_killed(job: Job, launcher: str) -> None:
    assert re.search(r"rank\s*:?\s*1\b", job.last_words)
    assert "SIGKILL" in job.last_words or launcher == "ray"
    if launcher == "torchrun":  # which ends the controller's process too
        cause = r"in step \d+ \(\w+\), rank 1 .* ended"  # between two calls it is during none
        assert re.search(cause, job.command.stderr)


RAISE = "raise:update:1:2"  # in step 1 the critic alone is trained


def test_a_killed_rank_ends_its_job_under_either_launcher(
    inputs: Inputs, spawned_run: Path, tmp_path: Path
) -> None:
    with (
        Job("spawned", inputs, tmp_path / "spawned") as spawned,
        Job("torchrun", inputs, tmp_path / "torchrun") as torchrun,
    ):
        spawned.wait_for_step(1)
        torchrun.wait_for_step(1)  # two jobs of one host do not meet each other
        # torchrun starts as the other launchers do
        runs = (spawned_run, spawned.run, torchrun.run)
        answers = [[row["output"] for row in rollouts_of(run, 1)] for run in runs]
        assert answers[0] == answers[1] == answers[2]
        assert spawned.end(kill_rank_1(spawned)) == 1
        assert re.search(r"in step \d+ \(\w+\), rank 1 .*killed by SIGKILL", spawned.last_line)
        assert torchrun.end(kill_rank_1(torchrun)) != 0
        assert_killed(torchrun, "torchrun")


# The fast siblings are in test_interrupts.py and workers/test_spmd.py.
@pytest.mark.slow
def test_ctrl_c_ends_a_job_and_a_rank_that_raises_another_beside_it(
    inputs: Inputs, tmp_path: Path
) -> None:
    with (
        Job("spawned", inputs, tmp_path / "raising", RAISE) as raising,
        Job("spawned", inputs, tmp_path / "stopped") as stopped,
    ):
        assert raising.end(raising.wait_for_fault()) == 1
        assert_raised(raising, "spawned")
        stopped.wait_for_step(1)
        assert stopped.end(interrupt(stopped)) == 130
        assert stopped.last_line == "mrl train: interrupted"


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("launcher", ["spawned", "torchrun", "ray"])
def test_any_fault_in_any_phase_ends_a_try_in_time_and_the_next_goes_on(
    launcher: str, policy: Path, tmp_path: Path
) -> None:
    """Benchmarks/faults.py plants all kinds in all phases."""
    config = write_inputs(tmp_path, policy)
    steps = max(fault.step for fault in MATRIX) + 1
    with (
        start("spawned", config, tmp_path / "whole" / "run", steps) as whole,
        FaultyJob(launcher, config, tmp_path / "faulty", MATRIX, steps) as job,
    ):
        endings = [job.meet(index) for index in range(len(MATRIX))]
        assert job.finish() == []
        assert whole.wait(STRIKE_LIMIT_S) == 0
    assert [ending for ending in endings if not ending.as_wanted] == []
    assert steps_of(job.run) == steps_of(tmp_path / "whole" / "run")


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("launcher", ["spawned", "torchrun", "ray"])
def test_a_scoring_process_that_fails_costs_a_sample_and_the_job_goes_on(
    launcher: str, policy: Path, tmp_path: Path
) -> None:
    """Benchmarks/faults.py plants all kinds; which step they meet is not to be chosen."""
    config = write_inputs(tmp_path, policy)
    with start("spawned", config, tmp_path / "whole" / "run", 12) as whole:
        assert whole.wait(STRIKE_LIMIT_S) == 0
    result = rewards(launcher, ["kill", "raise"], config, tmp_path)
    assert (result["problem"], result["left_at_the_end"]) == ("", [])
    assert (result["ended_as_wanted"], result["unscored"]) == (2, 2)
    assert result["steps"]["found"] == 12


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_killed_at_random_moments_gives_the_numbers_of_an_uninterrupted_one(
    policy: Path, tmp_path: Path
) -> None:
    """Benchmarks/faults.py kills it twenty times."""
    config = write_inputs(tmp_path, policy)
    with start("spawned", config, tmp_path / "whole" / "run", 12) as whole:
        result = kills(2, "spawned", config, tmp_path, seed=1)
        assert whole.wait(STRIKE_LIMIT_S) == 0
    assert (result["problem"], result["steps_lost_beyond_a_checkpoint"]) == ("", 0)
    assert steps_of(tmp_path / "killed" / "run") == steps_of(tmp_path / "whole" / "run")


@pytest.mark.slow
def test_a_raising_rank_ends_torchrun_with_its_cause(inputs: Inputs, tmp_path: Path) -> None:
    with Job("torchrun", inputs, tmp_path, RAISE) as job:
        assert job.end(job.wait_for_fault()) != 0
        assert_raised(job, "torchrun")


@pytest.mark.slow
def test_ctrl_c_ends_torchrun(inputs: Inputs, tmp_path: Path) -> None:
    with Job("torchrun", inputs, tmp_path) as job:
        job.wait_for_step(1)
        assert job.end(interrupt(job)) != 0


@pytest.mark.slow
def test_a_killed_rank_ends_a_ray_job(inputs: Inputs, tmp_path: Path) -> None:
    with Job("ray", inputs, tmp_path) as job:
        job.wait_for_step(1)
        assert job.end(kill_rank_1(job)) == 1
        assert_killed(job, "ray")


@pytest.mark.slow
def test_a_raising_rank_ends_a_ray_job(inputs: Inputs, tmp_path: Path) -> None:
    with Job("ray", inputs, tmp_path, RAISE) as job:
        assert job.end(job.wait_for_fault()) == 1
        assert_raised(job, "ray")


@pytest.mark.slow
def test_ctrl_c_ends_a_ray_job(inputs: Inputs, tmp_path: Path) -> None:
    with Job("ray", inputs, tmp_path) as job:
        job.wait_for_step(1)
        assert job.end(interrupt(job)) == 130
        assert job.last_line == "mrl train: interrupted"


@pytest.mark.slow
def test_ranks_end_with_a_killed_controller(inputs: Inputs, tmp_path: Path) -> None:
    with Job("spawned", inputs, tmp_path) as job:
        job.wait_for_step(1)
        assert len(job.command.tree()) >= 2
        job.command.process.kill()
        job.command.process.wait()
        assert job.command.survivors() == []


@pytest.mark.slow
def test_ctrl_c_while_ranks_start(inputs: Inputs, tmp_path: Path) -> None:
    with Job("spawned", inputs, tmp_path) as job:
        while len(job.command.tree()) < 2:
            assert job.command.process.poll() is None, job.command.stderr
            time.sleep(0.1)
        assert job.end(interrupt(job)) == 130
        assert job.last_line == "mrl train: interrupted"
