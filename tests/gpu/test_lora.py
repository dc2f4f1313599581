"""Adapters through Transformer Engine, and on their way into a live engine with CUDA graphs.

Run with `python -m pytest -m gpu -s tests/gpu`; without a GPU the local layers train them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from mrl.config.schema import LoraConfig, MegatronConfig, OptimConfig
from mrl.workers.host import WorkerHost
from mrl.workers.specs import JobSpec
from tests.gpu import test_weight_sync as live
from tests.gpu.ranks import (
    DEVICE,
    ON_GPU,
    REFERENCE,
    SOME_ROWS,
    YARDSTICK,
    Errors,
    Outcome,
    Pools,
    Ranks,
    fingerprints,
    job,
    round_file,
    rows,
    train,
    write_wide,
)
from tests.gpu.ranks import TESTED as PLAIN
from tests.workers.jobs import group, role, weights_of
from tests.workers.megatron.test_lora import PREFIX, adapter_of, draw_adapter

pytestmark = [pytest.mark.gpu, pytest.mark.multiprocess]
LORA = LoraConfig(rank=8, alpha=16)
# Transformer Engine's layers add gradients to the float32 buffer themselves, or not at all
TESTED = replace(PLAIN, gradient_accumulation_fusion=True) if ON_GPU else PLAIN
TP2 = replace(TESTED, tensor_model_parallel_size=2)
FULL = {"recompute_granularity": "full"}
CASES: dict[str, tuple[int, MegatronConfig]] = {
    "one": (1, TESTED),
    "one-plain-accumulation": (1, replace(PLAIN, gradient_accumulation_fusion=False)),
    "one-recompute": (1, replace(TESTED, **FULL)),  # type: ignore[arg-type]
    "tp2": (2, TP2),
    "tp2-recompute": (2, replace(TP2, **FULL)),  # type: ignore[arg-type]
    "cp2": (2, replace(TESTED, context_parallel_size=2)),
}
HELD = {"linear_proj": "self_attn.o_proj", "linear_fc2": "mlp.down_proj"}  # nothing fused in them
BLOCKS = {"linear_proj": "self_attention", "linear_fc2": "mlp"}


@dataclass(frozen=True)
class Start:
    """A model and an adapter with nothing zero in it, both of bfloat16 values."""

    model: Path
    lora: LoraConfig

    def job(self, layout: MegatronConfig) -> JobSpec:
        return job(replace(role(self.model, layout), lora=self.lora))


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Start:
    model = write_wide(tmp_path_factory.mktemp("model"))
    return Start(model, draw(model, tmp_path_factory.mktemp("start"), LORA))


def draw(model: Path, folder: Path, lora: LoraConfig, scale: float = 1.0) -> LoraConfig:
    drawn = draw_adapter(model, folder, lora)
    round_file(folder / "adapter_model.safetensors", scale)
    return drawn


@dataclass(frozen=True)
class Alone:
    """One rank's outcome in float32, and how far it is from that in bfloat16."""

    reference: Outcome
    yardstick: Errors


@pytest.fixture(scope="module")
def alone(pools: Pools, start: Start) -> Alone:
    found: list[Outcome] = []
    for layout in (REFERENCE, YARDSTICK):
        spec = start.job(layout)
        like = found[0] if found else None
        found.append(train(pools.open(1, spec), spec, like))
    return Alone(found[0], Errors.of(found[1], found[0]))


def merged_rows(host: WorkerHost) -> dict[str, Tensor]:
    """Give this rank's part of the row-parallel weights as the engine would get them."""
    engine = host._roles["actor"].engine
    with engine.groups.active(), engine.weights.merged():
        return {
            name: param.detach().cpu().clone()
            for name, param in engine.weights.params().items()
            if name.split(".")[-2] in HELD
        }


def assert_is_the_sum(written: dict[str, Tensor], start: Start, adapter: dict[str, Tensor]) -> None:
    """Compare a written model with base + adapter, to the rounding of the dtype it has."""
    base = load_file(start.model / "model.safetensors")
    for name, a in adapter.items():
        if ".lora_A." in name:
            key = name.removeprefix(PREFIX).replace("lora_A.", "")
            b = adapter[name.replace("lora_A", "lora_B")]
            base[key] = base[key] + LORA.alpha / LORA.rank * (b.float() @ a.float())
    assert written.keys() == base.keys()
    for name, wanted in base.items():
        assert torch.allclose(written[name].float(), wanted, rtol=2**-7, atol=1e-5), name


@pytest.mark.parametrize("case", CASES)
def test_adapters_train_as_in_float32_and_leave_the_base_alone(
    case: str, pools: Pools, start: Start, alone: Alone, tmp_path: Path
) -> None:
    world, layout = CASES[case]
    spec = start.job(layout)
    try:
        pool = pools.open(world, spec)
        before = pool.each(fingerprints)
        found = train(pool, spec, alone.reference)
        actor = group(pool, spec.actor, SOME_ROWS)
        actor.save(tmp_path)
        merged = pool.each(merged_rows)
        assert pool.each(fingerprints) == before
        later, *_ = actor.log_probs(rows())
    finally:
        pools.forget()
    Errors.of(found, alone.reference).assert_within(alone.yardstick)
    assert (later.values - found.log_probs.values).abs().max() > 0.05  # it trains
    written, adapter = weights_of(tmp_path), adapter_of(tmp_path)
    assert_is_the_sum(written, start, adapter)
    for layer in range(4):
        for mine, theirs in HELD.items():
            name = f"decoder.layers.{layer}.{BLOCKS[mine]}.{mine}.weight"
            parts = [part[name] for part in merged[: layout.tensor_model_parallel_size]]
            held = written[f"model.layers.{layer}.{theirs}.weight"]
            assert torch.equal(torch.cat(parts, dim=1), held), name


@contextmanager
def running(
    folder: Path, layout: MegatronConfig, merge: bool, engine: str
) -> Iterator[tuple[Ranks, live.Hands]]:
    """Run an adapted actor beside an engine in one process."""
    model = live.write_policy(folder / "model")
    # a tenth of the base: answers stay as uncertain as its own, and roundings as small
    lora = draw(model, folder / "start", replace(LORA, merge=merge), scale=0.3)
    spec = live.spec_of(model, layout)
    assert spec.rollout is not None
    actor = replace(spec.actor, lora=lora, optim=OptimConfig(lr=3e-3, weight_decay=0.0))
    rollout = replace(
        spec.rollout,
        config=replace(spec.rollout.config, name=engine),
        lora=None if merge else lora,
    )
    spec = replace(spec, actor=actor, rollout=rollout, device=DEVICE)
    pool = Ranks(1, spec, folder / "logs")
    try:
        pool.open(spec)
        yield pool, live.hands_on(pool)
    finally:
        pool.close()


@pytest.mark.parametrize(
    ("merge", "layout"),
    [(True, MegatronConfig()), (True, live.OFFLOADED), (False, MegatronConfig())],
    ids=["merged", "merged-offloaded", "sent"],
)
def test_an_engine_with_cuda_graphs_follows_the_adapter_through_its_sleep(
    merge: bool, layout: MegatronConfig, tmp_path: Path
) -> None:
    # on the CPU an engine of transformers does where it can, in a fraction of the time
    engine = "vllm" if ON_GPU or not merge else "hf"
    with running(tmp_path, layout, merge, engine) as (pool, hands):
        base = pool.each(fingerprints)
        for step in range(1, 4):
            groups = hands.generate(seed=step)
            assert {s.policy_version for group in groups for s in group} == {step - 1}
            hands.rollout.sleep()
            before = hands.gap(groups)
            assert before < live.MEAN_GAP
            assert hands.step(groups) > 0
            after = hands.gap(groups)
            print(f"\nstep {step}: mean gap {before:.5f}, after the update {after:.5f}")
            assert after > 3 * live.MEAN_GAP, "an update must show"
            # raises where one bit of one tensor differs, or a tensor left its address
            hands.rollout.sync(step)
        groups = hands.generate(seed=4)
        hands.rollout.sleep()
        assert hands.gap(groups) < live.MEAN_GAP
        assert pool.each(fingerprints) == base
