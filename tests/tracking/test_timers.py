from __future__ import annotations

import pytest

from mrl.tracking.timers import Timers, throughput_metrics
from mrl.workers.busy import RankSeconds


class Clock:
    """A clock that is set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_parts_and_rest_are_the_step():
    clock = Clock()
    timers = Timers(clock=clock)
    clock.now += 1
    with timers("gen"):
        clock.now += 4
    with timers("update_actor"):
        clock.now += 2
    with timers("gen"):
        clock.now += 0.5
    clock.now += 0.25
    metrics = timers.metrics()
    assert metrics == {
        "timing_s/gen": 4.5,
        "timing_s/update_actor": 2.0,
        "timing_s/rest": 1.25,
        "timing_s/step": 7.75,
    }


def test_a_phase_inside_another_is_counted_once():
    clock = Clock()
    timers = Timers(clock=clock)
    with timers("gen"):
        clock.now += 1
        with timers("reshard"):
            clock.now += 2
        clock.now += 3
    metrics = timers.metrics()
    assert (metrics["timing_s/gen"], metrics["timing_s/reshard"]) == (4.0, 2.0)
    assert metrics["timing_s/rest"] == 0.0


def test_the_device_is_waited_for_inside_the_phase():
    clock = Clock()

    def synchronize() -> None:
        clock.now += 5

    timers = Timers(synchronize, clock)
    with timers("update_actor"):
        clock.now += 1
    assert timers.metrics()["timing_s/update_actor"] == 6.0


def test_overlapped_work_counts_only_the_wait():
    clock = Clock()
    timers = Timers(clock=clock)
    ready = clock.now + 10  # generation started elsewhere, done in 10 s
    with timers("update_actor"):
        clock.now += 7
    with timers("gen"):
        clock.now = max(clock.now, ready)
    metrics = timers.metrics()
    assert (metrics["timing_s/gen"], metrics["timing_s/step"]) == (3.0, 10.0)


def test_a_failing_phase_is_closed_and_not_waited_for():
    clock = Clock()
    timers = Timers(lambda: pytest.fail("the device is broken"), clock)
    with pytest.raises(RuntimeError), timers("gen"):
        clock.now += 1
        raise RuntimeError
    clock.now += 1
    assert timers.metrics()["timing_s/gen"] == 1.0


@pytest.mark.parametrize("name", ["step", "rest"])
def test_computed_names_cannot_be_phases(name: str):
    with pytest.raises(ValueError, match="is computed"), Timers()(name):
        pass


def test_throughput_divides_by_every_gpu_of_the_job():
    rates = throughput_metrics({"timing_s/step": 10.0}, 1000, 800, num_gpus=4 + 4)
    assert rates["perf/throughput"] == 12.5
    assert rates["perf/time_per_step"] == 10.0


def test_throughput_at_a_constant_rate_is_a_flat_line():
    steps = [throughput_metrics({"timing_s/step": 2.0}, 64, 32, 2) for _ in range(5)]
    assert {rates["perf/throughput"] for rates in steps} == {16.0}


def test_generation_is_per_response_token_and_training_per_token():
    timings = {"timing_s/step": 3.0, "timing_s/gen": 1.0, "timing_s/update_actor": 2.0}
    rates = throughput_metrics(timings, total_tokens=1000, response_tokens=500, num_gpus=1)
    assert rates["timing_per_token_ms/gen"] == 2.0
    assert rates["timing_per_token_ms/update_actor"] == 2.0


def test_no_second_lies_between_two_steps():
    clock = Clock()
    first = Timers(clock=clock)
    assert first.next().metrics()["timing_s/step"] == 0  # nothing was read yet: it starts now
    clock.now += 2
    first.metrics()
    clock.now += 3  # the row is written
    second = first.next()
    with second("gen"):
        clock.now += 4
    assert second.metrics() == {"timing_s/gen": 4.0, "timing_s/rest": 3.0, "timing_s/step": 7.0}


def test_the_ranks_own_seconds_are_booked_like_the_controllers():
    busy = RankSeconds()
    timers = Timers(ranks=busy)
    with timers("gen"):
        busy.add([{0: 1.0, 1: 3.0}])
        with timers("reward"):
            busy.add([{0: 50.0, 1: 7.0}])  # of a phase in which ranks have no rows
        busy.add([{0: 1.0}, {1: 1.0}])
    with timers("ref"):
        busy.add([{2: 1.0}])
    assert timers.rank_metrics() == {
        "perf/rank_seconds/gen": 3.0,
        "perf/rank_spread/gen": 4 / 3,
        "perf/slowest_rank/gen": 1.0,
    }
    assert timers.next().rank_metrics() == {}
