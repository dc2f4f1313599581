"""Legal settings that may surprise."""

from __future__ import annotations

from mrl.config.roles import RoleSettings, enabled_roles, rollout_ranks, trainer_ranks
from mrl.config.schema import Config, LoraConfig


def find_warnings(config: Config) -> tuple[str, ...]:
    """Say in words what a legal config does that its author may not mean."""
    found = [*_sampling(config), *_unused_adapter(config.model.lora)]
    for role in enabled_roles(config):
        found += _unused_sizes(role) + _budget(config, role) + _scales(role)
        found += _offload_to_itself(config, role) + _overlap_with_nobody(config, role)
    return tuple(dict.fromkeys(found))  # roles that share a key say it once


def _sampling(config: Config) -> list[str]:
    rollout, found = config.rollout, []
    if rollout.top_p < 1 or rollout.top_k > 0:
        found.append(
            f"rollout.top_p={rollout.top_p}, rollout.top_k={rollout.top_k}: responses are drawn "
            "from a truncated distribution; they are weighed "
            "(algorithm.rollout_correction.rollout_is), but what was cut off is never tried"
        )
    if config.algorithm.adv_estimator == "grpo" and rollout.n == 1:
        found.append(
            "rollout.n=1 with grpo: a group of one has advantage 0, so nothing is learnt from it"
        )
    if config.algorithm.filter_groups.enable and config.trainer.total_training_steps is None:
        found.append(
            "algorithm.filter_groups.enable=true: a step may read several batches of prompts, so "
            f"trainer.total_epochs={config.trainer.total_epochs} counts steps of "
            "data.train_batch_size and the data is read more often; "
            "trainer.total_training_steps says how many steps"
        )
    replicas = len(rollout_ranks(config)) // rollout.tensor_model_parallel_size
    if replicas > config.data.train_batch_size:
        found.append(
            f"data.train_batch_size={config.data.train_batch_size}: "
            f"{replicas - config.data.train_batch_size} of {replicas} engine replicas get no prompt"
        )
    return found


def _scales(role: RoleSettings) -> list[str]:
    m, key = role.megatron, f"{role.keys['megatron']}.fp8_recipe"
    if m.fp8 is None or m.fp8_recipe != "delayed":
        return []
    return [
        f"{key}=delayed: scales come from earlier training steps, so the passes before the first "
        "one run at scale 1; tensorwise and blockwise scale what they see"
    ]


def _offload_to_itself(config: Config, role: RoleSettings) -> list[str]:
    m, section = role.megatron, role.keys["megatron"]
    keys = [key for key in ("param_offload", "grad_offload", "optimizer_offload") if vars(m)[key]]
    if config.trainer.device != "cpu" or not keys:
        return []
    return [f"{section}.{key}=true frees no memory: trainer.device=cpu is the host" for key in keys]


def _overlap_with_nobody(config: Config, role: RoleSettings) -> list[str]:
    m, section, world = role.megatron, role.keys["megatron"], len(trainer_ranks(config))
    tp, pp = m.tensor_model_parallel_size, m.pipeline_model_parallel_size
    expert_tp = m.expert_tensor_parallel_size or tp
    copies = max(world // (tp * pp), world // (expert_tp * m.expert_model_parallel_size * pp))
    keys = [key for key in ("overlap_grad_reduce", "overlap_param_gather") if vars(m)[key]]
    if copies > 1:
        return []
    return [
        f"{section}.{key}=true has nothing to overlap: each parameter is on one rank alone"
        for key in keys
    ]


def _unused_adapter(lora: LoraConfig) -> list[str]:
    default = LoraConfig()
    if lora.rank > 0:
        return []
    return [
        f"model.lora.{name}={value} is not used: model.lora.rank=0 trains the whole model"
        for name, value, usual in (
            ("alpha", lora.alpha, default.alpha),
            ("target_modules", list(lora.target_modules), list(default.target_modules)),
        )
        if value != usual
    ]


def _unused_sizes(role: RoleSettings) -> list[str]:
    found = []
    for dynamic, micro, value in (
        ("dynamic", "micro", role.micro if role.trained else None),
        ("log_prob_dynamic", "log_prob_micro", role.log_prob_micro),
    ):
        if value is not None and (role.dynamic if dynamic == "dynamic" else role.log_prob_dynamic):
            found.append(f"{role.keys[micro]}={value} is not used: {role.keys[dynamic]} is true")
    return found


def _budget(config: Config, role: RoleSettings) -> list[str]:
    longest = config.data.max_prompt_length + config.data.max_response_length
    found = []
    for used, name, budget in (
        (role.dynamic and role.trained, "max_token_len", role.max_token_len),
        (role.log_prob_dynamic, "log_prob_max_token_len", role.log_prob_max_token_len),
    ):
        tokens = budget * role.megatron.context_parallel_size
        if used and tokens < longest:
            found.append(
                f"{role.keys[name]}={budget}: holds {tokens} tokens, the longest sequence may "
                f"have {longest}; such a sequence runs alone, above the budget"
            )
    return found
