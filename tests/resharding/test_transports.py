from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from mrl.resharding import MegatronLayout, plan, sync
from mrl.resharding.sync import Resharder
from mrl.resharding.transports import Distributed
from mrl.resharding.verify import compare_ends
from tests.resharding.closed_form import (
    like,
    logical_values,
    megatron_params,
    tiny_shape,
    vllm_layout,
    vllm_params,
)

WORLD = 2


def run_rank(rank, rendezvous):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=WORLD)
    shape = tiny_shape(layers=2)
    values = logical_values(shape)
    trainer = MegatronLayout(shape, 1, 2, 1, 16)
    src = megatron_params(trainer, values, rank)
    for threshold in (0, 1 << 20):  # every copy its own message; all of a peer in one
        sync.PACK_BELOW_BYTES = threshold
        steps = plan(trainer.layout(), vllm_layout(shape, 2, WORLD), bucket_bytes=2048)
        expected = vllm_params(shape, 2, values, rank)
        dst = like(expected)
        resharder = Resharder(steps, rank, src, dst, Distributed())
        for _ in range(2):
            stats = resharder.run()
            assert all(torch.equal(dst[name], expected[name]) for name in expected)
            assert 0 < stats.bytes_moved == stats.bytes_floor
        compare_ends(steps, rank, src, dst, Distributed())
    dst["model.norm.weight"][0] = 0
    with pytest.raises(ValueError, match=r"model\.norm\.weight"):  # on both ranks
        compare_ends(steps, rank, src, dst, Distributed())
    other = plan(trainer.layout(), vllm_layout(shape, 2, WORLD), bucket_bytes=2048 * (1 + rank))
    with pytest.raises(ValueError, match="different plans"):
        Resharder(other, rank, src, dst, Distributed())
    dist.destroy_process_group()


@pytest.mark.multiprocess
def test_two_processes_exchange_over_gloo(tmp_path):
    mp.spawn(run_rank, (f"file://{tmp_path}/rendezvous",), nprocs=WORLD)
