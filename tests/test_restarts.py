"""A failed rank is met with another try from the last checkpoint, as often as the config says."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from mrl import RayPPOTrainer, load_config
from mrl.checkpoint.folder import CheckpointFolder
from mrl.config import build_plan
from mrl.config.schema import TrainerConfig
from mrl.restarts import resume_point, start_from, with_restarts
from mrl.workers.group import Answers, WorkerError
from mrl.workers.job import run_job
from tests.runs import Inputs, Recording, overrides, rollouts_of, steps_of
from tests.workers import jobs


class Failing:
    """A run that fails some times before it succeeds."""

    def __init__(self, *errors: BaseException) -> None:
        self.errors, self.tries = list(errors), []

    def __call__(self, tries: int) -> None:
        self.tries.append(tries)
        if self.errors:
            raise self.errors.pop(0)


def broken(number: int, lasting: bool = False) -> WorkerError:
    return WorkerError(f"in step {number} (gen), rank 1 ended", "its log", lasting)


def test_each_restart_is_told_with_its_cause(capfd: pytest.CaptureFixture[str]) -> None:
    run = Failing(broken(3), broken(5))
    with_restarts(run, 2, Event())
    assert run.tries == [0, 1, 2]
    said = capfd.readouterr().err.splitlines()
    assert said == [
        "its log",
        "restart 1 of 2 (trainer.max_restarts), since in step 3 (gen), rank 1 ended",
        "its log",
        "restart 2 of 2 (trainer.max_restarts), since in step 5 (gen), rank 1 ended",
    ]


def test_it_gives_up_with_the_last_cause() -> None:
    run = Failing(*(broken(step) for step in range(9)))
    with pytest.raises(WorkerError) as caught:
        with_restarts(run, 2, Event())
    assert run.tries == [0, 1, 2]
    expected = "after 2 of 2 restarts (trainer.max_restarts), in step 2 (gen), rank 1 ended"
    assert caught.value.cause == expected and caught.value.evidence == "its log"


@pytest.mark.parametrize(
    "error", [ValueError("a key"), KeyboardInterrupt(), OSError("no space"), broken(1, True)]
)
def test_nothing_but_a_failed_rank_is_tried_again(error: BaseException) -> None:
    run = Failing(error)
    with pytest.raises(type(error)):
        with_restarts(run, 5, Event())
    assert run.tries == [0]


def test_a_run_that_was_asked_to_stop_is_not_tried_again() -> None:
    stop, run = Event(), Failing(broken(1))
    stop.set()
    with pytest.raises(WorkerError, match=r"^its log\nin step 1"):
        with_restarts(run, 5, stop)
    assert run.tries == [0]


def checkpoint(root: Path, *steps: int) -> CheckpointFolder:
    folder = CheckpointFolder(root)
    for step in steps:
        (folder.begin(step) / "file").write_text("x")
        folder.commit(step)
    return folder


@pytest.mark.parametrize(
    ("mode", "saved_before", "saved_since", "expected"),
    [
        ("auto", (1, 2), (), 2),
        ("auto", (1, 2), (3, 4), 4),
        ("disable", (), (), None),
        ("disable", (), (1, 2), 2),
        ("resume_path", (), (), 5),
        ("resume_path", (3,), (), 5),  # another run's, older than the start
        ("resume_path", (), (6, 7), 7),
    ],
)
def test_another_try_goes_on_from_what_the_ones_before_have_saved(
    mode: str,
    saved_before: tuple[int, ...],
    saved_since: tuple[int, ...],
    expected: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    checkpoint(tmp_path / "other", 5)
    path = str(tmp_path / "other" / "global_step_5") if mode == "resume_path" else None
    trainer = replace(TrainerConfig(), resume_mode=mode, resume_from_path=path)
    folder = checkpoint(tmp_path / "run", *saved_before)
    first = resume_point(folder, trainer, 0).found
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    start_from(folder, first)
    folder = checkpoint(tmp_path / "run", *saved_since)
    found = resume_point(folder, trainer, 1).found
    assert (found.step if found else None) == expected
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # the same after torchrun's restart
    assert resume_point(folder, trainer, 0).found == found


def test_a_try_that_failed_before_its_start_has_left_nothing_to_go_on_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = replace(TrainerConfig(), resume_mode="disable")
    folder = checkpoint(tmp_path, 500)  # of a run before
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "a")
    assert resume_point(folder, trainer, 0).found is None
    start_from(folder, None)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "b")
    assert resume_point(checkpoint(tmp_path, 7), trainer, 0).found is None


def test_restarts_that_a_launcher_will_not_do_are_refused(
    monkeypatch: pytest.MonkeyPatch, inputs: Inputs
) -> None:
    config = load_config(inputs.config, ["trainer.max_restarts=2"])
    spec = jobs.job(jobs.role(Path(config.model.path)))
    launched = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    for name, value in (launched | {"MASTER_PORT": "1", "TORCHELASTIC_MAX_RESTARTS": "0"}).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=r"trainer\.max_restarts is 2.*restarts ranks 0 times"):
        run_job(config, build_plan(config), spec, lambda pool: None)


def test_a_restarted_run_gives_the_numbers_of_an_uninterrupted_one(
    inputs: Inputs,
    spawned_run: Path,
    tmp_path: Path,
    warm_pools: list[Recording],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """A rank is killed in step 1, before any checkpoint, and in step 3; step 4 is the last."""
    from transformers import AutoTokenizer

    asked, original = [0], Recording.submit

    def submit(
        self: Recording, ranks: Sequence[int], role: str, method: str, args: tuple[Any, ...]
    ) -> Answers:
        if (role, method) == ("actor", "log_probs") and 1 in ranks:
            asked[0] += 1
            if asked[0] in (1, 4):  # steps 1; 1, 2, 3
                os.kill(self.pool._pids[1], signal.SIGKILL)  # type: ignore[attr-defined]
        return original(self, ranks, role, method, args)

    monkeypatch.setattr(Recording, "submit", submit)
    run = tmp_path / "run"
    config = load_config(inputs.config, overrides(run, "trainer.max_restarts=2"))
    RayPPOTrainer(config, AutoTokenizer.from_pretrained(config.model.path)).fit()
    assert len(warm_pools) == 3
    said = capfd.readouterr().err
    for number, step in ((1, 1), (2, 3)):
        told = f"restart {number} of 2 (trainer.max_restarts), since in step {step} (old_log_prob)"
        assert told in said
    assert steps_of(run) == steps_of(spawned_run)
    for step in steps_of(run):
        if step:
            assert rollouts_of(run, step) == rollouts_of(spawned_run, step)
