from __future__ import annotations

import itertools

import pytest
import torch

from mrl.resharding import Layout, MegatronLayout, Piece, TensorInfo, plan, sync
from mrl.resharding.layout import nodes, whole
from mrl.resharding.sync import Resharder, run_together
from mrl.resharding.transports import InProcess, Mailbox
from mrl.resharding.verify import differing
from tests.resharding.closed_form import (
    like,
    logical_values,
    megatron_params,
    tiny_shape,
    vllm_layout,
    vllm_params,
)
from tests.resharding.placements import (
    BIAS,
    EXPERT,
    ROUTER,
    expert_tensors,
    expert_values,
    place,
    served_experts,
    trained_experts,
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


def check(steps, src_params, expected, runs=1):
    """Run into parameters full of NaN; compare bits, bytes and memory."""
    dst_params = {rank: like(params) for rank, params in expected.items()}
    resharders = build(steps, src_params, dst_params)
    staging = [resharder.staging_bytes for resharder in resharders]
    for _ in range(runs):
        for params in dst_params.values():
            for param in params.values():
                param.fill_(float("nan"))
        stats = run_together(resharders)
        for rank, params in expected.items():
            assert differing(dst_params[rank], params) == [], rank
        for stat in stats:
            assert stat.bytes_moved == stat.bytes_floor
    assert staging == [resharder.staging_bytes for resharder in resharders]
    for resharder in resharders:  # messages are aligned to 16 bytes
        slack = 16 * sum(map(len, steps.share(resharder.rank)))
        assert resharder.staging_bytes <= steps.peak_buffer_bytes(resharder.rank) + slack


def to_megatron(src, dst, values):
    check(
        plan(src.layout(), dst.layout(), bucket_bytes=8192),
        {rank: megatron_params(src, values, rank) for rank in range(src.world_size)},
        {rank: megatron_params(dst, values, rank) for rank in range(dst.world_size)},
    )


def to_vllm(src, tp, values, bucket_bytes=16384):
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
        dp = (1, 2)[index % 2] if tp * pp < 8 else 1
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
            rank, _, orders = value
            return [value, (rank + 1, "another digest", orders)]

    steps, src_params, dst_params, _ = float32_to_bfloat16()
    with pytest.raises(ValueError, match=r"ranks \[1\] computed different plans"):
        Resharder(steps, 0, src_params[0], dst_params[0], Other())


def move(src, dst, values, bucket_bytes=300, **options):
    """Check a plan between two layouts whose parameters are cut by plain slicing."""
    steps = plan(src, dst, bucket_bytes, **options)
    check(steps, place(src, values), place(dst, values), runs=2)
    return steps


@pytest.mark.parametrize("engine_ep", [False, True])
@pytest.mark.parametrize(("ep", "etp"), [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1)])
def test_experts_that_are_not_square_reach_every_engine(ep, etp, engine_ep):
    tensors = expert_tensors(experts=4, ffn=8, hidden=6, dtype="bfloat16")
    world = ep * etp
    for tp in (1, 2, 4):
        replicas = max(1, world // tp)
        dst = served_experts(tensors, tp, engine_ep, replicas)
        move(trained_experts(tensors, ep, etp), dst, expert_values(tensors))


@pytest.mark.parametrize("first", [0, 2, 4])  # the same ranks, half of them, none of them
def test_colocated_mixed_and_separate_ranks(first):
    tensors = expert_tensors(experts=4, ffn=8, hidden=6, dtype="bfloat16")
    dst = served_experts(tensors, tp=2, ep=False, replicas=2, first_rank=first)
    move(trained_experts(tensors, ep=2, etp=2), dst, expert_values(tensors))


def test_gate_and_up_stay_apart_when_expert_tensor_parallelism_ends():
    tensors = expert_tensors(experts=2, ffn=4, hidden=3, dtype="bfloat16")
    src = trained_experts(tensors, ep=1, etp=2)
    dst = served_experts(tensors, tp=1, ep=False, first_rank=0)
    values = {name: torch.zeros(info.shape) for name, info in tensors.items()}
    for e in range(2):
        values[EXPERT.format(e, "gate")] = torch.full((4, 3), 1.0)
        values[EXPERT.format(e, "up")] = torch.full((4, 3), 2.0)
    steps = plan(src, dst)
    params, found = place(src, values), {0: like(place(dst, values)[0])}
    run_together(build(steps, params, found))
    halves = found[0]["experts.w13_weight"].view(2, 2, 4, 3)  # expert, gate or up
    assert (halves[:, 0] == 1).all()
    assert (halves[:, 1] == 2).all()


def test_float32_biases_a_ten_thousandth_apart_stay_distinct_in_a_bfloat16_model():
    tensors = expert_tensors(experts=256, ffn=2, hidden=2, dtype="bfloat16")
    values = expert_values(tensors)
    values[BIAS] = 1 + 1e-4 * torch.arange(256, dtype=torch.float32)
    src, dst = trained_experts(tensors, ep=2, etp=1), served_experts(tensors, tp=2, ep=True)
    found = {rank: like(params) for rank, params in place(dst, values).items()}
    run_together(build(plan(src, dst), place(src, values), found))
    for params in found.values():
        assert params[BIAS].dtype == params[ROUTER].dtype == torch.float32
        assert params[BIAS].unique().numel() == 256
        assert torch.equal(params[ROUTER], values[ROUTER])


def test_float32_weights_become_bfloat16_on_the_way_and_float32_routers_do_not():
    wide = expert_tensors(experts=4, ffn=6, hidden=4, dtype="float32")
    narrow = expert_tensors(experts=4, ffn=6, hidden=4, dtype="bfloat16")
    move(
        trained_experts(wide, ep=2, etp=1),
        served_experts(narrow, tp=2, ep=False),
        expert_values(wide),
    )


def test_a_tied_model_leaves_no_trace_in_an_untied_one():
    for tied in (True, False, True):
        shape = tiny_shape(tied=tied)
        values = logical_values(shape)
        assert ("lm_head.weight" in values) is not tied
        to_vllm(MegatronLayout(shape, 2, 2, 1, padded_vocab=16), 2, values)


@pytest.mark.parametrize("split", [True, False])
def test_one_name_may_be_cut_in_one_trainer_and_whole_in_another(split):
    name = "model.layers.0.self_attn.kv_a_proj_with_mqa.weight"  # kv_lora 16, rope 4
    tensors = {name: TensorInfo((20, 6), "bfloat16")}
    full = whole((20, 6))
    halves = [((0, 10), (0, 6)), ((10, 20), (0, 6))]
    pieces = (
        [Piece(name, box, (rank,), "down", halves[0]) for rank, box in enumerate(halves)]
        if split
        else [Piece(name, full, (0, 1), "down", full)]
    )
    dst = Layout("vllm", tensors, (Piece(name, full, (0, 1), name, full),))
    steps = move(Layout("megatron", tensors, tuple(pieces)), dst, expert_values(tensors))
    assert steps.received_bytes(0) == (120 if split else 0)


def test_what_a_node_needs_more_than_once_is_received_once_and_passed_on():
    tensors = expert_tensors(experts=4, ffn=8, hidden=6, dtype="bfloat16")
    src = trained_experts(tensors, ep=2, etp=1)
    dst = served_experts(tensors, tp=1, ep=False, replicas=4, first_rank=2)
    node_of_rank = nodes(6, 2)
    src = Layout(src.name, tensors, src.pieces, node_of_rank)
    for bucket_bytes in (100, 300, 1 << 20):
        steps = move(src, dst, expert_values(tensors), bucket_bytes, forward_within_node=True)
        passed_on = [copy for copy in steps.copies if copy.forwarded]
        assert passed_on
        assert all(node_of_rank[c.src_rank] == node_of_rank[c.dst_rank] for c in passed_on)


def test_staging_holds_what_is_not_received_in_place_and_no_more(monkeypatch):
    monkeypatch.setattr(sync, "PACK_BELOW_BYTES", 0)
    tensors = {"a": TensorInfo((8, 8), "float32"), "b": TensorInfo((8, 8), "float32")}
    rows = [((0, 4), (0, 8)), ((4, 8), (0, 8))]
    columns = [((0, 8), (0, 4)), ((0, 8), (4, 8))]
    full = whole((8, 8))
    src = Layout(
        "trainer",
        tensors,
        (
            *(Piece("a", box, (rank,), "a", rows[0]) for rank, box in enumerate(rows)),
            *(Piece("b", box, (rank,), "b", columns[0]) for rank, box in enumerate(columns)),
        ),
    )
    dst = Layout("engine", tensors, tuple(Piece(n, full, (0, 1), n, full) for n in "ab"))
    values = expert_values(tensors)
    steps = plan(src, dst)
    resharders = build(steps, place(src, values), place(dst, values))
    assert [resharder.staging_bytes for resharder in resharders] == [128, 128]  # half of b
    check(steps, place(src, values), place(dst, values))
