"""Even shares of work for data-parallel ranks."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass


def sequence_cost(length: int, hidden_size: int = 4096) -> float:
    """Weigh one sequence of a packed batch: linear layers, and causal attention.

    A dense layer costs about 24 h^2 FLOPs a token outside attention and 2 h s^2 for the causal
    half of attention; divided by 2 h that is 12 h s + s^2.
    """
    return 12.0 * hidden_size * length + float(length) ** 2


@dataclass(frozen=True, slots=True)
class _Share:
    cost: float
    items: tuple[int, ...]


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
    shares = _difference(_first_partitions(costs, parts, parts if equal_counts else 1), parts)
    return [sorted(share.items) for share in shares]


def _first_partitions(costs: Sequence[float], parts: int, chunk: int) -> list[list[_Share]]:
    """Start with one partition for each `chunk` items of similar cost, an item a part."""
    order = sorted(range(len(costs)), key=lambda i: (-costs[i], i))
    partitions = []
    for start in range(0, len(order), chunk):
        shares = [_Share(costs[i], (i,)) for i in order[start : start + chunk]]
        partitions.append(shares + [_Share(0.0, ())] * (parts - len(shares)))
    return partitions


def _difference(partitions: list[list[_Share]], parts: int) -> list[_Share]:
    """Merge the two most uneven partitions, heavy with light, until one is left."""
    heap = [(p[-1].cost - p[0].cost, number, p) for number, p in enumerate(partitions)]
    heapq.heapify(heap)
    for number in range(len(heap), 2 * len(heap) - 1):
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [
            _Share(a.cost + b.cost, a.items + b.items)
            for a, b in zip(first, reversed(second), strict=True)
        ]
        merged.sort(key=lambda share: (-share.cost, share.items))  # heaviest first
        heapq.heappush(heap, (merged[-1].cost - merged[0].cost, number, merged))
    return heap[0][2]
