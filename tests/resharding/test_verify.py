from __future__ import annotations

import pytest
import torch

from mrl.resharding import MegatronLayout, plan, verify
from mrl.resharding.sync import Resharder
from mrl.resharding.transports import InProcess
from mrl.resharding.verify import checksum, compare_ends, differing, same_bits
from tests.resharding.closed_form import (
    like,
    logical_values,
    megatron_params,
    tiny_shape,
    vllm_layout,
    vllm_params,
)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_sees_values_and_places(dtype):
    tensor = torch.arange(6, dtype=dtype).view(2, 3)
    same = torch.arange(12, dtype=dtype).view(2, 6)[:, :3].clone()
    same.copy_(tensor)
    assert checksum(tensor) == checksum(same)
    assert checksum(tensor) != checksum(tensor.flip(0))
    same[1, 2] += 1
    assert checksum(tensor) != checksum(same)


def test_a_wrong_element_in_the_engine_is_named():
    shape = tiny_shape()
    trainer = MegatronLayout(shape, 1, 1, 1, 16)
    values = logical_values(shape)
    src = megatron_params(trainer, values, 0)
    dst = like(vllm_params(shape, 1, values, 0))
    steps = plan(trainer.layout(), vllm_layout(shape, 1, 1))
    Resharder(steps, 0, src, dst, InProcess()).run()
    compare_ends(steps, 0, src, dst, InProcess())
    dst["model.layers.2.mlp.gate_up_proj.weight"][0, 0] += 1
    with pytest.raises(ValueError, match=r"1 copies differ .*layers\.2\.mlp\.gate_proj"):
        compare_ends(steps, 0, src, dst, InProcess())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checksum_does_not_depend_on_memory_or_chunks(monkeypatch, dtype):
    tensor = torch.randn(9, 7, generator=torch.Generator().manual_seed(0)).to(dtype)
    wide = torch.zeros(9, 20, dtype=dtype)
    wide[:, 3:10] = tensor
    moved = torch.zeros(64, dtype=dtype)[1:64].view(9, 7)  # not on an 8-byte address
    moved.copy_(tensor)
    for chunk in (64, 128, 1 << 20):
        monkeypatch.setattr(verify, "_CHUNK_BYTES", chunk)
        assert checksum(tensor) == checksum(wide[:, 3:10]) == checksum(moved)
        assert checksum(tensor) != checksum(tensor.roll(1, 0))
        assert checksum(tensor) != checksum(-tensor)


def test_bits_are_compared_where_values_would_not_tell():
    nan, zero = torch.tensor([float("nan"), 0.0]), torch.tensor([float("nan"), -0.0])
    assert same_bits(nan, nan.clone())
    assert not same_bits(nan, zero)
    assert not same_bits(nan, nan.double())
    assert differing({"a": nan, "b": nan}, {"a": nan, "c": nan}) == ["b", "c"]
