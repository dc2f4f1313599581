"""The ranks that a role runs on, as torch's default group while that role works.

Megatron and vLLM take torch's default process group for the whole of their world. Where trainer
and engine have ranks of their own, each of the two gets a group of its ranks, which stands in for
the default one while the role is built and called. The group of all ranks carries the weights.
"""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import distributed_c10d

# torch names a group by a count in its process, and the ranks of a group must agree on the name.
# A rank in two worlds has made more groups than its neighbours, so each world counts for itself.
_NAMES_APART = 1_000_000


@dataclass(slots=True)
class World:
    """Consecutive ranks of the job and their process group."""

    ranks: range
    group: dist.ProcessGroup | None  # None: these are all ranks
    next_name: int  # of the groups that are made while it is active

    @property
    def is_member(self) -> bool:
        """Say whether this process is one of the ranks."""
        return int(os.environ["RANK"]) in self.ranks

    @contextmanager
    def active(self) -> Iterator[None]:
        """Make the group torch's default one inside the block; only for members.

        RANK and WORLD_SIZE, which vLLM reads, say the same as the group.
        """
        if self.group is None:
            yield
            return
        before, count = dist.group.WORLD, distributed_c10d._world.group_count
        names = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}
        rank = int(names["RANK"]) - self.ranks.start
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(self.ranks))}
        distributed_c10d._update_default_pg(self.group)
        distributed_c10d._world.group_count = self.next_name
        try:
            yield
        finally:
            self.next_name = distributed_c10d._world.group_count
            distributed_c10d._world.group_count = count
            distributed_c10d._update_default_pg(before)
            os.environ |= names


def worlds(ranks: tuple[range, ...], timeout: datetime.timedelta) -> tuple[World, ...]:
    """Make the worlds of some ranges of ranks; all ranks of the job call it together."""
    everyone = range(dist.get_world_size())
    made: dict[range, World] = {everyone: World(everyone, None, 0)}
    for part in ranks:
        if part not in made:
            group = dist.new_group(list(part), timeout)
            made[part] = World(part, group, len(made) * _NAMES_APART)
    return tuple(made[part] for part in ranks)
