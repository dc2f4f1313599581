"""Micro-batches by count or by token budget."""

from __future__ import annotations

import heapq
import warnings
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from mrl.types import Batching


def fixed(lengths: Sequence[int], micro_size: int) -> list[list[int]]:
    """Cut rows, in order, into micro-batches of `micro_size` samples; the last may be shorter.

    Raises:
        ValueError: micro_size is below 1.
    """
    if micro_size < 1:
        raise ValueError(f"micro-batch size is {micro_size}, expected at least 1")
    return [
        list(range(start, min(start + micro_size, len(lengths))))
        for start in range(0, len(lengths), micro_size)
    ]


def by_tokens(
    lengths: Sequence[int], max_tokens: int, min_count: int = 1, multiple_of: int = 1
) -> list[list[int]]:
    """Pack rows into few micro-batches of at most `max_tokens` tokens each.

    Ranks of a data-parallel group run the same number of micro-batches: `shares` takes the largest
    count over the ranks and asks again with that as `min_count`. A micro-batch that is left empty
    is run with zero weight.

    A row longer than the budget runs alone, and one warning says so.

    Args:
        lengths: tokens of each row.
        max_tokens: the budget.
        min_count: give at least so many micro-batches, empty ones where rows run out.
        multiple_of: make their number divide by this, as interleaved pipelines need.

    Returns:
        Micro-batches of row indices, ascending in each; every row once.

    Raises:
        ValueError: an argument is below 1, or a length is negative.
    """
    named = {"max_tokens": max_tokens, "min_count": min_count, "multiple_of": multiple_of}
    for name, value in named.items():
        if value < 1:
            raise ValueError(f"{name} is {value}, expected at least 1")
    rows = np.array(lengths, np.int64)
    if (rows < 0).any():
        raise ValueError(f"row lengths must not be negative, found {rows.min()}")
    _warn_over_long(rows, max_tokens)
    order = (-rows).argsort(kind="stable").tolist()

    def rounded(count: int) -> int:
        count = max(count, min_count)
        return count + -count % multiple_of

    # Even micro-batches keep pipelines and memory level; but only a packing is sure to keep the
    # cap. The fewest that could hold all come first: many short rows mostly fill them.
    fewest = rounded(-(-int(np.minimum(rows, max_tokens).sum()) // max_tokens))
    if (even := _longest_to_lightest(lengths, order, fewest, max_tokens)) is not None:
        return even
    packed = _first_fit_decreasing(lengths, order, max_tokens)
    count = rounded(len(packed))
    if count > fewest:
        even = _longest_to_lightest(lengths, order, count, max_tokens)
    return packed + [[] for _ in range(count - len(packed))] if even is None else even


def _first_fit_decreasing(
    lengths: Sequence[int], order: Sequence[int], max_tokens: int
) -> list[list[int]]:
    """Put each row, in `order` from the longest, into the first micro-batch that has room.

    Batches that are not opened yet have all of their room. The most room below each node of a
    binary tree finds the first that fits in the logarithm of their number.
    """
    leaves = 1 << max(len(lengths) - 1, 0).bit_length()
    room = [max_tokens] * (2 * leaves)  # node i has the children 2 i and 2 i + 1
    batches: list[list[int]] = []
    for index in order:
        length = lengths[index]
        node = leaves + len(batches) if length > max_tokens else 1
        while node < leaves:
            node = 2 * node if room[2 * node] >= length else 2 * node + 1
        if node - leaves == len(batches):
            batches.append([])
        batches[node - leaves].append(index)
        room[node] -= length
        while node > 1:
            node //= 2
            left, right = room[2 * node], room[2 * node + 1]
            most = left if left > right else right
            if room[node] == most:
                break
            room[node] = most
    return [sorted(batch) for batch in batches]


def _longest_to_lightest(
    lengths: Sequence[int], order: Sequence[int], count: int, max_tokens: int
) -> list[list[int]] | None:
    """Put each row, in `order` from the longest, where the fewest tokens (and rows) are.

    None where that puts more than `max_tokens` together.
    """
    batches: list[list[int]] = [[] for _ in range(count)]
    heap = [(0, 0, b) for b in range(count)]
    for index in order:
        tokens, rows, batch = heap[0]
        tokens += lengths[index]
        if rows and tokens > max_tokens:
            return None
        batches[batch].append(index)
        heapq.heapreplace(heap, (tokens, rows + 1, batch))
    return [sorted(batch) for batch in batches]


def _warn_over_long(lengths: npt.NDArray[np.int64], max_tokens: int) -> None:
    over = int((lengths > max_tokens).sum())
    if over:
        warnings.warn(
            f"{over} rows exceed the budget of {max_tokens} tokens a micro-batch (longest: "
            f"{lengths.max()}) and run alone; "
            "raise the *_max_token_len_per_gpu key to at least that",
            stacklevel=3,
        )


def cut(
    lengths: Sequence[int], batching: Batching, min_count: int = 1, multiple_of: int = 1
) -> list[list[int]]:
    """Cut a rank's rows into micro-batches of row indices, of which some may be empty.

    There are at least `min_count`, and a multiple of `multiple_of`.
    """
    if batching.max_tokens is not None:
        return by_tokens(lengths, batching.max_tokens, min_count, multiple_of)
    assert batching.micro_batch_size is not None
    batches = fixed(lengths, batching.micro_batch_size)
    count = max(len(batches), min_count)
    count += -count % multiple_of
    return batches + [[] for _ in range(count - len(batches))]
