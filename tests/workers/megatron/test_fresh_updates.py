"""An update without old log-probs is the one with those of a pass before, and gives them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from mrl.algorithms.reductions import reduced
from mrl.config.schema import MegatronConfig
from mrl.types import Batching, Ragged
from mrl.workers.specs import JobSpec
from tests.ranks import Ranks
from tests.workers.jobs import (
    ALL_ROWS,
    TWO_ROWS,
    both,
    group,
    job,
    layout,
    policy_batch,
    role,
    sequences,
)
from tests.workers.megatron.test_router_replay import shift_routers

LAYOUTS = {
    "one": (1, layout(), ALL_ROWS),
    "dp4-by-tokens": (4, layout(), Batching(max_tokens=24)),
    "cp2": (2, layout(context_parallel_size=2), TWO_ROWS),
    "tp2-pp2": (4, layout(tp=2, pp=2), TWO_ROWS),
    "pp2-vpp2": (2, layout(pp=2, virtual_pipeline_model_parallel_size=2), TWO_ROWS),
    "dp2-recompute": (2, layout(recompute_granularity="full"), TWO_ROWS),
}
EP2 = layout(expert_model_parallel_size=2)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c == "dp4-by-tokens" else pytest.mark.slow) for c in LAYOUTS],
)
def test_a_fresh_update_is_the_update_by_the_policys_own_log_probs(
    case: str, ranks: Ranks, qwen2: Path
) -> None:
    world, where, cut = LAYOUTS[case]
    assert isinstance(where, MegatronConfig)
    spec = replace(both(qwen2, where), critic=None)
    compare(ranks, world, spec, cut, 1e-5)


def test_replayed_experts_are_repeated_by_a_fresh_update(ranks: Ranks, qwen3_moe: Path) -> None:
    spec = job(replace(role(qwen3_moe, EP2), router_replay="R2"))
    compare(ranks, 2, spec, TWO_ROWS, 1e-4)


def compare(ranks: Ranks, world: int, spec: JobSpec, cut: Batching, limit: float) -> None:
    """Take the step both ways from the same weights."""
    found = []
    for is_fresh in (True, False):
        with ranks.job(world, spec) as pool:
            actor, rows = group(pool, spec.actor, cut), sequences()
            before = actor.log_probs(rows)
            routing = (*before, None)[2]
            if routing is not None:
                pool.each(shift_routers, scale=0.3)  # they would choose otherwise by themselves
                before = actor.log_probs(rows, routing)
            batch = replace(policy_batch(rows, before[0]), old_log_probs=before[0], routing=routing)
            given: list[tuple[Ragged, ...]] = []
            if is_fresh:
                batch = replace(batch, old_log_probs=None)
            (metrics,) = actor.updates([batch], told=given.append)
            if is_fresh:
                ((log_probs, entropies),) = given
                for mine, wanted in ((log_probs, before[0]), (entropies, before[1])):
                    assert torch.equal(mine.lengths, wanted.lengths)
                    torch.testing.assert_close(mine.values, wanted.values, rtol=limit, atol=1e-6)
            else:
                assert not given
            found.append((reduced(metrics), actor.log_probs(rows)[0].values))
    (fresh, after), (usual, wanted) = found
    assert fresh["actor/ppo_kl"] == 0.0
    for name, value in usual.items():
        if not name.startswith("perf/"):
            assert fresh[name] == pytest.approx(value, rel=limit, abs=1e-6), name
    torch.testing.assert_close(after, wanted, rtol=limit, atol=1e-5)
