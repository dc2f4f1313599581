from __future__ import annotations

import json

import pytest

from benchmarks import controller
from mrl.workers.group import TrainGroup


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run the benchmark once on few tokens; gives what was written."""
    folder = tmp_path_factory.mktemp("controller")
    arguments = ["--smoke", "--ranks", "16", "128", "--steps", "1", "--folder", str(folder)]
    assert controller.main(arguments) == 0
    return json.loads((folder / "controller.json").read_text())


def test_every_phase_of_the_controller_is_timed_at_each_number_of_ranks(found):
    result = found["result"]
    assert {name: entry["data_parallel_parts"] for name, entry in result["ranks"].items()} == {
        "16": 2,
        "128": 16,
    }
    wanted = {"total", "rest", "gather"} | {phase for _, _, phase in controller.PHASES}
    for entry in result["ranks"].values():
        assert set(entry["step_s"]) == wanted | {"beside_ranks"}
        assert entry["step_s"]["beside_ranks"] < 0  # two mini-batches: the second is made beside
        phases = dict(entry["step_s"])
        assert phases.pop("total") == pytest.approx(sum(phases.values()))
        assert entry["peak_memory_gb"]["in_steps"] >= entry["peak_memory_gb"]["before_steps"] > 0
    assert wanted <= set(result["growth"]["step"])
    assert found["environment"]["cpu"]["cores"] > 0


def test_what_all_ranks_receive_does_not_grow_with_the_parts_but_for_the_calls(found):
    few, many = (found["result"]["ranks"][name]["sent_bytes"] for name in ("16", "128"))
    assert few["all"] < many["all"] < few["all"] + 112 * 20_000
    assert many["mean"] < few["mean"]


def test_the_groups_are_whole_again_after_a_measurement(found):
    assert "timed" not in TrainGroup._split.__qualname__
