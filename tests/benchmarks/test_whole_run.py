from __future__ import annotations

import json

import pytest

from benchmarks import whole_run
from benchmarks.whole_run import beside


def test_a_phase_is_set_beside_the_median_of_all_steps_but_the_first() -> None:
    plan = {"timing_s": {"gen": {"total": 2.0}, "rest": {"total": 0.5}}, "step": 2.5}
    timings = {
        "timing_s/gen": [9.0, 1.0, 3.0, 2.0],
        "timing_s/reward": [0.0, 0.1, 0.1, 0.1],
        "timing_s/adv": [0.0, 0.2, 0.2, 0.2],
        "timing_s/rest": [0.0, 0.1, 0.1, 0.1],
    }
    found = beside(plan, timings)
    assert found["gen"] == {"planned": 2.0, "measured": 2.0, "ratio": 1.0}
    assert found["rest"]["measured"] == pytest.approx(0.4)
    assert found["step"]["measured"] == pytest.approx(2.4)


@pytest.mark.slow
def test_a_run_of_a_tiny_model_is_written_with_its_plan(tmp_path) -> None:
    whole_run.run(["--smoke", "--steps", "2", "--folder", str(tmp_path)])
    found = json.loads((tmp_path / "whole_run.json").read_text())["result"]["tiny_grpo"]
    assert set(found["seconds"]) == {
        "gen",
        "old_log_prob",
        "update_actor",
        "reshard",
        "rest",
        "step",
    }
    assert all(row["measured"] > 0 for row in found["seconds"].values())
    assert found["metrics"]["response_length/mean"][0] <= found["config"]["response_tokens"]
