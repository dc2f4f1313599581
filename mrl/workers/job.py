"""From a config to running roles: who is in the job, and by which launcher."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from mrl.config import Config, RunPlan
from mrl.config.bounds import parse_correction
from mrl.config.plan import spread
from mrl.config.roles import role_settings, rollout_ranks, trainer_ranks
from mrl.config.schema import LoraConfig
from mrl.resharding.families import ModelShape
from mrl.resharding.report import source_layout, target_layout
from mrl.resharding.slots import choose_slots
from mrl.types import Batching
from mrl.workers.busy import RankSeconds
from mrl.workers.group import MegatronRanks, RankPool, RolloutGroup, TrainGroup, call_all
from mrl.workers.launched import run_under_launcher, serve_rank
from mrl.workers.specs import JobSpec, PolicyLossSpec, RankInfo, RoleSpec, RolloutSpec
from mrl.workers.spmd import SpawnedPool

Control = Callable[[RankPool], None]


@dataclass(frozen=True, slots=True)
class Roles:
    """The groups that the trainer speaks to; a role that is None is not in the job."""

    actor: TrainGroup
    critic: TrainGroup | None
    ref: TrainGroup | None
    rollout: RolloutGroup
    ranks: tuple[RankInfo, ...]
    busy: RankSeconds  # of the ranks that work on rows


def device_of(config: Config) -> str:
    """Resolve trainer.device: `cuda` where there is one, unless the config says otherwise."""
    if config.trainer.device != "auto":
        return config.trainer.device
    return "cuda" if torch.cuda.is_available() else "cpu"


def supervised_job_spec(config: Config, plan: RunPlan, total_steps: int) -> JobSpec:
    """Cut the job of supervised training: the actor alone, one optimizer step a step."""
    spec = training_job_spec(config, plan, total_steps)
    actor = replace(spec.actor, total_steps=total_steps, temperature=1.0, router_replay="disabled")
    return replace(spec, actor=actor, critic=None, ref=None)


def job_spec(config: Config, plan: RunPlan, total_steps: int) -> JobSpec:
    """Cut what each rank needs out of the config; `total_steps` are the trainer's.

    Raises ValueError where actor or engine cannot be laid out.
    """
    lora = config.model.lora
    rollout = RolloutSpec(
        config=config.rollout,
        path=str(Path(config.model.path).absolute()),
        tokenizer_path=str(Path(plan.tokenizer_path).absolute()),
        max_model_len=plan.max_model_len,
        trust_remote_code=config.model.trust_remote_code,
        resharding=config.resharding,
        slots=_engine_slots(config, plan),
        returns_routing=config.actor.router_replay.mode == "R3",
        lora=lora if lora.rank > 0 and not lora.merge else None,
    )
    return replace(training_job_spec(config, plan, total_steps), rollout=rollout)


def training_job_spec(config: Config, plan: RunPlan, total_steps: int) -> JobSpec:
    """Cut the job of actor, critic and reference, as `job_spec` does, without an engine."""
    actor, correction = config.actor, config.algorithm.rollout_correction
    return JobSpec(
        actor=_role(config, plan, "actor", total_steps),
        policy_loss=PolicyLossSpec(
            clip_low=plan.clip_ratio_low,
            clip_high=plan.clip_ratio_high,
            clip_c=actor.clip_ratio_c,
            entropy_coeff=actor.entropy_coeff,
            kl_loss_coef=actor.kl_loss_coef,
            kl_loss_type=actor.kl_loss_type,
            loss_mode=_loss_mode(config),
            correction=parse_correction(correction) if correction.bypass_mode else None,
        ),
        critic=_enabled(config, plan, "critic", total_steps),
        cliprange_value=config.critic.cliprange_value,
        ref=_enabled(config, plan, "ref", total_steps),
        rollout=None,
        device=device_of(config),
        trainer_ranks=trainer_ranks(config),
        rollout_ranks=rollout_ranks(config),
        ranks_per_node=config.trainer.n_gpus_per_node,
        seed=config.trainer.seed,
        timeout_s=config.trainer.fault_timeout_s,
        hang_timeout_s=config.trainer.hang_timeout_s,
        deterministic=config.trainer.full_determinism,
    )


def _loss_mode(config: Config) -> str:
    """Name the loss; REINFORCE is the policy gradient as it is, weighed by the correction."""
    correction = config.algorithm.rollout_correction
    if correction.bypass_mode and correction.loss_type == "reinforce":
        return "gpg"
    return config.actor.policy_loss.loss_mode


def _engine_slots(config: Config, plan: RunPlan) -> tuple[int, ...] | None:
    """Choose the engine slot of each of its ranks, so that a sync moves the fewest bytes.

    None where slot i goes to the i-th rank.
    """
    if config.rollout.name != "vllm" or config.resharding.mode != "direct":
        return None
    shape = ModelShape.from_folder(Path(config.model.path))
    src, engine = source_layout(config, shape).layout(), target_layout(config, shape).layout()
    slots = choose_slots(src, engine, plan.rollout_tp)
    return None if slots == tuple(range(len(slots))) else slots


def _enabled(config: Config, plan: RunPlan, name: str, total_steps: int) -> RoleSpec | None:
    return _role(config, plan, name, total_steps) if plan.roles[name].enabled else None


def _role(config: Config, plan: RunPlan, name: str, total_steps: int) -> RoleSpec:
    optim = {"actor": config.actor.optim, "critic": config.critic.optim, "ref": None}[name]
    return RoleSpec(
        name=name,
        path=str(Path(plan.roles[name].model_path).absolute()),
        head="value" if name == "critic" else "lm",
        layout=role_settings(config, name).megatron,
        optim=optim,
        total_steps=total_steps * plan.roles[name].optimizer_steps,
        temperature=config.rollout.temperature,
        trust_remote_code=config.model.trust_remote_code,
        router_replay=config.actor.router_replay.mode if name == "actor" else "disabled",
        lora=_adapter(config.model.lora) if name == "actor" else None,
    )


def _adapter(lora: LoraConfig) -> LoraConfig | None:
    """Give the adapter to train, its path whatever folder the ranks start in; None without one."""
    if lora.rank == 0:
        return None
    path = lora.adapter_path
    return replace(lora, adapter_path=str(Path(path).absolute()) if path is not None else None)


def roles_on(pool: RankPool, config: Config, plan: RunPlan, spec: JobSpec) -> Roles:
    """Make the groups of a running job."""
    shape = ModelShape.from_folder(Path(config.model.path))
    busy = RankSeconds()

    def group(name: str) -> TrainGroup:
        role = plan.roles[name]
        return TrainGroup(
            pool,
            name,
            MegatronRanks(
                role.layout.tp,
                role.layout.cp,
                role.dp,
                role.layout.pp,
                interleaved=role.layout.vpp is not None,
            ),
            _batching(role.micro_batch_size, role.max_token_len),
            _batching(role.log_prob_micro_batch_size, role.log_prob_max_token_len),
            shape.hidden_size,
            balanced=config.trainer.balance_batch,
            busy=busy,
        )

    everyone = range(pool.world_size)
    return Roles(
        actor=group("actor"),
        critic=group("critic") if plan.roles["critic"].enabled else None,
        ref=group("ref") if plan.roles["ref"].enabled else None,
        rollout=RolloutGroup(
            pool,
            plan.rollout_tp,
            spread,
            rollout_ranks(config),
            spec.rollout.slots if spec.rollout else None,
            busy,
        ),
        ranks=tuple(call_all(pool, everyone, "host", "describe")),
        busy=busy,
    )


def _batching(micro_batch_size: int | None, max_tokens: int | None) -> Batching:
    return Batching(micro_batch_size=micro_batch_size, max_tokens=max_tokens)


def serve_as_rank(config: Config) -> bool:
    """Serve the controller if torchrun or srun made this process another rank than 0.

    Gives False, at once, where this process is the controller's.
    """
    environment = launcher_environment(os.environ)
    if config.trainer.launcher == "ray" or not environment:
        return False
    os.environ.update(environment)
    if environment["RANK"] == "0":
        return False
    serve_rank(device_of(config), config.trainer.full_determinism)
    return True


def launcher_environment(given: Mapping[str, str]) -> dict[str, str]:
    """Give the variables of a rank that a launcher started, srun's under torchrun's names.

    Empty without a launcher. Raises ValueError for an environment that is only half there.
    """
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    found = {name: given[name] for name in names if name in given}
    if "RANK" not in found:
        if int(given.get("SLURM_NTASKS", "1")) == 1 or "SLURM_PROCID" not in given:
            return {}
        found |= {
            "RANK": given["SLURM_PROCID"],
            "LOCAL_RANK": given["SLURM_LOCALID"],
            "WORLD_SIZE": given["SLURM_NTASKS"],
        }
    lost = [name for name in names if name not in found]
    if lost:
        raise ValueError(
            f"this process is rank {found['RANK']} of a launcher, but {', '.join(lost)} is not "
            "set: start it with torchrun, or set it in the batch script (see launch/)"
        )
    return found


def run_job(config: Config, plan: RunPlan, spec: JobSpec, control: Control) -> None:
    """Start the ranks by `trainer.launcher`, run `control(pool)` beside them, and end them.

    Under torchrun or srun (RANK is set) this process is a rank: `control` runs on rank 0 only.
    Raises WorkerError with the first cause when a rank fails, ValueError when the launcher's
    ranks are not those of the config.
    """
    if config.trainer.launcher == "ray":
        if not os.environ.get("RAY_ADDRESS"):
            # Ray reads it at import: a cluster of this host alone then listens on loopback only.
            os.environ.setdefault("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")
        from mrl.workers.ray import RayPool  # ray is optional

        ray_pool = RayPool(plan.world_size, spec)
        try:
            control(ray_pool)
        finally:
            ray_pool.close()
    elif launcher_environment(os.environ):
        _run_launched(plan, spec, control, config.trainer.max_restarts)
    else:
        if config.trainer.nnodes > 1:
            raise ValueError(
                f"trainer.nnodes is {config.trainer.nnodes}: start every node with torchrun "
                "(launch/torchrun.sh), or use trainer.launcher=ray"
            )
        logs = Path(config.trainer.default_local_dir) / "logs"
        pool = SpawnedPool(plan.world_size, spec, logs)
        try:
            control(pool)
        finally:
            pool.close()


def _run_launched(plan: RunPlan, spec: JobSpec, control: Control, max_restarts: int) -> None:
    world_size = int(os.environ["WORLD_SIZE"])
    if world_size != plan.world_size:
        raise ValueError(
            f"the launcher started {world_size} ranks (WORLD_SIZE), the config asks for "
            f"{plan.world_size} (trainer.nnodes * trainer.n_gpus_per_node): make them equal"
        )
    theirs = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
    if max_restarts not in (0, theirs):
        raise ValueError(
            f"trainer.max_restarts is {max_restarts}, but the launcher restarts ranks {theirs} "
            "times: under torchrun give --max-restarts (MAX_RESTARTS for launch/torchrun.sh)"
        )

    def run(make_pool: Callable[[JobSpec], RankPool]) -> None:
        pool = make_pool(spec)
        try:
            control(pool)
        finally:
            pool.close()

    run_under_launcher(spec.device, run, spec.deterministic)
