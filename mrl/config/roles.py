"""What each Megatron role is set to, once every "None: the actor's" is followed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import Any

from mrl.config.schema import Config, MegatronConfig
from mrl.config.stages import Chunks, layers_of_chunk

ROLES = ("actor", "critic", "ref")

_ACTOR = {
    "megatron": "actor.megatron",
    "mini": "actor.ppo_mini_batch_size",
    "micro": "actor.ppo_micro_batch_size_per_gpu",
    "dynamic": "actor.use_dynamic_bsz",
    "max_token_len": "actor.ppo_max_token_len_per_gpu",
    "epochs": "actor.ppo_epochs",
}


def _own_or_actor(role: str) -> dict[str, tuple[str, ...]]:
    return {name: (key.replace("actor.", f"{role}."), key) for name, key in _ACTOR.items()}


# For every role and setting the keys to ask; the first one that is not None wins.
_CHAINS: dict[str, dict[str, tuple[str, ...]]] = {
    "actor": {name: (key,) for name, key in _ACTOR.items()}
    | {
        "log_prob_micro": ("rollout.log_prob_micro_batch_size_per_gpu", _ACTOR["micro"]),
        "log_prob_dynamic": ("rollout.log_prob_use_dynamic_bsz", _ACTOR["dynamic"]),
        "log_prob_max_token_len": (
            "rollout.log_prob_max_token_len_per_gpu",
            _ACTOR["max_token_len"],
        ),
    },
    # The critic's passes over the rollout (values) are cut like its training.
    "critic": _own_or_actor("critic")
    | {
        f"log_prob_{name}": _own_or_actor("critic")[name]
        for name in ("micro", "dynamic", "max_token_len")
    },
    "ref": {name: (key,) for name, key in _ACTOR.items()}
    | {
        "megatron": ("ref.megatron", _ACTOR["megatron"]),
        "log_prob_micro": (
            "ref.log_prob_micro_batch_size_per_gpu",
            "rollout.log_prob_micro_batch_size_per_gpu",
            _ACTOR["micro"],
        ),
        "log_prob_dynamic": ("ref.log_prob_use_dynamic_bsz", _ACTOR["dynamic"]),
        "log_prob_max_token_len": (
            "ref.log_prob_max_token_len_per_gpu",
            _ACTOR["max_token_len"],
        ),
    },
}


@dataclass(frozen=True)
class RoleSettings:
    """The settings in force for one role; `keys` says where each of them was set."""

    name: str
    enabled: bool
    trained: bool
    megatron: MegatronConfig
    mini: int  # prompts an optimizer step
    epochs: int
    micro: int | None  # samples
    dynamic: bool
    max_token_len: int  # tokens a GPU
    log_prob_micro: int | None  # samples
    log_prob_dynamic: bool
    log_prob_max_token_len: int  # tokens a GPU
    keys: Mapping[str, str]

    @property
    def ranks_a_replica(self) -> int:
        """Count the ranks that hold one copy of the weights' computation: tp * pp * cp."""
        m = self.megatron
        return (
            m.tensor_model_parallel_size * m.pipeline_model_parallel_size * m.context_parallel_size
        )


def world_size(config: Config) -> int:
    """Count the ranks of the job."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def trainer_ranks(config: Config) -> range:
    """Give the ranks that hold actor, critic and reference: the first of the job."""
    placement = config.placement
    return range(_side(config, placement.trainer_gpus, placement.rollout_gpus))


def rollout_ranks(config: Config) -> range:
    """Give the ranks that hold the engine: the last of the job."""
    world, placement = world_size(config), config.placement
    return range(world - _side(config, placement.rollout_gpus, placement.trainer_gpus), world)


def _side(config: Config, own: int | None, other: int | None) -> int:
    """Count the ranks of a side: its own number, or what the other one leaves."""
    world = world_size(config)
    if config.placement.mode != "disaggregated":
        return world
    return world - (other or 0) if own is None else own


def computes_alike(actor: MegatronConfig, ref: MegatronConfig) -> bool:
    """Tell whether a reference laid out so could be the model that the actor's adapters leave.

    What it shares takes no memory of its own, on the host or elsewhere.
    """
    return replace(ref, param_offload=actor.param_offload) == actor


def is_split_unevenly(layout: MegatronConfig) -> bool:
    """Tell whether a pipeline's stages are asked to differ."""
    return (
        layout.num_layers_in_first_pipeline_stage is not None
        or layout.num_layers_in_last_pipeline_stage is not None
        or layout.account_for_embedding_in_pipeline_split
        or layout.account_for_loss_in_pipeline_split
    )


def split_layers(layout: MegatronConfig, num_layers: int) -> Chunks:
    """List the layers of each chunk of each stage; raises ValueError as `layers_of_chunk` does."""
    return layers_of_chunk(
        num_layers,
        layout.pipeline_model_parallel_size,
        layout.virtual_pipeline_model_parallel_size or 1,
        layout.num_layers_in_first_pipeline_stage,
        layout.num_layers_in_last_pipeline_stage,
        layout.account_for_embedding_in_pipeline_split,
        layout.account_for_loss_in_pipeline_split,
    )


def role_settings(config: Config, role: str) -> RoleSettings:
    """Follow the keys of one role to the values in force."""
    values: dict[str, Any] = {}
    keys: dict[str, str] = {}
    for name, chain in _CHAINS[role].items():
        keys[name], values[name] = _first_set(config, chain)
    return RoleSettings(
        name=role, enabled=_is_enabled(config, role), trained=role != "ref", keys=keys, **values
    )


def enabled_roles(config: Config) -> tuple[RoleSettings, ...]:
    """List the roles that the run has."""
    settings = [role_settings(config, role) for role in ROLES]
    return tuple(role for role in settings if role.enabled)


def _first_set(config: Config, chain: tuple[str, ...]) -> tuple[str, Any]:
    for key in chain:
        value = attrgetter(key)(config)
        if value is not None:
            return key, value
    return chain[-1], None


def _is_enabled(config: Config, role: str) -> bool:
    if role == "critic":
        return config.algorithm.adv_estimator == "gae"
    if role == "ref":
        return config.actor.use_kl_loss or config.algorithm.use_kl_in_reward
    return True
