from __future__ import annotations

import pytest
import torch

from mrl.algorithms.losses import loss_counts
from mrl.algorithms.masks import full_mask, hit_limit, loss_mask, masked, response_mask


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
