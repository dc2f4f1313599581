from __future__ import annotations

import random
import warnings

import pytest

from mrl.batching.packing import by_tokens, fixed


def sizes(batches: list[list[int]], lengths: list[int]) -> list[int]:
    return [sum(lengths[i] for i in batch) for batch in batches]


def test_the_token_cap_is_kept_even_where_work_would_balance_better():
    assert len(by_tokens([6, 6, 6], 10)) == 3


def test_ranks_agree_on_a_count_and_the_light_one_gets_an_empty_micro_batch():
    light, heavy = by_tokens([100], 1000), by_tokens([900, 900], 1000)
    agreed = max(len(light), len(heavy))
    assert agreed == 2
    assert by_tokens([100], 1000, min_count=agreed) == [[0], []]
    assert by_tokens([900, 900], 1000, min_count=agreed) == [[0], [1]]


def test_an_over_long_row_runs_alone_with_one_warning():
    with pytest.warns(UserWarning, match="1 rows exceed the budget of 10") as caught:
        batches = by_tokens([4, 25, 5], 10)
    assert len(caught) == 1
    assert sorted(batches) == [[0, 2], [1]]


@pytest.mark.parametrize("seed", range(20))
def test_every_row_lies_in_one_micro_batch_within_the_cap(seed: int):
    rng = random.Random(seed)
    lengths = [rng.randint(0, 60) for _ in range(rng.randint(0, 80))]
    count, multiple = rng.randint(1, 12), rng.randint(1, 4)
    batches = by_tokens(lengths, 64, count, multiple)
    assert sorted(i for batch in batches for i in batch) == list(range(len(lengths)))
    assert all(size <= 64 for size in sizes(batches, lengths))
    assert len(batches) >= count
    assert len(batches) % multiple == 0
    assert batches == by_tokens(lengths, 64, count, multiple)
    again = by_tokens(lengths, 64, len(batches), multiple)
    assert len(again) == len(batches)  # asking for the agreed count gives that count


@pytest.mark.parametrize("seed", range(5))
def test_packing_needs_at_most_eleven_ninths_of_the_fewest_micro_batches(seed: int):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 100) for _ in range(200)]
    fewest = -(-sum(lengths) // 100)
    assert len(by_tokens(lengths, 100)) <= 11 / 9 * fewest + 1


def test_micro_batches_are_level_where_the_cap_allows():
    lengths = [10] * 12
    assert sizes(by_tokens(lengths, 50), lengths) == [40, 40, 40]


def test_rows_that_fit_raise_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        by_tokens([10, 10], 10)


def test_no_rows_still_give_the_requested_count():
    assert by_tokens([], 10) == [[]]
    assert by_tokens([], 10, min_count=3, multiple_of=2) == [[], [], [], []]


@pytest.mark.parametrize("bad", [{"max_tokens": 0}, {"min_count": 0}, {"multiple_of": 0}])
def test_senseless_limits_are_refused_by_name(bad: dict[str, int]):
    with pytest.raises(ValueError, match=f"{next(iter(bad))} is 0"):
        by_tokens([1], **({"max_tokens": 1} | bad))


def test_fixed_micro_batches_keep_the_order_and_the_rest():
    assert fixed([9, 9, 9, 9, 9], 2) == [[0, 1], [2, 3], [4]]
    assert fixed([], 2) == []
    with pytest.raises(ValueError, match="micro-batch size is 0"):
        fixed([1], 0)
