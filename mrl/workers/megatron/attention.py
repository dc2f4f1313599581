"""Attention over packed rows: rotary positions, and all-to-all over context-parallel ranks.

T tokens of a row, t = T / cp of a rank, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.tensor_parallel.mappings import all_to_all
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from mrl.workers.megatron.rows import PackedRow


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
        starts = row.cu_seqlens_q.long()
        lengths = starts.diff()
        places = torch.arange(row.length, device=starts.device)
        positions = places - starts[:-1].repeat_interleave(lengths, output_size=row.length)
        angles = positions.float()[:, None] * self.inv_freq.to(starts.device)[None]
        angles = torch.cat((angles, angles), dim=-1)[:, None]
        row.cos, row.sin = angles.cos(), angles.sin()


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate halves of each head (Su et al. 2021, section 3.4.2) of x [T, heads, D]."""
    half = x.shape[-1] // 2
    rotated = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    return x * cos.to(x.dtype) + rotated * sin.to(x.dtype)


def to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give the whole row's tokens of this rank's heads: [t, n, D] to [T, n / cp, D].

    Ulysses (Jacobs et al. 2023, section 3.1): parts of the row go to the ranks of their heads.
    """
    cp, (tokens, heads, width) = group.size(), x.shape
    parts = x.view(tokens, cp, heads // cp, width).transpose(0, 1)
    received = all_to_all(group, parts.reshape(cp * tokens, heads // cp, width))
    return received.view(cp * tokens, heads // cp, width)


def to_tokens(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Give this rank's tokens of all heads: [T, n / cp, D] to [t, n, D], undoing `to_heads`."""
    cp, (tokens, heads, width) = group.size(), x.shape
    received = all_to_all(group, x.contiguous()).view(cp, tokens // cp, heads, width)
    return received.transpose(0, 1).reshape(tokens // cp, cp * heads, width)


def spread_groups(groups: int, cp: int, heads: int) -> int:
    """Count the key/value heads that give every one of cp ranks those of its query heads.

    G are enough where cp divides them, cp where G divides cp; otherwise each of the H query heads
    gets its own.
    """
    if groups % cp == 0:
        return groups
    return cp if cp % groups == 0 else heads


def spread_kv(x: Tensor, cp: int, heads: int) -> Tensor:
    """Repeat key/value heads [t, G, D] until there are `spread_groups` of them."""
    groups = x.shape[1]
    wanted = spread_groups(groups, cp, heads)
    return x if wanted == groups else x.repeat_interleave(wanted // groups, 1)


class PackedAttention(nn.Module):
    """Causal attention inside each sequence of a packed row.

    Sequences of similar length share one padded rectangle: right padding under a causal mask is
    never seen by a real token, so no mask is built and the fused kernel runs. Context-parallel
    ranks hold contiguous parts of the row and exchange them for shares of the heads.
    """

    def __init__(
        self,
        config: Any,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        cp = pg_collection.cp if pg_collection is not None else None
        self.group = cp if cp is not None and cp.size() > 1 else None

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
        """Attend query [t, H, D] over key and value [t, G, D]; give [t, H, D]."""
        row = packed_seq_params
        assert row is not None
        if self.group is None:
            return self._attend(query, key, value, row)
        cp, heads = self.group.size(), query.shape[1]
        key, value = (spread_kv(x, cp, heads) for x in (key, value))
        query, key, value = (to_heads(x, self.group) for x in (query, key, value))
        return to_tokens(self._attend(query, key, value, row), self.group)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> Tensor:
        """Attend over the whole row: query [T, n, D], key and value with a part of its heads."""
        assert row.cos is not None and row.sin is not None and row.inverse is not None
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
