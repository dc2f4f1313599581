from __future__ import annotations

import pytest
import torch

from mrl.resharding import MegatronLayout, ModelShape
from mrl.resharding.coverage import padding_of, view_of
from tests.resharding.closed_form import logical_values, megatron_params, tiny_shape


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
    holders = {p.rank for p in layout.layout().pieces if p.param == "output_layer.weight"}
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
    layout = MegatronLayout(tiny_shape(), 1, 2, 1, 13, layers_of_stage=((0,), (1, 2, 3)))
    check_against_reference(layout)
    with pytest.raises(ValueError, match="once each"):
        MegatronLayout(tiny_shape(), 1, 2, 1, 13, layers_of_stage=((0,), (1, 2)))


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
    for part in ("tp 3 does not divide 8 heads (nearest legal 2", "pp 3", "legal 15", "auto"):
        assert part in str(error.value)


def test_replicas_repeat_the_pieces_of_the_first():
    layout = MegatronLayout(tiny_shape(), 2, 2, 2, 16, cp=2)
    assert [layout.coordinates(r) for r in (0, 1, 2, 4, 8)] == [
        (0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1)
    ]  # fmt: skip
    for rank in range(8):
        boxes = [(p.tensor, p.box) for p in layout.pieces_of(rank)]
        assert boxes == [(p.tensor, p.box) for p in layout.pieces_of(rank % 2)]


def test_names_and_shapes_are_those_of_a_real_gpt_model(single_rank_megatron):
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    shape: ModelShape = tiny_shape()
    config = TransformerConfig(
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_query_groups=shape.num_kv_heads,
        kv_channels=shape.head_dim,
        ffn_hidden_size=shape.ffn_size,
        gated_linear_unit=True,
        add_bias_linear=False,
        add_qkv_bias=shape.qkv_bias,
        normalization="RMSNorm",
        use_cpu_initialization=True,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(normalization="RMSNorm"),
        vocab_size=16,
        max_sequence_length=8,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    real = {name: tuple(param.shape) for name, param in model.named_parameters()}
    layout = MegatronLayout(shape, 1, 1, 1, 16)
    expected = megatron_params(layout, logical_values(shape), 0)
    assert real == {name: tuple(param.shape) for name, param in expected.items()}
