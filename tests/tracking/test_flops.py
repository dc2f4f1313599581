from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen2Config, Qwen2ForCausalLM

from mrl.resharding.families import ModelShape, MoEShape
from mrl.tracking.flops import forward_flops, mfu, peak_flops, training_flops

ROOT = Path(__file__).resolve().parents[2]
CONFIG = Qwen2Config(
    vocab_size=160,
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
    attn_implementation="eager",
)
SHAPE = ModelShape.from_hf(CONFIG.to_dict())


def attention_part(shape: ModelShape, lengths: list[int]) -> float:
    """What remains when the same tokens are sequences of one: the rest is linear in tokens."""
    ones = [1] * sum(lengths)
    return forward_flops(shape, lengths) - forward_flops(shape, ones)


def test_attention_grows_with_the_sum_of_squared_lengths():
    packed, whole = attention_part(SHAPE, [1000, 1000, 2000]), attention_part(SHAPE, [4000])
    assert packed / whole == pytest.approx((6e6 - 4000) / (16e6 - 4000))
    assert packed == 2 * 4 * 64 * (6e6 - 4000) / 2


def test_key_and_value_projections_count_their_own_heads():
    few = dataclasses.replace(SHAPE, num_heads=32, num_kv_heads=8)
    all_heads = dataclasses.replace(few, num_kv_heads=32)
    per_head = 2 * SHAPE.num_layers * 2 * SHAPE.hidden_size * SHAPE.head_dim
    assert forward_flops(all_heads, [1]) - forward_flops(few, [1]) == 24 * per_head


def test_the_count_is_that_of_the_real_model():
    model = Qwen2ForCausalLM(CONFIG)
    length = 32
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.int64))
    # Eager attention computes the masked half as well; mrl counts the causal half alone.
    masked_half = 2 * 4 * 64 * length**2 / 2
    rotary = 2 * length * 8  # the frequency table's outer product
    expected = counter.get_total_flops() - masked_half
    assert forward_flops(SHAPE, [length]) == pytest.approx(expected, abs=rotary)


def test_a_packed_row_with_fewer_kv_heads_and_its_utilisation_worked_by_hand():
    """Two layers of 64 channels, 4 heads of 16 with 2 of keys and values, 96 in the MLP; 160 words.

    Query and output 2 * 64 * 64, key and value 2 * 64 * 32, MLP 3 * 64 * 96: 30,720 weights a layer
    and 2 FLOPs each for 8 tokens; the head 2 * 64 * 160 for each of 4 predictions; attention 4 * 64
    FLOPs a pair and layer, of which sequences of 3 and 5 have (9 + 25) / 2.
    """
    linear, head, attention = 2 * 8 * 61_440, 4 * 20_480, 2 * 256 * 17
    assert (linear, head, attention) == (983_040, 81_920, 8_704)
    assert forward_flops(SHAPE, [3, 5], predicted=4) == 1_073_664
    assert training_flops(SHAPE, [3, 5], predicted=4) == 3_220_992
    assert mfu(3_220_992, seconds=0.5, num_gpus=2, peak=1e9) == pytest.approx(0.003_220_992)


def test_experts_worked_by_hand():
    """Layer 1 sends a token to 2 of 8 experts of 32 channels, and to a shared one of 16.

    That is 64 * (3 * (2 * 32 + 16) + 8) = 15,872 weights, where the dense MLP has 18,432.
    """
    moe = MoEShape(8, 2, 32, 16, (1,), "softmax", True, 1.0, 1, 1)
    mixed = dataclasses.replace(SHAPE, moe=moe)
    assert forward_flops(SHAPE, [7]) - forward_flops(mixed, [7]) == 2 * 7 * (18_432 - 15_872)


def test_the_head_counts_for_the_tokens_that_it_predicts():
    all_tokens, some = forward_flops(SHAPE, [10, 20]), forward_flops(SHAPE, [10, 20], predicted=12)
    assert all_tokens == forward_flops(SHAPE, [10, 20], predicted=30)
    assert all_tokens - some == 2 * 64 * 160 * (30 - 12)
    assert training_flops(SHAPE, [10, 20], predicted=12) == 3 * some


def test_training_is_three_forward_passes_whatever_is_recomputed():
    assert training_flops(SHAPE, [5, 7]) == 3 * forward_flops(SHAPE, [5, 7])


def test_beside_adapters_no_gradients_of_weights_are_counted():
    own_score = 2 * 64 * SHAPE.num_layers  # a token's attention to itself, half of it masked
    linear = forward_flops(SHAPE, [1] * 12) - 12 * own_score
    whole, adapters = (training_flops(SHAPE, [5, 7], weights_frozen=f) for f in (False, True))
    assert whole - adapters == linear


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H200", 989e12),
        ("NVIDIA H20", 148e12),
        ("NVIDIA GH200 480GB", 989e12),
        ("NVIDIA GB200", 2500e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("x86_64", None),
    ],
)
def test_peaks_are_found_by_device_name(name: str, peak: float | None):
    assert peak_flops(name) == peak


def test_mfu_is_the_share_of_all_gpus_peak_and_absent_on_a_cpu():
    assert mfu(4e14, 2.0, 2, 1e15) == pytest.approx(0.1)
    assert mfu(4e14, 2.0, 2, None) is None


def test_active_weights_give_the_parameters_that_a_model_is_known_by():
    """Two FLOPs a token and active weight: Qwen3-30B-A3B has 3.3B of them, DeepSeek-V3 37B."""
    for name, active in (("Qwen3-30B-A3B", 3.3e9), ("DeepSeek-V3", 37e9)):
        shape = ModelShape.from_folder(ROOT / "configs" / "models" / name)
        embedding = shape.vocab_size * shape.hidden_size  # looked up, not multiplied
        weights = (forward_flops(shape, [1]) / 2) + embedding
        assert weights == pytest.approx(active, rel=0.02), name


def test_experts_that_a_token_is_not_sent_to_cost_their_routing_alone():
    shape = ModelShape.from_folder(ROOT / "configs" / "models" / "Qwen3-30B-A3B")
    twice = dataclasses.replace(
        shape, moe=dataclasses.replace(shape.moe, num_experts=2 * shape.moe.num_experts)
    )
    router = 2 * shape.hidden_size * shape.moe.num_experts * len(shape.moe.layers)
    assert forward_flops(twice, [1]) - forward_flops(shape, [1]) == router
