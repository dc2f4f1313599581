from __future__ import annotations

import datetime
import os

import pytest
import torch
import torch.distributed as dist

from mrl.workers.worlds import worlds
from tests.ranks import Ranks

TIMEOUT = datetime.timedelta(seconds=20)


def groups_of_both_sides() -> None:
    """Make more groups as the engine than as the trainer, then one of all ranks."""
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": "3"}
    everyone, trainer, engine = worlds((range(3), range(2), range(1, 3)), TIMEOUT)
    for world, count in ((engine, 3), (trainer, 1), (engine, 1), (everyone, 1)):
        if not world.is_member:
            continue
        with world.active():
            size = dist.get_world_size()
            assert size == len(world.ranks) == int(os.environ["WORLD_SIZE"])
            for _ in range(count):
                total = torch.ones(1)
                dist.all_reduce(total, group=dist.new_group(list(range(size)), TIMEOUT))
                assert total == size
    assert (dist.get_world_size(), os.environ["WORLD_SIZE"]) == (3, "3")


def failing_role() -> None:
    """Raise inside a world."""
    os.environ |= {"RANK": str(dist.get_rank()), "WORLD_SIZE": "2"}
    (own, _) = worlds((range(1), range(1, 2)), TIMEOUT)
    if own.is_member:
        with pytest.raises(ZeroDivisionError), own.active():
            assert dist.get_world_size() == 1
            raise ZeroDivisionError
    assert (dist.get_world_size(), os.environ["WORLD_SIZE"]) == (2, "2")


@pytest.mark.multiprocess
def test_ranks_of_both_sides_make_groups_with_ranks_of_one(ranks: Ranks) -> None:
    ranks.run(3, groups_of_both_sides)


@pytest.mark.multiprocess
def test_an_error_inside_a_world_leaves_torch_with_all_ranks(ranks: Ranks) -> None:
    ranks.run(2, failing_role)
