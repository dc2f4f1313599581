"""The plan against what was measured on H200."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import recipes, rl_step
from benchmarks.cases import REAL
from mrl.config import load_config
from mrl.planning.compute import plan_time
from mrl.planning.hardware import GB, Machine
from mrl.planning.job import Job
from mrl.planning.memory import HEAD_CHUNK_BYTES, plan_memory
from mrl.planning.plan import plan_job
from tests.planning.figures import ALL_BEFORE, ROOT, changed_model, measured, result, trainer_job

MEASURED = measured()
PHASES = {"update_actor": "update actor", "old_log_prob": "log-prob"}
MEMORY, TIME = 0.10, 0.25
RUNS = {**result("whole_run_h200"), **result("whole_run_2x_h200")}


def peak(job: Job, phase: str) -> float:
    (group,) = {g.ranks: g for g in plan_memory(job).groups}.values()
    return next(p.total for p in group.phases if p.name == phase) / GB


@pytest.mark.parametrize("name", MEASURED)
def test_peak_memory_is_within_10_percent_of_the_measured_one(name: str, tmp_path: Path) -> None:
    *where, figures = MEASURED[name]
    job = trainer_job(tmp_path, *where)
    for phase, found in figures.items():
        real = found["memory_gb"]["peak_allocated"]
        assert peak(job, PHASES[phase]) == pytest.approx(real, rel=MEMORY), phase


@pytest.mark.parametrize("name", MEASURED)
def test_phase_times_are_within_25_percent_of_the_measured_ones(name: str, tmp_path: Path) -> None:
    *where, figures = MEASURED[name]
    time = plan_time(trainer_job(tmp_path, *where))
    for phase, found in figures.items():
        assert time.of(phase) == pytest.approx(found["median_s"], rel=TIME), phase


def test_one_row_of_64k_tokens_over_two_ranks_is_planned_as_measured(tmp_path: Path) -> None:
    case, figures = REAL.long["7b_tp2"], result("train_step_2x_h200")["parts"]["long"]["7b_tp2"]
    model = changed_model(tmp_path, "Qwen2.5-7B", case.model.changes)
    overrides = (f"model.path={model}", "data.max_response_length=65024", *case.overrides)
    job = trainer_job(tmp_path, "Qwen2.5-7B", 2, case.budgets["plain"][0], 1, overrides)
    real = figures["memory_gb"]["peak_allocated"]
    assert peak(job, "update actor") == pytest.approx(real, rel=MEMORY)
    assert plan_time(job).of("update_actor") == pytest.approx(figures["median_s"], rel=TIME)


@pytest.mark.parametrize("tokens", [16384, 32768])
@pytest.mark.parametrize("head", ["fused", "plain"])
def test_the_head_is_planned_as_measured(tokens: int, head: str, tmp_path: Path) -> None:
    figures = result("train_step_2x_h200")["parts"]["head"][f"{tokens}/{head}"]
    model = changed_model(tmp_path, "Qwen2.5-7B", {"num_hidden_layers": 1})
    fused = f"actor.megatron.use_fused_kernels={str(head == 'fused').lower()}"
    overrides = (f"model.path={model}", fused)
    job = trainer_job(tmp_path, "Qwen2.5-7B", 1, tokens, tokens // 4096, overrides)
    for phase, part in (("update actor", "update"), ("log-prob", "logprob")):
        real = figures[part]["memory_gb"]["peak_allocated"]
        assert peak(job, phase) == pytest.approx(real, rel=MEMORY), phase


@pytest.mark.parametrize("name", RUNS)
def test_a_whole_run_is_planned_as_measured(name: str) -> None:
    case, figures = recipes.REAL[name], RUNS[name]
    config = load_config(
        ROOT / "configs" / case.recipe,
        [
            *recipes.settings(case, Path("none"), 3),
            f"model.path={ROOT}/configs/models/{case.model}",
            ALL_BEFORE,
        ],
    )
    plan = plan_job(config, Machine.named("h200")).to_json()
    (group,) = plan["memory"]["groups"]
    for phase, found in figures["memory_gb"].items():
        if phase != "peak":
            total = group["phases"][phase]["total"] / GB
            assert total == pytest.approx(found["measured"], rel=MEMORY), phase
    seconds = rl_step.beside(plan["seconds"], figures["timings"])
    for phase, found in seconds.items():
        assert found["planned"] == pytest.approx(found["measured"], rel=TIME), phase


def test_the_head_chunk_is_the_workers() -> None:
    source = (ROOT / "mrl" / "workers" / "megatron" / "fused_head.py").read_text()
    assert "\nCHUNK_BYTES = 512 * 2**20\n" in source
    assert HEAD_CHUNK_BYTES == 512 * 2**20
