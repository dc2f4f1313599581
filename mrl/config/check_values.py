"""Rules for one value at a time: names to choose from and ranges of numbers."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass
from math import inf
from sys import float_info
from typing import Any

from mrl.config.errors import Violation
from mrl.config.schema import Config

_LOSS_AGGREGATIONS = (
    "token-mean",
    "seq-mean-token-mean",
    "seq-mean-token-sum",
    "seq-mean-token-sum-norm",
)
_KL_ESTIMATORS = ("kl", "k1", "mse", "k2", "low_var_kl", "k3", "abs")

CHOICES: dict[str, tuple[str, ...]] = {
    "model.lora.target_modules": ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"),
    "actor.router_replay.mode": ("disabled", "R2", "R3"),
    "data.truncation": ("error", "filter", "left", "right"),
    "actor.loss_agg_mode": _LOSS_AGGREGATIONS,
    "critic.loss_agg_mode": _LOSS_AGGREGATIONS,
    "actor.kl_loss_type": _KL_ESTIMATORS,
    "algorithm.kl_penalty": _KL_ESTIMATORS,
    "algorithm.kl_ctrl.type": ("fixed", "adaptive"),
    "algorithm.adv_estimator": (
        "gae",
        "grpo",
        "rloo",
        "reinforce_plus_plus",
        "reinforce_plus_plus_baseline",
        "remax",
        "opo",
    ),
    "algorithm.filter_groups.at_limit": ("stop", "fill"),
    "algorithm.rollout_correction.rollout_is": ("token", "sequence"),
    "algorithm.rollout_correction.loss_type": ("ppo_clip", "reinforce"),
    "algorithm.rollout_correction.alarm_action": ("warn", "stop"),
    "actor.policy_loss.loss_mode": ("vanilla", "gspo", "cispo", "gpg"),
    "rollout.name": ("vllm", "hf"),
    "trainer.device": ("auto", "cpu", "cuda"),
    "trainer.launcher": ("torchrun", "ray"),
    "trainer.logger": ("console", "tensorboard"),
    "trainer.resume_mode": ("auto", "disable", "resume_path"),
    "placement.mode": ("colocated", "disaggregated"),
    "resharding.mode": ("direct", "gather"),
    "resharding.verify": ("off", "first_step", "every_step"),
}
# Counts that the batch and layout arithmetic divides by: integers of at least 1.
SIZES: set[str] = {
    "data.max_prompt_length",
    "data.max_response_length",
    "data.train_batch_size",
    "data.gen_batch_size",
    "actor.loss_scale_factor",
    "critic.loss_scale_factor",
    "data.val_batch_size",
    "rollout.n",
    "rollout.val_kwargs.n",
    "rollout.tensor_model_parallel_size",
    "rollout.max_num_seqs",
    "rollout.max_num_batched_tokens",
    "rollout.max_model_len",
    "rollout.cpu_kv_cache_gib",
    "reward.num_workers",
    "algorithm.kl_ctrl.horizon",
    "trainer.nnodes",
    "trainer.n_gpus_per_node",
    "trainer.total_epochs",
    "trainer.total_training_steps",
    "trainer.profile_steps",
    "trainer.max_actor_ckpt_to_keep",
    "resharding.bucket_bytes",
    "placement.trainer_gpus",
    "placement.rollout_gpus",
}


def _is_finite(value: float) -> bool:
    return abs(value) <= float_info.max  # an integer may be too large for a float


@dataclass(frozen=True)
class Range:
    """The numbers from `low` to `high`, an open end excluded."""

    low: float = -inf
    high: float = inf
    low_open: bool = False
    high_open: bool = False
    why: str = ""

    def holds(self, value: float) -> bool:
        """Say whether a finite number lies inside."""
        above = value > self.low if self.low_open else value >= self.low
        below = value < self.high if self.high_open else value <= self.high
        return _is_finite(value) and above and below

    def describe(self) -> str:
        """Name the bounds in words."""
        bounds = []
        if self.low > -inf:
            bounds.append(f"{'above' if self.low_open else 'at least'} {self.low:g}")
        if self.high < inf:
            bounds.append(f"{'below' if self.high_open else 'at most'} {self.high:g}")
        words = "must be " + " and ".join(["finite", *bounds])
        return f"{words}: {self.why}" if self.why else words

    def nearest(self, value: float, default: object) -> str:
        """Give the bound that the value missed; an open bound is no legal value, so the default."""
        bound, is_open = (
            (self.low, self.low_open) if value <= self.low else (self.high, self.high_open)
        )
        if is_open or not _is_finite(bound) or not _is_finite(value):
            return "" if default is None else str(default)
        return f"{bound:g}"


_POSITIVE = Range(0, low_open=True)
_NOT_NEGATIVE = Range(0)
_FRACTION = Range(0, 1)
_SHARE = Range(0, 1, low_open=True)

RANGES: dict[str, Range] = {
    "data.seed": _NOT_NEGATIVE,
    "actor.clip_ratio": _POSITIVE,
    "actor.clip_ratio_low": _POSITIVE,
    "actor.clip_ratio_high": _POSITIVE,
    "actor.clip_ratio_c": Range(1, low_open=True),
    "actor.entropy_coeff": Range(),
    "actor.kl_loss_coef": _NOT_NEGATIVE,
    "critic.cliprange_value": _POSITIVE,
    "rollout.temperature": Range(
        0,
        low_open=True,
        why="training samples from the policy; greedy is for validation (rollout.val_kwargs)",
    ),
    "rollout.top_p": _SHARE,
    "rollout.seed": _NOT_NEGATIVE,
    "rollout.gpu_memory_utilization": _SHARE,
    "rollout.val_kwargs.temperature": _NOT_NEGATIVE,
    "rollout.val_kwargs.top_p": _SHARE,
    "reward.timeout_s": _POSITIVE,
    "reward.overlong_buffer.len": _NOT_NEGATIVE,
    "reward.overlong_buffer.penalty_factor": _NOT_NEGATIVE,
    "algorithm.filter_groups.max_num_gen_batches": _NOT_NEGATIVE,
    "algorithm.rollout_correction.alarm_threshold": Range(
        1, low_open=True, why="1 where engine and trainer agree"
    ),
    "algorithm.gamma": _FRACTION,
    "algorithm.lam": _FRACTION,
    "algorithm.kl_ctrl.kl_coef": _NOT_NEGATIVE,
    "algorithm.kl_ctrl.target_kl": _POSITIVE,
    "trainer.seed": _NOT_NEGATIVE,
    "trainer.log_val_generations": _NOT_NEGATIVE,
    "trainer.critic_warmup": _NOT_NEGATIVE,
    "trainer.fault_timeout_s": _POSITIVE,
    "trainer.hang_timeout_s": _POSITIVE,
    "trainer.max_restarts": _NOT_NEGATIVE,
    "trainer.profile_ranks": _NOT_NEGATIVE,
    "model.lora.rank": _NOT_NEGATIVE,
    "model.lora.alpha": _POSITIVE,
}
_MEGATRON_CHOICES: dict[str, tuple[str, ...]] = {
    "transformer_impl": ("auto", "local", "transformer_engine"),
    "dtype": ("auto", "float32", "bfloat16"),
    "cp_comm_type": ("a2a", "p2p", "a2a+p2p"),
    "fp8": ("hybrid", "e4m3"),
    "fp8_recipe": ("delayed", "tensorwise", "blockwise"),
    "recompute_granularity": ("selective", "full"),
    "recompute_method": ("uniform", "block"),
    "recompute_modules": ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts"),
    "moe_router_load_balancing_type": ("none", "aux_loss", "seq_aux_loss", "global_aux_loss"),
}
for _role in ("actor", "critic"):
    SIZES |= {
        f"{_role}.ppo_mini_batch_size",
        f"{_role}.ppo_micro_batch_size_per_gpu",
        f"{_role}.ppo_max_token_len_per_gpu",
        f"{_role}.ppo_epochs",
    }
    CHOICES |= {
        f"{_role}.optim.lr_decay_style": ("constant", "linear", "cosine"),
        f"{_role}.optim.main_grads_dtype": ("fp32", "bf16"),
        f"{_role}.optim.main_params_dtype": ("fp32", "fp16"),
        f"{_role}.optim.exp_avg_dtype": ("fp32", "bf16", "fp16"),
        f"{_role}.optim.exp_avg_sq_dtype": ("fp32", "bf16", "fp16"),
    }
    RANGES |= {
        f"{_role}.optim.lr": _NOT_NEGATIVE,
        f"{_role}.optim.weight_decay": _NOT_NEGATIVE,
        f"{_role}.optim.betas": Range(0, 1, high_open=True),
        f"{_role}.optim.eps": _POSITIVE,
        f"{_role}.optim.clip_grad": _POSITIVE,
        f"{_role}.optim.lr_warmup_steps": Range(-1),
        f"{_role}.optim.lr_warmup_steps_ratio": _FRACTION,
        f"{_role}.optim.min_lr": _NOT_NEGATIVE,
    }
for _role in ("ref", "rollout"):
    SIZES |= {
        f"{_role}.log_prob_micro_batch_size_per_gpu",
        f"{_role}.log_prob_max_token_len_per_gpu",
    }
for _role in ("actor", "critic", "ref"):
    SIZES |= {
        f"{_role}.megatron.{_kind}_parallel_size"
        for _kind in (
            "tensor_model",
            "pipeline_model",
            "virtual_pipeline_model",
            "context",
            "expert_model",
            "expert_tensor",
        )
    }
    SIZES |= {
        f"{_role}.megatron.num_layers_in_{_kind}_pipeline_stage" for _kind in ("first", "last")
    }
    CHOICES |= {f"{_role}.megatron.{_key}": names for _key, names in _MEGATRON_CHOICES.items()}
    SIZES |= {
        f"{_role}.megatron.recompute_num_layers",
        f"{_role}.megatron.hierarchical_context_parallel_sizes",
    }
    RANGES |= {
        f"{_role}.megatron.moe_aux_loss_coeff": _NOT_NEGATIVE,
        f"{_role}.megatron.moe_z_loss_coeff": _NOT_NEGATIVE,
    }


def check_values(config: Config) -> list[Violation]:
    """Find every value outside its own range or list of names; unset ones are not judged."""
    found: list[Violation] = []
    defaults = dict(_leaves(Config(), ""))
    for key, value in _leaves(config, ""):
        items = value if isinstance(value, list | tuple) else [value]
        for item in items:
            if key in CHOICES and item not in CHOICES[key]:
                found.append(_bad_choice(key, item))
            allowed = Range(1) if key in SIZES else RANGES.get(key)
            if allowed is not None and not allowed.holds(item):
                nearest = allowed.nearest(item, defaults.get(key))
                found.append(Violation(key, item, allowed.describe(), nearest))
    return found


def _leaves(section: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for field in fields(section):
        value, key = getattr(section, field.name), prefix + field.name
        if is_dataclass(value):
            yield from _leaves(value, f"{key}.")
        elif value is not None:
            yield key, value


def _bad_choice(key: str, value: str) -> Violation:
    names = CHOICES[key]
    near = difflib.get_close_matches(value, names, 1)
    return Violation(key, value, f"must be one of {', '.join(names)}", *near)
