from __future__ import annotations

import json
from pathlib import Path

import pytest

from mrl.tracking.jsonl import MetricsFile, read_metrics


def run(path: Path, resume_step: int, last_step: int, loss: float) -> None:
    file = MetricsFile(path, resume_step)
    for step in range(resume_step + 1, last_step + 1):
        file.write(step, {"actor/pg_loss": loss})


def steps(path: Path) -> list[int]:
    return [row["step"] for row in read_metrics(path)]


def test_resuming_leaves_one_row_a_step_and_loses_none(tmp_path: Path):
    path = tmp_path / "run" / "metrics.jsonl"
    run(path, 0, 7, 1.0)
    run(path, 5, 9, 2.0)
    assert steps(path) == list(range(1, 10))
    assert [row["actor/pg_loss"] for row in read_metrics(path)] == [1.0] * 5 + [2.0] * 4
    assert steps(path.with_name("metrics.jsonl.superseded")) == [6, 7]


def test_a_fresh_start_puts_the_old_run_by(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, 0).write(0, {"val": 1.0})
    run(path, 0, 2, 2.0)
    assert steps(path) == [1, 2]
    assert steps(path.with_name("metrics.jsonl.superseded")) == [0]


def test_a_line_cut_short_by_a_kill_is_moved_too(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    run(path, 0, 2, 1.0)
    with path.open("a") as file:
        file.write('{"step": 3, "actor/pg')
    assert steps(path) == [1, 2]
    run(path, 2, 4, 2.0)
    assert steps(path) == [1, 2, 3, 4]


def test_rows_are_strict_json_and_name_what_was_not_finite(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    MetricsFile(path, 0).write(1, {"a": float("nan"), "b": float("inf"), "c": 1.5})

    def refuse(name: str) -> None:
        raise AssertionError(name)

    row = json.loads(path.read_text(), parse_constant=refuse)
    assert row == {"step": 1, "a": None, "b": None, "c": 1.5, "non_finite": ["a", "b"]}


def test_a_repeated_step_is_refused(tmp_path: Path):
    path = tmp_path / "metrics.jsonl"
    run(path, 0, 3, 1.0)
    with pytest.raises(ValueError, match="has step 3 already; step 3 would repeat it"):
        MetricsFile(path, 3).write(3, {})
