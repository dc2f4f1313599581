from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks import step_profile
from benchmarks.step_profile import Work, sum_up, summed_up


def test_busy_and_idle_time_make_up_a_phase_and_overlaps_count_once() -> None:
    works = [
        Work(-50, -10, "earlier"),
        Work(10, 110, "gemm"),
        Work(100, 150, "copy"),  # beside the product
        Work(150, 250, "gemm"),
        Work(450, 460, "norm"),
        Work(990, 1100, "gemm"),  # begins in the phase
        Work(2000, 2100, "later"),
        Work(2200, 2300, "later"),
    ]
    found = summed_up([(0, 1000)], works)
    assert found["seconds"] == 1000 / 1e6
    assert found["short_gaps_s"] == pytest.approx(10 / 1e6)
    assert found["long_gaps_s"] == pytest.approx((200 + 530) / 1e6)
    assert found["busy_s"] == pytest.approx((240 + 10 + 10) / 1e6)
    assert sum(found[name] for name in ("busy_s", "short_gaps_s", "long_gaps_s")) == (
        pytest.approx(found["seconds"])
    )
    assert found["kernels"] == 5
    assert found["longest"]["gemm"]["runs"] == 3
    assert found["waited_for"]["gemm"] == pytest.approx(540 / 1e6)


def test_a_phase_that_runs_twice_does_not_wait_in_between() -> None:
    works = [Work(0, 100, "a"), Work(500, 600, "b")]
    found = summed_up([(0, 100), (500, 700)], works)
    assert found["seconds"] == pytest.approx(300 / 1e6)
    assert found["busy_s"] == pytest.approx(200 / 1e6)
    assert found["long_gaps_s"] == pytest.approx(100 / 1e6)


def test_a_phase_without_a_kernel_waits_all_the_time() -> None:
    assert summed_up([(0, 100)], [])["long_gaps_s"] == pytest.approx(100 / 1e6)
    assert summed_up([(200, 300), (400, 500)], [Work(0, 10, "a")])["busy_s"] == 0


def test_phases_and_kernels_are_read_from_a_trace(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = [
        {"ph": "X", "cat": "user_annotation", "name": "gen", "ts": 0, "dur": 100_000},
        {"ph": "X", "cat": "kernel", "name": "gemm", "ts": 20_000, "dur": 60_000},
        {"ph": "X", "cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 10},
        {"ph": "M", "name": "process_name"},
    ]
    path = tmp_path / "rank_0.trace.json"
    path.write_text(json.dumps({"traceEvents": events}))
    assert sum_up(path)["gen"]["busy_s"] == pytest.approx(0.06)
    step_profile.run(["--trace", str(path)])
    assert "GPU busy 0.060 (60%)" in capsys.readouterr().out
