from __future__ import annotations

import itertools

import pytest
import torch

from mrl.resharding import MegatronLayout, plan, sync
from mrl.resharding.sync import Resharder, run_together
from mrl.resharding.transports import InProcess, Mailbox
from tests.resharding.closed_form import (
    like,
    logical_values,
    megatron_params,
    tiny_shape,
    vllm_layout,
    vllm_params,
)

SIZES = list(itertools.product((1, 2, 4), (1, 2, 4), (1, 2, 4)))  # tp, pp, dp


def build(steps, src_params, dst_params):
    mailbox = Mailbox()
    ranks = sorted({*steps.src.ranks, *steps.dst.ranks})
    return [
        Resharder(
            steps,
            rank,
            src_params.get(rank, {}),
            dst_params.get(rank, {}),
            InProcess(rank, mailbox),
        )
        for rank in ranks
    ]


def check(steps, src_params, expected):
    dst_params = {rank: like(params) for rank, params in expected.items()}
    stats = run_together(build(steps, src_params, dst_params))
    for rank, params in expected.items():
        for name, param in params.items():
            assert torch.equal(dst_params[rank][name], param), (rank, name)
    for stat in stats:
        assert stat.bytes_moved == stat.bytes_floor


def to_megatron(src, dst, values):
    check(
        plan(src.layout(), dst.layout(), bucket_bytes=8192),
        {rank: megatron_params(src, values, rank) for rank in range(src.world_size)},
        {rank: megatron_params(dst, values, rank) for rank in range(dst.world_size)},
    )


def to_vllm(src, tp, values, bucket_bytes=8192):
    world = max(src.world_size, tp)
    check(
        plan(src.layout(), vllm_layout(src.shape, tp, world), bucket_bytes),
        {rank: megatron_params(src, values, rank) for rank in range(src.world_size)},
        {rank: vllm_params(src.shape, tp, values, rank % tp) for rank in range(world)},
    )


@pytest.mark.parametrize("kv_heads", [1, 2, 4, 8])
@pytest.mark.parametrize("pp", [1, 2, 4])
def test_engine_shards_are_exact_from_every_training_layout(pp, kv_heads):
    for index, (tp, engine_tp) in enumerate(itertools.product((1, 2, 4), (1, 2, 4))):
        shape = tiny_shape(kv_heads=kv_heads, tied=bool((index + pp) % 2), layers=pp)
        dp = (1, 2, 4)[index % 3] if tp * pp < 8 else 1
        src = MegatronLayout(shape, tp, pp, dp, padded_vocab=32)
        to_vllm(src, engine_tp, logical_values(shape))


@pytest.mark.parametrize("dst", SIZES)
def test_training_layouts_convert_into_one_another(dst):
    index = SIZES.index(dst)
    for step in (5, 16):
        src = SIZES[(index + step) % len(SIZES)]
        shape = tiny_shape(
            "llama",
            kv_heads=(1, 2, 4, 8)[index % 4],
            tied=bool((index + step) % 2),
            layers=max(src[1], dst[1]),
        )
        to_megatron(
            MegatronLayout(shape, *src, padded_vocab=16),
            MegatronLayout(shape, *dst, padded_vocab=32, transformer_impl="transformer_engine"),
            logical_values(shape),
        )


def test_ranks_without_a_vocabulary_row_stay_zero():
    shape = tiny_shape(vocab=5)
    to_vllm(MegatronLayout(shape, 4, 2, 1, padded_vocab=16), 4, logical_values(shape))


@pytest.mark.parametrize("threshold", [0, 1 << 20])
@pytest.mark.parametrize("bucket_bytes", [16, 512, 1 << 20])
def test_packed_and_direct_messages_give_the_same_result(monkeypatch, threshold, bucket_bytes):
    monkeypatch.setattr(sync, "PACK_BELOW_BYTES", threshold)
    shape = tiny_shape()
    src = MegatronLayout(shape, 2, 2, 1, padded_vocab=16)
    to_vllm(src, 4, logical_values(shape), bucket_bytes)


def float32_to_bfloat16():
    shape = tiny_shape()
    src = MegatronLayout(shape, 2, 2, 1, padded_vocab=16)
    values = {name: value.sin() for name, value in logical_values(shape).items()}
    engine = vllm_layout(shape, 2, 4)
    dtyped = type(engine)(
        engine.name, shape.tensors("bfloat16"), engine.pieces, padded=engine.padded
    )
    src_params = {rank: megatron_params(src, values, rank) for rank in range(4)}
    expected = {rank: vllm_params(shape, 2, values, rank % 2) for rank in range(4)}
    dst_params = {rank: like(params, torch.bfloat16) for rank, params in expected.items()}
    return plan(src.layout(), dtyped), src_params, dst_params, expected


def assert_equal_bfloat16(dst_params, expected):
    for rank, params in expected.items():
        for name, param in params.items():
            assert torch.equal(dst_params[rank][name], param.bfloat16()), (rank, name)


def test_the_wire_carries_the_engines_dtype():
    steps, src_params, dst_params, expected = float32_to_bfloat16()
    stats = run_together(build(steps, src_params, dst_params))
    assert_equal_bfloat16(dst_params, expected)
    in_float32 = plan(steps.src, vllm_layout(tiny_shape(), 2, 4))
    assert [stat.bytes_moved * 2 for stat in stats] == [
        in_float32.received_bytes(r) for r in range(4)
    ]


def test_a_second_run_sends_new_values_through_the_same_memory():
    steps, src_params, dst_params, expected = float32_to_bfloat16()
    resharders = build(steps, src_params, dst_params)
    run_together(resharders)
    addresses = [p.data_ptr() for params in dst_params.values() for p in params.values()]
    staging = [resharder.staging_bytes for resharder in resharders]
    for group in (*src_params.values(), *expected.values()):
        for param in group.values():
            param.mul_(-1)
    for params in dst_params.values():  # what an engine finds after sleeping
        for param in params.values():
            param.fill_(float("nan"))
    run_together(resharders)
    assert_equal_bfloat16(dst_params, expected)
    assert staging == [resharder.staging_bytes for resharder in resharders]
    assert addresses == [p.data_ptr() for params in dst_params.values() for p in params.values()]


def test_parameters_that_moved_are_found_again():
    steps, src_params, dst_params, expected = float32_to_bfloat16()
    resharders = build(steps, src_params, dst_params)
    run_together(resharders)
    moved = src_params[0]["decoder.layers.0.mlp.linear_fc1.weight"]
    moved.data = -moved.data
    fc1 = "model.layers.0.mlp.gate_up_proj.weight"
    expected[0][fc1].neg_()
    expected[2][fc1].neg_()
    run_together(resharders)
    assert_equal_bfloat16(dst_params, expected)


def test_an_unexpected_dtype_is_refused():
    steps, src_params, dst_params, _ = float32_to_bfloat16()
    dst_params[1]["model.norm.weight"] = torch.zeros(8)
    with pytest.raises(ValueError, match=r"rank 1 model.norm.weight: dtype is torch.float32"):
        build(steps, src_params, dst_params)


@pytest.mark.parametrize("side", [0, 1])
def test_unknown_missing_and_misshapen_parameters_are_all_named(side):
    steps, *params, _ = float32_to_bfloat16()
    wrong = params[side][0]
    dtype = (torch.float32, torch.bfloat16)[side]
    gone, bad = list(wrong)[1:3]
    del wrong[gone]
    wrong[bad] = torch.zeros([extent + 1 for extent in wrong[bad].shape], dtype=dtype)
    wrong["extra.weight"] = torch.zeros(2)
    with pytest.raises(ValueError) as error:
        build(steps, *params)
    for name in (gone, bad, "extra.weight"):
        assert name in str(error.value)


def test_different_plans_on_two_ranks_are_refused():
    class Other(InProcess):
        def gather(self, value):
            return [value, "another digest"]

    steps, src_params, dst_params, _ = float32_to_bfloat16()
    with pytest.raises(ValueError, match="different plans"):
        Resharder(steps, 0, src_params[0], dst_params[0], Other())
