from __future__ import annotations

import random

import pytest

from mrl.batching.balance import sequence_cost
from mrl.batching.shares import Share, imbalance, shares
from mrl.types import Batching


def draw(seed: int) -> list[int]:
    rng = random.Random(seed)
    return [
        rng.choice((rng.randint(1, 30), rng.randint(1, 200))) for _ in range(rng.randint(0, 60))
    ]


def share_out(lengths: list[int], batching: Batching, parts: int, multiple: int = 1) -> list[Share]:
    return shares(lengths, [sequence_cost(n, 64) for n in lengths], batching, parts, multiple)


@pytest.mark.parametrize("batching", [Batching(micro_batch_size=3), Batching(max_tokens=250)])
@pytest.mark.parametrize("seed", range(10))
def test_all_parts_run_equally_many_micro_batches_and_each_row_once(seed: int, batching: Batching):
    lengths, rng = draw(seed), random.Random(seed)
    parts, multiple = rng.randint(1, 9), rng.randint(1, 4)
    found = share_out(lengths, batching, parts, multiple)
    assert len(found) == parts
    (count,) = {len(share.cuts) for share in found}
    assert count >= 1
    assert count % multiple == 0
    assert sorted(i for share in found for i in share.rows) == list(range(len(lengths)))
    for share in found:
        assert sorted(i for cut in share.cuts for i in cut) == list(range(len(share.rows)))
        for cut in share.cuts:
            assert len(cut) <= (batching.micro_batch_size or len(lengths))
            tokens = sum(lengths[share.rows[i]] for i in cut)
            assert tokens <= (batching.max_tokens or tokens)


def test_a_part_without_rows_runs_empty_micro_batches():
    found = share_out([4, 5, 6], Batching(micro_batch_size=1), 4)
    assert sorted(len(share.rows) for share in found) == [0, 1, 1, 1]
    assert {share.cuts for share in found if not share.rows} == {((),)}


def test_one_long_row_weighs_more_than_its_tokens():
    # as many tokens either way; attention makes the long row the heavier half
    lengths = [4000, *[1000] * 6]
    found = share_out(lengths, Batching(max_tokens=8000), 2)
    share_by_tokens = [Share((0, 1), ()), Share((2, 3, 4, 5, 6), ())]
    tokens = {0 in share.rows: sum(lengths[i] for i in share.rows) for share in found}
    assert tokens[True] < tokens[False]
    costs = [sequence_cost(n, 64) for n in lengths]
    assert imbalance(costs, found) < imbalance(costs, share_by_tokens)


def test_unbalanced_parts_keep_the_rows_order():
    found = shares([5, 1, 1, 1], [1.0] * 4, Batching(max_tokens=9), 2, balanced=False)
    assert [share.rows for share in found] == [(0, 1), (2, 3)]


def test_imbalance_is_the_heaviest_part_over_the_mean():
    parts = [Share((0, 1), ()), Share((2,), ())]
    assert imbalance([1.0, 2.0, 3.0], parts) == 1.0
    assert imbalance([1.0, 2.0, 1.0], parts) == 1.5
    assert imbalance([], [Share((), ())]) == 1.0
