"""Run a plan on live parameters, bucket by bucket.

Rows that lie together in memory are sent from and received into the live parameters; everything
else goes through staging buffers that are allocated once. The sender converts, so the wire
carries the destination's dtype. While a bucket is exchanged, the next one is packed and the last
one unpacked, and on a GPU the copies that stay on the rank run beside them on a stream of their
own. Nothing waits for the device, and nothing is freed or grown.
"""

from __future__ import annotations

import hashlib
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.resharding.coverage import padding_of, view_of
from mrl.resharding.fused import FusedCopies, Pair
from mrl.resharding.layout import FILE_RANK
from mrl.resharding.planner import Copy, ReshardPlan
from mrl.resharding.transports import Finish, Message, Transport

# smaller copies to one peer share a message: their latency would outweigh the packing
PACK_BELOW_BYTES = 1024 * 1024
_ALIGNMENT = 16  # bytes, of messages in the staging buffers

_View = Callable[[Copy], Tensor]


@dataclass(frozen=True, slots=True)
class SyncStats:
    """What one run moved, on this rank."""

    bytes_moved: int  # received from other ranks
    bytes_floor: int  # needed and not held: the least possible
    local_bytes: int  # copied within the rank
    seconds: float  # host time; on a GPU the copies may still be under way


@dataclass(frozen=True, slots=True)
class _Wire:
    """Copies that travel as one message."""

    peer: int
    copies: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class _Share:
    """A rank's part in one bucket of the plan."""

    local: tuple[Copy, ...]
    sends: tuple[_Wire, ...]
    recvs: tuple[_Wire, ...]
    forwards: bool  # some of `sends` pass on what earlier buckets brought


@dataclass(frozen=True, slots=True)
class _Bound:
    """The messages of a share, tied to memory."""

    pack: FusedCopies
    sends: tuple[Message, ...]
    recvs: tuple[Message, ...]
    unpack: FusedCopies


class Resharder:
    """One rank's part of a plan, tied to its parameters.

    `src_params` and `dst_params` hold this rank's parameters by the names in the two layouts
    (empty where the rank has no such role). All ranks of the transport construct it together:
    they compare what each pair of them is going to exchange, in order. Raises ValueError where
    that differs, where parameters and layouts disagree, or where a destination's dtype is not the
    one that the layout states.
    """

    def __init__(
        self,
        plan: ReshardPlan,
        rank: int,
        src_params: Mapping[str, Tensor],
        dst_params: Mapping[str, Tensor],
        transport: Transport,
    ) -> None:
        self.plan = plan
        self.rank = rank
        self._src, self._dst = src_params, dst_params
        self._transport = transport
        self._floor = plan.floor_bytes(rank)
        buckets = plan.share(rank)
        _check_order(plan, rank, buckets, transport)
        padding_of(plan.src, rank, src_params)
        self._padding = padding_of(plan.dst, rank, dst_params)
        self._check_dtypes()
        self._shares = [self._share(bucket) for bucket in buckets]
        # every rank may receive, send or both; staging lies where the destination is
        devices = [param.device for param in (*dst_params.values(), *src_params.values())]
        self._device = devices[0] if devices else torch.device("cpu")
        on_gpu = self._device.type == "cuda"
        self._beside = torch.cuda.Stream(self._device) if on_gpu else None
        self._lanes = [torch.cuda.Stream(self._device) for _ in range(2)] if on_gpu else []
        # two buckets under way where their staging fits what the plan allows for one
        self.depth = 2 if sum(map(sum, self._staged(2))) <= plan.peak_buffer_bytes(rank) else 1
        self._stages = [
            (self._empty(sent), self._empty(received))
            for sent, received in self._staged(self.depth)
        ]
        self._local = FusedCopies([])
        # launching hundreds of local copies one by one would take longer than the first of them
        self._graph: torch.cuda.CUDAGraph | None = None
        self._bound: list[_Bound] = []
        self._addresses: tuple[int, ...] = ()
        self._under_way: deque[tuple[_Bound, Finish]] = deque()

    @property
    def staging_bytes(self) -> int:
        """Count the bytes of the staging buffers."""
        return sum(stage.numel() for stages in self._stages for stage in stages)

    @torch.no_grad()
    def run(self) -> SyncStats:
        """Move all buckets; every rank of the plan calls it together."""
        start = time.perf_counter()
        self.bind()
        for index in range(len(self._shares)):
            self.start(index)
            self.end(all_but=self.depth - 1)
        self.finish()
        return self.stats(time.perf_counter() - start)

    def stats(self, seconds: float) -> SyncStats:
        """Report one run that took `seconds`."""
        return SyncStats(
            self.plan.received_bytes(self.rank),
            self._floor,
            self.plan.local_bytes(self.rank),
            seconds,
        )

    def bind(self) -> None:
        """Take views of the parameters, again where they moved, and zero the padding."""
        params = (*self._src.values(), *self._dst.values())
        addresses = tuple(param.data_ptr() for param in params)
        if addresses != self._addresses or len(self._bound) != len(self._shares):
            self._padding = padding_of(self.plan.dst, self.rank, self._dst)
            self._local = FusedCopies(
                [(self._target(c), self._source(c)) for share in self._shares for c in share.local],
                self._lanes,
            )
            self._bound = [
                self._bind(share, *self._stages[index % self.depth])
                for index, share in enumerate(self._shares)
            ]
            self._graph = None
            self._addresses = addresses
        if self._padding:  # an engine that slept lost it
            torch._foreach_zero_(self._padding)
        self._under_way.clear()

    def start(self, index: int) -> None:
        """Start a bucket's exchange, beside the first one also the local copies.

        Buckets are started in order, by every rank.
        """
        if self._shares[index].forwards:
            self.end(all_but=0)
        bound = self._bound[index]
        bound.pack.run()
        finish = self._transport.exchange(bound.sends, bound.recvs)
        self._under_way.append((bound, finish))
        if index == 0:
            self._start_local()

    def end(self, all_but: int) -> None:
        """Unpack the oldest buckets under way, at most `depth` - 1 of which may stay."""
        while len(self._under_way) > all_but:
            bound, finish = self._under_way.popleft()
            finish()
            bound.unpack.run()

    def finish(self) -> None:
        """End all that is under way."""
        self.end(all_but=0)
        if self._beside is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._beside)

    def remapped(self) -> None:
        """Take note that memory came back at its addresses but elsewhere: copies are recorded anew.

        A recorded copy may hold more of its memory than the address.
        """
        self._graph = None

    def _start_local(self) -> None:
        if self._local.is_empty:  # trainer and engine apart: torch warns of an empty graph
            return
        if self._beside is None:
            self._local.run()
            return
        self._beside.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._beside):
            if self._graph is None:
                self._graph = torch.cuda.CUDAGraph()
                self._graph.capture_begin(capture_error_mode="thread_local")
                self._local.run()
                self._graph.capture_end()
            self._graph.replay()

    def _check_dtypes(self) -> None:
        for piece in self.plan.dst.pieces_of(self.rank):
            expected = self.plan.dst.tensors[piece.tensor].dtype
            found = self._dst[piece.param].dtype
            if found != getattr(torch, expected):
                raise ValueError(
                    f"rank {self.rank} {piece.param}: dtype is {found}, layout "
                    f"{self.plan.dst.name} says {expected}"
                )

    def _bytes(self, copy: Copy) -> int:
        return copy.num_elements * self.plan.dst.tensors[copy.tensor].item_bytes

    def _dtype(self, copy: Copy) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.plan.dst.tensors[copy.tensor].dtype)
        return dtype

    def _share(self, bucket: Sequence[Copy]) -> _Share:
        if any(c.src_rank == FILE_RANK for c in bucket):
            raise ValueError("a plan from checkpoint files is run by hf_files.load_into")
        outgoing = [c for c in bucket if c.src_rank == self.rank != c.dst_rank]
        incoming = [c for c in bucket if c.dst_rank == self.rank != c.src_rank]
        return _Share(
            tuple(c for c in bucket if c.is_local),
            self._wires(outgoing, [c.dst_rank for c in outgoing]),
            self._wires(incoming, [c.src_rank for c in incoming]),
            any(c.forwarded for c in outgoing),
        )

    def _wires(self, copies: Sequence[Copy], peers: Sequence[int]) -> tuple[_Wire, ...]:
        """Group copies into messages by a rule that both ends see alike."""
        small: dict[int, list[Copy]] = defaultdict(list)
        wires = []
        for copy, peer in zip(copies, peers, strict=True):
            if self._bytes(copy) < PACK_BELOW_BYTES:
                small[peer].append(copy)
            else:
                wires.append(_Wire(peer, (copy,)))
        packed = [_Wire(peer, tuple(group)) for peer, group in sorted(small.items())]
        return (*packed, *wires)

    def _source(self, copy: Copy) -> Tensor:
        params = self._dst if copy.forwarded else self._src
        return view_of(params[copy.src_param], copy.src_box)

    def _target(self, copy: Copy) -> Tensor:
        return view_of(self._dst[copy.dst_param], copy.dst_box)

    def _in_place(self, wire: _Wire, view: Tensor) -> bool:
        return (
            len(wire.copies) == 1
            and view.is_contiguous()
            and view.dtype == self._dtype(wire.copies[0])
            and view.device == self._device
        )

    def _staged(self, depth: int) -> list[tuple[int, int]]:
        """Give the bytes to send from and to receive into, for buckets that take turns."""

        def largest(turn: int, wires: Callable[[_Share], Sequence[_Wire]], view: _View) -> int:
            shares = self._shares[turn::depth]
            return max((sum(self._size(w, view) for w in wires(s)) for s in shares), default=0)

        return [
            (
                largest(turn, lambda share: share.sends, self._source),
                largest(turn, lambda share: share.recvs, self._target),
            )
            for turn in range(depth)
        ]

    def _size(self, wire: _Wire, view: _View) -> int:
        if self._in_place(wire, view(wire.copies[0])):
            return 0
        return _aligned(self._offsets(wire)[-1], _ALIGNMENT)

    def _empty(self, num_bytes: int) -> Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device=self._device)

    def _offsets(self, wire: _Wire) -> list[int]:
        """Give the byte offset of each copy in its message, then the message's length."""
        offsets, end = [], 0
        for copy in wire.copies:
            start = _aligned(end, self._dtype(copy).itemsize)
            offsets.append(start)
            end = start + self._bytes(copy)
        return [*offsets, end]

    def _bind(self, share: _Share, send_stage: Tensor, recv_stage: Tensor) -> _Bound:
        sends, packed = self._messages(share.sends, self._source, send_stage)
        recvs, unpacked = self._messages(share.recvs, self._target, recv_stage)
        return _Bound(
            pack=FusedCopies(packed),
            sends=sends,
            recvs=recvs,
            unpack=FusedCopies([(live, staged) for staged, live in unpacked]),
        )

    def _messages(
        self, wires: Sequence[_Wire], view: _View, stage: Tensor
    ) -> tuple[tuple[Message, ...], tuple[Pair, ...]]:
        """Give a bucket's messages, and (staged, live) views of what is not sent in place."""
        messages, pairs, base = [], [], 0
        for wire in wires:
            first = view(wire.copies[0])
            if self._in_place(wire, first):
                messages.append(Message(wire.peer, first.view(-1).view(torch.uint8)))
                continue
            *offsets, end = self._offsets(wire)
            for copy, offset in zip(wire.copies, offsets, strict=True):
                live = view(copy)
                part = stage[base + offset : base + offset + self._bytes(copy)]
                pairs.append((part.view(self._dtype(copy)).view(live.shape), live))
            messages.append(Message(wire.peer, stage[base : base + end]))
            base += _aligned(end, _ALIGNMENT)
        return tuple(messages), tuple(pairs)


@torch.no_grad()
def run_together(resharders: Sequence[Resharder]) -> list[SyncStats]:
    """Run the ranks of one plan that share this process (`transports.InProcess`), in step."""
    start = time.perf_counter()
    for resharder in resharders:
        resharder.bind()
    depth = min(resharder.depth for resharder in resharders)
    for index in range(resharders[0].plan.num_buckets):
        for resharder in resharders:
            resharder.start(index)
        for resharder in resharders:
            resharder.end(all_but=depth - 1)
    for resharder in resharders:
        resharder.finish()
    seconds = time.perf_counter() - start
    return [resharder.stats(seconds) for resharder in resharders]


def _check_order(
    plan: ReshardPlan, rank: int, buckets: Iterable[Iterable[Copy]], transport: Transport
) -> None:
    """Raise ValueError unless each pair of ranks lists the same copies in the same buckets."""
    hashes = {peer: hashlib.sha256() for peer in (rank, *plan.peers(rank))}
    for index, bucket in enumerate(buckets):
        for copy in bucket:
            peer = copy.dst_rank if copy.src_rank == rank else copy.src_rank
            hashes[peer].update(f"{index} {copy}\n".encode())
    mine = {peer: sha.hexdigest() for peer, sha in hashes.items()}
    found = transport.gather((rank, plan.digest(), mine))
    lists = {other: theirs for other, _, theirs in found}
    differ = sorted({other for other, digest, _ in found if digest != found[0][1]})
    if differ:
        raise ValueError(
            f"rank {rank}: ranks {differ} computed different plans from rank {found[0][0]}'s"
        )
    wrong = [
        (a, b)
        for a in sorted(lists)
        for b in sorted(lists[a])
        if b in lists and lists[b].get(a) != lists[a][b]
    ]
    if wrong:
        raise ValueError(
            f"rank {rank}: ranks {wrong[0][0]} and {wrong[0][1]} would exchange their copies in "
            f"different orders"
        )


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
