from __future__ import annotations

import json
from dataclasses import replace

import pytest

from benchmarks import recipes, run
from benchmarks.declared import declare
from benchmarks.rl_step import beside


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
@pytest.mark.parametrize(("name", "phase"), [("tiny_grpo", "reshard"), ("tiny_ppo", "values")])
def test_a_run_of_a_tiny_model_is_written_with_its_plan(name, phase, tmp_path) -> None:
    arguments = ["--smoke", "--steps", "3", "--runs", name, "--folder", str(tmp_path)]
    assert run.main(["rl_step", *arguments]) == 0
    saved = json.loads((tmp_path / "rl_step_smoke.json").read_text())["result"]
    for law in recipes.LAWS:
        found = saved[f"{name}/{law}"]
        assert {"gen", "old_log_prob", "update_actor", "rest", "step", phase} <= set(
            found["seconds"]
        )
        assert all(row["measured"] > 0 for row in found["seconds"].values())
        lengths = found["metrics"]["response_length/mean"]
        assert max(lengths) <= found["config"]["response_tokens"]
        if law == "skewed":  # half of the words end a response
            assert max(lengths) < 0.7 * found["config"]["response_tokens"]
    names = {figure["name"]: figure for figure in saved["figures"]}
    assert names[f"{name}/skewed step"]["repeats"] == 2


def test_the_skewed_law_has_a_quarter_of_the_longest_response_as_its_mean() -> None:
    case = replace(recipes.REAL["1.5b_grpo"], law="skewed")
    vocabulary = 151936
    stop = case.ends(vocabulary) / vocabulary
    mean = sum((1 - stop) ** drawn for drawn in range(case.response))
    assert mean / case.response == pytest.approx(case.mean_response, rel=0.01)
    assert case.mean_response == pytest.approx(0.25, abs=0.01)
    uniform = recipes.REAL["1.5b_grpo"]
    assert (uniform.ends(vocabulary), uniform.mean_response) == (1, 1.0)


def test_figures_of_a_step_leave_out_the_first_and_have_a_roofline() -> None:
    found = {
        "timings": {"timing_s/step": [9.0, 4.0, 2.0, 3.0], "timing_s/gen": [5.0, 2.0, 1.0, 1.5]},
        "metrics": {"perf/throughput": [1.0, 25.0, 50.0, 33.0], "perf/mfu/actor": [0.1, 0.4, 0.5]},
        "seconds": {"gen": {}, "rest": {}, "step": {}},
        "memory_gb": {"peak": {"measured": 70.0}},
        "roofline": {"step": 1.0, "tokens_per_s_per_gpu": 100.0, "gen": 0.5},
    }
    figures = {f.name: f for f in declare("rl_step", {"smoke": False, "a": found}, {"gpus": []})}
    step = figures["a step"]
    assert (step.value, step.min, step.max, step.repeats) == (3.0, 2.0, 4.0, 3)
    assert step.attained == pytest.approx(1 / 3)
    assert figures["a"].attained == pytest.approx(0.33)
    assert figures["a gen"].roofline == 0.5
    assert figures["a memory"].better == "lower"
