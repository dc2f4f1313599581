"""Give every rank the whole model, a bucket at a time, and let the engine's own loader cut it.

What other trainers do: a baseline to measure against and a second opinion for tests. Needs
two buckets of all ranks' rows and the whole tensors of one, and receives, on each rank, all that
it does not hold.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.resharding.coverage import view_of
from mrl.resharding.fused import FusedCopies
from mrl.resharding.layout import Box, Layout, Piece, subtract_all, translate, volume, whole
from mrl.resharding.planner import DEFAULT_BUCKET_BYTES, ReshardPlan
from mrl.resharding.sync import SyncStats
from mrl.resharding.transports import Finish, Message, Transport

Load = Callable[[Iterable[tuple[str, Tensor]]], object]

_ALIGNMENT = 16  # bytes, of tensors in the buffers


@dataclass(frozen=True, slots=True)
class _Part:
    """A box of a tensor and the rank that contributes it."""

    tensor: str
    box: Box  # in the tensor
    rank: int
    param: str
    local: Box  # in the parameter
    offset: int  # bytes, in the rank's row


@dataclass(frozen=True, slots=True)
class _Bucket:
    """Tensors that travel together."""

    tensors: tuple[str, ...]
    parts: tuple[_Part, ...]
    fill: Mapping[int, int]  # bytes that each rank contributes


@dataclass(frozen=True, slots=True)
class _Bound:
    """A bucket tied to memory."""

    pack: FusedCopies
    square: Tensor | None  # [ranks, bytes] where all ranks contribute alike, else None
    messages: tuple[Message, ...]  # one a contributing rank
    unpack: FusedCopies
    tensors: tuple[tuple[str, Tensor], ...]


class GatherSync:
    """One rank's part of an all-gather of the whole model, followed by the engine's loader.

    `load` takes (checkpoint name, whole tensor in the engine's dtype) pairs of one bucket; None
    on a rank without an engine. The tensors are valid until it returns. All ranks of the
    transport construct it together.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        src_params: Mapping[str, Tensor],
        load: Load | None,
        transport: Transport,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
    ) -> None:
        self.plan, self.rank = plan, rank
        self._src, self._load, self._transport = src_params, load, transport
        # all of the transport take part in a collective, with or without a role
        self._ranks = tuple(sorted({*plan.src.ranks, *plan.dst.ranks, *transport.gather(rank)}))
        self._floor = plan.floor_bytes(rank)
        self._buckets = list(_buckets(plan.src, plan.dst, bucket_bytes))
        self._device = _device_of(src_params)
        sizes = [sum(self._row_bytes(bucket).values()) for bucket in self._buckets]
        whole_bytes = [self._offsets(bucket.tensors)[-1] for bucket in self._buckets]
        self._stages = [self._empty(max(sizes, default=0)) for _ in range(2)]
        self._whole = self._empty(max(whole_bytes, default=0))
        self._bound: list[_Bound] = []
        self._addresses: tuple[int, ...] = ()

    @property
    def staging_bytes(self) -> int:
        """Count the bytes of the buffers."""
        return sum(buffer.numel() for buffer in (*self._stages, self._whole))

    @torch.no_grad()
    def run(self) -> SyncStats:
        """Gather and load all buckets; every rank of the plan calls it together."""
        start = time.perf_counter()
        for _ in self.steps():
            pass
        return self.stats(time.perf_counter() - start)

    def remapped(self) -> None:
        """Do nothing: nothing is recorded."""

    def stats(self, seconds: float) -> SyncStats:
        """Report one run that took `seconds`."""
        received = sum(
            size for bucket in self._buckets for r, size in bucket.fill.items() if r != self.rank
        )
        return SyncStats(received, self._floor, 0, seconds)

    def steps(self) -> Iterator[None]:
        """Run, pausing where ranks that share a process take turns."""
        self._bind()
        under_way: tuple[_Bound, Finish] | None = None
        for bound in self._bound:
            bound.pack.run()
            if bound.square is not None:
                finish = self._transport.all_gather(bound.square, self._ranks, self.rank)
            else:
                finish = self._transport.broadcast(bound.messages, self._ranks, self.rank)
            yield
            if under_way is not None:
                self._end(*under_way)
            yield  # what others have yet to take is not packed over
            under_way = bound, finish
        if under_way is not None:
            self._end(*under_way)

    def _end(self, bound: _Bound, finish: Finish) -> None:
        finish()
        if self._load is not None:
            bound.unpack.run()
            self._load(iter(bound.tensors))

    def _bind(self) -> None:
        addresses = tuple(param.data_ptr() for param in self._src.values())
        if addresses != self._addresses or not self._bound:
            self._bound = [
                self._tie(bucket, self._stages[index % 2])
                for index, bucket in enumerate(self._buckets)
            ]
            self._addresses = addresses

    def _tie(self, bucket: _Bucket, stage: Tensor) -> _Bound:
        sizes = self._row_bytes(bucket)
        used = stage[: sum(sizes.values())]
        rows = dict(zip(sizes, used.split(list(sizes.values())), strict=True))
        tensors = dict(self._whole_tensors(bucket.tensors))
        return _Bound(
            FusedCopies(
                [
                    (self._in_row(part, rows), view_of(self._src[part.param], part.local))
                    for part in bucket.parts
                    if part.rank == self.rank
                ]
            ),
            used.view(len(sizes), -1) if len(set(sizes.values())) == 1 else None,
            tuple(Message(rank, row) for rank, row in rows.items() if row.numel()),
            FusedCopies(
                [
                    (view_of(tensors[part.tensor], part.box), self._in_row(part, rows))
                    for part in bucket.parts
                ]
            ),
            tuple(tensors.items()),
        )

    def _row_bytes(self, bucket: _Bucket) -> dict[int, int]:
        """Give each rank's row: equal ones for one collective where all ranks contribute."""
        fill = {rank: bucket.fill.get(rank, 0) for rank in self._ranks}
        return dict.fromkeys(fill, max(fill.values())) if all(fill.values()) else fill

    def _whole_tensors(self, names: Sequence[str]) -> Iterator[tuple[str, Tensor]]:
        for name, offset in zip(names, self._offsets(names), strict=False):
            info = self.plan.dst.tensors[name]
            flat = self._whole[offset : offset + info.num_bytes]
            yield name, flat.view(getattr(torch, info.dtype)).view(info.shape)

    def _in_row(self, part: _Part, rows: Mapping[int, Tensor]) -> Tensor:
        info = self.plan.dst.tensors[part.tensor]
        size = volume(part.box) * info.item_bytes
        flat = rows[part.rank][part.offset : part.offset + size]
        shape = [stop - start for start, stop in part.box]
        return flat.view(getattr(torch, info.dtype)).view(shape)

    def _offsets(self, names: Sequence[str]) -> list[int]:
        """Give the byte offset of each whole tensor, then their total."""
        offsets = [0]
        for name in names:
            offsets.append(_aligned(offsets[-1] + self.plan.dst.tensors[name].num_bytes))
        return offsets

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)


@torch.no_grad()
def gather_together(syncs: Sequence[GatherSync]) -> list[SyncStats]:
    """Run the ranks of one plan that share this process (`transports.InProcess`), in step."""
    start = time.perf_counter()
    for _ in zip(*(sync.steps() for sync in syncs), strict=True):
        pass
    seconds = time.perf_counter() - start
    return [sync.stats(seconds) for sync in syncs]


def _device_of(params: Mapping[str, Tensor]) -> torch.device:
    for param in params.values():
        return param.device
    if torch.cuda.is_available():  # a rank with an engine only
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _buckets(src: Layout, dst: Layout, bucket_bytes: int) -> Iterator[_Bucket]:
    """Deal tensors into buckets so that each bucket comes from many ranks."""
    pieces: dict[str, list[Piece]] = defaultdict(list)
    for piece in src.pieces:
        pieces[piece.tensor].append(piece)
    load: dict[int, int] = defaultdict(int)
    tensors: list[str] = []
    parts: list[_Part] = []
    fill: dict[int, int] = defaultdict(int)
    size = 0
    for name in _spread(dst.tensors, pieces):
        info = dst.tensors[name]
        if tensors and size + info.num_bytes > bucket_bytes:
            yield _Bucket(tuple(tensors), tuple(parts), dict(fill))
            tensors, parts, size = [], [], 0
            fill.clear()
        tensors.append(name)
        size += info.num_bytes
        for piece, box in _cover(whole(info.shape), pieces[name]):
            rank = min(piece.ranks, key=lambda rank: (load[rank], rank))
            local = translate(box, piece.box, piece.local)
            parts.append(_Part(name, box, rank, piece.param, local, fill[rank]))
            num_bytes = _aligned(volume(box) * info.item_bytes)
            fill[rank] += num_bytes
            load[rank] += num_bytes
    if tensors:
        yield _Bucket(tuple(tensors), tuple(parts), dict(fill))


def _spread(names: Iterable[str], pieces: Mapping[str, Sequence[Piece]]) -> list[str]:
    """Interleave the tensors of the stages: each set of holders at its own even pace."""
    groups: dict[tuple[int, ...], list[str]] = defaultdict(list)
    for name in names:
        groups[tuple(sorted({r for piece in pieces[name] for r in piece.ranks}))].append(name)
    placed = [
        (index / len(group), order, name)
        for order, (_, group) in enumerate(sorted(groups.items()))
        for index, name in enumerate(group)
    ]
    return [name for _, _, name in sorted(placed, key=lambda item: item[:2])]


def _cover(full: Box, pieces: Sequence[Piece]) -> Iterator[tuple[Piece, Box]]:
    """Yield disjoint boxes that make up a tensor, each with the piece that holds it.

    Pieces with one box are one piece of all their ranks.
    """
    ranks: dict[tuple[Box, str, Box], set[int]] = defaultdict(set)
    for piece in pieces:
        ranks[piece.box, piece.param, piece.local].update(piece.ranks)
    done: list[Box] = []
    for (box, param, local), holders in ranks.items():
        piece = Piece(pieces[0].tensor, box, tuple(sorted(holders)), param, local)
        for rest in subtract_all(box, done):
            yield piece, rest
        done.append(box)


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
