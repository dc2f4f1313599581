from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from mrl.types import Ragged, Sequences
from mrl.workers.host import WorkerHost
from mrl.workers.megatron.attention import PackedAttention, Rotary, spread_kv
from mrl.workers.megatron.rows import PackedRow, RowCut, fill_blocks, pack
from tests.marks import slow_but
from tests.ranks import Ranks
from tests.workers.jobs import job, layout, role

HEADS, WIDTH = 4, 4
# odd lengths, one token, shorter than a rank's part
LENGTHS = (5, 1, 3)


class _Groups:
    def __init__(self, cp: dist.ProcessGroup | None) -> None:
        self.cp = cp


def _row(cp: int, cp_rank: int) -> PackedRow:
    rows = [torch.arange(1, n + 1) for n in LENGTHS]
    sequences = Sequences(Ragged.from_rows(rows), torch.tensor([1, 0, 1]))
    row = pack(sequences, RowCut(cp, cp_rank), torch.device("cpu"), length=12)
    fill_blocks(row)
    Rotary(torch.tensor([1.0, 0.1])).fill(row)
    row.cos, row.sin = row.cos.double(), row.sin.double()
    return row


def _inputs(groups: int, part: Tensor) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    heads = (HEADS, groups, groups)
    whole = [torch.randn(12, n, WIDTH, generator=generator, dtype=torch.float64) for n in heads]
    return [x[part].clone() for x in whole]


def _weights(part: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(4)
    return torch.randn(12, HEADS, WIDTH, generator=generator, dtype=torch.float64)[part]


def largest_gradient_error(host: WorkerHost, groups: int) -> float:
    """Compare this rank's gradients with finite differences of all ranks' loss."""
    group = host._roles["actor"].engine.groups.collection.cp
    attention, row = (
        PackedAttention(None, pg_collection=_Groups(group)),
        _row(group.size(), group.rank()),
    )
    inputs, weights = _inputs(groups, row.part), _weights(row.part)

    def loss() -> Tensor:
        return (attention(*inputs, attention_mask=None, packed_seq_params=row) * weights).sum()

    def total() -> float:
        with torch.no_grad():
            value = loss()
        dist.all_reduce(value, group=group)
        return float(value)

    for x in inputs:
        x.requires_grad_()
    gradients = torch.autograd.grad(loss(), inputs)
    worst, step = 0.0, 1e-6
    for owner in range(group.size()):
        for x, gradient in zip(inputs, gradients, strict=True):
            for place in range(x.numel()):
                values = []
                for sign in (1, -1):
                    if group.rank() == owner:
                        x.data.view(-1)[place] += sign * step
                    values.append(total())
                    if group.rank() == owner:
                        x.data.view(-1)[place] -= sign * step
                if group.rank() == owner:
                    numeric = (values[0] - values[1]) / (2 * step)
                    worst = max(worst, abs(numeric - float(gradient.reshape(-1)[place])))
    return worst


def attended(host: WorkerHost, groups: int) -> Tensor:
    """Give this rank's part of the output."""
    group = host._roles["actor"].engine.groups.collection.cp
    row = _row(group.size(), group.rank())
    attention = PackedAttention(None, pg_collection=_Groups(group))
    return attention(*_inputs(groups, row.part), attention_mask=None, packed_seq_params=row)


@pytest.mark.parametrize(
    "groups", slow_but((1,), [4, 2, 1]), ids=["all-heads", "as-many-kv-heads", "fewer"]
)
def test_ulysses_gradients_are_those_of_finite_differences(
    groups: int, ranks: Ranks, llama: Path
) -> None:
    spec = job(role(llama, layout(context_parallel_size=2), optim=None))
    with ranks.job(2, spec) as pool:
        assert max(pool.each(largest_gradient_error, groups=groups)) < 1e-8
        row = _row(1, 0)
        alone = PackedAttention(None)(
            *_inputs(groups, row.part), attention_mask=None, packed_seq_params=row
        )
        found = torch.cat(pool.each(attended, groups=groups))
        torch.testing.assert_close(found, alone, rtol=0, atol=1e-12)


def test_every_rank_gets_the_kv_heads_of_its_query_heads() -> None:
    for heads, groups, cp in ((8, 8, 2), (8, 4, 2), (8, 2, 4), (8, 1, 8), (12, 3, 2), (12, 2, 3)):
        labels = torch.arange(groups)[None, :, None].expand(1, groups, 1)
        held = spread_kv(labels, cp, heads)[0, :, 0]
        assert len(held) % cp == 0
        share, queries = len(held) // cp, heads // cp
        for rank in range(cp):
            mine = held[rank * share : (rank + 1) * share]
            seen = mine.repeat_interleave(queries // share)
            wanted = torch.arange(rank * queries, (rank + 1) * queries) // (heads // groups)
            assert torch.equal(seen, wanted)
