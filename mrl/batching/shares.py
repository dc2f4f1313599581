"""From a batch to what each data-parallel part runs: its rows, cut into micro-batches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mrl.batching.balance import balance
from mrl.batching.packing import cut
from mrl.types import Batching, Cuts


@dataclass(frozen=True, slots=True)
class Share:
    """The rows of one data-parallel part, and its micro-batches as positions among them."""

    rows: tuple[int, ...]
    cuts: Cuts


def shares(
    lengths: Sequence[int],
    costs: Sequence[float],
    batching: Batching,
    parts: int,
    multiple_of: int = 1,
    balanced: bool = True,
) -> list[Share]:
    """Share rows out by cost and cut each share; all run the same number of micro-batches.

    A part that is short of work gets empty micro-batches. With fixed micro-batches the parts have
    equally many rows where those divide.

    Args:
        lengths: tokens of each row.
        costs: work of each row, as `sequence_cost` weighs it.
        batching: how a part is cut.
        parts: number of data-parallel parts.
        multiple_of: the number of micro-batches divides by this, as interleaved pipelines need.
        balanced: by cost; otherwise in the rows' order.
    """
    if balanced:
        equal = batching.micro_batch_size is not None and len(lengths) % parts == 0
        rows = balance(costs, parts, equal_counts=equal)
    else:
        edges = [part * len(lengths) // parts for part in range(parts + 1)]
        rows = [list(range(*edges[part : part + 2])) for part in range(parts)]
    sizes = [[lengths[i] for i in own] for own in rows]
    first, most = [], 1
    for own in sizes:  # the heaviest first: what they need, the others mostly get at once
        first.append(cut(own, batching, most))
        most = len(first[-1])
    most += -most % multiple_of
    return [
        Share(
            tuple(own),
            tuple(map(tuple, found if len(found) == most else cut(size, batching, most))),
        )
        for own, size, found in zip(rows, sizes, first, strict=True)
    ]


def imbalance(costs: Sequence[float], shared: Sequence[Share]) -> float:
    """Give the heaviest part's work over the mean of the parts; 1 is perfect, or no work at all."""
    loads = [sum(costs[i] for i in share.rows) for share in shared]
    return max(loads) * len(loads) / sum(loads) if sum(loads) else 1.0
