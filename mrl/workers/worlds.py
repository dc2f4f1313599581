"""The ranks that a role runs on, as torch's default group while that role works.

Megatron and vLLM take torch's default process group for the whole of their world. Where trainer
and engine have ranks of their own, each of the two gets a group of its ranks, which stands in for
the default one while the role is built and called. The group of all ranks carries the weights.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed import distributed_c10d


@dataclass(frozen=True, slots=True)
class World:
    """Consecutive ranks of the job and their process group."""

    ranks: range
    group: dist.ProcessGroup | None  # None: these are all ranks

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
        before = dist.group.WORLD
        names = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE")}
        rank = int(names["RANK"]) - self.ranks.start
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(len(self.ranks))}
        distributed_c10d._update_default_pg(self.group)
        try:
            yield
        finally:
            distributed_c10d._update_default_pg(before)
            os.environ |= names


def worlds(ranks: tuple[range, ...]) -> tuple[World, ...]:
    """Make the worlds of some ranges of ranks; all ranks of the job call it together.

    Later groups of all ranks would disagree on their names, which torch counts: a role's world
    may make more groups of its own than another's.
    """
    everyone = range(dist.get_world_size())
    made: dict[range, World] = {everyone: World(everyone, None)}
    for part in ranks:
        if part not in made:
            made[part] = World(part, dist.new_group(list(part)))
    return tuple(made[part] for part in ranks)
