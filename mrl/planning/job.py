"""A checked config with the shapes of its models, ready to be counted."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import ceil
from pathlib import Path

from mrl.config.plan import RolePlan, RunPlan
from mrl.config.roles import RoleSettings, computes_alike, enabled_roles, role_settings
from mrl.config.schema import Config
from mrl.planning.activations import Activations
from mrl.planning.hardware import Machine
from mrl.planning.weights import RoleWeights, State, model_elements
from mrl.resharding.families import ModelShape


@dataclass(frozen=True)
class Role:
    """A Megatron role with its model."""

    settings: RoleSettings
    plan: RolePlan
    shape: ModelShape
    weights: RoleWeights
    activations: Activations

    @property
    def name(self) -> str:
        """Give the role's name."""
        return self.settings.name


@dataclass(frozen=True)
class Job:
    """A checked config with the shapes of its models and the machine that it is planned for."""

    config: Config
    plan: RunPlan
    machine: Machine
    shape: ModelShape  # of the policy
    roles: tuple[Role, ...]

    @staticmethod
    def of(config: Config, plan: RunPlan, machine: Machine) -> Job:
        """Read the shapes; raises FileNotFoundError where a model folder has no config.json."""
        shapes: dict[str, ModelShape] = {}
        roles = []
        for settings in enabled_roles(config):
            role = plan.roles[settings.name]
            if role.model_path not in shapes:
                shapes[role.model_path] = ModelShape.from_folder(Path(role.model_path))
            shape = shapes[role.model_path]
            weights = RoleWeights(
                shape, settings.megatron, role.layout, has_head=settings.name != "critic"
            )
            activations = Activations(shape, settings.megatron, machine.assume.imbalance)
            roles.append(Role(settings, role, shape, weights, activations))
        return Job(config, plan, machine, shapes[config.model.path], tuple(roles))

    @property
    def longest(self) -> int:
        """Give the tokens of the longest sequence."""
        return self.config.data.max_prompt_length + self.config.data.max_response_length

    @property
    def ref_is_actors_base(self) -> bool:
        """Tell whether the reference shares the actor's weights, beside its adapters."""
        actor, ref = (role_settings(self.config, name).megatron for name in ("actor", "ref"))
        return self.config.model.lora.rank > 0 and computes_alike(actor, ref)

    def state(self, role: Role, stage: int) -> State:
        """Count what a role keeps on each rank of a pipeline stage."""
        config, world = self.config, self.plan.trainer_world
        if role.name == "ref":
            if self.ref_is_actors_base:
                return State(0.0, 0.0, 0.0)
            return role.weights.state(stage, world, None)
        optim = config.actor.optim if role.name == "actor" else config.critic.optim
        lora = config.model.lora if role.name == "actor" else None
        return role.weights.state(stage, world, optim, lora)

    @property
    def sleeps(self) -> bool:
        """Tell whether the engine gives its memory back while roles train."""
        return self.config.rollout.name == "vllm" and self.config.rollout.free_cache_engine

    @cached_property
    def model_bytes(self) -> int:
        """Give the bytes of the policy in bfloat16."""
        return 2 * model_elements(self.shape)

    def local_tokens(self, role: Role, log_prob: bool = False) -> int:
        """Give the tokens of a micro-batch on one rank at most."""
        settings, plan = role.settings, role.plan
        cp = plan.layout.cp
        dynamic = settings.log_prob_dynamic if log_prob else settings.dynamic
        if dynamic:
            budget = settings.log_prob_max_token_len if log_prob else settings.max_token_len
            samples = plan.samples_per_rank
            if log_prob:
                samples = ceil(self.plan.samples / plan.dp)
            return min(max(budget, ceil(self.longest / cp)), ceil(samples * self.longest / cp))
        micro = settings.log_prob_micro if log_prob else settings.micro
        return ceil((micro or 1) * self.longest / cp)
