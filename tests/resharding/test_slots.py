from __future__ import annotations

from pathlib import Path

import pytest

from mrl.resharding import Layout, MegatronLayout, ModelShape, Piece, TensorInfo, plan
from mrl.resharding.layout import nodes
from mrl.resharding.slots import choose_slots, held_bytes
from mrl.resharding.vllm_layout import VLLMLayout

GB = 1e9

MODELS = Path(__file__).resolve().parents[2] / "configs" / "models"
LLAMA_70B, QWEN_7B, QWEN_32B, QWEN_1B = (
    ModelShape.from_folder(MODELS / name)
    for name in ("Llama-3-70B", "Qwen2.5-7B", "Qwen2.5-32B", "Qwen2.5-1.5B")
)

# model, trainer (tp, pp, dp), engine tp, received natural (least, mean, most), received by the
# best map, all-gather: GB a rank
TABLE = [
    pytest.param(*row, id=f"{name}-tp{row[1][0]}pp{row[1][1]}dp{row[1][2]}-to-{row[2]}")
    for name, *row in [
        ("70b", LLAMA_70B, (8, 4, 2), 8, ("13.10", "13.23", "13.36"), "13.23", "136.70"),
        ("7b", QWEN_7B, (4, 4, 2), 4, ("2.720", "2.856", "2.992"), "2.856", "14.279"),
        ("32b", QWEN_32B, (8, 4, 2), 8, ("6.047", "6.145", "6.241"), "6.145", "63.48"),
        ("70b", LLAMA_70B, (4, 2, 1), 2, ("52.91", "61.73", "70.55"), "52.92", "123.47"),
        ("7b", QWEN_7B, (4, 2, 1), 2, ("5.712", "6.664", "7.616"), "5.712", "13.327"),
        ("70b", LLAMA_70B, (2, 1, 1), 1, ("70.55", "70.55", "70.55"), "70.55", "70.55"),
        ("7b", QWEN_7B, (2, 1, 1), 1, ("7.615", "7.615", "7.615"), "7.615", "7.615"),
        ("70b", LLAMA_70B, (4, 2, 1), 8, ("8.82", "15.43", "17.64"), "8.82", "123.47"),
        ("70b", LLAMA_70B, (8, 1, 1), 2, ("52.91", "61.73", "70.55"), "52.92", "123.47"),
        ("1.5b", QWEN_1B, (2, 2, 1), 4, ("0.333", "0.558", "0.783"), "0.333", "2.199"),
    ]
]


def printed(num_bytes, like):
    return f"{num_bytes / GB:.{len(like.split('.')[1])}f}"


def layouts(shape, sizes, engine_tp):
    tp, pp, dp = sizes
    world = tp * pp * dp
    place = nodes(world, ranks_per_node=8)
    rows = 128 * tp  # of the embedding are a multiple of this in Megatron
    padded = -(-shape.vocab_size // rows) * rows
    src = MegatronLayout(shape, tp, pp, dp, padded, node_of_rank=place).layout()

    def engine(slots=None):
        return VLLMLayout(
            shape, engine_tp, world // engine_tp, slots=slots, node_of_rank=place
        ).layout()

    return src, engine, world


@pytest.mark.parametrize(("shape", "sizes", "tp", "natural", "best", "allgather"), TABLE)
def test_received_bytes_are_those_worked_out_by_hand(shape, sizes, tp, natural, best, allgather):
    src, engine, world = layouts(shape, sizes, tp)

    def received(slots):
        steps = plan(src, engine(slots))
        bytes_of = [steps.received_bytes(rank) for rank in range(world)]
        assert bytes_of == [steps.floor_bytes(rank) for rank in range(world)]
        return bytes_of, sum(map(steps.allgather_bytes, range(world))) / world

    counts, gathered = received(None)
    statistics = (min(counts), sum(counts) / world, max(counts))
    assert tuple(map(printed, statistics, natural)) == natural
    assert printed(gathered, allgather) == allgather
    counts, _ = received(choose_slots(src, engine(), tp))
    assert printed(sum(counts) / world, best) == best


def strips(name, count, *pieces, place=None):
    """Build a layout of one tensor of `count` elements from (ranks, start, stop)."""
    return Layout(
        name,
        {"w": TensorInfo((count,), "float32")},
        tuple(Piece("w", ((a, b),), ranks, "p", ((0, b - a),)) for ranks, a, b in pieces),
        place or {},
    )


def test_slots_follow_what_ranks_hold():
    src = strips("trainer", 4, ((0,), 2, 3), ((1,), 3, 4), ((2,), 0, 1), ((3,), 1, 2))
    engine = strips("engine", 4, ((0, 2), 0, 2), ((1, 3), 2, 4))
    assert held_bytes(src, engine).tolist() == [[0, 4, 0, 4]] * 2 + [[4, 0, 4, 0]] * 2
    slots = choose_slots(src, engine, tp=2)
    assert sorted(slots) == [0, 1, 2, 3]
    assert [slot % 2 for slot in slots] == [1, 1, 0, 0]


def test_replicas_stay_on_their_node():
    place = nodes(4, ranks_per_node=2)
    src = strips("trainer", 4, ((0, 1), 0, 2), ((2, 3), 2, 4), place=place)
    engine = strips("engine", 4, ((0, 2), 0, 2), ((1, 3), 2, 4), place=place)
    # over nodes, 0 and 1 would take both first halves: nothing to receive, but replicas torn apart
    assert [slot // 2 for slot in choose_slots(src, engine, tp=2)] == [0, 0, 1, 1]


def test_replicas_larger_than_a_node_take_neighbouring_nodes():
    place = nodes(8, ranks_per_node=2)
    src = strips("trainer", 4, *(((rank,), 3 - rank // 2, 4 - rank // 2) for rank in range(8)))
    engine = strips("engine", 4, *(((i, i + 4), i, i + 1) for i in range(4)), place=place)
    slots = choose_slots(src, engine, tp=4)
    assert sorted(slots[:4]) == [0, 1, 2, 3]
    assert {slots[0], slots[1]} >= {3}
    assert {slots[6], slots[7]} >= {4}


def test_ranks_that_gain_nothing_keep_their_slots():
    src = strips("trainer", 4, (tuple(range(8)), 0, 4))
    engine = strips("engine", 4, ((0, 2, 4, 6), 0, 2), ((1, 3, 5, 7), 2, 4))
    assert choose_slots(src, engine, tp=2) == tuple(range(8))
    apart = strips("engine", 4, ((8, 10), 0, 2), ((9, 11), 2, 4))
    assert choose_slots(src, apart, tp=2) == (0, 1, 2, 3)


def test_torn_replicas_are_refused():
    src = strips("trainer", 4, ((0, 1, 2), 0, 4))
    with pytest.raises(ValueError, match="3 ranks are no whole replicas of tp 2"):
        choose_slots(src, strips("engine", 4, ((0, 1, 2), 0, 4)), tp=2)
