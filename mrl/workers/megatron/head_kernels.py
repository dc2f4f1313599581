"""Triton kernels of the language-model head: one pass over the logits of a chunk each.

They compute what the functions of the same names in `fused_head` do, on float32 statistics.
M tokens, n columns of a chunk.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# Elements of a row that a program holds at a time. 16 a thread: two loads of 16 bytes are under
# way in each, and registers leave room for three programs on a multiprocessor.
_BLOCK = 4096
_WARPS = 8


@triton.jit(do_not_specialize=["tokens"])
def _update_statistics(
    statistics: tl.tensor,
    logits: tl.tensor,
    targets: tl.tensor,
    tokens: tl.tensor,
    row_stride: tl.tensor,
    columns: tl.tensor,
    inverse_temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    statistics += row
    offsets = tl.arange(0, BLOCK)
    # One maximum for the row and sums for each lane: one reduction a block, one exp an element.
    peak = tl.load(statistics)
    totals = tl.where(offsets == 0, tl.load(statistics + tokens), 0.0)
    weighted = tl.where(offsets == 0, tl.load(statistics + 2 * tokens), 0.0)
    for start in range(0, columns, BLOCK):
        inside = start + offsets < columns
        values = tl.load(logits + start + offsets, mask=inside, other=0.0).to(tl.float32)
        scaled = values * inverse_temperature
        highest = tl.maximum(peak, tl.max(tl.where(inside, scaled, peak), axis=0))
        drop = peak - highest
        kept = tl.exp(drop)
        shifted = scaled - highest
        weights = tl.where(inside, tl.exp(shifted), 0.0)
        weighted = kept * (weighted + drop * totals) + weights * shifted
        totals = kept * totals + weights
        peak = highest
    tl.store(statistics, peak)
    tl.store(statistics + tokens, tl.sum(totals, axis=0))
    tl.store(statistics + 2 * tokens, tl.sum(weighted, axis=0))
    target = tl.load(targets + row)
    mine = (target >= 0) & (target < columns)
    chosen = tl.load(logits + target, mask=mine, other=0.0).to(tl.float32)
    tl.store(statistics + 3 * tokens, chosen * inverse_temperature, mask=mine)


@triton.jit(do_not_specialize=["tokens"])
def _logits_to_gradients(
    logits: tl.tensor,
    targets: tl.tensor,
    rows: tl.tensor,
    tokens: tl.tensor,
    row_stride: tl.tensor,
    columns: tl.tensor,
    inverse_temperature: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    rows += row
    peak = tl.load(rows)
    log_normaliser = tl.load(rows + tokens)
    entropy = tl.load(rows + 2 * tokens)
    by_log_prob = tl.load(rows + 3 * tokens)
    by_entropy = tl.load(rows + 4 * tokens)
    target = tl.load(targets + row)
    offsets = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < columns
    values = tl.load(logits + offsets, mask=inside, other=0.0).to(tl.float32)
    log_probs = values * inverse_temperature - peak - log_normaliser
    gradients = -tl.exp(log_probs) * (by_log_prob + by_entropy * (log_probs + entropy))
    gradients += tl.where(offsets == target, by_log_prob, 0.0)
    gradients *= inverse_temperature
    tl.store(logits + offsets, gradients.to(logits.dtype.element_ty), mask=inside)


def _block(columns: int) -> int:
    return min(triton.next_power_of_2(columns), _BLOCK)


def update_statistics(
    statistics: Tensor, logits: Tensor, targets: Tensor, temperature: float
) -> None:
    """Take more logits [M, n] into running statistics, float32 [4, M], in place."""
    tokens, columns = logits.shape
    _check(statistics, logits, targets)
    _update_statistics[(tokens,)](
        statistics,
        logits,
        targets,
        tokens,
        logits.stride(0),
        columns,
        1.0 / temperature,
        BLOCK=_block(columns),
        num_warps=_WARPS,
    )


def logits_to_gradients(logits: Tensor, targets: Tensor, rows: Tensor, temperature: float) -> None:
    """Turn logits [M, n] into the gradient by them, in place; `rows` float32 [5, M]."""
    tokens, columns = logits.shape
    _check(rows, logits, targets)
    block = _block(columns)
    _logits_to_gradients[(tokens, triton.cdiv(columns, block))](
        logits,
        targets,
        rows,
        tokens,
        logits.stride(0),
        columns,
        1.0 / temperature,
        BLOCK=block,
        num_warps=_WARPS,
    )


def _check(rows: Tensor, logits: Tensor, targets: Tensor) -> None:
    assert rows.is_contiguous() and rows.dtype == torch.float32
    assert logits.stride(1) == 1 and targets.is_contiguous()
