"""The derived numbers of a run: what is printed here is what runs.

Every setting that the schema leaves to be derived is resolved here; workers and trainer read it
from `RunPlan`. Exact for a config that passed `check_config`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from mrl.config.bounds import parse_correction
from mrl.config.caveats import find_warnings
from mrl.config.errors import ConfigError, Violation, raise_any
from mrl.config.roles import (
    ROLES,
    RoleSettings,
    role_settings,
    rollout_ranks,
    trainer_ranks,
    world_size,
)
from mrl.config.schema import Config, OptimConfig


@dataclass(frozen=True)
class ParallelLayout:
    """How the ranks of a role share the model and the data."""

    tp: int
    pp: int
    vpp: int | None  # model chunks a pipeline rank; None: no interleaving
    cp: int
    ep: int
    etp: int
    dp: int
    sequence_parallel: bool


@dataclass(frozen=True)
class RolePlan:
    """What one rank of a role does in a step.

    Of `micro_batch_size` and `max_token_len` exactly one is set; likewise of the two for
    log-probs (for the critic: values). Numbers of a role that is not enabled say what it would do.
    """

    enabled: bool
    layout: ParallelLayout
    dp: int
    samples_per_rank: int  # trained roles: of one optimizer step; ref: of the rollout
    micro_batches: int | None  # of one optimizer step; None: by token budget; ref: 0
    logprob_passes: int | None  # forward passes over the rollout; None: by token budget
    optimizer_steps: int  # of one rollout
    micro_batch_size: int | None  # samples
    max_token_len: int | None  # tokens of a packed row, spread over the cp ranks
    log_prob_micro_batch_size: int | None  # samples
    log_prob_max_token_len: int | None  # tokens of a packed row
    model_path: str


@dataclass(frozen=True)
class RunPlan:
    """Every number that follows from the config alone."""

    world_size: int
    prompts: int  # of a step
    samples: int  # of a step
    tokens_per_step: int  # at most: every prompt and response at its limit
    trainer_world: int  # ranks of actor, critic and reference: the first ones
    rollout_world: int  # ranks of the engine: the last ones
    replicas: int  # of the engine
    rollout_tp: int
    prompts_per_replica: tuple[int, ...]
    sequences_per_replica: tuple[int, ...]
    max_model_len: int  # tokens of the engine's longest sequence
    roles: Mapping[str, RolePlan]
    clip_ratio_low: float
    clip_ratio_high: float
    loss_scale_factors: Mapping[str, float]  # of actor and critic: seq-mean-token-sum-norm's
    first_log_probs_from_update: bool  # the pass before leaves a step's first mini-batch out
    tokenizer_path: str
    val_temperature: float  # 0: greedy
    warnings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Give the plan as JSON types, for `plan.json` and `mrl plan --json`."""
        plan = asdict(self)
        for name in ("prompts_per_replica", "sequences_per_replica", "warnings"):
            plan[name] = list(plan[name])
        return plan


def build_plan(config: Config) -> RunPlan:
    """Derive the numbers of a run from a checked config."""
    data, rollout, actor = config.data, config.rollout, config.actor
    samples = data.train_batch_size * rollout.n
    longest = data.max_prompt_length + data.max_response_length
    rollout_world = len(rollout_ranks(config))
    replicas = rollout_world // rollout.tensor_model_parallel_size
    prompts_per_replica = spread(data.train_batch_size, replicas)
    val = rollout.val_kwargs
    return RunPlan(
        world_size=world_size(config),
        prompts=data.train_batch_size,
        samples=samples,
        tokens_per_step=samples * longest,
        trainer_world=len(trainer_ranks(config)),
        rollout_world=rollout_world,
        replicas=replicas,
        rollout_tp=rollout.tensor_model_parallel_size,
        prompts_per_replica=prompts_per_replica,
        sequences_per_replica=tuple(p * rollout.n for p in prompts_per_replica),
        max_model_len=longest if rollout.max_model_len is None else rollout.max_model_len,
        roles={name: _plan_role(config, role_settings(config, name)) for name in ROLES},
        clip_ratio_low=_or(actor.clip_ratio_low, actor.clip_ratio),
        clip_ratio_high=_or(actor.clip_ratio_high, actor.clip_ratio),
        loss_scale_factors={
            "actor": _or(actor.loss_scale_factor, data.max_response_length),
            "critic": _or(config.critic.loss_scale_factor, data.max_response_length),
        },
        first_log_probs_from_update=_first_from_update(config),
        tokenizer_path=config.model.tokenizer_path or config.model.path,
        val_temperature=val.temperature if val.do_sample else 0.0,
        warnings=find_warnings(config),
    )


def spread(total: int, parts: int) -> tuple[int, ...]:
    """Cut `total` into parts that differ by at most one, the larger first."""
    size, rest = divmod(total, parts)
    return tuple(size + (part < rest) for part in range(parts))


def training_steps(config: Config, rows: int) -> int:
    """Count the steps of a run over `rows` usable rows; the last short batch of an epoch is left.

    Raises `ConfigError` when the rows do not fill one batch.
    """
    batch, trainer = config.data.train_batch_size, config.trainer
    if rows < batch:
        found = Violation(
            "data.train_batch_size",
            batch,
            f"{rows} rows after filtering < train_batch_size {batch}: no step can be made",
            f"at most {rows}" if rows else "",
        )
        raise ConfigError([found])
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    total = rows // batch * trainer.total_epochs
    raise_any(late_profiles(config, total))
    return total


def late_profiles(config: Config, total_steps: int) -> list[Violation]:
    """Find steps to profile that the run does not reach."""
    return [
        Violation(
            "trainer.profile_steps", step, f"the run has {total_steps} steps", str(total_steps)
        )
        for step in config.trainer.profile_steps
        if step > total_steps
    ]


def warmup_steps(optim: OptimConfig, total_steps: int) -> int:
    """Count the steps over which the learning rate rises, out of the run's total."""
    if optim.lr_warmup_steps >= 0:
        return optim.lr_warmup_steps
    return int(optim.lr_warmup_steps_ratio * total_steps)


def _first_from_update(config: Config) -> bool:
    """Say whether nothing asks for the log-probs of a step's first mini-batch before its update."""
    actor, rules = config.actor, config.algorithm.rollout_correction
    return (
        actor.first_log_probs_from_update
        and actor.ppo_epochs == 1  # later epochs need those of all
        and actor.router_replay.mode != "R2"  # routers repeat the pass before
        and not config.algorithm.use_kl_in_reward
        and not rules.bypass_mode
        and not parse_correction(rules).acts
        and rules.alarm_action != "stop"
    )


def _plan_role(config: Config, role: RoleSettings) -> RolePlan:
    data, n = config.data, config.rollout.n
    layout = _layout(role, len(trainer_ranks(config)))
    rollout_samples = ceil(data.train_batch_size * n / layout.dp)
    step_samples = ceil(role.mini * n / layout.dp)
    micro = None if role.dynamic else role.micro
    log_prob_micro = None if role.log_prob_dynamic else role.log_prob_micro
    micro_batches = None if micro is None else ceil(step_samples / micro)
    return RolePlan(
        enabled=role.enabled,
        layout=layout,
        dp=layout.dp,
        samples_per_rank=step_samples if role.trained else rollout_samples,
        micro_batches=micro_batches if role.trained else 0,
        logprob_passes=None if log_prob_micro is None else ceil(rollout_samples / log_prob_micro),
        optimizer_steps=data.train_batch_size // role.mini * role.epochs if role.trained else 0,
        micro_batch_size=micro,
        max_token_len=role.max_token_len * layout.cp if role.dynamic else None,
        log_prob_micro_batch_size=log_prob_micro,
        log_prob_max_token_len=(
            role.log_prob_max_token_len * layout.cp if role.log_prob_dynamic else None
        ),
        model_path=(config.critic.path if role.name == "critic" else None) or config.model.path,
    )


def _layout(role: RoleSettings, world: int) -> ParallelLayout:
    m = role.megatron
    vpp = m.virtual_pipeline_model_parallel_size
    return ParallelLayout(
        tp=m.tensor_model_parallel_size,
        pp=m.pipeline_model_parallel_size,
        vpp=None if vpp == 1 else vpp,
        cp=m.context_parallel_size,
        ep=m.expert_model_parallel_size,
        etp=_or(m.expert_tensor_parallel_size, m.tensor_model_parallel_size),
        dp=max(1, world // role.ranks_a_replica),  # below 1 only for a role that is off
        sequence_parallel=m.sequence_parallel and m.tensor_model_parallel_size > 1,
    )


def _or[T](value: T | None, fallback: T) -> T:
    return fallback if value is None else value
