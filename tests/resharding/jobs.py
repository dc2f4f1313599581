"""What test ranks do: resharding over a real gloo group."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist

from mrl.resharding import MegatronLayout, plan, sync
from mrl.resharding.gather import GatherSync
from mrl.resharding.planner import ReshardPlan
from mrl.resharding.sync import Resharder
from mrl.resharding.transports import Distributed
from mrl.resharding.verify import compare_ends, differing
from tests.resharding.closed_form import (
    like,
    logical_values,
    megatron_params,
    tiny_shape,
    vllm_layout,
    vllm_params,
)
from tests.resharding.placements import (
    expert_tensors,
    expert_values,
    place,
    served_experts,
    trained_experts,
)


def exchange_twice_and_compare_ends(threshold: int) -> None:
    """Both update paths on two ranks, then a wrong element that every rank hears of."""
    rank, world = dist.get_rank(), dist.get_world_size()
    shape = tiny_shape(layers=2)
    values = logical_values(shape)
    trainer = MegatronLayout(shape, 1, 2, 1, 16)
    src = megatron_params(trainer, values, rank)
    sync.PACK_BELOW_BYTES = threshold
    steps = plan(trainer.layout(), vllm_layout(shape, 2, world), bucket_bytes=2048)
    expected = vllm_params(shape, 2, values, rank)
    dst = like(expected)
    resharder = Resharder(steps, rank, src, dst, Distributed())
    for _ in range(2):
        stats = resharder.run()
        assert differing(dst, expected) == []
        assert 0 < stats.bytes_moved == stats.bytes_floor
        compare_ends(steps, rank, src, dst, Distributed())
    if rank == 0:
        dst["model.norm.weight"][0] = 0  # rank 1 sent it
    with pytest.raises(ValueError, match=r"model\.norm\.weight.* from rank 1 .* to rank 0"):
        compare_ends(steps, rank, src, dst, Distributed())


@dataclass(frozen=True, slots=True)
class _Late(Distributed):
    """A rank that is late for every exchange."""

    def exchange(self, sends: Any, recvs: Any) -> Any:
        time.sleep(0.02)
        return Distributed.exchange(self, sends, recvs)


def late_receiver() -> None:
    """Buckets of different fill, all staged, to a rank that takes them late."""
    rank = dist.get_rank()
    tensors = expert_tensors(experts=4, ffn=6, hidden=4, dtype="bfloat16")
    src = trained_experts(tensors, ep=1, etp=1)
    dst = served_experts(tensors, tp=1, ep=False, first_rank=1)
    steps = plan(src, dst, bucket_bytes=160)
    assert steps.num_buckets > 3
    values = expert_values(tensors)
    expected = place(dst, values).get(rank, {})
    params, found = place(src, values).get(rank, {}), like(expected)
    transport = _Late() if rank else Distributed()
    resharder = Resharder(steps, rank, params, found, transport)
    for _ in range(2):
        resharder.run()
        assert differing(found, expected) == []


class Reordered:
    """A plan whose first two buckets are swapped on one rank."""

    def __init__(self, steps: ReshardPlan) -> None:
        self._steps = steps

    def share(self, rank: int) -> Any:
        first, second, *rest = self._steps.share(rank)
        return (second, first, *rest)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._steps, name)


def wrong_bucket_order() -> None:
    """Every rank hears that one of them would take the buckets in another order."""
    rank = dist.get_rank()
    shape = tiny_shape(layers=2)
    values = logical_values(shape)
    trainer = MegatronLayout(shape, 1, 2, 1, 16)
    steps: Any = plan(trainer.layout(), vllm_layout(shape, 2, 2), bucket_bytes=512)
    src = megatron_params(trainer, values, rank)
    dst = like(vllm_params(shape, 2, values, rank))
    with pytest.raises(ValueError, match=r"ranks 0 and 1 would exchange .* different orders"):
        Resharder(Reordered(steps) if rank else steps, rank, src, dst, Distributed())
    other = plan(trainer.layout(), vllm_layout(shape, 2, 2), bucket_bytes=512 * (1 + rank))
    with pytest.raises(ValueError, match="different plans"):
        Resharder(other, rank, src, dst, Distributed())


def separate_trainer_and_engine(members: tuple[int, ...]) -> None:
    """Two trainer ranks, two engine ranks, and bystanders, in a group of their own.

    Direct and gather give the same bits; ranks without a copy in a bucket take part.
    """
    group = dist.new_group(list(members))
    rank = dist.get_rank()
    if rank not in members:
        return
    tensors = expert_tensors(experts=4, ffn=6, hidden=4, dtype="bfloat16")
    src = trained_experts(tensors, ep=2, etp=1, first_rank=members[0])
    dst = served_experts(tensors, tp=2, ep=False, first_rank=members[2])
    values = expert_values(tensors)
    expected = place(dst, values).get(rank, {})
    params, found = place(src, values).get(rank, {}), like(expected)
    steps = plan(src, dst, bucket_bytes=256)
    stats = Resharder(steps, rank, params, found, Distributed(group)).run()
    assert differing(found, expected) == []
    assert stats.bytes_moved == stats.bytes_floor
    compare_ends(steps, rank, params, found, Distributed(group))
    loaded: dict[str, torch.Tensor] = {}

    def load(weights: Any) -> None:
        loaded.update((name, tensor.clone()) for name, tensor in weights)

    gather = GatherSync(steps, rank, params, load if expected else None, Distributed(group), 256)
    for _ in range(2):
        loaded.clear()
        moved = gather.run().bytes_moved
        assert differing(loaded, values if expected else {}) == []
        assert moved >= steps.allgather_bytes(rank)


def gather_equals_direct() -> None:
    """Colocated ranks that all contribute: one collective a bucket."""
    rank = dist.get_rank()
    shape = tiny_shape(layers=2)
    values = logical_values(shape)
    trainer = MegatronLayout(shape, 2, 1, 1, 16)
    src = megatron_params(trainer, values, rank)
    steps = plan(trainer.layout(), vllm_layout(shape, 1, 2), bucket_bytes=2048)
    loaded: dict[str, torch.Tensor] = {}

    def load(weights: Any) -> None:
        loaded.update((name, tensor.clone()) for name, tensor in weights)

    GatherSync(steps, rank, src, load, Distributed(), bucket_bytes=2048).run()
    assert differing(loaded, values) == []
