from __future__ import annotations

import pytest

from benchmarks import reshard


def run_cases(names):
    """What every test rank does: the cases in the ranks' own group."""
    return {name: reshard.run_case(reshard.CASES[name], reshard.SMOKE) for name in names}


@pytest.mark.multiprocess
def test_a_case_moves_the_floor_and_ends_with_the_same_bits(ranks):
    found, _ = ranks.run(2, run_cases, names=["pp2_to_tp2"])
    case = found["pp2_to_tp2"]
    assert case["direct"]["received_bytes"] == case["floor_bytes"]
    assert all(case[way]["bit_equal"] for way in ("direct", "gather", "per_tensor"))


@pytest.mark.slow
@pytest.mark.multiprocess
def test_every_case_moves_the_floor_and_ends_with_the_same_bits(ranks):
    found, _ = ranks.run(2, run_cases, names=list(reshard.TWO))
    assert set(found) == set(reshard.TWO)
    for case in found.values():
        assert case["direct"]["received_bytes"] == case["floor_bytes"]
        for way in ("direct", "gather", "per_tensor"):
            assert case[way]["bit_equal"], case
            assert case[way]["min_ms"] <= case[way]["median_ms"] <= case[way]["max_ms"]
    assert found["tp2_to_tp2"]["floor_bytes"] == [0, 0]
    assert found["1_and_1"]["floor_bytes"][0] == 0 < found["1_and_1"]["floor_bytes"][1]
    shown = reshard.table({"engines": {"tensors": {**found, "lost": {"failed": "exit 1"}}}})
    assert len(shown.splitlines()) == 2 + len(found) + 1


def test_live_engines_are_shared_by_cases_of_one_layout():
    assert reshard._sections(["vllm"], list(reshard.TWO)) == [
        ("vllm", ["tp2_to_tp2", "pp2_to_tp2", "dp2_to_tp2"]),
        ("vllm", ["tp2_to_2xtp1", "pp2_to_2xtp1"]),
    ]
