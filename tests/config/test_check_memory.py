from __future__ import annotations

import pytest

from tests.config.test_check import GRPO, ONE_RANK

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 12}
LAYOUT = "actor.megatron"
FULL = f"{LAYOUT}.recompute_granularity=full"
SELECTIVE = f"{LAYOUT}.recompute_granularity=selective"
MODULES = f"{LAYOUT}.recompute_modules"
PRECISE = "actor.optim.use_precision_aware_optimizer"


@pytest.mark.parametrize(
    ("sizes", "overrides", "key", "nearest"),
    [
        ({}, (f"{LAYOUT}.recompute_method=block",), f"{LAYOUT}.recompute_method", "null"),
        (
            {},
            (SELECTIVE, f"{LAYOUT}.recompute_num_layers=1"),
            f"{LAYOUT}.recompute_num_layers",
            "null",
        ),
        ({}, (FULL, f"{MODULES}=[mlp]"), MODULES, "['core_attn']"),
        ({}, (f"{MODULES}=[mlp]",), MODULES, "['core_attn']"),
        ({}, (SELECTIVE, f"{MODULES}=[]"), MODULES, "['core_attn']"),
        ({}, (SELECTIVE, f"{MODULES}=[mlp,moe]"), MODULES, "['mlp']"),
        ({}, (SELECTIVE, f"{MODULES}=[layernorm]"), MODULES, "['core_attn']"),
        (EXPERTS, (SELECTIVE, f"{MODULES}=[moe,shared_experts]"), MODULES, "['moe']"),
        (
            EXPERTS,
            (SELECTIVE, f"{MODULES}=[moe,moe_act]", f"{LAYOUT}.transformer_impl=local"),
            MODULES,
            "['moe']",
        ),
        (
            {},
            (f"{LAYOUT}.overlap_param_gather=true",),
            f"{LAYOUT}.overlap_param_gather",
            "false",
        ),
        (
            {},
            (
                f"{LAYOUT}.overlap_param_gather=true",
                f"{LAYOUT}.overlap_grad_reduce=true",
                f"{LAYOUT}.use_distributed_optimizer=false",
            ),
            f"{LAYOUT}.overlap_param_gather",
            "false",
        ),
        ({}, (f"{PRECISE}=true", "trainer.device=cpu"), PRECISE, "false"),
        ({}, (f"{PRECISE}=true", f"{LAYOUT}.dtype=float32"), PRECISE, "false"),
        ({}, (f"{PRECISE}=true", f"{LAYOUT}.use_distributed_optimizer=false"), PRECISE, "false"),
        ({}, ("actor.optim.exp_avg_dtype=bf16",), "actor.optim.exp_avg_dtype", "fp32"),
        (
            {},
            (f"{LAYOUT}.gradient_accumulation_fusion=true", "trainer.device=cpu"),
            f"{LAYOUT}.gradient_accumulation_fusion",
            "null",
        ),
    ],
)
def test_settings_that_cannot_be_are_refused(refuse, model, sizes, overrides, key, nearest):
    (found,) = refuse(
        GRPO, "rollout.n=4", f"model.path={model(**sizes)}", *overrides, text=ONE_RANK
    )
    assert (found.key, found.nearest) == (key, nearest)


@pytest.mark.parametrize(
    ("given", "nearest"),
    [
        ("recompute_granularity=full", "null"),
        ("grad_offload=true", "false"),
        ("optimizer_offload=true", "false"),
        ("use_distributed_optimizer=false", "true"),
        ("overlap_grad_reduce=true", "false"),
        ("gradient_accumulation_fusion=false", "null"),
    ],
)
def test_a_frozen_role_takes_no_settings_of_training(refuse, load, given, nearest):
    frozen = (GRPO, "rollout.n=4", "actor.use_kl_loss=true")
    (found,) = refuse(*frozen, f"ref.megatron.{given}", text=ONE_RANK)
    assert (found.key, found.nearest) == (f"ref.megatron.{given.split('=')[0]}", nearest)
    load(*frozen, f"{LAYOUT}.{given}", text=ONE_RANK)  # which the reference shares


def test_a_value_head_takes_no_settings_of_logits(refuse, load):
    key = "critic.megatron.use_fused_kernels"
    (found,) = refuse(f"{key}=false", text=ONE_RANK)
    assert (found.key, found.nearest) == (key, "true")
    load(f"{LAYOUT}.use_fused_kernels=false", text=ONE_RANK)


def test_no_more_layers_are_recomputed_together_than_a_rank_has(refuse, model):
    path = model(num_hidden_layers=6)
    (found,) = refuse(
        GRPO,
        "rollout.n=4",
        f"model.path={path}",
        FULL,
        f"{LAYOUT}.recompute_num_layers=7",
        text=ONE_RANK,
    )
    assert found.nearest == "6"


@pytest.mark.parametrize(
    "overrides",
    [
        (FULL,),
        (FULL, f"{LAYOUT}.recompute_method=block", f"{LAYOUT}.recompute_num_layers=1"),
        (SELECTIVE,),
        (SELECTIVE, f"{MODULES}=[core_attn,mlp]"),
        (f"{LAYOUT}.overlap_grad_reduce=true", f"{LAYOUT}.overlap_param_gather=true"),
        (f"{PRECISE}=true", "actor.optim.exp_avg_dtype=bf16", "actor.optim.main_grads_dtype=bf16"),
        (f"{LAYOUT}.param_offload=true", f"{LAYOUT}.optimizer_offload=true"),
    ],
)
def test_settings_that_can_be_are_accepted(load, model, overrides):
    config = load(GRPO, "rollout.n=4", f"model.path={model()}", *overrides, text=ONE_RANK)
    assert config.actor != load(GRPO, "rollout.n=4", text=ONE_RANK).actor


@pytest.mark.parametrize(
    ("ranks", "layout", "warned"),
    [(1, (), True), (2, (), False), (2, ("tensor_model_parallel_size=2",), True)],
)
def test_overlap_without_another_copy_of_the_model_is_warned_about(plan, ranks, layout, warned):
    given = [f"{LAYOUT}.{key}" for key in ("overlap_grad_reduce=true", *layout)]
    found = plan(GRPO, "rollout.n=4", f"trainer.n_gpus_per_node={ranks}", *given, text=ONE_RANK)
    assert any("nothing to overlap" in warning for warning in found.warnings) == warned
