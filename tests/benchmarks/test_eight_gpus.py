from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import pytest

from benchmarks import record, run
from benchmarks.declared import declare
from benchmarks.eight.entries import Entry, Kept, beside_plan, run_entries
from benchmarks.eight.goals import goals, shown
from benchmarks.eight.layouts import overrides_of
from benchmarks.eight.sizes import DENSE, EXPERTS, REAL, SMOKE
from benchmarks.eight.steps import efficiencies
from benchmarks.eight_gpus import MEASURED, PARTS, listed
from benchmarks.jobs import Jobs
from benchmarks.transfers import OF_WORLD, shape_of
from mrl.config import ConfigError
from mrl.config.errors import Violation
from mrl.planning.hardware import GB, Machine

NAME = "eight_gpus"
CPU_RESULT = record.RESULTS / f"{NAME}_cpu.json"


def every_entry(sizes, worlds, folder):
    return listed(sizes, worlds, ["uniform"], Jobs(sizes.scale.device, folder), "h200")


def refused(entries):
    """Name the entries that a rule of the config forbids, with the keys that it names."""
    found = {}
    for entry in entries:
        try:
            entry.check()
        except ConfigError as error:
            found[entry.name] = {v.key.rpartition(".")[2] for v in error.violations}
    return found


def test_layouts_and_cuts_that_a_model_does_not_allow_are_left_out_and_no_others(tmp_path) -> None:
    every = every_entry(REAL, [4, 8], tmp_path)
    experts, heads = {"expert_model_parallel_size"}, {"tensor_model_parallel_size"}
    assert refused(every["layouts"]) == {
        "4/7b/ep4": experts,  # it has none
        "8/7b/ep8": experts,
        "8/7b/tp2ep4": experts,
        "8/7b/tp8": heads,  # 28
    }
    assert set(refused(every["long_context"])) == {"8/7b/cp8_a2a", "8/7b/tp2cp4_a2a"}
    assert set(refused(every["grpo"])) == {"7b/uniform/1"}
    assert not refused(every["ppo"]) and not refused(every["reshard"])


def test_the_largest_model_fits_every_layout_of_eight_gpus(tmp_path) -> None:
    capacity = Machine.named("h200").memory / GB
    entries = every_entry(REAL, [8], tmp_path)["layouts"]
    planned = [entry.planned() for entry in entries if "/30b_a3b/" in entry.name]
    assert len(planned) == len(EXPERTS[8])
    outside = 5.0  # GB: context, communicators
    assert all(0 < numbers["memory_gb"] < 0.95 * capacity - outside for numbers in planned)


def test_a_layout_is_written_as_the_keys_that_differ_from_the_plain_one() -> None:
    m = "actor.megatron."
    assert overrides_of("tp2pp2vpp2dp2") == [
        f"{m}tensor_model_parallel_size=2",
        f"{m}pipeline_model_parallel_size=2",
        f"{m}virtual_pipeline_model_parallel_size=2",
    ]
    assert overrides_of("tp1") == []


def test_transfers_of_four_and_eight_ranks_are_legal_for_their_models_and_stand_ins() -> None:
    names = [name for cases in OF_WORLD.values() for name in cases]
    assert len(set(names)) == len(names)
    for world, cases in OF_WORLD.items():
        for case in cases.values():
            assert case.world == world
            for tiny in (False, True):
                shape = shape_of(case.model, tiny)
                assert case.source(shape).world_size == case.tp * case.pp * case.dp
                assert case.target(shape).world_size == case.engine_tp * case.replicas


def test_real_parts_and_stand_ins_list_the_same_entries(tmp_path) -> None:
    names = [
        {part: [entry.name for entry in own] for part, own in every_entry(s, [4, 8], tmp).items()}
        for s, tmp in ((REAL, tmp_path), (SMOKE, tmp_path))
    ]
    assert names[0] == names[1]
    assert tuple(names[0]) == MEASURED
    assert all(len(set(own)) == len(own) for own in names[0].values())
    assert len(names[0]["layouts"]) == sum(map(len, (*DENSE.values(), *EXPERTS.values())))


def entry(name, measure, check=lambda: None):
    return Entry(name, check, measure, lambda found: {"s": found["s"]}, lambda: {"s": 3.0})


def fails():
    raise RuntimeError(f"in {tempfile.gettempdir()}/made_up/file")


def forbidden():
    raise ConfigError([Violation("actor.megatron.tp", 8, "does not divide 28 heads", "4")])


def test_what_is_done_is_kept_and_what_failed_is_tried_again(tmp_path) -> None:
    path, forever = tmp_path / "parts" / "p.json", time.monotonic() + 1e6
    calls: list[str] = []

    def good():
        calls.append("good")
        return {"s": 2.0}

    entries = [entry("good", good), entry("bad", fails), entry("no", good, forbidden)]
    assert run_entries(Kept(path), entries, forever) == []
    kept = Kept(path)
    assert kept.entries["bad"]["failed"] == "in file"  # no machine's paths
    assert "nearest legal: 4" in kept.entries["no"]["left_out"]
    assert [e.name for e in kept.lacking(entries)] == ["bad"]
    assert run_entries(kept, [*entries[:1], entry("bad", good), *entries[2:]], forever) == []
    assert calls == ["good", "good"]
    assert not Kept(path).lacking(entries)


def test_no_entry_starts_after_the_time_that_was_given(tmp_path) -> None:
    kept = Kept(tmp_path / "p.json")
    entries = [entry("a", fails), entry("b", fails)]
    assert run_entries(kept, entries, time.monotonic() - 1) == ["a", "b"]
    assert not kept.entries


def test_the_plan_stands_beside_what_was_measured_and_alone_where_nothing_was(tmp_path) -> None:
    kept = Kept(tmp_path / "p.json")
    kept.enter(entry("a", lambda: {"s": 2.0}))
    entries = [entry("a", fails), entry("b", fails), entry("c", fails, forbidden)]
    assert beside_plan(kept, entries) == {
        "a": {"s": {"planned": 3.0, "measured": 2.0, "ratio": 1.5}},
        "b": {"s": {"planned": 3.0, "measured": None, "ratio": None}},
    }


def step(rates, seconds, gpus):
    """Give a run of GRPO as it is kept."""
    return {
        "config": {"gpus": gpus},
        "timings": {"timing_s/step": seconds},
        "metrics": {"perf/throughput": rates},
    }


def test_scaling_is_the_rate_of_a_gpu_over_that_on_the_fewest_gpus() -> None:
    kept = {
        "7b/uniform/8": step([1.0, 90.0, 60.0], [9.0, 1.0, 2.0], 8),  # 70 over both steps
        "7b/uniform/2": step([1.0, 100.0], [9.0, 1.0], 2),
        "7b/uniform/1": {"left_out": "too large"},
        "1.5b/uniform/1": step([1.0, 50.0], [9.0, 1.0], 1),
        "1.5b/uniform/4": {"failed": "lost"},
    }
    scaling = efficiencies(kept, REAL.scaled, ["uniform", "skewed"])
    assert list(scaling) == ["1.5b/uniform", "7b/uniform"]
    assert scaling["7b/uniform"]["8"] == {
        "tokens_per_s_per_gpu": pytest.approx(70.0),
        "efficiency": pytest.approx(0.7),
    }
    assert scaling["7b/uniform"]["2"]["efficiency"] == 1.0
    held = {row["goal"]: row for row in goals({}, scaling, REAL.scaled, smoke=False)[3:]}
    seven = held["7b/uniform: tokens/s/GPU on 8 over those on 2 GPUs"]
    assert (seven["wanted"], seven["held"]) == (0.85, False)
    small = held["1.5b/uniform: tokens/s/GPU on 1 over those on 1 GPUs"]
    assert (small["wanted"], small["held"]) == (0.80, None)  # one count says nothing
    assert all(row["held"] is None for row in goals({}, scaling, REAL.scaled, smoke=True))


def transfer(received, floor, equal=True):
    ours = {"received_bytes": received, "bit_equal": equal}
    return {"direct": ours, "floor_bytes": floor}


def test_goals_hold_where_every_layout_and_every_transfer_does() -> None:
    parts = {
        "layouts": {"a": {"ok": True}, "b": {"left_out": "28 heads"}},
        "reshard": {"c": transfer([1, 2], [1, 2]), "d": transfer([1, 3], [1, 2])},
    }
    bounds, floor, bits = goals(parts, {}, {}, smoke=True)
    assert (bounds["wanted"], bounds["held"]) == (1, True)
    assert (floor["found"], floor["held"], floor["broken"]) == (1, False, ["d"])
    assert bits["held"]
    lost = goals({"layouts": {"a": {"failed": "lost"}}}, {}, {}, smoke=True)
    assert [row["held"] for row in lost] == [False, None, None]


def test_the_committed_run_on_cpu_ranks_is_whole_and_holds_all_that_a_cpu_can_show() -> None:
    saved = json.loads(CPU_RESULT.read_text())
    result, text = saved["result"], CPU_RESULT.read_text()
    assert set(result["parts"]) == set(PARTS)
    assert '"failed"' not in text and "/tmp/" not in text and "/root/" not in text
    with tempfile.TemporaryDirectory() as folder:
        every = every_entry(SMOKE, [4, 8], Path(folder))
    for part, entries in every.items():
        assert {e.name for e in entries} <= set(result["parts"][part]), part
    assert [goal["held"] for goal in result["goals"][:3]] == [True] * 3
    assert all(goal["held"] is None for goal in result["goals"][3:])
    for part in every:
        done = {n for n, found in result["parts"][part].items() if "left_out" not in found}
        planned = result["parts"]["plan"][part]
        assert done <= set(planned)
        for name in done:
            assert any(row["measured"] is not None for row in planned[name].values()), name
    lines = list(shown(result))
    assert any(line.startswith("| 8/30b_a3b/ep8 |") for line in lines)
    figures = {figure.name for figure in declare(NAME, result, saved["environment"])}
    assert {"scaling 1.5b/uniform/8", "long 8/7b/cp8_a2a", "reshard 8/tp4pp2_to_4xtp2 direct"} <= (
        figures
    )


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(3600)
def test_all_parts_run_on_eight_cpu_ranks_and_go_on_where_they_ended(tmp_path) -> None:
    arguments = [NAME, "--smoke", "--folder", str(tmp_path), "--ranks", "8", "--laws", "uniform"]
    assert run.main([*arguments, "--parts", "layouts", "--only", "8/7b/tp2"]) == 0
    assert run.main(arguments) == 0
    result = json.loads((tmp_path / f"{NAME}_smoke.json").read_text())["result"]
    assert '"failed"' not in json.dumps(result)
    assert set(result["parts"]) == set(PARTS)
    assert [goal["held"] for goal in result["goals"][:3]] == [True] * 3
    assert run.main([*arguments, "--parts", *MEASURED]) == 0
    again = json.loads((tmp_path / f"{NAME}_smoke.json").read_text())["result"]
    assert again["parts"] == result["parts"]  # nothing is repeated
