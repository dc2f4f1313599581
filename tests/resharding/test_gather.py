from __future__ import annotations

import itertools

import pytest
import torch

from mrl.resharding import MegatronLayout, plan
from mrl.resharding.gather import GatherSync, gather_together
from mrl.resharding.sync import Resharder, run_together
from mrl.resharding.transports import InProcess, Mailbox
from mrl.resharding.verify import differing
from tests.resharding import jobs
from tests.resharding.closed_form import (
    like,
    logical_values,
    megatron_params,
    tiny_shape,
    vllm_layout,
)
from tests.resharding.placements import (
    expert_tensors,
    expert_values,
    place,
    served_experts,
    slices,
    trained_experts,
)


def gathered(steps, src_params, bucket_bytes, runs=1):
    """Run all ranks; give what each rank's loader saw, and the stats."""
    mailbox, seen, syncs = Mailbox(), {}, []
    for rank in sorted({*steps.src.ranks, *steps.dst.ranks}):

        def load(weights, rank=rank):
            seen[rank].update((name, tensor.clone()) for name, tensor in weights)

        syncs.append(
            GatherSync(
                steps, rank, src_params.get(rank, {}), load, InProcess(rank, mailbox), bucket_bytes
            )
        )
    for _ in range(runs):
        seen.update((sync.rank, {}) for sync in syncs)
        stats = gather_together(syncs)
    return seen, stats, syncs


@pytest.mark.parametrize("bucket_bytes", [64, 2048, 1 << 20])
@pytest.mark.parametrize("tied", [False, True])
def test_every_rank_sees_every_tensor_whole(bucket_bytes, tied):
    shape = tiny_shape(tied=tied)
    values = logical_values(shape)
    for tp, pp, dp in itertools.product((1, 2), (1, 2), (1, 2)):
        src = MegatronLayout(shape, tp, pp, dp, padded_vocab=16)
        src_params = {r: megatron_params(src, values, r) for r in range(src.world_size)}
        steps = plan(src.layout(), vllm_layout(shape, 1, src.world_size))
        seen, stats, _ = gathered(steps, src_params, bucket_bytes, runs=2)
        for rank in range(src.world_size):
            assert differing(seen[rank], values) == []
        assert all(stat.bytes_moved >= stat.bytes_floor for stat in stats)


def test_a_loader_that_cuts_gives_the_bits_of_the_direct_way():
    tensors = expert_tensors(experts=4, ffn=6, hidden=4, dtype="bfloat16")
    src, dst = trained_experts(tensors, ep=2, etp=2), served_experts(tensors, tp=2, ep=True)
    values = expert_values(tensors)
    src_params, expected = place(src, values), place(dst, values)
    steps = plan(src, dst, bucket_bytes=200)
    direct = {rank: like(params) for rank, params in expected.items()}
    mailbox = Mailbox()
    run_together(
        [
            Resharder(steps, r, src_params[r], direct.get(r, {}), InProcess(r, mailbox))
            for r in src.ranks
        ]
    )
    seen, _, _ = gathered(steps, src_params, 200)
    for rank, params in expected.items():
        loaded = like(params)
        for piece in dst.pieces:
            if rank in piece.ranks:
                part = seen[rank][piece.tensor][slices(piece.box)]
                loaded[piece.param][slices(piece.local)] = part
        assert differing(loaded, direct[rank]) == []


def test_the_loader_gets_the_engines_dtype_and_buffers_do_not_grow():
    wide = expert_tensors(experts=2, ffn=6, hidden=4, dtype="float32")
    narrow = expert_tensors(experts=2, ffn=6, hidden=4, dtype="bfloat16")
    src, dst = trained_experts(wide, ep=2, etp=1), served_experts(narrow, tp=1, ep=False)
    values = expert_values(wide)
    seen, _, syncs = gathered(plan(src, dst), place(src, values), 256, runs=2)
    narrowed = {
        name: value.to(getattr(torch, narrow[name].dtype)) for name, value in values.items()
    }
    for found in seen.values():
        assert differing(found, narrowed) == []
    # two buckets of rows, padded to the fullest rank, and one of whole tensors
    assert all(sync.staging_bytes <= 6 * 256 for sync in syncs)


@pytest.mark.multiprocess
def test_gather_over_a_gloo_collective(ranks):
    ranks.run(2, jobs.gather_equals_direct)
