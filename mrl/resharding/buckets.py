"""When each copy happens: buckets that every rank walks in the same order.

The routes of tensors with one geometry are one table, a *block*; of a single copy no more is
stored than the number of its bucket.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, zip_longest

import numpy as np
import numpy.typing as npt

from mrl.resharding.geometry import Geometry
from mrl.resharding.layout import FILE_RANK
from mrl.resharding.sources import Route

Table = npt.NDArray[np.int32]
Counts = npt.NDArray[np.int64]

# columns of a table; a piece is named by its place among the tensor's pieces in its layout, a
# forwarded row's source piece by its place in the destination layout
CELL, START, STOP, SRC, SRC_PIECE, DST, DST_PIECE, FORWARDED = range(8)


@dataclass(frozen=True, slots=True)
class Block:
    """The same routes for tensors [first, last) of a geometry."""

    geometry: int
    first: int
    last: int
    table: Table  # [routes, 8]
    sizes: Counts  # [routes], bytes in one tensor
    buckets: Table  # [routes, last - first]


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of all ranks by their index in `ranks`, in the destination's dtype."""

    ranks: Mapping[int, int]  # rank: index
    local: Counts
    sent: Counts
    received: Counts
    peak: Counts  # of the largest bucket, both ways


def fill_buckets(
    geometries: Sequence[Geometry], routes: Sequence[Sequence[Route]], bucket_bytes: int
) -> tuple[list[Block], int, Traffic]:
    """Give every route a bucket; returns the blocks, the number of buckets and the totals.

    In one bucket a rank sends at most `bucket_bytes` and receives as many, forwarding included;
    larger boxes are split by rows, though never a row. Tensors are taken in model order within a
    pipeline stage and from all stages in turn, so that all senders are busy; a copy goes to the
    first bucket with room at both ends. What a rank forwards it received in an earlier bucket.
    """
    blocks = [
        block
        for index, geometry in enumerate(geometries)
        for block in _blocks(index, geometry, routes[index], bucket_bytes // 2)
    ]
    senders, receivers = _Lanes(bucket_bytes), _Lanes(bucket_bytes)
    steps = [_Steps(block) for block in blocks]
    for which, tensor in _spread_over_senders(geometries, blocks):
        steps[which].place(tensor, senders, receivers)
    num_buckets = max((int(block.buckets.max()) + 1 for block in blocks), default=0)
    return blocks, num_buckets, _traffic(blocks, senders, receivers)


def _blocks(
    index: int, geometry: Geometry, routes: Sequence[Route], most_bytes: int
) -> Iterator[Block]:
    """Make tables of a geometry's routes, one for each run of tensors with the same routes."""
    row_bytes = [geometry.row_bytes(cell) for cell in geometry.cells]
    rows, firsts, lasts = [], [], []
    for route in routes:
        stream = route.stream
        step = stream.stop - stream.start
        if route.src_rank not in (stream.rank, FILE_RANK):  # else it is no message
            step = max(1, min(step, most_bytes // row_bytes[route.cell]))
        ends = (route.src_rank, route.src_piece, stream.rank, stream.piece, route.forwarded)
        for start in range(stream.start, stream.stop, step):
            rows.append((route.cell, start, min(start + step, stream.stop), *ends))
            firsts.append(stream.first)
            lasts.append(stream.last)
    table, first_of, last_of = np.array(rows, np.int32), np.array(firsts), np.array(lasts)
    sizes = np.array(row_bytes, np.int64)[table[:, CELL]] * (table[:, STOP] - table[:, START])
    for first, last in pairwise(sorted({*firsts, *lasts})):
        chosen = (first_of <= first) & (first < last_of)
        buckets = np.zeros((int(chosen.sum()), last - first), np.int32)
        yield Block(index, first, last, table[chosen], sizes[chosen], buckets)


def _spread_over_senders(
    geometries: Sequence[Geometry], blocks: Sequence[Block]
) -> list[tuple[int, int]]:
    """Order (block, tensor) so that neighbours come from different senders.

    In model order the first buckets would all come from the first pipeline stage while the other
    stages' links stay idle.
    """
    groups: dict[bytes, list[tuple[int, int, int]]] = defaultdict(list)
    for which, block in enumerate(blocks):
        places = geometries[block.geometry].places
        group = groups[np.unique(block.table[:, SRC]).tobytes()]
        group += [(places[tensor], which, tensor) for tensor in range(block.first, block.last)]
    placed = [
        (turn / len(group), order, which, tensor)
        for order, group in enumerate(groups.values())
        for turn, (_, which, tensor) in enumerate(sorted(group))
    ]
    return [(which, tensor) for _, _, which, tensor in sorted(placed)]


class _Lanes:
    """How full each bucket is for each rank, one way."""

    def __init__(self, bucket_bytes: int) -> None:
        self._bucket_bytes = bucket_bytes
        self.fill: dict[int, list[int]] = defaultdict(list)
        self._next: dict[int, list[int]] = defaultdict(list)  # itself, or a later one where full

    def next_open(self, rank: int, bucket: int) -> int:
        """Find the first bucket from `bucket` on that has not been found full."""
        following = self._next[rank]
        first = bucket
        while bucket < len(following) and following[bucket] != bucket:
            bucket = following[bucket]
        if first < len(following):
            following[first] = bucket  # so that the way is short next time
        return bucket

    def has_room(self, rank: int, bucket: int, size: int) -> bool:
        """Tell whether a message fits, and remember a bucket as full where it does not.

        An empty bucket takes any: a row may be larger than a bucket.
        """
        fill = self.fill[rank]
        if bucket >= len(fill) or not fill[bucket] or fill[bucket] + size <= self._bucket_bytes:
            return True
        self._next[rank][bucket] = bucket + 1
        return False

    def add(self, rank: int, bucket: int, size: int) -> None:
        """Put a message into a bucket."""
        fill, following = self.fill[rank], self._next[rank]
        while len(fill) <= bucket:
            following.append(len(fill))
            fill.append(0)
        fill[bucket] += size


class _Steps:
    """The routes of a block in the order in which they happen."""

    def __init__(self, block: Block) -> None:
        self._block = block
        table = block.table
        self._ends = list(
            zip(table[:, SRC].tolist(), table[:, DST].tolist(), block.sizes.tolist(), strict=True)
        )
        onward = table[:, FORWARDED] == 1
        still = ((table[:, SRC] == table[:, DST]) | (table[:, SRC] == FILE_RANK)) & ~onward
        self._still = np.flatnonzero(still)
        self._direct = np.flatnonzero(~still & ~onward).tolist()
        # each forwarded row with the rows that bring what it passes on
        self._onward = [(row, self._arrivals(row)) for row in np.flatnonzero(onward).tolist()]

    def _arrivals(self, row: int) -> list[int]:
        table = self._block.table
        onward = table[row]
        same = (table[:, CELL] == onward[CELL]) & (table[:, FORWARDED] == 0)
        same &= (table[:, DST] == onward[SRC]) & (table[:, DST_PIECE] == onward[SRC_PIECE])
        same &= (table[:, START] < onward[STOP]) & (onward[START] < table[:, STOP])
        return [int(found) for found in np.flatnonzero(same)]

    def place(self, tensor: int, senders: _Lanes, receivers: _Lanes) -> None:
        """Choose the buckets of one tensor; what stays on a rank goes with the first of them."""
        chosen: dict[int, int] = {}
        for row in self._direct:
            chosen[row] = self._first_fit(row, 0, senders, receivers)
        for row, arrivals in self._onward:
            earliest = 1 + max(chosen[arrival] for arrival in arrivals)
            chosen[row] = self._first_fit(row, earliest, senders, receivers)
        column = self._block.buckets[:, tensor - self._block.first]
        column[list(chosen)] = list(chosen.values())
        if self._direct:
            column[self._still] = chosen[self._direct[0]]

    def _first_fit(self, row: int, bucket: int, senders: _Lanes, receivers: _Lanes) -> int:
        src, dst, size = self._ends[row]
        while True:
            bucket = senders.next_open(src, bucket)
            open_too = receivers.next_open(dst, bucket)
            if open_too != bucket:
                bucket = open_too
            elif senders.has_room(src, bucket, size) and receivers.has_room(dst, bucket, size):
                senders.add(src, bucket, size)
                receivers.add(dst, bucket, size)
                return bucket


def _traffic(blocks: Sequence[Block], senders: _Lanes, receivers: _Lanes) -> Traffic:
    ends = [np.unique(block.table[:, (SRC, DST)]) for block in blocks]
    found = np.unique(np.concatenate(ends)).tolist() if ends else []
    ranks = {rank: index for index, rank in enumerate(found)}
    local, sent, received, peak = (np.zeros(len(ranks), np.int64) for _ in range(4))
    for rank, index in ranks.items():
        out, into = senders.fill.get(rank, []), receivers.fill.get(rank, [])
        sent[index], received[index] = sum(out), sum(into)
        peak[index] = max(map(sum, zip_longest(out, into, fillvalue=0)), default=0)
    for block in blocks:
        src, dst = block.table[:, SRC], block.table[:, DST]
        still = (block.table[:, FORWARDED] == 0) & ((src == dst) | (src == FILE_RANK))
        for row in np.flatnonzero(still).tolist():
            # files are read, not exchanged
            counts = received if src[row] == FILE_RANK else local
            counts[ranks[int(dst[row])]] += block.sizes[row] * (block.last - block.first)
    return Traffic(ranks, local, sent, received, peak)
