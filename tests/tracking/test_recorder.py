from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from mrl import load_config
from mrl.config import build_plan
from mrl.tracking.recorder import Recorder
from mrl.tracking.rollouts import RolloutRow
from mrl.types import Prompt, Sample, Score
from tests.runs import ROOT

ROW = RolloutRow(
    1,
    Prompt("a", (1,), "ask", "task", "42", {}),
    Sample("a", (1,), (2,), (0.0,), "say", "stop", 0),
    Score(1.0, "ok"),
)


def recorder(folder: Path) -> Recorder:
    recipe = ROOT / "configs" / "grpo" / "qwen2.5_0.5b_1gpu.yaml"
    config = load_config(recipe, [f"trainer.default_local_dir={folder}", "trainer.logger=[]"])
    return Recorder(config, build_plan(config), 2, 0)


def test_a_step_is_recorded_after_its_samples(tmp_path: Path) -> None:
    with recorder(tmp_path) as record:
        record.beside(time.sleep, 0.2)
        record.rollouts("rollouts", 1, [ROW])
        record.step(1, {"a": 1.0})
        (line,) = (tmp_path / "rollouts" / "1.jsonl").read_text().splitlines()
        assert json.loads(line)["output"] == "say"


def test_a_dump_that_fails_ends_the_step_with_its_cause(tmp_path: Path) -> None:
    with recorder(tmp_path) as record:
        (tmp_path / "rollouts").write_text("in the way")
        record.rollouts("rollouts", 1, [ROW])
        with pytest.raises(OSError, match="rollouts"):
            record.step(1, {"a": 1.0})
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
