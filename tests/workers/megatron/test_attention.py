from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.types import Ragged, Sequences
from mrl.workers.megatron.attention import PackedAttention, PackedRow, Rotary, apply_rotary, pack

CPU = torch.device("cpu")
HEADS, GROUPS, WIDTH = 4, 2, 8


def rows_of(lengths: list[int], seed: int = 0) -> Sequences:
    draw = random.Random(seed)
    rows = [torch.tensor([draw.randrange(1, 90) for _ in range(n)]) for n in lengths]
    responses = torch.tensor([draw.randint(1, n - 1) for n in lengths], dtype=torch.int64)
    return Sequences(Ragged.from_rows(rows), responses)


def packed(lengths: list[int], multiple: int = 1) -> PackedRow:
    row = pack(rows_of(lengths), multiple, pad_token=99, device=CPU)
    Rotary(1.0 / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH)).fill(row)
    return row


def projections(tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, GROUPS, GROUPS)
    return [torch.randn(tokens, n, WIDTH, generator=generator).requires_grad_() for n in heads]


def attend(row: PackedRow, qkv: list[Tensor]) -> Tensor:
    return PackedAttention(None)(*qkv, attention_mask=None, packed_seq_params=row)


def length_mixes(count: int) -> list[list[int]]:
    draw = random.Random(1)
    ranges = [(2, 4), (2, 60), (30, 33), (2, 400)]
    return [
        [draw.randint(*draw.choice(ranges)) for _ in range(draw.randint(1, 20))]
        for _ in range(count)
    ]


def test_blocks_hold_every_token_once_and_waste_little() -> None:
    for lengths in length_mixes(60):
        row = packed(lengths)
        owner = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        cells = torch.cat([block.index for block in row.blocks])
        assert row.inverse is not None
        assert torch.equal(cells[row.inverse], torch.arange(sum(lengths)))  # back where it was
        assert len(row.inverse.unique()) == sum(lengths)
        assert len(cells) <= 1.5 * sum(lengths)
        for block in row.blocks:
            rectangle = block.index.view(block.shape)
            # a line is one sequence from its start; what follows repeats its last token
            assert (owner[rectangle] == owner[rectangle[:, :1]]).all()
            steps = rectangle.diff(dim=1)
            assert ((steps == 1) | (steps == 0)).all()


@pytest.mark.parametrize("multiple", [1, 2, 4, 8])
def test_rows_are_filled_up_with_a_sequence_that_predicts_nothing(multiple: int) -> None:
    for lengths in length_mixes(30):
        sequences = rows_of(lengths)
        row = pack(sequences, multiple, pad_token=99, device=CPU)
        total = row.tokens.shape[1]
        assert total % multiple == 0
        assert total - sum(lengths) < multiple
        assert torch.equal(row.tokens[0, : sum(lengths)], sequences.tokens.values)
        assert (row.tokens[0, sum(lengths) :] == 99).all()
        ends = [*torch.tensor(lengths).cumsum(0).tolist(), total]
        assert row.cu_seqlens_q.unique().tolist() == sorted({0, *ends})
        assert row.max_seqlen_q == max([*lengths, total - sum(lengths)])


def test_predictors_are_one_before_the_response_tokens() -> None:
    for lengths in length_mixes(30):
        sequences = rows_of(lengths)
        row = pack(sequences, 4, pad_token=99, device=CPU)
        wanted = [
            tokens[-int(n) :]
            for tokens, n in zip(sequences.tokens.rows(), sequences.response_lengths, strict=True)
        ]
        assert torch.equal(row.targets, torch.cat(wanted))
        assert torch.equal(row.tokens[0, row.predictors + 1], row.targets)


def test_positions_restart_at_each_sequence() -> None:
    row = packed([3, 5, 2], multiple=4)
    assert row.positions[0].tolist() == [0, 1, 2, 0, 1, 2, 3, 4, 0, 1, 0, 1]


@pytest.mark.parametrize("lengths", [[7], [9, 4, 4, 30, 5, 2], [2] * 9, [40, 3, 21, 20, 19]])
def test_packed_equals_one_by_one(lengths: list[int]) -> None:
    row = packed(lengths, multiple=4)
    qkv = projections(row.tokens.shape[1])
    out = attend(row, qkv)
    weights = torch.randn_like(out)
    weights[sum(lengths) :] = 0
    gradients = torch.autograd.grad((out * weights).sum(), qkv)
    start = 0
    for length in lengths:
        part = slice(start, start + length)
        alone = packed([length])
        small = [x[part].detach().requires_grad_() for x in qkv]
        q, k = (apply_rotary(x, alone.cos, alone.sin) for x in small[:2])
        k, v = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (k, small[2]))
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        wanted = F.scaled_dot_product_attention(
            q.transpose(0, 1), k.transpose(0, 1), v.transpose(0, 1), attn_mask=mask
        ).transpose(0, 1)
        torch.testing.assert_close(out[part], wanted, rtol=0, atol=1e-5)
        alone_gradients = torch.autograd.grad((wanted * weights[part]).sum(), small)
        for found, gradient in zip(gradients, alone_gradients, strict=True):
            torch.testing.assert_close(found[part], gradient, rtol=0, atol=1e-5)
        start += length


@pytest.mark.parametrize("lengths", [[9, 4, 4, 30, 5, 2], [6, 6, 6]])
def test_a_sequence_never_sees_its_neighbours(lengths: list[int]) -> None:
    row = packed(lengths)
    base = projections(sum(lengths))
    out = attend(row, base)
    start = 0
    for length in lengths:
        mine = slice(start, start + length)
        changed = projections(sum(lengths), seed=1)  # everything else is different
        for other, own in zip(changed, base, strict=True):
            other.data[mine] = own.data[mine]
        assert torch.equal(attend(row, changed)[mine], out[mine])
        gradients = torch.autograd.grad(out[mine].sum(), base, retain_graph=True)
        for gradient in gradients:
            assert gradient[mine].any()
            assert not gradient[:start].any()
            assert not gradient[start + length :].any()
        start += length


def test_a_token_never_sees_its_future() -> None:
    row = packed([6, 9])
    base, changed = projections(15), projections(15)
    for x in changed:
        x.data[4:6] += 1
        x.data[13:] += 1
    before, after = attend(row, base), attend(row, changed)
    assert torch.equal(before[:4], after[:4])
    assert torch.equal(before[6:13], after[6:13])
    assert not torch.equal(before[4:6], after[4:6])


def test_a_micro_batch_without_rows_still_runs() -> None:
    for multiple in (1, 4):
        row = packed([], multiple)
        assert row.tokens.shape == (1, multiple)
        assert row.targets.numel() == 0
        assert attend(row, projections(multiple)).shape == (multiple, HEADS, WIDTH)


def test_rope_kinds_that_scale_attention_are_refused() -> None:
    from transformers import LlamaConfig

    config = LlamaConfig(rope_parameters={"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(ValueError, match=r"'yarn'.*expected default, linear or llama3"):
        Rotary.of(config)
