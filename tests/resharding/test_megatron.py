from __future__ import annotations

import pytest
import torch

from mrl.config import stages
from mrl.resharding import MegatronLayout, ModelShape
from mrl.resharding.coverage import padding_of, view_of
from tests.resharding.closed_form import logical_values, megatron_params, tiny_shape
from tests.resharding.families import tiny_model


def check_against_reference(layout):
    values = logical_values(layout.shape, layout.has_lm_head)
    placed = layout.layout()
    for rank in range(layout.world_size):
        params = megatron_params(layout, values, rank)
        for view in padding_of(placed, rank, params):  # raises unless all else is covered
            assert not view.any()
        for piece in layout.pieces_of(rank):
            held = view_of(params[piece.param], piece.local)
            assert torch.equal(held, view_of(values[piece.tensor], piece.box)), piece


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_pieces_hold_what_megatron_would_hold(tp, kv_heads):
    for model_type, tied in (("qwen2", True), ("llama", False)):
        shape = tiny_shape(model_type, kv_heads, tied)
        check_against_reference(MegatronLayout(shape, tp, pp=2, dp=1, padded_vocab=16))


@pytest.mark.parametrize("pp", [1, 2, 4])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("head", [False, True])
def test_heads_live_where_megatron_puts_them(pp, tied, head):
    shape = tiny_shape(tied=tied)
    layout = MegatronLayout(shape, 2, pp, 2, padded_vocab=24, cp=2, has_lm_head=head)
    check_against_reference(layout)
    holders = {
        r for p in layout.layout().pieces if p.param == "output_layer.weight" for r in p.ranks
    }
    expected = head and (not tied or pp > 1)
    assert bool(holders) == expected
    assert ("lm_head.weight" in layout.tensors()) == (head and not tied)


def test_transformer_engine_fuses_the_norms_into_their_layers():
    shape = tiny_shape()
    layout = MegatronLayout(shape, 2, 1, 1, 16, transformer_impl="transformer_engine")
    check_against_reference(layout)
    names = {p.param for p in layout.pieces_of(0) if p.tensor.endswith("layernorm.weight")}
    assert "decoder.layers.0.self_attention.linear_qkv.layer_norm_weight" in names
    assert "decoder.layers.0.mlp.linear_fc1.layer_norm_weight" in names


def test_uneven_stages_follow_the_given_layers():
    layout = MegatronLayout(tiny_shape(), 1, 2, 1, 13, layers_of_chunk=(((0,),), ((1, 2, 3),)))
    check_against_reference(layout)
    with pytest.raises(ValueError, match="once each"):
        MegatronLayout(tiny_shape(), 1, 2, 1, 13, layers_of_chunk=(((0,),), ((1, 2),)))


def test_four_query_two_kv_heads_unfold_in_head_order():
    shape = tiny_shape("llama", kv_heads=2, layers=1, num_attention_heads=4, head_dim=1)
    rows = ["q0", "q1", "k0", "v0", "q2", "q3", "k1", "v1"]
    for tp in (1, 2, 4):
        seen = {}
        for rank in range(tp):
            shard = rows[rank * 8 // tp : (rank + 1) * 8 // tp]
            for p in MegatronLayout(shape, tp, 1, 1, 16).pieces_of(rank):
                if "linear_qkv" in p.param:
                    letter = p.tensor.split(".")[-2][0]
                    for logical, local in zip(range(*p.box[0]), range(*p.local[0]), strict=True):
                        seen[f"{letter}{logical}"] = shard[local]
        assert seen == {name: name for name in rows}


def test_sixty_four_heads_two_kv_heads_on_eight_ranks_are_covered():
    shape = tiny_shape("llama", 2, layers=1, num_attention_heads=64, head_dim=2, vocab=8)
    check_against_reference(MegatronLayout(shape, 8, 1, 1, 8))


def test_every_illegal_number_is_named_with_a_legal_one():
    shape = tiny_shape()
    with pytest.raises(ValueError) as error:
        MegatronLayout(shape, 3, 3, 1, 13, transformer_impl="auto")
    for part in (
        "tp 3 does not divide the 8 heads",
        "(nearest legal 2)",
        "4 layers do not divide over 3 stages (nearest legal: pp 2)",
        "(nearest legal 15)",
        "'auto'",
    ):
        assert part in str(error.value)


def test_replicas_repeat_the_pieces_of_the_first():
    layout = MegatronLayout(tiny_shape(), 2, 2, 2, 16, cp=2)
    assert [layout.coordinates(r) for r in (0, 1, 2, 4, 8)] == [
        (0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)
    ]  # fmt: skip
    for rank in range(8):
        boxes = [(p.tensor, p.box) for p in layout.pieces_of(rank)]
        assert boxes == [(p.tensor, p.box) for p in layout.pieces_of(rank % 2)]


def test_experts_that_do_not_fit_are_refused_with_legal_numbers():
    shape = tiny_model("qwen3_moe")  # 4 experts of 6 columns
    with pytest.raises(ValueError) as error:
        MegatronLayout(shape, 2, 1, 4, 16, ep=3, etp=4, grouped_experts=True)
    for part in (
        "ep 3 does not divide the 4 experts (nearest legal 2)",
        "etp 4 does not divide the 6 columns of an expert (nearest legal 2)",
        "the local specification builds sequential experts",
    ):
        assert part in str(error.value)
    with pytest.raises(ValueError, match=r"ep 4 x etp 2 does not divide the 4 ranks .*legal 2"):
        MegatronLayout(shape, 2, 1, 2, 16, ep=4)
    with pytest.raises(ValueError, match=r"ep 2 needs a model with experts .nearest legal 1"):
        MegatronLayout(tiny_shape(), 2, 1, 2, 16, ep=2)


def test_latent_projections_must_divide_only_where_they_are_cut():
    shape = tiny_model("deepseek_v3", num_attention_heads=8, q_lora_rank=6)
    with pytest.raises(ValueError, match=r"tp 4 does not divide the 6 rows.*legal 2"):
        MegatronLayout(shape, 4, 1, 1, 16, etp=1)
    MegatronLayout(shape, 4, 1, 1, 16, etp=1, transformer_impl="transformer_engine")


def params_by_tensor(layout, *endings):
    return {
        ending: {p.param for p in layout.pieces_of(0) if p.tensor.endswith(ending)}
        for ending in endings
    }


def test_transformer_engine_keeps_the_norm_before_experts_apart():
    shape = tiny_model("qwen3_moe", mlp_only_layers=[0])
    layout = MegatronLayout(shape, 1, 1, 1, 16, transformer_impl="transformer_engine")
    dense, sparse = (f"layers.{layer}.post_attention_layernorm.weight" for layer in (0, 1))
    assert params_by_tensor(layout, dense, sparse) == {
        dense: {"decoder.layers.0.mlp.linear_fc1.layer_norm_weight"},
        sparse: {"decoder.layers.1.pre_mlp_layernorm.weight"},
    }


def test_grouped_experts_carry_their_number_in_the_last_word():
    layout = MegatronLayout(
        tiny_model("mixtral"), 1, 1, 2, 16, ep=2, etp=1,
        transformer_impl="transformer_engine", grouped_experts=True,
    )  # fmt: skip
    held = {
        (piece.tensor, piece.param)
        for piece in layout.pieces_of(1)
        if "layers.3.block_sparse_moe.experts" in piece.tensor
    }
    assert held == {
        (f"model.layers.3.block_sparse_moe.experts.{expert}.{name}.weight",
         f"decoder.layers.3.mlp.experts.{linear}.weight{expert - 2}")
        for expert in (2, 3)
        for name, linear in (("w1", "linear_fc1"), ("w3", "linear_fc1"), ("w2", "linear_fc2"))
    }  # fmt: skip


def test_transformer_engine_leaves_latent_down_projections_whole():
    shape = tiny_model("deepseek_v3")
    names = ("q_a_proj.weight", "q_a_layernorm.weight", "s.2.input_layernorm.weight")
    for impl, rows in (("local", 4), ("transformer_engine", 8)):
        layout = MegatronLayout(shape, 2, 1, 1, 16, transformer_impl=impl, etp=1)
        down = [
            p for p in layout.pieces_of(1) if p.tensor.endswith("s.2.self_attn.q_a_proj.weight")
        ]
        assert [(p.box[0], p.local[0]) for p in down] == [((8 - rows, 8), (0, rows))]
        found = params_by_tensor(layout, *names)
        norm = "linear_q_up_proj.layer_norm_weight" if rows == 8 else "q_layernorm.weight"
        assert f"decoder.layers.2.self_attention.{norm}" in found["q_a_layernorm.weight"]
        assert found["s.2.input_layernorm.weight"] == {"decoder.layers.2.input_layernorm.weight"}


def test_norms_of_one_name_go_where_their_family_means():
    for family, param in (
        ("llama", "pre_mlp_layernorm.weight"),
        ("glm4", "pre_mlp_layernorm.weight"),
        ("gemma2", "self_attention.linear_proj.post_layernorm.weight"),
    ):
        layout = MegatronLayout(tiny_model(family), 1, 1, 1, 16)
        name = "layers.1.post_attention_layernorm.weight"
        assert params_by_tensor(layout, name) == {name: {f"decoder.layers.1.{param}"}}


def test_gate_and_up_in_one_tensor_land_where_two_would():
    def fc1(family):
        layout = MegatronLayout(tiny_model(family), 2, 1, 1, 16)
        return [
            [
                p
                for p in layout.pieces_of(rank)
                if p.param == "decoder.layers.1.mlp.linear_fc1.weight"
            ]
            for rank in range(2)
        ]

    for one, two in zip(fc1("glm4"), fc1("llama"), strict=True):
        rows = [(p.box[0], p.local[0]) for p in one]
        assert rows == [
            ((start + part * 24, stop + part * 24), p.local[0])
            for part, p in enumerate(two)
            for start, stop in (p.box[0],)
        ]


def test_what_must_stay_float32_does():
    layout = MegatronLayout(
        tiny_model("deepseek_v3"), 1, 1, 1, 16, dtype="bfloat16", router_dtype="float32"
    )
    exact = {
        name.split("mlp.")[-1] for name, info in layout.tensors().items() if info.item_bytes == 4
    }
    assert exact == {"gate.weight", "gate.e_score_correction_bias"}
    plain = MegatronLayout(tiny_model("deepseek_v3"), 1, 1, 1, 16, dtype="bfloat16").tensors()
    assert plain["model.layers.1.mlp.gate.weight"].dtype == "bfloat16"
    assert plain["model.layers.1.mlp.gate.e_score_correction_bias"].dtype == "float32"


def test_a_thousand_ranks_of_a_671b_model_are_described_compactly():
    config = {
        "model_type": "deepseek_v3", "hidden_size": 7168, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "intermediate_size": 18432,
        "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
        "num_experts_per_tok": 8, "first_k_dense_replace": 3, "vocab_size": 129280,
        "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "max_position_embeddings": 163840,
        "topk_method": "noaux_tc", "scoring_func": "sigmoid", "dtype": "bfloat16",
    }  # fmt: skip
    shape = ModelShape.from_hf(config)
    chunks = stages.layers_of_chunk(61, 16, first=4, last=1)
    layout = MegatronLayout(
        shape, 8, 16, 8, 129280, ep=64, etp=1, layers_of_chunk=chunks,
        transformer_impl="transformer_engine", grouped_experts=True,
    ).layout()  # fmt: skip
    assert len(layout.ranks) == 1024
    experts = 58 * 256 * 3
    assert experts < len(layout.pieces) < experts + 61 * 100
    assert sum(info.num_bytes for info in layout.tensors.values()) // 10**9 == 1342
