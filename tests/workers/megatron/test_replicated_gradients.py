"""What every tensor-parallel rank holds whole counts once, routers and their clipping included."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.workers.host import WorkerHost
from tests.marks import slow_but
from tests.ranks import Ranks
from tests.workers.jobs import OPTIM, job, layout, role
from tests.workers.megatron.test_groups import norm_of_one_gradient

ROUTER = "decoder.layers.1.mlp.router.weight"  # layer 0 is dense
REPLICATED = (
    ROUTER,
    "decoder.layers.0.self_attention.q_layernorm.weight",
    "decoder.layers.0.self_attention.k_layernorm.weight",
    "decoder.layers.1.pre_mlp_layernorm.weight",
    "decoder.final_layernorm.weight",
)
EP2 = {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
LAYOUTS = {
    "one": (1, layout()),
    "tp2": (2, layout(tp=2)),
    "tp2-without-sequence-parallel": (2, layout(tp=2, sequence_parallel=False)),
    "tp2-ep2": (2, layout(tp=2, **EP2)),
    "cp2": (2, layout(context_parallel_size=2)),
    "tp2-cp2": (4, layout(tp=2, context_parallel_size=2)),
}
FAST = ("tp2", "tp2-ep2", "cp2")


@pytest.mark.parametrize("name", slow_but(FAST, LAYOUTS))
def test_what_ranks_hold_whole_counts_once(name: str, ranks: Ranks, qwen3_moe: Path) -> None:
    world, where = LAYOUTS[name]
    with ranks.job(world, job(role(qwen3_moe, where))) as pool:
        for parameter in REPLICATED:
            found = pool.each(norm_of_one_gradient, name="actor", parameter=parameter, value=3.0)
            assert found == pytest.approx([3.0] * world), parameter


def clipped(host: WorkerHost, parameters: tuple[str, ...]) -> list[float]:
    """Give the largest gradient that a step leaves of each parameter, all 3 before clipping."""
    engine = host._roles["actor"].engine
    with engine.groups.active():
        engine.trainer.zero_grad()
        own = dict(engine.chunks[0].named_parameters())
        for name in parameters:
            own[name].main_grad.view(-1)[0] = 3.0
        before = {name: own[name].detach().clone() for name in parameters}
        engine.trainer.step()
        return [float((own[name] - before[name]).abs().max()) for name in parameters]


def test_clipping_is_that_of_one_rank(ranks: Ranks, qwen3_moe: Path) -> None:
    """Adam with a large eps moves by about the clipped gradient's own size."""
    optim = replace(OPTIM, eps=100.0, clip_grad=0.5, weight_decay=0.0)
    moved: dict[str, Any] = {}
    for name in ("one", *FAST):
        world, where = LAYOUTS[name]
        with ranks.job(world, job(role(qwen3_moe, where, optim=optim))) as pool:
            moved[name] = torch.tensor(pool.each(clipped, parameters=REPLICATED))
    alone = moved["one"]
    assert alone.min() > 0
    for name, found in moved.items():
        assert torch.allclose(found, alone.expand_as(found), rtol=2e-3), name
