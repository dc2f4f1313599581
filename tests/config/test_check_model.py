from __future__ import annotations

import pytest

from tests.config.test_check import GRPO, ONE_RANK

EXPERTS = {"model_type": "qwen3_moe", "num_experts": 4}
LAYOUT = "actor.megatron"
FOUR_RANKS = ("trainer.n_gpus_per_node=4", GRPO, "rollout.n=4")
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
    load(*FOUR_RANKS, path, TP2, f"{LAYOUT}.expert_tensor_parallel_size=1", text=ONE_RANK)
    load(*FOUR_RANKS, path, "rollout.enable_expert_parallel=true", text=ONE_RANK)
