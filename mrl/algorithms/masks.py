"""Which response tokens are real, and which take part in the loss."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from mrl.types import Ragged, Repeated


def response_mask(response_ids: Tensor, stop_ids: Collection[int], lengths: Tensor) -> Tensor:
    """Mark the real tokens of padded responses: up to the first stop token, that one included.

    Args:
        response_ids: [N, W] int64, padded on the right.
        stop_ids: every id that ends a response; models have several.
        lengths: [N] int64, tokens that were really generated. Without a stop token only this
            tells text from padding.

    Returns:
        [N, W] bool.
    """
    width = response_ids.shape[1]
    stops = torch.isin(response_ids, torch.tensor(sorted(stop_ids), dtype=response_ids.dtype))
    earlier = stops.long().cumsum(1) - stops.long()  # stop tokens strictly before each position
    return (earlier == 0) & (torch.arange(width) < lengths[:, None])


def hit_limit(response_ids: Sequence[int], stop_ids: Collection[int], max_tokens: int) -> bool:
    """Tell whether a response was cut at the limit rather than ended by a stop token."""
    ended = bool(response_ids) and response_ids[-1] in stop_ids
    return len(response_ids) >= max_tokens and not ended


def full_mask(lengths: Tensor) -> Ragged:
    """Mark every token of rows of these lengths [N]."""
    return Repeated(torch.ones(len(lengths), dtype=torch.bool), lengths)


def loss_mask(mask: Ragged, kept: Tensor) -> Ragged:
    """Take whole rows out of the loss: those not `kept` [N] bool, such as unscored ones."""
    if isinstance(mask, Repeated):
        return Repeated(mask.numbers & kept, mask.lengths)
    return mask.with_values(mask.values & kept[mask.row_index()])


def masked(values: Tensor, mask: Tensor) -> Tensor:
    """Replace masked positions [T] by 0 without reading them.

    `values * mask` would let NaN and inf through, and 0 * inf would spoil the gradient.
    """
    return values.masked_fill(~mask, 0)


def tokens_per_row(mask: Ragged) -> Tensor:
    """Count the unmasked tokens of each row, [N] int64."""
    return mask.row_sums(torch.int64)


def spread(numbers: Tensor, mask: Ragged) -> Ragged:
    """Give every unmasked token its row's number [N], and the others 0; float32."""
    if isinstance(mask, Repeated):
        return Repeated(masked(numbers, mask.numbers).float(), mask.lengths)
    return mask.with_values(masked(numbers[mask.row_index()], mask.values).float())


def masked_row_sums(column: Ragged, mask: Ragged) -> Tensor:
    """Sum the unmasked values of each row, [N] float64."""
    if isinstance(mask, Repeated):
        return masked(column.row_sums(torch.float64), mask.numbers)
    return column.with_values(masked(column.values, mask.values)).row_sums(torch.float64)


def sums_of_rows(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum tokens [T] over rows of these lengths [N] on the CPU; gives [N] where the tokens are."""
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(values.device)
    return torch.zeros(len(lengths), dtype=values.dtype, device=values.device).index_add(
        0, rows, values
    )


def to_tokens(numbers: Tensor, lengths: Tensor) -> Tensor:
    """Repeat a number of each row [N] over its tokens, [T]; lengths [N] are on the CPU."""
    rows = torch.repeat_interleave(torch.arange(len(lengths)), lengths).to(numbers.device)
    return numbers[rows]
