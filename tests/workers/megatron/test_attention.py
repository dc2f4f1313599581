from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from mrl.workers.megatron.attention import PackedAttention, Rotary, apply_rotary
from mrl.workers.megatron.rows import PackedRow
from tests.workers.megatron.packed_rows import packed_row

HEADS, GROUPS, WIDTH = 4, 2, 8


def packed(lengths: list[int], multiple: int = 1) -> PackedRow:
    row = packed_row(lengths, multiple_of=multiple)
    Rotary(1.0 / 100 ** (torch.arange(0, WIDTH, 2) / WIDTH)).fill(row)
    return row


def projections(tokens: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    heads = (HEADS, GROUPS, GROUPS)
    return [torch.randn(tokens, n, WIDTH, generator=generator).requires_grad_() for n in heads]


def attend(row: PackedRow, qkv: list[Tensor]) -> Tensor:
    return PackedAttention(None)(*qkv, attention_mask=None, packed_seq_params=row)


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
