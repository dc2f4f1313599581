"""The list of slice copies that turns one layout into another.

Pure and deterministic: every rank computes the same plan from the same layouts, without a process
group. Each destination element is written exactly once, from the same rank where it can, else
from the same node, else from the holder that sends least; so a rank receives exactly the bytes
that it needs and does not hold.
"""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from mrl.resharding.layout import (
    FILE_RANK,
    Box,
    Layout,
    Piece,
    TensorInfo,
    intersect,
    subtract,
    subtract_all,
    translate,
    volume,
    whole,
)

DEFAULT_BUCKET_BYTES = 256 * 1024 * 1024


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

    @property
    def is_local(self) -> bool:
        """Tell whether both ends are one rank."""
        return self.src_rank == self.dst_rank


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one rank in the destination's dtype; `peak` is the largest bucket, both ways."""

    local: int = 0
    sent: int = 0
    received: int = 0
    peak: int = 0


@dataclass(frozen=True, slots=True)
class ReshardPlan:
    """All copies from `src` to `dst`, in buckets that every rank walks in the same order."""

    src: Layout
    dst: Layout
    buckets: tuple[tuple[Copy, ...], ...]
    traffic: Mapping[int, Traffic]  # ranks that take part
    _digest: str

    @property
    def copies(self) -> tuple[Copy, ...]:
        """List the copies of all buckets in order."""
        return tuple(copy for bucket in self.buckets for copy in bucket)

    def local_bytes(self, rank: int) -> int:
        """Count the bytes that a rank copies within itself."""
        return self._of(rank).local

    def sent_bytes(self, rank: int) -> int:
        """Count the bytes that a rank sends to others."""
        return self._of(rank).sent

    def received_bytes(self, rank: int) -> int:
        """Count the bytes that a rank receives from others."""
        return self._of(rank).received

    def peak_buffer_bytes(self, rank: int) -> int:
        """Bound the staging of a rank: the bytes that it sends and receives in one bucket."""
        return self._of(rank).peak

    def _of(self, rank: int) -> Traffic:
        return self.traffic[rank] if rank in self.traffic else Traffic()

    def floor_bytes(self, rank: int) -> int:
        """Count the bytes that a rank needs and does not hold, from the layouts alone."""
        held: dict[str, list[Box]] = defaultdict(list)
        for piece in self.src.pieces_of(rank):
            held[piece.tensor].append(piece.box)
        return sum(
            sum(map(volume, subtract_all(piece.box, held[piece.tensor])))
            * self.dst.tensors[piece.tensor].item_bytes
            for piece in self.dst.pieces_of(rank)
        )

    def digest(self) -> str:
        """Give the SHA-256 of the copies in bucket order: ranks compare it before the first run."""
        return self._digest


def plan(src: Layout, dst: Layout, bucket_bytes: int = DEFAULT_BUCKET_BYTES) -> ReshardPlan:
    """Plan the copies that fill every piece of `dst` from `src`.

    A bucket holds at most `bucket_bytes` sent and at most as many received for any rank; larger
    boxes are split by rows. Raises ValueError where the two layouts do not describe the same
    tensors, where a destination element has no source, or where one would be written twice.
    """
    check_same_tensors(src, dst)
    check_written_once(dst)
    copies = _copies(src, dst, bucket_bytes)
    buckets, traffic = _fill_buckets(copies, dst.tensors, bucket_bytes)
    return ReshardPlan(src, dst, buckets, traffic, _digest(buckets))


def _digest(buckets: Iterable[Iterable[Copy]]) -> str:
    sha = hashlib.sha256()
    for bucket in buckets:
        for c in bucket:
            line = (
                f"{c.tensor}|{c.src_rank}|{c.src_param}|{c.src_box}|"
                f"{c.dst_rank}|{c.dst_param}|{c.dst_box}\n"
            )
            sha.update(line.encode())
        sha.update(b"--\n")
    return sha.hexdigest()


def check_same_tensors(src: Layout, dst: Layout) -> None:
    """Raise ValueError unless both layouts have the same tensors with the same shapes."""
    only_src = sorted(src.tensors.keys() - dst.tensors.keys())
    only_dst = sorted(dst.tensors.keys() - src.tensors.keys())
    problems = []
    if only_src:
        problems.append(f"only {src.name} has {', '.join(only_src)}")
    if only_dst:
        problems.append(f"only {dst.name} has {', '.join(only_dst)}")
    for name in src.tensors.keys() & dst.tensors.keys():
        a, b = src.tensors[name].shape, dst.tensors[name].shape
        if a != b:
            problems.append(f"{name} is {a} in {src.name} and {b} in {dst.name}")
    if problems:
        raise ValueError(f"plan {src.name} to {dst.name}: " + "; ".join(sorted(problems)))


def check_written_once(layout: Layout) -> None:
    """Raise ValueError where two pieces of a layout share an element of a parameter.

    Also where a piece leaves its tensor, or a tensor has elements that no rank holds.
    """
    by_param: dict[tuple[int, str], list[Piece]] = defaultdict(list)
    by_tensor: dict[str, dict[Box, int]] = {name: {} for name in layout.tensors}
    for piece in layout.pieces:
        by_param[piece.rank, piece.param].append(piece)
        by_tensor[piece.tensor].setdefault(piece.box, piece.rank)
    for (rank, param), pieces in by_param.items():
        _check_disjoint(layout.name, rank, param, pieces)
    for name, boxes in by_tensor.items():
        full = whole(layout.tensors[name].shape)
        for box, rank in boxes.items():
            if intersect(box, full) != box:
                raise ValueError(f"{layout.name}: rank {rank} has {name}{box}, shape is {full}")
        missing = subtract_all(full, list(boxes))
        if missing:
            raise ValueError(f"{layout.name}: no rank holds {name}{missing[0]}")


def _check_disjoint(name: str, rank: int, param: str, pieces: list[Piece]) -> None:
    open_pieces: list[Piece] = []  # those that reach past the start of the next one
    for piece in sorted(pieces, key=lambda piece: piece.local):
        row = piece.local[0][0]
        open_pieces = [other for other in open_pieces if other.local[0][1] > row]
        for other in open_pieces:
            if intersect(piece.local, other.local) is not None:
                raise ValueError(
                    f"{name}: rank {rank} {param} is written twice: "
                    f"{other.tensor}{other.box} and {piece.tensor}{piece.box} overlap"
                )
        open_pieces.append(piece)


def _copies(src: Layout, dst: Layout, bucket_bytes: int) -> list[Copy]:
    holders: dict[str, dict[Box, list[Piece]]] = defaultdict(lambda: defaultdict(list))
    for piece in src.pieces:
        holders[piece.tensor][piece.box].append(piece)
    takers: dict[str, list[Piece]] = defaultdict(list)
    for piece in dst.pieces:
        takers[piece.tensor].append(piece)
    choose = _Chooser({**src.node_of_rank, **dst.node_of_rank})
    copies = []
    for tensor in _spread_over_senders(dst.tensors, holders):
        item_bytes = dst.tensors[tensor].item_bytes
        cells: dict[Box, list[tuple[Box, list[Piece]]]] = {}
        for taker in takers[tensor]:
            if taker.box not in cells:
                cells[taker.box] = _cells(taker, holders[tensor], src.name)
            for box, pieces in cells[taker.box]:
                source = choose(pieces, taker.rank, volume(box) * item_bytes)
                for part in _rows(box, bucket_bytes // item_bytes):
                    copies.append(_copy(tensor, part, source, taker))
    return copies


def _copy(tensor: str, box: Box, source: Piece, taker: Piece) -> Copy:
    return Copy(
        tensor,
        source.rank,
        source.param,
        translate(box, source.box, source.local),
        taker.rank,
        taker.param,
        translate(box, taker.box, taker.local),
        volume(box),
    )


def _cells(
    taker: Piece, holders: Mapping[Box, Sequence[Piece]], src_name: str
) -> list[tuple[Box, list[Piece]]]:
    """Cut a destination box into cells, each with all the source pieces that contain it."""
    cells: list[tuple[Box, list[Piece]]] = [(taker.box, [])]
    for box, pieces in holders.items():
        if intersect(taker.box, box) is None:
            continue
        refined: list[tuple[Box, list[Piece]]] = []
        for cell, found in cells:
            common = intersect(cell, box)
            if common is None:
                refined.append((cell, found))
            else:
                refined.append((common, [*found, *pieces]))
                refined.extend((rest, found) for rest in subtract(cell, box))
        cells = refined
    for cell, found in cells:
        if not found:
            raise ValueError(
                f"{taker.tensor}{cell}: rank {taker.rank} {taker.param} needs it, "
                f"no rank of {src_name} holds it"
            )
    return cells


class _Chooser:
    """Pick the sender among replicas and remember how much each has to send."""

    def __init__(self, node_of_rank: Mapping[int, int]) -> None:
        self._node = node_of_rank
        self._load: dict[int, int] = defaultdict(int)

    def __call__(self, pieces: Iterable[Piece], dst_rank: int, num_bytes: int) -> Piece:
        node = self._node.get(dst_rank, 0)
        best = min(
            pieces,
            key=lambda piece: (
                piece.rank != dst_rank,
                self._node.get(piece.rank, 0) != node,
                self._load[piece.rank],
                piece.rank,
            ),
        )
        if best.rank != dst_rank:
            self._load[best.rank] += num_bytes
        return best


def _spread_over_senders(
    tensors: Iterable[str], holders: Mapping[str, Mapping[Box, Sequence[Piece]]]
) -> list[str]:
    """Order tensors so that neighbours come from different senders.

    In model order the first buckets would all come from the first pipeline stage while the other
    stages' links stay idle.
    """
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in tensors:
        ranks = {piece.rank for pieces in holders[name].values() for piece in pieces}
        groups[tuple(sorted(ranks))].append(name)
    placed = [
        (index / len(names), order, name)
        for order, (_, names) in enumerate(sorted(groups.items()))
        for index, name in enumerate(names)
    ]
    return [name for _, _, name in sorted(placed, key=lambda item: item[:2])]


def _rows(box: Box, max_elements: int) -> Iterator[Box]:
    """Split a box by rows into parts of at most `max_elements` (at least one row)."""
    count = volume(box)
    if count <= max_elements:
        yield box
        return
    start, stop = box[0]
    step = max(1, max_elements * (stop - start) // count)
    for row in range(start, stop, step):
        yield ((row, min(row + step, stop)), *box[1:])


def _fill_buckets(
    copies: Sequence[Copy], tensors: Mapping[str, TensorInfo], bucket_bytes: int
) -> tuple[tuple[tuple[Copy, ...], ...], dict[int, Traffic]]:
    buckets: list[tuple[Copy, ...]] = []
    local: dict[int, int] = defaultdict(int)
    totals: list[dict[int, int]] = [defaultdict(int), defaultdict(int)]  # sent, received
    peak: dict[int, int] = defaultdict(int)
    bucket: list[Copy] = []
    fill: list[dict[int, int]] = [defaultdict(int), defaultdict(int)]

    def close() -> None:
        for rank in fill[0].keys() | fill[1].keys():
            peak[rank] = max(peak[rank], fill[0].get(rank, 0) + fill[1].get(rank, 0))
        buckets.append(tuple(bucket))
        bucket.clear()
        fill[0].clear()
        fill[1].clear()

    for copy in copies:
        num_bytes = copy.num_elements * tensors[copy.tensor].item_bytes
        if copy.is_local:
            local[copy.dst_rank] += num_bytes
            bucket.append(copy)
            continue
        ends = (copy.src_rank, copy.dst_rank)
        # files are read, not exchanged: they fill no buffer of their own
        full = any(
            fill[way][rank] + num_bytes > bucket_bytes
            for way, rank in enumerate(ends)
            if rank != FILE_RANK
        )
        if full and bucket:
            close()
        bucket.append(copy)
        for way, rank in enumerate(ends):
            fill[way][rank] += num_bytes
            totals[way][rank] += num_bytes
    if bucket:
        close()
    ranks = sorted(local.keys() | totals[0].keys() | totals[1].keys())
    traffic = {
        rank: Traffic(
            local.get(rank, 0), totals[0].get(rank, 0), totals[1].get(rank, 0), peak.get(rank, 0)
        )
        for rank in ranks
    }
    return tuple(buckets), traffic
