"""The list of slice copies that turns one layout into another.

Pure and deterministic: every rank computes the same plan from the same layouts, without a process
group. Each destination element is written exactly once, from the same rank where it can, else
from the same node, else from the holders in equal parts; so a rank receives exactly the bytes
that it needs and does not hold. Copies are listed when a rank asks for its share: a plan itself
is a few tables, whatever the number of ranks and layers.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mrl.resharding.buckets import (
    CELL,
    DST,
    DST_PIECE,
    FORWARDED,
    SRC,
    SRC_PIECE,
    START,
    STOP,
    Block,
    Counts,
    Traffic,
    fill_buckets,
)
from mrl.resharding.gate import check_layouts
from mrl.resharding.geometry import Geometry, geometries
from mrl.resharding.layout import (
    FILE_RANK,
    Box,
    Layout,
    Piece,
    subtract_all,
    take_rows,
    translate,
    volume,
    whole,
)
from mrl.resharding.sources import choose_sources

DEFAULT_BUCKET_BYTES = 256 * 1024 * 1024
# boxes under this part of a bucket are not worth a message of their own (1 MiB of 256)
_SMALL_PART = 256


@dataclass(frozen=True, slots=True)
class Copy:
    """One box moved from a parameter of one rank to a parameter of another (or of the same)."""

    tensor: str
    src_rank: int
    src_param: str
    src_box: Box  # in the source parameter
    dst_rank: int
    dst_param: str
    dst_box: Box  # in the destination parameter
    num_elements: int
    # the source is the sender's destination parameter, filled in an earlier bucket
    forwarded: bool = False

    @property
    def is_local(self) -> bool:
        """Tell whether both ends are one rank."""
        return self.src_rank == self.dst_rank


@dataclass(frozen=True)
class ReshardPlan:
    """All copies from `src` to `dst`, in buckets that every rank walks in the same order.

    Bytes are in the destination's dtype; ranks that take no part have none.
    """

    src: Layout
    dst: Layout
    num_buckets: int
    geometries: Sequence[Geometry]
    blocks: Sequence[Block]
    traffic: Traffic

    def share(self, rank: int) -> tuple[tuple[Copy, ...], ...]:
        """List the copies from, to and within a rank: one tuple a bucket, in one order for all."""
        found: list[tuple[int, int, int, int, Copy]] = []
        for number, block in enumerate(self.blocks):
            mine = (block.table[:, SRC] == rank) | (block.table[:, DST] == rank)
            found += self._copies(number, np.flatnonzero(mine).tolist())
        found.sort(key=lambda item: item[:4])
        buckets: list[list[Copy]] = [[] for _ in range(self.num_buckets)]
        for bucket, _, _, _, copy in found:
            buckets[bucket].append(copy)
        return tuple(map(tuple, buckets))

    @property
    def copies(self) -> Iterator[Copy]:
        """Iterate over the copies of all ranks in the order of the buckets."""
        found = [
            item
            for number, block in enumerate(self.blocks)
            for item in self._copies(number, range(len(block.table)))
        ]
        found.sort(key=lambda item: item[:4])
        return (copy for *_, copy in found)

    def _copies(
        self, number: int, rows: Iterable[int]
    ) -> Iterator[tuple[int, int, int, int, Copy]]:
        """Yield chosen rows of a block for each of its tensors, with what they are sorted by."""
        block = self.blocks[number]
        geometry = self.geometries[block.geometry]
        for row in rows:
            entry, buckets = block.table[row].tolist(), block.buckets[row]
            box = take_rows(geometry.cells[entry[CELL]].box, entry[START], entry[STOP])
            count = volume(box)
            for k in range(block.first, block.last):
                target = geometry.dst[k][entry[DST_PIECE]]
                side = geometry.dst if entry[FORWARDED] else geometry.src
                source = side[k][entry[SRC_PIECE]]
                copy = Copy(
                    target.tensor,
                    entry[SRC],
                    source.param,
                    translate(box, source.box, source.local),
                    entry[DST],
                    target.param,
                    translate(box, target.box, target.local),
                    count,
                    bool(entry[FORWARDED]),
                )
                yield int(buckets[k - block.first]), geometry.places[k], number, row, copy

    def peers(self, rank: int) -> tuple[int, ...]:
        """List the other ranks with which a rank exchanges something, ascending."""
        return tuple(sorted(self._peers.get(rank, ())))

    @cached_property
    def _peers(self) -> Mapping[int, set[int]]:
        peers: dict[int, set[int]] = defaultdict(set)
        for block in self.blocks:
            for a, b in block.table[:, (SRC, DST)].tolist():
                if a not in (b, FILE_RANK):
                    peers[a].add(b)
                    peers[b].add(a)
        return peers

    def local_bytes(self, rank: int) -> int:
        """Count the bytes that a rank copies within itself."""
        return self._of(self.traffic.local, rank)

    def sent_bytes(self, rank: int) -> int:
        """Count the bytes that a rank sends to others, forwarding included."""
        return self._of(self.traffic.sent, rank)

    def received_bytes(self, rank: int) -> int:
        """Count the bytes that a rank receives from others or reads from files."""
        return self._of(self.traffic.received, rank)

    def peak_buffer_bytes(self, rank: int) -> int:
        """Bound the staging of a rank: the bytes that it sends and receives in one bucket."""
        return self._of(self.traffic.peak, rank)

    def _of(self, counts: Counts, rank: int) -> int:
        return int(counts[self.traffic.ranks[rank]]) if rank in self.traffic.ranks else 0

    def floor_bytes(self, rank: int) -> int:
        """Count the bytes that a rank needs and does not hold, from the layouts alone."""
        held = _boxes(self.src.pieces_of(rank))
        return sum(
            self._missing(piece.box, held.get(piece.tensor, ()))
            * self.dst.tensors[piece.tensor].item_bytes
            for piece in self.dst.pieces_of(rank)
        )

    def allgather_bytes(self, rank: int) -> int:
        """Count the bytes of the whole model that a rank does not hold as trainer.

        What an all-gather of all parameters brings to every rank.
        """
        held = _boxes(self.src.pieces_of(rank))
        return sum(
            self._missing(whole(info.shape), held.get(name, ())) * info.item_bytes
            for name, info in self.dst.tensors.items()
        )

    def _missing(self, box: Box, held: tuple[Box, ...]) -> int:
        known = self._volumes
        if (box, held) not in known:
            known[box, held] = sum(map(volume, subtract_all(box, held)))
        return known[box, held]

    @cached_property
    def _volumes(self) -> dict[tuple[Box, tuple[Box, ...]], int]:
        return {}  # layers share boxes

    def digest(self) -> str:
        """Give the SHA-256 of layouts, copies and buckets: ranks compare it before the first run.

        Equal digests mean equal shares on every rank.
        """
        sha = hashlib.sha256()
        for geometry in self.geometries:
            sha.update(repr((geometry.places, geometry.item_bytes)).encode())
            sha.update(repr([cell.box for cell in geometry.cells]).encode())
            for side in (geometry.src, geometry.dst):
                for pieces in side:
                    sha.update(repr([(p.tensor, p.box, p.param, p.local) for p in pieces]).encode())
        for block in self.blocks:
            sha.update(repr((block.geometry, block.first, block.last, len(block.table))).encode())
            sha.update(block.table.tobytes())
            sha.update(block.buckets.tobytes())
        return sha.hexdigest()


def plan(
    src: Layout,
    dst: Layout,
    bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    forward_within_node: bool = False,
) -> ReshardPlan:
    """Plan the copies that fill every piece of `dst` from `src`.

    What a rank sends and receives in one bucket, its staging, is at most `bucket_bytes`, half of
    it each way; larger boxes are split by rows. With `forward_within_node`, what several ranks of
    a node need and none holds is sent to the node once and passed on inside it. Raises ValueError
    where the two layouts do not describe the same tensors, where a destination element has no
    source, or where one would be written twice.
    """
    check_layouts(src, dst)
    cut = geometries(src, dst)
    nodes = {**src.node_of_rank, **dst.node_of_rank}
    routes = choose_sources(cut, nodes, bucket_bytes // _SMALL_PART, forward_within_node)
    blocks, num_buckets, traffic = fill_buckets(cut, routes, bucket_bytes // 2)
    return ReshardPlan(src, dst, num_buckets, cut, blocks, traffic)


def _boxes(pieces: Iterable[Piece]) -> Mapping[str, tuple[Box, ...]]:
    boxes: dict[str, list[Box]] = defaultdict(list)
    for piece in pieces:
        boxes[piece.tensor].append(piece.box)
    return {tensor: tuple(found) for tensor, found in boxes.items()}
