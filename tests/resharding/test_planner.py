from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from mrl.resharding import FILE_RANK, Layout, MegatronLayout, ModelShape, Piece, TensorInfo, plan
from mrl.resharding.layout import nodes, volume, whole
from mrl.resharding.planner import DEFAULT_BUCKET_BYTES
from mrl.resharding.vllm_layout import VLLMLayout
from tests.resharding.closed_form import tiny_shape, vllm_layout

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"


def rows(name, *pieces, count=8, place=None):
    """Build a layout of one tensor from (rank or ranks, start, stop)."""
    return Layout(
        name,
        {"w": TensorInfo((count,), "float32")},
        tuple(
            Piece("w", ((a, b),), (r,) if isinstance(r, int) else r, "p", ((0, b - a),))
            for r, a, b in pieces
        ),
        place or {},
    )


def test_an_element_without_a_source_is_named():
    src, dst = rows("trainer", (0, 0, 3), (1, 5, 8)), rows("engine", ((2, 3), 0, 8))
    with pytest.raises(ValueError) as error:
        plan(src, dst)
    expected = "w((3, 5),): needed by ranks 2, 3 of engine, no rank of trainer holds it"
    assert expected in str(error.value)


def test_an_element_written_twice_is_named():
    dst = Layout(
        "engine",
        {"w": TensorInfo((4,), "float32")},
        (
            Piece("w", ((0, 4),), (1, 2), "p", ((0, 4),)),
            Piece("w", ((0, 2),), (2, 3), "p", ((3, 5),)),
        ),
    )
    with pytest.raises(ValueError, match=r"engine: p of ranks 2 is written twice: w.* overlap"):
        plan(rows("trainer", (0, 0, 4), count=4), dst)


def test_a_destination_that_nobody_takes_is_named():
    with pytest.raises(ValueError, match=r"engine: no rank holds w\(\(6, 8\),\)"):
        plan(rows("trainer", (0, 0, 8)), rows("engine", (0, 0, 6)))


def test_unsound_pieces_are_all_named():
    def piece(box, local, ranks=(0,), tensor="w"):
        return Piece(tensor, box, ranks, "p", local)

    src = Layout(
        "trainer",
        {"w": TensorInfo((4,), "float32")},
        (
            piece(((0, 5),), ((0, 5),)),
            piece(((0, 2),), ((0, 3),)),
            piece(((0, 2),), ((0, 2),), ranks=(1, 0)),
            piece(((0, 2),), ((0, 2),), tensor="v"),
        ),
    )
    with pytest.raises(ValueError) as error:
        plan(src, rows("engine", (0, 0, 4), count=4))
    for part in ("shape is (4,)", "extents differ", "ranks must be ascending", "no such tensor"):
        assert part in str(error.value)


def test_unmatched_tensors_and_shapes_are_named():
    src = Layout("a", {"x": TensorInfo((2,), "float32"), "y": TensorInfo((2,), "float32")}, ())
    dst = Layout("b", {"y": TensorInfo((3,), "float32"), "z": TensorInfo((2,), "float32")}, ())
    with pytest.raises(ValueError) as error:
        plan(src, dst)
    for part in ("only a has x", "only b has z", "y is (2,) in a and (3,) in b"):
        assert part in str(error.value)


def test_the_own_copy_comes_first_then_the_node_then_the_least_loaded():
    place = nodes(6, ranks_per_node=2)
    src = rows("trainer", ((0, 2, 3), 0, 8), place=place)
    dst = rows("engine", ((1, 2, 4, 5), 0, 8))
    senders = {c.dst_rank: c.src_rank for c in plan(src, dst).copies}
    assert senders == {2: 2, 1: 0, 4: 2, 5: 3}


def test_small_boxes_come_from_a_peer_already_open():
    tensors = {"big": TensorInfo((4096,), "float32"), "small": TensorInfo((2,), "float32")}

    def layout(name, *pieces):
        return Layout(
            name,
            tensors,
            tuple(Piece(t, ((a, b),), ranks, f"{t}.p", ((0, b - a),)) for t, ranks, a, b in pieces),
        )

    src = layout(
        "trainer", ("big", (0,), 0, 2048), ("big", (1,), 2048, 4096), ("small", (0, 1), 0, 2)
    )
    dst = layout(
        "engine", ("big", (2,), 0, 2048), ("big", (3,), 2048, 4096), ("small", (2, 3), 0, 2)
    )
    steps = plan(src, dst, bucket_bytes=4096)
    assert {c.dst_rank: c.src_rank for c in steps.copies if c.tensor == "small"} == {2: 0, 3: 1}
    assert [steps.peers(rank) for rank in range(4)] == [(2,), (3,), (0,), (1,)]


@pytest.mark.parametrize("takers", [(4,), (4, 5, 6), (4, 5, 6, 7), (4, 5, 6, 7, 8, 9)])
def test_large_boxes_are_shared_out_over_all_holders(takers):
    src = rows("trainer", ((0, 1, 2, 3), 0, 4096), count=4096)
    steps = plan(src, rows("engine", (takers, 0, 4096), count=4096), bucket_bytes=4096)
    sent = [steps.sent_bytes(rank) for rank in range(4)]
    assert max(sent) - min(sent) <= 4  # an element
    assert all(len(steps.peers(rank)) <= max(2, 8 // len(takers)) for rank in takers)


def test_layers_are_dealt_whole_where_takers_are_few():
    names = [f"layers.{i}.w" for i in range(8)]

    def layout(name, ranks):
        box = ((0, 4096),)
        tensors = {tensor: TensorInfo((4096,), "float32") for tensor in names}
        return Layout(name, tensors, tuple(Piece(n, box, ranks, f"{n}.p", box) for n in names))

    steps = plan(layout("trainer", (0, 1, 2, 3)), layout("engine", (4,)), bucket_bytes=2**16)
    sources = {c.tensor: c.src_rank for c in steps.copies}
    assert [sources[name] for name in names] == [0, 0, 1, 1, 2, 2, 3, 3]
    assert all(c.num_elements == 4096 for c in steps.copies)


def test_scalars_are_planned():
    def layout(name, ranks):
        return Layout(name, {"s": TensorInfo((), "float32")}, (Piece("s", (), ranks, "p", ()),))

    steps = plan(layout("a", (0,)), layout("b", (0, 1)))
    assert [(c.src_rank, c.dst_rank, c.src_box) for c in steps.copies] == [(0, 0, ()), (0, 1, ())]
    assert steps.received_bytes(1) == 4


def test_a_rank_that_needs_a_tensor_twice_gets_it_twice():
    dst = Layout(
        "engine",
        {"w": TensorInfo((4,), "float32")},
        tuple(Piece("w", ((0, 4),), (1,), param, ((0, 4),)) for param in ("a", "b")),
    )
    for forward in (False, True):
        steps = plan(rows("trainer", (0, 0, 4), count=4), dst, forward_within_node=forward)
        assert {c.dst_param for c in steps.copies} == {"a", "b"}
        assert steps.received_bytes(1) == steps.floor_bytes(1) == 32


def test_a_node_receives_once_and_passes_on_in_a_later_bucket():
    place = nodes(8, ranks_per_node=4)
    src = rows("trainer", ((0, 1), 0, 4096), count=4096, place=place)
    dst = rows("engine", ((4, 5, 6, 7), 0, 4096), count=4096, place=place)
    steps = plan(src, dst, bucket_bytes=2**16, forward_within_node=True)
    ends = [
        (bucket, rank, c)
        for rank in range(4, 8)
        for bucket, part in enumerate(steps.share(rank))
        for c in part
        if c.dst_rank == rank
    ]
    entered = {  # (rank, element): bucket, of what came from outside
        (rank, i): bucket
        for bucket, rank, c in ends
        if not c.forwarded
        for i in range(*c.dst_box[0])
    }
    # every rank takes a quarter, so that all network cards work
    assert Counter(rank for rank, _ in entered) == dict.fromkeys(range(4, 8), 1024)
    for bucket, _, c in ends:
        if c.forwarded:
            assert c.src_param == "p"
            assert all(entered[c.src_rank, i] < bucket for i in range(*c.src_box[0]))
    for rank in range(8):
        assert steps.received_bytes(rank) == steps.floor_bytes(rank)
    assert steps.sent_bytes(0) == steps.sent_bytes(1) == 4096 * 4 // 2


def test_sources_that_overlap_in_part_still_give_each_element_once():
    src = rows("trainer", (0, 0, 5), (1, 3, 8), (2, 4, 6))
    dst = rows("engine", (2, 2, 8), (3, 0, 8))
    steps = plan(src, dst)
    taken = [
        row
        for c in steps.copies
        if c.dst_rank == 2
        for row in range(c.dst_box[0][0] + 2, c.dst_box[0][1] + 2)
    ]
    assert sorted(taken) == list(range(2, 8))
    assert steps.local_bytes(2) == 8
    for rank in range(4):
        assert steps.received_bytes(rank) == steps.floor_bytes(rank)


def test_the_digest_depends_on_the_layouts_alone():
    shape = tiny_shape()
    layouts = [MegatronLayout(shape, tp, 2, 1, 16).layout() for tp in (1, 2)]
    first = plan(layouts[0], layouts[1])
    assert first.digest() == plan(layouts[0], layouts[1]).digest()
    again = MegatronLayout(shape, 2, 2, 1, 16).layout()
    assert first.digest() == plan(layouts[0], again).digest()
    assert first.digest() != plan(layouts[1], layouts[0]).digest()


@pytest.mark.parametrize("forward", [False, True])
@pytest.mark.parametrize("bucket_bytes", [128, 512, 4096])
def test_no_bucket_exceeds_its_bytes(bucket_bytes, forward):
    place = nodes(8, ranks_per_node=4)
    src = MegatronLayout(tiny_shape(), 2, 2, 2, 16, node_of_rank=place).layout()
    dst = vllm_layout(tiny_shape(), 2, 8, place)
    steps = plan(src, dst, bucket_bytes, forward)
    for rank in range(8):
        for part in steps.share(rank):
            moved = {"to": 0, "from": 0}
            for c in part:
                if not c.is_local:
                    moved["from" if c.src_rank == rank else "to"] += c.num_elements * 4
            assert max(moved.values()) <= bucket_bytes // 2
        assert steps.received_bytes(rank) == steps.floor_bytes(rank)
        assert steps.peak_buffer_bytes(rank) <= bucket_bytes
    sent = sum(steps.sent_bytes(rank) for rank in range(8))
    assert sent == sum(steps.received_bytes(rank) for rank in range(8))


def test_a_row_larger_than_a_bucket_has_one_of_its_own():
    tensors = {"w": TensorInfo((2, 1024), "float32")}
    box = ((0, 2), (0, 1024))
    src, dst = (Layout(n, tensors, (Piece("w", box, (r,), "p", box),)) for n, r in ("a0", "b1"))
    steps = plan(src, dst, bucket_bytes=512)
    assert [[c.src_box for c in part] for part in steps.share(1)] == [
        [((0, 1), (0, 1024))],
        [((1, 2), (0, 1024))],
    ]


def test_every_stage_sends_in_the_first_bucket():
    shape = tiny_shape()
    steps = plan(
        MegatronLayout(shape, 1, 4, 1, 16).layout(), vllm_layout(shape, 4, 4), bucket_bytes=8192
    )
    first = {c.src_rank for rank in range(4) for c in steps.share(rank)[0] if not c.is_local}
    assert first == {0, 1, 2, 3}


def test_layers_follow_each_other():
    shape = tiny_shape(layers=8)
    steps = plan(
        MegatronLayout(shape, 1, 1, 1, 16).layout(),
        VLLMLayout(shape, 1, dtype="float32", first_rank=1).layout(),
        bucket_bytes=4096,
    )
    buckets = [
        [int(c.tensor.split(".")[2]) for c in part if ".layers." in c.tensor]
        for part in steps.share(1)
    ]
    middle = [sum(layers) / len(layers) for layers in buckets if layers]
    assert middle == sorted(middle)


def test_files_are_read_and_fill_no_bucket():
    shape = tiny_shape()
    layout = MegatronLayout(shape, 2, 1, 1, 16).layout()
    tensors = layout.tensors
    pieces = tuple(
        Piece(name, whole(info.shape), (FILE_RANK,), name, whole(info.shape))
        for name, info in tensors.items()
    )
    steps = plan(Layout("hf", tensors, pieces), layout, bucket_bytes=64)
    assert steps.num_buckets == 1
    assert steps.received_bytes(0) == steps.floor_bytes(0)
    assert steps.peak_buffer_bytes(0) == 0
    assert steps.peers(0) == ()


def test_allgather_brings_what_the_trainer_does_not_hold():
    shape = tiny_shape()
    steps = plan(MegatronLayout(shape, 2, 2, 1, 16).layout(), vllm_layout(shape, 2, 4))
    total = sum(info.num_bytes for info in steps.dst.tensors.values())
    for rank in range(4):
        held = sum(4 * volume(piece.box) for piece in steps.src.pieces_of(rank))
        assert steps.allgather_bytes(rank) == total - held
    assert steps.allgather_bytes(9) == total


def test_a_70b_plan_for_512_ranks_receives_the_least_and_sends_evenly():
    shape = ModelShape.from_folder(MODELS / "Llama-3-70B")
    place = nodes(512, ranks_per_node=8)
    src = MegatronLayout(shape, 8, 4, 16, 128512, node_of_rank=place).layout()
    steps = plan(src, VLLMLayout(shape, 8, 64, node_of_rank=place).layout())
    received = [steps.received_bytes(rank) for rank in range(512)]
    assert received[::37] == [steps.floor_bytes(rank) for rank in range(0, 512, 37)]
    assert sum(received) / 512e9 == pytest.approx(13.23, abs=0.005)
    for first in range(0, 512, 8 * 16):  # of a stage
        for tp_rank in range(8):
            sent = [steps.sent_bytes(first + tp_rank + 8 * dp_rank) for dp_rank in range(16)]
            assert max(sent) <= 1.05 * sum(sent) / 16
    assert max(len(steps.peers(rank)) for rank in range(512)) <= 12
    least = max(received) / (DEFAULT_BUCKET_BYTES // 2)
    assert steps.num_buckets <= 1.6 * least  # buckets are well filled
    assert len(steps.share(511)) == steps.num_buckets
