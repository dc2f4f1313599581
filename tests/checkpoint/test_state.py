from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mrl.checkpoint.state import STATE_FILE, TrainerState, is_due

STATE = TrainerState(
    global_step=60,
    policy_version=61,
    seed=42,
    stream={"epoch": 1, "offset": 0, "files": ["train.parquet"]},
    kl_coef=0.1 + 0.2,
)


def test_state_survives_the_file_to_the_last_bit(tmp_path: Path):
    STATE.save(tmp_path)
    assert TrainerState.load(tmp_path) == STATE


def test_best_stays_after_resume_with_a_worse_result(tmp_path: Path):
    dataclasses.replace(STATE.with_validation(0.8), global_step=70).save(tmp_path)
    resumed = TrainerState.load(tmp_path).with_validation(0.6)
    assert (resumed.best_metric, resumed.best_step) == (0.8, 60)
    assert resumed.with_validation(0.9).best_step == 70


def test_a_changed_set_of_fields_is_refused_by_name(tmp_path: Path):
    STATE.save(tmp_path)
    held = json.loads((tmp_path / STATE_FILE).read_text())
    held["epoch"] = held.pop("seed")
    (tmp_path / STATE_FILE).write_text(json.dumps(held))
    with pytest.raises(ValueError, match=r"missing fields \['seed'\], unknown fields \['epoch'\]"):
        TrainerState.load(tmp_path)


@pytest.mark.parametrize("value", [object(), float("nan")])
def test_what_json_cannot_hold_is_refused(tmp_path: Path, value):
    with pytest.raises(ValueError, match="JSON"):
        dataclasses.replace(STATE, stream={"x": value}).save(tmp_path)
    assert not (tmp_path / STATE_FILE).exists()


def test_the_last_step_is_due_once():
    due = [step for step in range(1, 238) if is_due(step, 50, 237)]
    assert due == [50, 100, 150, 200, 237]
    assert [step for step in range(1, 101) if is_due(step, 50, 100)] == [50, 100]
    assert [step for step in range(1, 8) if is_due(step, -1, 7)] == [7]
    assert [step for step in range(1, 8) if is_due(step, 0, 7)] == [7]
