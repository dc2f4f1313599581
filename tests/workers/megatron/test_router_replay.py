"""Replayed routers choose what was chosen before, in every layout and under recomputation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from mrl.algorithms.reductions import reduced
from mrl.batching.experience import collect
from mrl.config.plan import spread
from mrl.config.schema import MegatronConfig, ReshardingConfig, RolloutConfig
from mrl.types import Batching, PolicyBatch, Prompt, Ragged, SamplingParams
from mrl.workers.group import RolloutGroup
from mrl.workers.host import WorkerHost
from mrl.workers.specs import JobSpec, RoleSpec, RolloutSpec
from tests.ranks import Ranks
from tests.workers.jobs import (
    ALL_ROWS,
    LENGTHS,
    TWO_ROWS,
    assert_close,
    group,
    job,
    layout,
    policy_batch,
    role,
    sequences,
)

LAYERS, TOP_K = 3, 2
SAMPLING = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=8, seed=11)
EP2 = {"expert_model_parallel_size": 2}
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ("moe",)}


def replaying(path: Path, mode: str = "R2", **where: Any) -> RoleSpec:
    return replace(role(path, layout(**where)), router_replay=mode)


def shift_routers(host: WorkerHost, scale: float) -> None:
    """Move the routers as a later update might, the same on every rank and in every layout."""
    engine = host._roles["actor"].engine
    for router in engine.experts.routers:
        generator = torch.Generator().manual_seed(router.layer_number)
        noise = torch.randn(router.weight.shape, generator=generator)
        with torch.no_grad():
            router.weight += scale * noise


def routed(recorded: Ragged) -> Tensor:
    """Give the set of each choice: its order is the sort's business."""
    return recorded.values.sort(-1).values


def violation(routing: Ragged) -> float:
    """Give the mean over layers of the fullest expert's load above the mean, relative to it."""
    layers = routing.values.long().unbind(1)
    loads = torch.stack([layer.flatten().bincount(minlength=4).float() for layer in layers])
    return float((loads.amax(1) / loads.mean(1) - 1).mean())


def test_recorded_choices_are_those_of_every_token_and_layer(ranks: Ranks, qwen3_moe: Path) -> None:
    with ranks.job(1, job(replaying(qwen3_moe))) as pool:
        *_, routing = group(pool, replaying(qwen3_moe)).log_probs(sequences())
    assert routing.lengths.tolist() == list(LENGTHS)
    assert routing.values.shape == (sum(LENGTHS), LAYERS, TOP_K)
    assert routing.values.dtype == torch.uint8
    assert int(routing.values.max()) == 3
    assert bool((routing.values[..., 0] != routing.values[..., 1]).all())


def test_the_training_pass_repeats_the_old_one_bit_for_bit(ranks: Ranks, qwen3_moe: Path) -> None:
    rows = sequences()
    with ranks.job(1, job(replaying(qwen3_moe))) as pool:
        actor = group(pool, replaying(qwen3_moe), TWO_ROWS)
        old, _, routing = actor.log_probs(rows)
        ones = old.with_values(torch.ones_like(old.values))
        weights = ones.with_values(ones.values / len(ones.values))
        batch = PolicyBatch(rows, old, ones, weights, old, routing)
        metrics = reduced(actor.update(batch))
    assert metrics["actor/ppo_kl"] == 0
    assert metrics["actor/kl_loss"] == 0
    assert metrics["actor/pg_loss"] == pytest.approx(-1, abs=1e-6)


def test_choices_outlive_a_change_of_the_routers(ranks: Ranks, qwen3_moe: Path) -> None:
    rows = sequences()
    with ranks.job(1, job(replaying(qwen3_moe))) as pool:
        actor = group(pool, replaying(qwen3_moe))
        old, _, routing = actor.log_probs(rows)
        pool.each(shift_routers, scale=0.3)
        free, _, others = actor.log_probs(rows)
        kept, _, again = actor.log_probs(rows, routing)
    assert torch.equal(again.values, routing.values)
    flipped = (routed(others) != routed(routing)).any(-1).float().mean()
    assert flipped > 0.1
    # the weights of the same experts have moved; other experts would move the outputs further
    moved, farther = (kept.values - old.values).abs(), (free.values - old.values).abs()
    assert 0 < moved.mean() < farther.mean()


@pytest.fixture(scope="module")
def alone(ranks: Ranks, qwen3_moe: Path) -> tuple[PolicyBatch, dict[str, float], Tensor, Tensor]:
    """One rank: the batch, what its replayed update reports, log-probs before and after."""
    rows = sequences()
    with ranks.job(1, job(replaying(qwen3_moe))) as pool:
        actor = group(pool, replaying(qwen3_moe), TWO_ROWS)
        old, _, routing = actor.log_probs(rows)
        batch = replace(policy_batch(rows, old), routing=routing)
        pool.each(shift_routers, scale=0.3)
        metrics = reduced(actor.update(batch))
        later = actor.log_probs(rows, routing)[0]
    return batch, metrics, old.values, later.values


CASES: dict[str, tuple[int, MegatronConfig, Batching]] = {
    "tp2-ep2": (2, layout(tp=2, expert_tensor_parallel_size=1, **EP2), TWO_ROWS),
    "ep2": (2, layout(**EP2), Batching(max_tokens=24)),
    "pp2-vpp2": (2, layout(pp=2, virtual_pipeline_model_parallel_size=2), TWO_ROWS),
    "pp2-recomputed": (2, layout(pp=2, **FULL), TWO_ROWS),
    "recomputed-experts": (1, layout(**SELECTIVE), TWO_ROWS),
}
SLOW_CASES: dict[str, tuple[int, MegatronConfig, Batching]] = {
    "tp2": (2, layout(tp=2), ALL_ROWS),
    "pp2": (2, layout(pp=2), TWO_ROWS),
    "cp2": (2, layout(context_parallel_size=2), TWO_ROWS),
    "cp2-tp2": (4, layout(tp=2, context_parallel_size=2), TWO_ROWS),
    "pp2-vpp2-recomputed": (
        2,
        layout(pp=2, virtual_pipeline_model_parallel_size=2, **FULL),
        TWO_ROWS,
    ),
}


@pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_every_layout_replays_what_one_rank_replays(
    case: str,
    ranks: Ranks,
    qwen3_moe: Path,
    alone: tuple[PolicyBatch, dict[str, float], Tensor, Tensor],
) -> None:
    world, where, batching = (CASES | SLOW_CASES)[case]
    batch, wanted, before, after = alone
    assert batch.routing is not None
    assert wanted["actor/moe_max_violation"] == pytest.approx(violation(batch.routing), rel=1e-5)
    spec = replace(role(qwen3_moe, where), router_replay="R2")
    with ranks.job(world, job(spec)) as pool:
        actor = group(pool, spec, batching)
        old, _, routing = actor.log_probs(batch.sequences)
        pool.each(shift_routers, scale=0.3)
        metrics = reduced(actor.update(batch))
        later = actor.log_probs(batch.sequences, batch.routing)[0]
    assert torch.equal(routed(routing), routed(batch.routing))
    assert_close(old.values, before, "log-probs", 1e-4)
    assert_close(later.values, after, "log-probs after the update", 1e-4)
    for name, value in wanted.items():
        if not name.startswith("perf/"):
            assert metrics[name] == pytest.approx(value, rel=1e-4, abs=1e-6), name


def test_roles_of_one_process_keep_their_own_choices(ranks: Ranks, qwen3_moe: Path) -> None:
    spec, rows = replaying(qwen3_moe), sequences()
    other = role(qwen3_moe, name="ref", optim=None)
    with ranks.job(1, job(spec, ref=other)) as pool:
        actor, ref = group(pool, spec), group(pool, other)
        _, _, routing = actor.log_probs(rows)
        free = ref.log_probs(rows).values
        pool.each(shift_routers, scale=0.3)  # the actor's
        actor.log_probs(rows, routing)
        assert torch.equal(ref.log_probs(rows).values, free)


def global_instances(host: WorkerHost) -> int:
    from megatron.core.transformer.moe.router_replay import RouterReplay

    return len(RouterReplay.global_router_replay_instances)


def waiting(host: WorkerHost) -> int:
    return sum(len(router.waiting) for router in host._roles["actor"].engine.experts.routers)


@pytest.mark.parametrize("mode", ["R2", "disabled"])
def test_nothing_is_left_behind(mode: str, ranks: Ranks, qwen3_moe: Path) -> None:
    spec = replaying(qwen3_moe, mode, **FULL)
    with ranks.job(1, job(spec)) as pool:
        actor = group(pool, spec, TWO_ROWS)
        rows = sequences()
        columns: tuple[Ragged, ...] = actor.log_probs(rows)
        assert len(columns) == (3 if mode == "R2" else 2)
        actor.update(replace(policy_batch(rows, columns[0]), routing=(*columns, None)[2]))
        assert pool.each(global_instances) == [0]
        assert pool.each(waiting) == [0]


def with_engine(path: Path) -> JobSpec:
    """Give a job of an actor that records its choices and an engine that reports its own."""
    config = RolloutConfig(name="vllm", n=3, max_num_seqs=32, max_num_batched_tokens=512)
    engine = RolloutSpec(
        config=config,
        path=str(path),
        tokenizer_path=str(path),
        max_model_len=160,
        trust_remote_code=False,
        resharding=ReshardingConfig(),
        slots=None,
        returns_routing=True,
    )
    return replace(job(replaying(path)), rollout=engine, timeout_s=400.0)


@pytest.mark.slow
def test_the_engine_reports_what_the_actor_would_choose(ranks: Ranks, experts: Path) -> None:
    spec = with_engine(experts)
    generator = torch.Generator().manual_seed(3)
    # the long one fills a block of the prefix cache, which its samples share
    rows = [torch.randint(2, 50, (n,), generator=generator).tolist() for n in (3, 140, 20)]
    prompts = [Prompt(f"p{i}", tuple(row), "", "", None, {}) for i, row in enumerate(rows)]
    with ranks.job(1, spec, 400.0) as pool:
        rollout, actor = RolloutGroup(pool, 1, spread), group(pool, spec.actor)
        rollout.sync(0)
        batch = collect(rollout.generate(prompts, SAMPLING))
        free, _, own = actor.log_probs(batch.sequences)
        assert batch.routing is not None
        replayed = actor.log_probs(batch.sequences, batch.routing)[0]
    assert batch.routing.lengths.tolist() == batch.sequences.tokens.lengths.tolist()
    same = (routed(batch.routing) == routed(own)).all(-1).all(-1)
    last = torch.tensor([*batch.sequences.tokens.lengths.cumsum(0).tolist()]) - 1
    same[last] = True  # sampled, never routed by the engine
    assert bool(same.all())
    assert_close(replayed.values, free.values, "log-probs", 1e-5)
