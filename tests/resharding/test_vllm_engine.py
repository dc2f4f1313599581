"""vLLM's live parameters: what its loader puts where, and what an in-place write leaves right."""

from __future__ import annotations

import pytest
import torch

from tests.models import write_model
from tests.resharding import engines
from tests.resharding.closed_form import FAMILIES

FAST = {"qwen2": [(2, False)], "qwen3_moe": [(2, False), (2, True)]}
MOE_CASES = ("qwen3_moe", "mixtral", "glm4_moe", "deepseek_v2", "deepseek_v2_lite", "deepseek_v3")
MOE_MODEL = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "num_hidden_layers": 2,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "norm_topk_prob": True,
}


@pytest.mark.parametrize("case", FAST)
def test_vllms_own_loader_agrees_with_the_closed_form(ranks, tmp_path, case):
    ranks.run(1, engines.loader_agrees, case=case, folder=tmp_path, sizes=FAST[case])


@pytest.mark.slow
@pytest.mark.parametrize("case", FAMILIES)
def test_vllms_own_loader_agrees_with_the_closed_form_of_every_family(ranks, tmp_path, case):
    sizes = [(tp, False) for tp in (1, 2, 4)]
    sizes += [(2, True), (4, True)] if case in MOE_CASES else []
    ranks.run(1, engines.loader_agrees, case=case, folder=tmp_path, sizes=sizes)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])  # a view of the weight, a copy
def test_what_mla_derives_follows_an_in_place_write_at_the_same_addresses(ranks, tmp_path, dtype):
    ranks.run(1, engines.mla_follows, folder=tmp_path, dtype=dtype)


@pytest.mark.parametrize("case", ["gemma3", "deepseek_v3"])
def test_buffers_survive_a_dummy_load_and_the_loss_of_memory(ranks, tmp_path, case):
    ranks.run(1, engines.constants_survive, case=case, folder=tmp_path)


def test_layers_that_vllm_lays_out_anew_are_refused_with_their_reason(ranks, tmp_path):
    ranks.run(1, engines.relaid_layers_are_refused, folder=tmp_path)


def test_a_cache_computed_with_old_weights_is_forgotten(ranks, policy):
    ranks.run(1, engines.stale_prefix, folder=policy)


@pytest.fixture(scope="session")
def moe(ranks, tmp_path_factory):
    folder = tmp_path_factory.mktemp("moe")
    return ranks.run(1, write_model, folder=folder, kind="qwen3_moe", **MOE_MODEL)[0]


def test_experts_written_in_place_are_live_and_a_repeated_update_changes_nothing(ranks, moe):
    ranks.run(1, engines.serve, folder=moe)


def test_an_expert_parallel_engine_takes_whole_experts(ranks, moe):
    first, second = ranks.run(2, engines.serve, folder=moe, tp=2, ep=True)
    assert first == second


@pytest.mark.slow
def test_a_tensor_parallel_engine_takes_shards_of_all_experts(ranks, moe):
    first, second = ranks.run(2, engines.serve, folder=moe, tp=2)
    assert first == second


@pytest.mark.slow
@pytest.mark.parametrize("slots", [(0, 2, 1, 3), (3, 0, 2, 1)])  # the latter turns a group round
def test_ranks_may_take_any_slot_of_any_replica(ranks, policy, slots):
    drawn = ranks.run(4, engines.serve, folder=policy, tp=2, slots=slots)
    plain = ranks.run(2, engines.serve, folder=policy, tp=2)
    for found in drawn:
        for mine, theirs in zip(found, plain[0], strict=True):
            assert mine[:2] == theirs[:2]
            assert mine[2] == pytest.approx(theirs[2], abs=1e-5)


@pytest.mark.slow
def test_whole_experts_follow_the_slots(ranks, moe):
    ranks.run(4, engines.serve, folder=moe, tp=2, ep=True, slots=(3, 0, 2, 1))
