"""Reducing gradients and gathering parameters beside the computation changes nothing."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.config.schema import MegatronConfig
from mrl.types import Cuts, Ragged
from tests.ranks import Ranks
from tests.workers.jobs import (
    LOSS,
    OPTIM,
    layout,
    policy_batch,
    role,
    sequences,
    value_batch,
)

BUCKET = 4000  # parameters: a layer of the tiny models has about ten times as many
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}
# the norm is summed over shards, which end elsewhere with the overlap
UNCLIPPED = replace(OPTIM, clip_grad=0.0)
CUTS: Cuts = ((0, 1), (2,), (3,), ())


def trained(path: Path, where: MegatronConfig) -> tuple[list[Tensor], int]:
    """Train an actor and a critic on this rank's rows, scoring between the steps.

    Gives all outputs and parameters seen on the way, and the number of gradient buckets.
    """
    from mrl.workers.actor import Actor
    from mrl.workers.critic import Critic
    from mrl.workers.megatron import optimizer
    from mrl.workers.megatron.engine import MegatronEngine
    from mrl.workers.megatron.groups import ParallelGroups

    whole = optimizer.DistributedDataParallelConfig
    optimizer.DistributedDataParallelConfig = partial(whole, bucket_size=BUCKET)  # type: ignore
    groups = ParallelGroups(where, seed=1, timeout_s=60)
    cpu = torch.device("cpu")
    spec = role(path, where, optim=UNCLIPPED)
    actor = Actor(MegatronEngine(spec, groups, cpu), LOSS)
    critic = Critic(MegatronEngine(replace(spec, name="critic", head="value"), groups, cpu), 0.5)
    mine = sequences().select([2 * i + groups.dp_rank for i in range(4)])
    base = Ragged(torch.full((int(mine.response_lengths.sum()),), -2.0), mine.response_lengths)
    found: list[Tensor] = []
    for number in range(3):
        near = base.with_values(base.values + 0.1 * number)
        for part, batch in ((actor, policy_batch), (critic, value_batch)):
            metrics = part.update(batch(mine, near), CUTS) or {}  # type: ignore[operator]
            found += [
                torch.tensor(astuple(value))
                for name, value in metrics.items()
                if "norm" not in name
            ]
        if number == 1:  # once after a step, once right before the next one
            found += [column.values for column in actor.log_probs(mine, CUTS) or ()]
            values = critic.values(mine, CUTS)
            found += [values.values] if values is not None else []
    for part in (actor, critic):
        part.engine.memory.enter(reading())
        found += [param.detach() for chunk in part.engine.chunks for param in chunk.parameters()]
    assert part.engine.trainer is not None
    return found, sum(len(b.buckets) for c in part.engine.trainer.chunks for b in c.buffers)


def reading() -> Any:
    from mrl.workers.megatron.offload import READ

    return READ


CASES = {
    "untied": ("llama", 2, layout()),
    "tied": ("qwen2", 2, layout()),
    "full-recompute": ("llama", 2, layout(recompute_granularity="full")),
    "experts": ("qwen3_moe", 2, layout(expert_model_parallel_size=2)),
    "pp2-vpp2": ("llama", 4, layout(pp=2, virtual_pipeline_model_parallel_size=2)),
    "tp2": ("llama", 4, layout(tp=2)),
}
FAST = ("untied",)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FAST else pytest.mark.slow) for c in CASES]
)
def test_overlap_trains_the_same_model(
    case: str, ranks: Ranks, request: pytest.FixtureRequest
) -> None:
    model, world, where = CASES[case]
    path = request.getfixturevalue(model)
    wanted = ranks.run(world, trained, path=path, where=where)
    for overlap in ({"overlap_grad_reduce": True}, OVERLAP):
        found = ranks.run(world, trained, path=path, where=replace(where, **overlap))
        # stages but the first reduce at once: their pipeline drains meanwhile
        assert found[0][1] > wanted[0][1]
        for (tensors, _), (expected, _) in zip(found, wanted, strict=True):
            assert len(tensors) == len(expected)
            assert all(map(torch.equal, tensors, expected))
