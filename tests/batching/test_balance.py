from __future__ import annotations

import random

import pytest

from mrl.batching.balance import balance, sequence_cost


def loads(parts: list[list[int]], costs: list[float]) -> list[float]:
    return [sum(costs[i] for i in part) for part in parts]


def test_eight_sequences_over_dp_two_make_two_parts():
    parts = balance([8, 7, 6, 5, 4, 3, 2, 1], 2, equal_counts=True)
    assert [len(part) for part in parts] == [4, 4]
    assert loads(parts, [8, 7, 6, 5, 4, 3, 2, 1]) == [18, 18]


@pytest.mark.parametrize("equal", [True, False])
@pytest.mark.parametrize("seed", range(10))
def test_every_item_lies_in_one_part_and_loads_are_close(seed: int, equal: bool):
    rng = random.Random(seed)
    parts = rng.choice([1, 2, 3, 8])
    costs = [float(rng.randint(1, 1000)) for _ in range(parts * rng.randint(8, 40))]
    split = balance(costs, parts, equal)
    assert sorted(i for part in split for i in part) == list(range(len(costs)))
    assert max(loads(split, costs)) - min(loads(split, costs)) <= max(costs) / 4
    if equal:
        assert {len(part) for part in split} == {len(costs) // parts}


def test_ties_are_broken_the_same_way_on_every_rank():
    costs = [5.0, 5.0, 5.0, 5.0, 1.0, 1.0]
    assert balance(costs, 2, True) == balance(list(costs), 2, True)
    assert all(part == sorted(part) for part in balance(costs, 3, False))


def test_unequal_numbers_are_refused_with_the_nearest_legal_ones():
    with pytest.raises(ValueError, match="nearest legal numbers are 6 and 9"):
        balance([1.0] * 7, 3, equal_counts=True)
    assert sorted(len(p) for p in balance([1.0] * 7, 3, equal_counts=False)) == [2, 2, 3]


def test_fewer_items_than_parts_leave_parts_empty():
    assert sorted(balance([3.0, 1.0], 4, equal_counts=False)) == [[], [], [0], [1]]
    assert balance([], 2, equal_counts=True) == [[], []]


def test_a_negative_or_nan_cost_is_refused():
    with pytest.raises(ValueError, match="item 1 has cost -1"):
        balance([1, -1], 1, False)
    with pytest.raises(ValueError, match="item 0 has cost nan"):
        balance([float("nan")], 1, False)


def test_a_long_sequence_costs_more_than_its_tokens_in_short_ones():
    assert sequence_cost(8192) > 8 * sequence_cost(1024)
    assert sequence_cost(8, 4096) == pytest.approx(2 * sequence_cost(4, 4096), rel=1e-3)
