from __future__ import annotations

import json

import pytest

from benchmarks import decode, run
from benchmarks.declared import declare


class Clock:
    """Time that passes by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_sides_take_turns_and_warm_ups_are_left_out() -> None:
    clock, order = Clock(), []

    def side(name, seconds):
        def generate(turn):
            order.append(name)
            clock.now += 100.0 if turn == 0 else seconds
            return 60

        return generate

    sides = {"mrl": side("mrl", 2.0), "vllm": side("vllm", 3.0), "other": side("other", 4.0)}
    rates = decode.Rates.alternate(sides, warmups=1, repeats=3, clock=clock)
    assert order[::3] == ["mrl", "vllm", "other", "mrl"]  # first of each turn
    assert rates.of == {"mrl": (30.0,) * 3, "vllm": (20.0,) * 3, "other": (15.0,) * 3}
    assert rates.a_device(2)["mrl"] == [15.0] * 3


def test_the_ratio_has_the_spread_of_the_turns() -> None:
    rates = {"mrl": [90.0, 100.0, 99.0], "vllm": [100.0, 100.0, 100.0]}
    result = {"cases": {"a": {"tokens_per_s_per_gpu": rates, "roofline": 200.0}}}
    figures = {figure.name: figure for figure in declare("decode", result, {"gpus": []})}
    ratio = figures["a mrl over vllm"]
    assert (ratio.value, ratio.min, ratio.max, ratio.better) == (0.99, 0.9, 1.0, "higher")
    assert figures["a mrl"].attained == pytest.approx(0.495)


def test_devices_are_those_that_the_process_may_see(monkeypatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    assert decode._devices(2, 2) == "6,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert decode._devices(1, 1) == "1"


@pytest.mark.slow
@pytest.mark.multiprocess
@pytest.mark.timeout(1200)  # two engines start
def test_the_engine_inside_and_vllm_alone_generate_the_same_amount(tmp_path) -> None:
    assert run.main(["decode", "--smoke", "--laws", "uniform", "--folder", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "decode_smoke.json").read_text())["result"]
    found = result["cases"]["tiny_grpo/uniform"]
    assert set(found["tokens_per_s_per_gpu"]) == {"mrl", "vllm", "vllm with log-probs"}
    assert all(min(rates) > 0 for rates in found["tokens_per_s_per_gpu"].values())
    assert found["roofline"] is None  # of a CPU
    ratios = [f["name"] for f in result["figures"] if " over " in f["name"]]
    assert len(ratios) == 2
