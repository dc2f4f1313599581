from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compare, table
from benchmarks.compare import Comparison
from benchmarks.declared import declare
from benchmarks.figures import Figure, Record, listed
from benchmarks.pictures import medians
from benchmarks.record import RESULTS
from benchmarks.roofline import gpu_key, ideal_step
from mrl.config import load_config
from mrl.resharding.hardware import GPUS
from mrl.tracking.flops import peak_flops

FILES = sorted(RESULTS.glob("*.json"))
ENVIRONMENT: dict[str, Any] = {
    "commit": "0123456789", "dirty": False, "versions": {"torch": "2.11.0"},
    "cpu": {"model": "a CPU", "cores": 2, "memory_gib": 8.0}, "gpus": [],
    "date": "2026-01-01T00:00:00Z",
}  # fmt: skip


def saved(folder: Path, name: str, *figures: Figure, **changes: Any) -> Path:
    """Write a record of these figures."""
    environment = {**ENVIRONMENT, **changes.get("environment", {})}
    result = {"smoke": False, "figures": listed(figures), **changes.get("result", {})}
    path = folder / f"{name}.json"
    path.write_text(json.dumps({"name": name, "environment": environment, "result": result}))
    return path


def figure(name: str, value: float, better: Any = "lower", **changes: Any) -> Figure:
    known = {"unit": "s", "min": value, "max": value, "repeats": 5}
    return Figure(name, value, better=better, **{**known, **changes})


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_committed_result_has_figures_with_a_spread_and_a_direction(path: Path) -> None:
    record = Record.read(path)
    assert record.figures
    for found in record.figures:
        assert found.min <= found.value <= found.max, found
        assert found.repeats >= 1
        assert found.attained is None or 0 < found.attained <= 1.0001, found


def test_figures_keep_the_numbers_that_were_measured() -> None:
    raw = json.loads((RESULTS / "train_step_h200.json").read_text())["result"]
    entry = raw["parts"]["update"]["1.5b"]["plain/uniform/16384"]
    record = Record.read(RESULTS / "train_step_h200.json")
    (found,) = [f for f in record.figures if f.name == "update 1.5b/plain/uniform/16384"]
    assert found.value == entry["tokens_per_s_per_gpu"]
    assert found.attained == pytest.approx(entry["mfu"])
    tokens = entry["tokens"]
    assert (found.min, found.max) == pytest.approx(
        (tokens / entry["max_s"], tokens / entry["min_s"])
    )


def test_the_older_name_of_whole_steps_meets_the_newer_one(tmp_path: Path) -> None:
    old = Record.read(RESULTS / "whole_run_h200.json")
    case = old.result["1.5b_grpo"]
    new = declare("rl_step_h200", {"smoke": False, "1.5b_grpo/uniform": case}, old.environment)
    both = Comparison.of(old, Record("rl_step_h200", old.environment, {}, new))
    assert {change.old.name for change in both.changes} >= {
        "1.5b_grpo/uniform", "1.5b_grpo/uniform step", "1.5b_grpo/uniform update_actor",
    }  # fmt: skip
    assert all(change.gain == 1 for change in both.changes)


def test_long_runs_and_faults_have_figures_too() -> None:
    over = {"medians": [1.0, 2.0, 3.0], "growth": 1.5}
    soak = declare("soak", {"hours": 2.0, "seconds_a_step": over}, ENVIRONMENT)
    assert [(f.name, f.value, f.unit) for f in soak] == [
        ("seconds_a_step", 2.0, "s"), ("seconds_a_step growth", 1.5, "times"),
    ]  # fmt: skip
    row = {"launcher": "warm", "kind": "kill", "injected": 2, "ended_as_wanted": 1}
    rows = [{**row, "phase": phase, "longest_s": s} for phase, s in (("gen", 3.0), ("adv", 5.0))]
    faults = declare("faults", {"table": rows}, ENVIRONMENT)
    assert [(f.name, f.value, f.max) for f in faults] == [
        ("warm kill to the end", 4.0, 5.0), ("ended otherwise", 2.0, 2.0),
    ]  # fmt: skip


def test_figures_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="one name: a"):
        listed([figure("a", 1.0), figure("a", 2.0)])


def test_a_failed_measurement_gives_no_figure() -> None:
    lost = {"failed": "out of memory", "log": "..."}
    parts = {"update": {"7b": {"plain/uniform/8192": lost, "skipped": "needs 2"}}}
    assert declare("train_step", {"parts": parts}, ENVIRONMENT) == ()
    assert declare("decode", {"cases": {"7b": lost}}, ENVIRONMENT) == ()
    assert declare("peers", {"peers": {"trl, quickstart": lost}}, ENVIRONMENT) == ()


@pytest.mark.parametrize(
    ("better", "new", "worse"),
    [("lower", 1.06, True), ("lower", 1.04, False), ("lower", 0.5, False),
     ("higher", 0.94, True), ("higher", 0.96, False), ("higher", 2.0, False)],
)  # fmt: skip
def test_a_regression_is_over_5_percent_in_the_worse_direction(
    better: Any, new: float, worse: bool, tmp_path: Path
) -> None:
    old = saved(tmp_path, "decode_old", figure("a", 1.0, better), figure("b", 1.0, better))
    now = saved(tmp_path, "decode_new", figure("a", new, better), figure("b", 1.0, better))
    assert compare.main([str(old), str(now)]) == int(worse)
    assert compare.main([str(old), str(now), "--limit", "7"]) == 0


def test_a_figure_that_was_0_gets_worse_by_any_more(tmp_path: Path) -> None:
    old = saved(tmp_path, "train_step_old", figure("bad layouts", 0.0))
    assert compare.main([str(old), str(saved(tmp_path, "same", figure("bad layouts", 0.0)))]) == 0
    assert compare.main([str(old), str(saved(tmp_path, "worse", figure("bad layouts", 1.0)))]) == 1


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"environment": {"versions": {"torch": "2.13.0"}}}, "torch: 2.11.0 against 2.13.0"),
        ({"environment": {"cpu": {"model": "a CPU", "cores": 64}}}, "64 cores"),
        ({"environment": {"gpus": [{"name": "NVIDIA H200", "driver_version": "1"}]}}, "H200"),
        ({"result": {"smoke": True}}, "smoke"),
    ],
)
def test_other_hardware_or_versions_are_refused_unless_asked_for(
    changes: Any, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = saved(tmp_path, "decode_old", figure("a", 1.0))
    new = saved(tmp_path, "decode_new", figure("a", 1.0), **changes)
    with pytest.raises(ValueError, match="not comparable") as caught:
        compare.main([str(old), str(new)])
    assert told in str(caught.value)
    assert compare.main([str(old), str(new), "--across"]) == 0
    assert told in capsys.readouterr().out


def test_what_was_not_measured_again_and_what_is_new_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    old = saved(tmp_path, "old", figure("a", 1.0), figure("gone", 1.0))
    new = saved(tmp_path, "new", figure("a", 0.5, min=0.4, max=1.1), figure("fresh", 1.0))
    assert compare.main([str(old), str(new)]) == 0
    shown = capsys.readouterr().out
    assert "not measured again: gone" in shown and "new: fresh" in shown
    assert "0.500" in shown and "spreads meet" in shown


def test_a_result_is_compared_with_the_committed_one_of_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    committed = compare.baseline_of(tmp_path / "reshard_h200.json")
    known = json.loads((RESULTS / "reshard_h200.json").read_text())
    assert committed.name == known["name"]
    with pytest.raises(ValueError, match=r"no committed benchmarks/results/none\.json"):
        compare.baseline_of(tmp_path / "none.json")


def test_what_is_no_record_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "other.json"
    path.write_text('{"name": "decode"}')
    with pytest.raises(ValueError, match=r"other\.json is not the JSON of a benchmark"):
        Record.read(path)


def test_the_page_shows_every_figure_beside_its_roofline_and_two_pictures(tmp_path: Path) -> None:
    files = [RESULTS / f"{name}.json" for name in ("reshard_h200", "whole_run_h200")]
    for path in files:
        (tmp_path / path.name).write_text(path.read_text())
    page = tmp_path / "RESULTS.md"
    assert table.main(["--folder", str(tmp_path), "--out", str(page)]) == 0
    text, pictures = page.read_text(), ["roofline.png", "phases.png"]
    records = [Record.read(path) for path in files]
    assert text == table.page(records, pictures)
    for record in records:
        assert f"## {record.name}" in text and record.hardware in text
        assert all(f"| {found.name} |" in text for found in record.figures)
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in pictures)
    assert all(f"]({name})" in text for name in pictures)


def test_stacked_phases_are_medians_without_the_first_step() -> None:
    found = medians({"timing_s/gen": [9.0, 1.0, 3.0, 2.0], "timing_s/step": [9.0, 4.0, 4.0, 4.0]})
    assert found == {"gen": 2.0}


@pytest.mark.parametrize("key", GPUS)
def test_the_planner_and_the_peaks_know_the_same_gpus(key: str) -> None:
    name = f"NVIDIA {GPUS[key].name}"
    assert gpu_key(name) == key
    assert peak_flops(name) is not None
    assert gpu_key("cpu") is None and gpu_key("NVIDIA GH200 480GB") is None


def test_a_step_with_nothing_lost_is_faster_than_the_planned_one() -> None:
    config = load_config("configs/grpo/qwen2.5_7b_2gpu.yaml", [])
    ideal, short = (ideal_step(config, "NVIDIA H200", part) for part in (1.0, 0.25))
    assert ideal is not None and short is not None
    assert 0 < short.total < ideal.total
    from mrl.planning.hardware import Machine
    from mrl.planning.plan import plan_job

    planned = plan_job(config, Machine.named("h200")).time
    for phase in ("gen", "old_log_prob", "update_actor"):
        assert 0 < ideal.of(phase) < planned.of(phase), phase
    assert ideal_step(config, "cpu") is None
