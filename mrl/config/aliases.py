"""Old and short spellings of keys, in one table, so that a verl command line works unchanged.

A text entry renames a key or everything below it; entries chain (the prefix `actor_rollout_ref`
goes first, then the rest is looked up again). A `Legacy` entry stands for a key without a
counterpart of the same meaning: each value it may have is written as settings of today's keys.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mrl.config.schema import LoraConfig


@dataclass(frozen=True)
class Legacy:
    """A key of which only some values mean something here."""

    settings: Mapping[Any, Mapping[str, Any]]  # value -> today's key -> value
    why: str  # told when another value is found
    overrides: bool = False  # wins over today's keys; otherwise they must say the same


def _only(value: Any, why: str) -> Legacy:
    return Legacy({value: {}}, why)


_ROLES = ("actor", "critic", "ref")

ALIASES: dict[str, str | Legacy] = {
    "actor_rollout_ref": "",
    "actor_rollout.megatron": "actor.megatron",
    "actor_rollout.vllm": "rollout",
    "rollout.tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "critic.model.path": "critic.path",
    "custom_reward_function": "reward.custom_reward_function",
    "data.filter_overlong_prompts": Legacy(
        # Whatever data.truncation says: after the filter no prompt is left to truncate.
        {True: {"data.truncation": "filter"}, False: {}},
        "says whether over-long prompts are filtered (data.truncation=filter)",
        overrides=True,
    ),
    "trainer.enable_resharding": _only(
        True, "weights always reach the engine by resharding; it cannot be switched off"
    ),
    "trainer.colocate_actor_critic": Legacy(
        {True: {"placement.mode": "colocated"}},
        "actor and critic on different ranks is not supported yet",
    ),
    "model_engine": _only("megatron", "the training engine is Megatron-Core"),
    "model.use_remove_padding": _only(True, "sequences are always packed without padding"),
    "model.lora_rank": "model.lora.rank",
    "model.lora_alpha": "model.lora.alpha",
    "model.target_modules": "model.lora.target_modules",
    "model.lora_adapter_path": "model.lora.adapter_path",
    "model.lora.type": _only("lora", "only plain low-rank adapters are trained"),
    "model.lora.dropout": _only(0, "nothing drops out: log-probs of two passes must agree"),
    "model.use_fused_kernels": "actor.megatron.use_fused_kernels",
    "model.enable_gradient_checkpointing": Legacy(
        {
            True: {
                "actor.megatron.recompute_granularity": "full",
                "actor.megatron.recompute_method": "uniform",
                "actor.megatron.recompute_num_layers": 1,
            },
            False: {"actor.megatron.recompute_granularity": None},
        },
        "says whether activations are computed again backward "
        "(actor.megatron.recompute_granularity=full)",
    ),
    "actor.policy_loss.loss_mode": _only("vanilla", "only the clipped PPO loss is supported"),
    "rollout.enable_rollout_routing_replay": Legacy(
        {True: {"actor.router_replay.mode": "R3"}, False: {}},
        "says whether training repeats the engine's routing (actor.router_replay.mode=R3)",
    ),
    "rollout.calculate_log_probs": _only(True, "the engine always returns log-probs"),
    "rollout.logprobs_mode": _only(
        "processed_logprobs", "log-probs always have the temperature applied"
    ),
}
for _role in _ROLES:
    _megatron = f"{_role}.megatron"
    ALIASES |= {
        f"{_role}.ulysses_sequence_parallel_size": f"{_megatron}.context_parallel_size",
        f"{_megatron}.tensor_parallel_size": f"{_megatron}.tensor_model_parallel_size",
        f"{_megatron}.pipeline_parallel_size": f"{_megatron}.pipeline_model_parallel_size",
        f"{_megatron}.expert_parallel_size": f"{_megatron}.expert_model_parallel_size",
        f"{_role}.strategy": _only("megatron", "the training engine is Megatron-Core"),
        f"{_megatron}.moe_router_dtype": _only("fp32", "routers always compute in float32"),
        f"{_megatron}.moe_token_dispatcher_type": _only(
            "alltoall", "tokens reach their experts by all-to-all"
        ),
        f"{_megatron}.moe_enable_deepep": _only(
            False, "tokens reach their experts by Megatron's all-to-all"
        ),
    }
    ALIASES |= {
        f"{_megatron}.override_transformer_config": _megatron,
        f"{_megatron}.override_ddp_config": _megatron,
    }
for _role in ("actor", "critic"):
    ALIASES[f"{_role}.optim.override_optimizer_config"] = f"{_role}.optim"

# Values with another spelling than the field's type allows.
VALUE_ALIASES: dict[str, dict[Any, Any]] = {
    "model.lora.target_modules": {"all-linear": list(LoraConfig().target_modules)},
    "trainer.logger": {"none": [], None: []},
    # YAML reads a plain `off` as false
    "resharding.verify": {False: "off", True: "every_step"},
}

LEGACY: dict[str, Legacy] = {k: v for k, v in ALIASES.items() if isinstance(v, Legacy)}
_RENAMES: dict[str, str] = {k: v for k, v in ALIASES.items() if isinstance(v, str)}
_PLAIN_INTERPOLATION = re.compile(r"\$\{([A-Za-z_][\w.]*)\}")


def rename(key: str) -> str:
    """Give today's spelling of a dotted key, the key itself when it has no other."""
    parts = key.split(".")
    for size in range(len(parts), 0, -1):
        new = _RENAMES.get(".".join(parts[:size]))
        if new is not None and (new or size < len(parts)):
            return rename(".".join([*filter(None, [new]), *parts[size:]]))
    return key


def rename_references(value: Any) -> Any:
    """Give today's spelling of the keys that `${...}` in a value refers to."""
    if isinstance(value, str):
        return _PLAIN_INTERPOLATION.sub(lambda m: f"${{{rename(m.group(1))}}}", value)
    if isinstance(value, list):
        return [rename_references(item) for item in value]
    return value
