from __future__ import annotations

import importlib
import pickle
import sys
from typing import Any

import pytest
import torch

from mrl.workers.megatron.cpu import _patches, cuda_on_cpu
from tests.ranks import Ranks

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")


def owners() -> dict[str, Any]:
    """Give everything that a block may change."""
    import megatron.core.tensor_parallel.random as megatron_random

    return {
        "torch": torch,
        "tensor": torch.Tensor,
        "cuda": torch.cuda,
        "random": torch.cuda.random,
        "megatron": megatron_random,
        "distributed": torch.distributed,
    }


def visible() -> dict[str, Any]:
    """Give their own attributes, by name."""
    return {f"{o}.{name}": v for o, owner in owners().items() for name, v in vars(owner).items()}


def assert_same(now: dict[str, Any], before: dict[str, Any]) -> None:
    assert now.keys() == before.keys()
    assert not [name for name, value in before.items() if now[name] is not value]


def test_megatron_finds_what_it_asks_for() -> None:
    with cuda_on_cpu():
        assert torch.zeros(2, device="cuda").device.type == "cpu"
        assert torch.tensor([1], device=torch.device("cuda", 0)).device.type == "cpu"
        assert torch.ones(1).cuda().device.type == "cpu"
        assert torch.ones(1).type() == "torch.cuda.FloatTensor"
        assert torch.zeros(1, device=torch.cuda.current_device()).device.type == "cpu"
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            torch.cuda.current_stream().wait_stream(torch.cuda.Stream())
        state = torch.cuda.get_rng_state()
        first = torch.rand(3)
        torch.cuda.set_rng_state(state)
        assert torch.equal(torch.rand(3), first)


def enter_once() -> None:
    before = visible()
    with cuda_on_cpu():
        assert torch.cuda.current_device is not before["cuda.current_device"]
    assert_same(visible(), before)


def test_torch_is_restored_exactly(ranks: Ranks) -> None:
    ranks.run(1, enter_once)  # a process that never entered the block
    enter_once()
    assert torch.ones(1).type() == "torch.FloatTensor"
    with pytest.raises((RuntimeError, AssertionError)):
        torch.zeros(1, device="cuda")


def test_torch_is_restored_after_an_exception() -> None:
    before = visible()
    with pytest.raises(KeyError), cuda_on_cpu():
        raise KeyError
    assert_same(visible(), before)


def test_nested_blocks_are_one() -> None:
    before = visible()
    with cuda_on_cpu():
        outer = visible()
        with pytest.raises(KeyError), cuda_on_cpu():
            assert_same(visible(), outer)
            raise KeyError
        assert_same(visible(), outer)  # the inner block's end is not the outer's
    assert_same(visible(), before)
    with cuda_on_cpu():  # and it can be entered again
        assert torch.zeros(2, device="cuda").device.type == "cpu"
    assert_same(visible(), before)


def test_every_patched_owner_is_watched() -> None:
    assert all(owner in owners().values() for owner, _, _ in _patches())


def test_pickled_tensors_do_not_name_megatron() -> None:
    importlib.import_module("mrl.workers.megatron.engine")
    assert "megatron.core" in sys.modules
    assert b"megatron" not in pickle.dumps(torch.ones(3))


def exchange_unequal_rows() -> tuple[list[int], list[int], list[int]]:
    """Exchange one row of rank 0 and two of rank 1; runs on a rank."""
    import torch.distributed as dist

    group = dist.new_group([0, 1])
    rank = group.rank()
    with cuda_on_cpu():
        own = torch.full((rank + 1, 1), rank + 1)
        parts = [torch.empty(1, 1, dtype=own.dtype), torch.empty(2, 1, dtype=own.dtype)]
        dist.all_gather(parts, own, group=group)
        everything = torch.cat(parts)
        summed = torch.empty_like(own)
        dist.reduce_scatter(summed, parts, group=group)
        moved = torch.empty(2, 1, dtype=own.dtype)
        sizes = (torch.tensor([1, 1]), torch.tensor([1, 1]))
        dist.all_to_all_single(moved, everything[:2].contiguous(), *sizes, group=group)
    return everything[:, 0].tolist(), summed[:, 0].tolist(), moved[:, 0].tolist()


def test_gloo_exchanges_what_experts_ask_of_nccl(ranks: Ranks) -> None:
    assert ranks.run(2, exchange_unequal_rows) == [
        ([1, 2, 2], [2], [1, 1]),
        ([1, 2, 2], [4, 4], [2, 2]),
    ]
