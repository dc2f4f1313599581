"""A fault anywhere ends the whole job soon, says its first cause last, and leaves no process."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

from tests.runs import END_LIMIT_S, ROOT, Command, Inputs, overrides, rollouts_of
from tests.test_launchers import LAUNCHERS

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(900)]

ENDLESS = ("trainer.total_epochs=10000", "trainer.test_freq=-1", "trainer.save_freq=-1")
PLANTER = str(ROOT / "tests" / "faults")


def start(
    launcher: str, inputs: Inputs, folder: Path, fault: str = "", *changes: str
) -> tuple[Command, Path]:
    """Start a job that would go on for ever; a fault is told as tests/faults says."""
    command, more = LAUNCHERS[launcher]
    run = folder / launcher / "run"
    arguments = [*command, "train", str(inputs.config), *overrides(run, *ENDLESS, *more, *changes)]
    environment = {"PYTHONPATH": PLANTER, "MRL_TEST_FAULT": fault} if fault else {}
    return Command(arguments, run.parent, environment), run


def end_of(command: Command, since: float) -> int:
    """Wait for the end of a job that has met its fault; gives the exit status."""
    status = command.wait(END_LIMIT_S)
    assert time.monotonic() - since < END_LIMIT_S
    assert command.survivors() == []
    return status


def last_words(command: Command) -> str:
    """Give the end of what a person sees."""
    return "\n".join(command.stderr.rstrip().splitlines()[-15:])


def last_line(command: Command) -> str:
    return command.stderr.rstrip().splitlines()[-1]


def assert_raised(command: Command, launcher: str) -> None:
    assert "the planted fault" in last_words(command)
    assert re.search(r"rank 1 .*failed in actor\.update", command.stderr)
    if launcher != "torchrun":  # torchrun has the last word on its own jobs
        assert last_line(command) == "RuntimeError: the planted fault"


def assert_killed(command: Command, launcher: str) -> None:
    words = last_words(command)
    assert re.search(r"rank\s*:?\s*1\b", words)
    assert "SIGKILL" in words or launcher == "ray"


def test_a_killed_rank_ends_its_job_and_ctrl_c_another_beside_it(
    inputs: Inputs, tmp_path: Path
) -> None:
    first, first_run = start("spawned", inputs, tmp_path / "first")
    second, second_run = start("spawned", inputs, tmp_path / "second")
    with first, second:
        first.wait_for_step(first_run, 1)
        second.wait_for_step(second_run, 1)  # two jobs of one host do not meet each other
        assert rollouts_of(first_run, 1) == rollouts_of(second_run, 1)
        first.tree()
        second.tree()
        since = time.monotonic()
        first.rank(1).send_signal(signal.SIGKILL)
        assert end_of(first, since) == 1
        assert "rank 1" in last_line(first) and "killed by SIGKILL" in last_line(first)
        since = time.monotonic()
        second.interrupt()
        assert end_of(second, since) == 130
        assert last_line(second) == "mrl train: interrupted"


def test_a_rank_that_raises_ends_its_job_and_a_killed_one_ends_torchrun(
    inputs: Inputs, tmp_path: Path
) -> None:
    raising, raising_run = start("spawned", inputs, tmp_path, "raise:actor.update:1:3")
    killed, killed_run = start("torchrun", inputs, tmp_path)
    with raising, killed:
        raising.wait_for_step(raising_run, 1)
        assert end_of(raising, time.monotonic()) == 1
        assert_raised(raising, "spawned")
        killed.wait_for_step(killed_run, 1)
        killed.tree()
        since = time.monotonic()
        killed.rank(1).send_signal(signal.SIGKILL)
        assert end_of(killed, since) != 0
        assert_killed(killed, "torchrun")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["rollout.generate", "critic.update", "actor.save"])
def test_a_rank_may_be_killed_at_any_point(method: str, inputs: Inputs, tmp_path: Path) -> None:
    fault = f"kill:{method}:0:2"
    command, run = start("spawned", inputs, tmp_path, fault, "trainer.save_freq=1")
    with command:
        command.wait_for_step(run, 0)
        assert command.wait() == 1
        assert command.survivors() == []
        assert "rank 0" in last_line(command) and method in last_line(command)


@pytest.mark.slow
def test_a_raising_rank_ends_torchrun_with_its_cause(inputs: Inputs, tmp_path: Path) -> None:
    command, run = start("torchrun", inputs, tmp_path, "raise:actor.update:1:3")
    with command:
        command.wait_for_step(run, 1)
        assert end_of(command, time.monotonic()) != 0
        assert_raised(command, "torchrun")


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["killed", "raised", "interrupted"])
def test_faults_end_a_ray_job(fault: str, inputs: Inputs, tmp_path: Path) -> None:
    planted = "raise:actor.update:1:3" if fault == "raised" else ""
    command, run = start("ray", inputs, tmp_path, planted)
    with command:
        command.wait_for_step(run, 1)
        command.tree()
        since = time.monotonic()
        match fault:
            case "killed":
                command.rank(1).send_signal(signal.SIGKILL)
            case "interrupted":
                command.interrupt()
        status = end_of(command, since)
        assert status == (130 if fault == "interrupted" else 1)
        match fault:
            case "killed":
                assert_killed(command, "ray")
            case "raised":
                assert_raised(command, "ray")
            case "interrupted":
                assert last_line(command) == "mrl train: interrupted"


@pytest.mark.slow
def test_ctrl_c_ends_torchrun(inputs: Inputs, tmp_path: Path) -> None:
    command, run = start("torchrun", inputs, tmp_path)
    with command:
        command.wait_for_step(run, 1)
        command.tree()
        since = time.monotonic()
        command.interrupt()
        assert end_of(command, since) != 0


@pytest.mark.slow
def test_ranks_end_with_a_killed_controller(inputs: Inputs, tmp_path: Path) -> None:
    command, run = start("spawned", inputs, tmp_path)
    with command:
        command.wait_for_step(run, 1)
        assert len(command.tree()) >= 2
        command.process.kill()
        command.process.wait()
        assert command.survivors() == []


@pytest.mark.slow
def test_ctrl_c_while_ranks_start(inputs: Inputs, tmp_path: Path) -> None:
    command, _ = start("spawned", inputs, tmp_path)
    with command:
        while len(command.tree()) < 2:
            assert command.process.poll() is None, command.stderr
            time.sleep(0.1)
        since = time.monotonic()
        command.interrupt()
        assert end_of(command, since) == 130
        assert last_line(command) == "mrl train: interrupted"
