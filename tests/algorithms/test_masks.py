from __future__ import annotations

import pytest
import torch

from mrl.algorithms.losses import AGGREGATIONS, loss_counts, token_weights
from mrl.algorithms.masks import (
    full_mask,
    hit_limit,
    loss_mask,
    masked,
    masked_row_sums,
    response_mask,
    spread,
    tokens_per_row,
)
from mrl.types import Ragged


@pytest.mark.parametrize(
    ("ids", "stops", "length", "expected"),
    [
        ([5, 6, 0, 0], {2}, 2, [1, 1, 0, 0]),  # no stop token: only the length tells
        ([7, 106, 0, 0], {1, 106}, 2, [1, 1, 0, 0]),  # a secondary stop id
        ([7, 2, 2, 2], {2}, 4, [1, 1, 0, 0]),  # padding is the stop id
        ([7, 8, 9, 5], {2}, 4, [1, 1, 1, 1]),
        ([2, 8, 9, 5], {2}, 4, [1, 0, 0, 0]),
        ([0, 0, 0, 0], {2}, 0, [0, 0, 0, 0]),
    ],
)
def test_the_mask_ends_with_the_first_of_any_stop_id(ids, stops, length, expected):
    mask = response_mask(torch.tensor([ids]), stops, torch.tensor([length]))
    assert mask.int().tolist() == [expected]


@pytest.mark.parametrize(
    ("ids", "stops", "expected"),
    [
        ([5, 6], {2}, False),  # ended early by other means
        ([5, 6, 7, 8], {2}, True),
        ([5, 6, 7, 106], {1, 106}, False),
        ([], {2}, False),
    ],
)
def test_only_a_response_at_the_limit_without_a_stop_token_is_truncated(ids, stops, expected):
    assert hit_limit(ids, stops, max_tokens=4) is expected


def test_unscored_rows_leave_the_loss_whole():
    mask = loss_mask(full_mask(torch.tensor([2, 0, 3])), torch.tensor([False, True, True]))
    assert mask.values.tolist() == [False, False, True, True, True]
    assert loss_counts(mask) == (3, 1)


def test_masking_stops_values_and_gradients():
    values = torch.tensor([1.0, float("nan"), float("inf")], requires_grad=True)
    masked(values, torch.tensor([True, False, False])).exp().sum().backward()
    assert values.grad.tolist() == pytest.approx([2.71828, 0.0, 0.0])


@pytest.mark.parametrize("kept", [(True, True, True), (True, False, True), (False, False, False)])
def test_masks_of_whole_rows_count_and_sum_as_their_values(kept):
    lengths = torch.tensor([2, 3, 0])
    short = loss_mask(full_mask(lengths), torch.tensor(kept))
    long = Ragged(short.values, lengths)
    numbers, column = torch.tensor([1.5, float("nan"), 3.0]), Ragged(torch.arange(5.0), lengths)
    column.values[2:] = float("nan") if not kept[1] else 1.0
    assert torch.equal(tokens_per_row(short), tokens_per_row(long))
    assert torch.equal(masked_row_sums(column, short), masked_row_sums(column, long))
    assert torch.equal(loss_mask(short, ~torch.tensor(kept)).values, torch.zeros(5).bool())
    found, wanted = spread(numbers, short), spread(numbers, long)
    assert found.values.dtype == wanted.values.dtype == torch.float32
    assert torch.equal(found.values.nan_to_num(9.0), wanted.values.nan_to_num(9.0))
    assert loss_counts(short) == loss_counts(long)
    for mode in AGGREGATIONS:
        weights = [token_weights(m, mode, *loss_counts(m)).values for m in (short, long)]
        assert torch.equal(*weights)
