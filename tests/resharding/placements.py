"""Toy placements of experts, and parameters filled from any layout by plain slicing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from mrl.resharding.layout import Box, Layout, Piece, TensorInfo, whole

EXPERT = "model.layers.0.mlp.experts.{}.{}_proj.weight"
ROUTER = "model.layers.0.mlp.gate.weight"
BIAS = "model.layers.0.mlp.gate.e_score_correction_bias"


def slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(start, stop) for start, stop in box)


def place(layout: Layout, values: Mapping[str, Tensor]) -> dict[int, dict[str, Tensor]]:
    """Make every rank's parameters as the layout's pieces say, zero where none is."""
    extents: dict[tuple[int, str], list[int]] = {}
    dtypes: dict[str, torch.dtype] = {}
    for piece in layout.pieces:
        dtypes[piece.param] = getattr(torch, layout.tensors[piece.tensor].dtype)
        for rank in piece.ranks:
            ends = extents.setdefault((rank, piece.param), [0] * len(piece.local))
            for dim, (_, stop) in enumerate(piece.local):
                ends[dim] = max(ends[dim], stop)
    params: dict[int, dict[str, Tensor]] = {}
    for (rank, param), shape in extents.items():
        params.setdefault(rank, {})[param] = torch.zeros(shape, dtype=dtypes[param])
    for piece in layout.pieces:
        for rank in piece.ranks:
            part = values[piece.tensor][slices(piece.box)]
            params[rank][piece.param][slices(piece.local)] = part.to(dtypes[piece.param])
    return params


def expert_tensors(experts: int, ffn: int, hidden: int, dtype: str) -> dict[str, TensorInfo]:
    tensors = {ROUTER: TensorInfo((experts, hidden), "float32")}
    tensors[BIAS] = TensorInfo((experts,), "float32")
    for expert in range(experts):
        tensors[EXPERT.format(expert, "gate")] = TensorInfo((ffn, hidden), dtype)
        tensors[EXPERT.format(expert, "up")] = TensorInfo((ffn, hidden), dtype)
        tensors[EXPERT.format(expert, "down")] = TensorInfo((hidden, ffn), dtype)
    return tensors


def expert_values(tensors: Mapping[str, TensorInfo], seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(info.shape, generator=generator).to(getattr(torch, info.dtype))
        for name, info in tensors.items()
    }


def _expert(
    e: int,
    cut: tuple[int, int],
    ffn: int,
    hidden: int,
    ranks: Sequence[int],
    at: int,
    names: tuple[str, str],
) -> Iterator[Piece]:
    """Place [gate; up] and down of an expert's feed-forward rows `cut`, `at` experts down."""
    low, high = cut
    count, h = high - low, (0, hidden)
    up_at = 2 * count * at
    fc1, fc2 = names
    ranks = tuple(ranks)
    yield Piece(EXPERT.format(e, "gate"), (cut, h), ranks, fc1, ((up_at, up_at + count), h))
    yield Piece(
        EXPERT.format(e, "up"), (cut, h), ranks, fc1, ((up_at + count, up_at + 2 * count), h)
    )
    rows = (hidden * at, hidden * (at + 1))
    yield Piece(EXPERT.format(e, "down"), (h, cut), ranks, fc2, (rows, (0, count)))


def trained_experts(
    tensors: Mapping[str, TensorInfo], ep: int, etp: int, replicas: int = 1, first_rank: int = 0
) -> Layout:
    """Place experts as Megatron does: ETP fastest, then EP, then replicas; one parameter each."""
    (experts, hidden), ffn = tensors[ROUTER].shape, tensors[EXPERT.format(0, "up")].shape[0]
    ranks = range(first_rank, first_rank + ep * etp * replicas)
    pieces = [
        Piece(
            name,
            whole(tensors[name].shape),
            tuple(ranks),
            f"router.{kind}",
            whole(tensors[name].shape),
        )
        for name, kind in ((ROUTER, "weight"), (BIAS, "expert_bias"))
    ]
    for e in range(experts):
        owner, j = divmod(e, experts // ep)
        for shard in range(etp):
            holders = ranks[owner * etp + shard :: ep * etp]
            cut = (shard * ffn // etp, (shard + 1) * ffn // etp)
            names = (f"experts.linear_fc1.weight{j}", f"experts.linear_fc2.weight{j}")
            pieces += _expert(e, cut, ffn, hidden, holders, 0, names)
    return Layout("megatron", tensors, tuple(pieces))


def served_experts(
    tensors: Mapping[str, TensorInfo], tp: int, ep: bool, replicas: int = 1, first_rank: int = 0
) -> Layout:
    """Place experts as vLLM does: stacked, cut over TP or dealt out whole."""
    (experts, hidden), ffn = tensors[ROUTER].shape, tensors[EXPERT.format(0, "up")].shape[0]
    ranks = range(first_rank, first_rank + tp * replicas)
    pieces = [
        Piece(name, whole(tensors[name].shape), tuple(ranks), name, whole(tensors[name].shape))
        for name in (ROUTER, BIAS)
    ]
    names = ("experts.w13_weight", "experts.w2_weight")
    for e in range(experts):
        for shard in range(tp):
            holders = ranks[shard::tp]
            if not ep:
                cut = (shard * ffn // tp, (shard + 1) * ffn // tp)
                pieces += _expert(e, cut, ffn, hidden, holders, e, names)
            elif e // (experts // tp) == shard:
                pieces += _expert(e, (0, ffn), ffn, hidden, holders, e % (experts // tp), names)
    return Layout("vllm", tensors, tuple(pieces))
