from __future__ import annotations

import subprocess
import sys

import pytest

from mrl.tracking.findings import RULES, WINDOW, find
from tests.report.folders import FAULTS, Row, config_of, rows_of


def test_a_healthy_run_gets_none() -> None:
    assert find(rows_of(60), config_of()) == ()


def test_every_rule_has_a_fault_that_it_finds() -> None:
    assert set(FAULTS) == set(RULES)


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_gets_its_warning_and_no_other(name: str) -> None:
    (finding,) = find(rows_of(60, [FAULTS[name]]), config_of())
    assert finding.name == name
    assert (
        finding.number < finding.limit
        if name == "entropy_collapse"
        else (finding.number > finding.limit)
    )
    section, _, _ = finding.key.partition(".")
    assert hasattr(config_of(), section), finding.key
    assert finding.key in str(finding) and finding.found in str(finding)


def test_faults_at_once_get_all_their_warnings() -> None:
    names = ["entropy_collapse", "truncated", "generation_share", "slow_rank"]
    found = find(rows_of(60, [FAULTS[name] for name in names]), config_of())
    assert {finding.name for finding in found} == set(names)


def test_the_number_is_that_of_the_last_steps() -> None:
    def late(row: Row, step: int, steps: int) -> None:
        row["response_length/clip_ratio"] = 0.6 if step > steps - WINDOW else 0.0

    (finding,) = find(rows_of(200, [late]), config_of())
    assert finding.number == pytest.approx(0.6)
    assert "60%" in finding.found and "data.max_response_length" in finding.key


def test_generation_above_its_share_names_what_makes_it_shorter() -> None:
    rows = rows_of(20, [FAULTS["generation_share"]])
    (few,) = find(rows, config_of("rollout.max_num_seqs=16"))
    assert few.number == pytest.approx(0.7) and few.key == "rollout.max_num_seqs"
    (wide,) = find(rows, config_of("rollout.tensor_model_parallel_size=2"))
    assert wide.key == "rollout.tensor_model_parallel_size"
    (all_at_once,) = find(rows, config_of())
    assert all_at_once.key == "data.max_response_length"


def test_a_slow_copy_is_found_whichever_of_its_ranks_is_named() -> None:
    def slow(row: Row, step: int, steps: int) -> None:
        row["perf/rank_spread/update_actor"] = 1.5
        row["perf/slowest_rank/update_actor"] = float(2 + step % 2)

    rows = rows_of(20, [slow])
    whole = ("trainer.n_gpus_per_node=4",)
    assert find(rows, config_of(*whole)) == ()  # another rank each time: long rows, not a slow rank
    (finding,) = find(rows, config_of(*whole, "actor.megatron.tensor_model_parallel_size=2"))
    assert finding.name == "slow_rank" and "rank 2" in finding.found


def test_a_trend_needs_steps_to_show() -> None:
    short = rows_of(6, [FAULTS["entropy_collapse"], FAULTS["growing_mismatch"]])
    assert find(short, config_of()) == ()


@pytest.mark.parametrize(
    "rows",
    [
        [],
        [{"step": 0, "val-core/x/acc/mean@1": 0.1}],
        [{"step": 1, "sft/loss": 2.0, "timing_s/step": 1.0}],
        [{"step": s, "actor/entropy": None, "timing_s/step": 1.0} for s in range(1, 30)],
    ],
)
def test_what_was_not_measured_gets_none(rows: list[Row]) -> None:
    assert find(rows, config_of()) == ()


def test_it_needs_no_torch() -> None:
    code = "import sys, mrl.tracking.findings; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
