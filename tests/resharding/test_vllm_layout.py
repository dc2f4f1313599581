from __future__ import annotations

import pytest
import torch

from mrl.resharding.coverage import padding_of, view_of
from mrl.resharding.families import REGISTRY
from mrl.resharding.vllm_layout import VLLMLayout
from tests.resharding.closed_form import FAMILIES, logical_values, tiny_shape, vllm_params


def family(case: str, **changes):
    model_type, extra = FAMILIES[case]
    return tiny_shape(model_type, **{"layers": 2, "vocab": 130} | extra | changes)


def agree_with_the_reference(shape, tp, ep=False):
    values = logical_values(shape)
    layout = VLLMLayout(shape, tp, ep=ep, dtype="float32").layout()
    for rank in range(tp):
        params = vllm_params(shape, tp, values, rank, ep)
        padding_of(layout, rank, params)
        for piece in layout.pieces_of(rank):
            held = view_of(params[piece.param], piece.local)
            assert torch.equal(held, view_of(values[piece.tensor], piece.box)), piece


def test_every_family_is_among_the_cases():
    assert {model_type for model_type, _ in FAMILIES.values()} == set(REGISTRY)


@pytest.mark.parametrize("tp", [1, 2, 4])
@pytest.mark.parametrize("case", FAMILIES)
def test_the_closed_form_of_every_family_agrees_with_the_reference(case, tp):
    agree_with_the_reference(family(case), tp)


@pytest.mark.parametrize("tp", [2, 4])  # 6 experts: 3 + 3, and 2 + 2 + 1 + 1
@pytest.mark.parametrize("case", [case for case in FAMILIES if family(case).moe])
def test_whole_experts_go_to_ranks_in_order_and_the_remainder_to_the_first(case, tp):
    agree_with_the_reference(family(case), tp, ep=True)


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_kv_heads_are_replicated_where_tp_has_more_ranks(tp, kv_heads):
    shape = tiny_shape(kv_heads=kv_heads, layers=1)
    agree_with_the_reference(shape, tp)
    pieces = VLLMLayout(shape, tp).layout().pieces
    keys = [piece for piece in pieces if piece.tensor.endswith("k_proj.weight")]
    assert [len(piece.ranks) for piece in keys] == [max(1, tp // kv_heads)] * min(tp, kv_heads)


def test_replicas_share_pieces_and_a_large_layout_stays_small():
    shape = tiny_shape(layers=2)
    one, many = VLLMLayout(shape, 4).layout(), VLLMLayout(shape, 4, replicas=256).layout()
    assert len(one.pieces) == len(many.pieces)
    assert many.ranks == tuple(range(1024))
    assert many.pieces[0].ranks == tuple(range(0, 1024, 4))


def test_slots_say_which_rank_holds_which_shard():
    shape = tiny_shape(layers=1)
    plain = VLLMLayout(shape, 2, replicas=2).layout()
    moved = VLLMLayout(shape, 2, replicas=2, first_rank=8, slots=(0, 2, 1, 3)).layout()
    rank_of_slot = {0: 8, 1: 10, 2: 9, 3: 11}
    for mine, theirs in zip(moved.pieces, plain.pieces, strict=True):
        assert mine.ranks == tuple(sorted(rank_of_slot[rank] for rank in theirs.ranks))
        assert (mine.tensor, mine.box, mine.local) == (theirs.tensor, theirs.box, theirs.local)


def test_routers_and_correction_biases_stay_float32_where_vllm_keeps_them_so():
    def dtypes(case, ending):
        tensors = VLLMLayout(family(case), 2).layout().tensors
        return {info.dtype for name, info in tensors.items() if name.endswith(ending)}

    assert dtypes("glm4_moe", ".gate.weight") == {"float32"}
    assert dtypes("deepseek_v3", ".gate.weight") == {"bfloat16"}
    for case in ("glm4_moe", "deepseek_v3"):
        assert dtypes(case, "e_score_correction_bias") == {"float32"}


def test_a_tied_model_has_no_head_of_its_own():
    layout = VLLMLayout(tiny_shape(tied=True), 2).layout()
    assert "lm_head.weight" not in layout.tensors
    assert not [piece for piece in layout.pieces if piece.param == "lm_head.weight"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tp": 3}, r"tp 3 does not divide 8 attention heads \(nearest legal 2\)"),
        ({"tp": 16}, "tp 16 does not divide 8 rows of the feed-forward size"),
        ({"ep": True}, "ep is set, but qwen2 has no experts"),
        ({"tp": 2, "slots": (0, 0)}, r"slots \(0, 0\) must be a permutation of 0..1"),
    ],
)
def test_numbers_that_vllm_cannot_place_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        VLLMLayout(tiny_shape(), **{"tp": 1} | changes)
