"""What goes to the host comes back as it was, and where it was is free meanwhile."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from mrl.algorithms.reductions import reduced
from mrl.config.plan import spread
from mrl.config.schema import MegatronConfig, ReshardingConfig, RolloutConfig
from mrl.types import Ragged
from mrl.workers.group import RolloutGroup
from mrl.workers.host import WorkerHost
from mrl.workers.specs import JobSpec, RolloutSpec
from tests.ranks import ForkedPool, Ranks
from tests.workers.jobs import (
    group,
    job,
    layout,
    policy_batch,
    role,
    sequences,
    value_batch,
    weights_of,
)

ALL_AWAY = {"param_offload": True, "grad_offload": True, "optimizer_offload": True}
EVERYTHING = ["GRADS", "OPTIMIZER", "PARAMS"]
LAYOUTS = {
    "one-bfloat16": (1, layout(dtype="bfloat16")),
    "dp2": (2, layout()),
    "tp2-bfloat16": (2, layout(tp=2, dtype="bfloat16")),
    "dp2-plain-optimizer": (2, layout(use_distributed_optimizer=False)),
    "pp2-vpp2": (2, layout(pp=2, virtual_pipeline_model_parallel_size=2)),
}
FAST = ("one-bfloat16",)


def roles(path: Path, where: MegatronConfig, **offload: bool) -> JobSpec:
    where = replace(where, **offload)
    actor, critic = role(path, where), role(path, where, name="critic")
    return job(actor, critic, role(path, where, name="ref", optim=None))


def step(pool: ForkedPool, spec: JobSpec, number: int) -> list[Any]:
    """Take two mini-batches of actor and critic, as the trainer orders the phases."""
    assert spec.critic is not None and spec.ref is not None
    actor, critic, ref = (group(pool, s) for s in (spec.actor, spec.critic, spec.ref))
    rows = sequences()
    log_probs = actor.log_probs(rows)[0]
    found = [log_probs.values, ref.log_probs(rows).values, critic.values(rows).values]
    near = log_probs.with_values(log_probs.values + 0.1 * number)
    for _ in range(2):
        found.append(reduced(critic.update(value_batch(rows, near))))
    for _ in range(2):
        found.append(reduced(actor.update(policy_batch(rows, near))))
    return found


def same(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return torch.equal(found, wanted)
    return found == wanted


def three_steps(
    pool: ForkedPool, spec: JobSpec, folder: Path, resume: Path | None = None
) -> list[Any]:
    """Take two steps and save, or resume from what was saved, then a third."""
    assert spec.critic is not None
    found = []
    both = (group(pool, spec.actor), group(pool, spec.critic))
    if resume is None:
        for number in range(2):
            found += step(pool, spec, number)
        for role in both:
            role.save(folder / role.role)
    else:
        for role in both:
            role.load(resume / role.role)
    return found + step(pool, spec, 2)


@pytest.mark.parametrize(
    "case", [pytest.param(c, marks=() if c in FAST else pytest.mark.slow) for c in LAYOUTS]
)
def test_offload_changes_no_bit_of_a_run_nor_of_its_resumption(
    case: str, ranks: Ranks, qwen2: Path, tmp_path: Path
) -> None:
    world, where = LAYOUTS[case]
    kept, moved = roles(qwen2, where), roles(qwen2, where, **ALL_AWAY)
    with ranks.job(world, kept) as pool:
        wanted = three_steps(pool, kept, tmp_path / "kept")
    with ranks.job(world, moved) as pool:
        found = three_steps(pool, moved, tmp_path / "moved")
    assert len(found) == len(wanted)
    assert all(map(same, found, wanted))
    for name in ("actor", "critic"):
        saved, expected = (weights_of(tmp_path / run / name) for run in ("moved", "kept"))
        assert all(torch.equal(saved[key], expected[key]) for key in expected)
    with ranks.job(world, moved) as pool:
        resumed = three_steps(pool, moved, tmp_path, resume=tmp_path / "kept")
    assert all(map(same, resumed, wanted[-len(resumed) :]))


def state(host: WorkerHost) -> dict[str, tuple[list[str], int, int]]:
    """Give each role's parts that are away, its bytes on the device and on the host."""
    return {
        name: (
            sorted(part.name for part in host._roles[name].engine.memory.away),
            sum(storages(host._roles[name].engine).values()),
            host._roles[name].engine.memory.host_bytes,
        )
        for name in ("actor", "critic", "ref")
    }


def storages(engine: Any) -> dict[int, int]:
    """Give the bytes of all storages that a role holds between its phases."""
    tensors = [param for chunk in engine.chunks for param in chunk.parameters()]
    if engine.trainer is not None:
        tensors += [*engine.trainer.gradients(), *engine.trainer.state()]
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage._cdata: storage.nbytes() for storage in found}


def test_a_role_is_on_the_device_while_it_works_and_off_it_afterwards(
    ranks: Ranks, qwen2: Path
) -> None:
    spec = roles(qwen2, layout(dtype="bfloat16"), **ALL_AWAY)
    assert spec.ref is not None
    with ranks.job(1, spec) as pool:
        actor, ref = group(pool, spec.actor), group(pool, spec.ref)
        (built,) = pool.each(state)
        assert built["actor"][:2] == built["critic"][:2] == (EVERYTHING, 0)
        assert built["ref"][:2] == (["PARAMS"], 0)
        rows = sequences()
        log_probs = actor.log_probs(rows)[0]
        (scored,) = pool.each(state)
        assert scored["actor"][0] == ["GRADS", "OPTIMIZER"]
        params = scored["actor"][1]
        assert params > 0 == scored["critic"][1] == scored["ref"][1]
        actor.update(policy_batch(rows, log_probs))
        actor.update(policy_batch(rows, log_probs))
        (trained,) = pool.each(state)
        assert trained["actor"][0] == []
        # of two bytes a parameter: float32 gradients, main parameters and two moments
        assert trained["actor"][1] > 8.9 * params
        ref.log_probs(rows)
        (after,) = pool.each(state)
        assert after["actor"][:2] == (EVERYTHING, 0)
        assert after["ref"][0] == []


def test_host_buffers_do_not_grow_after_the_first_step(ranks: Ranks, qwen2: Path) -> None:
    spec = roles(qwen2, layout(dtype="bfloat16"), **ALL_AWAY)
    with ranks.job(1, spec) as pool:
        held = []
        for number in range(4):
            step(pool, spec, number)
            (after,) = pool.each(state)
            held.append({name: host for name, (_, _, host) in after.items()})
    assert held[1] == held[2] == held[3]
    assert held[0]["ref"] == held[3]["ref"] > 0


def test_parameters_that_did_not_change_are_not_copied_again(ranks: Ranks, qwen2: Path) -> None:
    spec = roles(qwen2, layout(), param_offload=True)
    assert spec.ref is not None
    with ranks.job(1, spec) as pool:
        actor, ref = group(pool, spec.actor), group(pool, spec.ref)
        rows = sequences()
        first = actor.log_probs(rows)[0]
        (poisoned,) = pool.each(poison_host, role="actor")
        assert poisoned > 0  # what the host holds is not written again: the poison comes back
        ref.log_probs(rows)
        assert not torch.equal(actor.log_probs(rows)[0].values, first.values)
        actor.update(policy_batch(rows, first))
        pool.each(poison_host, role="actor")
        (trained,) = pool.each(params_of)
        ref.log_probs(rows)
        actor.log_probs(rows)
        (back,) = pool.each(params_of)
        assert torch.equal(back, trained)  # the step changed them: they were copied


def poison_host(host: WorkerHost, role: str) -> int:
    """Write over a role's buffers on the host; give their bytes."""
    memory = host._roles[role].engine.memory
    for moved in memory._moved.values():
        for slab in moved.host.slabs:
            slab.zero_()
    return memory.host_bytes


def params_of(host: WorkerHost) -> torch.Tensor:
    engine = host._roles["actor"].engine
    return torch.cat([p.detach().flatten() for c in engine.chunks for p in c.parameters()])


def test_parts_that_the_layout_keeps_stay(ranks: Ranks, qwen2: Path) -> None:
    spec = roles(qwen2, layout(), optimizer_offload=True)
    assert spec.ref is not None
    with ranks.job(1, spec) as pool:
        actor, ref = group(pool, spec.actor), group(pool, spec.ref)
        rows = sequences()
        base = Ragged(torch.full((int(rows.response_lengths.sum()),), -2.0), rows.response_lengths)
        actor.update(policy_batch(rows, base))
        ref.log_probs(rows)
        (after,) = pool.each(state)
    assert after["actor"][0] == ["OPTIMIZER"]
    assert after["actor"][1] > 0
    assert after["ref"][0] == []


def engine_of(host: WorkerHost) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in host._roles["rollout"].engine.params().items()}


def test_the_engine_gets_the_trained_parameters_and_their_memory(ranks: Ranks, qwen2: Path) -> None:
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    spec = roles(qwen2, layout(**ALL_AWAY, **overlap))
    engine = RolloutSpec(
        config=RolloutConfig(name="hf"),
        path=str(qwen2),
        tokenizer_path=str(qwen2),
        max_model_len=64,
        trust_remote_code=False,
        resharding=ReshardingConfig(verify="every_step"),
        slots=None,
    )
    with ranks.job(2, replace(spec, rollout=engine)) as pool:
        actor = group(pool, spec.actor)
        rollout = RolloutGroup(pool, 1, spread, range(2), None)
        rows = sequences()
        held = []
        for number in range(3):
            rollout.sync(number)  # every sync compares its ends
            held.append(pool.each(engine_of))
            assert [s["actor"][:2] for s in pool.each(state)] == [(EVERYTHING, 0)] * 2
            log_probs = actor.log_probs(rows)[0]
            actor.update(policy_batch(rows, log_probs))
    for before, after in pairwise(held):
        for old, new in zip(before, after, strict=True):
            assert any(not torch.equal(old[name], new[name]) for name in old)


def test_parameters_gathered_after_they_were_away_are_kept_whole(ranks: Ranks, qwen2: Path) -> None:
    overlap = {"overlap_grad_reduce": True, "overlap_param_gather": True}
    spec = roles(qwen2, layout(**overlap), param_offload=True)
    assert spec.ref is not None
    with ranks.job(2, spec) as pool:
        actor, ref = group(pool, spec.actor), group(pool, spec.ref)
        rows = sequences()
        first = actor.log_probs(rows)[0]
        actor.update(policy_batch(rows, first))  # leaves each rank its own shards alone
        seen = []
        for _ in range(2):
            ref.log_probs(rows)  # in the actor's place
            seen.append(actor.log_probs(rows)[0].values)
        assert torch.equal(*seen)
        assert not torch.equal(seen[0], first.values)


def keep_quantized(host: WorkerHost) -> list[bool]:
    """Act as Transformer Engine, which keeps quantized weights; say when they are there."""
    from mrl.workers.megatron.offload import TRAIN

    engine = host._roles["actor"].engine
    linear = engine.chunks[0].decoder.layers[0].mlp.linear_fc1
    linear._fp8_workspaces = {"weight": torch.zeros(1)}
    found = []
    for kept in (True, False):
        engine.memory.enter(TRAIN)
        engine.memory.give_back(keep_params=kept)
        found.append(bool(linear._fp8_workspaces))
    return found


@pytest.mark.parametrize("param_offload", [True, False])
def test_quantized_weights_leave_with_the_parameters_alone(
    param_offload: bool, ranks: Ranks, qwen2: Path
) -> None:
    where = layout(param_offload=param_offload, grad_offload=True)
    with ranks.job(1, job(role(qwen2, where))) as pool:
        assert pool.each(keep_quantized) == [[True, not param_offload]]
