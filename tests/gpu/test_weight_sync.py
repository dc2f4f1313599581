"""Trainer and engine on one GPU, the engine asleep while the actor trains.

Run with `python -m pytest -m gpu tests/gpu`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from mrl.algorithms.reductions import reduced
from mrl.batching.experience import collect
from mrl.config.plan import spread
from mrl.config.schema import MegatronConfig, OptimConfig, ReshardingConfig, RolloutConfig
from mrl.types import Batching, PolicyBatch, Prompt, Sample, SamplingParams
from mrl.workers.group import MegatronRanks, RankPool, RolloutGroup, TrainGroup
from mrl.workers.specs import JobSpec, PolicyLossSpec, RoleSpec, RolloutSpec
from mrl.workers.spmd import SpawnedPool
from tests.models import VOCAB, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
HIDDEN = 256
STEPS = 4
SAMPLING = SamplingParams(n=3, temperature=1.0, top_p=1.0, top_k=-1, max_tokens=24, seed=11)
OFFLOADED = MegatronConfig(param_offload=True, grad_offload=True, optimizer_offload=True)
# Both compute in bfloat16 with kernels of their own: a log-prob differs by roundings of 2 ** -8 of
# logits of a few units.
MEAN_GAP = 0.03


@dataclass(frozen=True)
class Hands:
    """The controller's hands on a job of one rank."""

    actor: TrainGroup
    rollout: RolloutGroup

    def generate(self, seed: int = 11) -> list[tuple[Sample, ...]]:
        return self.rollout.generate(prompts(), replace(SAMPLING, seed=seed))

    def gap(self, groups: list[tuple[Sample, ...]]) -> float:
        """Give the mean difference between the engine's and the actor's log-probs."""
        batch = collect(groups)
        log_probs, *_ = self.actor.log_probs(batch.sequences)
        return float((log_probs.values - batch.rollout_log_probs.values).abs().mean())

    def step(self, groups: list[tuple[Sample, ...]]) -> float:
        """Take an optimizer step that changes every answer; give the gradient norm."""
        batch = collect(groups)
        old, *_ = self.actor.log_probs(batch.sequences)
        advantages = torch.randn(old.values.shape, generator=torch.Generator().manual_seed(5))
        weights = torch.full_like(old.values, 1 / len(old.values))
        mini = PolicyBatch(
            batch.sequences, old, old.with_values(advantages), old.with_values(weights), None
        )
        return float(reduced(self.actor.update(mini))["actor/grad_norm"])


def prompts() -> list[Prompt]:
    generator = torch.Generator().manual_seed(3)
    rows = [torch.randint(2, VOCAB, (n,), generator=generator).tolist() for n in (3, 40, 100, 7)]
    return [Prompt(f"p{i}", tuple(row), "", "", None, {}) for i, row in enumerate(rows)]


def spec_of(model: Path, layout: MegatronConfig) -> JobSpec:
    actor = RoleSpec(
        name="actor",
        path=str(model),
        head="lm",
        layout=layout,
        optim=OptimConfig(lr=3e-3, weight_decay=0.0),
        total_steps=100,
        temperature=1.0,
        trust_remote_code=False,
    )
    rollout = RolloutSpec(
        # CUDA graphs are captured before the first sync, and hold addresses
        config=RolloutConfig(gpu_memory_utilization=0.2, max_num_seqs=16, enforce_eager=False),
        path=str(model),
        tokenizer_path=str(model),
        max_model_len=256,
        trust_remote_code=False,
        resharding=ReshardingConfig(verify="every_step"),
        slots=None,
    )
    return JobSpec(
        actor=actor,
        policy_loss=PolicyLossSpec(0.2, 0.2, 3.0, 0.0, 0.0, "k3"),
        critic=None,
        cliprange_value=0.5,
        ref=None,
        rollout=rollout,
        device="cuda",
        ranks_per_node=1,
        seed=1,
        timeout_s=300.0,
    )


def write_policy(folder: Path) -> Path:
    return write_model(
        folder, "qwen2", hidden_size=HIDDEN, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=512, max_position_embeddings=256,
        vocab_size=1024, initializer_range=0.05,
    )  # fmt: skip


@contextmanager
def running(folder: Path, layout: MegatronConfig) -> Iterator[Hands]:
    """Run a job in a process of its own and bring the first weights into the engine."""
    model = write_policy(folder / "model")
    pool = SpawnedPool(1, spec_of(model, layout), folder / "logs")
    try:
        yield hands_on(pool)
    finally:
        pool.close()


def hands_on(pool: RankPool) -> Hands:
    """Bring the first weights into the engine."""
    batching = Batching(max_tokens=1024)
    actor = TrainGroup(pool, "actor", MegatronRanks(1, 1, 1, 1), batching, batching, HIDDEN)
    rollout = RolloutGroup(pool, 1, spread)
    rollout.sync(0)
    return Hands(actor, rollout)


@pytest.mark.parametrize("layout", [MegatronConfig(), OFFLOADED], ids=["there", "offloaded"])
def test_an_engine_with_cuda_graphs_follows_every_update_through_its_sleep(
    tmp_path: Path, layout: MegatronConfig
) -> None:
    in_use = []
    with running(tmp_path, layout) as hands:
        for step in range(1, STEPS + 1):
            groups = hands.generate(seed=step)
            assert {s.policy_version for group in groups for s in group} == {step - 1}
            in_use += hands.rollout.sleep()
            assert hands.gap(groups) < MEAN_GAP
            assert hands.step(groups) > 0
            if step == 1:
                assert hands.gap(groups) > 3 * MEAN_GAP, "an update must show"
            # raises where one bit of one tensor differs, or a tensor left its address
            hands.rollout.sync(step)
        groups = hands.generate(seed=STEPS + 1)
        in_use += hands.rollout.sleep()
        assert hands.gap(groups) < MEAN_GAP
    # the second step has everything that training ever makes; it comes and goes from there on
    assert max(in_use[1:]) - min(in_use[1:]) < 64 * 1024**2


def test_samples_depend_on_the_seed_and_on_nothing_that_happened_before(tmp_path: Path) -> None:
    with running(tmp_path, MegatronConfig()) as hands:
        first = [sample.response_ids for group in hands.generate(1) for sample in group]
        other = [sample.response_ids for group in hands.generate(2) for sample in group]
        again = [sample.response_ids for group in hands.generate(1) for sample in group]
        hands.rollout.sleep()
        hands.rollout.sync(1)  # the same weights
        woken = [sample.response_ids for group in hands.generate(1) for sample in group]
    assert first != other
    assert first == again == woken
    assert len(set(first)) > len(first) // 2, "samples of one prompt differ"
