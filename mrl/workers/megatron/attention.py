"""Packed rows: many sequences in one row, no padding, attention that never crosses a sequence.

T tokens of a row, S sequences in it, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mrl.types import Sequences

# A padded attention block holds sequences of at most this length ratio, so that its waste is
# bounded whatever the mix of lengths.
_BLOCK_LENGTH_RATIO = 1.5


@dataclass(frozen=True, slots=True)
class Block:
    """Sequences of similar length as one right-padded rectangle."""

    index: Tensor  # [n * L] int64: row position of each cell; padding repeats a real token
    shape: tuple[int, int]  # n, L


@dataclass
class PackedRow(PackedSeqParams):
    """Megatron's packed-sequence parameters with what our attention and heads need beside them."""

    tokens: Tensor | None = None  # [1, T] int64
    positions: Tensor | None = None  # [1, T] int64, restarting at each sequence
    predictors: Tensor | None = None  # [sum R] row positions whose logits predict the responses
    targets: Tensor | None = None  # [sum R] response tokens
    lengths: Tensor | None = None  # [N] response lengths, on the CPU
    blocks: tuple[Block, ...] = ()
    inverse: Tensor | None = None  # [T] cell of each token among all blocks' cells
    cos: Tensor | None = None  # [T, 1, D]
    sin: Tensor | None = None  # [T, 1, D]


def pack(sequences: Sequences, multiple_of: int, pad_token: int, device: torch.device) -> PackedRow:
    """Lay sequences end to end in one row.

    The row is filled up to a multiple of `multiple_of` tokens (sequence parallelism cuts it) with
    one more sequence of `pad_token`, which predicts nothing.
    """
    rows = list(sequences.tokens.rows())
    responses = sequences.response_lengths.tolist()
    total = sum(row.shape[0] for row in rows)
    fill = -total % multiple_of
    if fill or not rows:
        rows.append(torch.full((fill or multiple_of,), pad_token, dtype=torch.int64))
    lengths = [row.shape[0] for row in rows]
    tokens = torch.cat(rows)
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    predictors = [
        torch.arange(starts[i] + lengths[i] - r - 1, starts[i] + lengths[i] - 1)
        for i, r in enumerate(responses)
    ]
    predicted = torch.cat(predictors) if predictors else torch.empty(0, dtype=torch.int64)
    positions = torch.cat([torch.arange(length) for length in lengths])
    blocks, inverse = _blocks(starts, lengths)
    cu_seqlens = torch.tensor(starts, dtype=torch.int32, device=device)
    return PackedRow(
        qkv_format="thd",
        cu_seqlens_q=cu_seqlens,
        cu_seqlens_kv=cu_seqlens,
        max_seqlen_q=max(lengths),
        max_seqlen_kv=max(lengths),
        tokens=tokens[None].to(device),
        positions=positions[None].to(device),
        predictors=predicted.to(device),
        targets=tokens[predicted + 1].to(device),
        lengths=sequences.response_lengths,
        blocks=tuple(Block(block.index.to(device), block.shape) for block in blocks),
        inverse=inverse.to(device),
    )


def _blocks(starts: Sequence[int], lengths: Sequence[int]) -> tuple[list[Block], Tensor]:
    """Group sequences of similar length into rectangles; give each token's cell as well."""
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    groups: list[list[int]] = []
    for i in order:
        if groups and lengths[groups[-1][0]] <= _BLOCK_LENGTH_RATIO * lengths[i]:
            groups[-1].append(i)
        else:
            groups.append([i])
    inverse = torch.empty(starts[-1], dtype=torch.int64)
    blocks, offset = [], 0
    for group in groups:
        width = lengths[group[0]]
        first = torch.tensor([starts[i] for i in group])[:, None]
        last = torch.tensor([lengths[i] - 1 for i in group])[:, None]
        column = torch.arange(width)[None]
        index = first + torch.minimum(column, last)
        cells = torch.arange(index.numel()).view_as(index) + offset
        real = column <= last
        inverse[index[real]] = cells[real]
        blocks.append(Block(index.reshape(-1), (len(group), width)))
        offset += index.numel()
    return blocks, inverse


class Rotary:
    """Rotary position tables with the frequencies of the model's own Hugging Face config."""

    def __init__(self, inv_freq: Tensor) -> None:
        self.inv_freq = inv_freq.float()  # [D / 2]

    @staticmethod
    def of(config: PreTrainedConfig) -> Rotary:
        """Take the frequencies by transformers' rules (default, linear, llama3).

        Raises ValueError for a rule that also scales the attention, which Megatron would drop.
        """
        kind = config.rope_parameters["rope_type"]
        if kind == "default":
            width = config.head_dim if "head_dim" in config.to_dict() else None
            width = width or config.hidden_size // config.num_attention_heads
            exponents = torch.arange(0, width, 2, dtype=torch.float) / width
            return Rotary(1.0 / (config.rope_parameters["rope_theta"] ** exponents))
        if kind not in ("linear", "llama3"):
            raise ValueError(
                f"rope_type {kind!r} of {config.name_or_path} is not supported: "
                "expected default, linear or llama3"
            )
        inv_freq, _ = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
        return Rotary(inv_freq)

    def fill(self, row: PackedRow) -> None:
        """Set the row's cos and sin tables, float32 [T, 1, D]."""
        assert row.positions is not None
        inv_freq = self.inv_freq.to(row.positions.device)
        angles = row.positions[0].float()[:, None] * inv_freq[None]
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        row.cos, row.sin = angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of each head (Su et al. 2021, section 3.4.2) of x [T, heads, D]."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.to(x.dtype) + rotated * sin.to(x.dtype)


class PackedAttention(nn.Module):
    """Causal attention inside each sequence of a packed row.

    Sequences of similar length share one padded rectangle: right padding under a causal mask is
    never seen by a real token, so no mask is built and the fused kernel runs.
    """

    def __init__(self, config: Any, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedRow | None = None,
    ) -> Tensor:
        """Attend query [T, H, D] over key and value [T, G, D]; give [T, H, D]."""
        row = packed_seq_params
        assert row is not None and row.cos is not None and row.sin is not None
        assert row.inverse is not None
        query = apply_rotary(query, row.cos, row.sin)
        key = apply_rotary(key, row.cos, row.sin)
        repeat = query.shape[1] // key.shape[1]
        outputs = []
        for block in row.blocks:
            n, length = block.shape
            q, k, v = (
                x.index_select(0, block.index).view(n, length, x.shape[1], x.shape[2])
                for x in (query, key, value)
            )
            if repeat > 1:
                k, v = k.repeat_interleave(repeat, 2), v.repeat_interleave(repeat, 2)
            out = F.scaled_dot_product_attention(
                q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2),
                is_causal=True, scale=self.scale,
            )  # fmt: skip
            outputs.append(out.transpose(1, 2).reshape(n * length, query.shape[1], -1))
        return torch.cat(outputs).index_select(0, row.inverse)
