"""What ranks are told when a job starts: plain data, cut from the config by the controller."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mrl.config.bounds import Correction
from mrl.config.roles import computes_alike
from mrl.config.schema import (
    LoraConfig,
    MegatronConfig,
    OptimConfig,
    ReshardingConfig,
    RolloutConfig,
)


@dataclass(frozen=True, slots=True)
class RoleSpec:
    """One Megatron role."""

    name: str  # actor | critic | ref
    path: str  # Hugging Face folder
    head: str  # lm | value
    layout: MegatronConfig
    optim: OptimConfig | None  # None: frozen
    total_steps: int  # optimizer steps of the whole run, for the schedule
    temperature: float
    trust_remote_code: bool
    router_replay: str = "disabled"  # actor.router_replay.mode
    lora: LoraConfig | None = None  # None: the model itself is trained


@dataclass(frozen=True, slots=True)
class PolicyLossSpec:
    """The resolved settings of the policy loss."""

    clip_low: float
    clip_high: float
    clip_c: float
    entropy_coeff: float
    kl_loss_coef: float
    kl_loss_type: str
    loss_mode: str = "vanilla"  # a name in POLICY_LOSSES
    # of each micro-batch by its own log-probs, where the old ones are the engine's; None: none
    correction: Correction | None = None


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """The engine of a rank."""

    config: RolloutConfig
    path: str
    tokenizer_path: str
    max_model_len: int
    trust_remote_code: bool
    resharding: ReshardingConfig
    slots: tuple[int, ...] | None  # of the engine's ranks in order; None: slot i on the i-th rank
    returns_routing: bool = False  # samples say which experts were chosen
    lora: LoraConfig | None = None  # of the adapter that is sent beside the base; None: merged


@dataclass(frozen=True, slots=True)
class JobSpec:
    """Everything a rank holds; the same on all ranks. Roles that are None are not in the job."""

    actor: RoleSpec
    policy_loss: PolicyLossSpec
    critic: RoleSpec | None
    cliprange_value: float
    ref: RoleSpec | None
    rollout: RolloutSpec | None
    device: str  # cpu | cuda
    ranks_per_node: int
    seed: int
    timeout_s: float
    trainer_ranks: range | None = None  # with actor, critic, reference: the first; None: all
    rollout_ranks: range | None = None  # with the engine: the last of the job; None: all
    deterministic: bool = False  # training computes the same bits every time
    hang_timeout_s: float = math.inf  # longest that a rank may be at one call

    @property
    def ref_is_actors_base(self) -> bool:
        """Say whether the reference is the model that the actor's adapters leave as it is."""
        actor, ref = self.actor, self.ref
        if actor.lora is None or ref is None:
            return False
        return ref.path == actor.path and computes_alike(actor.layout, ref.layout)


@dataclass(frozen=True, slots=True)
class RankInfo:
    """Where a rank runs."""

    rank: int
    host: str
    pid: int
    device: str  # as torch names it
    device_name: str  # as the vendor names it; "cpu" without a GPU
