from __future__ import annotations

import pytest

from tests.config.test_check import GRPO, ONE_RANK

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 12}
LAYOUT = "actor.megatron"
AUX = f"{LAYOUT}.moe_router_load_balancing_type=aux_loss"
REPLAY = "actor.router_replay.mode"


@pytest.mark.parametrize(
    ("sizes", "overrides", "key", "nearest"),
    [
        ({}, (f"{LAYOUT}.freeze_moe_router=true",), "freeze_moe_router", "false"),
        ({}, (f"{LAYOUT}.moe_z_loss_coeff=0.1",), "moe_z_loss_coeff", "0"),
        ({}, (f"{LAYOUT}.moe_grouped_gemm=false",), "moe_grouped_gemm", "null"),
        ({}, (f"{REPLAY}=R2",), REPLAY, "disabled"),
        (EXPERTS, (AUX,), "moe_aux_loss_coeff", "0.001"),
        (
            EXPERTS,
            (f"{LAYOUT}.moe_aux_loss_coeff=0.1",),
            "moe_router_load_balancing_type",
            "aux_loss",
        ),
        (
            EXPERTS,
            (f"{LAYOUT}.moe_z_loss_coeff=0.1", f"{LAYOUT}.freeze_moe_router=true"),
            "moe_z_loss_coeff",
            "0",
        ),
        (
            EXPERTS,
            (f"{LAYOUT}.moe_grouped_gemm=true", "trainer.device=cpu"),
            "moe_grouped_gemm",
            "null",
        ),
        (
            EXPERTS,
            (
                "actor.use_kl_loss=true",
                "ref.megatron.tensor_model_parallel_size=1",
                "ref.megatron.freeze_moe_router=true",
            ),
            "ref.megatron.freeze_moe_router",
            "false",
        ),
    ],
)
def test_settings_of_experts_without_effect_are_refused(
    refuse, model, sizes, overrides, key, nearest
):
    (found,) = refuse(
        GRPO, "rollout.n=4", f"model.path={model(**sizes)}", *overrides, text=ONE_RANK
    )
    assert (found.key.removeprefix(f"{LAYOUT}."), found.nearest) == (key, nearest)


def test_only_vllm_says_what_its_routers_chose(refuse, model):
    found = refuse(
        GRPO,
        "rollout.n=4",
        f"model.path={model(**EXPERTS)}",
        f"{REPLAY}=R3",
        "rollout.name=hf",
        text=ONE_RANK,
    )
    assert [v.nearest for v in found if v.key == REPLAY] == ["R2"]


def test_losses_on_routers_that_learn_are_accepted(load, model):
    config = load(
        GRPO,
        "rollout.n=4",
        f"model.path={model(**EXPERTS)}",
        AUX,
        f"{LAYOUT}.moe_aux_loss_coeff=0.1",
        f"{LAYOUT}.moe_z_loss_coeff=0.01",
        f"{REPLAY}=R3",
        text=ONE_RANK,
    )
    assert config.actor.megatron.moe_aux_loss_coeff == 0.1


def test_what_a_role_takes_from_the_actor_is_meant_for_the_actor(load, model):
    config = load(
        GRPO,
        "rollout.n=4",
        f"model.path={model(**EXPERTS)}",
        AUX,
        f"{LAYOUT}.moe_aux_loss_coeff=0.1",
        f"{LAYOUT}.recompute_granularity=full",
        f"{LAYOUT}.recompute_method=uniform",
        f"{LAYOUT}.recompute_num_layers=1",
        f"{LAYOUT}.optimizer_offload=true",
        "actor.use_kl_loss=true",
        "ref.megatron.param_offload=true",
        text=ONE_RANK,
    )
    assert config.ref.megatron.param_offload
