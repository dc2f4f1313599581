"""Old and short spellings of keys, so that a verl command line works unchanged.

A text entry renames a key or everything below it; entries chain (the prefix `actor_rollout_ref`
goes first, then the rest is looked up again). What becomes of a key that has no counterpart of the
same meaning is an entry of `mrl.config.outcomes`: some here, those of verl alone in `verl`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from mrl.config.outcomes import Ignored, Legacy, Outcome, Refused, only
from mrl.config.schema import LoraConfig
from mrl.config.verl import IGNORED_ITEMS, VERL
from mrl.config.verl_megatron import VERL_MEGATRON

_ROLES = ("actor", "critic", "ref")

ALIASES: dict[str, str | Outcome] = {
    **VERL,
    **VERL_MEGATRON,
    "actor_rollout_ref": "",
    "actor_rollout.megatron": "actor.megatron",
    "actor_rollout.vllm": "rollout",
    "rollout.tensor_parallel_size": "rollout.tensor_model_parallel_size",
    "critic.model.path": "critic.path",
    "custom_reward_function": "reward.custom_reward_function",
    "reward_model": "reward.reward_model",
    "reward_model.reward_manager": "reward.reward_manager.name",
    "reward_model.reward_kwargs": "reward.reward_kwargs",
    "reward_model.num_workers": "reward.num_workers",
    "reward_model.overlong_buffer": "reward.overlong_buffer",
    "reward.reward_kwargs.overlong_buffer_cfg": "reward.overlong_buffer",
    "reward_model.sandbox_fusion": "reward.sandbox_fusion",
    "sandbox_fusion": "reward.sandbox_fusion",
    "data.tokenizer": "model.tokenizer_path",
    "nccl_timeout": "trainer.fault_timeout_s",
    "actor.use_fused_kernels": "actor.megatron.use_fused_kernels",
    "actor.megatron.router_replay": "actor.router_replay",
    "rollout.full_determinism": "trainer.full_determinism",
    "data.filter_overlong_prompts": Legacy(
        # Whatever data.truncation says: after the filter no prompt is left to truncate.
        {True: {"data.truncation": "filter"}, False: {}},
        "says whether over-long prompts are filtered (data.truncation=filter)",
        overrides=True,
    ),
    "trainer.enable_resharding": only(
        True, "weights always reach the engine by resharding; it cannot be switched off"
    ),
    "trainer.colocate_actor_critic": Legacy(
        {True: {"placement.mode": "colocated"}},
        "actor and critic on different ranks is not supported yet",
    ),
    "global_profiler.steps": "trainer.profile_steps",
    "actor.profiler.ranks": "trainer.profile_ranks",
    "actor.profiler.all_ranks": Legacy(
        {True: {"trainer.profile_ranks": None}, False: {}},
        "says whether all ranks are profiled (trainer.profile_ranks=null)",
        overrides=True,
    ),
    "model_engine": only("megatron", "the training engine is Megatron-Core"),
    "model.lora_rank": "model.lora.rank",
    "model.lora_alpha": "model.lora.alpha",
    "model.target_modules": "model.lora.target_modules",
    "model.lora_adapter_path": "model.lora.adapter_path",
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
    "rollout.enable_rollout_routing_replay": Legacy(
        {True: {"actor.router_replay.mode": "R3"}, False: {}},
        "says whether training repeats the engine's routing (actor.router_replay.mode=R3)",
    ),
}
for _role in _ROLES:
    _megatron = f"{_role}.megatron"
    ALIASES |= {
        f"{_role}.ulysses_sequence_parallel_size": f"{_megatron}.context_parallel_size",
        f"{_megatron}.tensor_parallel_size": f"{_megatron}.tensor_model_parallel_size",
        f"{_megatron}.pipeline_parallel_size": f"{_megatron}.pipeline_model_parallel_size",
        f"{_megatron}.expert_parallel_size": f"{_megatron}.expert_model_parallel_size",
    }
    ALIASES |= {
        f"{_megatron}.override_transformer_config": _megatron,
        f"{_megatron}.override_ddp_config": _megatron,
        f"{_megatron}.override_model_config.moe_config": _megatron,
    }
for _role in ("actor", "critic"):
    ALIASES[f"{_role}.optim.override_optimizer_config"] = f"{_role}.optim"
    ALIASES[f"{_role}.optim.warmup_style"] = f"{_role}.optim.lr_decay_style"

# Values with another spelling than the field's type allows.
VALUE_ALIASES: dict[str, dict[Any, Any]] = {
    "model.lora.target_modules": {"all-linear": list(LoraConfig().target_modules)},
    "trainer.logger": {"none": [], None: []},
    "trainer.profile_steps": {None: []},
    "actor.optim.lr_warmup_steps": {None: -1},
    "critic.optim.lr_warmup_steps": {None: -1},
    "reward.custom_reward_function.name": {None: "compute_score"},
    # YAML reads a plain `off` as false
    "resharding.verify": {False: "off", True: "every_step"},
}

LEGACY: dict[str, Legacy] = {k: v for k, v in ALIASES.items() if isinstance(v, Legacy)}
_RENAMES: dict[str, str] = {k: v for k, v in ALIASES.items() if isinstance(v, str)}
# `${key}` or, as verl writes defaults, `${oc.select:key,value}`
_REFERENCE = re.compile(r"\$\{(oc\.select:)?([A-Za-z_][\w.]*)(?=[},])")


def rename(key: str) -> str:
    """Give today's spelling of a dotted key, the key itself when it has no other."""
    parts = key.split(".")
    for size in range(len(parts), 0, -1):
        new = _RENAMES.get(".".join(parts[:size]))
        if new is not None and (new or size < len(parts)):
            return rename(".".join([*filter(None, [new]), *parts[size:]]))
    return key


def outcome(key: str) -> Outcome | None:
    """Find what becomes of a key in today's spelling; None: it is the schema's, or unknown."""
    parts = key.split(".")
    for size in range(len(parts), 0, -1):
        found = ALIASES.get(".".join(parts[:size]))
        if isinstance(found, Ignored | Refused) or (
            isinstance(found, Legacy) and size == len(parts)
        ):
            return found
    return None


def ignored_items(key: str, value: Any) -> dict[str, str]:
    """Find the items of a value that have no effect; item -> why."""
    reasons = IGNORED_ITEMS.get(key, {})
    items = value if isinstance(value, list) else [value]
    return {item: reasons[item] for item in items if isinstance(item, str) and item in reasons}


def without_ignored(key: str, value: Any) -> Any:
    """Give a value without the items that have no effect."""
    ignored = ignored_items(key, value)
    if not ignored:
        return value
    items: Sequence[Any] = value if isinstance(value, list) else [value]
    return [item for item in items if item not in ignored]


def rename_references(value: Any) -> Any:
    """Give today's spelling of the keys that `${...}` in a value refers to."""
    if isinstance(value, str):
        return _REFERENCE.sub(lambda m: f"${{{m.group(1) or ''}{rename(m.group(2))}", value)
    if isinstance(value, list):
        return [rename_references(item) for item in value]
    return value
