"""Run a plan on live parameters, bucket by bucket.

Rows that lie together in memory are sent from and received into the live parameters; everything
else goes through two staging buffers that are allocated once. The sender converts, so the wire
carries the destination's dtype. Nothing waits for the device, and nothing is freed or grown.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mrl.resharding.coverage import padding_of, view_of
from mrl.resharding.layout import FILE_RANK
from mrl.resharding.planner import Copy, ReshardPlan
from mrl.resharding.transports import Finish, Message, Transport

# smaller copies to one peer share a message: their latency would outweigh the packing
PACK_BELOW_BYTES = 1024 * 1024
_ALIGNMENT = 16  # bytes, of messages in the staging buffers

Pair = tuple[Tensor, Tensor]  # destination, source
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


class _Copies:
    """Tensor copies, contiguous ones of one dtype in a single launch."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        fused = [p for p in pairs if all(t.is_contiguous() for t in p) and p[0].dtype == p[1].dtype]
        self._targets = [target for target, _ in fused]
        self._sources = [source for _, source in fused]
        chosen = {id(target) for target in self._targets}
        self._others = [pair for pair in pairs if id(pair[0]) not in chosen]

    def run(self) -> None:
        """Issue the copies."""
        if self._targets:
            torch._foreach_copy_(self._targets, self._sources)
        for target, source in self._others:
            target.copy_(source)


@dataclass(frozen=True, slots=True)
class _Bound:
    """A share tied to memory."""

    pack: _Copies
    sends: tuple[Message, ...]
    local: _Copies
    recvs: tuple[Message, ...]
    unpack: _Copies


class Resharder:
    """One rank's part of a plan, tied to its parameters.

    `src_params` and `dst_params` hold this rank's parameters by the names in the two layouts
    (empty where the rank has no such role). All ranks of the transport construct it together:
    they compare plan digests. Raises ValueError where ranks planned differently, where parameters
    and layouts disagree, or where a destination's dtype is not the one that the layout states.
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
        digests = transport.gather(plan.digest())
        if len(set(digests)) > 1:
            raise ValueError(f"rank {rank}: ranks computed different plans, digests {digests}")
        padding_of(plan.src, rank, src_params)
        self._padding = padding_of(plan.dst, rank, dst_params)
        self._check_dtypes()
        self._shares = [self._share(bucket) for bucket in plan.buckets]
        # every rank may receive, send or both; staging lies where the destination is
        devices = [param.device for param in (*dst_params.values(), *src_params.values())]
        self._device = devices[0] if devices else torch.device("cpu")
        self._send_stage, self._recv_stage = self._allocate()
        self._bound: list[_Bound] = []
        self._addresses: tuple[int, ...] = ()

    @property
    def staging_bytes(self) -> int:
        """Count the bytes of the staging buffers."""
        return self._send_stage.numel() + self._recv_stage.numel()

    @torch.no_grad()
    def run(self) -> SyncStats:
        """Move all buckets; every rank of the plan calls it together."""
        start = time.perf_counter()
        self.bind()
        for index in range(len(self._shares)):
            self.finish(index, self.begin(index))
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
        if addresses != self._addresses or not self._bound:
            self._padding = padding_of(self.plan.dst, self.rank, self._dst)
            self._bound = [self._bind(share) for share in self._shares]
            self._addresses = addresses
        for view in self._padding:  # an engine that slept lost it
            view.zero_()

    def begin(self, index: int) -> Finish:
        """Pack and start a bucket's exchange, and copy what stays on the rank meanwhile."""
        bound = self._bound[index]
        bound.pack.run()
        finish = self._transport.exchange(bound.sends, bound.recvs)
        bound.local.run()
        return finish

    def finish(self, index: int, finish: Finish) -> None:
        """Wait for a bucket's messages and unpack them."""
        finish()
        self._bound[index].unpack.run()

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
        if any(c.src_rank == FILE_RANK and c.dst_rank == self.rank for c in bucket):
            raise ValueError("a plan from checkpoint files is run by hf_files.load_into")
        outgoing = [c for c in bucket if c.src_rank == self.rank != c.dst_rank]
        incoming = [c for c in bucket if c.dst_rank == self.rank != c.src_rank]
        return _Share(
            tuple(c for c in bucket if c.src_rank == self.rank == c.dst_rank),
            self._wires(outgoing, [c.dst_rank for c in outgoing]),
            self._wires(incoming, [c.src_rank for c in incoming]),
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
        return view_of(self._src[copy.src_param], copy.src_box)

    def _target(self, copy: Copy) -> Tensor:
        return view_of(self._dst[copy.dst_param], copy.dst_box)

    def _in_place(self, wire: _Wire, view: Tensor) -> bool:
        return (
            len(wire.copies) == 1
            and view.is_contiguous()
            and view.dtype == self._dtype(wire.copies[0])
            and view.device == self._device
        )

    def _allocate(self) -> tuple[Tensor, Tensor]:
        sent = received = 0
        for share in self._shares:
            sent = max(sent, sum(self._staged(wire, self._source) for wire in share.sends))
            received = max(received, sum(self._staged(wire, self._target) for wire in share.recvs))
        return (
            torch.empty(sent, dtype=torch.uint8, device=self._device),
            torch.empty(received, dtype=torch.uint8, device=self._device),
        )

    def _staged(self, wire: _Wire, view: _View) -> int:
        if self._in_place(wire, view(wire.copies[0])):
            return 0
        return _aligned(self._offsets(wire)[-1], _ALIGNMENT)

    def _offsets(self, wire: _Wire) -> list[int]:
        """Give the byte offset of each copy in its message, then the message's length."""
        offsets, end = [], 0
        for copy in wire.copies:
            start = _aligned(end, self._dtype(copy).itemsize)
            offsets.append(start)
            end = start + self._bytes(copy)
        return [*offsets, end]

    def _bind(self, share: _Share) -> _Bound:
        sends, packed = self._messages(share.sends, self._source, self._send_stage)
        recvs, unpacked = self._messages(share.recvs, self._target, self._recv_stage)
        return _Bound(
            pack=_Copies(packed),
            sends=sends,
            local=_Copies([(self._target(copy), self._source(copy)) for copy in share.local]),
            recvs=recvs,
            unpack=_Copies([(live, staged) for staged, live in unpacked]),
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
    for index in range(len(resharders[0].plan.buckets)):
        pending = [resharder.begin(index) for resharder in resharders]
        for resharder, finish in zip(resharders, pending, strict=True):
            resharder.finish(index, finish)
    seconds = time.perf_counter() - start
    return [resharder.stats(seconds) for resharder in resharders]


def _aligned(offset: int, alignment: int) -> int:
    return -(-offset // alignment) * alignment
