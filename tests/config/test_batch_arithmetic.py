"""A config that is accepted has whole shares of at least one sample everywhere, or it is refused.

Drawn sizes: hundreds of jobs, each accepted or refused before anything starts.
"""

from __future__ import annotations

import random
import re
from dataclasses import replace

import pytest

from mrl.config import build_plan, check_config
from mrl.config.schema import (
    ActorConfig,
    AlgorithmConfig,
    Config,
    CriticConfig,
    DataConfig,
    MegatronConfig,
    RefConfig,
    RolloutConfig,
    TrainerConfig,
)

SIZES = [1, 2, 3, 4, 5, 6, 8, 12, 16]
JOBS = 400


def draw(rng: random.Random) -> Config:
    """Draw sizes of a job whose layouts fit its ranks."""

    def layout(world: int) -> MegatronConfig:
        fits = [
            (tp, pp, cp)
            for tp in (1, 2, 4)
            for pp in (1, 2, 4)
            for cp in (1, 2)
            if world % (tp * pp * cp) == 0
        ]
        tp, pp, cp = rng.choice(fits)
        return MegatronConfig(
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            context_parallel_size=cp,
        )

    world, mini = rng.choice([1, 2, 4, 8, 16, 24]), rng.choice(SIZES)
    return Config(
        data=DataConfig(train_batch_size=mini * rng.choice([1, 1, 2, 3])),
        actor=ActorConfig(
            ppo_mini_batch_size=mini,
            ppo_micro_batch_size_per_gpu=rng.choice([1, 1, 2, 3]),
            use_kl_loss=rng.random() < 0.5,
            ppo_epochs=rng.choice([1, 2]),
            megatron=layout(world),
        ),
        ref=RefConfig(megatron=layout(world)),
        critic=CriticConfig(megatron=layout(world)),
        rollout=RolloutConfig(n=rng.choice([2, 4, 5, 8])),
        algorithm=AlgorithmConfig(adv_estimator=rng.choice(["gae", "grpo"])),
        trainer=TrainerConfig(n_gpus_per_node=world),
    )


@pytest.fixture(scope="module")
def jobs() -> tuple[list[Config], list[Config]]:
    """Accepted and refused jobs."""
    rng = random.Random(0)
    drawn = [draw(rng) for _ in range(JOBS)]
    accepted = [config for config in drawn if not check_config(config)]
    return accepted, [config for config in drawn if config not in accepted]


def test_enough_jobs_are_accepted_and_refused(jobs: tuple[list[Config], list[Config]]) -> None:
    assert all(len(part) > JOBS / 6 for part in jobs)


def test_accepted_jobs_share_every_sample_out_whole(
    jobs: tuple[list[Config], list[Config]],
) -> None:
    for config in jobs[0]:
        plan = build_plan(config)
        actor, n, world = config.actor, config.rollout.n, config.trainer.n_gpus_per_node
        for name, role in plan.roles.items():
            if not role.enabled:
                continue
            layout = role.layout
            assert role.dp == world // (layout.tp * layout.pp * layout.cp) >= 1
            if name == "ref":
                continue
            # what n multiplies is prompts, and the layout changes no step
            assert role.samples_per_rank * role.dp == actor.ppo_mini_batch_size * n
            steps = config.data.train_batch_size // actor.ppo_mini_batch_size * actor.ppo_epochs
            assert role.optimizer_steps == steps >= 1
            assert role.micro_batches is not None and role.micro_batch_size is not None
            assert role.micro_batches * role.micro_batch_size == role.samples_per_rank >= 1
            assert role.logprob_passes is not None and role.logprob_passes >= 1


def test_a_job_is_refused_only_for_a_share_that_is_not_whole(
    jobs: tuple[list[Config], list[Config]],
) -> None:
    for config in jobs[1]:
        n, mini, world = config.rollout.n, config.actor.ppo_mini_batch_size, []
        for layout in (config.actor.megatron, config.critic.megatron):
            assert layout is not None
            model = (
                layout.tensor_model_parallel_size
                * layout.pipeline_model_parallel_size
                * layout.context_parallel_size
            )
            world.append(config.trainer.n_gpus_per_node // model)
        micro = config.actor.ppo_micro_batch_size_per_gpu
        assert micro is not None
        roles = world if config.algorithm.adv_estimator == "gae" else world[:1]
        assert any(mini * n % dp or mini * n // dp % micro for dp in roles)
        for violation in check_config(config):
            assert re.fullmatch(r"(data|actor|critic)\.[a-z_]+( and .*)?", violation.key)
            assert str(violation.value) in str(violation)


def test_the_nearest_numbers_are_legal(jobs: tuple[list[Config], list[Config]]) -> None:
    tried = 0
    for config in jobs[1]:
        (first, *_) = check_config(config)
        plain = re.fullmatch(r"(\d+)(?: and (\d+))?", first.nearest)
        if first.key != "data.train_batch_size and actor.ppo_mini_batch_size" or not plain:
            continue
        for value in filter(None, plain.groups()):
            changed = replace(
                config,
                data=replace(config.data, train_batch_size=int(value)),
                actor=replace(config.actor, ppo_mini_batch_size=int(value)),
            )
            assert not check_config(changed), (first, value)
            tried += 1
    assert tried > 20
