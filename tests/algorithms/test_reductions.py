from __future__ import annotations

import math

import pytest

from mrl.algorithms.reductions import Max, Mean, Min, Same, Sum, merge, over_updates, reduced


def value(*metrics) -> float:
    return reduced(merge([{"m": metric} for metric in metrics]))["m"]


def test_means_are_weighted():
    assert value(Mean(3, 12), Mean(3, 4)) == 0.375
    assert value(Mean(0.8 * 100, 100), Mean(0.6 * 200, 200)) == pytest.approx(2 / 3)


def test_extremes_stay_extremes():
    assert value(Max(1), Max(5)) == 5
    assert value(Min(1), Min(5)) == 1
    assert math.isnan(value(Max(1), Max(math.nan), Max(5)))
    assert math.isnan(value(Min(math.nan), Min(5)))


def test_sums_of_a_split_do_not_grow_with_the_number_of_ranks():
    assert value(*(Sum(12 / ranks) for ranks in [4] * 4)) == value(Sum(6), Sum(6)) == 12


def test_the_kind_is_declared_and_not_read_from_the_name():
    parts = [{"actor/minibatch_loss": Mean(1.0, 1)}, {"actor/minibatch_loss": Mean(3.0, 1)}]
    assert reduced(merge(parts)) == {"actor/minibatch_loss": 2.0}


def test_a_name_missing_on_some_ranks_is_reduced_over_the_others():
    merged = merge([{"a": Sum(1)}, {}, {"a": Sum(2), "b": Max(7)}])
    assert reduced(merged) == {"a": 3, "b": 7}


def test_merging_in_stages_equals_merging_at_once():
    parts = [{"m": Mean(float(i), i)} for i in range(1, 7)]
    assert merge([merge(parts[:2]), merge(parts[2:])]) == merge(parts)


def test_two_kinds_under_one_name_are_refused():
    with pytest.raises(ValueError, match="'m' is a Sum in an earlier part and a Max in part 1"):
        merge([{"m": Sum(1)}, {"m": Max(1)}])


def test_a_mean_over_nothing_is_left_out():
    assert reduced({"m": Mean.of([]), "n": Mean.of([1, 2])}) == {"n": 1.5}


def test_what_all_ranks_hold_alike_is_told_once_and_a_fault_wins():
    assert value(Same(0.5), Same(0.5)) == 0.5
    assert math.isnan(value(Same(0.5), Same(math.nan), Same(0.5)))


def test_over_optimizer_steps_extremes_stay_extremes_and_others_are_averaged():
    first = {"max": Max(5), "min": Min(1), "lr": Same(2), "clip": Mean(3, 12), "loss": Sum(1)}
    second = {"max": Max(1), "min": Min(4), "lr": Same(4), "clip": Mean(3, 4), "none": Mean.of([])}
    joined = over_updates([first, second])
    assert joined == {"max": 5, "min": 1, "lr": 3, "clip": 0.5, "loss": 1}
    assert over_updates([]) == {}
