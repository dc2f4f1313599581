"""How messages travel between ranks: within one process, or over torch.distributed.

A message is a row of bytes and a peer (bytes, because gloo does not know every dtype). Messages
between two ranks arrive in the order in which both ends list them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes to send to, or to fill from, `peer` (a global rank)."""

    peer: int
    tensor: Tensor  # [bytes] uint8, contiguous


Finish = Callable[[], None]


class Transport(Protocol):
    """What resharding needs of the ranks' connection."""

    def gather(self, value: Any) -> list[Any]:
        """Give every rank's `value`; all ranks of the transport call it together."""

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Finish:
        """Start all messages; the returned call makes later work see the received ones."""

    def all_gather(self, rows: Tensor, ranks: Sequence[int], rank: int) -> Finish:
        """Start filling `rows` [ranks, bytes] uint8 from the row that each of `ranks` has."""

    def broadcast(self, parts: Sequence[Message], ranks: Sequence[int], rank: int) -> Finish:
        """Start giving all of `ranks` each part, which its `peer` has filled."""


@dataclass(slots=True)
class Mailbox:
    """Messages under way inside one process, by (sender, receiver)."""

    queues: dict[tuple[int, int], deque[Tensor]] = field(default_factory=lambda: defaultdict(deque))


@dataclass(frozen=True, slots=True)
class InProcess:
    """One rank of several that share a process and a mailbox; alone, it moves nothing.

    Ranks take turns, so `gather` sees only its own value and receiving waits for `Finish`:
    every rank starts an exchange before any finishes it (`sync.run_together`).
    """

    rank: int = 0
    mailbox: Mailbox = field(default_factory=Mailbox)

    def gather(self, value: Any) -> list[Any]:
        """Give the own value alone."""
        return [value]

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Finish:
        """Post the sends; the returned call copies the received messages out."""
        for message in sends:
            self.mailbox.queues[self.rank, message.peer].append(message.tensor)

        def finish() -> None:
            for message in recvs:
                message.tensor.copy_(self.mailbox.queues[message.peer, self.rank].popleft())

        return finish

    def all_gather(self, rows: Tensor, ranks: Sequence[int], rank: int) -> Finish:
        """Post the own row to every other rank."""
        return self.broadcast(
            [Message(owner, row) for owner, row in zip(ranks, rows, strict=True)], ranks, rank
        )

    def broadcast(self, parts: Sequence[Message], ranks: Sequence[int], rank: int) -> Finish:
        """Post the own parts to every other rank."""
        return self.exchange(
            [
                Message(other, part.tensor)
                for part in parts
                for other in ranks
                if part.peer == rank != other
            ],
            [part for part in parts if part.peer != rank],
        )


@dataclass(frozen=True, slots=True)
class Distributed:
    """torch.distributed messages (NCCL or gloo) over one process group.

    On a GPU a `Finish` makes the current stream wait, never the host. `gather` comes first.
    """

    group: dist.ProcessGroup | None = None  # None: all ranks

    def gather(self, value: Any) -> list[Any]:
        """Collect pickled values of all ranks of the group, and open its connections."""
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        if "cuda" in dist.get_backend_config(self.group) and torch.cuda.is_available():
            # NCCL connects at a group's first call, in which every rank must take part; but a
            # rank may have no message in the first bucket.
            dist.all_reduce(torch.zeros(1, device="cuda"), group=self.group)
        return values

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Finish:
        """Start one grouped exchange."""
        ops = [dist.P2POp(dist.isend, m.tensor, m.peer, self.group) for m in sends]
        ops += [dist.P2POp(dist.irecv, m.tensor, m.peer, self.group) for m in recvs]
        return _when_done(dist.batch_isend_irecv(ops) if ops else [])

    def all_gather(self, rows: Tensor, ranks: Sequence[int], rank: int) -> Finish:
        """Start one collective; raises ValueError unless `ranks` are the group's, in its order."""
        self._check(ranks)
        own = rows[ranks.index(rank)]
        work = dist.all_gather_into_tensor(rows.view(-1), own, group=self.group, async_op=True)
        return _when_done([work])

    def broadcast(self, parts: Sequence[Message], ranks: Sequence[int], rank: int) -> Finish:
        """Start one collective a part; raises ValueError unless `ranks` are the group's."""
        self._check(ranks)
        return _when_done(
            [
                dist.broadcast(part.tensor, part.peer, group=self.group, async_op=True)
                for part in parts
            ]
        )

    def _check(self, ranks: Sequence[int]) -> None:
        members = dist.get_process_group_ranks(self.group)
        if list(ranks) != members:
            raise ValueError(f"a collective of ranks {list(ranks)} over a group of {members}")


def _when_done(works: Sequence[Any]) -> Finish:
    def finish() -> None:
        for work in works:
            work.wait()

    return finish
