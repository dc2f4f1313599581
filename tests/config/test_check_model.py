from __future__ import annotations

import pytest

from tests.config.test_check import GRPO, ONE_RANK

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4, "moe_intermediate_size": 12}
ODD = EXPERTS | {"moe_intermediate_size": 13}
LAYOUT = "actor.megatron"
FOUR_RANKS = ("trainer.n_gpus_per_node=4", GRPO, "rollout.n=4")
ENGINE_TP2 = "rollout.tensor_model_parallel_size=2"
TP2 = f"{LAYOUT}.tensor_model_parallel_size=2"


@pytest.mark.parametrize(
    ("sizes", "overrides", "key", "nearest"),
    [
        # every rank would send its copy of the tokens: the experts' gradients come out doubled
        (
            EXPERTS,
            (TP2, f"{LAYOUT}.sequence_parallel=false"),
            f"{LAYOUT}.sequence_parallel",
            "true",
        ),
        (
            EXPERTS,
            (f"{LAYOUT}.expert_tensor_parallel_size=3",),
            f"{LAYOUT}.expert_model_parallel_size",
            "none with this expert_tensor_parallel_size and pp",
        ),
        (
            {},
            (f"{LAYOUT}.expert_tensor_parallel_size=2",),
            f"{LAYOUT}.expert_tensor_parallel_size",
            "null",
        ),
        (ODD, (TP2,), f"{LAYOUT}.expert_tensor_parallel_size", "1"),
        (ODD, (ENGINE_TP2,), "rollout.enable_expert_parallel", "true"),
        (
            EXPERTS | {"num_experts": 1},
            (ENGINE_TP2, "rollout.enable_expert_parallel=true"),
            "rollout.enable_expert_parallel",
            "false",
        ),
        (EXPERTS, ("rollout.name=hf",), "rollout.name", "vllm"),
        (
            {},
            ("rollout.enable_expert_parallel=true",),
            "rollout.enable_expert_parallel",
            "false",
        ),
        (
            {},
            ("resharding.mode=gather", "resharding.forward_within_node=true"),
            "resharding.forward_within_node",
            "false",
        ),
    ],
)
def test_what_a_model_or_an_engine_has_no_use_for_is_refused(
    refuse, model, sizes, overrides, key, nearest
):
    (found,) = refuse(*FOUR_RANKS, f"model.path={model(**sizes)}", *overrides, text=ONE_RANK)
    assert (found.key, found.nearest) == (key, nearest)


def test_experts_may_be_cut_otherwise_than_the_rest(load, model):
    path = f"model.path={model(**EXPERTS)}"
    layout = load(
        *FOUR_RANKS, path, TP2, f"{LAYOUT}.expert_tensor_parallel_size=1", text=ONE_RANK
    ).actor.megatron
    assert (layout.tensor_model_parallel_size, layout.expert_tensor_parallel_size) == (2, 1)
    engine = load(*FOUR_RANKS, path, "rollout.enable_expert_parallel=true", text=ONE_RANK).rollout
    assert engine.enable_expert_parallel
