from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from mrl import load_config
from mrl.config import build_plan
from mrl.tracking.recorder import STRICT, Recorder
from mrl.tracking.rollouts import RolloutRow
from mrl.tracking.status import Status, read_status
from mrl.types import Prompt, Sample, Score
from mrl.workers.group import WorkerError
from tests.runs import ROOT

ROW = RolloutRow(
    1,
    Prompt("a", (1,), "ask", "task", "42", {}),
    Sample("a", (1,), (2,), (0.0,), "say", "stop", 0),
    Score(1.0, "ok"),
)


METRICS = {"reward/unscored": 1.0}


def recorder(folder: Path) -> Recorder:
    recipe = ROOT / "configs" / "grpo" / "qwen2.5_0.5b_1gpu.yaml"
    config = load_config(recipe, [f"trainer.default_local_dir={folder}", "trainer.logger=[]"])
    return Recorder(config, build_plan(config), 2, 0)


def test_a_step_is_recorded_after_its_samples(tmp_path: Path) -> None:
    with recorder(tmp_path) as record:
        record.beside(time.sleep, 0.2)
        record.rollouts("rollouts", 1, [ROW])
        record.step(1, METRICS)
        (line,) = (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()
        assert json.loads(line)["output"] == "say"


def test_a_dump_that_fails_ends_the_step_with_its_cause(tmp_path: Path) -> None:
    with recorder(tmp_path) as record:
        (tmp_path / "rollouts").write_text("in the way")
        record.rollouts("rollouts", 1, [ROW])
        with pytest.raises(OSError, match="rollouts"):
            record.step(1, METRICS)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_samples_of_a_failed_step_are_kept_and_its_cause_is_told(tmp_path: Path) -> None:
    with pytest.raises(KeyError, match="rank"), recorder(tmp_path) as record:
        record.beside(time.sleep, 0.2)
        record.rollouts("rollouts", 1, [ROW])
        raise KeyError("rank")
    assert (tmp_path / "rollouts" / "1.jsonl").is_file()


def test_a_dump_that_fails_after_the_last_step_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="validation"), recorder(tmp_path) as record:
        (tmp_path / "validation").write_text("in the way")
        record.rollouts("validation", 1, [ROW])


def test_a_metric_without_an_entry_in_the_contract_is_refused_in_tests_and_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with recorder(tmp_path) as record:
        with pytest.raises(ValueError, match=r"catalogue.py has the metrics \['actor/pg_los'\]"):
            record.step(1, {"actor/pg_los": 1.0, **METRICS})
        monkeypatch.delenv(STRICT)
        record.step(1, {"actor/pg_los": 1.0})
    assert "pg_los" in (tmp_path / "metrics.jsonl").read_text()


def status(folder: Path) -> tuple[str, int, str]:
    found = read_status(folder)
    assert isinstance(found, Status) and found.total_steps == 2 and found.pid == os.getpid()
    return found.state, found.step, found.why


def test_the_folder_tells_whether_the_run_goes_on_and_how_it_ended(tmp_path: Path) -> None:
    with recorder(tmp_path) as record:
        assert status(tmp_path) == ("running", 0, "")
        record.step(1, METRICS)
        record.finish("stopped as asked")
    assert status(tmp_path) == ("stopped", 1, "stopped as asked")
    with recorder(tmp_path / "whole") as record:
        record.step(2, METRICS)
        record.finish("2 steps")
    assert status(tmp_path / "whole") == ("finished", 2, "2 steps")
    with pytest.raises(WorkerError), recorder(tmp_path):
        raise WorkerError("rank 3 failed", "a long\ntraceback")
    assert status(tmp_path) == ("failed", 0, "rank 3 failed")
    with pytest.raises(OSError), recorder(tmp_path):
        raise OSError("disk\nfull")
    assert status(tmp_path) == ("failed", 0, "OSError: disk full")


def test_a_damaged_status_is_none(tmp_path: Path) -> None:
    assert read_status(tmp_path) is None
    for text in ("", "{", "[]", "{}", '{"state": "running"}'):
        (tmp_path / "status.json").write_text(text)
        assert read_status(tmp_path) is None
