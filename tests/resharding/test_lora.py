"""Adapters lie where the matrices lie that they adapt."""

from __future__ import annotations

import pytest

from mrl.resharding.layout import Layout
from mrl.resharding.lora import ADAPTABLE, adapted_modules, adapter_layout, shared_a, whole_on
from mrl.resharding.megatron import MegatronLayout
from mrl.resharding.planner import plan
from tests.resharding.families import tiny_model

RANK = 3


def megatron(case: str, tp: int = 2, **rest: int) -> Layout:
    return MegatronLayout(tiny_model(case), tp=tp, pp=2, dp=2, padded_vocab=16, **rest).layout()


def test_an_adapter_has_the_shapes_of_peft() -> None:
    shape = tiny_model("qwen2")
    layout = adapter_layout(megatron("qwen2"), RANK, ADAPTABLE)
    matrices = {
        name.removesuffix(".weight"): info.shape
        for name, info in shape.tensors().items()
        if ".layers." in name and len(info.shape) == 2
    }
    assert len(matrices) == 7 * shape.num_layers
    assert {name: info.shape for name, info in layout.tensors.items()} == {
        f"base_model.model.{name}.lora_{side}.weight": size
        for name, (rows, columns) in matrices.items()
        for side, size in (("A", (RANK, columns)), ("B", (rows, RANK)))
    }


@pytest.mark.parametrize(("tp", "vpp"), [(1, 1), (2, 1), (4, 1), (2, 3)])
def test_what_the_ranks_hold_makes_whole_adapters_everywhere(tp: int, vpp: int) -> None:
    layout = adapter_layout(megatron("qwen2", tp, vpp=vpp), RANK, ADAPTABLE)
    there = whole_on(layout, (0, 99), "bfloat16")
    steps = plan(layout, there)  # raises where an element has no source
    size = sum(info.num_bytes for info in there.tensors.values())
    assert steps.received_bytes(99) == size
    assert 0 < steps.received_bytes(0) < size


def test_a_is_whole_or_cut_as_the_input_is_and_b_as_the_output() -> None:
    layout = adapter_layout(megatron("qwen2"), RANK, ADAPTABLE)
    held = {}
    for piece in layout.pieces_of(0):
        if piece.tensor.startswith("base_model.model.model.layers.0."):
            held[piece.tensor.split(".layers.0.")[1]] = piece.box
    assert held["self_attn.k_proj.lora_A.weight"] == ((0, RANK), (0, 32))
    assert held["self_attn.k_proj.lora_B.weight"] == ((0, 12), (0, RANK))
    assert held["self_attn.o_proj.lora_A.weight"] == ((0, RANK), (0, 24))
    assert held["self_attn.o_proj.lora_B.weight"] == ((0, 32), (0, RANK))
    assert held["mlp.up_proj.lora_B.weight"] == ((0, 12), (0, RANK))
    assert held["mlp.down_proj.lora_A.weight"] == ((0, RANK), (0, 12))


def test_fused_layers_share_their_a() -> None:
    layout = adapter_layout(megatron("qwen2", 4), RANK, ADAPTABLE)
    pairs = {(a.split(".", 2)[2], b.split(".", 2)[2]) for a, b in shared_a(layout)}
    assert pairs == {
        (f"model.layers.{layer}.{a}.lora_A.weight", f"model.layers.{layer}.{b}.lora_A.weight")
        for layer in range(6)
        for a, b in (
            ("self_attn.q_proj", "self_attn.k_proj"),
            ("self_attn.q_proj", "self_attn.v_proj"),
            ("mlp.gate_proj", "mlp.up_proj"),
        )
    }


@pytest.mark.parametrize(
    ("targets", "wanted"),
    [
        (("linear_qkv", "linear_proj"), ("q_proj", "k_proj", "v_proj", "o_proj")),
        (("linear_fc2",), ("down_proj",)),
        (("linear_fc1",), ("gate_proj", "up_proj")),
    ],
)
def test_the_engine_is_told_of_the_layers_that_are_adapted(
    targets: tuple[str, ...], wanted: tuple[str, ...]
) -> None:
    assert adapted_modules(tiny_model("llama"), targets) == wanted
    layout = adapter_layout(megatron("llama"), RANK, targets)
    assert {name.split(".")[-3] for name in layout.tensors} == set(wanted)


def test_experts_are_not_adapted() -> None:
    layout = adapter_layout(megatron("qwen3_moe"), RANK, ADAPTABLE)
    assert {name.split(".")[-4] for name in layout.tensors} == {"self_attn"}
