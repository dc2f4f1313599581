from __future__ import annotations

import json

import pytest

from benchmarks import run, startup


def note(part, start, end):
    return {"part": part, "start": start, "end": end}


def test_parts_of_a_start_add_up_and_the_slowest_rank_counts() -> None:
    ranks = {
        "0": [note("join", 20.0, 21.0), note("engine", 21.0, 41.0), note("megatron", 41.0, 45.0)],
        "1": [note("join", 22.0, 22.5), note("engine", 22.5, 42.0), note("megatron", 42.0, 48.0)],
    }
    command = [
        note("imports", 108.0 - 100, 8.0), note("pool", 10.0, 50.0), note("sync", 51.0, 52.0),
        note("sync", 59.0, 59.5), note("step", 52.0, 60.0),
    ]  # fmt: skip
    found = startup.parts(0.0, {"command": command, **ranks})
    total = found.pop("command_to_first_step")
    assert total == 60.0 == pytest.approx(sum(found.values()))
    assert found["config_and_data"] == 2.0
    assert found["rank_imports"] == 12.0
    assert (found["engine"], found["megatron"]) == (20.0, 6.0)
    assert (found["first_sync"], found["first_step"]) == (1.0, 8.0)


def test_an_unknown_run_is_refused(tmp_path) -> None:
    with pytest.raises(ValueError, match="expected tiny_grpo"):
        startup.run(["--smoke", "--runs", "70b", "--folder", str(tmp_path)])


@pytest.mark.slow
@pytest.mark.multiprocess
def test_a_start_is_told_by_its_parts(tmp_path) -> None:
    plans = ["--plans", "configs/grpo/qwen2.5_0.5b_1gpu.yaml"]
    assert run.main(["startup", "--smoke", *plans, "--folder", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "startup_smoke.json").read_text())["result"]
    found = result["cases"]["tiny_grpo"]["seconds"]
    parts = {name: seconds[0] for name, seconds in found.items()}
    total = parts.pop("command_to_first_step")
    assert total == pytest.approx(sum(parts.values()))
    assert {"imports", "rank_imports", "engine", "megatron", "first_sync", "first_step"} < set(
        parts
    )
    assert all(parts[name] > 0 for name in ("imports", "rank_imports", "first_step"))
    assert any(figure["name"].startswith("mrl plan") for figure in result["figures"])
