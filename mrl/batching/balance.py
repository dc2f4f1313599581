"""Even shares of work for data-parallel ranks."""

from __future__ import annotations

import heapq
from bisect import insort
from collections.abc import Sequence

import numpy as np
from torch import Tensor


def sequence_cost(length: int, hidden_size: int = 4096) -> float:
    """Weigh one sequence of a packed batch: linear layers, and causal attention.

    A dense layer costs about 24 h^2 FLOPs a token outside attention and 2 h s^2 for the causal
    half of attention; divided by 2 h that is 12 h s + s^2.
    """
    return 12.0 * hidden_size * length + float(length) ** 2


def sequence_costs(lengths: Tensor, hidden_size: int) -> list[float]:
    """Weigh the sequences of these lengths [N] each as `sequence_cost` does."""
    tokens = lengths.double()
    return (12.0 * hidden_size * tokens + tokens.square()).tolist()


# A share of a partition: its cost, negative so that the heaviest sorts first, and its items.
_Share = tuple[float, tuple[int, ...]]
# The shares of a partition that hold items, heaviest first; as many again as are missing are empty.
_Partition = list[_Share]


def balance(costs: Sequence[float], parts: int, equal_counts: bool) -> list[list[int]]:
    """Split items into parts of nearly equal cost (Karmarkar and Karp 1982, largest differencing).

    The same input gives the same answer on every rank; indices within a part ascend.

    Args:
        costs: one an item, not negative.
        parts: number of data-parallel ranks.
        equal_counts: give every part the same number of items, as fixed micro-batches need.

    Returns:
        `parts` lists of item indices; together they hold each item once.

    Raises:
        ValueError: parts is below 1, a cost is negative or NaN, or equal counts cannot be had.
    """
    if parts < 1:
        raise ValueError(f"cannot balance over {parts} parts, expected at least 1")
    bad = [i for i, cost in enumerate(costs) if not cost >= 0]
    if bad:
        raise ValueError(f"item {bad[0]} has cost {costs[bad[0]]}, expected 0 or more")
    if equal_counts and len(costs) % parts:
        lower = len(costs) // parts * parts
        raise ValueError(
            f"{len(costs)} items do not split into {parts} equal counts; "
            f"nearest legal numbers are {lower} and {lower + parts}"
        )
    if not costs:
        return [[] for _ in range(parts)]
    order = np.argsort(-np.array(costs, np.float64), kind="stable").tolist()
    items: list[_Share] = [(-costs[i], (i,)) for i in order]
    chunks = len(items) // parts if equal_counts else _even_chunks([-c for c, _ in items], parts)
    shares = _difference(_first_partitions(items, chunks, parts), parts)
    return [sorted(own) for _, own in shares] + [[] for _ in range(parts - len(shares))]


def _even_chunks(costs: Sequence[float], parts: int) -> int:
    """Count the leading chunks of `parts` items that differencing would form of single items.

    `costs` descend. Items that outweigh how uneven all chunks before them are meet one another.
    """
    uneven = 0.0
    for number in range(len(costs) // parts):
        start, stop = number * parts, (number + 1) * parts
        if not uneven < costs[stop - 1]:
            return number
        uneven = max(uneven, costs[start] - costs[stop - 1])
    return len(costs) // parts


def _first_partitions(items: list[_Share], chunks: int, parts: int) -> list[tuple[int, _Partition]]:
    """Start with whole chunks of similar items, one a part, and the rest alone; numbered."""
    count = len(items)
    # as if each chunk had been merged of its items
    whole = [
        (count + (k + 1) * (parts - 1) - 1 if parts > 1 else k, items[k * parts : (k + 1) * parts])
        for k in range(chunks)
    ]
    return whole + [(i, [items[i]]) for i in range(chunks * parts, count)]


def _difference(partitions: list[tuple[int, _Partition]], parts: int) -> _Partition:
    """Merge the two most uneven partitions, heavy with light, until one is left."""
    heap = [(_evenness(p, parts), number, p) for number, p in partitions]
    heapq.heapify(heap)
    number = max(number for number, _ in partitions) + 1
    first = heapq.heappop(heap)[2]
    while heap:
        merged = _merge(first, heapq.heappop(heap)[2], parts)
        first = heapq.heappushpop(heap, (_evenness(merged, parts), number, merged))[2]
        number += 1
    return first


def _merge(first: _Partition, second: _Partition, parts: int) -> _Partition:
    """Join the heaviest share of one with the lightest of the other, and so on.

    Most shares meet an empty one: they are left as they are, so that an item costs the time of
    its insertion and not that of all parts. `first` may be changed and given back.
    """
    if len(second) == 1 and len(first) < parts:
        insort(first, second[0])
        return first
    alone = min(len(first), parts - len(second))
    lightest = second[parts - len(first) : parts - alone][::-1]
    met = zip(first[alone:], lightest, strict=True)
    merged = [(cost + other, items + others) for (cost, items), (other, others) in met]
    merged += first[:alone] + second[: parts - len(first)]
    merged.sort()  # of sorted runs: nearly linear
    return merged


def _evenness(partition: _Partition, parts: int) -> float:
    """Give how far the lightest share is below the heaviest, negative: the most uneven first."""
    lightest = partition[-1][0] if len(partition) == parts else 0.0
    return partition[0][0] - lightest
