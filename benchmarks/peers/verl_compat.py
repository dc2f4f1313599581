"""What verl 0.9.1 lacks on this project's pins; its processes import it by `model.external_lib`.

mbridge 0.15.1 asks for a kind of model that Megatron-Core 0.19 has no more. And verl's FSDP engine
packs sequences and counts on flash-attn for the borders between them: where that package is
missing, torch's own copy of its kernels does it (`attn_implementation=torch_varlen`).
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.models.gpt.gpt_model import ModelType
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

if not hasattr(ModelType, "encoder_and_decoder"):
    ModelType.encoder_and_decoder = None  # mbridge compares with it only

_Cuts = tuple[Tensor, int]  # where sequences start, and the end; the longest of them
_last: tuple[Tensor, _Cuts] | None = None  # positions and theirs: the same for all layers


def _cuts(positions: Tensor) -> _Cuts:
    global _last
    if _last is None or _last[0] is not positions:
        flat = positions.reshape(-1)
        starts = torch.nonzero(flat == 0).reshape(-1)
        cuts = torch.cat([starts, starts.new_tensor([flat.numel()])]).to(torch.int32)
        _last = positions, (cuts, int(cuts.diff().max()))
    return _last[1]


def attend(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    position_ids: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attend causally within each sequence of one packed row: (1, heads, tokens, head size)."""
    if attention_mask is not None or position_ids is None or query.shape[0] != 1:
        raise ValueError("torch_varlen takes one row of packed sequences and their positions")
    cuts, longest = _cuts(position_ids)
    # Products under autocast have the type that the kernels want; rotation may have widened two.
    q, k, v = (tensor[0].transpose(0, 1).to(value.dtype) for tensor in (query, key, value))
    if not q.is_cuda:
        return _attend_on_cpu(q, k, v, cuts, scaling)[None], None
    causal = (-1, 0)
    out = varlen_attn(q, k, v, cuts, cuts, longest, longest, scale=scaling, window_size=causal)
    return out[None], None


def _attend_on_cpu(q: Tensor, k: Tensor, v: Tensor, cuts: Tensor, scale: float | None) -> Tensor:
    outs = []
    for start, end in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        parts = (tensor[start:end].transpose(0, 1)[None] for tensor in (q, k, v))
        out = torch.nn.functional.scaled_dot_product_attention(
            *parts, is_causal=True, scale=scale, enable_gqa=True
        )
        outs.append(out[0].transpose(0, 1))
    return torch.cat(outs)


AttentionInterface.register("torch_varlen", attend)
