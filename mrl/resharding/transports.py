"""How messages travel between ranks: within one process, or over torch.distributed.

A message is a row of bytes and a peer (bytes, because gloo does not know every dtype). Messages
between two ranks arrive in the order in which both ends list them.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes to send to, or to fill from, `peer` (a global rank)."""

    peer: int
    tensor: Tensor  # [bytes] uint8, contiguous


Finish = Callable[[], None]


class Transport(Protocol):
    """What the resharder needs of the ranks' connection."""

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Finish:
        """Start all messages; the returned call makes later work see the received ones."""

    def gather(self, value: Any) -> list[Any]:
        """Give every rank's `value`; all ranks of the transport call it together."""


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

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Finish:
        """Post the sends; the returned call copies the received messages out."""
        for message in sends:
            self.mailbox.queues[self.rank, message.peer].append(message.tensor)

        def finish() -> None:
            for message in recvs:
                message.tensor.copy_(self.mailbox.queues[message.peer, self.rank].popleft())

        return finish

    def gather(self, value: Any) -> list[Any]:
        """Give the own value alone."""
        return [value]


@dataclass(frozen=True, slots=True)
class Distributed:
    """torch.distributed point-to-point messages (NCCL or gloo) over one process group."""

    group: dist.ProcessGroup | None = None  # None: all ranks

    def exchange(self, sends: Sequence[Message], recvs: Sequence[Message]) -> Finish:
        """Start one grouped exchange; on a GPU the returned call makes the stream wait."""
        ops = [dist.P2POp(dist.isend, m.tensor, m.peer, self.group) for m in sends]
        ops += [dist.P2POp(dist.irecv, m.tensor, m.peer, self.group) for m in recvs]
        works = dist.batch_isend_irecv(ops) if ops else []

        def finish() -> None:
            for work in works:
                work.wait()

        return finish

    def gather(self, value: Any) -> list[Any]:
        """Collect pickled values of all ranks of the group."""
        values: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(values, value, group=self.group)
        return values
