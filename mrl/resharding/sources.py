"""Which holder sends each cell to each rank that needs it.

The rank itself first, then its node; of the holders left, all send equally much: the ranks that
need a cell are laid end to end and the line is cut into one length for each holder, longer for
those that have less to send so far. So each rank has few peers, and large boxes are shared out by
tensors or by rows. Small boxes travel with others: they come from a peer already open, if any.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from mrl.resharding.geometry import Geometry
from mrl.resharding.layout import num_rows


@dataclass(frozen=True, slots=True)
class Stream:
    """Rows [start, stop) of a cell for one rank, in tensors [first, last) of a geometry."""

    rank: int
    piece: int  # of the destination
    first: int
    last: int
    start: int
    stop: int

    @property
    def rows(self) -> int:
        """Count the rows over all tensors."""
        return (self.last - self.first) * (self.stop - self.start)


@dataclass(frozen=True, slots=True)
class Route:
    """A stream and where it comes from."""

    cell: int
    stream: Stream
    src_rank: int
    src_piece: int  # of the source; of the destination where `forwarded`
    forwarded: bool = False


@dataclass(frozen=True, slots=True)
class _Demand:
    """Streams of one cell that the same ranks can send."""

    geometry: int
    cell: int
    holders: tuple[int, ...]
    streams: tuple[Stream, ...]


def choose_sources(
    geometries: Sequence[Geometry],
    node_of_rank: Mapping[int, int],
    small_bytes: int,
    forward_within_node: bool,
) -> list[list[Route]]:
    """List the routes of each geometry; together they fill every taker's part of every cell.

    Boxes under `small_bytes` are not split. With `forward_within_node` a cell that several ranks
    of a node need and none holds is sent to the node once; the rank that gets it (or its part of
    it) passes it on.
    """
    choice = _Choice(geometries, node_of_rank, small_bytes)
    demands = [
        demand
        for index, geometry in enumerate(geometries)
        for cell in range(len(geometry.cells))
        for demand in choice.demands(index, cell, forward_within_node)
    ]
    # those with the least choice first, so that the others can make up for them
    for demand in sorted(demands, key=lambda demand: (choice.small(demand), len(demand.holders))):
        if choice.small(demand):
            choice.join_open_peers(demand)
        else:
            choice.share_out(demand)
    return choice.routes


class _Choice:
    """The routes chosen so far, and what each rank has to send for them."""

    def __init__(
        self, geometries: Sequence[Geometry], node_of_rank: Mapping[int, int], small_bytes: int
    ) -> None:
        self.routes: list[list[Route]] = [[] for _ in geometries]
        self._geometries = geometries
        self._node = node_of_rank
        self._small_bytes = small_bytes
        self._sent: dict[int, int] = defaultdict(int)  # to other nodes or without forwarding
        self._entered: dict[int, int] = defaultdict(int)  # received to be passed on
        self._peers: dict[int, set[int]] = defaultdict(set)

    def small(self, demand: _Demand) -> bool:
        """Tell whether a demand is too small to be split."""
        geometry = self._geometries[demand.geometry]
        cell = geometry.cells[demand.cell]
        return geometry.row_bytes(cell) * num_rows(cell.box) < self._small_bytes

    def demands(self, index: int, place: int, forward: bool) -> Iterator[_Demand]:
        """Route what is held already, and list the rest by who may send it."""
        geometry = self._geometries[index]
        cell = geometry.cells[place]
        tensors, rows = len(geometry.tensors), num_rows(cell.box)
        holders_of_node: dict[int, list[int]] = defaultdict(list)
        for rank in cell.holders:
            holders_of_node[self._node.get(rank, 0)].append(rank)
        streams_to_node: dict[int, list[Stream]] = defaultdict(list)
        for rank, piece in cell.takers:
            stream = Stream(rank, piece, 0, tensors, 0, rows)
            if rank in cell.holders:
                self.routes[index].append(Route(place, stream, rank, cell.holders[rank]))
            else:
                streams_to_node[self._node.get(rank, 0)].append(stream)
        distant: list[Stream] = []
        for node, streams in streams_to_node.items():
            if node in holders_of_node:
                yield _Demand(index, place, tuple(holders_of_node[node]), tuple(streams))
            elif forward and len(streams) > 1:
                distant += self._enter(index, place, streams)
            else:
                distant += streams
        if distant:
            yield _Demand(index, place, tuple(cell.holders), tuple(distant))

    def _enter(self, index: int, place: int, streams: Sequence[Stream]) -> list[Stream]:
        """Choose which ranks of a node receive a cell from outside, and route it on from there."""
        geometry = self._geometries[index]
        cell = geometry.cells[place]
        row_bytes = geometry.row_bytes(cell)
        total = streams[0].rows * row_bytes
        entries = []
        if row_bytes * num_rows(cell.box) < self._small_bytes:
            entry = min(streams, key=lambda stream: (self._entered[stream.rank], stream.rank))
            entries.append(entry)
        else:
            lengths = level([self._entered[stream.rank] for stream in streams], total)
            for which, part in deal(streams[:1], lengths, row_bytes, self._small_bytes):
                entry = streams[which]
                entries.append(replace(part, rank=entry.rank, piece=entry.piece))
        for entry in entries:
            self._entered[entry.rank] += entry.rows * row_bytes
            for stream in streams:
                if stream.rank == entry.rank and stream.piece == entry.piece:
                    continue
                onward = replace(entry, rank=stream.rank, piece=stream.piece)
                route = Route(place, onward, entry.rank, entry.piece, forwarded=True)
                self.routes[index].append(route)
                self._open(entry.rank, stream.rank)
        return entries

    def share_out(self, demand: _Demand) -> None:
        """Give every holder an equal part, counting what it sends already."""
        row_bytes = self._row_bytes(demand)
        total = sum(stream.rows for stream in demand.streams) * row_bytes
        lengths = level([self._sent[rank] for rank in demand.holders], total)
        for which, part in deal(demand.streams, lengths, row_bytes, self._small_bytes):
            self._route(demand, demand.holders[which], part, row_bytes)

    def join_open_peers(self, demand: _Demand) -> None:
        """Take each stream from the least loaded holder, of those already open if there are any."""
        row_bytes = self._row_bytes(demand)
        for stream in demand.streams:
            peers = self._peers[stream.rank]
            holders = [rank for rank in demand.holders if rank in peers] or demand.holders
            source = min(holders, key=lambda rank: (self._sent[rank], rank))
            self._route(demand, source, stream, row_bytes)

    def _route(self, demand: _Demand, source: int, stream: Stream, row_bytes: int) -> None:
        piece = self._geometries[demand.geometry].cells[demand.cell].holders[source]
        self.routes[demand.geometry].append(Route(demand.cell, stream, source, piece))
        self._sent[source] += stream.rows * row_bytes
        self._open(source, stream.rank)

    def _open(self, a: int, b: int) -> None:
        self._peers[a].add(b)
        self._peers[b].add(a)

    def _row_bytes(self, demand: _Demand) -> int:
        geometry = self._geometries[demand.geometry]
        return geometry.row_bytes(geometry.cells[demand.cell])


def level(loads: Sequence[int], total: int) -> list[int]:
    """Divide `total` so that load plus part comes out as equal as possible.

    >>> level([0, 4, 10], 6)
    [5, 1, 0]
    """
    order = sorted(range(len(loads)), key=lambda index: loads[index])
    filled, base = 0, 0  # how many of the lowest are raised, and the sum of their loads
    for index in order:
        if filled and loads[index] * filled - base >= total:
            break
        filled += 1
        base += loads[index]
    height, rest = divmod(base + total, filled)
    parts = [0] * len(loads)
    for place, index in enumerate(order[:filled]):
        parts[index] = height - loads[index] + (place < rest)
    return parts


def deal(
    streams: Sequence[Stream], lengths: Sequence[int], row_bytes: int, least_bytes: int
) -> Iterator[tuple[int, Stream]]:
    """Cut streams, laid end to end, into consecutive `lengths` (bytes); yield (which, part).

    With fewer streams than lengths a stream is cut between tensors, so that each tensor has one
    source; otherwise inside each tensor, so that all sources are busy all the time. No part is
    smaller than `least_bytes`, so lengths are met to about that.
    """
    ends = iter([(which, length) for which, length in enumerate(lengths) if length > 0])
    inside = len(streams) >= sum(length > 0 for length in lengths)
    which, left = next(ends)
    for stream in streams:
        need = stream.rows * row_bytes
        if need <= left:  # the usual case
            left -= need
            yield which, stream
            continue
        parts: list[tuple[int, int]] = []
        while need:
            if not left:
                which, left = next(ends)
            part = min(left, need)
            parts.append((which, part))
            left -= part
            need -= part
        worth = [part for part in parts if part[1] >= least_bytes]
        worth = worth or [max(parts, key=lambda part: part[1])]
        if len(worth) == 1:
            yield worth[0][0], stream
        elif inside and min(part for _, part in worth) >= least_bytes * (
            stream.last - stream.first
        ):
            yield from _cut_inside(stream, worth)
        else:
            yield from _cut_between(stream, worth, row_bytes, least_bytes)


def _cut_inside(stream: Stream, parts: Sequence[tuple[int, int]]) -> Iterator[tuple[int, Stream]]:
    total, done, start = sum(part for _, part in parts), 0, stream.start
    for which, part in parts:
        done += part
        stop = stream.start + round(done * (stream.stop - stream.start) / total)
        if stop > start:
            yield which, replace(stream, start=start, stop=stop)
        start = stop


def _cut_between(
    stream: Stream, parts: Sequence[tuple[int, int]], row_bytes: int, least_bytes: int
) -> Iterator[tuple[int, Stream]]:
    rows = stream.stop - stream.start
    total, done = sum(part for _, part in parts), 0
    first, start = stream.first, stream.start  # where the next part begins
    for which, part in parts:
        done += part
        tensors, row = divmod(round(done * stream.rows / total), rows)
        if row * row_bytes < least_bytes:
            row = 0
        elif (rows - row) * row_bytes < least_bytes:
            tensors, row = tensors + 1, 0
        last, stop = stream.first + tensors, stream.start + row
        for corner in _rectangles(stream, (first, start), (last, stop)):
            yield which, corner
        first, start = last, stop


def _rectangles(stream: Stream, begin: tuple[int, int], end: tuple[int, int]) -> Iterator[Stream]:
    """Cover the way from (tensor, row) to (tensor, row): part of a tensor, whole ones, part."""
    (first, start), (last, stop) = begin, end
    if first == last:
        if start < stop:
            yield replace(stream, first=first, last=first + 1, start=start, stop=stop)
        return
    if start > stream.start:
        yield replace(stream, first=first, last=first + 1, start=start)
        first += 1
    if first < last:
        yield replace(stream, first=first, last=last)
    if stop > stream.start:
        yield replace(stream, first=last, last=last + 1, stop=stop)
